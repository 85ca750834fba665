"""The gradients of queries, keys, gates and write strengths, chunk by chunk, with a warpgroup for each of their parts.

As chunk_gradients, for K = V = 128 and chunks of 64, with S and dS' transposed [rows, HV, V, K]:

    scores     dP   = scale Gamma o lower(dO V_new^T)         dM = -Gamma o strictly_lower(dW V_new^T)
               the sums of Z = strictly_lower(dP o (Q K^T)) + dM o (K K^T) by row and column; the diagonal of dW V_new^T
    queries    dQ_S = scale gamma o (dO S^T)                  dQ = dQ_S + dP K
               the rows of Q o dQ_S; sum(S o dS')
    keys       dK_S = (gamma_L / gamma) o (V_new dS'^T)       dK_U = -gamma o (dW S^T)
               dK = dK_S + dK_U + dP^T Q + (dM + dM^T) K;     the rows of K o dK_S and K o dK_U

The chunks are those of a list (macros/chunk_lists.py), which also says in which row lies what is known of each.

Blocks are persistent and walk over (chunk, key head); the value heads of a key head follow one another and add up in registers.
Three single warps load, one of them also the factors that g_sum gives; a fourth turns the sums into dg and dbeta. The
warpgroups meet twice for a head: at dP and dM, and at the sums.

On an H200 16,384 chunks of value heads, two to a key head, take 0.67 ms, which is 3.6 TB/s; chunk_gradients takes 1.33 ms.
"""

from dataclasses import dataclass

from .arch import Arch
from .contract import Buffer, Rejection, Role, Template, knob
from .language import T, macro
from .macros.chunk_lists import AT, COLUMNS, ROW, SLOT, START, VALID
from .macros.gates import LOG2E, RESET
from .macros.launches import let_the_next_kernel_come, wait_for_the_kernel_before
from .macros.register_gates import load_column_factors, load_row_factors
from .macros.register_roles import HALF, WARP, allocate, allow_register_indices, load, load_rows, signal, wait_free, wait_full
from .macros.register_tiles import from_registers, row_lane_offset, to_registers
from .macros.warpgroup_sums import BY_COLUMN, BY_ROW, DIAGONAL, KEYS, KEYS_STATE, OVERLAP, PRELUDE, QUERIES

DIM = 128                                # of keys and of values
GATE_STAGES = 2
SUM_STAGES = 2

# A gate of -104 or less is 0 in float32, and so is its gradient: dg = 0 there, and no rounding. In units of log 2.
RESETS_BELOW = RESET / 2 * LOG2E

# Rows of the gates tile, over tokens: scale gamma for Q, gamma_L / gamma and -gamma for K, log2 gamma.
READ, TO_END, ERASE, LOG_GAMMA = range(4)

SCORES, QUERY_SUMS, KEY_SUMS = Role("scores", 128, 152), Role("queries", 128, 168), Role("keys", 128, 168)
LOADERS = Role("loaders", 128, 24)


@dataclass(frozen=True)
class Problem:
    H: int
    HV: int
    K: int
    V: int
    C: int
    dtype: str
    packed: bool
    index_dtype: str


@dataclass(frozen=True)
class Config:
    key_stages: int = knob(1, 2, why="chunks of Q and K in flight, loaded once for all value heads; with 2 of both nothing fits")
    value_stages: int = knob(1, 2, why="heads of dO, dW and V_new in flight; S and dS' have room for one")


def arguments(problem: Problem) -> tuple[str, ...]:
    return (
        "q", "k", "v_new", "dv", "do", "states", "state_gradients", "g_sum", "beta_chunks", "cu_seqlens",
        "listed", "counts",
        "dq", "dk", "dg", "dbeta", "scale", "band", "blocks",
    )  # fmt: skip


