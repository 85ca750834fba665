"""Tiles of one chunk for the kernels whose threads all do the same."""

from ..language import T, macro


def padded_keys(problem):
    """Rows of S in the block: a warpgroup multiplies 64 rows at a time, so K = 96 carries 32 rows of zeros."""
    return -(-problem.K // 64) * 64


@macro
def load_guarded(source, row, start, valid, head, first_column, columns, tile):
    # a tile of tokens by columns; zero behind the end of the chunk, which has fewer than C tokens, and behind the columns
    for i, j in T.Parallel(*tile.shape):
        tile[i, j] = T.if_then_else(
            i < valid and j < columns, source[row, start + i, head, first_column + j], T.cast(0.0, tile.dtype)
        )
