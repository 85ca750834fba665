"""Between which measured points does a query lie, and with which weights?

The weights are those of Delaunay interpolation. They solve a linear programme, because lifting points onto a paraboloid
turns their Delaunay triangulation into the lower side of a convex hull:

    minimise  sum_i w_i |p_i - q|^2   subject to   sum_i w_i (p_i - q) = 0,   sum_i w_i = 1,   w >= 0

It also holds where the points span a line or a plane only, which is usual: one sequence is the line chunks = longest.
There are tens of points and at most three coordinates, so a small simplex tableau does.
"""

from __future__ import annotations

from collections.abc import Sequence

OUTSIDE = 1e6                            # cost of a unit of distance outside: above what any weights inside can cost
ROUNDING = 1e-6                          # weights and pivots below this are zeros
COST_ROUNDING = 1e-3                     # OUTSIDE times the precision of a float64, and a margin
MOST_PIVOTS = 1_000                      # tens are usual; rounding must not be able to stop a call for ever


def delaunay_weights(points: Sequence[Sequence[float]], query: Sequence[float], *, tolerance: float) -> dict[int, float] | None:
    """Weights by index of the measured points around the query; they sum up to 1.

    None: the query is outside of the points' convex hull by more than the tolerance, as a sum over the coordinates.
    """
    offsets = [[x - q for x, q in zip(point, query, strict=True)] for point in points]
    costs = [sum(x * x for x in offset) for offset in offsets]
    nearest = costs.index(min(costs))
    return _solve(offsets, costs, nearest, tolerance)


def _solve(offsets: list[list[float]], costs: list[float], start: int, tolerance: float) -> dict[int, float] | None:
    count, dims = len(offsets), len(offsets[0])
    # Columns: the weights, then how far the query is outside, up and down for each coordinate. Each row is a constraint,
    # solved for its basic column; the last entry is that column's value. All weight is on the start at first.
    cost = costs + [OUTSIDE] * (2 * dims)
    basis: list[int] = []
    rows: list[list[float]] = []
    for axis in range(dims):
        down = offsets[start][axis] > 0
        sign = -1.0 if down else 1.0
        slacks = [0.0] * (2 * dims)
        slacks[2 * axis], slacks[2 * axis + 1] = sign, -sign
        rows.append([sign * (offset[axis] - offsets[start][axis]) for offset in offsets] + slacks + [abs(offsets[start][axis])])
        basis.append(count + 2 * axis + down)
    rows.append([1.0] * count + [0.0] * (2 * dims) + [1.0])
    basis.append(start)

    for _ in range(MOST_PIVOTS):
        entering = _improving(rows, basis, cost)
        if entering is None:
            break
        # Bland's rule, the first column and the first row: it cannot run in circles, as others can where rows are equal.
        ratios = [
            (row[-1] / row[entering], basis[number], number) for number, row in enumerate(rows) if row[entering] > ROUNDING
        ]
        leaving = min(ratios)[-1]                # there is one: weights sum up to 1, so no cost can fall without end
        pivot = rows[leaving]
        pivot[:] = [x / pivot[entering] for x in pivot]
        for row in rows:
            if row is not pivot and (factor := row[entering]):
                row[:] = [x - factor * y for x, y in zip(row, pivot, strict=True)]
        basis[leaving] = entering

    values = {column: max(row[-1], 0.0) for column, row in zip(basis, rows, strict=True)}
    if sum(value for column, value in values.items() if column >= count) > tolerance + ROUNDING:
        return None
    return {column: value for column, value in values.items() if column < count and value > ROUNDING}


def _improving(rows: list[list[float]], basis: list[int], cost: list[float]) -> int | None:
    """The first column that lowers the cost when it enters the basis."""
    for column in range(len(cost)):
        if column not in basis:
            reduced = cost[column] - sum(cost[basic] * row[column] for basic, row in zip(basis, rows, strict=True))
            if reduced < -COST_ROUNDING:
                return column
    return None
