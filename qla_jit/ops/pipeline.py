"""Launch the kernels of a forward call, one line a kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .. import capture, kernel_cache, select
from ..device import gpu_info
from ..errors import UnsupportedError
from ..kernel_templates.macros.sequences import slot_count
from ..reference import L2NORM_EPS
from ..tuning_records import Hardware
from .inputs import CallFacts, CallInputs
from .plan import Extents
from .results import ForwardResult

INT32_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Kernels:
    """The chosen strategy, and the entry points of its kernels by step."""

    strategy: str
    launch: dict[str, Callable[..., None]]
    split: int | None                    # chunks per segment; None: whole sequences


_ready: dict[tuple[CallFacts, select.Override, Extents], Kernels] = {}


def kernels_for(inputs: CallInputs) -> Kernels:
    """The kernels of a call, compiled if need be. A dictionary hit from the second call of about the same size on."""
    facts, extents = inputs.facts, select.bucket(select.extents_of(inputs))
    key = (facts, select.override_in_force(), extents)
    kernels = _ready.get(key)
    if kernels is None:
        gpu = gpu_info(facts.device)
        dispatch = select.choose(facts, gpu.arch, hardware=Hardware.of(gpu), extents=extents)
        loaded = kernel_cache.get(list(dispatch.requests.values()))
        entries = {step: kernel.launch for step, kernel in zip(dispatch.requests, loaded, strict=True)}
        kernels = _ready[key] = Kernels(dispatch.strategy, entries, dispatch.split)
    return kernels


def forward(inputs: CallInputs) -> ForwardResult:
    """o, the final state, and the chunk-indexed tensors that a backward needs. Launches on the current stream, no sync."""
    facts = inputs.facts
    if facts.device.index != torch.cuda.current_device():
        with torch.cuda.device(facts.device):
            return forward(inputs)
    if inputs.B * inputs.T == 0:
        return _no_tokens(inputs)
    kernels = kernels_for(inputs)
    capture.note(inputs)
    return LAUNCHERS[kernels.strategy](kernels.launch, inputs)


def _chunked(launch: dict[str, Callable[..., None]], inputs: CallInputs) -> ForwardResult:
    facts = inputs.facts
    HV, K, V, C, dtype = facts.HV, facts.K, facts.V, facts.chunk_size, facts.dtype
    slots = _slots(inputs)
    cu_seqlens = inputs.cu_seqlens
    q, k = _prepared_keys(launch, inputs)
    v = _aligned(inputs.v)
    g_sum, beta = _prepared_gates(launch, inputs, slots)

    A = torch.empty(slots, HV, C, C, dtype=dtype, device=facts.device)
    launch["triangular_solve"](k, g_sum, beta, cu_seqlens, A)
    states = torch.empty(slots, HV, K, V, dtype=dtype, device=facts.device)
    v_new = torch.empty(slots, HV, C, V, dtype=dtype, device=facts.device)
    initial_state, final_state = _states(inputs)
    launch["state_scan"](k, v, A, g_sum, cu_seqlens, initial_state, states, v_new, final_state)
    o = torch.empty_like(v)
    launch["chunk_output"](q, k, v_new, states, g_sum, cu_seqlens, o, inputs.scale)
    return ForwardResult(o, final_state, g_sum, A)


LAUNCHERS = {"chunked": _chunked}


def _slots(inputs: CallInputs) -> int:
    """Chunk slots of a call. Kernels count tokens, rows and blocks in 32 bits; only their offsets are 64 bits wide."""
    facts = inputs.facts
    slots = slot_count(inputs.B, inputs.T, inputs.N, facts.chunk_size, facts.varlen)
    if max(inputs.B * inputs.T * facts.H, slots * facts.HV) > INT32_MAX:
        raise UnsupportedError(
            f"B * T * H and chunks * HV may be at most {INT32_MAX:,}; got B={inputs.B}, T={inputs.T}, H={facts.H}, "
            f"{slots:,} chunks, HV={facts.HV}; split the batch into several calls"
        )
    return slots


def _prepared_keys(launch: dict[str, Callable[..., None]], inputs: CallInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k as the kernels read them: aligned, and with unit rows if asked for."""
    q, k = _aligned(inputs.q), _aligned(inputs.k)
    if not inputs.facts.use_qk_l2norm_in_kernel:
        return q, k
    q_unit, k_unit = torch.empty_like(q), torch.empty_like(k)
    rows = (-1, inputs.facts.K)
    launch["l2norm"](q.view(rows), k.view(rows), L2NORM_EPS, q_unit.view(rows), k_unit.view(rows))
    return q_unit, k_unit


def _prepared_gates(
    launch: dict[str, Callable[..., None]], inputs: CallInputs, slots: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """g_sum and beta, chunk-indexed [slots, HV, C] in float32."""
    facts = inputs.facts
    g_sum, beta = torch.empty(2, slots, facts.HV, facts.chunk_size, dtype=torch.float32, device=facts.device).unbind()
    A_log = None if inputs.A_log is None else inputs.A_log.float()
    dt_bias = None if inputs.dt_bias is None else inputs.dt_bias.float()
    launch["gate_cumsum"](inputs.g, inputs.beta, A_log, dt_bias, inputs.cu_seqlens, g_sum, beta)
    return g_sum, beta


def _states(inputs: CallInputs) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The initial state as the kernels read it, and room for the final one."""
    facts = inputs.facts
    initial_state = None if inputs.initial_state is None else _aligned(inputs.initial_state)
    if not facts.output_final_state:
        return initial_state, None
    dims = (facts.V, facts.K) if facts.state_v_first else (facts.K, facts.V)
    return initial_state, torch.empty(inputs.N, facts.HV, *dims, dtype=torch.float32, device=facts.device)


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """x where bulk copies and 16-byte loads can start: a contiguous view may begin anywhere in its storage."""
    return x if x.data_ptr() % 16 == 0 else x.clone()


def _no_tokens(inputs: CallInputs) -> ForwardResult:
    """o is empty and the state passes through."""
    initial_state, final_state = _states(inputs)
    if final_state is not None:
        final_state = final_state.zero_() if initial_state is None else final_state.copy_(initial_state)
    return ForwardResult(torch.empty_like(inputs.v), final_state)
