"""What one function keeps for another, which alone decides how long it lives."""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

import torch

from .results import MidwayStates, SegmentStates

T = TypeVar("T")


class Kept(Generic[T]):
    """Holds something until it is taken. Arguments of a call live until it returns, in the frames of all its callers; what is
    taken out of this one lives as long as whoever took it wants, and is gone for everybody else."""

    def __init__(self, x: T | None = None) -> None:
        self._x = x

    def take(self) -> T | None:
        """It, the first time; then None."""
        x, self._x = self._x, None
        return x


class Wanted(NamedTuple):
    """What the backward of a call would have its forward do."""

    split: int | None = None             # split, into segments of so many chunks, if sequences can be split
    midway: int | None = None            # keep midway states, if its segments are of so many chunks


class FromForward:
    """What a forward keeps for the backward of the same call: parts of its ForwardResult, each until it is taken."""

    def __init__(
        self,
        Ab: torch.Tensor | None = None,
        segments: SegmentStates | None = None,
        midway: MidwayStates | None = None,
    ) -> None:
        self.Ab, self.segments, self.midway = Kept(Ab), Kept(segments), Kept(midway)
