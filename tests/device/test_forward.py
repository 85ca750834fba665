"""The forward on a GPU against the float64 recurrence, for every kind of problem that the templates cover."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from cases import GATES, RAGGED_LENGTHS, Case, arguments, fill_free_memory_with_nan, oracle, relative_l2
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import qla_jit
from qla_jit import kernel_cache, select
from qla_jit.device import gpu_info
from qla_jit.errors import QLAError, UnsupportedError
from qla_jit.ops.inputs import check_inputs
from qla_jit.ops.plan import strategies_for

pytestmark = pytest.mark.gpu

# 1.25 times FlashQLA's relative L2 error of o and of the state on the same input (benchmarks/results/h200/accuracy.json).
# beta = 2 reflects the state instead of shrinking it, and nearly collinear keys make the entries of the inverse as large as
# beta: there errors add up, for every library.
BOUNDS = (5.0e-3, 4.5e-3)
BOUNDS_BETA2 = (12.3e-3, 13.3e-3)
BOUNDS_COLLINEAR = (11.8e-3, 9.2e-3)

CHUNK_SIZES = (16, 32, 64)

QWEN = Case(H=2, HV=8, K=128, V=128, lengths=(200, 64, 1, 0, 447), dtype=torch.bfloat16)

# Each K and each V once, but for those of the last two cases; V = 512 is four blocks of the registers that hold a state, and
# (64, 64) half of one.
HEAD_DIMS = [(64, 256), (192, 96), (256, 64), (128, 512), (64, 64)]

# A kernel takes ten seconds of a core to build: what differs in sizes, gates or values alone has the kernels of QWEN, and every
# other case is there for more than one reason.
CASES = [
    *(replace(QWEN, gates=gates) for gates in GATES),
    *(replace(QWEN, betas=betas) for betas in ("beta0", "some_beta0", "beta1", "beta2")),
    replace(QWEN, keys="collinear"),
    replace(QWEN, keys="zero_rows", l2norm=True),
    *(replace(QWEN, lengths=lengths) for lengths in RAGGED_LENGTHS),
    replace(QWEN, tail=100),
    replace(QWEN, lengths=(300, 300, 300), packed=False),
    replace(QWEN, lengths=(17,), packed=False),
    replace(QWEN, H=1, HV=8, initial_state=False, gate_dtype=torch.float16),
    replace(
        QWEN, HV=6, in_kernel=True, betas="beta2", gate_dtype=torch.bfloat16, state_dtype=torch.bfloat16, state_v_first=True
    ),
    replace(QWEN, H=16, HV=64),
    replace(QWEN, dtype=torch.float16),
    replace(QWEN, in_kernel=True),
    *(replace(QWEN, K=K, V=V, lengths=(65, 130), state_dtype=torch.float16) for K, V in HEAD_DIMS),
    replace(QWEN, K=96, V=192, H=3, HV=3, in_kernel=True, betas="beta2", state_v_first=True, l2norm=True, tail=100),
    replace(QWEN, K=96, V=192, H=3, HV=3, lengths=(300, 300), packed=False),
    replace(QWEN, K=256, V=512, H=2, HV=2, dtype=torch.float16, packed=False, lengths=(190, 190), l2norm=True),
]


@pytest.fixture(scope="module", autouse=True)
def compiled_together() -> None:
    """Build the kernels of all cases in one parallel batch; one that fails is reported by the test that needs it."""
    requests = []
    calls = [arguments(case, device="cuda") for case in CASES]
    calls += [calls[0] | {"chunk_size": C} for C in CHUNK_SIZES] + [calls[0] | {"cu_seqlens": calls[0]["cu_seqlens"].long()}]
    for call in calls:
        facts = check_inputs(**call).facts
        arch = gpu_info(facts.device).arch
        for strategy in strategies_for(facts, arch):
            with select.override(strategy.name):
                requests += select.choose(facts, arch).requests.values()
    with contextlib.suppress(QLAError):
        kernel_cache.get(list(dict.fromkeys(requests)))


def strategies_of(case: Case) -> list[str]:
    hopper = case.dtype == torch.bfloat16 and case.K <= 128 and case.V % 64 == 0
    return ["chunked", "fused", "fused_halves", "split"] if hopper else ["chunked"]


# Segments of 4 chunks: most of the lengths here then have one boundary or more.
SPLITS = {"chunked": None, "fused": None, "fused_halves": None, "split": 4}


@pytest.fixture(params=SPLITS)
def strategy(request: pytest.FixtureRequest) -> Iterator[str]:
    """The strategy that calls in the test are computed with."""
    with select.override(request.param, split=SPLITS[request.param]):
        yield request.param


def bounds_of(case: Case) -> tuple[float, float]:
    if case.betas == "beta2":
        return BOUNDS_BETA2
    return BOUNDS_COLLINEAR if case.keys == "collinear" else BOUNDS


@pytest.mark.parametrize(("name", "case"), [(name, case) for case in CASES for name in strategies_of(case)], ids=str)
def test_forward_matches_the_float64_recurrence(name: str, case: Case) -> None:
    call = arguments(case, device="cuda")
    fill_free_memory_with_nan()
    with select.override(name, split=SPLITS[name]):
        o, final_state = qla_jit.chunk_gated_delta_rule(**call)
    expected_o, expected_state = oracle(call, by_chunk=True)
    o_bound, state_bound = bounds_of(case)
    assert o.dtype == case.dtype
    assert final_state.dtype == torch.float32
    assert relative_l2(o, expected_o) <= o_bound
    assert relative_l2(final_state, expected_state) <= state_bound


@pytest.mark.parametrize("chunk_size", CHUNK_SIZES, ids=lambda C: f"C{C}")
def test_chunk_size_changes_rounding_only(chunk_size: int) -> None:
    call = arguments(QWEN, device="cuda")
    o, final_state = qla_jit.chunk_gated_delta_rule(**call, chunk_size=chunk_size)
    expected_o, expected_state = oracle(call)
    assert relative_l2(o, expected_o) <= BOUNDS[0]
    assert relative_l2(final_state, expected_state) <= BOUNDS[1]


@pytest.mark.parametrize("scale", [0.0, 1.0, -0.5, None], ids=lambda scale: f"scale{scale}")
def test_scale_is_taken_as_given(strategy: str, scale: float | None) -> None:
    call = arguments(replace(QWEN, lengths=(130,)), device="cuda")
    o, _ = qla_jit.chunk_gated_delta_rule(**call, scale=scale)
    assert relative_l2(o, oracle(call | {"scale": scale})[0]) <= BOUNDS[0]


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
def test_repeated_launches_agree_to_the_bit(strategy: str, index_dtype: torch.dtype) -> None:
    call = arguments(replace(QWEN, lengths=(1000, 64, 7, 2000) * 4), device="cuda")
    call["cu_seqlens"] = call["cu_seqlens"].to(index_dtype)
    other = torch.randn(2048, 2048, device="cuda")
    runs = []
    for _ in range(8):
        fill_free_memory_with_nan()
        runs.append(qla_jit.chunk_gated_delta_rule(**call))
        other = torch.tanh(other @ other)              # other work between the launches
    for o, final_state in runs[1:]:
        assert torch.equal(o, runs[0][0])
        assert torch.equal(final_state, runs[0][1])


def test_calls_right_behind_one_another_agree_to_the_bit(strategy: str) -> None:
    """All that the second reads is in L2: loads come as fast as they ever do, and what is told free too early is overwritten."""
    call = arguments(replace(QWEN, lengths=(8192,)), device="cuda")
    first, _ = qla_jit.chunk_gated_delta_rule(**call)
    different = 0
    for _ in range(200):
        qla_jit.chunk_gated_delta_rule(**call)
        o, _ = qla_jit.chunk_gated_delta_rule(**call)
        different += not torch.equal(o, first)
    assert different == 0


def test_a_sequence_does_not_see_its_neighbours(strategy: str) -> None:
    call = arguments(replace(QWEN, lengths=(70, 130, 90), tail=50), device="cuda")
    o, final_state = qla_jit.chunk_gated_delta_rule(**call)
    poisoned = dict(call)
    for name in ("q", "k", "v", "g", "beta"):
        poisoned[name] = call[name].clone()
        poisoned[name][:, 70:200] = float("nan")       # the middle sequence
        poisoned[name][:, 290:] = float("nan")         # behind the last one
    poisoned_o, poisoned_state = qla_jit.chunk_gated_delta_rule(**poisoned)
    for tokens in (slice(0, 70), slice(200, 290)):
        assert torch.equal(poisoned_o[:, tokens], o[:, tokens])
    assert torch.equal(poisoned_state[[0, 2]], final_state[[0, 2]])
    assert poisoned_o[:, 70:200].isnan().any()         # a NaN stays visible where it belongs
    assert (poisoned_o[:, 290:] == 0).all()


def test_tensors_may_begin_anywhere_in_their_storage(strategy: str) -> None:
    call = arguments(replace(QWEN, lengths=(100,)), device="cuda")
    o, final_state = qla_jit.chunk_gated_delta_rule(**call)
    for name in ("q", "k", "v", "g", "beta", "initial_state"):
        storage = torch.empty(call[name].numel() + 1, dtype=call[name].dtype, device="cuda")
        call[name] = storage[1:].view_as(call[name]).copy_(call[name])
        assert call[name].is_contiguous()
        assert call[name].data_ptr() % 16
    shifted_o, shifted_state = qla_jit.chunk_gated_delta_rule(**call)
    assert torch.equal(shifted_o, o)
    assert torch.equal(shifted_state, final_state)


def test_equal_lengths_agree_with_their_packed_form(strategy: str) -> None:
    call = arguments(replace(QWEN, lengths=(129, 129), packed=False), device="cuda")
    o, final_state = qla_jit.chunk_gated_delta_rule(**call)
    packed = {name: x.flatten(0, 1)[None] for name, x in call.items() if name in ("q", "k", "v", "g", "beta")}
    cu_seqlens = torch.tensor([0, 129, 258], device="cuda")
    packed_o, packed_state = qla_jit.chunk_gated_delta_rule(**call | packed | {"cu_seqlens": cu_seqlens})
    assert torch.equal(packed_o.view_as(o), o)
    assert torch.equal(packed_state, final_state)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])       # one override for all examples is what is meant
@given(lengths=st.lists(st.integers(0, 200), min_size=1, max_size=12))
def test_ragged_lengths_match_the_recurrence(strategy: str, lengths: list[int]) -> None:
    call = arguments(replace(QWEN, lengths=tuple(lengths)), device="cuda")
    o, final_state = qla_jit.chunk_gated_delta_rule(**call)
    expected_o, expected_state = oracle(call, by_chunk=True)
    assert o.shape == expected_o.shape
    # Few tokens have few roundings to average over: the bound holds for the norm of many, 1.5 times it for these.
    assert relative_l2(o, expected_o) <= 1.5 * BOUNDS[0]
    assert relative_l2(final_state, expected_state) <= 1.5 * BOUNDS[1]


def test_no_extent_compiles_again(strategy: str) -> None:
    qla_jit.chunk_gated_delta_rule(**arguments(QWEN, device="cuda"))
    before = kernel_cache.stats().compiles
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        N = int(torch.randint(1, 20, (), generator=generator))
        lengths = torch.randint(0, 300, (N,), generator=generator).tolist()
        qla_jit.chunk_gated_delta_rule(**arguments(replace(QWEN, lengths=tuple(lengths)), device="cuda"))
    torch.cuda.synchronize()
    assert kernel_cache.stats().compiles == before


def test_no_extent_compiles_again_where_the_strategy_is_chosen() -> None:
    qla_jit.chunk_gated_delta_rule(**arguments(replace(QWEN, lengths=(64,)), device="cuda"))
    before = kernel_cache.stats().compiles
    for lengths in ((4096,), (64,) * 64, (16384,), (1, 5000), (128, 128)):       # whole sequences for some, segments for others
        qla_jit.chunk_gated_delta_rule(**arguments(replace(QWEN, lengths=lengths), device="cuda"))
    assert kernel_cache.stats().compiles == before


def test_a_call_is_captured_by_a_cuda_graph(strategy: str) -> None:
    call = arguments(QWEN, device="cuda")
    o, final_state = qla_jit.chunk_gated_delta_rule(**call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        graph_o, graph_state = qla_jit.chunk_gated_delta_rule(**call)
    graph_o.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(graph_o, o)
    assert torch.equal(graph_state, final_state)


def test_a_call_runs_on_the_current_stream(strategy: str) -> None:
    call = arguments(replace(QWEN, H=16, HV=64, lengths=(2000,)), device="cuda")
    expected = qla_jit.chunk_gated_delta_rule(**call)[0]
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    v = call["v"].clone()
    call["v"].zero_()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)                  # about 10 ms: a launch elsewhere would read zeros
        call["v"].copy_(v)
        o = qla_jit.chunk_gated_delta_rule(**call)[0]
    stream.synchronize()
    assert torch.equal(o, expected)


@pytest.mark.parametrize("split", [1, 2, 16, 1000, None], ids=lambda L: f"L{L}")
def test_segment_length_changes_rounding_only(split: int | None) -> None:
    # Heads that forget within a chunk, within a segment, and never, beside long, short and empty sequences.
    call = arguments(replace(QWEN, H=2, HV=8, lengths=(2500, 64, 0, 700, 1), gates="mixed"), device="cuda")
    call["g"][..., 1::4] *= 20
    with select.override("split", split=split):
        o, final_state = qla_jit.chunk_gated_delta_rule(**call)
    expected_o, expected_state = oracle(call, by_chunk=True)
    assert relative_l2(o, expected_o) <= BOUNDS[0]
    assert relative_l2(final_state, expected_state) <= BOUNDS[1]


@pytest.mark.parametrize(
    ("H", "HV", "K", "V", "T"),
    [(32, 32, 128, 128, 2**19 + 64), (4, 64, 256, 256, 32768)],      # q beyond 2^31 elements; chunk states beyond
    ids=["q_elements", "state_elements"],
)
def test_offsets_beyond_2_to_the_31(H: int, HV: int, K: int, V: int, T: int) -> None:
    assert max(T * H * K, T // 64 * HV * K * V) >= 2**31
    last = 257
    g = torch.Generator(device="cuda").manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=g)

    tokens = T + last
    q, k, v = random(1, tokens, H, K), random(1, tokens, H, K), random(1, tokens, HV, V)
    k.mul_(K**-0.5)
    gates, beta = -random(1, tokens, HV).abs(), random(1, tokens, HV).sigmoid()
    cu_seqlens = torch.tensor([0, T, tokens], device="cuda")
    o, final_state = qla_jit.chunk_gated_delta_rule(q, k, v, gates, beta, cu_seqlens=cu_seqlens, output_final_state=True)
    alone = [x[:, T:].contiguous() for x in (q, k, v, gates, beta)]
    alone_o, alone_state = qla_jit.chunk_gated_delta_rule(*alone, cu_seqlens=cu_seqlens[1:] - T, output_final_state=True)
    assert torch.equal(o[:, T:], alone_o)
    assert torch.equal(final_state[1:], alone_state)


def test_uncovered_head_dims_say_what_is_covered() -> None:
    call = arguments(replace(QWEN, K=80), device="cuda")
    with pytest.raises(UnsupportedError, match=r"K=80.*\(64, 96, 128, 192, 256\)"):
        qla_jit.chunk_gated_delta_rule(**call)


@pytest.mark.parametrize("lengths", [(0,), (0, 0, 0)], ids=str)
def test_no_tokens_pass_the_state_through(lengths: tuple[int, ...]) -> None:
    call = arguments(replace(QWEN, lengths=lengths), device="cuda")
    o, final_state = qla_jit.chunk_gated_delta_rule(**call)
    assert o.shape[1] == 0
    assert torch.equal(final_state, call["initial_state"].float())
