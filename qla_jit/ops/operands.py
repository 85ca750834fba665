"""What the launchers of the forward and the backward hand to the kernels that both begin with."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import torch

from ..errors import UnsupportedError
from ..kernel_templates.macros.register_roles import KEYS, ROWS, parts_of
from ..kernel_templates.macros.segments import place_count
from ..kernel_templates.macros.sequences import slot_count
from ..reference import L2NORM_EPS
from .inputs import CallFacts, CallInputs
from .results import Segments, SegmentStates

INT32_MAX = 2**31 - 1


class ScannedChunks(NamedTuple):
    """What `chunked` knows of every chunk after its scan; docs/maths.md has the symbols. By chunk slot."""

    g_sum: torch.Tensor                          # [slots, HV, C], fp32
    beta: torch.Tensor                           # [slots, HV, C], fp32
    A: torch.Tensor                              # [slots, HV, C, C]: Ag
    states: torch.Tensor                         # [slots, HV, K, V]: the state that enters
    v_new: torch.Tensor                          # [slots, HV, C, V]


def slots_of(inputs: CallInputs) -> int:
    """Chunk slots of a call. Kernels count tokens, rows and blocks in 32 bits; only their offsets are 64 bits wide."""
    facts = inputs.facts
    slots = slot_count(inputs.B, inputs.T, inputs.N, facts.chunk_size, facts.varlen)
    if max(inputs.B * inputs.T * facts.H, slots * facts.HV) > INT32_MAX:
        raise UnsupportedError(
            f"B * T * H and chunks * HV may be at most {INT32_MAX:,}; got B={inputs.B}, T={inputs.T}, H={facts.H}, "
            f"{slots:,} chunks, HV={facts.HV}; split the batch into several calls"
        )
    return slots


def prepared_keys(launch: dict[str, Callable[..., None]], inputs: CallInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k as the kernels read them: aligned, and with unit rows if asked for."""
    q, k = aligned(inputs.q), aligned(inputs.k)
    if not inputs.facts.use_qk_l2norm_in_kernel:
        return q, k
    q_unit, k_unit = torch.empty_like(q), torch.empty_like(k)
    rows = (-1, inputs.facts.K)
    launch["l2norm"](q.view(rows), k.view(rows), L2NORM_EPS, q_unit.view(rows), k_unit.view(rows))
    return q_unit, k_unit


def scanned_chunks(
    launch: dict[str, Callable[..., None]],
    inputs: CallInputs,
    k: torch.Tensor,
    v: torch.Tensor,
    initial_state: torch.Tensor | None,
    final_state: torch.Tensor | None,
) -> ScannedChunks:
    """The recurrence over chunks, and the final state where there is room for it. k and v as the kernels read them."""
    facts, cu_seqlens = inputs.facts, inputs.cu_seqlens
    HV, K, V, C, slots = facts.HV, facts.K, facts.V, facts.chunk_size, slots_of(inputs)

    def chunked(*shape: int) -> torch.Tensor:
        return torch.empty(slots, HV, *shape, dtype=facts.dtype, device=facts.device)

    g_sum, beta = summed_gates(launch, inputs, slots)
    A = chunked(C, C)
    launch["triangular_solve"](k, g_sum, beta, cu_seqlens, A)
    states, v_new = chunked(K, V), chunked(C, V)
    launch["state_scan"](k, v, A, g_sum, cu_seqlens, initial_state, states, v_new, final_state)
    return ScannedChunks(g_sum, beta, A, states, v_new)


