"""The call as autograd sees it: kernels in both directions."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.amp import custom_bwd, custom_fwd
from torch.autograd.function import once_differentiable

from ..compiler import CompileRequest
from . import backward, pipeline
from .inputs import CallInputs
from .kept import FromForward
from .results import ForwardResult

_TENSORS = ("q", "k", "v", "g", "beta", "initial_state", "A_log", "dt_bias", "cu_seqlens")


def covers(inputs: CallInputs) -> bool:
    """Whether kernels serve a call in both directions. At its first time they are compiled, all in one go: the first step
    of a training waits for the compiler once."""
    if inputs.B * inputs.T == 0:
        return True

    def those_of_the_forward() -> list[CompileRequest]:
        return pipeline.choice_for(inputs, to_split=backward.wanted_of_forward(inputs).split is not None)[1]

    return backward.kernels_for(inputs, together_with=those_of_the_forward) is not None


def differentiable_forward(inputs: CallInputs) -> ForwardResult:
    """The outputs of a call that covers() says yes to, with their gradients known to autograd."""
    call = dataclasses.replace(inputs, **dict.fromkeys(_TENSORS))
    return ForwardResult(*_ChunkGatedDeltaRule.apply(call, *(getattr(inputs, name) for name in _TENSORS)))


class _ChunkGatedDeltaRule(torch.autograd.Function):
    """Keeps the inputs, and what the backward takes of the forward: the inverses of the chunks, 2 C bytes a token and value head,
    half of v's at V = 128, which save it chunk_inverse, 4 % of a dense one and more of a short one. Where both directions split
    sequences, the forward takes the segments of the backward and keeps what it finds out about them, which saves the backward
    three kernels: 12 to 20 % of one, for 3 * 64 KiB a segment and value head, 6 KiB a chunk in segments of 32. Where the backward
    goes through chunks in two bands, the state midway is kept too, 64 KiB a segment or sequence and value head, with which it
    needs not compute half of the states twice. The states of chunks are computed again: kept, they would be those of every layer
    at once, and twice v's bytes.

    What is kept beside the inputs is not among the saved tensors, which live until the backward returns: it is gone before its
    memory is at its highest. A second backward through the same graph computes it anew. Nobody else has it, so nobody changes it.
    """

    @staticmethod
    @custom_fwd(device_type="cuda")
    def forward(ctx: Any, call: CallInputs, *tensors: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """call: all of the inputs that are not tensors."""
        ctx.call = call
        ctx.save_for_backward(*tensors)
        inputs = dataclasses.replace(call, **dict(zip(_TENSORS, tensors, strict=True)))
        result = pipeline.forward(inputs, backward.wanted_of_forward(inputs))
        ctx.kept = FromForward() if _others_keep_what_is_saved() else backward.of_use(inputs, result)
        return result.o, result.final_state

    @staticmethod
    @once_differentiable
    @custom_bwd(device_type="cuda")
    def backward(ctx: Any, do: torch.Tensor, dht: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        # An output that has no part in the loss has a gradient of zeros here: its kernels are compiled already.
        inputs = dataclasses.replace(ctx.call, **dict(zip(_TENSORS, ctx.saved_tensors, strict=True)))
        gradients = backward.backward(inputs, do, dht, ctx.kept)
        return None, *(getattr(gradients, name, None) for name in _TENSORS)


def _others_keep_what_is_saved() -> bool:
    """Whether checkpointing, offloading or the like decides what stays in memory for the backward. What is kept is not shown to
    them, so it would stay where the caller asked for nothing to."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
