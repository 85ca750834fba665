"""What the low-level operations return."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch


class Segments(NamedTuple):
    """Sequences cut into segments, and the gates' verdict on each. By segment place."""

    L: int                                       # chunks per segment
    places: int
    warm_chunks: torch.Tensor                    # [places, HV], int32: of segment_plan
    segments_before: torch.Tensor                # [N + 1], int32: in the sequences before each, and in all


class SegmentStates(NamedTuple):
    """Segments, what each of them does to the state, and the state that enters it. In fp32."""

    segments: Segments
    transfers: torch.Tensor                      # [places, HV, V + K, K]: N and M, transposed
    states: torch.Tensor                         # [places, HV, V, K]


WHOLE_SEQUENCES = 0                              # chunks per segment, where there are none


class MidwayStates(NamedTuple):
    """The state in front of chunk n // 2 of each segment, or whole sequence, of n chunks. In fp32; nothing where n is below 2."""

    L: int                                       # chunks per segment, or WHOLE_SEQUENCES
    states: torch.Tensor                         # [places, HV, V, K], places of segments or sequences


@dataclass(frozen=True)
class ForwardResult:
    """The outputs of a forward, and what its strategy makes on the way: g_sum and A that of `chunked`, Ab that of the others, and
    segments that of `split`; and midway, where the backward will go through chunks in two bands."""

    o: torch.Tensor                              # [B, T, HV, V], in q's dtype
    final_state: torch.Tensor | None             # [N, HV, K, V] or V-first; fp32 (fp64 for fp64 inputs); None if not asked for
    g_sum: torch.Tensor | None = None            # [chunks, HV, C], fp32, natural log: gates cumulated from each chunk's start
    A: torch.Tensor | None = None                # [chunks, HV, C, C], q's dtype: Gamma o A diag(beta)
    # [slots, HV, C, C], q's dtype: the inverse of each chunk without its gates, of all but `chunked`; for
    # chunk_gated_delta_rule_bwd
    Ab: torch.Tensor | None = None
    segments: SegmentStates | None = None        # likewise for it
    midway: MidwayStates | None = None           # likewise for it


class Gradients(NamedTuple):
    """One gradient per input, in that input's shape and dtype; None where the input was None or unused.

    A tuple in FLA's order, so that `dq, dk, dv, db, dg, dh0, dA_log, ddt_bias = chunk_gated_delta_rule_bwd(...)` works.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    beta: torch.Tensor
    g: torch.Tensor
    initial_state: torch.Tensor | None
    A_log: torch.Tensor | None
    dt_bias: torch.Tensor | None
