"""The gradients on a GPU against float64 autograd of the reference, for every kind of problem that the templates cover."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from cases import GATES, RAGGED_LENGTHS, Case, arguments, fill_free_memory_with_nan, oracle, relative_l2

import qla_jit
from qla_jit import kernel_cache, once, select
from qla_jit.compiler import CompileRequest
from qla_jit.device import gpu_info
from qla_jit.errors import QLAError
from qla_jit.kernel_templates.arch import SM90A
from qla_jit.ops import backward, plan
from qla_jit.ops.inputs import CHUNK_SIZES, check_inputs
from qla_jit.ops.results import Gradients

pytestmark = pytest.mark.gpu

# Relative L2 error of each gradient: 1.25 times the smaller of FlashQLA's and FLA's. Of dg, that on Qwen's gates: as with them,
# its terms cancel where a head hardly forgets, and every set of gates here has such heads.
BOUNDS = {"q": 4.75e-3, "k": 6.5e-3, "v": 5.0e-3, "g": 6.9e-3, "beta": 4.9e-3, "initial_state": 2.9e-3}
# Sums of dg, times something, over all tokens: these may cancel, so errors are told over the norm of what is added up, which is
# at least that of the gradient of the logits. Half as much again as for dg itself: neighbouring tokens share operands.
# Those of A_log are those of dt_bias times softplus over sigmoid, about 2.
BOUNDS |= {"A_log": 20e-3, "dt_bias": 10e-3}
SUMS = ("A_log", "dt_bias")
# beta = 1 erases wholly: V_new and dW are small differences of what was there and what comes. Both strategies have 5.0e-3.
BOUNDS_BETA1 = BOUNDS | {"beta": 5.5e-3}
# beta = 2 reflects the state and its gradient instead of shrinking them: errors add up, as in the forward (12.3e-3 and 13.3e-3).
BOUNDS_BETA2 = {name: 2.5 * bound for name, bound in BOUNDS.items()} | {"g": 15e-3, "initial_state": 9e-3}
# Nearly collinear keys make the entries of the inverse as large as beta; what passes through it has errors as o has.
BOUNDS_COLLINEAR = BOUNDS | {"q": 12e-3, "v": 18e-3, "beta": 19e-3}
# Unit rows are rounded to bf16, where the oracle keeps them: one rounding more of every operand, which dg sees twice.
BOUNDS_L2NORM = {name: 1.25 * bound for name, bound in BOUNDS.items()} | {"g": 11e-3}
# Where zeros are exact, as dk and dv for beta = 0: the error over the norm of do. beta's floor of 2^-14 in fp16 is what is seen.
BOUND_OF_ZERO = 1e-3
# Gates of -21 a token leave 1e-9 of terms near 1 that cancel: such a gradient is held to what fp32 sums hold, over do's norm.
NEGLIGIBLE = 1e-7
# With the gates of IN_KERNEL only the first tokens of a sequence reach its initial state, and few tokens have few roundings to
# average over; segments add a product in tf32 each, the more the shorter they are (5.8e-3 for chunks of their own, 4.0e-3 else).
BOUND_OF_SPLIT_INITIAL_STATE = 6.5e-3
# Few tokens have few roundings to average over: dg of one sequence of 129 has 7.8e-3 by `chunked` and 10.0e-3 by `registers`.
FEW_TOKENS, FEW_TOKENS_FACTOR = 160, 1.5

BASE = Case(H=2, HV=8, K=128, V=128, lengths=(200, 64, 1, 0, 447), dtype=torch.bfloat16)

IN_KERNEL = replace(BASE, in_kernel=True, l2norm=True)
NO_STATE = replace(BASE, H=1, HV=8, initial_state=False)

# Each K and each V once, but for those of the last two cases; V = 256 and 512 are two and four blocks of the registers that hold
# a state.
HEAD_DIMS = [(64, 64), (192, 96), (128, 256), (128, 512)]

# A kernel takes ten seconds of a core to build: what differs in sizes, gates or values alone has the kernels of BASE, and every
# other case is there for more than one reason.
CASES = [
    *(replace(BASE, gates=gates) for gates in GATES),
    *(replace(BASE, betas=betas) for betas in ("beta0", "beta1", "beta2")),
    *(replace(BASE, keys="collinear", gates=gates) for gates in ("mixed", "open")),
    *(replace(BASE, lengths=lengths) for lengths in RAGGED_LENGTHS),
    replace(BASE, tail=100),
    replace(BASE, keys="zero_rows", l2norm=True),
    replace(IN_KERNEL, lengths=(17,), packed=False),
    replace(IN_KERNEL, lengths=(300, 300, 300), packed=False),
    NO_STATE,
    replace(BASE, H=2, HV=6, in_kernel=True, gate_dtype=torch.bfloat16, state_dtype=torch.bfloat16, state_v_first=True),
    replace(IN_KERNEL, betas="beta2"),
    replace(BASE, dtype=torch.float16),
    replace(BASE, dtype=torch.float16, betas="beta0"),
    *(replace(BASE, K=K, V=V, lengths=(65, 130)) for K, V in HEAD_DIMS),
    replace(BASE, K=96, V=192, H=3, HV=3, in_kernel=True, betas="beta2", state_v_first=True, l2norm=True),
    replace(BASE, K=256, V=512, H=2, HV=2, dtype=torch.float16, packed=False, lengths=(190, 190), l2norm=True),
]

# Of 18 chunks and fewer: segments of 1, 4 and 16 chunks end with ragged ones, short ones and ones that no sequence has.
SEGMENTED = replace(BASE, lengths=(1100, 64, 1, 0, 447), tail=100)
SPLIT_CASES = [
    SEGMENTED,
    replace(SEGMENTED, gates="qwen"),    # heads that forget within a chunk beside one that never does
    replace(SEGMENTED, gates="reset"),
    replace(IN_KERNEL, lengths=(1100, 1100), packed=False),
    replace(SEGMENTED, V=256, initial_state=False, state_v_first=True),
]

BANDED_CASES = [SEGMENTED, replace(SEGMENTED, gates="reset"), replace(IN_KERNEL, lengths=(1100, 1100), packed=False)]

# The forward that goes with a strategy of the backward. Without one in force, the first call would build those of all sizes.
FORWARD = {"chunked": "chunked", "registers": "fused", "registers_split": "split"}


def strategies_of(case: Case) -> list[str]:
    hopper = case.dtype == torch.bfloat16 and case.K == 128 and case.V % 128 == 0
    return ["chunked", "registers"] if hopper else ["chunked"]


def on_hopper() -> bool:
    return gpu_info(torch.device("cuda", 0)).arch == SM90A


def usual_strategy() -> str:
    return "registers" if on_hopper() else "chunked"


@contextlib.contextmanager
def computed_by(strategy: str, split: int = 2, bands: int | None = None, *, forward_split: Any = ...) -> Iterator[None]:
    """split: chunks per segment, where the strategy has segments. bands: in which chunks go. forward_split: of the forward."""
    if strategy != "chunked" and not on_hopper():
        pytest.skip(f"{strategy} is written for Hopper")
    with select.override(
        FORWARD[strategy], backward_strategy=strategy, split=forward_split, backward_split=split, backward_bands=bands
    ):
        yield


@pytest.fixture(params=FORWARD)
def strategy(request: pytest.FixtureRequest) -> Iterator[str]:
    """The strategy that gradients in the test are computed with."""
    with computed_by(request.param):
        yield request.param


# Every pair of values of every two of these flags: the rows of an orthogonal array of strength 2.
FLAGS = ("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "state_v_first", "initial_state",
         "output_final_state", "packed")  # fmt: skip
FLAG_ROWS = [
    dict(zip(FLAGS, (a, b, c, a ^ b, a ^ c, b ^ c, a ^ b ^ c), strict=True)) for a, b, c in product((False, True), repeat=3)
]
# allow_neg_eigval doubles the sigmoid, so it needs one.
FLAG_CALLS = [(flags, neg) for flags in FLAG_ROWS for neg in (False, True) if flags["use_beta_sigmoid_in_kernel"] or not neg]


def call_with(flags: dict[str, bool], *, allow_neg_eigval: bool) -> dict[str, Any]:
    case = replace(
        BASE, lengths=(130, 130), in_kernel=True, gate_dtype=torch.float32, packed=flags["packed"],
        initial_state=flags["initial_state"], state_v_first=flags["state_v_first"], l2norm=flags["use_qk_l2norm_in_kernel"],
    )  # fmt: skip
    call = arguments(case, device="cuda")
    plain = arguments(replace(case, in_kernel=False), device="cuda")
    if not flags["use_gate_in_kernel"]:
        call |= {"g": plain["g"], "A_log": None, "dt_bias": None, "use_gate_in_kernel": False}
    if not flags["use_beta_sigmoid_in_kernel"]:
        call |= {"beta": plain["beta"], "use_beta_sigmoid_in_kernel": False}
    return call | {"output_final_state": flags["output_final_state"], "allow_neg_eigval": allow_neg_eigval}


def requests_of(call: dict[str, Any], strategy: str, *, forward: bool) -> list[CompileRequest]:
    facts = check_inputs(**call).facts
    arch = gpu_info(facts.device).arch
    with select.override(FORWARD[strategy], backward_strategy=strategy):
        gradients = select.choose_backward(facts, arch).requests.values()
        return [*gradients, *(select.choose(facts, arch).requests.values() if forward else ())]


@pytest.fixture(scope="module", autouse=True)
def compiled_together() -> None:
    """Build the kernels of all cases in one parallel batch; one that fails is reported by the test that needs it."""
    base, in_kernel = arguments(BASE, device="cuda"), arguments(IN_KERNEL, device="cuda")
    equal = arguments(replace(IN_KERNEL, lengths=(300, 300), packed=False), device="cuda")
    both = [base, base | {"output_final_state": False}, in_kernel, equal]
    wanted = [(arguments(case, device="cuda"), name, False) for case in CASES for name in strategies_of(case)]
    wanted += [(arguments(case, device="cuda"), "registers_split", False) for case in SPLIT_CASES]
    wanted += [(arguments(case, device="cuda"), name, True) for case in BANDED_CASES for name in ("registers", "registers_split")]
    wanted += [(base | {"cu_seqlens": base["cu_seqlens"].long()}, name, False) for name in FORWARD]
    wanted += [(call, name, True) for call in both for name in FORWARD]
    wanted += [(call_with(flags, allow_neg_eigval=neg), usual_strategy(), True) for flags, neg in FLAG_CALLS]
    requests = []
    for call, strategy, forward in wanted:
        with contextlib.suppress(QLAError):
            requests += requests_of(call, strategy, forward=forward)
    with contextlib.suppress(QLAError), pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "BACKWARD_CHUNK_SIZES", (32,))
        requests += requests_of(base, "chunked", forward=False)
    with contextlib.suppress(QLAError):
        kernel_cache.get(list(dict.fromkeys(requests)))


def bounds_of(case: Case) -> dict[str, float]:
    bounds = BOUNDS
    if case.betas == "beta2":
        bounds = BOUNDS_BETA2
    elif case.betas == "beta1":
        bounds = BOUNDS_BETA1
    elif case.keys == "collinear":
        bounds = BOUNDS_COLLINEAR
    elif case.l2norm:
        bounds = BOUNDS_L2NORM
    few = sum(case.lengths) < FEW_TOKENS
    return {name: bound * (FEW_TOKENS_FACTOR if few else 1) for name, bound in bounds.items()}


def leaves_of(call: dict[str, Any], dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    return {
        name: call[name].detach().to(dtype or call[name].dtype, copy=True).requires_grad_()
        for name in Gradients._fields
        if call.get(name) is not None
    }


def random_like(x: torch.Tensor, seed: int) -> torch.Tensor:
    generator = torch.Generator(device=x.device).manual_seed(seed)
    return torch.randn(x.shape, dtype=torch.float32, device=x.device, generator=generator).to(x.dtype)


def gradients(call: dict[str, Any], *, through: tuple[str, ...] = ("o", "state")) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The gradients by leaf for random gradients of the outputs, and that of o."""
    leaves = leaves_of(call)
    outputs = dict(zip(("o", "state"), qla_jit.chunk_gated_delta_rule(**call | leaves), strict=True))
    outputs = {name: x for name, x in outputs.items() if x is not None}
    cotangents = {name: random_like(x, seed) for seed, (name, x) in enumerate(outputs.items())}
    used = [name for name in outputs if name in through]
    torch.autograd.backward([outputs[name] for name in used], [cotangents[name] for name in used])
    return {name: leaf.grad for name, leaf in leaves.items()}, cotangents["o"]