def buffers(problem: Problem, config: Config) -> tuple[Buffer, ...]:
    C, dtype = problem.C, problem.dtype
    return (
        Buffer("q", (C, DIM), dtype, config.key_stages),
        Buffer("k", (C, DIM), dtype, config.key_stages),
        Buffer("do", (C, DIM), dtype, config.value_stages),
        Buffer("dw", (C, DIM), dtype, config.value_stages),
        Buffer("v_new", (C, DIM), dtype, config.value_stages),
        Buffer("s", (DIM, DIM), dtype),
        Buffer("ds", (DIM, DIM), dtype),
        Buffer("dp", (C, C), dtype),
        Buffer("dm", (C, C), dtype),
        Buffer("gates", (4, C), "float32", GATE_STAGES),
        Buffer("sums", (10, C), "float32", SUM_STAGES),
        Buffer("place", (COLUMNS,), "int32", config.key_stages),
    )


def roles(problem: Problem, config: Config) -> tuple[Role, ...]:
    return (SCORES, QUERY_SUMS, KEY_SUMS, LOADERS)


def shapes_are_covered(problem: Problem, config: Config, arch: Arch) -> Rejection | None:
    if problem.C != 64 or problem.K != DIM or problem.V != DIM or problem.dtype != "bfloat16":
        return Rejection(
            f"written for C=64, K=V={DIM} in bfloat16; got C={problem.C}, K={problem.K}, V={problem.V} in {problem.dtype}"
        )
    return None


def default_config(problem: Problem, arch: Arch) -> Config:
    return Config(key_stages=2, value_stages=1)


@dataclass(frozen=True)
class Tiles:
    """The shared tiles, and for each the barriers that say when a stage is full and when it is free again."""

    q: object
    k: object
    do: object
    dw: object
    v_new: object
    s: object
    ds: object
    dp: object
    dm: object
    gates: object
    sums: object
    place: object                        # of a chunk, there with its K
    barriers: dict


def barrier_counts(config: Config) -> dict[str, tuple[int, int]]:
    """Arrivals and stages of each barrier. A tile is full when its writers say so, free when its readers do."""
    warp, scores, queries, keys = WARP, SCORES.threads, QUERY_SUMS.threads, KEY_SUMS.threads
    everyone = scores + queries + keys
    return {
        "q_full": (warp, config.key_stages),
        "q_free": (everyone, config.key_stages),
        "k_full": (warp, config.key_stages),
        "k_free": (everyone, config.key_stages),
        "do_full": (warp, config.value_stages),
        "do_free": (scores + queries, config.value_stages),
        "dw_full": (warp, config.value_stages),
        "dw_free": (scores + keys, config.value_stages),
        "v_new_full": (warp, config.value_stages),
        "v_new_free": (scores + keys, config.value_stages),
        "s_full": (warp, 1),
        "s_free": (queries + keys, 1),
        "ds_full": (warp, 1),
        "ds_free": (queries + keys, 1),
        "scores_full": (scores, 1),                       # dP and dM
        "scores_free": (queries + keys, 1),
        "gates_full": (warp, GATE_STAGES),
        "gates_free": (everyone, GATE_STAGES),
        "sums_full": (everyone, SUM_STAGES),
        "sums_free": (warp, SUM_STAGES),
        "tail_landed": (warp, 2),                         # a ragged chunk's K and Q, before their foreign rows are zeroed
    }


@dataclass(frozen=True)
class Walk:
    """The items of a block, chunks of key heads: item = block + step * blocks."""

    problem: object
    cu_seqlens: object
    listed: object
    count: object                        # of the chunks in the list
    tokens: object
    N: object
    block: object
    blocks: object

    @property
    def steps(self):
        return T.ceildiv(self.count * self.problem.H - self.block, self.blocks)

    def number(self, step):
        """Of the chunk in the list. Neighbours differ in the key head."""
        return (self.block + step * self.blocks) // self.problem.H

    def key_head(self, step):
        return (self.block + step * self.blocks) % self.problem.H


@macro
def chunk_of(walk, step):
    """(row, slot, batch row, first token, tokens) of an item. For the warps that run ahead: a search for the sequence took 4,000
    of 20,000 cycles an item, and a list in memory 700."""
    listed = walk.listed
    number = T.alloc_var("int32")
    at = T.alloc_var("int32")
    slot = T.alloc_var("int32")
    row = T.alloc_var("int32")
    start = T.alloc_var("int32")
    valid = T.alloc_var("int32")
    number = walk.number(step)
    at = listed[number, AT]
    slot = listed[number, SLOT]
    row = listed[number, ROW]
    start = listed[number, START]
    valid = listed[number, VALID]
    return at, slot, row, start, valid


