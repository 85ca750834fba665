"""How long a segment should be when sequences are split inside one GPU (AutoCP): a cost model, the tuner's starting point.

A segment is scanned once for what it does to the state, then computed from the state that enters it; between the two, states
go from segment to segment one after the other. Short segments fill the GPU and make that chain long.
"""

from __future__ import annotations

from typing import NamedTuple

# Microseconds on an H200, fitted to 1026 times of nine head pairs at sixteen sizes with every L (docs/performance.md): what the
# model takes is 0.4 % slower than the best of them in the mean. Only ratios matter.
# register_state_forward, one chunk of an item, by the mean share of SMs at work: memory and the power limit slow full GPUs.
STEPS = ((0.55, 1.9), (0.89, 2.35), (1.0, 2.65))
HALVES_STEPS = ((0.55, 1.35), (0.89, 1.45), (1.0, 1.5))               # of half as many rows, fitted to 28 rows of four pairs
ITEM = 4.8                               # and what every item of a split costs beside its chunks
SCAN_STEP, SCAN_ITEM = 0.71, 8.0         # segment_scan: one chunk, and what every item costs
BOUNDARY = 1.7                           # segment_states, from one segment to the next
WHOLE, SPLIT = 10.5, 13.5                # what else a call takes: with a split it has three kernels more, two of them early
MARGIN = 0.97                            # a split has to be so much faster than whole sequences, and needs memory
# What heads do is only known on the GPU: a quarter that never forget, as in FlashQLA's benchmark, others within 4 chunks.
EXACT_SHARE, WARM_CHUNKS = 0.25, 4

# The scans of the backward likewise (docs/performance.md): register_state_scan, register_gradient_scan, and its pass before. What
# goes with segments was fitted to 61 times of eleven sizes, and with it the best of both directions together is taken at each.
STATE_STEPS = ((0.55, 1.9), (0.85, 2.4), (1.0, 3.0))
GRADIENT_STEPS = ((0.55, 2.66), (0.85, 3.0), (1.0, 3.5))
# Both scans run side by side where they leave so many SMs free that memory does not slow them: over the longer one, then.
BESIDE_SHARE, BESIDE = 0.55, 1.12
GRADIENT_ITEM = 8.0                      # both scans, beside the chunks of an item
TRANSFER_STEP, TRANSFER_ITEM = 1.2, 10.0
GRADIENT_BOUNDARY = 1.1                  # segment_state_gradients, and as much segment_states
GRADIENT_SPLIT = 35.0                    # what else a split costs
OWN_SEGMENTS = 9.0                       # three kernels more where the forward does not share what it found out

SEGMENTS = tuple(2**power for power in range(2, 12))

Steps = tuple[tuple[float, float], ...]         # microseconds a chunk, up to a share of SMs at work


class Items(NamedTuple):
    """Of each sequence."""

    wide: int                            # of 128 state rows
    halves: int                          # of 64


def wide_us(items: Items, longest: int, chunks: int, sequences: int, sm_count: int) -> float:
    """Expected time of the forward without a split, in items of 128 state rows."""
    return whole_us(STEPS, items.wide, longest, chunks, sequences, sm_count)


def halves_us(items: Items, longest: int, chunks: int, sequences: int, sm_count: int) -> float:
    """The same in items of 64."""
    return whole_us(HALVES_STEPS, items.halves, longest, chunks, sequences, sm_count)


def best_whole_us(items: Items, longest: int, chunks: int, sequences: int, sm_count: int) -> float:
    """In whichever items are faster."""
    return min(us(items, longest, chunks, sequences, sm_count) for us in (wide_us, halves_us))


def halves_are_faster(items: Items, longest: int, chunks: int, sequences: int, sm_count: int) -> bool:
    sizes = longest, chunks, sequences, sm_count
    return halves_us(items, *sizes) < wide_us(items, *sizes)


def whole_us(table: Steps, rows: int, longest: int, chunks: int, sequences: int, sm_count: int) -> float:
    steps = steps_of_wholes(rows, longest, chunks, sequences, sm_count)
    return chain_us(table, rows * chunks, steps, sm_count) + WHOLE


def split_us(rows: int, longest: int, chunks: int, sequences: int, L: int, sm_count: int) -> float:
    """Expected time with L chunks a segment."""
    turns = busiest_block(rows, longest, chunks, sequences, L, sm_count)
    steps = steps_of_segments(longest, chunks, sequences, L, turns)
    forward = chain_us(STEPS, rows * chunks, steps, sm_count) + ITEM * turns
    others = rows * (segments_in_all(longest, chunks, sequences, L) - sequences)
    return forward + transfers_us(SCAN_STEP, SCAN_ITEM, 2, others, L, sm_count) + BOUNDARY * (longest / L) + SPLIT


def whole_backward_us(rows: int, longest: int, chunks: int, sequences: int, sm_count: int) -> float:
    """Expected time of both scans of the backward without a split."""
    steps, tables = steps_of_wholes(rows, longest, chunks, sequences, sm_count), (STATE_STEPS, GRADIENT_STEPS)
    if 2 * rows * chunks <= BESIDE_SHARE * steps * sm_count:
        return BESIDE * max(chain_us(table, 2 * rows * chunks, steps, sm_count) for table in tables)
    return sum(chain_us(table, rows * chunks, steps, sm_count) for table in tables)


