"""The gradients of queries, keys, gates and write strengths, chunk by chunk.

Chunks are independent here, because state_scan kept the state S that enters each chunk and the values V_new it writes, and
state_gradient_scan the gradient dS' of the state that leaves it and dW = dV. Per value head, with gamma = exp(g_sum),
Gamma_ij = exp(g_sum_i - g_sum_j):

    dP   = scale Gamma o lower(dO V_new^T)              dM = -Gamma o strictly_lower(dW V_new^T)
    dQ_S = scale gamma o (dO S^T)                       what Q gets through the state
    dK_S = (gamma_L / gamma) o (V_new dS'^T)            dK_U = -gamma o (dW S^T)
    dQ   = dQ_S + dP K
    dK   = dK_S + dK_U + dP^T Q + (dM + dM^T) K
    dbeta_i  = sum_v dW_iv V_new_iv / beta_i^2
    dg_sum_i = sum_k (K dK_U + Q dQ_S - K dK_S)_ik + sum_j Z_ij - sum_j Z_ji,   Z = strictly_lower(dP o (Q K^T)) + dM o (K K^T)
    dg_sum_L += sum(K o dK_S) + gamma_L sum(dS' o S)
    dg_i = dg_sum_i + ... + dg_sum_L

dbeta holds because row i of V_new is beta_i times what the delta rule writes, and row i of dW beta_i times that row's
gradient; both were made with beta rounded to the input dtype, so they are divided by the rounded beta.

One block owns one chunk of one key head and goes through its value heads, so that dQ and dK are summed where they are made,
in a fixed order. It goes through keys in blocks of at most 128, and through values in blocks of block_v. Tokens that
belong to no sequence get zeros.
"""

from dataclasses import dataclass

from .arch import Arch
from .contract import (
    Buffer,
    Rejection,
    Role,
    Template,
    block_divides_values,
    knob,
    pipeline_has_bulk_copies,
    warps_have_work,
)
from .language import T, macro
from .macros.chunk_tiles import padded_keys
from .macros.gates import LOG2E, decay_between
from .macros.sequences import locate_chunk


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
    states_v_first: bool                 # states and their gradients are [slots, HV, V, K]


@dataclass(frozen=True)
class Config:
    block_v: int = knob(32, 64, 128, why="columns of V, dO, S and dS' in shared memory at a time")
    threads: int = knob(128, 256, 512, why="for seven accumulators; on an H200 256 take 1.33 ms where 512 take 1.72")
    stages: int = knob(0, 1, 2, why="blocks of values in flight; 0: no pipeline, for chips without bulk copies")


def arguments(problem: Problem) -> tuple[str, ...]:
    return (
        "q", "k", "v_new", "dv", "do", "states", "state_gradients", "g_sum", "beta_chunks", "cu_seqlens",
        "dq", "dk", "dg", "dbeta", "scale",
    )  # fmt: skip


def block_k(problem: Problem) -> int:
    """Keys whose gradients are accumulated at a time: 128 where that divides them."""
    return 64 if padded_keys(problem) % 128 else 128


LOADED_TILES = 5                         # of what is loaded for a block of values


def state_shape(problem: Problem, config: Config) -> tuple[int, int]:
    return (config.block_v, block_k(problem)) if problem.states_v_first else (block_k(problem), config.block_v)


def buffers(problem: Problem, config: Config) -> tuple[Buffer, ...]:
    C, K, block_v, dtype = problem.C, padded_keys(problem), config.block_v, problem.dtype
    stages = max(config.stages, 1)
    return (
        Buffer("do_tile", (C, block_v), dtype, stages),
        Buffer("dw_tile", (C, block_v), dtype, stages),
        Buffer("v_new_tile", (C, block_v), dtype, stages),
        Buffer("state_tile", state_shape(problem, config), dtype, stages),
        Buffer("state_gradient_tile", state_shape(problem, config), dtype, stages),
        Buffer("q_tile", (C, K), dtype),
        Buffer("k_tile", (C, K), dtype),
        Buffer("dp_tile", (C, C), dtype),
        Buffer("dm_tile", (C, C), dtype),
        Buffer("g_tile", (C,), "float32"),
        Buffer("beta_tile", (C,), "float32"),
        Buffer("score_rows", (C,), "float32"),
        Buffer("score_columns", (C,), "float32"),
        Buffer("at_chunk_end", (1,), "float32"),
        Buffer("dg_tile", (C,), "float32"),
    )


def roles(problem: Problem, config: Config) -> tuple[Role, ...]:
    accumulators = problem.C * (5 * block_k(problem) + 2 * problem.C) // config.threads
    return (Role("all", config.threads, registers=min(255, accumulators + 24)),)