@macro
def wait_keys(config, tiles, step):
    """Q, K and (batch row, first token, tokens) of an item: the warpgroups do not wait for memory to learn those."""
    row = T.alloc_var("int32")
    start = T.alloc_var("int32")
    valid = T.alloc_var("int32")
    wait_full(tiles.barriers, "q", config.key_stages, step)
    wait_full(tiles.barriers, "k", config.key_stages, step)
    row = tiles.place[step % config.key_stages, ROW]
    start = tiles.place[step % config.key_stages, START]
    valid = tiles.place[step % config.key_stages, VALID]
    return row, start, valid


def free_keys(config, tiles, step):
    signal(tiles.barriers, "q_free", config.key_stages, step)
    signal(tiles.barriers, "k_free", config.key_stages, step)


@macro
def store_gradient(walk, row, start, valid, key_head, total, registers, gradient):
    # the sequence's own rows; as a loop over elements it is 450 instructions
    problem = walk.problem
    to_registers(64, DIM, total, registers)
    for half in T.unroll(2):
        T.call_extern(
            "handle", "qla_store_accumulator", T.address_of(registers[half * 32]),
            T.address_of(gradient[row, start, key_head, half * HALF]), T.int64(problem.H * problem.K), valid,
        )  # fmt: skip


@macro
def zero_behind(walk, thread, gradient):
    # the tokens behind the last sequence, which belong to nobody; the blocks take turns
    problem = walk.problem
    if problem.packed:
        first = T.alloc_var("int32")
        first = T.cast(walk.cu_seqlens[walk.N], "int32") + walk.block
        for turn in T.serial(T.ceildiv(walk.tokens - first, walk.blocks)):
            for key_head in T.serial(problem.H):
                gradient[0, first + turn * walk.blocks, key_head, thread % DIM] = T.cast(0.0, problem.dtype)


def store_scores(registers, tile, lane_offset, row_factor, column_factor, factor, strict, valid):
    """tile <- factor Gamma o x in its lower triangle, without the diagonal if strict; 0 from row `valid` on."""
    C = tile.shape[1]
    return T.call_extern(
        "handle", "qla_score_gradient", T.address_of(registers[0]), T.access_ptr(tile[0, 0, 0], "r", C * C),
        lane_offset, T.address_of(row_factor[0]), T.address_of(column_factor[0]), factor, strict, valid,
    )  # fmt: skip


def add_products(x, y, row_sums, column_sums):
    return T.call_extern(
        "handle", "qla_add_products", T.address_of(x[0]), T.address_of(y[0]), T.address_of(row_sums[0]),
        T.address_of(column_sums[0]),
    )  # fmt: skip


def store_row_sums(row_sums, sums, stage, which):
    return T.call_extern(
        "handle", "qla_store_rows", T.address_of(row_sums[0]), T.access_ptr(sums[stage, which, 0], "r", sums.shape[2])
    )


