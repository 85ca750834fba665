"""The launcher of the backward, with its kernels stood in for by backward_kernels.py: does it give the gradients of autograd?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from backward_kernels import BETA_FLOOR, H200, OF_SEGMENTS, STEPS, Kernels, cotangents
from cases import BETAS, GATES, Case, arguments, relative_l2

from qla_jit import select
from qla_jit.kernel_templates.macros.segments import place_count
from qla_jit.ops import backward, fallback, operands, plan
from qla_jit.ops.inputs import CallInputs, check_inputs
from qla_jit.ops.kept import FromForward
from qla_jit.ops.results import WHOLE_SEQUENCES, Gradients, MidwayStates, Segments, SegmentStates

BASE = Case(H=2, HV=4, K=8, V=12, lengths=(70, 16, 1))
# Gates and their gradients are float32 between the kernels, everything else is float64 here.
BOUND = 1e-5
# After a reset of -1e4 a float32 sum of gates leaves later decays of its chunk with errors of 2e-4 (docs/maths.md, Exponents).
BOUND_RESET = 1e-3

CASES = [
    *(replace(BASE, gates=gates) for gates in GATES),
    *(replace(BASE, betas=betas, keys=keys) for betas in BETAS for keys in ("unit", "collinear")),
    *(replace(BASE, H=1, HV=HV) for HV in (1, 3, 8)),
    *(replace(BASE, lengths=lengths) for lengths in ((1,), (15,), (33,), (0, 20, 0), (0, 0, 40))),
    replace(BASE, tail=20),
    replace(BASE, lengths=(40, 40), packed=False),
    replace(BASE, initial_state=False),
    replace(BASE, state_v_first=True),
    replace(BASE, l2norm=True, keys="zero_rows"),
    replace(BASE, in_kernel=True),
    replace(BASE, in_kernel=True, betas="beta2", gate_dtype=torch.bfloat16, state_dtype=torch.bfloat16, l2norm=True),
]


def filled(x: torch.Tensor) -> torch.Tensor:
    return x.fill_(float("nan") if x.is_floating_point() else -99)


def launcher_of(kernels: Kernels, step: str, without: Sequence[str]) -> Callable[..., None]:
    def refused(*arguments: object) -> None:
        raise AssertionError(f"{step} is not to be launched")

    return refused if step in without else getattr(kernels, step)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Gradients]:
    """backward.backward with its kernels stood in for, and NaN in whatever it allocates."""
    empty, empty_like = torch.empty, torch.empty_like
    monkeypatch.setattr(torch, "empty", lambda *shape, **options: filled(empty(*shape, **options)))
    monkeypatch.setattr(torch, "empty_like", lambda x, **options: filled(empty_like(x, **options)))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(backward, "gpu_info", lambda device: H200)
    monkeypatch.setitem(plan.BETA_FLOORS, torch.float64, BETA_FLOOR)

    def run(
        inputs: CallInputs,
        do: torch.Tensor,
        dht: torch.Tensor | None,
        *,
        strategy: str = "chunked",
        chunk_size: int = 64,
        split: int | None = None,
        bands: int | None = None,
        Ab: torch.Tensor | None = None,
        segments: SegmentStates | None = None,
        midway: MidwayStates | None = None,
        without: Sequence[str] = (),
    ) -> Gradients:
        """without: kernels that must not be launched."""
        facts = inputs.facts._replace(chunk_size=chunk_size)
        stand_ins = Kernels(replace(inputs, facts=facts), strategy)
        launch = {step: launcher_of(stand_ins, step, without) for step in STEPS[strategy]}
        steps = dict.fromkeys(launch)
        kernels = backward.Kernels(select.Dispatch(strategy, steps, facts, split), launch, bands)
        monkeypatch.setattr(backward, "kernels_for", lambda inputs: kernels)
        return backward.backward(inputs, do, dht, FromForward(Ab, segments, midway))

    return run


# The chunks of the backward are its own: the call asks for 64.
@pytest.mark.parametrize(
    ("strategy", "chunk_size", "split"),
    [
        ("chunked", 32, None),
        ("chunked", 64, None),
        ("registers", 64, None),
        ("registers_split", 64, None),   # one segment for every sequence
        ("registers_split", 16, 1),
        ("registers_split", 16, 2),
    ],
    ids=["chunked-C32", "chunked-C64", "registers-C64", "split-C64-whole", "split-C16-L1", "split-C16-L2"],
)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_kernels_in_their_order_give_the_gradients_of_autograd(
    case: Case, strategy: str, chunk_size: int, split: int | None, run: Callable[..., Gradients]
) -> None:
    inputs = check_inputs(**arguments(case))
    do, dht = cotangents(inputs)
    expected = fallback.backward(inputs, do, dht)
    actual = run(inputs, do, dht, strategy=strategy, chunk_size=chunk_size, split=split)
    check(actual, expected, inputs, BOUND_RESET if case.gates in ("reset", "minus_inf") else BOUND)


BANDED = [
    BASE,
    *(replace(BASE, lengths=lengths) for lengths in ((1,), (0, 20, 0), (0, 0, 40), (16, 33, 100, 17))),
    replace(BASE, tail=20),
    replace(BASE, lengths=(40, 40), packed=False),
    replace(BASE, initial_state=False),
    replace(BASE, state_v_first=True),
]


@pytest.mark.parametrize(("strategy", "split"), [("registers", None), ("registers_split", 2), ("registers_split", 3)])
@pytest.mark.parametrize("bands", [2, 3, 5])
@pytest.mark.parametrize("case", BANDED, ids=str)
def test_bands_give_the_gradients_of_all_chunks_at_once(
    case: Case, bands: int, strategy: str, split: int | None, run: Callable[..., Gradients]
) -> None:
    inputs = check_inputs(**arguments(case))
    do, dht = cotangents(inputs)
    for cotangent in (dht, None):
        found = run(inputs, do, cotangent, strategy=strategy, chunk_size=16, split=split, bands=bands)
        check(found, fallback.backward(inputs, do, cotangent), inputs)


@pytest.mark.parametrize("strategy", plan.BACKWARD_STRATEGIES)
@pytest.mark.parametrize("scale", [-0.5, 0.0], ids=lambda scale: f"scale{scale}")
def test_scale_is_taken_as_given(scale: float, strategy: str, run: Callable[..., Gradients]) -> None:
    inputs = check_inputs(**arguments(BASE), scale=scale)
    do, dht = cotangents(inputs)
    check(run(inputs, do, dht, strategy=strategy), fallback.backward(inputs, do, dht), inputs)


def check(actual: Gradients, expected: Gradients, inputs: CallInputs, bound: float = BOUND) -> None:
    for name, exact, found in zip(Gradients._fields, expected, actual, strict=True):
        if exact is None:
            assert found is None, name
            continue
        assert found.dtype == getattr(inputs, name).dtype, name
        assert relative_l2(found, exact) < bound, name


@pytest.mark.parametrize(("strategy", "split"), [("registers", None), ("registers_split", 1)], ids=["registers", "split"])
@pytest.mark.parametrize("betas", ["random", "some_beta0"])
def test_inverses_of_the_forward_are_taken(betas: str, strategy: str, split: int | None, run: Callable[..., Gradients]) -> None:
    inputs = check_inputs(**arguments(replace(BASE, betas=betas)))
    do, dht = cotangents(inputs)
    Ab = torch.empty(operands.slots_of(inputs), BASE.HV, 64, 64, dtype=torch.float64)
    Kernels(inputs, strategy).chunk_inverse(inputs.k, inputs.beta, inputs.cu_seqlens, Ab)
    strided = Ab.mT.contiguous().mT
    for given in (Ab, strided):
        found = run(inputs, do, dht, strategy=strategy, split=split, Ab=given, without=["chunk_inverse"])
        for x, expected in zip(found, run(inputs, do, dht, strategy=strategy, split=split), strict=True):
            assert x is expected is None or torch.equal(x, expected)


@pytest.mark.parametrize(("strategy", "C"), [("chunked", 64), ("registers", 32), ("registers_split", 16)], ids=str)
def test_inverses_that_are_of_no_use_are_not_looked_at(strategy: str, C: int, run: Callable[..., Gradients]) -> None:
    inputs = check_inputs(**arguments(BASE))
    do, dht = cotangents(inputs)
    Ab = torch.full((operands.slots_of(inputs), BASE.HV, 64, 64), float("nan"), dtype=torch.float64)
    check(run(inputs, do, dht, strategy=strategy, chunk_size=C, Ab=Ab), fallback.backward(inputs, do, dht), inputs)


def segments_of_a_forward(inputs: CallInputs, L: int) -> SegmentStates:
    stand_ins = Kernels(inputs, "registers_split")
    launch = {step: getattr(stand_ins, step) for step in ("chunk_inverse", *OF_SEGMENTS)}
    segments = operands.planned_segments(launch, inputs, L)
    Ab = operands.chunk_inverses(launch, inputs, inputs.k, operands.slots_of(inputs), early=True)
    return operands.segment_states(launch, inputs, inputs.k, inputs.v, Ab, inputs.initial_state, segments)


@pytest.mark.parametrize("gates", ["mixed", "reset"])
def test_what_the_forward_found_out_about_segments_is_taken(gates: str, run: Callable[..., Gradients]) -> None:
    inputs = check_inputs(**arguments(replace(BASE, gates=gates)))
    do, dht = cotangents(inputs)
    for split in (1, 2, None):
        L = select.Dispatch("registers_split", {}, inputs.facts, split).segment_length(select.extents_of(inputs))
        found = run(
            inputs, do, dht, strategy="registers_split", split=split, segments=segments_of_a_forward(inputs, L),
            without=OF_SEGMENTS,
        )  # fmt: skip
        check(found, fallback.backward(inputs, do, dht), inputs, BOUND_RESET if gates == "reset" else BOUND)


@pytest.mark.parametrize("case", BANDED, ids=str)
@pytest.mark.parametrize(("strategy", "split"), [("registers", None), ("registers_split", 2), ("registers_split", 5)])
def test_the_first_of_two_bands_begins_with_what_the_forward_kept_midway(
    case: Case, strategy: str, split: int | None, run: Callable[..., Gradients]
) -> None:
    inputs = check_inputs(**arguments(case))
    do, dht = cotangents(inputs)
    L = split or WHOLE_SEQUENCES
    midway = midway_of_a_forward(inputs, L, chunk_size=16)
    options = dict(strategy=strategy, chunk_size=16, split=split, bands=2)
    check(run(inputs, do, dht, **options, midway=midway), fallback.backward(inputs, do, dht), inputs)
    for other in (MidwayStates(L + 1, midway.states), MidwayStates(L, midway.states[1:]), None):
        check(run(inputs, do, dht, **options, midway=other), fallback.backward(inputs, do, dht), inputs)
    wrong = run(inputs, do, dht, **options, midway=MidwayStates(L, 2 * midway.states))
    is_used = any(len(segment.chunks) > 1 for segment in Kernels(with_chunks_of(inputs, 16), strategy).segments(L))
    assert (relative_l2(wrong.q, fallback.backward(inputs, do, dht).q) > BOUND) is is_used


def with_chunks_of(inputs: CallInputs, C: int) -> CallInputs:
    return replace(inputs, facts=inputs.facts._replace(chunk_size=C))


def midway_of_a_forward(inputs: CallInputs, L: int, *, chunk_size: int) -> MidwayStates:
    inputs = with_chunks_of(inputs, chunk_size)
    facts, kernels, slots = inputs.facts, Kernels(inputs, "registers"), operands.slots_of(inputs)
    Ab = torch.empty(slots, facts.HV, chunk_size, chunk_size, dtype=torch.float64)
    kernels.chunk_inverse(inputs.k, inputs.beta, inputs.cu_seqlens, Ab)
    g_sum, A = kernels.gated(Ab, inputs.g, inputs.A_log, inputs.dt_bias)
    states = torch.empty(slots, facts.HV, facts.K, facts.V, dtype=torch.float64)
    v_new = torch.empty(slots, facts.HV, chunk_size, facts.V, dtype=torch.float64)
    kernels.state_scan(inputs.k, inputs.v, A, g_sum, None, inputs.initial_state, states, v_new, None)
    segments = list(kernels.segments(L))
    places = place_count(slots, inputs.N, L) if L else inputs.N
    found = torch.empty(places, facts.HV, facts.V, facts.K, dtype=torch.float64)
    for segment in segments:
        if len(segment.chunks) > 1:
            found[segment.place] = states[segment.chunks[len(segment.chunks) // 2][0]].mT
    return MidwayStates(L, found)


@pytest.mark.parametrize(("strategy", "split"), [("chunked", None), ("registers", None), ("registers_split", 2)], ids=str)
def test_segments_that_are_of_no_use_are_not_looked_at(
    strategy: str, split: int | None, run: Callable[..., Gradients]
) -> None:
    inputs = check_inputs(**arguments(BASE))
    do, dht = cotangents(inputs)
    nothing = SegmentStates(Segments(1, 0, None, None), None, None)
    found = run(inputs, do, dht, strategy=strategy, split=split, segments=nothing)
    check(found, fallback.backward(inputs, do, dht), inputs)


def test_without_a_gradient_of_the_final_state_none_is_made_up(run: Callable[..., Gradients]) -> None:
    inputs = check_inputs(**arguments(BASE) | {"output_final_state": False})
    do, _ = cotangents(inputs)
    check(run(inputs, do, None), fallback.backward(inputs, do, None), inputs)


def test_gradients_of_the_outputs_may_have_any_layout_and_dtype(run: Callable[..., Gradients]) -> None:
    inputs = check_inputs(**arguments(BASE))
    do, dht = cotangents(inputs)
    do, dht = do[:, :1, :, :1].expand_as(do), dht.float().mT.contiguous().mT
    assert not do.is_contiguous()
    assert not dht.is_contiguous()
    check(run(inputs, do.bfloat16(), dht), fallback.backward(inputs, do.bfloat16(), dht), inputs)


@pytest.mark.parametrize(
    "case", [replace(BASE, lengths=(0, 0)), replace(BASE, lengths=(0, 0), packed=False, state_dtype=torch.bfloat16)], ids=str
)
@pytest.mark.parametrize("with_dht", [True, False], ids=["dht", "no_dht"])
def test_without_tokens_the_gradient_of_the_state_passes(case: Case, with_dht: bool, run: Callable[..., Gradients]) -> None:
    inputs = check_inputs(**arguments(case))
    do, dht = cotangents(inputs)
    actual = run(inputs, do, dht if with_dht else None)
    state = inputs.initial_state
    assert torch.equal(actual.initial_state, dht.to(state.dtype) if with_dht else torch.zeros_like(state))
    assert torch.equal(actual.q, torch.zeros_like(inputs.q))
    assert torch.equal(actual.beta, torch.zeros_like(inputs.beta))
    assert actual.A_log is None
