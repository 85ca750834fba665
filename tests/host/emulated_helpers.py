"""The device helpers of the warp-specialised kernels, which are CUDA text, in numpy, for all threads of a warpgroup at once.

Registers of an accumulator of 64 columns are [threads, i, j, h, e]: row 8 h and column 16 i + 8 j + e from the thread's
first ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from emulated_memory import Pointer, rounded

if TYPE_CHECKING:
    from emulation import Agent

WARPGROUP = 128
THREAD, *INDICES = np.ogrid[:WARPGROUP, :4, :2, :2, :2]
ROW_OF = THREAD // 32 * 16 + THREAD % 32 // 4 + 8 * INDICES[2]
COLUMN_OF = THREAD % 4 * 2 + 16 * INDICES[0] + 8 * INDICES[1] + INDICES[3]
COLUMN_PAIRS = (8 * np.arange(8)[:, None] + np.arange(2)).reshape(16)      # of a thread, from its first column


def accumulator(x: Pointer) -> np.ndarray:
    return x.registers(32).reshape(-1, 4, 2, 2, 2)


def by_row(upper: Any, lower: Any) -> np.ndarray:
    pair = [np.broadcast_to(np.asarray(x, np.float32), WARPGROUP) for x in (upper, lower)]
    return np.stack(pair, axis=1).reshape(-1, 1, 1, 2, 1)


def by_column(factors: np.ndarray) -> np.ndarray:
    return factors.reshape(-1, 4, 2, 1, 2)


def half_in_shared(factor: Pointer, shared: Pointer) -> np.ndarray:
    return by_column(np.concatenate([factor.registers(8), shared.load(COLUMN_PAIRS[8:])], axis=1))


def load_matrices(tile: Pointer, offset: np.ndarray, *, transposed: bool = False) -> np.ndarray:
    """ldmatrix.x4: thread 8 m + r of a warp has the address of row r of matrix m. [threads, m, e]"""
    matrices = tile.array.values[tile.swizzled(np.broadcast_to(offset, WARPGROUP).reshape(4, 4, 8))]
    if transposed:
        matrices = matrices.swapaxes(-1, -2)
    return matrices.reshape(4, 4, 32, 2).transpose(0, 2, 1, 3).reshape(WARPGROUP, 4, 2)


def store_matrices(tile: Pointer, offset: np.ndarray, values: np.ndarray, *, transposed: bool = False) -> None:
    """stmatrix.x4, likewise."""
    matrices = values.reshape(4, 32, 4, 2).transpose(0, 2, 1, 3).reshape(4, 4, 8, 8)
    if transposed:
        matrices = matrices.swapaxes(-1, -2)
    place = tile.swizzled(np.broadcast_to(offset, WARPGROUP).reshape(4, 4, 8))
    tile.array.values[place] = rounded(matrices, tile.array.dtype)


def load_tile(tile: Pointer, offset: np.ndarray) -> np.ndarray:
    return np.stack([load_matrices(tile, offset ^ (i << 5)) for i in range(4)], axis=1).reshape(-1, 4, 2, 2, 2)


def store_tile(tile: Pointer, offset: np.ndarray, values: np.ndarray) -> None:
    for i in range(4):
        store_matrices(tile, offset ^ (i << 5), values[:, i])


def lower_triangle_of(warp: np.ndarray, diagonal: np.ndarray) -> np.ndarray:
    below, on = (x[..., None] for x in (np.arange(4) < warp[:, None], np.arange(4) == warp[:, None]))
    halves = np.stack([diagonal & 0xFFFF, diagonal >> 16], axis=1)[:, None] != 0
    edge, left, right = below | on & halves, below | on, below
    return np.stack(np.broadcast_arrays(edge, left, right, edge), axis=2).reshape(-1, 4, 2, 2, 2)


def load_rows(to: Pointer, source: Pointer, distance: int) -> None:
    to.registers(4)[:] = source.load([0, 8, distance, distance + 8])


def load_columns(to: Pointer, source: Pointer) -> None:
    to.registers(16)[:] = source.load(COLUMN_PAIRS)


def load_first_columns(to: Pointer, source: Pointer) -> None:
    to.registers(8)[:] = source.load(COLUMN_PAIRS[:8])


def load_pair(to: Pointer, source: Pointer) -> None:
    to.registers(2)[:] = source.load([0, 1])


def scale_rows_and_store(x: Pointer, tile: Pointer, offset: np.ndarray, upper: np.ndarray, lower: np.ndarray) -> None:
    values = accumulator(x)
    values *= by_row(upper, lower)
    store_tile(tile, offset, values)


def lower_triangle(x: Pointer, out: Pointer, warp: np.ndarray, diagonal: np.ndarray) -> None:
    accumulator(out)[:] = np.where(lower_triangle_of(warp, diagonal), rounded(accumulator(x), "bfloat16"), 0)


def decay_and_store(
    x: Pointer, tile: Pointer, offset: np.ndarray, row: Pointer, column: Pointer, log_scale: float, warp: np.ndarray,
    diagonal: np.ndarray,
) -> None:  # fmt: skip
    values = accumulator(x)
    values *= np.exp2(by_row(*row.registers(2).T) + np.float32(log_scale) - by_column(column.registers(16)))
    store_tile(tile, offset, np.where(lower_triangle_of(warp, diagonal), values, 0))


def subtract_scaled(u: Pointer, values: Pointer, out: Pointer, factor: Pointer, shared_factor: Pointer) -> None:
    accumulator(out)[:] = rounded(accumulator(values) - half_in_shared(factor, shared_factor) * accumulator(u), "bfloat16")


def load_transposed(to: Pointer, tile: Pointer, offset: np.ndarray) -> None:
    for i in range(4):
        accumulator(to)[:, i] = load_matrices(tile, offset + 2048 * i, transposed=True).reshape(-1, 2, 2, 2)


def store_transposed(source: Pointer, tile: Pointer, offset: np.ndarray) -> None:
    for i in range(4):
        store_matrices(tile, offset + 2048 * i, rounded(accumulator(source)[:, i], "bfloat16"), transposed=True)


def zero_rows(tile: Pointer, first: int, parts: int) -> None:
    stage, *start = tile.index
    assert start == [0, 0]
    assert tile.array.shape[1:] == (64, 64 * parts)
    tile.array.values[stage, first:] = 0


def store_first_rows(tile: Pointer, target: Pointer, stride: int, rows: int) -> None:
    tile.array.block.swizzled.add(tile.array.name)
    stage, *start = tile.index
    assert start == [0, 0]
    for row in range(rows):
        target.store(row * stride + np.arange(64), tile.array.values[stage, row, :64])


def store_accumulator(x: Pointer, target: Pointer, stride: int, rows: int) -> None:
    wanted = np.broadcast_to(rows > ROW_OF, (WARPGROUP, 4, 2, 2, 2))
    at = np.broadcast_to(stride * ROW_OF + COLUMN_OF, wanted.shape)
    target.store(at[wanted], accumulator(x)[wanted])


def zero_first_rows(target: Pointer, stride: int, rows: int, columns: int) -> None:
    target.store(stride * np.arange(rows)[:, None] + np.arange(columns), 0.0)


def load_tile_into(x: Pointer, tile: Pointer, offset: np.ndarray) -> None:
    accumulator(x)[:] = load_tile(tile, offset)


def scale_columns(x: Pointer, factor: Pointer, shared_factor: Pointer) -> None:
    values = accumulator(x)
    values *= half_in_shared(factor, shared_factor)


def scale_column_pairs(source: Pointer, to: Pointer, shared_factor: Pointer) -> None:
    factors = by_column(shared_factor.load(COLUMN_PAIRS))
    accumulator(to)[:] = rounded(factors * accumulator(source), "bfloat16")


def keep_and_erase(x: Pointer, kept: Pointer, erased: Pointer, shared_factor: Pointer) -> None:
    values, factors = accumulator(x), by_column(shared_factor.load(COLUMN_PAIRS))
    accumulator(kept)[:] = rounded(values, "bfloat16")
    accumulator(erased)[:] = rounded(-factors * values, "bfloat16")


def store_scaled(x: Pointer, tile: Pointer, offset: np.ndarray, factor: np.ndarray) -> None:
    store_tile(tile, offset, by_row(factor, factor) * accumulator(x))


def score_gradient(
    x: Pointer, tile: Pointer, offset: np.ndarray, row: Pointer, column: Pointer, factor: float, strict: int, valid: int
) -> None:
    values = accumulator(x)
    scaled = values * np.float32(factor) * np.exp2(by_row(*row.registers(2).T) - by_column(column.registers(16)))
    wanted = (COLUMN_OF + strict <= ROW_OF) & (valid > ROW_OF)
    stored = np.where(wanted, scaled, 0)
    store_tile(tile, offset, stored)
    values[:] = np.where(ROW_OF == COLUMN_OF, 0, stored)


def store_diagonal(x: Pointer, to: Pointer) -> None:
    on = ROW_OF == COLUMN_OF
    to.store(np.broadcast_to(ROW_OF, on.shape)[on], accumulator(x)[on])


def add_products(x: Pointer, y: Pointer, rows: Pointer, columns: Pointer) -> None:
    products = accumulator(x) * accumulator(y)
    rows.registers(2)[:] += products.sum((1, 2, 4))
    columns.registers(16)[:] += products.sum(3).reshape(-1, 16)


def store_rows(rows: Pointer, to: Pointer) -> None:
    sums = rows.registers(2)
    sums[:] = sums.reshape(-1, 4, 2).sum(1).repeat(4, axis=0)
    to.store(ROW_OF.reshape(-1, 2)[::4], sums[::4])


def store_columns(columns: Pointer, to: Pointer) -> None:
    own = columns.registers(16).reshape(4, 8, 4, 16)                             # [warp, lanes, lane, column]
    sums = own.sum(1)
    to.store(64 * np.arange(4)[:, None, None] + 2 * np.arange(4)[:, None] + COLUMN_PAIRS, sums)


def add_scaled_rows(
    x: Pointer, total: Pointer, tile: Pointer, offset: np.ndarray, upper: np.ndarray, lower: np.ndarray, rows: Pointer
) -> None:
    added, totals = by_row(upper, lower) * accumulator(x), accumulator(total)
    totals += added
    rows.registers(2)[:] += (added * load_tile(tile, offset)).sum((1, 2, 4))


def store_overlap(x: Pointer, y: Pointer, to: Pointer) -> None:
    (stage, *start), (other_stage, *other_start) = x.index, y.index
    assert start == other_start == [0, 0]
    products = x.array.values[stage] * y.array.values[other_stage]
    to.store(np.arange(4), products.reshape(8, 4, 4 * 128).sum((0, 2)))


def list_chunk(listed: Pointer, count: Pointer, *entry: int) -> None:
    (number,) = count.load([0])
    count.store([0], [number + 1])
    listed.store(len(entry) * number + np.arange(len(entry)), np.array(entry))


HELPERS: dict[str, Callable[..., None]] = {
    "qla_add_products": add_products, "qla_add_scaled_rows": add_scaled_rows, "qla_decay_and_store": decay_and_store,
    "qla_keep_and_erase": keep_and_erase, "qla_list_chunk": list_chunk, "qla_load_columns": load_columns,
    "qla_load_first_columns": load_first_columns, "qla_load_pair": load_pair, "qla_load_rows": load_rows,
    "qla_load_tile": load_tile_into, "qla_load_transposed": load_transposed, "qla_lower_triangle": lower_triangle,
    "qla_scale_column_pairs": scale_column_pairs, "qla_scale_columns": scale_columns,
    "qla_scale_rows_and_store": scale_rows_and_store, "qla_score_gradient": score_gradient,
    "qla_store_accumulator": store_accumulator, "qla_store_columns": store_columns, "qla_store_diagonal": store_diagonal,
    "qla_store_first_rows": store_first_rows, "qla_store_overlap": store_overlap, "qla_store_rows": store_rows,
    "qla_store_scaled": store_scaled, "qla_store_transposed": store_transposed, "qla_subtract_scaled": subtract_scaled,
    "qla_zero_first_rows": zero_first_rows, "qla_zero_rows": zero_rows,
}  # fmt: skip


# Those of a warp that is run lane by lane.


def scan64(agent: Agent, x: Pointer) -> None:
    lanes = np.stack(agent.values_of_warp(x.registers(2)[0].copy()))                 # [32, 2]
    sums = lanes.T.reshape(64).cumsum(dtype=np.float32)
    x.registers(3)[0] = *sums[[agent.lane, agent.lane + 32]], sums[-1]


def gate_gradient(agent: Agent, dg: Pointer, sums: Pointer, last_gamma: float, valid: int) -> None:
    z_rows, *z_columns, _diagonal, queries, keys, keys_state, overlap = sums.load(np.arange(640)).reshape(10, 64)
    inside = np.arange(64) < valid
    d = np.where(inside, z_rows - sum(z_columns) + queries + keys, 0)
    at_end = keys_state[inside].sum() + last_gamma * overlap[:4].sum()
    dg.registers(2)[0] = (d[::-1].cumsum()[::-1] + at_end)[[agent.lane, agent.lane + 32]]


def mark_resets(agent: Agent, sums: Pointer, x: Pointer, bound: float) -> None:
    lanes = np.stack(agent.values_of_warp(sums.registers(2)[0].copy()))              # [32, 2]
    gates = np.diff(lanes.T.reshape(64), prepend=np.float32(0))[[agent.lane, agent.lane + 32]]
    x.registers(2)[0] *= np.where(gates < bound, -1, 1)


LANE_HELPERS: dict[str, Callable[..., None]] = {
    "qla_scan64": scan64, "qla_gate_gradient": gate_gradient, "qla_mark_resets": mark_resets,
}  # fmt: skip
