"""What autograd sees of a call whose kernels serve both directions, with the reference in their place."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import pytest
import torch
from cases import Case, arguments, relative_l2
from torch.utils.checkpoint import checkpoint

from qla_jit.ops import autograd, backward, chunk, fallback, pipeline
from qla_jit.ops.inputs import CallInputs, check_inputs
from qla_jit.ops.kept import FromForward, Wanted
from qla_jit.ops.results import ForwardResult, Gradients, MidwayStates, Segments, SegmentStates

CASE = Case(lengths=(70, 0, 3), tail=2, dtype=torch.bfloat16, in_kernel=True, l2norm=True)

WANTED = Wanted(split=2, midway=2)

# On a machine without CUDA, torch says so when the autocast state of the forward is restored.
pytestmark = pytest.mark.filterwarnings("ignore:User provided device_type of 'cuda'")


@pytest.fixture(autouse=True)
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    """The gradients of the outputs that the launcher of the backward was given. Segments are of two chunks."""
    given = []

    def launched(inputs: CallInputs, do: torch.Tensor, dht: torch.Tensor | None, kept: FromForward) -> Gradients:
        given.append((do, dht))
        return fallback.backward(inputs, do, dht)

    monkeypatch.setattr(pipeline, "forward", lambda inputs, wanted: fallback.forward(inputs))
    monkeypatch.setattr(backward, "wanted_of_forward", lambda inputs: WANTED)
    monkeypatch.setattr(backward, "of_use", lambda inputs, result: FromForward(result.Ab, result.segments, result.midway))
    monkeypatch.setattr(backward, "backward", launched)
    return given


class Made:
    """What the forward makes, and what of it comes to the backward: inverses, all there is of segments, and states midway."""

    def __init__(self) -> None:
        self.made: list[weakref.ref[torch.Tensor]] = []
        self.given: list[weakref.ref[torch.Tensor] | None] = []

    def forward(self, inputs: CallInputs, wanted: Wanted) -> ForwardResult:
        assert wanted is WANTED
        Ab, transfers, states, midway = torch.zeros(4, 4, 64, 64), torch.zeros(1), torch.zeros(1), torch.zeros(1)
        self.made += map(weakref.ref, (Ab, transfers, states, midway))
        segments = SegmentStates(Segments(wanted.split, 2, torch.zeros(1), torch.zeros(1)), transfers, states)
        return replace(fallback.forward(inputs), Ab=Ab, segments=segments, midway=MidwayStates(wanted.midway, midway))

    def backward(self, inputs: CallInputs, do: torch.Tensor, dht: torch.Tensor | None, kept: FromForward) -> Gradients:
        Ab, segments, midway = kept.Ab.take(), kept.segments.take(), kept.midway.take()
        taken = [Ab, None, None, None] if Ab is None else [Ab, segments.transfers, segments.states, midway.states]
        self.given += [x if x is None else weakref.ref(x) for x in taken]
        del Ab, segments, midway, taken
        assert all(made() is None for made in self.made), "somebody else holds them"
        return fallback.backward(inputs, do, dht)


@pytest.fixture
def forwards(seen: list, monkeypatch: pytest.MonkeyPatch) -> Made:
    found = Made()
    monkeypatch.setattr(pipeline, "forward", found.forward)
    monkeypatch.setattr(backward, "backward", found.backward)
    return found


def differentiable(case: Case = CASE, **changes: object) -> tuple[dict[str, torch.Tensor], CallInputs]:
    """The leaves of a call by name, and its inputs."""
    call = arguments(case) | changes
    leaves = {name: call[name].requires_grad_() for name in Gradients._fields if call.get(name) is not None}
    return leaves, check_inputs(**call)


def apply(inputs: CallInputs) -> ForwardResult:
    return autograd.differentiable_forward(inputs)


def test_every_input_gets_its_gradient_in_its_own_dtype() -> None:
    leaves, inputs = differentiable(replace(CASE, gate_dtype=torch.bfloat16, state_dtype=torch.float16))
    assert leaves.keys() == set(Gradients._fields)
    result = apply(inputs)
    do, dht = torch.randn_like(result.o), torch.randn_like(result.final_state)
    torch.autograd.backward([result.o, result.final_state], [do, dht])
    expected = fallback.backward(inputs, do, dht)
    for name, leaf in leaves.items():
        assert leaf.grad.dtype == leaf.dtype
        assert torch.equal(leaf.grad, getattr(expected, name)), name


@pytest.mark.parametrize("name", Gradients._fields)
def test_one_input_alone_may_need_a_gradient(name: str) -> None:
    leaves, inputs = differentiable()
    for other, leaf in leaves.items():
        leaf.requires_grad_(other == name)
    result = apply(inputs)
    (result.o.float().sum() + result.final_state.sum()).backward()
    assert [other for other, leaf in leaves.items() if leaf.grad is not None] == [name]


def test_an_output_that_has_no_part_in_the_loss_has_zeros_for_a_gradient(seen: list) -> None:
    for output in ("o", "final_state"):
        _, inputs = differentiable()
        getattr(apply(inputs), output).sum().backward()
    (do, no_dht), (no_do, dht) = seen
    assert (do == 1).all()
    assert (dht == 1).all()
    assert torch.equal(no_dht, torch.zeros(3, 4, 16, 24))
    assert torch.equal(no_do, torch.zeros_like(do))


def test_a_final_state_that_is_not_returned_has_no_gradient(seen: list) -> None:
    _, inputs = differentiable(output_final_state=False)
    result = apply(inputs)
    assert result.final_state is None
    result.o.sum().backward()
    assert seen[0][1] is None


def test_a_second_derivative_is_refused() -> None:
    leaves, inputs = differentiable()
    (dq,) = torch.autograd.grad(apply(inputs).o.float().square().sum(), leaves["q"], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dq.float().sum().backward()


def test_gradients_reach_tensors_that_are_not_contiguous() -> None:
    leaves, inputs = differentiable()
    apply(inputs).o.float().sum().backward()
    expected = leaves["v"].grad

    strided = leaves["v"].detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    assert not strided.is_contiguous()
    _, inputs = differentiable(v=strided)
    apply(inputs).o.float().sum().backward()
    assert torch.equal(strided.grad, expected)


def test_what_is_made_is_kept_for_one_backward_alone(forwards: Made) -> None:
    leaves, inputs = differentiable()
    o = apply(inputs).o
    assert [ref() is None for ref in forwards.made] == [False] * 4
    first, second = (torch.autograd.grad(o.float().sum(), leaves["k"], retain_graph=True) for _ in range(2))
    assert forwards.given == [*forwards.made, None, None, None, None]
    assert torch.equal(*first, *second)


def test_what_is_kept_goes_with_the_graph_without_a_backward(forwards: Made) -> None:
    _, inputs = differentiable()
    result = apply(inputs)
    assert [ref() is None for ref in forwards.made] == [False] * 4
    del result, inputs
    assert [ref() is None for ref in forwards.made] == [True] * 4


def test_under_checkpointing_nothing_is_kept_beside_what_it_saves(forwards: Made) -> None:
    leaves, inputs = differentiable()
    o = checkpoint(lambda k: apply(replace(inputs, k=k)).o, leaves["k"], use_reentrant=False)
    assert [ref() is None for ref in forwards.made] == [True] * 4
    o.float().sum().backward()
    assert forwards.given == [None] * 4
    assert leaves["k"].grad.isfinite().all()


def test_only_the_inputs_are_kept_for_the_backward() -> None:
    leaves, inputs = differentiable()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        apply(inputs)
    own = {x.data_ptr() for x in (*leaves.values(), inputs.cu_seqlens)}
    assert {x.data_ptr() for x in kept} == own


def test_what_is_kept_is_not_among_the_saved_tensors(forwards: Made) -> None:
    leaves, inputs = differentiable()
    node = apply(inputs).o.grad_fn
    own = {x.data_ptr() for x in (*leaves.values(), inputs.cu_seqlens)}
    assert {x.data_ptr() for x in node.saved_tensors} == own
    assert [ref() is None for ref in forwards.made] == [False] * 4


def test_nothing_outlives_the_outputs() -> None:
    leaves, inputs = differentiable()
    result = apply(inputs)
    v = weakref.ref(leaves.pop("v"))
    del inputs, leaves
    gc.collect()
    assert v() is not None                     # the graph needs it
    del result
    assert v() is None                         # at once: there is no reference cycle


def test_an_input_that_was_changed_since_the_forward_is_an_error() -> None:
    leaves, inputs = differentiable()
    o = apply(inputs).o
    with torch.no_grad():
        leaves["v"].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


def test_the_backward_works_under_the_autocast_of_the_forward() -> None:
    leaves, inputs = differentiable()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = apply(inputs)
    result.o.float().sum().backward()
    under = {name: leaf.grad for name, leaf in leaves.items()}
    leaves, inputs = differentiable()
    apply(inputs).o.float().sum().backward()
    for name, leaf in leaves.items():
        assert torch.equal(under[name], leaf.grad), name
        assert relative_l2(leaf.grad, torch.zeros_like(leaf)) > 0, name


def on_a_gpu(inputs: CallInputs) -> CallInputs:
    """The inputs as chunk.py sees them on a GPU: it asks q alone where it is."""

    class OnGpu(torch.Tensor):
        is_cuda = True

    return replace(inputs, q=inputs.q.as_subclass(OnGpu))


@pytest.mark.parametrize("covered", [True, False], ids=["covered", "not_covered"])
def test_both_directions_go_the_same_way_which_is_decided_in_the_forward(
    covered: bool, seen: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(autograd, "covers", lambda inputs: covered)
    monkeypatch.setattr(chunk, "_warn_slow_gradients", lambda: seen.append("warned"))
    leaves, inputs = differentiable()
    result = chunk._differentiable_forward(on_a_gpu(inputs))
    assert seen == ([] if covered else ["warned"])
    result.o.float().sum().backward()
    assert len(seen) == 1
    assert (seen[0] == "warned") is not covered
    assert leaves["k"].grad.isfinite().all()
