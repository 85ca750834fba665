"""Do the device helpers do what their twins in numpy do? Their CUDA text is compiled for the CPU and called by all lanes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import cuda_text
import emulation
import numpy as np
import pytest
from cuda_text import DeviceHelpers
from emulated_helpers import HELPERS, LANE_HELPERS
from emulated_memory import Array, Pointer, rounded

from qla_jit.kernel_templates import register_gradient_scan, warpgroup_gradients
from qla_jit.kernel_templates.macros.chunk_lists import COLUMNS, LISTING

pytestmark = pytest.mark.skipif(cuda_text.COMPILER is None, reason="needs a C++ compiler")

# Together they have all helpers.
TEXTS = (register_gradient_scan.PRELUDE + LISTING, warpgroup_gradients.PRELUDE)

THREAD = np.arange(128)
WARP, LANE = THREAD // 32, THREAD % 32
ROW, COLUMN = 16 * WARP + LANE // 4, 2 * (LANE % 4)
# Byte offsets for ldmatrix and stmatrix of a tile whose rows are the accumulator's, and of one whose columns are.
OFFSET = (16 * WARP + 8 * (LANE // 8 % 2) + LANE % 8) * 128 + (LANE // 16 ^ LANE % 8) * 16
TRANSPOSED_OFFSET = (8 * (LANE // 16) + LANE % 8) * 128 + (2 * WARP + LANE // 8 % 2 ^ LANE % 8) * 16
DIAGONAL = np.where(LANE // 4 >= COLUMN, 0xFFFF, 0) + np.where(LANE // 4 > COLUMN, 0xFFFF0000, 0)


@dataclass
class Operand:
    """The same values for the twin, and as the CUDA text has them; and where in it an argument points."""

    array: Array
    memory: np.ndarray                   # float32, int32, or bf16 as uint16
    order: np.ndarray                    # of each value, its place in `memory`
    index: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        values = self.array.values.reshape(-1)
        self.memory[self.order] = values.view(np.uint32) >> 16 if self.memory.dtype == np.uint16 else values

    def at(self, *index: Any) -> Operand:
        self.index = index
        return self

    @property
    def pointer(self) -> Pointer:
        return Pointer(self.array[self.index])

    @property
    def address(self) -> np.ndarray:
        position = np.ravel_multi_index(np.broadcast_arrays(*self.index), self.array.shape)
        return self.memory.ctypes.data + self.memory.itemsize * self.order[position]

    @property
    def found(self) -> np.ndarray:
        values = self.memory[self.order]
        if values.dtype == np.uint16:
            values = (values.astype(np.uint32) << 16).view(np.float32)
        return values.reshape(self.array.shape)


class Registers(Operand):
    """Of each thread; an argument points to the same of each."""

    @property
    def address(self) -> np.ndarray:
        threads, count = self.array.shape
        return self.memory.ctypes.data + self.memory.itemsize * (count * np.arange(threads) + self.index[0])


class Memory:
    def __init__(self, threads: int) -> None:
        self.threads, self.draw = threads, np.random.default_rng(0)
        self.block = emulation.Block(0, {}, [], [])
        self.shared, self.used = np.zeros(2**17, np.uint8), 0
        self.operands: list[Operand] = []

    def operand(self, kind: type[Operand], shape: tuple[int, ...], dtype: str, memory: np.ndarray, order: np.ndarray) -> Operand:
        values = rounded(self.draw.standard_normal(shape, np.float32), dtype)
        self.operands.append(kind(Array(self.block, values, dtype), memory, order))
        return self.operands[-1]

    def registers(self, count: int, dtype: str = "float32") -> Operand:
        memory = np.zeros(self.threads * count, np.uint16 if dtype == "bfloat16" else np.float32)
        return self.operand(Registers, (self.threads, count), dtype, memory, np.arange(memory.size)).at(0)

    def pairs(self) -> Operand:
        return self.registers(32, "bfloat16")

    def in_shared(self, size: int, dtype: type) -> np.ndarray:
        start, self.used = self.used, self.used + size * np.dtype(dtype).itemsize
        return self.shared[start : self.used].view(dtype)

    def floats(self, *shape: int) -> Operand:
        size = int(np.prod(shape))
        return self.operand(Operand, shape, "float32", self.in_shared(size, np.float32), np.arange(size))

    def tile(self, rows: int = 64, columns: int = 64) -> Operand:
        """In halves of 64 columns, of which the 16-byte pieces are swizzled by row."""
        row, column = np.ogrid[:rows, :columns]
        order = column // 64 * rows * 64 + row * 64 + (column % 64 // 8 ^ row % 8) * 8 + column % 8
        memory = self.in_shared(rows * columns, np.uint16)
        return self.operand(Operand, (1, rows, columns), "bfloat16", memory, order.reshape(-1)).at(0, 0, 0)

    def in_global(self, *shape: int) -> Operand:
        memory = np.zeros(int(np.prod(shape)), np.uint16)
        return self.operand(Operand, shape, "bfloat16", memory, np.arange(memory.size))

    def counted(self, *shape: int) -> Operand:
        """Integers in global memory, all 3."""
        values, memory = np.full(shape, 3, np.int32), np.zeros(int(np.prod(shape)), np.int32)
        self.operands.append(Operand(Array(self.block, values, "int32"), memory, np.arange(memory.size)))
        return self.operands[-1]


# Arguments of each: operands, numbers, and numbers of each thread.
WARPGROUP_CALLS: dict[str, Callable[[Memory], list[Any]]] = {
    "qla_load_rows": lambda m: [m.registers(4), m.floats(3, 4, 64).at(1, 3, ROW), -128],
    "qla_load_columns": lambda m: [m.registers(16), m.floats(3, 4, 64).at(2, 1, COLUMN)],
    "qla_load_first_columns": lambda m: [m.registers(16), m.floats(3, 4, 64).at(2, 1, COLUMN)],
    "qla_load_pair": lambda m: [m.registers(2), m.floats(3, 2).at(1, 0)],
    "qla_scale_rows_and_store": lambda m: [m.registers(32), m.tile(64, 128).at(0, 0, 64), OFFSET, ROW / 64, ROW / 32],
    "qla_lower_triangle": lambda m: [m.registers(32), m.pairs(), WARP, DIAGONAL],
    "qla_decay_and_store": lambda m: [
        m.registers(32), m.tile(), OFFSET, m.registers(4), m.registers(16), -0.5, WARP, DIAGONAL
    ],
    "qla_subtract_scaled": lambda m: [m.registers(32), m.pairs(), m.pairs(), m.registers(16), m.floats(4, 64).at(2, COLUMN)],
    "qla_load_transposed": lambda m: [m.pairs(), m.tile(64, 128).at(0, 0, 64), TRANSPOSED_OFFSET],
    "qla_store_transposed": lambda m: [m.pairs(), m.tile(), TRANSPOSED_OFFSET],
    "qla_load_tile": lambda m: [m.registers(32), m.tile(), OFFSET],
    "qla_scale_columns": lambda m: [m.registers(32), m.registers(16), m.floats(4, 64).at(1, COLUMN)],
    "qla_scale_column_pairs": lambda m: [m.pairs(), m.pairs(), m.floats(4, 64).at(1, COLUMN)],
    "qla_keep_and_erase": lambda m: [m.registers(32), m.pairs(), m.pairs(), m.floats(4, 64).at(1, COLUMN)],
    "qla_store_scaled": lambda m: [m.registers(64).at(32), m.tile(), OFFSET, 0.75],
    "qla_score_gradient": lambda m: [m.registers(32), m.tile(), OFFSET, m.registers(4), m.registers(16), -1.5, 1, 50],
    "qla_store_diagonal": lambda m: [m.registers(32), m.floats(10, 64).at(5, 0)],
    "qla_add_products": lambda m: [m.registers(32), m.registers(32), m.registers(2), m.registers(16)],
    "qla_store_rows": lambda m: [m.registers(2), m.floats(10, 64).at(6, 0)],
    "qla_store_columns": lambda m: [m.registers(16), m.floats(10, 64).at(1, 0)],
    "qla_add_scaled_rows": lambda m: [
        m.registers(64).at(32), m.registers(64).at(32), m.tile(64, 128).at(0, 0, 64), OFFSET, ROW / 64, ROW / 32, m.registers(2)
    ],
    "qla_store_accumulator": lambda m: [m.registers(64).at(32), m.in_global(80, 2, 128).at(3, 1, 64), 256, 37],
    "qla_store_overlap": lambda m: [m.tile(128, 128), m.tile(128, 128), m.floats(10, 64).at(9, 0)],
}  # fmt: skip
WARP_CALLS: dict[str, Callable[[Memory], list[Any]]] = {
    "qla_zero_rows": lambda m: [m.tile(64, 128), 37, 2],
    "qla_store_first_rows": lambda m: [m.tile(), m.in_global(80, 2, 128).at(3, 1, 64), 256, 37],
    "qla_zero_first_rows": lambda m: [m.in_global(80, 2, 128).at(3, 1, 0), 256, 37, 128],
    "qla_list_chunk": lambda m: [m.counted(8, COLUMNS).at(0, 0), m.counted(2).at(1), 9, 11, 1, 192, 40],
}
LANE_CALLS: dict[str, Callable[[Memory], list[Any]]] = {
    "qla_scan64": lambda m: [m.registers(3)],
    "qla_gate_gradient": lambda m: [m.registers(2), m.floats(10, 64).at(0, 0), 0.75, 50],
    "qla_mark_resets": lambda m: [m.registers(2), m.registers(2), -0.5],
}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[DeviceHelpers]:
    return [DeviceHelpers(text, tmp_path_factory.mktemp("text")) for text in TEXTS]


def call_both(compiled: list[DeviceHelpers], name: str) -> None:
    """The text and its twin, and compare all that they may have written."""
    memory = Memory(threads=128 if name in WARPGROUP_CALLS else 32)
    arguments = (WARPGROUP_CALLS | WARP_CALLS | LANE_CALLS)[name](memory)
    addresses = [x.address if isinstance(x, Operand) else x for x in arguments]
    text = next(helpers for helpers in compiled if name in helpers.parameters)
    text.call(name, memory.shared, [np.broadcast_to(x, memory.threads) for x in addresses])

    given = [x.pointer if isinstance(x, Operand) else x for x in arguments]
    if name in LANE_CALLS:
        call_lanes(name, memory, *arguments)
    else:
        HELPERS[name](*given)
    # Up to the order of sums and the last bit of exp2, which may round a bf16 otherwise.
    for operand in memory.operands:
        tolerance = 8e-3 if operand.memory.dtype == np.uint16 else 2e-5
        np.testing.assert_allclose(operand.found, operand.array.values, rtol=tolerance, atol=2e-5)


def call_lanes(name: str, memory: Memory, exchanged: Registers, *others: Any) -> None:
    """The twin as each lane; what the lanes tell one another is in the first registers."""
    brought = list(exchanged.array.values[:, :2].copy())
    for lane in range(32):
        agent = SimpleNamespace(lane=lane, values_of_warp=lambda own: brought)
        LANE_HELPERS[name](agent, *(of_lane(lane, x, memory) for x in (exchanged, *others)))


def of_lane(lane: int, x: Any, memory: Memory) -> Any:
    if isinstance(x, Registers):
        return Pointer(Array(memory.block, x.array.values[lane : lane + 1], "float32")[0])
    return x.pointer if isinstance(x, Operand) else x


@pytest.mark.parametrize("name", sorted(HELPERS | LANE_HELPERS))
def test_helper_does_what_its_twin_does(compiled: list[DeviceHelpers], name: str) -> None:
    call_both(compiled, name)


# What is planted into the text, all at once.
FAULTS = {
    "qla_load_transposed": ("offset + 2048 * i", "offset + 1024 * i"),
    "qla_lower_triangle": ("qla_pack(v[2], v[3]) & left", "qla_pack(v[2], v[3]) & right"),
    "qla_scan64": ("lane >= step", "lane > step"),
    "qla_zero_rows": ("at + 8192 * part", "at + 4096 * part"),
    "qla_store_first_rows": ("piece ^ (row & 7)", "piece"),
    "qla_score_gradient": ("a >= b + strict", "a > b + strict"),
    "qla_gate_gradient": ("d[h] = lane + 32 * h < valid", "d[h] = lane + 32 * h <= valid"),
    "qla_mark_resets": ("lane > 0 ? b : middle", "lane > 0 ? b : 0.0f"),
    "qla_list_chunk": ("% 32 == 0", "% 16 == 0"),
}


@pytest.fixture(scope="module")
def compiled_wrong(tmp_path_factory: pytest.TempPathFactory) -> list[DeviceHelpers]:
    text = warpgroup_gradients.PRELUDE + LISTING
    for right, wrong in FAULTS.values():
        assert right in text
        text = text.replace(right, wrong)
    return [DeviceHelpers(text, tmp_path_factory.mktemp("wrong"))]


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_the_text_is_seen(compiled_wrong: list[DeviceHelpers], name: str) -> None:
    with pytest.raises(AssertionError):
        call_both(compiled_wrong, name)
