"""In which order to look at candidates: coordinate descent, step by step, from a strategy's default.

The rule. For each step of the strategy in launch order: time the neighbours of the best candidate so far (one knob of this
step turned, the whole call timed), and move if one is better beyond doubt. Go round the steps until none moves or the
time is up. What was timed once is not timed again, so a round costs the sum of the steps' knobs, where the product of
the steps' grids would be thousands. A knob that pays only together with another one is missed when neither pays alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .search_space import Candidate, SearchSpace

# The best of an incumbent and its challengers; the incumbent unless one is better beyond doubt.
Better = Callable[[Candidate, Sequence[Candidate]], Candidate]


def descend(space: SearchSpace, start: Candidate, *, better: Better, time_is_up: Callable[[], bool]) -> Candidate:
    """Follow the rule above; the candidate that it ends with."""
    best = start
    seen = {start}
    moved = True
    while moved:
        moved = False
        for step in space.steps(start.strategy):
            if time_is_up():
                return best
            challengers = [candidate for candidate in space.neighbours(best, step) if candidate not in seen]
            seen.update(challengers)
            if challengers:
                winner = better(best, challengers)
                moved = moved or winner != best
                best = winner
    return best


def first_round(space: SearchSpace, start: Candidate) -> list[Candidate]:
    """The candidates that descend() looks at if it never moves: what can be compiled before any GPU is at hand."""
    return [start] + [candidate for step in space.steps(start.strategy) for candidate in space.neighbours(start, step)]