def summed_gates(
    launch: dict[str, Callable[..., None]], inputs: CallInputs, slots: int, counts: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gates of each chunk, summed from its first token on, and its write strengths: both [slots, HV, C], fp32.

    counts: of chunks listed, int32, to be set to 0 where the kernel does."""
    facts = inputs.facts
    shape = (slots, facts.HV, facts.chunk_size)
    g_sum, beta = (torch.empty(shape, dtype=torch.float32, device=facts.device) for _ in range(2))
    launch["gate_cumsum"](inputs.g, inputs.beta, inputs.A_log, inputs.dt_bias, inputs.cu_seqlens, g_sum, beta, counts)
    return g_sum, beta


def chunk_inverses(
    launch: dict[str, Callable[..., None]], inputs: CallInputs, k: torch.Tensor, slots: int, *, early: bool
) -> torch.Tensor:
    """The inverse of each chunk without gates, [slots, HV, C, C].

    early: beside the kernel before, which is segment_plan (macros/launches.py says what else that asks for)."""
    facts = inputs.facts
    Ab = torch.empty(slots, facts.HV, facts.chunk_size, facts.chunk_size, dtype=facts.dtype, device=facts.device)
    launch["chunk_inverse"](k, inputs.beta, inputs.cu_seqlens, Ab, int(early))
    return Ab


def segment_states(
    launch: dict[str, Callable[..., None]],
    inputs: CallInputs,
    k: torch.Tensor,
    v: torch.Tensor,
    Ab: torch.Tensor,
    initial_state: torch.Tensor | None,
    segments: Segments,
) -> SegmentStates:
    """The state that enters each of the segments."""
    transfers = _segment_transfers(launch, inputs, k, v, Ab, segments)
    states = states_of_segments(inputs, segments)
    launch["segment_states"](
        transfers, segments.warm_chunks, inputs.cu_seqlens, initial_state, states, segments.L, inputs.T, inputs.N
    )
    return SegmentStates(segments, transfers, states)


def planned_segments(launch: dict[str, Callable[..., None]], inputs: CallInputs, L: int) -> Segments:
    """Sequences in segments of L chunks."""
    places = place_count(slots_of(inputs), inputs.N, L)
    segments_before = torch.empty(inputs.N + 1, dtype=torch.int32, device=inputs.facts.device)
    warm_chunks = warm_chunks_of(launch["segment_plan"], inputs, segments_before, places=places, L=L)
    return Segments(L, places, warm_chunks, segments_before)


def _segment_transfers(
    launch: dict[str, Callable[..., None]],
    inputs: CallInputs,
    k: torch.Tensor,
    v: torch.Tensor,
    Ab: torch.Tensor,
    segments: Segments,
) -> torch.Tensor:
    facts, places = inputs.facts, segments.places
    transfers = torch.empty(transfers_shape(facts, places), dtype=torch.float32, device=facts.device)
    # A block for every item: how long one takes is only known on the GPU, whose scheduler balances better than a stride would.
    items = places * facts.HV * (parts_of(facts.V) + 1)
    launch["segment_scan"](
        k, v, Ab, inputs.g, inputs.A_log, inputs.dt_bias, inputs.cu_seqlens, segments.segments_before, segments.warm_chunks,
        transfers, segments.L, items,
    )  # fmt: skip
    return transfers


def transfers_shape(facts: CallFacts, places: int) -> tuple[int, ...]:
    """Of what segments do to the state, N and M, in whole tiles."""
    return places, facts.HV, parts_of(facts.V) * ROWS + KEYS, KEYS


def states_of_segments(inputs: CallInputs, segments: Segments) -> torch.Tensor:
    """Room for a state of each segment, or its gradient, in whole tiles."""
    facts = inputs.facts
    return torch.empty(
        segments.places, facts.HV, parts_of(facts.V) * ROWS, KEYS, dtype=torch.float32, device=facts.device
    )


@functools.cache
def no_states(device: torch.device, *shape: int) -> torch.Tensor:
    """States of no place, for a kernel that would read or write them there: it cannot be given None."""
    return torch.empty(0, *shape, dtype=torch.float32, device=device)


def warm_chunks_of(
    launch: Callable[..., None], inputs: CallInputs, segments_before: torch.Tensor | None, *, places: int, L: int
) -> torch.Tensor:
    """How many chunks of each segment suffice, [places, HV], from the end that segment_plan was built for.

    segments_before: room for what it counts, unless it goes backwards."""
    warm_chunks = torch.empty(places, inputs.facts.HV, dtype=torch.int32, device=inputs.facts.device)
    launch(inputs.g, inputs.A_log, inputs.dt_bias, inputs.cu_seqlens, warm_chunks, segments_before, L)
    return warm_chunks


def with_float_parameters(inputs: CallInputs) -> CallInputs:
    """A_log and dt_bias in float32, as every kernel reads them; models keep them so, and then nothing is done."""
    A_log, dt_bias = inputs.A_log, inputs.dt_bias
    if A_log is None:                    # then there is no dt_bias either
        return inputs
    if A_log.dtype == torch.float32 and (dt_bias is None or dt_bias.dtype == torch.float32):
        return inputs
    return dataclasses.replace(inputs, A_log=A_log.float(), dt_bias=None if dt_bias is None else dt_bias.float())


def aligned(x: torch.Tensor) -> torch.Tensor:
    """x where bulk copies and 16-byte loads can start: a contiguous view may begin anywhere in its storage."""
    return x if x.data_ptr() % 16 == 0 else x.clone()