def accumulators_fit(problem: Problem, config: Config, arch: Arch) -> Rejection | None:
    needed = problem.C * (5 * block_k(problem) + 2 * problem.C) // config.threads
    allowed = min(arch.registers_per_thread, arch.registers_per_sm // config.threads) - 24
    if needed > allowed:
        return Rejection(f"seven accumulators take {needed} registers a thread; {config.threads} threads have room for {allowed}")
    return None


def default_config(problem: Problem, arch: Arch) -> Config:
    widest = 32 if problem.V % 64 else 64
    return TEMPLATE.first_allowed(problem, arch, (Config(v, 256, stages) for v in (widest, 32) for stages in (2, 1, 0)))


@dataclass(frozen=True)
class Tiles:
    """The shared tiles of one block."""

    do: object
    dw: object
    v_new: object
    state: object
    state_gradient: object
    q: object
    k: object
    dp: object
    dm: object
    g: object
    beta: object
    score_rows: object
    score_columns: object
    at_chunk_end: object
    dg: object


@dataclass(frozen=True)
class Sums:
    """The accumulators of one block, float32."""

    dq: object                           # of all value heads
    dk: object
    dq_state: object                     # of one value head
    dk_state: object
    dk_erase: object
    dp: object
    dm: object
    scores: object
    product: object                      # dW o V_new, summed over values
    strength: object
    overlap: object                      # S o dS', summed over one of its dims, then over the other
    overlap_rows: object
    overlap_sum: object
    rows: object
    rows_sum: object
    columns: object


@macro
def clear_head(sums):
    for x in (sums.dq_state, sums.dk_state, sums.dk_erase, sums.dp, sums.dm, sums.strength, sums.overlap_rows):
        T.clear(x)


@macro
def add_values(problem, tiles, sums):
    # the products that run over values, for one block of them
    T.gemm(tiles.do, tiles.v_new, sums.dp, transpose_B=True)
    T.gemm(tiles.dw, tiles.v_new, sums.dm, transpose_B=True)
    keys_first = not problem.states_v_first
    T.gemm(tiles.do, tiles.state, sums.dq_state, transpose_B=keys_first)
    T.gemm(tiles.v_new, tiles.state_gradient, sums.dk_state, transpose_B=keys_first)
    T.gemm(tiles.dw, tiles.state, sums.dk_erase, transpose_B=keys_first)
    for i, j in T.Parallel(*sums.product.shape):
        sums.product[i, j] = T.cast(tiles.dw[i, j], "float32") * T.cast(tiles.v_new[i, j], "float32")
    T.reduce_sum(sums.product, sums.strength, dim=1, clear=False)
    for i, j in T.Parallel(*sums.overlap.shape):
        sums.overlap[i, j] = T.cast(tiles.state[i, j], "float32") * T.cast(tiles.state_gradient[i, j], "float32")
    T.reduce_sum(sums.overlap, sums.overlap_rows, dim=1, clear=False)


@macro
def score_gradients(valid, scale, tiles, sums):
    # dP, dM, and the sums of Z by row and column. Rows behind the end may hold NaN: chosen away, not multiplied away.
    C = tiles.dp.shape[0]
    for i, j in T.Parallel(C, C):
        decay = decay_between(tiles.g, i, j)
        sums.dp[i, j] = T.if_then_else(i >= j and i < valid, sums.dp[i, j] * decay * scale, 0.0)
        sums.dm[i, j] = T.if_then_else(i > j and i < valid, -sums.dm[i, j] * decay, 0.0)
    T.copy(sums.dp, tiles.dp)
    T.copy(sums.dm, tiles.dm)
    T.gemm(tiles.q, tiles.k, sums.scores, transpose_B=True, clear_accum=True)
    # Without the diagonal, which adds the same to a row and to a column: where gates are closed it is all that there is.
    for i, j in T.Parallel(C, C):
        sums.dp[i, j] = T.if_then_else(i > j, sums.dp[i, j] * sums.scores[i, j], 0.0)
    T.gemm(tiles.k, tiles.k, sums.scores, transpose_B=True, clear_accum=True)
    for i, j in T.Parallel(C, C):
        sums.dp[i, j] = sums.dp[i, j] + sums.dm[i, j] * sums.scores[i, j]
    T.reduce_sum(sums.dp, sums.rows, dim=1)
    T.copy(sums.rows, tiles.score_rows)
    T.reduce_sum(sums.dp, sums.columns, dim=0)
    T.copy(sums.columns, tiles.score_columns)


@macro
def add_head(scale, first_k, tiles, sums):
    # dQ and dK of all value heads <- + those of one
    C, keys = sums.dq.shape
    for i, j in T.Parallel(C, keys):
        sums.dq_state[i, j] = sums.dq_state[i, j] * (T.exp2(tiles.g[i] * LOG2E) * scale)
        sums.dk_state[i, j] = sums.dk_state[i, j] * T.exp2((tiles.g[C - 1] - tiles.g[i]) * LOG2E)
        sums.dk_erase[i, j] = -sums.dk_erase[i, j] * T.exp2(tiles.g[i] * LOG2E)
        sums.dq[i, j] = sums.dq[i, j] + sums.dq_state[i, j]
        sums.dk[i, j] = sums.dk[i, j] + sums.dk_state[i, j] + sums.dk_erase[i, j]
    T.gemm(tiles.dp, tiles.k[:, first_k : first_k + keys], sums.dq)
    T.gemm(tiles.dp, tiles.q[:, first_k : first_k + keys], sums.dk, transpose_A=True)
    T.gemm(tiles.dm, tiles.k[:, first_k : first_k + keys], sums.dk)
    T.gemm(tiles.dm, tiles.k[:, first_k : first_k + keys], sums.dk, transpose_A=True)


@macro
def gate_gradients(valid, first_k, tiles, sums):
    # dg_i = dg_sum_i + ... + dg_sum_L, from these keys; the scores' part is added with the first keys only
    C, keys = sums.dq.shape
    for i, j in T.Parallel(C, keys):
        sums.dk_state[i, j] = sums.dk_state[i, j] * tiles.k[i, first_k + j]
        sums.dq_state[i, j] = (
            sums.dq_state[i, j] * tiles.q[i, first_k + j] + sums.dk_erase[i, j] * tiles.k[i, first_k + j] - sums.dk_state[i, j]
        )
    T.reduce_sum(sums.dk_state, sums.rows, dim=1)
    T.reduce_sum(sums.rows, sums.rows_sum, dim=0)
    T.reduce_sum(sums.overlap_rows, sums.overlap_sum, dim=0)
    for i in T.Parallel(1):
        tiles.at_chunk_end[i] = sums.rows_sum[i] + sums.overlap_sum[i] * T.exp2(tiles.g[C - 1] * LOG2E)
    T.reduce_sum(sums.dq_state, sums.rows, dim=1)
    for i in T.Parallel(C):
        through_state = T.if_then_else(i < valid, sums.rows[i], 0.0)
        through_scores = T.if_then_else(first_k == 0, tiles.score_rows[i] - tiles.score_columns[i], 0.0)
        at_end = T.if_then_else(i == C - 1, tiles.at_chunk_end[0], 0.0)
        tiles.dg[i] = through_state + through_scores + at_end
    T.cumsum(tiles.dg, dim=0, reverse=True)


def build(problem: Problem, config: Config):
    H, HV, K, V, C, dtype = problem.H, problem.HV, problem.K, problem.V, problem.C, problem.dtype
    block_v, keys, columns, group = config.block_v, block_k(problem), padded_keys(problem), HV // H
    dims = (V, K) if problem.states_v_first else (K, V)
    B, tokens, slots, bounds = (T.dynamic(name) for name in ("B", "tokens", "slots", "bounds"))

    @T.prim_func
    def chunk_gradients(
        q: T.Tensor((B, tokens, H, K), dtype),
        k: T.Tensor((B, tokens, H, K), dtype),
        v_new: T.Tensor((slots, HV, C, V), dtype),
        dv: T.Tensor((B, tokens, HV, V), dtype),
        do: T.Tensor((B, tokens, HV, V), dtype),
        states: T.Tensor((slots, HV, *dims), dtype),
        state_gradients: T.Tensor((slots, HV, *dims), dtype),
        g_sum: T.Tensor((slots, HV, C), "float32"),
        beta_chunks: T.Tensor((slots, HV, C), "float32"),
        cu_seqlens: T.Tensor((bounds,), problem.index_dtype),
        dq: T.Tensor((B, tokens, H, K), dtype),
        dk: T.Tensor((B, tokens, H, K), dtype),
        dg: T.Tensor((B, tokens, HV), "float32"),
        dbeta: T.Tensor((B, tokens, HV), "float32"),
        scale: T.float32,
    ):
        # Key heads vary fastest: neighbours in memory are written at about the same time.
        with T.Kernel(H * slots, threads=config.threads) as block:
            key_head = block % H
            slot = block // H
            tiles = Tiles(*(T.alloc_shared(b.shape, b.dtype) for b in buffers(problem, config)))
            sums = Sums(
                *(T.alloc_fragment((C, keys), "float32") for _ in range(5)),
                *(T.alloc_fragment((C, C), "float32") for _ in range(3)),
                T.alloc_fragment((C, block_v), "float32"),
                T.alloc_fragment((C,), "float32"),
                T.alloc_fragment(state_shape(problem, config), "float32"),
                T.alloc_fragment(state_shape(problem, config)[:1], "float32"),
                T.alloc_fragment((1,), "float32"),
                T.alloc_fragment((C,), "float32"),
                T.alloc_fragment((1,), "float32"),
                T.alloc_fragment((C,), "float32"),
            )
            n, start, valid = locate_chunk(problem.packed, cu_seqlens, bounds - 1, tokens, slot, C)
            row = T.alloc_var("int32")
            row = 0 if problem.packed else n

            if valid > 0:
                T.copy(q[row, start : start + C, key_head, 0:columns], tiles.q)
                T.copy(k[row, start : start + C, key_head, 0:columns], tiles.k)
                if valid < C:
                    for i, j in T.Parallel(C, columns):
                        if i >= valid:
                            tiles.q[i, j] = T.cast(0.0, dtype)
                            tiles.k[i, j] = T.cast(0.0, dtype)
                for key_block in T.serial(columns // keys):
                    first_k = key_block * keys
                    T.clear(sums.dq)
                    T.clear(sums.dk)
                    for member in T.serial(group):
                        head = key_head * group + member
                        T.copy(g_sum[slot, head, 0:C], tiles.g)
                        T.copy(beta_chunks[slot, head, 0:C], tiles.beta)
                        clear_head(sums)
                        for value_block in T.Pipelined(V // block_v, num_stages=config.stages):
                            first_v = value_block * block_v
                            T.copy(do[row, start : start + C, head, first_v : first_v + block_v], tiles.do)
                            T.copy(dv[row, start : start + C, head, first_v : first_v + block_v], tiles.dw)
                            T.copy(v_new[slot, head, 0:C, first_v : first_v + block_v], tiles.v_new)
                            for source, tile in ((states, tiles.state), (state_gradients, tiles.state_gradient)):
                                if problem.states_v_first:
                                    T.copy(source[slot, head, first_v : first_v + block_v, first_k : first_k + keys], tile)
                                else:
                                    T.copy(source[slot, head, first_k : first_k + keys, first_v : first_v + block_v], tile)
                            add_values(problem, tiles, sums)
                        score_gradients(valid, scale, tiles, sums)
                        add_head(scale, first_k, tiles, sums)
                        gate_gradients(valid, first_k, tiles, sums)
                        for i in T.Parallel(C):
                            if i < valid:
                                if first_k == 0:
                                    rounded = T.cast(T.cast(tiles.beta[i], dtype), "float32")
                                    dg[row, start + i, head] = tiles.dg[i]
                                    dbeta[row, start + i, head] = sums.strength[i] / (rounded * rounded)
                                else:
                                    dg[row, start + i, head] = dg[row, start + i, head] + tiles.dg[i]
                    for i, j in T.Parallel(C, keys):
                        if i < valid and first_k + j < K:
                            dq[row, start + i, key_head, first_k + j] = T.cast(sums.dq[i, j], dtype)
                    for i, j in T.Parallel(C, keys):
                        if i < valid and first_k + j < K:
                            dk[row, start + i, key_head, first_k + j] = T.cast(sums.dk[i, j], dtype)
            if problem.packed:
                if n == bounds - 2 and valid < C:
                    for i, j in T.Parallel(C, K):
                        if i >= valid and start + i >= cu_seqlens[n + 1] and start + i < tokens:
                            dq[0, start + i, key_head, j] = T.cast(0.0, dtype)
                            dk[0, start + i, key_head, j] = T.cast(0.0, dtype)
                    for i, j in T.Parallel(C, group):
                        if i >= valid and start + i >= cu_seqlens[n + 1] and start + i < tokens:
                            dg[0, start + i, key_head * group + j] = 0.0
                            dbeta[0, start + i, key_head * group + j] = 0.0

    return chunk_gradients


TEMPLATE = Template(
    name="chunk_gradients",
    problem=Problem,
    config=Config,
    arches=("sm_90a",),                  # elsewhere TileLang's reductions do not lower for these tiles
    arguments=arguments,
    buffers=buffers,
    roles=roles,
    default_config=default_config,
    build=build,
    constraints=(block_divides_values, accumulators_fit, warps_have_work, pipeline_has_bulk_copies),
    # With a producer of its own TileLang clears dQ and dK for every value head, and gives T.cumsum thread indices from 128 on.
    pass_configs={"tl.enable_fast_math": True, "tl.disable_warp_specialized": True},
)
