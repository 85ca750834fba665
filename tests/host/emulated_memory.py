"""Values and memory of a kernel that runs on the CPU: tiles, registers, accumulators, tensors, and addresses in them.

bfloat16 is kept in float32, and rounded when it is written. Shared memory and registers are NaN at first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from emulation import Agent, Block

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


# Memory


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