def low_level(
    call: dict[str, Any], do: torch.Tensor, dht: torch.Tensor | None, **kept: object
) -> Gradients:
    arguments_ = {name: x for name, x in call.items() if name != "output_final_state"}
    return qla_jit.chunk_gated_delta_rule_bwd(**arguments_, A=None, do=do, dht=dht, **kept)


def cotangents(call: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Random gradients of o and of the final state, those of gradients() and expected_gradients()."""
    do = random_like(call["v"], seed=0)
    if not call["output_final_state"]:
        return do, None
    N = len(call["v"]) if call["cu_seqlens"] is None else len(call["cu_seqlens"]) - 1
    (K, (HV, V)) = call["k"].shape[3], call["v"].shape[2:]
    dims = (V, K) if call["state_v_first"] else (K, V)
    return do, random_like(torch.empty(N, HV, *dims, device=do.device), seed=1)


def gradients_alone(call: dict[str, Any]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """As gradients(), by the low-level half, which needs no forward."""
    do, dht = cotangents(call)
    found = low_level(call, do, dht)
    return {name: getattr(found, name) for name in Gradients._fields if call.get(name) is not None}, do


def expected_gradients(call: dict[str, Any], *, through: tuple[str, ...] = ("o", "state")) -> dict[str, torch.Tensor]:
    """As gradients(), of the reference in float64."""
    leaves = leaves_of(call, torch.float64)
    outputs = dict(zip(("o", "state"), oracle(call | leaves, by_chunk=True), strict=True))
    if not call["output_final_state"]:
        del outputs["state"]
    rounded = {"o": call["v"].dtype, "state": torch.float32}
    cotangents = {name: random_like(x.to(rounded[name]), seed).double() for seed, (name, x) in enumerate(outputs.items())}
    used = [name for name in outputs if name in through]
    found = torch.autograd.grad(
        [outputs[name] for name in used], list(leaves.values()), [cotangents[name] for name in used], materialize_grads=True
    )
    return dict(zip(leaves, found, strict=True))


def check(
    actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], do: torch.Tensor, bounds: dict[str, float]
) -> None:
    assert actual.keys() == expected.keys()
    errors = {}
    for name, exact in expected.items():
        assert actual[name].isfinite().all(), name
        error = relative_l2(actual[name], exact)
        if 0 < exact.norm() < NEGLIGIBLE * do.double().norm():
            errors[name] = (actual[name].double() - exact).norm().item() / do.double().norm().item() / NEGLIGIBLE
            continue
        if name in SUMS and exact.any():
            error *= exact.norm().item() / expected["g"].norm().item()
        errors[name] = error / bounds[name] if exact.any() else error / do.double().norm().item() / BOUND_OF_ZERO
    assert max(errors.values()) <= 1, {name: f"{share:.2f} of its bound" for name, share in errors.items()}


@pytest.mark.parametrize(("name", "case"), [(name, case) for case in CASES for name in strategies_of(case)], ids=str)
def test_gradients_match_float64_autograd(name: str, case: Case) -> None:
    call = arguments(case, device="cuda")
    fill_free_memory_with_nan()
    with computed_by(name):
        actual, do = gradients_alone(call)
    assert {name: x.dtype for name, x in actual.items()} == {name: call[name].dtype for name in actual}
    check(actual, expected_gradients(call), do, bounds_of(case))


@pytest.mark.parametrize("split", [1, 4, 16], ids=lambda L: f"L{L}")
@pytest.mark.parametrize("case", SPLIT_CASES, ids=str)
def test_gradients_of_segments_match_float64_autograd(case: Case, split: int) -> None:
    call = arguments(case, device="cuda")
    fill_free_memory_with_nan()
    with computed_by("registers_split", split):
        actual, do = gradients_alone(call)
    check(actual, expected_gradients(call), do, bounds_of(case) | {"initial_state": BOUND_OF_SPLIT_INITIAL_STATE})


@pytest.mark.parametrize("bands", [2, 3])
@pytest.mark.parametrize("name", ["registers", "registers_split"])
@pytest.mark.parametrize("case", BANDED_CASES, ids=str)
def test_gradients_of_bands_match_float64_autograd(case: Case, name: str, bands: int) -> None:
    call = arguments(case, device="cuda")
    fill_free_memory_with_nan()
    with computed_by(name, 4, bands):
        actual, do = gradients_alone(call)
    check(actual, expected_gradients(call), do, bounds_of(case) | {"initial_state": BOUND_OF_SPLIT_INITIAL_STATE})


@pytest.mark.parametrize("name", ["registers", "registers_split"])
@pytest.mark.parametrize("case", BANDED_CASES, ids=str)
def test_gradients_of_two_bands_from_the_states_midway_match_float64_autograd(case: Case, name: str) -> None:
    call = arguments(case, device="cuda")
    fill_free_memory_with_nan()
    with computed_by(name, 4, 2, forward_split=4):
        made = qla_jit.chunk_gated_delta_rule_fwd(**call)
        assert made.midway is not None
        actual, do = gradients(call)
        again = low_level(call, *cotangents(call), Ab=made.Ab, segments=made.segments, midway=made.midway)
    check(actual, expected_gradients(call), do, bounds_of(case) | {"initial_state": BOUND_OF_SPLIT_INITIAL_STATE})
    assert all(torch.equal(getattr(again, name), gradient) for name, gradient in actual.items())


@pytest.mark.parametrize("name", ["registers", "registers_split"])
def test_steps_of_two_bands_right_behind_one_another_agree_to_the_bit(name: str) -> None:
    call = arguments(replace(SEGMENTED, lengths=(4096, 70, 3000)), device="cuda")
    different = 0
    with computed_by(name, 8, 2, forward_split=8):
        first, _ = gradients(call)
        for _ in range(50):
            gradients(call)
            found, _ = gradients(call)
            different += not all(torch.equal(found[name], gradient) for name, gradient in first.items())
    assert different == 0


def told(value: Any) -> str:
    if isinstance(value, dict):
        return "-".join(name for name, given in value.items() if given) or "none"
    return "beta_below_2" if value else "beta_below_1"


@pytest.mark.parametrize(("flags", "allow_neg_eigval"), FLAG_CALLS, ids=told)
def test_flags_in_pairs(flags: dict[str, bool], allow_neg_eigval: bool) -> None:
    call = call_with(flags, allow_neg_eigval=allow_neg_eigval)
    with computed_by(usual_strategy()):
        actual, do = gradients(call)
    check(actual, expected_gradients(call), do, BOUNDS_BETA2 if allow_neg_eigval else BOUNDS_L2NORM)


@pytest.mark.parametrize("chunk_size", [C for C in CHUNK_SIZES if C != 64], ids=lambda C: f"C{C}")
def test_chunks_of_the_forward_have_no_part_in_gradients(chunk_size: int, strategy: str) -> None:
    call = arguments(BASE, device="cuda")
    expected, _ = gradients_alone(call)
    actual, _ = gradients_alone(call | {"chunk_size": chunk_size})
    assert all(torch.equal(actual[name], gradient) for name, gradient in expected.items())


def test_smaller_chunks_of_the_backward_change_rounding_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "BACKWARD_CHUNK_SIZES", (32,))
    monkeypatch.setattr(backward, "_ready", {})
    call = arguments(replace(BASE, tail=30), device="cuda")
    fill_free_memory_with_nan()
    actual, do = gradients_alone(call)
    check(actual, expected_gradients(call), do, BOUNDS)


@pytest.mark.parametrize("through", ["o", "state"])
@pytest.mark.parametrize("final_state", [True, False], ids=["final_state", "no_final_state"])
def test_one_output_alone_may_have_a_part_in_the_loss(through: str, final_state: bool, strategy: str) -> None:
    if through == "state" and not final_state:
        pytest.skip("there is no final state to go through")
    # Through o alone, dg of a head that never forgets is what is left of terms a hundred times as large.
    case = replace(BASE, gates="qwen")
    call = arguments(case, device="cuda") | {"output_final_state": final_state}
    actual, do = gradients(call, through=(through,))
    check(actual, expected_gradients(call, through=(through,)), do, BOUNDS | {"g": 15e-3})


@pytest.mark.parametrize("scale", [0.0, 1.0, -0.5], ids=lambda scale: f"scale{scale}")
def test_scale_is_taken_as_given(scale: float, strategy: str) -> None:
    call = arguments(replace(BASE, lengths=(130, 64)), device="cuda") | {"scale": scale}
    actual, do = gradients_alone(call)
    check(actual, expected_gradients(call), do, BOUNDS)


def test_the_first_gate_has_no_effect_without_an_initial_state(strategy: str) -> None:
    call = arguments(NO_STATE, device="cuda")
    dg = gradients_alone(call)[0]["g"]
    first = dg[0, call["cu_seqlens"][:-1][call["cu_seqlens"].diff() > 0].long()]
    assert first.abs().max() <= 5e-3 * dg.abs().max()            # the terms of which it is the sum have that much rounding
    reset = arguments(replace(NO_STATE, gates="minus_inf"), device="cuda")
    assert (gradients_alone(reset)[0]["g"][reset["g"] == float("-inf")] == 0).all()


def test_the_gradients_of_tokens_of_no_sequence_are_zero(strategy: str) -> None:
    call = arguments(replace(BASE, tail=100), device="cuda")
    end = int(call["cu_seqlens"][-1])
    expected, _ = gradients_alone(call)
    for name in ("q", "k", "v", "g", "beta"):
        call[name][:, end:] = float("nan")
    fill_free_memory_with_nan()
    actual, _ = gradients_alone(call)
    for name in ("q", "k", "v", "g", "beta"):
        assert (actual[name][:, end:] == 0).all(), name
        assert torch.equal(actual[name], expected[name]), name


@pytest.mark.parametrize("lengths", [(0,), (0, 0, 0)], ids=str)
def test_without_tokens_the_gradient_of_the_state_passes(lengths: tuple[int, ...]) -> None:
    call = arguments(replace(BASE, lengths=lengths), device="cuda")
    actual, _ = gradients(call)
    assert torch.equal(actual["initial_state"], random_like(call["initial_state"], seed=1))
    assert all((actual[name] == 0).all() for name in ("q", "k", "v", "g", "beta"))


def test_the_low_level_half_gives_the_same_bits_for_any_layout_of_do(strategy: str) -> None:
    call = arguments(IN_KERNEL, device="cuda")
    expected, _ = gradients(call)
    do, dht = cotangents(call)
    strided = do.transpose(1, 2).contiguous().transpose(1, 2)
    assert not strided.is_contiguous()
    for x in (do, strided):
        actual = low_level(call, x, dht)
        assert all(torch.equal(getattr(actual, name), gradient) for name, gradient in expected.items())


@pytest.mark.parametrize("case", [BASE, IN_KERNEL], ids=str)
def test_what_the_forward_made_gives_the_same_bits(case: Case, strategy: str) -> None:
    call = arguments(case, device="cuda")
    do, dht = cotangents(call)
    fill_free_memory_with_nan()
    made = qla_jit.chunk_gated_delta_rule_fwd(**call)
    assert (made.Ab is None) == (strategy == "chunked")
    assert (made.segments is None) == (strategy != "registers_split")
    found = low_level(call, do, dht, Ab=made.Ab, segments=made.segments)
    for x, expected in zip(found, low_level(call, do, dht), strict=True):
        assert x is expected is None or torch.equal(x, expected)


def test_a_second_backward_of_a_graph_gives_the_same_bits(strategy: str) -> None:
    call = arguments(BASE, device="cuda")
    leaves = leaves_of(call)
    o, _ = qla_jit.chunk_gated_delta_rule(**call | leaves)
    first, second = (torch.autograd.grad(o, list(leaves.values()), random_like(o, seed=0), retain_graph=True) for _ in range(2))
    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("launches", [1000])
def test_repeated_launches_agree_to_the_bit(index_dtype: torch.dtype, launches: int, strategy: str) -> None:
    call = arguments(replace(BASE, lengths=(1000, 64, 7, 500) * 4), device="cuda")
    call["cu_seqlens"] = call["cu_seqlens"].to(index_dtype)
    do, dht = cotangents(call)
    first = [x for x in low_level(call, do, dht) if x is not None]
    other, differences = torch.randn(1024, 1024, device="cuda"), torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(launches):
        for expected, actual in zip(first, (x for x in low_level(call, do, dht) if x is not None), strict=True):
            differences += (expected != actual).sum()
        other = torch.tanh(other @ other)              # other work between the launches
    assert differences.item() == 0


def test_calls_right_behind_one_another_agree_to_the_bit(strategy: str) -> None:
    call = arguments(replace(BASE, lengths=(4096,)), device="cuda")
    do, dht = cotangents(call)
    first, different = [x for x in low_level(call, do, dht) if x is not None], 0
    for _ in range(100):
        low_level(call, do, dht)
        found = [x for x in low_level(call, do, dht) if x is not None]
        different += not all(map(torch.equal, found, first))
    assert different == 0


@pytest.mark.parametrize("case", [BASE, replace(IN_KERNEL, lengths=(300, 300), packed=False)], ids=str)
def test_a_training_step_is_captured_by_a_cuda_graph(case: Case, strategy: str) -> None:
    call = arguments(case, device="cuda")
    leaves = leaves_of(call)
    do, dht = cotangents(call)

    def step() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(qla_jit.chunk_gated_delta_rule(**call | leaves), list(leaves.values()), [do, dht])

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        expected = step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for gradient in captured:
        gradient.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(*pair) for pair in zip(captured, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_changes_nothing(dtype: torch.dtype, strategy: str) -> None:
    call = arguments(IN_KERNEL, device="cuda")
    expected, _ = gradients(call)
    with torch.autocast("cuda", dtype=dtype):
        actual, _ = gradients(call)
    for name, gradient in expected.items():
        assert torch.equal(actual[name], gradient), name


def test_a_second_derivative_is_refused() -> None:
    call = arguments(replace(BASE, lengths=(64,)), device="cuda")
    leaves = leaves_of(call)
    o, _ = qla_jit.chunk_gated_delta_rule(**call | leaves)
    (dq,) = torch.autograd.grad(o.float().square().sum(), leaves["q"], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dq.float().sum().backward()


def test_no_later_step_compiles() -> None:
    gradients(arguments(BASE, device="cuda"))
    before = kernel_cache.stats().compiles
    for lengths in ((4096,), (64,) * 64, (32768,), (1, 5000)):
        gradients(arguments(replace(BASE, lengths=lengths), device="cuda"))
    if on_hopper():
        chosen_here = plan.BACKWARD_STRATEGIES.keys() - {"chunked"}
        assert {kernels.dispatch.strategy for kernels in backward.resolved().values()} >= chosen_here
    assert kernel_cache.stats().compiles == before


def test_a_call_whose_gradients_no_kernel_covers_takes_the_reference_in_both_directions() -> None:
    once._said.clear()                   # or the warning may have been given before
    call = arguments(replace(BASE, K=80, H=1, HV=2, lengths=(70,)), device="cuda")
    with pytest.warns(UserWarning, match="PyTorch reference"):
        actual, do = gradients(call)
    check(actual, expected_gradients(call), do, BOUNDS)
