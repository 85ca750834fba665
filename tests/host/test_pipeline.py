"""What the launchers hand to the kernels, with a GPU and its kernels stood in for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from cases import Case, arguments

from qla_jit import kernel_cache, select
from qla_jit.device import GpuInfo
from qla_jit.kernel_templates.arch import SM90A
from qla_jit.kernel_templates.macros.segments import place_count
from qla_jit.ops import operands, pipeline
from qla_jit.ops.inputs import check_inputs
from qla_jit.ops.kept import Wanted
from qla_jit.ops.results import WHOLE_SEQUENCES


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, object]]]:
    """Template and arguments by name of every launch, in order."""
    seen: list[tuple[str, dict[str, object]]] = []

    def loaded(request):
        names = request.template.arguments(request.problem)
        return SimpleNamespace(launch=lambda *values: seen.append((request.template.name, dict(zip(names, values, strict=True)))))

    monkeypatch.setattr(pipeline, "_ready", {})
    monkeypatch.setattr(pipeline, "gpu_info", lambda device: GpuInfo("NVIDIA H200", SM90A, 132, 60 * 2**20))
    monkeypatch.setattr(kernel_cache, "get", lambda requests: [loaded(request) for request in requests])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    return seen


@pytest.mark.parametrize("strategy", pipeline.LAUNCHERS)
def test_every_argument_is_passed_and_parameters_are_float32(strategy: str, launches: list) -> None:
    case = Case(H=2, HV=8, K=128, V=128, lengths=(300, 70), dtype=torch.bfloat16, in_kernel=True, l2norm=True)
    call = arguments(case)
    call["A_log"], call["dt_bias"] = call["A_log"].bfloat16(), call["dt_bias"].half()
    with select.override(strategy, split=2 if strategy == "split" else None):
        result = pipeline.forward(check_inputs(**call))
        steps = [name for name, _ in launches]
        assert steps == [request.template.name for request in select.choose(check_inputs(**call).facts, SM90A).requests.values()]
    inverses = [values["Ab"] for name, values in launches if name == "chunk_inverse"]
    assert result.Ab is (inverses[0] if inverses else None)
    assert (result.A is None) is (strategy != "chunked")
    assert (result.segments is None) is (strategy != "split")
    parameters = [values[name] for _, values in launches for name in ("A_log", "dt_bias") if name in values]
    assert parameters
    assert {x.dtype for x in parameters} == {torch.float32}
    torch.testing.assert_close(parameters[0], call["A_log"].float(), rtol=0, atol=0)


def test_segments_are_as_long_as_the_caller_says(launches: list) -> None:
    inputs = check_inputs(**arguments(Case(H=2, HV=8, K=128, V=128, lengths=(300, 700), dtype=torch.bfloat16)))
    for strategy, lengths in (("split", {4}), ("fused", {0})):
        launches.clear()
        with select.override(strategy):
            result = pipeline.forward(inputs, Wanted(split=4))
        assert {values["chunks_per_segment"] for _, values in launches if "chunks_per_segment" in values} == lengths
        assert (result.segments and result.segments.segments.L) == (4 if strategy == "split" else None)


@pytest.mark.parametrize(("strategy", "rows"), [("fused", 128), ("fused_halves", 64), ("split", 128)])
def test_states_midway_are_kept_if_they_are_wanted_of_these_segments(strategy: str, rows: int, launches: list) -> None:
    inputs = check_inputs(**arguments(Case(H=2, HV=8, K=128, V=128, lengths=(300, 700), dtype=torch.bfloat16)))
    L = 4 if strategy == "split" else WHOLE_SEQUENCES
    for wanted in (None, L, L + 1):
        launches.clear()
        with select.override(strategy, split=4 if strategy == "split" else None):
            midway = pipeline.forward(inputs, Wanted(midway=wanted)).midway
        name, last = launches[-1]
        assert name == "register_state_forward"
        if wanted == L:
            places = place_count(operands.slots_of(inputs), 2, L) if L else 2
            assert midway.L == L
            assert last["midway"] is midway.states
            assert midway.states.shape == (places, 8, 128, 128)
        else:
            assert midway is None
            assert last["midway"].shape == (0, 8, 128, 128)


def test_what_goes_between_segments_is_in_whole_tiles(launches: list) -> None:
    case = Case(H=2, HV=2, K=96, V=192, lengths=(300, 700), dtype=torch.bfloat16)
    with select.override("split", split=4):
        pipeline.forward(check_inputs(**arguments(case)))
    by_name = dict(launches)
    scan, rest = by_name["segment_scan"], by_name["register_state_forward"]
    places = scan["warm_chunks"].shape[0]
    assert scan["transfers"].shape == (places, 2, 2 * 128 + 128, 128)
    assert rest["initial_state"].shape == (places, 2, 2 * 128, 128)
    assert (scan["blocks"], rest["blocks"]) == (places * 2 * 3, min(places * 2 * 2, 132))
    assert rest["final_state"].shape == (2, 2, 96, 192)
