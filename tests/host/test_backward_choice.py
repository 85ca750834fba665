"""Which kernels the gradients of a call get, what those are given and when it is let go of, and when they are compiled."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import records
import torch
from backward_kernels import GRADIENTS, H200, OF_SEGMENTS, SCANS, STEPS, cotangents
from cases import Case, arguments
from records import DEFAULT, WIDE, entry

from qla_jit import kernel_cache, select
from qla_jit.compiler import CompileRequest
from qla_jit.errors import InvalidConfigError, KernelNotCachedError, UnsupportedError
from qla_jit.kernel_templates import state_scan, warpgroup_gradients
from qla_jit.kernel_templates.arch import ARCHES, SM90A, Arch
from qla_jit.kernel_templates.macros.segments import place_count
from qla_jit.models import models
from qla_jit.ops import autograd, backward, operands, pipeline, plan
from qla_jit.ops.inputs import CHUNK_SIZES, CallFacts, CallInputs, check_inputs
from qla_jit.ops.kept import FromForward, Wanted
from qla_jit.ops.results import WHOLE_SEQUENCES, ForwardResult, MidwayStates, Segments, SegmentStates
from qla_jit.ops.splits import Sizes, best_backward_split, forward_us, split_backward_us, split_us, whole_backward_us
from qla_jit.tuning_records import Problem, save_directory


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[list[CompileRequest]]:
    """An H200 by name; a kernel is its request. What was asked for at once."""
    requests: list[list[CompileRequest]] = []

    def get(batch):
        requests.append(list(batch))
        return [SimpleNamespace(launch=request) for request in batch]

    for module in (backward, pipeline):
        monkeypatch.setattr(module, "gpu_info", lambda device: H200)
        monkeypatch.setattr(module, "_ready", {})
    monkeypatch.setattr(kernel_cache, "get", get)
    return requests


def call(**changes: object) -> CallInputs:
    case = Case(**{"H": 2, "HV": 8, "K": 128, "V": 128, "lengths": (70,), "dtype": torch.bfloat16} | changes)
    return check_inputs(**arguments(case))


def long_call(HV: int, chunks: int, sequences: int = 1, **flags: object) -> CallInputs:
    """Nothing touches its memory."""
    q, v = (torch.empty(sequences, 64 * chunks, heads, 128, dtype=torch.bfloat16) for heads in (HV // 2, HV))
    g = torch.empty(sequences, 64 * chunks, HV)
    return check_inputs(q, q, v, g, g, **flags)


def requests_of(facts: CallFacts) -> dict[str, CompileRequest]:
    return dict(select.choose_backward(facts, SM90A).requests)


@pytest.mark.parametrize("strategy", backward.SCANS)
def test_every_argument_of_every_kernel_is_passed_in_order(
    strategy: str, monkeypatch: pytest.MonkeyPatch, asked: list
) -> None:
    launched = []

    def loaded(request):
        names = request.template.arguments(request.problem)
        return SimpleNamespace(launch=lambda *values: launched.append((request, dict(zip(names, values, strict=True)))))

    monkeypatch.setattr(kernel_cache, "get", lambda requests: [loaded(request) for request in requests])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    inputs = call(in_kernel=True, l2norm=True)
    do, dht = cotangents(inputs)
    with select.override(backward_strategy=strategy):
        backward.backward(inputs, do, dht)
        requests = requests_of(inputs.facts)
    assert [request for request, _ in launched] == list(requests.values())
    assert tuple(requests) == STEPS[strategy]
    arguments_of = {step: values for step, (_, values) in zip(requests, launched, strict=True)}
    scan = arguments_of[SCANS[strategy][-1]]
    assert {values["A_log"].dtype for values in arguments_of.values() if "A_log" in values} == {torch.float32}
    assert scan["do"].dtype == torch.bfloat16
    assert scan["final_state_gradient"].dtype == torch.float32
    assert scan["dv"] is arguments_of[GRADIENTS[strategy]]["dv"]
    assert arguments_of[GRADIENTS[strategy]]["dq"].data_ptr() == arguments_of["l2norm_backward"]["dq_unit"].data_ptr()


# What must be gone at a launch, by the kernel that has had it before.
GONE = {
    "register_gradient_scan": {
        ("segment_states", "states"), ("register_state_scan", "initial_state"),
        ("segment_scan", "transfers"), ("segment_state_gradients", "transfers"), ("segment_gradient_scan", "own_gradients")
    },
    "warpgroup_gradients": {("chunk_inverse", "Ab"), ("register_gradient_scan", "Ab"), ("segment_state_gradients", "gradients")},
    "l2norm_backward": {
        ("register_gradient_scan", "k"), ("register_state_scan", "states"), ("register_state_scan", "v_new"),
        ("register_gradient_scan", "state_gradients"), ("warpgroup_gradients", "g_sum"),
    },
}  # fmt: skip


@pytest.mark.parametrize("kept", [True, False], ids=["inverses_given", "inverses_made"])
@pytest.mark.parametrize("strategy", ["registers", "registers_split"])
def test_what_is_not_needed_any_more_leaves_its_memory(
    strategy: str, kept: bool, monkeypatch: pytest.MonkeyPatch, asked: list
) -> None:
    held: dict[tuple[str, str], weakref.ref[torch.Tensor]] = {}
    launched, inputs = [], call(l2norm=True)

    def loaded(step: str, names: tuple[str, ...]) -> Callable[..., None]:
        def launch(*values: object) -> None:
            launched.append(step)
            tensors = {name: x for name, x in zip(names, values, strict=True) if isinstance(x, torch.Tensor)}
            held.update(((step, name), weakref.ref(x)) for name, x in tensors.items())
            gone = {key for later, keys in GONE.items() if later in launched for key in keys & held.keys()}
            gone -= {("register_state_scan", "initial_state")} if strategy == "registers" else set()     # the caller's
            assert {key for key in gone if held[key]() is not None} == set(), f"at {step}"

        return launch

    with select.override(backward_strategy=strategy, backward_split=1 if strategy == "registers_split" else None):
        kernels = backward.kernels_for(inputs)
    requests = kernels.dispatch.requests
    launch = {step: loaded(step, request.template.arguments(request.problem)) for step, request in requests.items()}
    monkeypatch.setattr(backward, "kernels_for", lambda inputs: replace(kernels, launch=launch))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    do, dht = cotangents(inputs)
    Ab = torch.empty(operands.slots_of(inputs), 8, 64, 64, dtype=torch.bfloat16)
    segments, refs = None, [weakref.ref(Ab)]
    if strategy == "registers_split":
        counts = [torch.empty(1, dtype=torch.int32) for _ in range(2)]
        transfers, states = torch.empty(1), torch.empty(1)
        segments = SegmentStates(Segments(1, operands.slots_of(inputs), *counts), transfers, states)
        refs += [weakref.ref(transfers), weakref.ref(states)]
        del transfers, states
    midway = torch.empty(1)
    refs.append(weakref.ref(midway))
    given = FromForward(Ab, segments, MidwayStates(0, midway)) if kept else FromForward()
    del Ab, segments, midway
    backward.backward(inputs, do, dht, given)
    assert [ref() for ref in refs] == [None] * len(refs)
    assert launched == [step for step in requests if not (kept and step in ("chunk_inverse", *OF_SEGMENTS))]


# V = 512: four blocks for each (sequence, value head).
@pytest.mark.parametrize(("V", "blocks"), [(128, 8), (512, 32)], ids=["V128", "V512"])
def test_persistent_kernels_have_a_block_for_every_item_up_to_the_sms(
    V: int, blocks: int, monkeypatch: pytest.MonkeyPatch, asked: list
) -> None:
    given = []

    def loaded(request):
        return SimpleNamespace(launch=lambda *values: given.append((request.template.name, values[-1])))

    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(kernel_cache, "get", lambda batch: [loaded(request) for request in batch])
    for lengths in ((70,), (70,) * 40):
        inputs = call(V=V, lengths=lengths)
        backward.backward(inputs, *cotangents(inputs))
    scans = [count for name, count in given if name in ("register_state_scan", "register_gradient_scan")]
    assert scans == [blocks, blocks, H200.sm_count, H200.sm_count]
    # items of (chunk slot, key head): 2 slots and 2 key heads, then far more than SMs
    assert [count for name, count in given if name == "warpgroup_gradients"] == ([4, H200.sm_count] if V == 128 else [])


# Which strategy, and in which chunks


@pytest.mark.parametrize(
    ("changes", "strategy"),
    [
        ({}, "registers"),
        ({"V": 512}, "registers"),
        ({"V": 192}, "chunked"),
        ({"K": 96}, "chunked"),
        ({"dtype": torch.float16}, "chunked"),
    ],
    ids=str,
)
@pytest.mark.parametrize("chunk_size", CHUNK_SIZES, ids=lambda C: f"C{C}")
def test_the_last_strategy_that_serves_the_call_computes_its_gradients(changes: dict, strategy: str, chunk_size: int) -> None:
    facts = call(**changes).facts._replace(chunk_size=chunk_size)
    dispatch = select.choose_backward(facts, SM90A)
    assert dispatch.strategy == strategy
    assert dispatch.facts == facts._replace(chunk_size=64)
    assert {request.problem.C for request in dispatch.requests.values()} == {64}


@pytest.mark.parametrize("arch", [arch for arch in ARCHES.values() if arch is not SM90A], ids=lambda arch: arch.name)
def test_gradients_on_other_archs_come_from_the_reference(arch: Arch) -> None:
    with pytest.raises(UnsupportedError, match=f"chunk_gradients is not written for {arch.name}"):
        select.choose_backward(call().facts, arch)


@pytest.mark.parametrize(
    ("T", "changes", "asked_for", "bands", "from_midway"),
    [
        (4096, {}, None, 1, 1),
        (4096, {}, 3, 3, 3),
        (4096, {"V": 256}, 3, 1, 1),             # another kernel finds the gradients of chunks
        (1 << 15, {"HV": 64}, None, 1, 2),       # 2.6 GB of states, their gradients and values
        (1 << 18, {"HV": 64}, None, 2, 2),
        (1 << 18, {"HV": 64}, 1, 1, 1),
    ],
    ids=str,
)
@pytest.mark.parametrize("how", ["override", "variable"])
def test_chunks_go_in_bands_if_asked_for_or_where_memory_is_at_stake(
    how: str,
    T: int,
    changes: dict,
    asked_for: int | None,
    bands: int,
    from_midway: int,
    monkeypatch: pytest.MonkeyPatch,
    asked: list,
) -> None:
    inputs = call(**changes)
    kernels = None
    if how == "variable":
        monkeypatch.setenv("QLA_JIT_BACKWARD_BANDS", "" if asked_for is None else str(asked_for))
        kernels = backward.kernels_for(inputs)
    else:
        with select.override(backward_bands=asked_for):
            kernels = backward.kernels_for(inputs)
    assert backward.bands_of(kernels, T // 64, 1, from_midway=False) == bands
    assert backward.bands_of(kernels, T // 64, 1, from_midway=True) == from_midway


@pytest.mark.parametrize(("L", "bands"), [(4, 1), (8, 1), (16, 2), (64, 2), (WHOLE_SEQUENCES, 2)])
def test_chunks_of_short_segments_do_not_go_in_bands(L: int, bands: int, asked: list) -> None:
    """Which have nearly as many states between bands as chunks."""
    kernels, slots = backward.kernels_for(call(HV=64)), 513
    places = place_count(slots, 1, L) if L else 1
    assert backward.bands_of(kernels, slots, places, from_midway=True) == bands


def test_chunks_are_of_64_tokens_where_they_fit() -> None:
    assert select.choose_backward(call(K=256, V=256).facts, SM90A).facts.chunk_size == 64


@pytest.mark.parametrize(
    ("HV", "chunks", "sequences"), [(32, 512, 1), (8, 512, 1), (8, 128, 1), (16, 512, 2)], ids=lambda value: str(value)
)
@pytest.mark.parametrize("chunk_size", [64, 16], ids=lambda C: f"C{C}")
def test_segments_fill_the_gpu_where_a_split_is_asked_for(
    HV: int, chunks: int, sequences: int, chunk_size: int, asked: list
) -> None:
    with select.override(backward_strategy="registers_split"):
        dispatch = backward.kernels_for(long_call(HV, chunks, sequences, chunk_size=chunk_size)).dispatch
    assert dispatch.strategy == "registers_split"
    assert 4 <= dispatch.split <= chunks // 4
    assert 0.5 < chunks * HV * sequences / dispatch.split / H200.sm_count < 8                    # segments, by SM


@pytest.mark.parametrize(
    ("HV", "chunks", "sequences", "flags"),
    [(64, 64, 8, {}), (32, 64, 8, {}), (32, 8, 1, {}), (8, 1, 1, {}), (32, 512, 1, {"auto_cp": False})],
    ids=lambda value: str(value) or "auto_cp",
)
def test_sequences_stay_whole_where_there_are_many_or_short_ones(
    HV: int, chunks: int, sequences: int, flags: dict, asked: list
) -> None:
    dispatch = backward.kernels_for(long_call(HV, chunks, sequences, **flags)).dispatch
    assert (dispatch.strategy, dispatch.split) == ("registers", None)


@pytest.mark.parametrize("rows", [1, 8, 32, 64])
@pytest.mark.parametrize("chunks", [4, 128, 512])
def test_the_best_split_is_expected_to_pay(rows: int, chunks: int) -> None:
    sizes = Sizes(rows, 2 * rows, chunks, chunks, 1, 132)
    L = best_backward_split(sizes)
    if L is not None:
        assert split_us(sizes, L) + split_backward_us(sizes, L) < forward_us(sizes) + whole_backward_us(sizes)


def test_measured_scans_are_expected_as_they_are() -> None:
    # docs/performance.md: 16,32:4096x8 one after the other; 16,32:32768 and 2,8:2048x4 side by side
    assert whole_backward_us(Sizes(32, 64, 64, 512, 8, 132)) == pytest.approx(382 + 458, rel=0.05)
    assert whole_backward_us(Sizes(32, 64, 512, 512, 1, 132)) == pytest.approx(1462, rel=0.05)
    assert whole_backward_us(Sizes(8, 16, 32, 128, 4, 132)) == pytest.approx(97, rel=0.05)


def test_a_forward_is_split_for_its_backward_where_both_together_gain(asked: list) -> None:
    inputs = long_call(48, 128)
    assert pipeline.kernels_for(inputs).dispatch.strategy == "fused_halves"                      # alone
    L = backward.wanted_of_forward(inputs).split
    assert L == backward.kernels_for(inputs).dispatch.split is not None
    assert pipeline.kernels_for(inputs, to_split=True).dispatch.strategy == "split"
    with select.override("fused"):
        assert pipeline.kernels_for(inputs, to_split=True).dispatch.strategy == "fused"
    short = long_call(64, 16)
    assert pipeline.kernels_for(short, to_split=backward.wanted_of_forward(short).split is not None).dispatch.strategy != "split"
    narrow_chunks = long_call(8, 512, chunk_size=16)
    assert pipeline.kernels_for(narrow_chunks, to_split=True).dispatch.strategy == "chunked"     # which has no segments


@pytest.mark.parametrize("split", [1, 16, None], ids=lambda L: f"L{L}")
def test_a_split_may_be_forced_without_a_say_in_the_forward(split: int | None, asked: list) -> None:
    inputs = long_call(8, 512)
    forward, usual = pipeline.kernels_for(inputs).dispatch.split, backward.kernels_for(inputs).dispatch.split
    with select.override(backward_strategy="registers_split", backward_split=split):
        dispatch = backward.kernels_for(inputs).dispatch
        assert (dispatch.strategy, dispatch.split) == ("registers_split", split)
        assert pipeline.kernels_for(inputs).dispatch.split == forward
    with select.override(split=2):
        assert backward.kernels_for(inputs).dispatch.split == usual


def test_the_forward_is_told_the_segments_of_the_gradients_without_compiling_them(asked: list) -> None:
    inputs = long_call(8, 512)
    L = backward.wanted_of_forward(inputs).split
    assert asked == []
    assert backward.resolved() == {}
    assert L == backward.kernels_for(inputs).dispatch.split is not None
    assert backward.wanted_of_forward(inputs).split == L
    assert len(asked) == 1
    with select.override(split=2):
        assert backward.wanted_of_forward(inputs).split is None
    assert backward.wanted_of_forward(call(K=96)) == Wanted()
    known = set(backward._ready)
    assert backward.wanted_of_forward(call(lengths=(0,))) == Wanted()
    assert set(backward._ready) == known                       # nothing is chosen where nothing is computed


@pytest.mark.parametrize(
    ("changes", "override", "L"),
    [
        ({}, dict(backward_strategy="registers", backward_bands=2), WHOLE_SEQUENCES),
        ({}, dict(backward_strategy="registers_split", backward_split=8, backward_bands=2), 8),
        ({}, dict(backward_strategy="registers_split", backward_split=8, split=2, backward_bands=2), 8),
        ({}, dict(backward_strategy="registers", backward_bands=1), None),
        ({}, dict(backward_strategy="registers", backward_bands=3), None),
        ({}, dict(backward_strategy="chunked", backward_bands=2), None),
        ({"chunk_size": 32}, dict(backward_strategy="registers", backward_bands=2), None),
    ],
    ids=str,
)
def test_the_forward_is_told_of_which_segments_states_midway_are_wanted(
    changes: dict, override: dict, L: int | None, asked: list
) -> None:
    with select.override(**override):
        assert backward.wanted_of_forward(long_call(8, 512, **changes)).midway == L
    assert asked == []


def test_of_a_forward_only_what_its_gradients_take_is_kept(asked: list) -> None:
    Ab, segments = object(), object()

    def kept_of(inputs: CallInputs, **made: object) -> tuple[bool, bool]:
        kept = backward.of_use(inputs, ForwardResult(None, None, **made))
        return kept.Ab.take() is Ab, kept.segments.take() is segments

    assert kept_of(long_call(8, 512), Ab=Ab, segments=segments) == (True, True)
    assert kept_of(call(), Ab=Ab) == (True, False)
    with select.override(backward_strategy="registers"):
        assert kept_of(long_call(8, 512), Ab=Ab, segments=segments) == (True, False)
    assert kept_of(call(K=96, V=192), Ab=Ab, segments=segments) == (False, False)        # `chunked` solves with the gates
    assert kept_of(call(lengths=(0,))) == (False, False)
    assert asked == []


def test_a_strategy_may_be_forced_without_a_say_in_the_forward(asked: list) -> None:
    inputs = call()
    forward = pipeline.kernels_for(inputs).dispatch.strategy
    for strategy in backward.SCANS:
        with select.override(backward_strategy=strategy):
            assert backward.kernels_for(inputs).dispatch.strategy == strategy
            assert pipeline.kernels_for(inputs).dispatch.strategy == forward
    with select.override("chunked"):
        assert backward.kernels_for(inputs).dispatch.strategy == "registers"
    with select.override(backward_strategy="registers"), pytest.raises(InvalidConfigError, match="chunked would"):
        select.choose_backward(call(K=96).facts, SM90A)


def test_every_strategy_has_its_scans() -> None:
    assert plan.BACKWARD_STRATEGIES.keys() == backward.SCANS.keys()


@pytest.mark.parametrize(
    ("dtype", "floor"), [(torch.bfloat16, -24), (torch.float16, -14)], ids=["bfloat16", "float16"]
)
def test_beta_has_a_floor_above_the_denormal_numbers_of_its_products(dtype: torch.dtype, floor: int) -> None:
    requests = requests_of(call(dtype=dtype).facts)
    assert requests["gate_cumsum"].problem.beta_floor == floor
    assert 2.0**floor >= torch.finfo(dtype).tiny
    assert 2.0 ** (2 * floor) >= torch.finfo(torch.float32).tiny


@pytest.mark.parametrize(
    ("strategy", "scan", "gradient_scan"),
    [("chunked", "state_scan", "state_gradient_scan"), ("registers", "register_state_scan", "register_gradient_scan")],
    ids=["chunked", "registers"],
)
def test_kernels_are_for_what_the_call_has(strategy: str, scan: str, gradient_scan: str) -> None:
    with select.override(backward_strategy=strategy):
        none = requests_of(call(initial_state=False).facts._replace(output_final_state=False))
        both = requests_of(call(state_v_first=True, state_dtype=torch.float16).facts)
    assert not {"l2norm", "l2norm_backward"} & none.keys()
    assert none[scan].problem.initial_state_dtype is None
    assert not none[gradient_scan].problem.has_final_state_gradient
    assert not none[gradient_scan].problem.has_initial_state
    assert both[scan].problem.initial_state_dtype == "float16"
    assert both[scan].problem.state_v_first
    assert both[gradient_scan].problem.has_final_state_gradient
    assert both[gradient_scan].problem.has_initial_state
    assert both[gradient_scan].problem.state_v_first


def test_segments_have_the_states_at_both_ends_where_they_are_read() -> None:
    with select.override(backward_strategy="registers_split"):
        requests = requests_of(call(state_v_first=True, state_dtype=torch.float16).facts)
    problems = {step: request.problem for step, request in requests.items()}
    assert problems["segment_states"].initial_state_dtype == "float16"
    assert problems["register_state_scan"].initial_state_dtype is None
    assert problems["segment_gradient_scan"].has_final_state_gradient
    assert problems["segment_state_gradients"].has_final_state_gradient
    assert not problems["register_gradient_scan"].has_final_state_gradient
    assert problems["register_gradient_scan"].has_initial_state
    assert not problems["segment_gradient_scan"].has_initial_state
    scans = ("register_state_scan", "segment_gradient_scan", "register_gradient_scan")
    assert all(problems[step].split for step in scans)
    assert [problems[step].transfers_only for step in scans[1:]] == [True, False]
    assert [problems[step].backwards for step in ("segment_plan", "segment_plan_backwards")] == [False, True]


@pytest.mark.parametrize(("sigmoid", "negative"), [(False, False), (True, False), (True, True)], ids=str)
@pytest.mark.parametrize("strategy", ["registers", "registers_split"])
def test_both_directions_share_the_kernel_of_the_inverses(sigmoid: bool, negative: bool, strategy: str) -> None:
    facts = call().facts._replace(use_beta_sigmoid_in_kernel=sigmoid, allow_neg_eigval=negative)
    with select.override("fused", backward_strategy=strategy):
        forward, gradients = select.choose(facts, SM90A).requests, requests_of(facts)
    assert forward["chunk_inverse"] == gradients["chunk_inverse"]
    inverse, gates = gradients["chunk_inverse"].problem, gradients["gate_cumsum"].problem
    assert (inverse.beta_sigmoid, inverse.negative_eigenvalues) == (sigmoid, negative)
    shared = ("beta_dtype", "beta_sigmoid", "negative_eigenvalues", "beta_floor")
    assert [getattr(inverse, name) for name in shared] == [getattr(gates, name) for name in shared]


@pytest.mark.parametrize("name", models())
@pytest.mark.parametrize("chunk_size", CHUNK_SIZES, ids=lambda C: f"C{C}")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_model_can_be_trained_on_hopper(name: str, chunk_size: int, dtype: torch.dtype) -> None:
    shape = models()[name]
    facts = call(dtype=dtype, H=shape.H, HV=shape.HV, K=shape.K, V=shape.V).facts._replace(chunk_size=chunk_size)
    assert requests_of(facts)


def test_both_directions_are_compiled_in_one_go_at_the_first_forward(asked: list) -> None:
    inputs = long_call(8, 1)
    assert autograd.covers(inputs)
    (together,) = asked
    assert set(requests_of(inputs.facts).values()) < set(together)
    assert len(set(together)) == len(together)
    for chunks in (1, 40, 512):
        later = long_call(8, chunks)
        assert autograd.covers(later)
        pipeline.kernels_for(later)
        assert backward.kernels_for(later).dispatch.strategy == ("registers" if chunks == 1 else "registers_split")
    assert autograd.covers(call(lengths=(0,)))
    assert all(set(batch) <= set(together) for batch in asked)


def test_a_record_decides_and_no_kernels_of_other_sizes_are_built(asked: list, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = long_call(8, 64)
    asked.clear()
    monkeypatch.setenv("QLA_JIT_DB_PATH", str(tmp_path))
    default = (100.0, 400.0)
    wide = entry(WIDE, 80.0, 320.0, default=default)             # of `chunked`, which is not what runs without a record
    found = records.record(op=plan.BACKWARD, problem=Problem.of(inputs.facts), entries=(entry(DEFAULT, *default), wide))
    save_directory(tmp_path, [found])
    dispatch = backward.kernels_for(inputs).dispatch
    assert (dispatch.strategy, dispatch.source, dispatch.match) == ("chunked", "directory", "interpolated")
    assert dispatch.requests["state_scan"].config == state_scan.Config(**WIDE["state_scan"])
    assert [set(batch) for batch in asked] == [set(dispatch.requests.values())]
    assert backward.kernels_for(long_call(8, 4)).dispatch.source == "default"            # outside of what was measured


def test_segments_are_preferred_where_they_pay(asked: list) -> None:
    for chunks, name in ((512, "registers_split"), (4, "registers")):
        dispatch = backward.kernels_for(long_call(8, chunks)).dispatch
        assert (dispatch.strategy, dispatch.split is None) == (name, name == "registers")
    assert len(set(map(frozenset, asked))) == 1          # the first call built those of both
    assert set(dispatch.requests.values()) < set(asked[0])


def test_where_nothing_is_compiled_a_call_asks_for_its_own_kernels_alone(asked: list, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QLA_JIT_MODE", "require")
    inputs = long_call(8, 1)
    backward.kernels_for(inputs)
    assert [set(batch) for batch in asked] == [set(requests_of(inputs.facts).values())]


def test_about_the_same_size_is_a_dictionary_hit(asked: list) -> None:
    first = backward.kernels_for(long_call(8, 512))
    assert backward.kernels_for(long_call(8, 511)) is first
    assert len(asked) == 1


def test_a_config_in_force_has_kernels_of_its_own(asked: list) -> None:
    inputs, facts = call(), call().facts
    default = backward.kernels_for(inputs).launch["warpgroup_gradients"].config
    configs = warpgroup_gradients.TEMPLATE.configs(requests_of(facts)["warpgroup_gradients"].problem, SM90A)
    other = next(config for config in configs if config != default)
    with select.override(warpgroup_gradients=other):
        assert backward.kernels_for(inputs).launch["warpgroup_gradients"].config == other
    assert backward.kernels_for(inputs).launch["warpgroup_gradients"].config == default


@pytest.mark.parametrize("changes", [{"K": 80}, {"V": 384}], ids=str)
def test_a_call_that_kernels_do_not_cover_is_not_covered_in_either_direction(changes: dict, asked: list) -> None:
    inputs = call(**changes)
    assert not autograd.covers(inputs)
    assert backward.kernels_for(inputs) is None
    assert asked == []
    reasons = ".*; ".join(f"{strategy}: got K=" for strategy in plan.BACKWARD_STRATEGIES)
    told = rf"gradients of this call on sm_90a: in chunks of 64 or 32, {reasons}"
    with pytest.raises(UnsupportedError, match=told):
        select.choose_backward(inputs.facts, SM90A)


def test_a_kernel_that_must_not_be_compiled_is_an_error_each_time(asked: list, monkeypatch: pytest.MonkeyPatch) -> None:
    def get(requests):
        raise KernelNotCachedError("chunk_gradients is not in the kernel cache")

    monkeypatch.setattr(kernel_cache, "get", get)
    for _ in range(2):
        with pytest.raises(KernelNotCachedError, match="chunk_gradients"):
            autograd.covers(call())
