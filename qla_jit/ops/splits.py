"""How long a segment should be when sequences are split inside one GPU (AutoCP): a cost model, the tuner's starting point.

A segment is scanned once for what it does to the state, then computed from the state that enters it; between the two, states
go from segment to segment one after the other. Short segments fill the GPU and make that chain long.
"""

from __future__ import annotations

# Microseconds on an H200, fitted to benchmarks/results/h200/forward.json: most rows within 15 %. Only their ratios matter.
# register_state_forward, one chunk of an item, by the mean share of SMs at work: memory and the power limit slow full GPUs.
STEPS = ((0.55, 1.9), (0.85, 2.2), (1.0, 2.5))
SCAN_STEP, SCAN_ITEM = 1.3, 8.0          # segment_scan: one chunk, and what every item costs
BOUNDARY = 1.0                           # segment_states, from one segment to the next
LAUNCHES = 20.0                          # three kernels more
# What heads do is only known on the GPU: a quarter that never forget, as in FlashQLA's benchmark, others within 4 chunks.
EXACT_SHARE, WARM_CHUNKS = 0.25, 4

SEGMENTS = tuple(2**power for power in range(2, 12))


def whole_us(rows: int, longest: int, chunks: int, sm_count: int) -> float:
    """Expected time of the forward without a split. rows: items of 128 state rows for each sequence."""
    return forward_us(rows, chunks, max(longest, -(-chunks * rows // sm_count)), sm_count)


def split_us(rows: int, longest: int, chunks: int, sequences: int, L: int, sm_count: int) -> float:
    """Expected time with L chunks a segment."""
    if sequences * longest == chunks:
        segments = sequences * -(-longest // L)
    else:
        segments = chunks // L + sequences           # at most; how much each sequence leaves over is not known
    # Each sequence has a place without a segment; with many of them the stride of the persistent blocks meets them unevenly.
    places = segments if sequences <= 2 else chunks // L + sequences
    forward = forward_us(rows, chunks, L * -(-places * rows // sm_count), sm_count)
    scanned = (segments - sequences) * rows
    exact = 2 * EXACT_SHARE * (SCAN_STEP * L + SCAN_ITEM)
    warm = (1 - EXACT_SHARE) * (SCAN_STEP * min(WARM_CHUNKS, L) + SCAN_ITEM)
    scan = max(SCAN_STEP * L + SCAN_ITEM, scanned * (exact + warm) / sm_count) if scanned else 0.0
    return forward + scan + BOUNDARY * (longest / L) + LAUNCHES


def forward_us(rows: int, chunks: int, steps: int, sm_count: int) -> float:
    """steps: of the block that works longest."""
    share = min(rows * chunks / (steps * sm_count), 1.0)
    return steps * next(step for limit, step in STEPS if share <= limit)


def best_split(rows: int, longest: int, chunks: int, sequences: int, sm_count: int) -> int | None:
    """Chunks per segment; None where whole sequences are expected to be about as fast."""
    whole = whole_us(rows, longest, chunks, sm_count)
    costs = {L: split_us(rows, longest, chunks, sequences, L, sm_count) for L in SEGMENTS if longest > L}
    if not costs:
        return None
    L = min(costs, key=lambda length: costs[length])
    return L if costs[L] < 0.9 * whole else None