@macro
def score_gradients(config, walk, tiles, thread, scale):
    # dP, dM, the sums of Z, the diagonal of dW V_new^T
    problem, C, barriers = walk.problem, walk.problem.C, tiles.barriers
    stages = config.value_stages
    dp = T.alloc_fragment((C, C), "float32")
    dm = T.alloc_fragment((C, C), "float32")
    scores = T.alloc_fragment((C, C), "float32")
    dp_registers = T.alloc_local((32,), "float32")
    dm_registers = T.alloc_local((32,), "float32")
    score_registers = T.alloc_local((32,), "float32")
    row_factor = T.alloc_local((4,), "float32")
    column_factor = T.alloc_local((16,), "float32")
    row_sums = T.alloc_local((2,), "float32")
    column_sums = T.alloc_local((16,), "float32")
    lane = thread % 32
    row_of = 16 * (thread % 128 // 32) + lane // 4
    column = 2 * (lane % 4)
    lane_offset = T.alloc_var("int32")
    lane_offset = row_lane_offset(thread)
    h = T.alloc_var("int32")             # value heads since the block began
    h = 0
    for step in T.serial(walk.steps):
        key_stage = step % config.key_stages
        _row, _start, valid = wait_keys(config, tiles, step)
        for member in T.serial(problem.HV // problem.H):
            stage = h % stages
            gate_stage = h % GATE_STAGES
            wait_full(barriers, "v_new", stages, h)
            wait_full(barriers, "do", stages, h)
            T.wgmma_gemm(tiles.do[stage, :, :], tiles.v_new[stage, :, :], dp, transpose_B=True, clear_accum=True)
            wait_full(barriers, "dw", stages, h)
            T.wgmma_gemm(tiles.dw[stage, :, :], tiles.v_new[stage, :, :], dm, transpose_B=True, clear_accum=True)
            wait_full(barriers, "gates", GATE_STAGES, h)
            load_row_factors(tiles.gates, gate_stage, LOG_GAMMA, row_of, row_factor, 0)
            load_column_factors(tiles.gates, gate_stage, LOG_GAMMA, column, column_factor)
            wait_free(barriers, "scores", 1, h)
            T.wait_wgmma(1)
            signal(barriers, "do_free", stages, h)
            to_registers(C, C, dp, dp_registers)
            store_scores(dp_registers, tiles.dp, lane_offset, row_factor, column_factor, scale, 0, valid)
            T.wait_wgmma(0)
            signal(barriers, "dw_free", stages, h)
            signal(barriers, "v_new_free", stages, h)
            to_registers(C, C, dm, dm_registers)
            wait_free(barriers, "sums", SUM_STAGES, h)
            T.call_extern(
                "handle", "qla_store_diagonal", T.address_of(dm_registers[0]),
                T.access_ptr(tiles.sums[h % SUM_STAGES, DIAGONAL, 0], "r", C),
            )  # fmt: skip
            store_scores(dm_registers, tiles.dm, lane_offset, row_factor, column_factor, -1.0, 1, valid)
            signal(barriers, "gates_free", GATE_STAGES, h)
            T.fence_proxy_async()
            signal(barriers, "scores_full", 1, h)
            for e in T.unroll(2):
                row_sums[e] = 0.0
            for e in T.unroll(16):
                column_sums[e] = 0.0
            T.wgmma_gemm(tiles.q[key_stage, :, :], tiles.k[key_stage, :, :], scores, transpose_B=True, clear_accum=True)
            T.wait_wgmma(0)
            to_registers(C, C, scores, score_registers)
            add_products(dp_registers, score_registers, row_sums, column_sums)
            T.wgmma_gemm(tiles.k[key_stage, :, :], tiles.k[key_stage, :, :], scores, transpose_B=True, clear_accum=True)
            T.wait_wgmma(0)
            to_registers(C, C, scores, score_registers)
            add_products(dm_registers, score_registers, row_sums, column_sums)
            store_row_sums(row_sums, tiles.sums, h % SUM_STAGES, BY_ROW)
            T.call_extern(
                "handle", "qla_store_columns", T.address_of(column_sums[0]),
                T.access_ptr(tiles.sums[h % SUM_STAGES, BY_COLUMN, 0], "r", C),
            )  # fmt: skip
            signal(barriers, "sums_full", SUM_STAGES, h)
            h = h + 1
        free_keys(config, tiles, step)


def row_accumulators(C):
    """Those of one value head and of all of them, and the registers that hold them for add_scaled."""
    own, total = (T.alloc_fragment((C, DIM), "float32") for _ in range(2))
    registers, total_registers = (T.alloc_local((64,), "float32") for _ in range(2))
    return own, total, registers, total_registers


@macro
def add_scaled(x, total, registers, total_registers, tile, stage, lane_offset, upper, lower, rows):
    # total += factor(row) x; rows += that o tile
    to_registers(64, DIM, x, registers)
    to_registers(64, DIM, total, total_registers)
    for half in T.unroll(2):
        T.call_extern(
            "handle", "qla_add_scaled_rows", T.address_of(registers[half * 32]), T.address_of(total_registers[half * 32]),
            T.access_ptr(tile[stage, 0, half * HALF], "r", 64), lane_offset, upper, lower, T.address_of(rows[0]),
        )  # fmt: skip
    from_registers(64, DIM, total_registers, total)


@macro
def query_gradients(config, walk, tiles, thread, dq):
    # dQ_S = scale gamma o (dO S^T);  dQ = dQ_S + dP K;  the rows of Q o dQ_S, and sum(S o dS')
    problem, C, barriers = walk.problem, walk.problem.C, tiles.barriers
    stages = config.value_stages
    own, total, registers, total_registers = row_accumulators(C)
    factor = T.alloc_local((4,), "float32")
    row_sums = T.alloc_local((2,), "float32")
    row_of = 16 * (thread % 128 // 32) + thread % 32 // 4
    lane_offset = T.alloc_var("int32")
    lane_offset = row_lane_offset(thread)
    h = T.alloc_var("int32")
    h = 0
    for step in T.serial(walk.steps):
        key_head = walk.key_head(step)
        key_stage = step % config.key_stages
        row, start, valid = wait_keys(config, tiles, step)
        T.clear(total)
        for member in T.serial(problem.HV // problem.H):
            stage = h % stages
            wait_full(barriers, "do", stages, h)
            wait_full(barriers, "s", 1, h)
            T.wgmma_gemm(tiles.do[stage, :, :], tiles.s[0, :, :], own, clear_accum=True)
            wait_full(barriers, "ds", 1, h)
            wait_full(barriers, "gates", GATE_STAGES, h)
            wait_free(barriers, "sums", SUM_STAGES, h)
            T.call_extern(
                "handle", "qla_store_overlap", T.access_ptr(tiles.s[0, 0, 0], "r", DIM * DIM),
                T.access_ptr(tiles.ds[0, 0, 0], "r", DIM * DIM), T.access_ptr(tiles.sums[h % SUM_STAGES, OVERLAP, 0], "r", 4),
            )  # fmt: skip
            load_row_factors(tiles.gates, h % GATE_STAGES, READ, row_of, factor, 0)
            for e in T.unroll(2):
                row_sums[e] = 0.0
            T.wait_wgmma(0)
            signal(barriers, "do_free", stages, h)
            signal(barriers, "s_free", 1, h)
            signal(barriers, "ds_free", 1, h)
            add_scaled(
                own, total, registers, total_registers, tiles.q, key_stage, lane_offset, factor[0], factor[1], row_sums
            )
            signal(barriers, "gates_free", GATE_STAGES, h)       # not before the factors were used: docs/tilelang.md
            store_row_sums(row_sums, tiles.sums, h % SUM_STAGES, QUERIES)
            signal(barriers, "sums_full", SUM_STAGES, h)
            wait_full(barriers, "scores", 1, h)
            T.wgmma_gemm(tiles.dp[0, :, :], tiles.k[key_stage, :, :], total)
            T.wait_wgmma(0)
            signal(barriers, "scores_free", 1, h)
            h = h + 1
        free_keys(config, tiles, step)
        store_gradient(walk, row, start, valid, key_head, total, total_registers, dq)
    zero_behind(walk, thread, dq)


@macro
def key_gradients(config, walk, tiles, thread, dk):
    # dK_S = (gamma_L / gamma) o (V_new dS'^T);  dK_U = -gamma o (dW S^T);  dK = dK_S + dK_U + dP^T Q + (dM + dM^T) K
    problem, C, barriers = walk.problem, walk.problem.C, tiles.barriers
    stages = config.value_stages
    own, total, registers, total_registers = row_accumulators(C)
    factor = T.alloc_local((4,), "float32")
    state_sums = T.alloc_local((2,), "float32")
    erase_sums = T.alloc_local((2,), "float32")
    row_of = 16 * (thread % 128 // 32) + thread % 32 // 4
    lane_offset = T.alloc_var("int32")
    lane_offset = row_lane_offset(thread)
    h = T.alloc_var("int32")
    h = 0
    for step in T.serial(walk.steps):
        key_head = walk.key_head(step)
        key_stage = step % config.key_stages
        row, start, valid = wait_keys(config, tiles, step)
        T.clear(total)
        for member in T.serial(problem.HV // problem.H):
            stage = h % stages
            wait_full(barriers, "v_new", stages, h)
            wait_full(barriers, "ds", 1, h)
            T.wgmma_gemm(tiles.v_new[stage, :, :], tiles.ds[0, :, :], own, clear_accum=True)
            wait_full(barriers, "gates", GATE_STAGES, h)
            load_row_factors(tiles.gates, h % GATE_STAGES, TO_END, row_of, factor, (ERASE - TO_END) * C)
            for e in T.unroll(2):
                state_sums[e] = 0.0
                erase_sums[e] = 0.0
            T.wait_wgmma(0)
            signal(barriers, "v_new_free", stages, h)
            signal(barriers, "ds_free", 1, h)
            add_scaled(
                own, total, registers, total_registers, tiles.k, key_stage, lane_offset, factor[0], factor[1], state_sums
            )
            wait_full(barriers, "dw", stages, h)
            wait_full(barriers, "s", 1, h)
            T.wgmma_gemm(tiles.dw[stage, :, :], tiles.s[0, :, :], own, clear_accum=True)
            T.wait_wgmma(0)
            signal(barriers, "dw_free", stages, h)
            signal(barriers, "s_free", 1, h)
            add_scaled(
                own, total, registers, total_registers, tiles.k, key_stage, lane_offset, factor[2], factor[3], erase_sums
            )
            signal(barriers, "gates_free", GATE_STAGES, h)       # not before the factors were used
            for e in T.unroll(2):
                erase_sums[e] = erase_sums[e] - state_sums[e]
            wait_free(barriers, "sums", SUM_STAGES, h)
            store_row_sums(erase_sums, tiles.sums, h % SUM_STAGES, KEYS)
            store_row_sums(state_sums, tiles.sums, h % SUM_STAGES, KEYS_STATE)
            signal(barriers, "sums_full", SUM_STAGES, h)
            wait_full(barriers, "scores", 1, h)
            T.wgmma_gemm(tiles.dp[0, :, :], tiles.q[key_stage, :, :], total, transpose_A=True)
            T.wgmma_gemm(tiles.dm[0, :, :], tiles.k[key_stage, :, :], total)
            T.wgmma_gemm(tiles.dm[0, :, :], tiles.k[key_stage, :, :], total, transpose_A=True)
            T.wait_wgmma(0)
            signal(barriers, "scores_free", 1, h)
            h = h + 1
        free_keys(config, tiles, step)
        store_gradient(walk, row, start, valid, key_head, total, total_registers, dk)
    zero_behind(walk, thread, dk)


@macro
def load_keys(config, walk, tiles, q, k, do):
    problem, C = walk.problem, walk.problem.C
    h = T.alloc_var("int32")
    tails = T.alloc_var("int32")
    h = 0
    tails = 0
    for step in T.serial(walk.steps):
        key_head = walk.key_head(step)
        _at, _slot, row, start, valid = chunk_of(walk, step)
        key_stage = step % config.key_stages
        wait_free(tiles.barriers, "k", config.key_stages, step)
        tiles.place[key_stage, ROW] = row
        tiles.place[key_stage, START] = start
        tiles.place[key_stage, VALID] = valid
        load_rows(tiles, "k", key_stage, k[row, start : start + C, key_head, 0:DIM], valid, 0, tails)
        signal(tiles.barriers, "k_full", config.key_stages, step)
        wait_free(tiles.barriers, "q", config.key_stages, step)
        load_rows(tiles, "q", key_stage, q[row, start : start + C, key_head, 0:DIM], valid, 1, tails)
        signal(tiles.barriers, "q_full", config.key_stages, step)
        if valid < C:
            tails = tails + 1
        for member in T.serial(problem.HV // problem.H):
            head = key_head * (problem.HV // problem.H) + member
            stage = h % config.value_stages
            load(tiles, "do", config.value_stages, h, do[row, start : start + C, head, 0:DIM], stage)
            h = h + 1


@macro
def load_values_and_factors(config, walk, tiles, lane, v_new, dv, g_sum, scale):
    # The factors of a head come behind its tiles, which have a head's time to arrive.
    problem, C, barriers = walk.problem, walk.problem.C, tiles.barriers
    sums = T.alloc_local((2,), "float32")
    last = T.alloc_var("float32")
    h = T.alloc_var("int32")
    h = 0
    for step in T.serial(walk.steps):
        key_head = walk.key_head(step)
        at, slot, row, start, _valid = chunk_of(walk, step)
        for member in T.serial(problem.HV // problem.H):
            head = key_head * (problem.HV // problem.H) + member
            stage = h % config.value_stages
            load(tiles, "v_new", config.value_stages, h, v_new[at, head, 0:C, 0:DIM], stage)
            load(tiles, "dw", config.value_stages, h, dv[row, start : start + C, head, 0:DIM], stage)
            for e in T.unroll(2):
                sums[e] = g_sum[slot, head, lane + 32 * e] * LOG2E
            last = g_sum[slot, head, C - 1] * LOG2E
            wait_free(barriers, "gates", GATE_STAGES, h)
            for e in T.unroll(2):
                tiles.gates[h % GATE_STAGES, READ, lane + 32 * e] = T.exp2(sums[e]) * scale
                tiles.gates[h % GATE_STAGES, TO_END, lane + 32 * e] = T.exp2(last - sums[e])
                tiles.gates[h % GATE_STAGES, ERASE, lane + 32 * e] = -T.exp2(sums[e])
                tiles.gates[h % GATE_STAGES, LOG_GAMMA, lane + 32 * e] = sums[e]
            signal(barriers, "gates_full", GATE_STAGES, h)
            h = h + 1


@macro
def load_states(walk, tiles, states, state_gradients):
    problem = walk.problem
    h = T.alloc_var("int32")
    h = 0
    for step in T.serial(walk.steps):
        key_head = walk.key_head(step)
        at, _slot, _row, _start, _valid = chunk_of(walk, step)
        for member in T.serial(problem.HV // problem.H):
            head = key_head * (problem.HV // problem.H) + member
            load(tiles, "ds", 1, h, state_gradients[at, head, 0:DIM, 0:DIM])
            load(tiles, "s", 1, h, states[at, head, 0:DIM, 0:DIM])
            h = h + 1


@macro
def finish_heads(walk, tiles, lane, g_sum, beta_chunks, dg, dbeta):
    # dg and dbeta of each head, from its sums
    problem, C, barriers = walk.problem, walk.problem.C, tiles.barriers
    group = problem.HV // problem.H
    sums = T.alloc_local((2,), "float32")
    square = T.alloc_local((2,), "float32")              # beta^2, rounded as A was; negative where the state is reset
    gradient = T.alloc_local((2,), "float32")
    last_gamma = T.alloc_var("float32")
    h = T.alloc_var("int32")
    h = 0
    for step in T.serial(walk.steps):
        key_head = walk.key_head(step)
        _at, slot, row, start, valid = chunk_of(walk, step)
        for member in T.serial(group):
            head = key_head * group + member
            stage = h % SUM_STAGES
            for e in T.unroll(2):
                sums[e] = g_sum[slot, head, lane + 32 * e] * LOG2E
                square[e] = T.cast(T.cast(beta_chunks[slot, head, lane + 32 * e], problem.dtype), "float32")
            last_gamma = T.exp2(g_sum[slot, head, C - 1] * LOG2E)
            for e in T.unroll(2):
                square[e] = square[e] * square[e]
            T.call_extern("handle", "qla_mark_resets", T.address_of(sums[0]), T.address_of(square[0]), RESETS_BELOW)
            wait_full(barriers, "sums", SUM_STAGES, h)
            T.call_extern(
                "handle", "qla_gate_gradient", T.address_of(gradient[0]), T.access_ptr(tiles.sums[stage, 0, 0], "r", 1),
                last_gamma, valid,
            )  # fmt: skip
            for e in T.unroll(2):
                if lane + 32 * e < valid:
                    dg[row, start + lane + 32 * e, head] = T.if_then_else(square[e] < 0.0, 0.0, gradient[e])
                    dbeta[row, start + lane + 32 * e, head] = (
                        tiles.sums[stage, DIAGONAL, lane + 32 * e] / T.max(square[e], -square[e])
                    )
            signal(barriers, "sums_free", SUM_STAGES, h)
            h = h + 1
    if problem.packed:
        first = T.alloc_var("int32")
        first = T.cast(walk.cu_seqlens[walk.N], "int32") + walk.block
        for turn in T.serial(T.ceildiv(walk.tokens - first, walk.blocks)):
            for head in T.serial(problem.HV):
                dg[0, first + turn * walk.blocks, head] = 0.0
                dbeta[0, first + turn * walk.blocks, head] = 0.0


def build(problem: Problem, config: Config):
    allow_register_indices()
    H, HV, K, V, C, dtype = problem.H, problem.HV, problem.K, problem.V, problem.C, problem.dtype
    B, tokens, slots, bounds = (T.dynamic(name) for name in ("B", "tokens", "slots", "bounds"))
    rows, bands = T.dynamic("rows"), T.dynamic("bands")
    N = bounds - 1 if problem.packed else B

    @T.prim_func
    def warpgroup_gradients(
        q: T.Tensor((B, tokens, H, K), dtype),
        k: T.Tensor((B, tokens, H, K), dtype),
        v_new: T.Tensor((rows, HV, C, V), dtype),
        dv: T.Tensor((B, tokens, HV, V), dtype),
        do: T.Tensor((B, tokens, HV, V), dtype),
        states: T.Tensor((rows, HV, V, K), dtype),
        state_gradients: T.Tensor((rows, HV, V, K), dtype),
        g_sum: T.Tensor((slots, HV, C), "float32"),
        beta_chunks: T.Tensor((slots, HV, C), "float32"),
        cu_seqlens: T.Tensor((bounds,), problem.index_dtype),
        listed: T.Tensor((rows, COLUMNS), "int32"),      # of register_state_scan, as far as the band is counted
        counts: T.Tensor((bands,), "int32"),
        dq: T.Tensor((B, tokens, H, K), dtype),
        dk: T.Tensor((B, tokens, H, K), dtype),
        dg: T.Tensor((B, tokens, HV), "float32"),
        dbeta: T.Tensor((B, tokens, HV), "float32"),
        scale: T.float32,
        band: T.int32,
        blocks: T.int32,
    ):
        with T.Kernel(blocks, threads=512, prelude=PRELUDE) as block:
            shared, barriers = allocate(buffers(problem, config), barrier_counts(config))
            tiles = Tiles(**shared, barriers=barriers)
            wait_for_the_kernel_before()
            let_the_next_kernel_come()
            count = T.alloc_var("int32")
            count = counts[band]
            walk = Walk(problem, cu_seqlens, listed, count, tokens, N, block, blocks)
            thread = T.get_thread_binding()
            if thread < 128:
                T.set_max_nreg(SCORES.registers, 1)
                score_gradients(config, walk, tiles, thread, scale)
            elif thread < 256:
                T.set_max_nreg(QUERY_SUMS.registers, 1)
                query_gradients(config, walk, tiles, thread, dq)
            elif thread < 384:
                T.set_max_nreg(KEY_SUMS.registers, 1)
                key_gradients(config, walk, tiles, thread, dk)
            else:
                T.set_max_nreg(LOADERS.registers, 0)
                if thread < 416:
                    load_keys(config, walk, tiles, q, k, do)
                elif thread < 448:
                    load_values_and_factors(config, walk, tiles, thread - 416, v_new, dv, g_sum, scale)
                elif thread < 480:
                    load_states(walk, tiles, states, state_gradients)
                else:
                    finish_heads(walk, tiles, thread - 480, g_sum, beta_chunks, dg, dbeta)

    return warpgroup_gradients


TEMPLATE = Template(
    name="warpgroup_gradients",
    problem=Problem,
    config=Config,
    arches=("sm_90a",),
    arguments=arguments,
    buffers=buffers,
    roles=roles,
    default_config=default_config,
    build=build,
    constraints=(shapes_are_covered,),
    pass_configs={"tl.enable_fast_math": True, "tl.disable_thread_storage_sync": True},
)
