"""The call as autograd sees it: kernels in both directions."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.amp import custom_bwd, custom_fwd
from torch.autograd.function import once_differentiable

from . import backward, pipeline
from .inputs import CallInputs
from .results import ForwardResult

_TENSORS = ("q", "k", "v", "g", "beta", "initial_state", "A_log", "dt_bias", "cu_seqlens")


def covers(inputs: CallInputs) -> bool:
    """Whether kernels serve a call in both directions. At its first time they are compiled, all in one go: the first step
    of a training waits for the compiler once."""
    if inputs.B * inputs.T == 0:
        return True
    return backward.kernels_for(inputs, together_with=lambda: pipeline.choice_for(inputs)[1]) is not None


def differentiable_forward(inputs: CallInputs) -> ForwardResult:
    """The outputs of a call that covers() says yes to, with their gradients known to autograd."""
    call = dataclasses.replace(inputs, **dict.fromkeys(_TENSORS))
    return ForwardResult(*_ChunkGatedDeltaRule.apply(call, *(getattr(inputs, name) for name in _TENSORS)))


class _ChunkGatedDeltaRule(torch.autograd.Function):
    """Saves the inputs and nothing else. The backward computes the states of chunks again: kept, they would be those of every
    layer at once."""

    @staticmethod
    @custom_fwd(device_type="cuda")
    def forward(ctx: Any, call: CallInputs, *tensors: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """call: all of the inputs that are not tensors."""
        ctx.call = call
        ctx.save_for_backward(*tensors)
        result = pipeline.forward(dataclasses.replace(call, **dict(zip(_TENSORS, tensors, strict=True))))
        return result.o, result.final_state

    @staticmethod
    @once_differentiable
    @custom_bwd(device_type="cuda")
    def backward(ctx: Any, do: torch.Tensor, dht: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        # An output that has no part in the loss has a gradient of zeros here: its kernels are compiled already.
        inputs = dataclasses.replace(ctx.call, **dict(zip(_TENSORS, ctx.saved_tensors, strict=True)))
        gradients = backward.backward(inputs, do, dht)
        return None, *(getattr(gradients, name, None) for name in _TENSORS)
