"""How long a segment should be when sequences are split inside one GPU (AutoCP): a cost model, the tuner's starting point.

A segment is scanned once for what it does to the state, then computed from the state that enters it; between the two, states
go from segment to segment one after the other. Short segments fill the GPU and make that chain long.
"""

from __future__ import annotations

# Microseconds on an H200, of the kernels as they were first measured (docs/performance.md). Only their ratios matter here.
FORWARD_STEP = 2.2                       # register_state_forward, one chunk of one item
SCAN_STEP = 1.3                          # segment_scan
BOUNDARY = 1.0                           # segment_states, from one segment to the next
LAUNCHES = 12.0                          # three kernels more
# What heads do is only known on the GPU: a quarter that never forget, as in FlashQLA's benchmark, others within 4 chunks.
EXACT_SHARE, WARM_CHUNKS = 0.25, 4

SEGMENTS = tuple(2**power for power in range(2, 12))


def whole_us(rows: int, longest: int, chunks: int, sm_count: int) -> float:
    """Expected time of the forward without a split. rows: items of 128 state rows for each sequence."""
    return FORWARD_STEP * max(longest, -(-chunks * rows // sm_count))


def split_us(rows: int, longest: int, chunks: int, sequences: int, L: int, sm_count: int) -> float:
    """Expected time with L chunks a segment."""
    segments = max(-(-chunks // L), sequences)
    forward = FORWARD_STEP * L * -(-segments * rows // sm_count)
    scanned = (segments - sequences) * rows
    exact = 2 * L * EXACT_SHARE * scanned
    warm = WARM_CHUNKS * (1 - EXACT_SHARE) * scanned
    scan = SCAN_STEP * max(L, (exact + warm) / sm_count) if scanned else 0.0
    return forward + scan + BOUNDARY * (longest / L) + LAUNCHES


def best_split(rows: int, longest: int, chunks: int, sequences: int, sm_count: int) -> int | None:
    """Chunks per segment; None where whole sequences are expected to be as fast."""
    whole = whole_us(rows, longest, chunks, sm_count)
    costs = {L: split_us(rows, longest, chunks, sequences, L, sm_count) for L in SEGMENTS if longest > L}
    if not costs:
        return None
    L = min(costs, key=lambda length: costs[length])
    return L if costs[L] < 0.9 * whole else None
