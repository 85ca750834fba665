"""Register tiles of whole rows, for l2norm and its backward."""

from typing import Any

from ..arch import Arch
from ..contract import Rejection

THREADS = 128


def width(problem: Any) -> int:
    """Columns of the register tile: a row's 16-byte pieces must belong to a power of two of threads, for the sum."""
    return 1 << (problem.K - 1).bit_length()


def row_pieces_are_whole(problem: Any, config: Any, arch: Arch) -> Rejection | None:
    if config.rows * width(problem) % (THREADS * 8):
        return Rejection(f"{config.rows} rows of {width(problem)} do not divide into 16-byte pieces for {THREADS} threads")
    return None
