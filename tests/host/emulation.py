"""Launch a warp-specialised kernel on the CPU, from its template: what it computes. protocol.py looks at how it synchronises.

A template's build() is executed with a T that computes. Each warpgroup or single warp is a Python thread, of which one runs at a
time, until a barrier makes it wait for the others. A value of a warpgroup's threads is an array over threads, and so are their
registers: where an element of an accumulator or of a swizzled tile lies is computed by the template, and not taken for granted.
Python's `if` cannot be in two minds, so a warp whose lanes go different ways is run lane by lane.

Device helpers are CUDA text; HELPERS has the same in numpy, for all threads at once. Bulk copies and products happen when they
are issued, but an accumulator may not be touched before it is waited for. Shared memory and registers are NaN at first.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from protocol import barrier_names, tilelang_replaced, traced_template

WARPGROUP, WARP = 128, 32
NUMPY = {"float32": np.float32, "bfloat16": np.float32, "int32": np.int32, "uint32": np.uint32, "int64": np.int64}


def rounded(values: Any, dtype: str) -> np.ndarray:
    """To `dtype`; bfloat16 is kept in float32."""
    values = np.asarray(values)
    if dtype == "bfloat16":
        return torch.from_numpy(np.array(values, np.float32)).bfloat16().float().numpy()
    return values.astype(NUMPY[dtype], copy=False)


# Values. What differs from thread to thread, or from element to element of a parallel loop, is an array.


class Expression(np.lib.mixins.NDArrayOperatorsMixin):
    """What may be calculated with, and asked by `if`."""

    value: np.ndarray
    loop: Loop | None                    # whose elements it differs in

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, out: Any = None) -> Any:
        loop = next((x.loop for x in inputs if isinstance(x, Expression) and x.loop is not None), None)
        return simplified(ufunc(*map(value_of, inputs)), loop)

    def __bool__(self) -> bool:
        value = simplified(self.value)
        if not isinstance(value, Lanes):
            return bool(value)
        assert self.loop is not None, "threads that are run together go different ways"
        return self.loop.goes_on(value.value)

    def __index__(self) -> int:
        return int(simplified(self.value))

    __int__ = __index__


class Lanes(Expression):
    def __init__(self, value: np.ndarray, loop: Loop | None = None) -> None:
        self.value, self.loop = value, loop


def value_of(x: Any) -> Any:
    return x.value if isinstance(x, Expression) else x


def simplified(values: Any, loop: Loop | None = None) -> Any:
    """Lanes, or one number where that is all there is."""
    values = np.asarray(values)
    if values.size == 1:
        return values.reshape(())[()] if values.dtype.kind == "f" else values.item()
    if values.dtype.kind != "f" and (values == values.flat[0]).all():
        return values.flat[0].item()
    return Lanes(values, loop)


def if_then_else(condition: Any, yes: Any, no: Any) -> Any:
    if not isinstance(condition, Expression):
        return yes if condition else no
    return simplified(np.where(condition.value, value_of(yes), value_of(no)), condition.loop)


def cast(x: Any, dtype: str) -> Any:
    return simplified(rounded(value_of(x), dtype), x.loop if isinstance(x, Expression) else None)


class Loop:
    """T.Parallel over an accumulator: all elements that a warpgroup holds at once, and which of its threads holds each.

    Where a condition differs among them, the loop goes on with those for which it holds, and comes back for the others."""

    def __init__(self, agent: Agent, rows: int, columns: int) -> None:
        self.agent = agent
        self.a, self.b = np.ix_(np.arange(64) + agent.first_row(rows), np.arange(columns))
        self.threads = self.a % 64 // 16 * 32 + self.a % 8 * 4 + self.b % 8 // 2
        self.active = np.ones((64, columns), bool)
        self.written = False

    def __iter__(self) -> Iterator[tuple[Lanes, Lanes]]:
        self.agent.loop = self
        remaining = self.active
        while remaining.any():
            self.active, self.written = remaining, False
            yield Lanes(self.a, self), Lanes(self.b, self)
            remaining = remaining & ~self.active
        self.agent.loop = None

    def goes_on(self, condition: np.ndarray) -> bool:
        chosen = self.active & condition
        if chosen.any() and (chosen != self.active).any():
            assert not self.written, "elements go different ways after some have been written"
            self.active = chosen
        return bool(chosen.any())


# Memory. bfloat16 is kept in float32, and rounded when it is written.


class Array:
    """A tile in shared memory with its stages, or something else that has elements."""

    def __init__(self, block: Block, values: np.ndarray, dtype: str, name: str = "") -> None:
        self.block, self.values, self.dtype, self.name = block, values, dtype, name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def __getitem__(self, index: Any) -> Reference:
        return Reference(self, index if isinstance(index, tuple) else (index,))

    def __setitem__(self, index: Any, value: Any) -> None:
        Reference(self, index if isinstance(index, tuple) else (index,)).store(value)

    def position(self, index: tuple[Any, ...]) -> tuple[Any, ...]:
        """Of elements, in `values`."""
        return tuple(map(value_of, index))

    def load(self, index: tuple[Any, ...]) -> np.ndarray:
        self.note_read()
        return self.values[self.inside(self.position(index))]

    def store(self, index: tuple[Any, ...], values: np.ndarray, chosen: np.ndarray | None) -> None:
        """Those that are chosen, or all."""
        self.note_write()
        position = self.position(index)
        if chosen is not None:
            values, *position = (np.broadcast_to(x, chosen.shape)[chosen] for x in (values, *position))
        self.values[self.inside(tuple(position))] = rounded(values, self.dtype)

    def inside(self, position: tuple[Any, ...]) -> tuple[Any, ...]:
        for at, size in zip(position, self.values.shape, strict=True):
            if not isinstance(at, slice):
                low, high = (at, at) if isinstance(at, int) else (at.min(), at.max())
                assert 0 <= low <= high < size, f"elements {low} to {high} of {size} in {self.name}"
        return position

    def note_read(self) -> None:
        pass

    def note_write(self) -> None:
        pass


class Numbers(Array):
    """A tile of integers, by which loops and branches go: what is read is a number, of then."""

    def __getitem__(self, index: Any) -> int:
        return int(self.load(index))


class Global(Array):
    """A tensor in global memory."""

    def load(self, index: tuple[Any, ...]) -> np.ndarray:
        """0 outside of the tensor: TileLang guards what it cannot prove to be inside."""
        position = self.position(index)
        if all(isinstance(at, int) for at in position):
            return self.values[position] if all(0 <= at < size for at, size in zip(position, self.shape, strict=True)) else 0
        position = np.broadcast_arrays(*position)
        inside = np.logical_and.reduce([(at >= 0) & (at < size) for at, size in zip(position, self.shape, strict=True)])
        return np.where(inside, self.values[tuple(np.where(inside, at, 0) for at in position)], 0)


class Owned(Array):
    """What belongs to the threads of an agent: an accumulator or operand, or registers."""

    def __init__(self, agent: Agent, shape: Sequence[int], dtype: str) -> None:
        values = np.empty(shape, NUMPY[dtype])
        values.fill(np.nan if values.dtype.kind == "f" else np.iinfo(values.dtype).max)
        super().__init__(agent.block, values, dtype)
        self.agent = agent


class Fragment(Owned):
    """The rows of it that a warpgroup holds."""

    def __init__(self, agent: Agent, shape: Sequence[int], dtype: str) -> None:
        rows, columns = shape
        super().__init__(agent, (64, columns), dtype)
        self.whole, self.first_row = tuple(shape), agent.first_row(rows)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.whole

    def position(self, index: tuple[Any, ...]) -> tuple[Any, ...]:
        a, b = map(value_of, index)
        return a - self.first_row, b

    def note_read(self) -> None:
        assert all(self is not accumulator for accumulator, _ in self.agent.products), "an accumulator is read while in flight"

    def note_write(self) -> None:
        assert all(self is not x for product in self.agent.products for x in product), "a fragment is written while in flight"


class Registers(Owned):
    """[threads, registers of each]"""

    def position(self, index: tuple[Any, ...]) -> tuple[Any, ...]:
        (number,) = map(value_of, index)
        loop = self.agent.loop
        return (slice(None), number) if loop is None else (loop.threads, number)


class Reference(Expression):
    """Elements or a block of an array."""

    def __init__(self, array: Array, index: tuple[Any, ...]) -> None:
        self.array, self.index = array, index

    @property
    def loop(self) -> Loop | None:
        return self.array.block.agent.loop

    @property
    def value(self) -> np.ndarray:
        return self.array.load(self.index)

    def store(self, value: Any) -> None:
        loop = self.loop
        chosen = None if loop is None or loop.active.all() else loop.active
        self.array.store(self.index, value_of(simplified(value_of(value))), chosen)
        if loop is not None:
            loop.written = True

    def block(self) -> tuple[tuple[int, ...], tuple[Any, ...], tuple[slice, ...]]:
        """(shape of the block, the part of it that is inside of the array: where in `values`, where in the block)"""
        shape, inside, within = [], [], []
        for i, size in zip(self.index, self.array.shape, strict=True):
            if isinstance(i, slice):
                start, stop = 0 if i.start is None else int(i.start), size if i.stop is None else int(i.stop)
                assert 0 <= start <= stop
                shape.append(stop - start)
                inside.append(slice(min(start, size), min(stop, size)))
                within.append(slice(0, inside[-1].stop - inside[-1].start))
            else:
                assert 0 <= int(i) < size, f"{self.array.name}{self.index} is outside of {self.array.shape}"
                inside.append(int(i))
        return tuple(shape), tuple(inside), tuple(within)

    def read_block(self) -> np.ndarray:
        """As a bulk copy: zero outside of the array."""
        shape, inside, within = self.block()
        found = np.zeros(shape, self.array.values.dtype)
        found[within] = self.array.values[inside]
        return found

    def write_block(self, values: np.ndarray) -> None:
        shape, inside, within = self.block()
        assert values.shape == shape
        self.array.values[inside] = rounded(values, self.array.dtype)[within]


class Pointer:
    """What a device helper gets: an address in registers, in a shared tile, or in global memory."""

    def __init__(self, reference: Reference, *_mode: Any) -> None:
        self.array, self.index = reference.array, tuple(map(value_of, reference.index))

    def registers(self, count: int) -> np.ndarray:
        """From here on, [threads, count], to read and to write."""
        (first,) = self.index
        assert first + count <= self.array.shape[1]
        return self.array.values[:, first : first + count]

    def elements(self, offsets: Any) -> np.ndarray:
        """Positions in the flat array; of each thread, if the address is different in each."""
        first = np.ravel_multi_index(np.broadcast_arrays(*self.index), self.array.shape)
        return (first[:, None] if np.ndim(first) else first) + np.asarray(offsets)

    def load(self, offsets: Any) -> np.ndarray:
        return self.array.values.reshape(-1)[self.elements(offsets)]

    def store(self, offsets: Any, values: Any) -> None:
        positions = self.elements(offsets)
        assert positions.min() >= 0
        self.array.values.reshape(-1)[positions] = rounded(values, self.array.dtype)

    def swizzled(self, offset: np.ndarray) -> tuple[Any, ...]:
        """The 8 elements behind each byte offset in a 64-column tile whose 16-byte pieces are swizzled by row."""
        self.array.block.swizzled.add(self.array.name)
        stage, first_row, first_column = self.index
        row, piece = offset // 128, offset % 128 // 16 ^ offset // 128 % 8
        return stage, first_row + row[..., None], first_column + 8 * piece[..., None] + np.arange(8)


# Device helpers of warpgroups. Registers of an accumulator of 64 columns are [threads, i, j, h, e]: row 8 h and column
# 16 i + 8 j + e from the thread's first ones.

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


def zero_rows(tile: Pointer, first: int) -> None:
    stage, *start = tile.index
    assert start == [0, 0]
    assert tile.array.shape[1:] == (64, 128)
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


def zero_first_rows(target: Pointer, stride: int, rows: int) -> None:
    target.store(stride * np.arange(rows)[:, None] + np.arange(128), 0.0)


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


HELPERS: dict[str, Callable[..., None]] = {
    "qla_add_products": add_products, "qla_add_scaled_rows": add_scaled_rows, "qla_decay_and_store": decay_and_store,
    "qla_keep_and_erase": keep_and_erase, "qla_load_columns": load_columns, "qla_load_first_columns": load_first_columns,
    "qla_load_pair": load_pair, "qla_load_rows": load_rows, "qla_load_tile": load_tile_into,
    "qla_load_transposed": load_transposed, "qla_lower_triangle": lower_triangle, "qla_scale_column_pairs": scale_column_pairs,
    "qla_scale_columns": scale_columns, "qla_scale_rows_and_store": scale_rows_and_store, "qla_score_gradient": score_gradient,
    "qla_store_columns": store_columns, "qla_store_diagonal": store_diagonal, "qla_store_first_rows": store_first_rows,
    "qla_store_overlap": store_overlap, "qla_store_rows": store_rows, "qla_store_scaled": store_scaled,
    "qla_store_transposed": store_transposed, "qla_subtract_scaled": subtract_scaled, "qla_zero_first_rows": zero_first_rows,
    "qla_zero_rows": zero_rows, "qla_store_accumulator": store_accumulator,
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


# Threads, and who runs.


class Ended(BaseException):
    """Another agent failed."""


class Agent(threading.Thread):
    """A warpgroup, a single warp, or a lane of one."""

    def __init__(self, block: Block, first_thread: int, threads: int, work: Callable[[], None]) -> None:
        super().__init__(name=f"threads {first_thread} to {first_thread + threads - 1}", daemon=True)
        self.block, self.first_thread, self.threads, self.work = block, first_thread, threads, work
        self.lane = first_thread % 32
        self.loop: Loop | None = None
        self.products: list[tuple[Fragment, Any]] = []       # in flight: accumulator, operand
        self.tiles = self.barriers = self.meetings = 0
        self.may_go_on: Callable[[], bool] = lambda: True
        self.waits_for = "its turn"
        self.turn = threading.Semaphore(0)
        self.failure: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self.wait_until(self.may_go_on, self.waits_for)
            self.work()
        except BaseException as failure:
            self.failure = failure
        self.waits_for = ""
        self.block.turn.release()

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        self.may_go_on, self.waits_for = condition, what
        self.block.turn.release()
        self.turn.acquire()
        if self.block.over:
            raise Ended

    def first_row(self, rows: int) -> int:
        """Of the 64 that a warpgroup holds of a fragment: one of `rows` is spread over rows / 64 warpgroups."""
        assert self.threads == WARPGROUP
        return self.first_thread // WARPGROUP % (rows // 64) * 64

    def values_of_warp(self, value: Any) -> list[Any]:
        """What each lane of the warp brought, once all have come."""
        assert self.threads == 1, "a warp that exchanges values is run lane by lane"
        self.meetings += 1
        meeting = self.block.meetings[self.first_thread // 32, self.meetings]
        meeting[self.lane] = value
        if len(meeting) < 32:
            self.wait_until(lambda: len(meeting) == 32, "the other lanes")
        return [meeting[lane] for lane in range(32)]


class Barrier:
    """Phases of an mbarrier."""

    def __init__(self, name: str, needed: int) -> None:
        self.name, self.needed = name, needed
        self.arrived = self.done = 0


class Block:
    """T, for one block of a kernel."""

    def __init__(self, number: int, sizes: Mapping[str, int], tile_names: Sequence[str], barrier_names: Sequence[str]) -> None:
        self.number, self.sizes, self.tile_names, self.barrier_names = number, sizes, tile_names, barrier_names
        self.agent: Agent = None         # the one that runs
        self.turn = threading.Semaphore(0)
        self.over = False
        self.blocks = 0                  # of the kernel
        self.tiles: list[Array] = []
        self.barriers: list[list[Barrier]] = []
        self.meetings: dict[tuple[int, int], dict[int, Any]] = defaultdict(dict)
        self.swizzled: set[str] = set()  # tiles that helpers take to be so
        self.laid_out: set[str] = set()  # those that are

    def run(self, work: Callable[[], None], warpgroups: int, warps: Sequence[int], by_lane: Sequence[int]) -> None:
        """`work` by each of the warpgroups and single warps; of the latter those in by_lane as 32 agents."""
        spans = [(number * WARPGROUP, WARPGROUP) for number in range(warpgroups)]
        for warp in warps:
            spans += [(warp * 32 + lane, 1) for lane in range(32)] if warp in by_lane else [(warp * 32, WARP)]
        agents = []
        for first, threads in spans:
            agents.append(Agent(self, first, threads, work))
            self.turn.acquire()
        try:
            while waiting := [agent for agent in agents if agent.waits_for]:
                ready = [agent for agent in waiting if agent.may_go_on()]
                assert ready, "deadlock: " + "; ".join(f"{agent.name} wait for {agent.waits_for}" for agent in waiting)
                for self.agent in ready:
                    self.agent.turn.release()
                    self.turn.acquire()
                    if self.agent.failure is not None:
                        raise self.agent.failure
        finally:
            self.over = True
            for agent in agents:
                agent.turn.release()
                agent.join()
        assert not any(agent.products for agent in agents), "a product is in flight at the end"
        assert not any(stage.arrived for stages in self.barriers for stage in stages), "a barrier is in the middle of a phase"
        assert self.swizzled <= self.laid_out, f"nothing says that {self.swizzled - self.laid_out} are swizzled"

    def names(self) -> dict[str, Any]:
        def ignored(*args: Any, **kwargs: Any) -> None:
            return None

        return dict(
            macro=lambda function: function, prim_func=lambda function: function, dynamic=self.sizes.__getitem__,
            Tensor=lambda shape, dtype: (tuple(shape), dtype), int32=int, int64=int, uint32=int, float32=float,
            Kernel=self.kernel, annotate_layout=self.annotate_layout, set_max_nreg=ignored,
            get_thread_binding=lambda: simplified(self.agent.first_thread + np.arange(self.agent.threads)),
            GemmWarpPolicy=SimpleNamespace(FullRow=None), serial=lambda extent: range(int(extent)), unroll=range,
            Parallel=lambda rows, columns: Loop(self.agent, rows, columns), clear=self.clear,
            ceildiv=lambda a, b: -(-a // b), max=np.maximum, min=np.minimum, cast=cast, if_then_else=if_then_else, exp=np.exp,
            exp2=np.exp2, log1p=np.log1p, alloc_var=ignored, evaluate=ignored,
            alloc_local=lambda shape, dtype: Registers(self.agent, (self.agent.threads, *shape), dtype),
            alloc_fragment=lambda shape, dtype: Fragment(self.agent, shape, dtype), alloc_shared=self.alloc_shared,
            alloc_barrier=self.alloc_barrier, address_of=Pointer, access_ptr=Pointer, copy=self.copy, tma_copy=self.copy,
            tma_store_wait=ignored, fence_proxy_async=ignored, wgmma_gemm=self.product, wait_wgmma=self.wait_products,
            call_extern=self.helper, barrier_wait=self.wait, barrier_arrive=self.arrive, pdl_sync=ignored, pdl_trigger=ignored,
        )  # fmt: skip

    @contextlib.contextmanager
    def kernel(self, blocks: int, *, threads: int, prelude: str) -> Iterator[int]:
        self.blocks = int(blocks)
        yield self.number

    def annotate_layout(self, layouts: Mapping[Array, Any]) -> None:
        self.laid_out |= {tile.name for tile in layouts}

    def alloc_shared(self, shape: Sequence[int], dtype: str, *, scope: str) -> Array:
        if self.agent.tiles == len(self.tiles):
            name = self.tile_names[len(self.tiles)]
            numbers = Numbers(self, np.full(shape, np.iinfo(np.int32).min), dtype, name)
            self.tiles.append(numbers if dtype == "int32" else Array(self, np.full(shape, np.nan, np.float32), dtype, name))
        self.agent.tiles += 1
        return self.tiles[self.agent.tiles - 1]

    def alloc_barrier(self, *, arrive_count: Sequence[int]) -> list[Barrier]:
        if self.agent.barriers == len(self.barriers):
            name = self.barrier_names[len(self.barriers)]
            self.barriers.append([Barrier(name, count) for count in arrive_count])
        self.agent.barriers += 1
        return self.barriers[self.agent.barriers - 1]

    def wait(self, barrier: Barrier, parity: int) -> None:
        if barrier.done % 2 == parity:
            self.agent.wait_until(lambda: barrier.done % 2 != parity, barrier.name)

    def arrive(self, barrier: Barrier) -> None:
        barrier.arrived += self.agent.threads
        assert barrier.arrived <= barrier.needed, f"more arrivals at {barrier.name} than the {barrier.needed} of a phase"
        if barrier.arrived == barrier.needed:
            barrier.arrived, barrier.done = 0, barrier.done + 1

    def clear(self, fragment: Fragment) -> None:
        fragment.note_write()
        fragment.values[:] = 0

    def copy(self, source: Fragment | Reference, target: Fragment | Reference, *, barrier: Barrier | None = None) -> None:
        source_array, target_array = (x if isinstance(x, Fragment) else x.array for x in (source, target))
        source_array.note_read()
        target_array.note_write()
        if isinstance(target, Fragment):
            rows = slice(target.first_row, target.first_row + 64)
            values = source.values if isinstance(source, Fragment) else source.read_block()[rows]
            target.values[:] = rounded(values, target.dtype)
        elif isinstance(source, Fragment):
            shape, inside, _ = target.block()
            assert shape == source.shape
            target.array.values[inside][source.first_row : source.first_row + 64] = rounded(source.values, target.array.dtype)
        else:
            target.write_block(source.read_block())

    def product(
        self, a: Fragment | Reference, b: Reference, c: Fragment, transpose_A: bool = False, transpose_B: bool = False,
        clear_accum: bool = False, policy: Any = None,
    ) -> None:  # fmt: skip
        """c += a b. Several in flight may add to one accumulator; nobody else may touch it before they are waited for."""
        if isinstance(a, Fragment):
            a.note_read()
            left = a.values
            assert not transpose_A
        else:
            left = a.read_block().T if transpose_A else a.read_block()
            left = left[c.first_row : c.first_row + 64]
        self.laid_out |= {x.array.name for x in (a, b) if isinstance(x, Reference)}
        right = b.read_block().T if transpose_B else b.read_block()
        # By torch, whose threads the tests bound: on a busy machine those of numpy wait for one another.
        product = (torch.from_numpy(left) @ torch.from_numpy(right)).numpy()
        c.values[:] = product + (0 if clear_accum else c.values)
        self.agent.products.append((c, a))

    def wait_products(self, running: int) -> None:
        self.agent.products = self.agent.products[max(len(self.agent.products) - running, 0) :]

    def helper(self, returns: str, name: str, *args: Any) -> None:
        args = tuple(map(value_of, args))
        if name in LANE_HELPERS:
            LANE_HELPERS[name](self.agent, *args)
        else:
            HELPERS[name](*args)


def launch(
    template: str,
    problem: Mapping[str, Any],
    config: Mapping[str, Any],
    *arguments: Any,
    sizes: Mapping[str, int],
    by_lane: Sequence[int],
) -> None:
    """What a compiled kernel does with its arguments: it fills its outputs, which are among them.

    Args:
        sizes: values of the kernel's dynamic dimensions.
        by_lane: warps whose lanes go different ways.
    """
    module = traced_template(template)
    described, chosen = module.Problem(**problem), module.Config(**config)
    threads = sum(role.threads for role in module.roles(described, chosen))
    warpgroups = threads // WARPGROUP - 1                # the last one is of single warps
    warps = range(4 * warpgroups, threads // 32)
    values = [x.float().numpy() if isinstance(x, torch.Tensor) and x.dtype == torch.bfloat16 else x for x in arguments]
    values = [x.numpy() if isinstance(x, torch.Tensor) else x for x in values]
    tile_names = [buffer.name for buffer in module.buffers(described, chosen)]
    barriers = barrier_names(module, described, chosen)

    def work(block: Block) -> None:
        kernel = module.build(described, chosen)
        bound = {}
        parameters = inspect.signature(kernel).parameters.items()
        for (name, parameter), value, given in zip(parameters, values, arguments, strict=True):
            bound[name] = value
            if isinstance(value, np.ndarray):
                shape, dtype = parameter.annotation
                found = tuple(given.shape), str(given.dtype).removeprefix("torch.")
                assert found == (shape, dtype), f"{name} is {found}, not {(shape, dtype)}"
                bound[name] = Global(block, value, dtype, name)
        with np.errstate(all="ignore"):             # it is of a thread
            kernel(**bound)

    number, blocks = 0, 1
    while number < blocks:
        block = Block(number, sizes, tile_names, barriers)
        with mock.patch.dict(vars(module.T), block.names(), clear=True), tilelang_replaced():
            block.run(functools.partial(work, block), warpgroups, warps, by_lane)
        number, blocks = number + 1, block.blocks
    for given, value in zip(arguments, values, strict=True):
        if isinstance(given, torch.Tensor):
            given.copy_(torch.from_numpy(value))
