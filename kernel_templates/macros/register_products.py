"""Products of a chunk on their way through the registers of a warpgroup, from accumulators to shared tiles and on to memory."""

from ..language import T, macro
from .register_gates import GAMMA
from .register_roles import HALF, WARP
from .register_tiles import from_registers, to_registers


def diagonal_mask(lane):
    """Of a pair of columns on the diagonal block: which half is on or below it."""
    row, column = lane // 4, 2 * (lane % 4)
    low, high = T.uint32(0xFFFF), T.uint32(0xFFFF0000)
    return T.if_then_else(row >= column, low, T.uint32(0)) + T.if_then_else(row >= column + 1, high, T.uint32(0))


def decay_and_store(registers, tile, stage, lane_offset, row_factor, column_factor, log2_scale, warp, diagonal):
    """tile <- scale Gamma o x; above the diagonal Gamma may overflow, so it is masked."""
    return T.call_extern(
        "handle", "qla_decay_and_store", T.address_of(registers[0]), T.access_ptr(tile[stage, 0, 0], "r", HALF * HALF),
        lane_offset, T.address_of(row_factor[0]), T.address_of(column_factor[0]), log2_scale, warp, diagonal,
    )  # fmt: skip


@macro
def emit_x(half, X, stage, accumulator, registers, lane_offset, factors):
    # X, columns [64 half, 64 half + 64): rows scaled by gamma_L / gamma
    to_registers(64, HALF, accumulator, registers)
    T.call_extern(
        "handle", "qla_scale_rows_and_store", T.address_of(registers[0]), T.access_ptr(X[stage, 0, half * HALF], "r", 64),
        lane_offset, factors[2], factors[3],
    )  # fmt: skip
    from_registers(64, HALF, registers, accumulator)


@macro
def values_minus_decayed(C, u, v_registers, gates, stage, column, first_factors, u_registers, w_registers, w):
    # W = V - gamma o (K S), in bf16
    to_registers(u.shape[0], C, u, u_registers)
    T.call_extern(
        "handle", "qla_subtract_scaled", T.address_of(u_registers[0]), T.address_of(v_registers[0]), T.address_of(w_registers[0]),
        T.address_of(first_factors[0]), T.access_ptr(gates[stage, GAMMA, column], "r", 1),
    )  # fmt: skip
    from_registers(u.shape[0], C, w_registers, w)


def load_transposed(tile, stage, half, registers, lane_offset):
    """A warpgroup's half of a tile of tokens by values, as an accumulator of values by tokens has it."""
    return T.call_extern(
        "handle", "qla_load_transposed", T.address_of(registers[0]), T.access_ptr(tile[stage, 0, half * HALF], "r", HALF),
        lane_offset,
    )  # fmt: skip


def store_transposed(registers, tile, half, lane_offset):
    return T.call_extern(
        "handle", "qla_store_transposed", T.address_of(registers[0]), T.access_ptr(tile[half, 0, 0], "r", HALF * HALF),
        lane_offset,
    )  # fmt: skip


@macro
def emit_values(tiles, name, half, parity, accumulator, registers, lane_offset):
    # O or V_new of the chunk before, once the store of the one before that has read the tile
    to_registers(*accumulator.shape, accumulator, registers)
    T.barrier_wait(tiles.barriers[name + "_free"][half], parity)
    store_transposed(registers, getattr(tiles, name), half, lane_offset)


def token_stride(values):
    """Elements from one token to the next, of V and its kin in memory."""
    return T.int64(int(values.shape[2]) * int(values.shape[3]))


def is_inside_values(values, column, rows):
    """Whether V or its kin have the 64 columns from this one on: True where tiles of so many fill them, else an expression."""
    V = int(values.shape[3])
    return True if V % rows == 0 else column < V


@macro
def start_rows_store(tile, half, walk, item, j, target):
    # what a warpgroup has left in its tile for chunk j of an item, to memory: a copy in flight. Of a ragged chunk only the
    # sequence's own rows, at once.
    C = walk.problem.C
    T.fence_proxy_async()                # on the reader's side of the barrier: the writers would wait for it
    start = item.first + j * C
    column = item.part * walk.rows + half * HALF
    if item.length - j * C >= C:
        T.tma_copy(tile[half, :, :], target[item.row, start : start + C, item.head, column : column + HALF])
    elif is_inside_values(target, column, walk.rows):
        T.call_extern(
            "handle", "qla_store_first_rows", T.access_ptr(tile[half, 0, 0], "r", 1),
            T.address_of(target[item.row, start, item.head, column]), token_stride(target), item.length - j * C,
        )  # fmt: skip


@macro
def zero_behind(walk, item, target):
    # the tokens behind the last sequence, which belong to nobody
    problem, end = walk.problem, item.first + item.length
    if problem.packed:
        if item.n == walk.N - 1 and item.segment == item.last and end < walk.tokens:
            first, lane, V = item.part * walk.rows, T.get_thread_binding() % WARP, int(target.shape[3])
            if V % walk.rows == 0:
                T.call_extern(
                    "handle", "qla_zero_first_rows", T.address_of(target[0, end, item.head, first]), token_stride(target),
                    walk.tokens - end, walk.rows,
                )  # fmt: skip
            else:
                for token in T.serial(walk.tokens - end):
                    for turn in T.unroll(walk.rows // WARP):
                        if first + turn * WARP + lane < V:
                            target[0, end + token, item.head, first + turn * WARP + lane] = T.cast(0.0, problem.dtype)
