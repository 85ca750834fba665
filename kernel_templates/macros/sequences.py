"""Where a chunk lies: chunk slots, sequences and token ranges.

Every chunk has a slot in the chunk-indexed workspaces. Sequence n starts at token start[n] and its j-th chunk has

    slot(n, j) = start[n] // C + n + j                  packed sequences (cu_seqlens)
    slot(n, j) = n * ceil(T / C) + j                    equal lengths

The first form needs no prefix sum over the lengths: ceil(len / C) <= start[n+1] // C - start[n] // C + 1, so two
sequences never share a slot, and T // C + N slots are enough for any split of T tokens into N sequences. A slot that
belongs to no chunk is skipped. The host needs T and N only, never the lengths.
"""

from ..language import T, macro


def slot_count(B: int, tokens: int, N: int, C: int, packed: bool) -> int:
    """Slots of the chunk-indexed workspaces: B x tokens in equal sequences, or N packed sequences in `tokens` tokens."""
    return tokens // C + N if packed else B * -(-tokens // C)


@macro
def find_sequence(cu_seqlens, N, slot, C):
    """The last sequence whose first slot is at most `slot`, by bisection (first slots increase strictly with n)."""
    first = T.alloc_var("int32")
    last = T.alloc_var("int32")
    middle = T.alloc_var("int32")
    first = 0
    last = N - 1
    while first < last:
        middle = (first + last + 1) // 2
        if T.cast(cu_seqlens[middle], "int32") // C + middle <= slot:
            first = middle
        else:
            last = middle - 1
    return first


@macro
def locate_chunk(packed, cu_seqlens, N, tokens, slot, C):
    """(sequence, first token, tokens in the chunk) of a slot. The first token counts from the start of the row that
    holds the sequence: its own batch row, or row 0 when packed. The count is at most 0 for a slot without a chunk."""
    n = T.alloc_var("int32")
    start = T.alloc_var("int32")
    valid = T.alloc_var("int32")
    if packed:
        n = find_sequence(cu_seqlens, N, slot, C)
        start = T.cast(cu_seqlens[n], "int32")
        valid = T.cast(cu_seqlens[n + 1], "int32")
        start = start + (slot - (start // C + n)) * C
        valid = T.min(valid - start, C)
    else:
        n = slot // T.ceildiv(tokens, C)
        start = slot % T.ceildiv(tokens, C) * C
        valid = T.min(tokens - start, C)
    return n, start, valid


@macro
def sequence_bounds(packed, cu_seqlens, tokens, n, C):
    """(batch row, first token, tokens, first slot) of sequence n."""
    row = T.alloc_var("int32")
    start = T.alloc_var("int32")
    length = T.alloc_var("int32")
    slot = T.alloc_var("int32")
    if packed:
        row = 0
        start = T.cast(cu_seqlens[n], "int32")
        length = T.cast(cu_seqlens[n + 1], "int32") - start
        slot = start // C + n
    else:
        row = n
        start = 0
        length = tokens
        slot = n * T.ceildiv(tokens, C)
    return row, start, length, slot
