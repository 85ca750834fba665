"""A list of chunks in memory, for kernels that walk over chunks: each row says where its chunk lies, and some have none."""

from ..language import T, macro

# Of a row: chunk slot, batch row, first token, and tokens. One without a chunk has no tokens, and says nothing else.
SLOT, ROW, START, VALID = range(4)
COLUMNS = 4


@macro
def clear_list(listed, rows, block, blocks):
    """Before list_chunk, in a kernel that is complete when that one begins."""
    for turn in T.serial(T.ceildiv(rows - block, blocks)):
        listed[block + turn * blocks, VALID] = 0


@macro
def list_chunk(listed, row, item, j, C):
    """Write down where chunk j of an item lies, once for all of its heads."""
    if item.head == 0:
        if item.part == 0:
            listed[row, SLOT] = item.slot + j
            listed[row, ROW] = item.row
            listed[row, START] = item.first + j * C
            listed[row, VALID] = T.min(item.length - j * C, C)
