"""How each library computes the same gradients: one System for each column of the backward table."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from systems import System
from workload import Inputs

NAMES = ("dq", "dk", "dv", "dg", "dbeta", "dh0")
Gradients = tuple[torch.Tensor, ...]     # in the order of NAMES


@dataclass(frozen=True)
class Cotangents:
    """Gradients of the outputs."""

    do: torch.Tensor                     # [1, T, HV, V], bf16
    dht: torch.Tensor                    # [N, HV, K, V], fp32


@dataclass(frozen=True)
class Calls:
    """`gradients` is the library's low-level backward, `step` a forward and a backward through autograd."""

    gradients: Callable[[], Gradients]
    step: Callable[[], Gradients]


def make_cotangents(x: Inputs, *, seed: int = 0) -> Cotangents:
    generator = torch.Generator(device=x.q.device).manual_seed(1000 + seed)
    do = torch.randn(x.v.shape, device=x.q.device, generator=generator).to(x.v.dtype)
    return Cotangents(do, torch.randn(x.initial_state.shape, device=x.q.device, generator=generator))


def autograd_step(
    x: Inputs, y: Cotangents, operation: Callable[..., tuple[torch.Tensor, torch.Tensor]], **more: Any
) -> Callable[[], Gradients]:
    """operation: the library's chunk_gated_delta_rule. more: what it takes beside the arguments that all of them have."""
    leaves = [t.detach().requires_grad_() for t in (x.q, x.k, x.v, x.g, x.beta, x.initial_state)]

    def step() -> Gradients:
        *arguments, initial_state = leaves
        outputs = operation(
            *arguments, initial_state=initial_state, output_final_state=True, cu_seqlens=x.cu_seqlens, **more
        )
        return torch.autograd.grad(outputs, leaves, (y.do, y.dht))

    return step


def qla_jit_calls(x: Inputs, y: Cotangents) -> Calls:
    import qla_jit

    lengths = dict(cu_seqlens=x.cu_seqlens, cu_seqlens_cpu=x.cu_seqlens_cpu)
    made = qla_jit.chunk_gated_delta_rule_fwd(
        x.q, x.k, x.v, x.g, x.beta, initial_state=x.initial_state, output_final_state=True, **lengths
    )
    kept = dict(Ab=made.Ab, segments=made.segments, midway=made.midway)

    def gradients() -> Gradients:
        found = qla_jit.chunk_gated_delta_rule_bwd(
            x.q, x.k, x.v, x.g, x.beta, None, y.do, y.dht, initial_state=x.initial_state, **kept, **lengths
        )
        return found.q, found.k, found.v, found.g, found.beta, found.initial_state

    return Calls(gradients, autograd_step(x, y, qla_jit.chunk_gated_delta_rule, cu_seqlens_cpu=x.cu_seqlens_cpu))


def flash_qla_calls(x: Inputs, y: Cotangents) -> Calls:
    from flash_qla import chunk_gated_delta_rule, chunk_gated_delta_rule_bwd, chunk_gated_delta_rule_fwd

    g_sum, A, *_ = chunk_gated_delta_rule_fwd(
        x.q, x.k, x.v, x.g, x.beta, initial_state=x.initial_state, cu_seqlens=x.cu_seqlens, output_final_state=True
    )

    def gradients() -> Gradients:
        dq, dk, dv, dbeta, dg, dh0 = chunk_gated_delta_rule_bwd(
            x.q, x.k, x.v, g_sum, x.beta, A, y.do, y.dht, initial_state=x.initial_state, cu_seqlens=x.cu_seqlens
        )
        return dq, dk, dv, dg, dbeta, dh0

    return Calls(gradients, autograd_step(x, y, chunk_gated_delta_rule))


def fla_calls(x: Inputs, y: Cotangents) -> Calls:
    os.environ["FLA_FLASH_QLA"] = "0"    # else it hands the call to FlashQLA, which has a column of its own
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from fla.ops.gated_delta_rule.chunk import chunk_gated_delta_rule_bwd, chunk_gated_delta_rule_fwd

    scale = x.q.shape[-1] ** -0.5
    g_sum, _, A, *_ = chunk_gated_delta_rule_fwd(
        q=x.q, k=x.k, v=x.v, g=x.g, beta=x.beta, scale=scale, initial_state=x.initial_state, output_final_state=True,
        cu_seqlens=x.cu_seqlens,
    )

    def gradients() -> Gradients:
        dq, dk, dv, dbeta, dg, dh0, *_ = chunk_gated_delta_rule_bwd(
            q=x.q, k=x.k, v=x.v, g=g_sum, beta=x.beta, A=A, scale=scale, initial_state=x.initial_state, do=y.do, dht=y.dht,
            cu_seqlens=x.cu_seqlens,
        )
        return dq, dk, dv, dg, dbeta, dh0

    return Calls(gradients, autograd_step(x, y, chunk_gated_delta_rule))


TRAINING_SYSTEMS = (
    System("qla_jit", module="qla_jit", distribution="qla_jit", prepare=qla_jit_calls),
    System("flash_qla", module="flash_qla", distribution="flash-qla", prepare=flash_qla_calls),
    System("fla", module="fla", distribution="fla-core", prepare=fla_calls),
)
