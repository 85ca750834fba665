"""Launch the kernels of a forward call, one line a kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .. import kernel_cache, select
from ..device import gpu_info
from ..errors import UnsupportedError
from ..kernel_templates.macros.sequences import slot_count
from .inputs import CallFacts, CallInputs
from .plan import plan_forward
from .results import ForwardResult

L2NORM_EPS = 1e-6
INT32_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Kernels:
    """The entry points of a plan's kernels, by step; a step that the plan leaves out is None."""

    strategy: str
    gate_cumsum: Any
    triangular_solve: Any
    state_scan: Any
    chunk_output: Any
    l2norm: Any = None


_ready: dict[tuple[CallFacts, tuple], Kernels] = {}


def kernels_for(facts: CallFacts) -> Kernels:
    """The kernels of a call, compiled if need be. A dictionary hit from the second call on."""
    key = (facts, select.overrides_in_force())
    kernels = _ready.get(key)
    if kernels is None:
        plan = plan_forward(facts)
        loaded = kernel_cache.get(plan.requests(gpu_info(facts.device).arch))
        entries = {step: kernel.launch for step, kernel in zip(plan.steps, loaded, strict=True)}
        kernels = _ready[key] = Kernels(plan.strategy, **entries)
    return kernels


def forward(inputs: CallInputs) -> ForwardResult:
    """o, the final state, and the chunk-indexed tensors that a backward needs. Launches on the current stream, no sync."""
    facts = inputs.facts
    if facts.device.index != torch.cuda.current_device():
        with torch.cuda.device(facts.device):
            return forward(inputs)
    B, tokens, N = inputs.B, inputs.T, inputs.N
    HV, K, V, C, dtype, device = facts.HV, facts.K, facts.V, facts.chunk_size, facts.dtype, facts.device
    if B * tokens == 0 or N == 0:
        return _nothing_to_scan(inputs)
    kernels = kernels_for(facts)
    slots = slot_count(B, tokens, N, C, facts.varlen)
    _check_extents(B, tokens, facts.H, HV, slots)

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    q, k, v, cu_seqlens = _aligned(inputs.q), _aligned(inputs.k), _aligned(inputs.v), inputs.cu_seqlens
    g_sum, beta = new(slots, HV, C), new(slots, HV, C)
    A = new(slots, HV, C, C, dtype=dtype)
    states, v_new = new(slots, HV, K, V, dtype=dtype), new(slots, HV, C, V, dtype=dtype)
    o = torch.empty_like(v)
    initial_state = None if inputs.initial_state is None else _aligned(inputs.initial_state)
    final_state = None
    if facts.output_final_state:
        final_state = new(N, HV, V, K) if facts.state_v_first else new(N, HV, K, V)

    if kernels.l2norm is not None:
        q, k = _unit_rows(kernels.l2norm, q, k)
    kernels.gate_cumsum(inputs.g, inputs.beta, inputs.A_log, inputs.dt_bias, cu_seqlens, g_sum, beta)
    kernels.triangular_solve(k, g_sum, beta, cu_seqlens, A)
    kernels.state_scan(k, v, A, g_sum, cu_seqlens, initial_state, states, v_new, final_state)
    kernels.chunk_output(q, k, v_new, states, g_sum, cu_seqlens, o, inputs.scale)
    return ForwardResult(o, final_state, g_sum, A)


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """x where bulk copies and 16-byte loads can start: a contiguous view may begin anywhere in its storage."""
    return x if x.data_ptr() % 16 == 0 else x.clone()


def _unit_rows(l2norm: Any, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    q_unit, k_unit = torch.empty_like(q), torch.empty_like(k)
    rows = (-1, q.shape[-1])
    l2norm(q.view(rows), k.view(rows), L2NORM_EPS, q_unit.view(rows), k_unit.view(rows))
    return q_unit, k_unit


def _nothing_to_scan(inputs: CallInputs) -> ForwardResult:
    """No token, or no sequence: o is zero and the state passes through."""
    facts = inputs.facts
    final_state = None
    if facts.output_final_state and inputs.initial_state is not None:
        final_state = inputs.initial_state.to(torch.float32, copy=True)
    elif facts.output_final_state:
        tail = (facts.V, facts.K) if facts.state_v_first else (facts.K, facts.V)
        final_state = torch.zeros(inputs.N, facts.HV, *tail, dtype=torch.float32, device=facts.device)
    return ForwardResult(torch.zeros_like(inputs.v), final_state)


def _check_extents(B: int, tokens: int, H: int, HV: int, slots: int) -> None:
    """Kernels count tokens, rows and blocks in 32 bits; offsets are 64 bits wide."""
    largest = max(B * tokens * H, slots * HV)
    if largest > INT32_MAX:
        raise UnsupportedError(
            f"B * T * H and chunks * HV may be at most {INT32_MAX:,}; got B={B}, T={tokens}, H={H}, {slots:,} chunks, HV={HV}; "
            "split the batch into several calls"
        )
