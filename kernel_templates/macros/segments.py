"""Where a segment lies: a run of chunks of one sequence, the unit of context parallelism inside one GPU.

With first_slot(n) the slot of a sequence's first chunk (sequences.py) and L chunks in a segment, segment s of sequence n has

    place(n, s) = first_slot(n) // L + n + s

For the same reason as chunk slots, two sequences never share a place and slots // L + N places are enough for any lengths:
the grid is fixed before launch, and the host need not know the lengths. A sequence has at least one place, an empty one too.

There are more places than segments. Blocks that take turns go by rank, the number of segments before: segment_plan counts those
before each sequence. Of two sequences of 256 chunks, places would give 18 segments of 32 and ranks give 16, which with 8 value
heads is one turn of 132 blocks instead of two.
"""

from ..language import T, macro
from .sequences import sequence_bounds


def place_count(slots: int, N: int, L: int) -> int:
    """Places of the segment-indexed workspaces."""
    return slots // L + N


@macro
def first_place(packed, cu_seqlens, tokens, n, C, L):
    place = T.alloc_var("int32")
    if packed:
        place = (T.cast(cu_seqlens[n], "int32") // C + n) // L + n
    else:
        place = n * T.ceildiv(tokens, C) // L + n
    return place


@macro
def count_segments(packed, cu_seqlens, tokens, n, C, L):
    """Segments of the sequences before the n-th. One after the other: calls that split have few sequences."""
    count = T.alloc_var("int32")
    count = 0
    for m in T.serial(n):
        _row, _start, length, _slot = sequence_bounds(packed, cu_seqlens, tokens, m, C)
        count = count + T.max(T.ceildiv(T.ceildiv(length, C), L), 1)
    return count


@macro
def locate_rank(packed, cu_seqlens, segments_before, N, tokens, rank, C, L):
    """(place, sequence, batch row, first token, tokens, first slot, segment, last segment of the sequence) of a segment."""
    low = T.alloc_var("int32")
    high = T.alloc_var("int32")
    middle = T.alloc_var("int32")
    low = 0
    high = N - 1
    while low < high:                    # no sequence is without a segment
        middle = (low + high + 1) // 2
        if segments_before[middle] <= rank:
            low = middle
        else:
            high = middle - 1
    row, start, length, slot = sequence_bounds(packed, cu_seqlens, tokens, low, C)
    segment = T.alloc_var("int32")
    last = T.alloc_var("int32")
    place = T.alloc_var("int32")
    segment = rank - segments_before[low]
    last = segments_before[low + 1] - segments_before[low] - 1
    place = first_place(packed, cu_seqlens, tokens, low, C, L) + segment
    count = T.min(length - segment * L * C, L * C)
    return place, low, row, start + segment * L * C, count, slot + segment * L, segment, last


@macro
def locate_segment(packed, cu_seqlens, N, tokens, place, C, L):
    """(sequence, batch row, first token, tokens, first slot, segment, last segment of the sequence) of a place.

    Tokens is negative for a place without a segment."""
    low = T.alloc_var("int32")
    high = T.alloc_var("int32")
    middle = T.alloc_var("int32")
    low = 0
    high = N - 1
    while low < high:                    # first places increase strictly with n
        middle = (low + high + 1) // 2
        if first_place(packed, cu_seqlens, tokens, middle, C, L) <= place:
            low = middle
        else:
            high = middle - 1
    row, start, length, slot = sequence_bounds(packed, cu_seqlens, tokens, low, C)
    segment = T.alloc_var("int32")
    last = T.alloc_var("int32")
    count = T.alloc_var("int32")
    segment = place - first_place(packed, cu_seqlens, tokens, low, C, L)
    last = T.max(T.ceildiv(T.ceildiv(length, C), L), 1) - 1
    count = T.min(length - segment * L * C, L * C)
    if segment > last:
        count = -1
    return low, row, start + segment * L * C, count, slot + segment * L, segment, last