def split_backward_us(
    rows: int, longest: int, chunks: int, sequences: int, L: int, sm_count: int, *, shared: bool = False
) -> float:
    """Expected time of the scans of the backward with L chunks a segment, and of what goes between them.

    shared: with what the forward found out about the segments.
    """
    turns = busiest_block(rows, longest, chunks, sequences, L, sm_count)
    steps = steps_of_segments(longest, chunks, sequences, L, turns)
    scans = sum(chain_us(table, rows * chunks, steps, sm_count) for table in (STATE_STEPS, GRADIENT_STEPS))
    # all but the last of each sequence, or all but the first
    others = rows * (segments_in_all(longest, chunks, sequences, L) - sequences)
    between = transfers_us(TRANSFER_STEP, TRANSFER_ITEM, 1, others, L, sm_count) + GRADIENT_BOUNDARY * (longest / L)
    if not shared:
        between += transfers_us(SCAN_STEP, SCAN_ITEM, 2, others, L, sm_count) + GRADIENT_BOUNDARY * (longest / L) + OWN_SEGMENTS
    return scans + GRADIENT_ITEM * turns + between + GRADIENT_SPLIT


def steps_of_wholes(rows: int, longest: int, chunks: int, sequences: int, sm_count: int) -> float:
    """Chunks of the block that works longest, without a split: it has the longest sequence, or most of them."""
    return max(longest, -(-sequences * rows // sm_count) * chunks / sequences)


def segments_in_all(longest: int, chunks: int, sequences: int, L: int) -> int:
    """Where the sequences behind the longest are alike; how much each of them leaves over is not known."""
    others = sequences - 1
    return -(-longest // L) + (others * max(-(-(chunks - longest) // (others * L)), 1) if others else 0)


def busiest_block(rows: int, longest: int, chunks: int, sequences: int, L: int, sm_count: int) -> int:
    """Segments of the block that gets most of them, as the persistent kernels deal them out: every sm_count-th item."""
    return -(-segments_in_all(longest, chunks, sequences, L) * rows // sm_count)


def steps_of_segments(longest: int, chunks: int, sequences: int, L: int, turns: int) -> float:
    """Chunks of the block that works longest, if one of its segments is a whole one and the others are like the mean."""
    return L + (turns - 1) * chunks / segments_in_all(longest, chunks, sequences, L)


def chain_us(table: Steps, chunks: int, steps: float, sm_count: int) -> float:
    """Time of a scan. chunks: of all items; steps: of the block that works longest."""
    share = min(chunks / (steps * sm_count), 1.0) if steps else 0.0
    return steps * next(step for limit, step in table if share <= limit)


def transfers_us(step: float, item: float, exact_items: int, items: int, L: int, sm_count: int) -> float:
    """Time of a scan that goes through all of a segment only where a head does not forget, then with so many items for one."""
    exact = exact_items * EXACT_SHARE * (step * L + item)
    warm = (1 - EXACT_SHARE) * (step * min(WARM_CHUNKS, L) + item)
    return max(step * L + item, items * (exact + warm) / sm_count) if items else 0.0


def best_split(items: Items, longest: int, chunks: int, sequences: int, sm_count: int) -> int | None:
    """Chunks per segment of the forward; None where whole sequences are expected to be about as fast."""
    whole = best_whole_us(items, longest, chunks, sequences, sm_count)
    costs = {L: split_us(items.wide, longest, chunks, sequences, L, sm_count) for L in SEGMENTS if longest > L}
    return shortest(costs, MARGIN * whole)


def best_backward_split(items: Items, longest: int, chunks: int, sequences: int, sm_count: int) -> int | None:
    """As best_split(), of the backward. A forward that splits takes the same segments and shares what it finds out, so that it
    is the time of both that counts."""
    sizes = items, longest, chunks, sequences, sm_count
    whole = whole_backward_us(items.wide, *sizes[1:]) + forward_us(*sizes)
    costs = {L: min(both_us(*sizes, L, shared=shared) for shared in (True, False)) for L in SEGMENTS if longest > L}
    return shortest(costs, MARGIN * whole)


def sharing_pays(items: Items, longest: int, chunks: int, sequences: int, sm_count: int, L: int) -> bool:
    """Whether a forward should take the segments of its backward, whatever it would do alone."""
    sizes = items, longest, chunks, sequences, sm_count
    return both_us(*sizes, L, shared=True) <= both_us(*sizes, L, shared=False)


def both_us(items: Items, longest: int, chunks: int, sequences: int, sm_count: int, L: int, *, shared: bool) -> float:
    """Expected time of a forward and of the scans of its backward with L chunks a segment."""
    sizes = items.wide, longest, chunks, sequences, L, sm_count
    forward = split_us(*sizes) if shared else forward_us(items, longest, chunks, sequences, sm_count)
    return forward + split_backward_us(*sizes, shared=shared)


def forward_us(items: Items, longest: int, chunks: int, sequences: int, sm_count: int) -> float:
    """Expected time of a forward alone, as best as it can."""
    sizes = longest, chunks, sequences, sm_count
    L = best_split(items, *sizes)
    return best_whole_us(items, *sizes) if L is None else split_us(items.wide, longest, chunks, sequences, L, sm_count)


def shortest(costs: dict[int, float], limit: float) -> int | None:
    """The L that costs least; None if that is not below the limit."""
    L = min(costs, key=lambda length: costs[length], default=None)
    return None if L is None or costs[L] >= limit else L
