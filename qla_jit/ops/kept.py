"""A tensor that one function keeps for another, which alone decides how long it lives."""

from __future__ import annotations

import torch


class Kept:
    """Holds a tensor until it is taken. Arguments of a call live until it returns, in the frames of all its callers; what is
    taken out of this one lives as long as whoever took it wants, and is gone for everybody else."""

    def __init__(self, x: torch.Tensor | None = None) -> None:
        self._x = x

    def take(self) -> torch.Tensor | None:
        """The tensor, the first time; then None."""
        x, self._x = self._x, None
        return x
