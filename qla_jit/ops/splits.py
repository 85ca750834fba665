"""How long a segment should be when sequences are split inside one GPU (AutoCP): a cost model, the tuner's starting point.

A segment is scanned once for what it does to the state, then computed from the state that enters it; between the two, states
go from segment to segment one after the other. Short segments fill the GPU and make that chain long.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

Steps = tuple[tuple[float, float], ...]         # (share of SMs at work, microseconds a chunk)


class Family(NamedTuple):
    """A way to compute a forward."""

    steps: Steps
    item: float                          # what every item of a block costs beside its chunks
    call: float                          # and what else a call does


# Microseconds on an H200; only ratios matter. A table has the time of a chunk of an item at shares of SMs at work, in the mean:
# memory and the power limit slow full GPUs. The forward was fitted to 858 times of 171 sizes, each in wide items, in halves and
# with the lengths of segments that came near the best (docs/performance.md): what the model takes is 0.9 % slower than the best
# of them in the mean.
WIDE = Family(steps=((0.1, 1.82), (0.3, 1.97), (0.5, 2.2), (0.75, 2.47), (0.9, 2.74), (1.0, 2.89)), item=8.8, call=8.0)
HALVES = Family(steps=((0.2, 1.35), (0.4, 1.45), (0.6, 1.56), (0.75, 1.62), (0.9, 1.62), (1.0, 1.81)), item=4.3, call=6.4)
SEGMENTS = Family(steps=((0.35, 0.9), (0.55, 2.01), (0.75, 2.53), (0.9, 2.88), (1.0, 3.08)), item=26.1, call=3.5)
SCAN_STEP, SCAN_ITEM = 1.11, 0.0         # segment_scan: one chunk, and what every item costs
BOUNDARY = 0.7                           # segment_states, from one segment to the next
MARGIN = 0.97                            # a split has to be so much faster than whole sequences, and needs memory
# What heads do is only known on the GPU: a quarter that never forget, as in FlashQLA's benchmark, others within 4 chunks.
EXACT_SHARE, WARM_CHUNKS = 0.25, 4

# The scans of the backward likewise (docs/performance.md): register_state_scan, register_gradient_scan, and its pass before. What
# goes with segments was fitted to 61 times of eleven sizes. Of 27 others, with any lengths of segments, both directions together
# are 0.5 % slower than the best in the mean.
STATE_STEPS = ((0.5, 1.9), (0.72, 2.4), (0.95, 3.0))
GRADIENT_STEPS = ((0.5, 2.66), (0.72, 3.0), (0.95, 3.5))
# Both scans run side by side where they leave so many SMs free that memory does not slow them: over the longer one, then.
BESIDE_SHARE, BESIDE = 0.55, 1.12
GRADIENT_ITEM = 8.0                      # both scans, beside the chunks of an item
TRANSFER_STEP, TRANSFER_ITEM = 1.2, 10.0
GRADIENT_BOUNDARY = 1.1                  # segment_state_gradients
GRADIENT_SPLIT = 35.0                    # what else a split costs

SHORTEST, MOST_TURNS = 4, 8              # chunks of a segment that is worth trying, and segments of a block


class Sizes(NamedTuple):
    """What is known of a call before it runs, and of the GPU."""

    wide: int                            # items of each sequence, in 128 state rows
    halves: int                          # in 64
    longest: int                         # chunks of the longest sequence
    chunks: int                          # of all
    sequences: int
    sm_count: int


def wide_us(sizes: Sizes) -> float:
    """Expected time of the forward without a split, in items of 128 state rows."""
    return whole_us(WIDE, sizes.wide, sizes)


def halves_us(sizes: Sizes) -> float:
    """The same in items of 64."""
    return whole_us(HALVES, sizes.halves, sizes)


def best_whole_us(sizes: Sizes) -> float:
    """In whichever items are faster."""
    return min(wide_us(sizes), halves_us(sizes))


def halves_are_faster(sizes: Sizes) -> bool:
    return halves_us(sizes) < wide_us(sizes)


def whole_us(family: Family, rows: int, sizes: Sizes) -> float:
    """rows: items of each sequence."""
    turns = -(-sizes.sequences * rows // sizes.sm_count)
    return family_us(family, rows * sizes.chunks, steps_of_wholes(rows, sizes), turns, sizes.sm_count)


def split_us(sizes: Sizes, L: int) -> float:
    """Expected time with L chunks a segment."""
    turns = busiest_block(sizes, L)
    forward = family_us(SEGMENTS, sizes.wide * sizes.chunks, steps_of_segments(sizes, L, turns), turns, sizes.sm_count)
    return forward + transfers_us(SCAN_STEP, SCAN_ITEM, 2, sizes, L) + BOUNDARY * (sizes.longest / L)


def family_us(family: Family, chunks: int, steps: float, turns: int, sm_count: int) -> float:
    """turns: items of the block that works longest."""
    return chain_us(family.steps, chunks, steps, sm_count) + family.item * turns + family.call


def whole_backward_us(sizes: Sizes) -> float:
    """Expected time of both scans of the backward without a split."""
    steps, tables = steps_of_wholes(sizes.wide, sizes), (STATE_STEPS, GRADIENT_STEPS)
    chunks = sizes.wide * sizes.chunks
    if 2 * chunks <= BESIDE_SHARE * steps * sizes.sm_count:
        return BESIDE * max(chain_us(table, 2 * chunks, steps, sizes.sm_count) for table in tables)
    return sum(chain_us(table, chunks, steps, sizes.sm_count) for table in tables)


def split_backward_us(sizes: Sizes, L: int) -> float:
    """Expected time of the scans of the backward with L chunks a segment, and of what goes between them, where the forward shares
    what it found out about the segments."""
    turns = busiest_block(sizes, L)
    steps = steps_of_segments(sizes, L, turns)
    scans = sum(chain_us(table, sizes.wide * sizes.chunks, steps, sizes.sm_count) for table in (STATE_STEPS, GRADIENT_STEPS))
    segments = transfers_us(TRANSFER_STEP, TRANSFER_ITEM, 1, sizes, L) + GRADIENT_BOUNDARY * (sizes.longest / L)
    return scans + GRADIENT_ITEM * turns + segments + GRADIENT_SPLIT


def steps_of_wholes(rows: int, sizes: Sizes) -> float:
    """Chunks of the block that works longest, without a split: one of its sequences is the longest, the others are like the mean
    of those behind."""
    turns = -(-sizes.sequences * rows // sizes.sm_count)
    behind = (sizes.chunks - sizes.longest) / (sizes.sequences - 1) if sizes.sequences > 1 else sizes.longest
    return sizes.longest + (turns - 1) * behind


def segments_in_all(sizes: Sizes, L: int) -> int:
    """Where the sequences behind the longest are alike; how much each of them leaves over is not known."""
    others = sizes.sequences - 1
    behind = sizes.chunks - sizes.longest
    return -(-sizes.longest // L) + (others * max(-(-behind // (others * L)), 1) if others else 0)


def busiest_block(sizes: Sizes, L: int) -> int:
    """Segments of the block that gets most of them, as the persistent kernels deal them out: every sm_count-th item."""
    return -(-segments_in_all(sizes, L) * sizes.wide // sizes.sm_count)


def steps_of_segments(sizes: Sizes, L: int, turns: int) -> float:
    """Chunks of the block that works longest, if one of its segments is a whole one and the others are like the mean."""
    return L + (turns - 1) * sizes.chunks / segments_in_all(sizes, L)


def chain_us(table: Steps, chunks: int, steps: float, sm_count: int) -> float:
    """Time of a scan. chunks: of all items; steps: of the block that works longest."""
    return steps * between(table, share_at_work(chunks, steps, sm_count))


def share_at_work(chunks: int, steps: float, sm_count: int) -> float:
    """Of the SMs, in the mean over the block that works longest."""
    return min(chunks / (steps * sm_count), 1.0) if steps else 0.0


def between(table: Steps, share: float) -> float:
    """From a table that is linear between its entries, and flat outside of them."""
    for (low, at_low), (high, at_high) in pairwise(table):
        if share < high:
            return at_low + (at_high - at_low) * max(share - low, 0.0) / (high - low)
    return table[-1][1]


def transfers_us(step: float, item: float, exact_items: int, sizes: Sizes, L: int) -> float:
    """Time of a scan of all segments but one of each sequence. It goes through all of one only where a head does not forget, then
    with so many items for it."""
    items = sizes.wide * (segments_in_all(sizes, L) - sizes.sequences)
    exact = exact_items * EXACT_SHARE * (step * L + item)
    warm = (1 - EXACT_SHARE) * (step * min(WARM_CHUNKS, L) + item)
    return max(step * L + item, items * (exact + warm) / sizes.sm_count) if items else 0.0


def lengths_to_try(sizes: Sizes) -> Iterator[int]:
    """Chunks per segment that are worth trying, the longest first: the shortest that cut the longest sequence into 2, 3, 4 ...
    segments. What counts is how those fill the SMs: a length that is a power of two may leave a fifth of them idle."""
    last = None
    for segments in range(2, sizes.longest // SHORTEST + 1):
        L = -(-sizes.longest // segments)
        if busiest_block(sizes, L) > MOST_TURNS:
            return
        if last != L:
            yield L
        last = L


# Who chooses a strategy and then its split asks twice, and the backward asks for the forward: up to 4 ms each time.
@functools.lru_cache(maxsize=1024)
def best_split(sizes: Sizes) -> int | None:
    """Chunks per segment of the forward; None where whole sequences are expected to be about as fast."""
    return shortest({L: split_us(sizes, L) for L in lengths_to_try(sizes)}, MARGIN * best_whole_us(sizes))


@functools.lru_cache(maxsize=1024)
def best_backward_split(sizes: Sizes) -> int | None:
    """As best_split(), of the backward. A forward whose backward is split takes the same segments and shares what it finds out:
    it is the time of both that counts."""
    costs = {L: split_us(sizes, L) + split_backward_us(sizes, L) for L in lengths_to_try(sizes)}
    return shortest(costs, MARGIN * (forward_us(sizes) + whole_backward_us(sizes)))


def forward_us(sizes: Sizes) -> float:
    """Expected time of a forward alone, as best as it can."""
    L = best_split(sizes)
    return best_whole_us(sizes) if L is None else split_us(sizes, L)


def shortest(costs: dict[int, float], limit: float) -> int | None:
    """The L that costs least; None if that is not below the limit."""
    L = min(costs, key=lambda length: costs[length], default=None)
    return None if L is None or costs[L] >= limit else L
