"""Kernels that run beside the one before: do the launchers keep what macros/launches.py asks of them?"""

from __future__ import annotations

import weakref
from types import SimpleNamespace

import pytest
import torch
from backward_kernels import H200, cotangents
from cases import Case, arguments

from qla_jit import kernel_cache, select
from qla_jit.ops import backward, pipeline
from qla_jit.ops.inputs import check_inputs
from qla_jit.ops.kept import FromForward

INPUTS = check_inputs(**arguments(Case(H=2, HV=8, K=128, V=128, lengths=(300, 70), dtype=torch.bfloat16, l2norm=True)))


@pytest.fixture
def early(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """(kernel before, kernel) of every early launch. Each is looked at when it is made."""
    found: list[tuple[str, str]] = []
    before: list[tuple[str, bool, list[weakref.ref[torch.Tensor]]]] = []

    def loaded(request):
        name, names = request.template.name, request.template.arguments(request.problem)

        def launch(*values: object) -> None:
            given = dict(zip(names, values, strict=True))
            is_early = bool(given.get("early", 0))
            if is_early:
                name_before, before_is_early, used = before[-1]
                assert not before_is_early, f"{name_before} in front of {name} is early itself"
                assert None not in [ref() for ref in used], f"memory of {name_before} may have been given to {name}"
                found.append((name_before, name))
            memory = [x if x._base is None else x._base for x in given.values() if isinstance(x, torch.Tensor)]
            before.append((name, is_early, [weakref.ref(x) for x in memory]))

        return SimpleNamespace(launch=launch)

    for module in (backward, pipeline):
        monkeypatch.setattr(module, "gpu_info", lambda device: H200)
        monkeypatch.setattr(module, "_ready", {})
    monkeypatch.setattr(kernel_cache, "get", lambda requests: [loaded(request) for request in requests])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    return found


@pytest.mark.parametrize(
    ("strategy", "expected"), [("fused", []), ("split", [("segment_plan", "chunk_inverse")])], ids=["fused", "split"]
)
def test_of_the_forward(strategy: str, expected: list, early: list) -> None:
    with select.override(strategy, split=2):
        pipeline.forward(INPUTS)
    assert early == expected


STATES, GRADIENTS = "register_state_scan", "register_gradient_scan"
BEHIND_PASS = (GRADIENTS, STATES)        # the pass over segments, by the same template
BEHIND_STATES = (STATES, GRADIENTS)


@pytest.mark.parametrize("bands", [1, 2, 3])
@pytest.mark.parametrize("kept", [True, False], ids=["kept", "made_here"])
@pytest.mark.parametrize(
    ("strategy", "first"), [("registers", BEHIND_STATES), ("registers_split", BEHIND_PASS)], ids=["whole", "split"]
)
def test_of_the_backward(strategy: str, first: tuple, kept: bool, bands: int, early: list) -> None:
    with select.override("split", backward_strategy=strategy, split=2, backward_split=2, backward_bands=bands):
        result = pipeline.forward(INPUTS, backward.wanted_of_forward(INPUTS))
        assert (result.midway is not None) == (bands == 2 and strategy == "registers_split")
        early.clear()
        given = FromForward(result.Ab, result.segments, result.midway) if kept else FromForward()
        del result
        backward.backward(INPUTS, *cotangents(INPUTS), given)
    made_here = [("segment_plan", "chunk_inverse")] if strategy == "registers_split" and not kept else []
    assert early == [*made_here, first, *[BEHIND_STATES] * (bands - 1)]
