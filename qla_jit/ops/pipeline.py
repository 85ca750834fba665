"""Launch the kernels of a forward call, one line a kernel."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from .. import capture, kernel_cache, select
from ..build_command import build_command_of_call, told_on_a_miss
from ..compiler import CompileRequest
from ..device import gpu_info
from ..kernel_templates.macros.register_roles import KEYS, parts_of
from ..settings import settings
from ..tuning_records import Hardware
from .inputs import CallFacts, CallInputs
from .kept import Wanted
from .operands import (
    aligned,
    chunk_inverses,
    no_states,
    planned_segments,
    prepared_keys,
    scanned_chunks,
    segment_states,
    slots_of,
    with_float_parameters,
)
from .plan import Extents
from .results import WHOLE_SEQUENCES, ForwardResult, MidwayStates


@dataclass(frozen=True, slots=True)
class Kernels:
    """How a call is computed, and the entry points of its kernels by step."""

    dispatch: select.Dispatch
    launch: dict[str, Callable[..., None]]


NOTHING_WANTED = Wanted()

_Key = tuple[CallFacts, select.Override, Extents, bool]

_ready: dict[_Key, Kernels] = {}


def kernels_for(inputs: CallInputs, *, to_split: bool = False) -> Kernels:
    """The kernels of a call, compiled if need be. A dictionary hit from the second call of about the same size on.

    to_split: those that split sequences, unless another strategy is in force or none of the call does."""
    facts, extents = inputs.facts, select.bucket(select.extents_of(inputs))
    key = (facts, select.override_in_force(), extents, to_split)
    kernels = _ready.get(key)
    if kernels is None:
        dispatch, needed = choice_for(inputs, to_split=to_split)
        with told_on_a_miss(lambda: build_command_of_call(facts, gpu_info(facts.device))):
            loaded = kernel_cache.get(needed)[: len(dispatch.requests)]
        entries = {step: kernel.launch for step, kernel in zip(dispatch.requests, loaded, strict=True)}
        kernels = _ready[key] = Kernels(dispatch, entries)
    return kernels


def resolved() -> dict[_Key, Kernels]:
    """What calls have been given so far, by what they are and their rounded sizes."""
    return dict(_ready)


def choice_for(inputs: CallInputs, *, to_split: bool = False) -> tuple[select.Dispatch, list[CompileRequest]]:
    """How a call is computed, and the kernels to have ready at its first time, those of the call itself first."""
    facts, extents = inputs.facts, select.bucket(select.extents_of(inputs))
    gpu = gpu_info(facts.device)
    preferred = "split" if to_split else None
    dispatch = select.choose(facts, gpu.arch, hardware=Hardware.of(gpu), extents=extents, preferred=preferred)
    needed = list(dispatch.requests.values())
    if dispatch.source == "default" and settings().mode != "require":
        # The first call compiles for all sizes: a later one must not wait for a compiler.
        needed = list(dict.fromkeys([*needed, *select.requests_for_any_size(facts, gpu.arch)]))
    return dispatch, needed


def forward(inputs: CallInputs, wanted: Wanted = NOTHING_WANTED) -> ForwardResult:
    """o and the final state, and what the strategy makes on the way. Launches on the current stream, no sync.

    wanted: by the backward of the call; it has precedence over what is chosen for the forward alone.
    """
    facts = inputs.facts
    if facts.device.index != torch.cuda.current_device():
        with torch.cuda.device(facts.device):
            return forward(inputs, wanted)
    if inputs.B * inputs.T == 0:
        return _no_tokens(inputs)
    kernels = kernels_for(inputs, to_split=wanted.split is not None)
    capture.note(inputs)
    return LAUNCHERS[kernels.dispatch.strategy](kernels, with_float_parameters(inputs), wanted)


def _chunked(kernels: Kernels, inputs: CallInputs, wanted: Wanted) -> ForwardResult:
    launch = kernels.launch
    q, k = prepared_keys(launch, inputs)
    v = aligned(inputs.v)
    initial_state, final_state = _states(inputs)
    chunks = scanned_chunks(launch, inputs, k, v, initial_state, final_state)
    o = torch.empty_like(v)
    launch["chunk_output"](q, k, chunks.v_new, chunks.states, chunks.g_sum, inputs.cu_seqlens, o, inputs.scale)
    return ForwardResult(o, final_state, chunks.g_sum, chunks.A)


def _fused(kernels: Kernels, inputs: CallInputs, wanted: Wanted) -> ForwardResult:
    q, k = prepared_keys(kernels.launch, inputs)
    v = aligned(inputs.v)
    Ab = chunk_inverses(kernels.launch, inputs, k, slots_of(inputs), early=False)
    initial_state, final_state = _states(inputs)
    o, midway = _rest_of_forward(
        kernels, inputs, q, k, v, Ab, initial_state, final_state, None, wanted, places=inputs.N, L=WHOLE_SEQUENCES
    )
    return ForwardResult(o, final_state, Ab=Ab, midway=midway)


def _split(kernels: Kernels, inputs: CallInputs, wanted: Wanted) -> ForwardResult:
    launch = kernels.launch
    q, k = prepared_keys(launch, inputs)
    v = aligned(inputs.v)
    slots = slots_of(inputs)
    L = kernels.dispatch.segment_length(select.extents_of(inputs)) if wanted.split is None else wanted.split
    segments = planned_segments(launch, inputs, L)
    Ab = chunk_inverses(launch, inputs, k, slots, early=True)
    initial_state, final_state = _states(inputs)
    found = segment_states(launch, inputs, k, v, Ab, initial_state, segments)
    o, midway = _rest_of_forward(
        kernels, inputs, q, k, v, Ab, found.states, final_state, found.segments.segments_before, wanted,
        places=found.segments.places, L=found.segments.L,
    )  # fmt: skip
    return ForwardResult(o, final_state, Ab=Ab, segments=found, midway=midway)


LAUNCHERS = {"chunked": _chunked, "fused": _fused, "fused_halves": _fused, "split": _split}


def _rest_of_forward(
    kernels: Kernels,
    inputs: CallInputs,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    Ab: torch.Tensor,
    initial_state: torch.Tensor | None,
    final_state: torch.Tensor | None,
    segments_before: torch.Tensor | None,
    wanted: Wanted,
    *,
    places: int,
    L: int,
) -> tuple[torch.Tensor, MidwayStates | None]:
    """o, the final state where there is room for it, and the states midway if they are wanted of these segments."""
    facts, device = inputs.facts, inputs.facts.device
    o = torch.empty_like(v)
    scale = abs(inputs.scale)            # the kernel works with its logarithm
    rows = kernels.dispatch.requests["register_state_forward"].problem.rows
    parts = parts_of(facts.V, rows)
    states, midway = no_states(device, facts.HV, parts * rows, KEYS), None
    if wanted.midway == L:
        states = torch.empty(places, facts.HV, parts * rows, KEYS, dtype=torch.float32, device=device)
        midway = MidwayStates(L, states)
    kernels.launch["register_state_forward"](
        q, k, v, Ab, inputs.g, inputs.A_log, inputs.dt_bias, inputs.cu_seqlens, segments_before, initial_state, o,
        final_state, states, scale, math.log2(scale) if scale else -math.inf, L, _blocks(inputs, places * facts.HV * parts),
    )  # fmt: skip
    return o.neg_() if inputs.scale < 0 else o, midway


def _blocks(inputs: CallInputs, items: int) -> int:
    """Blocks of a persistent kernel: each takes every blocks-th item."""
    return min(items, gpu_info(inputs.facts.device).sm_count)


def _states(inputs: CallInputs) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The initial state as the kernels read it, and room for the final one."""
    facts = inputs.facts
    initial_state = None if inputs.initial_state is None else aligned(inputs.initial_state)
    if not facts.output_final_state:
        return initial_state, None
    dims = (facts.V, facts.K) if facts.state_v_first else (facts.K, facts.V)
    return initial_state, torch.empty(inputs.N, facts.HV, *dims, dtype=torch.float32, device=facts.device)


def _no_tokens(inputs: CallInputs) -> ForwardResult:
    """o is empty and the state passes through."""
    initial_state, final_state = _states(inputs)
    if final_state is not None:
        final_state = final_state.zero_() if initial_state is None else final_state.copy_(initial_state)
    return ForwardResult(torch.empty_like(inputs.v), final_state)
