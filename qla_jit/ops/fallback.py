"""Run a checked call on the reference, where no kernel serves it: CPU tensors, and gradients that no kernel covers."""

from __future__ import annotations

import dataclasses

import torch

from .. import reference
from .inputs import CallInputs
from .results import ForwardResult, Gradients


def forward(inputs: CallInputs, *, by_chunk: bool = True) -> ForwardResult:
    """The call's outputs from PyTorch operations, differentiable by autograd."""
    facts = inputs.facts
    o, final_state = reference.gated_delta_rule(
        inputs.q,
        inputs.k,
        inputs.v,
        inputs.g,
        inputs.beta,
        scale=inputs.scale,
        initial_state=inputs.initial_state,
        use_qk_l2norm_in_kernel=facts.use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel=facts.use_beta_sigmoid_in_kernel,
        allow_neg_eigval=facts.allow_neg_eigval,
        state_v_first=facts.state_v_first,
        cu_seqlens=inputs.cu_seqlens,
        use_gate_in_kernel=facts.use_gate_in_kernel,
        A_log=inputs.A_log,
        dt_bias=inputs.dt_bias,
        chunk_size=facts.chunk_size if by_chunk else None,
    )
    return ForwardResult(o.to(facts.dtype), final_state if facts.output_final_state else None)


def backward(inputs: CallInputs, do: torch.Tensor, dht: torch.Tensor | None) -> Gradients:
    """The gradients from autograd, with every chunk's state in memory. dht: None if the final state has no part in the loss."""
    leaves = {
        name: getattr(inputs, name).detach().requires_grad_()
        for name in Gradients._fields
        if getattr(inputs, name) is not None
    }
    with torch.enable_grad():
        result = forward(dataclasses.replace(inputs, **leaves))
    outputs, gradients = [result.o], [do.to(result.o.dtype)]
    if dht is not None:
        outputs.append(result.final_state)
        gradients.append(dht.to(result.final_state.dtype))
    by_leaf = torch.autograd.grad(outputs, list(leaves.values()), gradients, materialize_grads=True)
    return Gradients(**(dict.fromkeys(Gradients._fields) | dict(zip(leaves, by_leaf, strict=True))))
