"""The whole forward behind the chunk inverse, with the state in registers.

With Ab from chunk_inverse (no gates in it), in-chunk sums g, gamma = exp(g), gamma_L its last value and
Gamma_ij = exp(g_i - g_j) for i >= j, every chunk has two matrices that do not depend on the state S [K, V]:

    X = (gamma_L / gamma) o (Ab^T K)                    C x K
    P = scale Gamma o (lower(Q K^T) Ab)                 C x C

and the recurrence needs two products on its serial path, W and X, with one rounding of W for both of its uses:

    W  = V - gamma o (K S)
    S' = gamma_L S + X^T W
    O  = scale gamma o (Q S) + P W

Two warpgroups hold S transposed, 64 value rows each, in the accumulators of wgmma, and feed it back as the register operand:
it never goes through shared memory. A third warpgroup makes X and P one chunk ahead. Four single warps load K and Ab, load
and sum the gates, store O, and load Q and V. Blocks are persistent and walk over (sequence, value head, 128 columns of V);
loads and the third warpgroup run ahead into the next one.

S is kept as 2^c times the accumulators, c the sum of log2 decays, and the accumulators are rescaled only when c has fallen
below RESCALE_BELOW: 64 products a thread and chunk less.

On an H200 a chunk takes 1.9 us with half of the SMs busy and 2.2 to 2.5 with all of them, near the power limit; two products on
the path instead of three and no round trip of S are why (docs/performance.md).
"""

from dataclasses import dataclass

from .arch import Arch
from .contract import Buffer, Role, Template, knob
from .language import T, macro
from .macros.register_roles import (
    AUX,
    GAMMA,
    GAMMA_SCALED,
    GATE_STAGES,
    HALF,
    LOADERS,
    LOG_GAMMA,
    ROWS,
    STATE,
    TO_END,
    WARP,
    Walk,
    allocate,
    allow_register_indices,
    bounds_of,
    emit_x,
    load_rows,
    shapes_are_covered,
    signal,
    sum_gates,
    values_minus_decayed,
    wait_free,
    wait_full,
)
from .macros.register_tiles import PRELUDE, from_registers, row_lane_offset, to_registers, transposed_lane_offset


@dataclass(frozen=True)
class Problem:
    H: int
    HV: int
    K: int
    V: int
    C: int
    dtype: str
    gate_dtype: str
    packed: bool
    index_dtype: str
    initial_state_dtype: str | None      # None: the state starts at zero
    has_final_state: bool
    state_v_first: bool                  # initial and final state are [N, HV, V, K]
    gate_in_kernel: bool
    has_dt_bias: bool
    split: bool = False                  # sequences come in segments, whose initial states are [places, HV, V, K] in float32


@dataclass(frozen=True)
class Config:
    key_stages: int = knob(2, 3, 4, why="chunks of K and of Q in flight; 2 cost 20 %, the aux warpgroup wants them a chunk early")
    product_stages: int = knob(1, 2, why="X and P made ahead of the state; 1 costs 24 %")


def arguments(problem: Problem) -> tuple[str, ...]:
    return (
        "q", "k", "v", "Ab", "g", "A_log", "dt_bias", "cu_seqlens", "initial_state", "o", "final_state",
        "scale", "log2_scale", "chunks_per_segment", "blocks",
    )  # fmt: skip


def buffers(problem: Problem, config: Config) -> tuple[Buffer, ...]:
    C, K, dtype = problem.C, problem.K, problem.dtype
    return (
        Buffer("q", (C, K), dtype, config.key_stages),
        Buffer("k", (C, K), dtype, config.key_stages),
        Buffer("v", (C, ROWS), dtype, 2),
        Buffer("Ab", (C, C), dtype, 2),
        Buffer("X", (C, K), dtype, config.product_stages),
        Buffer("P", (C, C), dtype, config.product_stages),
        Buffer("o", (C, HALF), dtype, 2),                # one for each state warpgroup
        Buffer("gates", (4, C), "float32", GATE_STAGES),
        Buffer("state_scale", (2,), "float32", GATE_STAGES),
    )


def roles(problem: Problem, config: Config) -> tuple[Role, ...]:
    return (STATE, AUX, LOADERS)


def default_config(problem: Problem, arch: Arch) -> Config:
    return Config(key_stages=3, product_stages=2)


@dataclass(frozen=True)
class Tiles:
    """The shared tiles, and for each the barriers that say when a stage is full and when it is free again."""

    q: object
    k: object
    v: object
    Ab: object
    X: object
    P: object
    o: object
    gates: object
    state_scale: object
    barriers: dict


def barrier_counts(config: Config) -> dict[str, tuple[int, int]]:
    """Arrivals and stages of each barrier. A tile is full when its writers say so, free when its readers do."""
    warp, state, aux = WARP, STATE.threads, AUX.threads
    return {
        "k_full": (warp, config.key_stages),
        "k_free": (state + aux, config.key_stages),
        "q_full": (warp, config.key_stages),
        "q_free": (state + aux, config.key_stages),
        "v_full": (warp, 2),
        "v_free": (state, 2),
        "Ab_full": (warp, 2),
        "Ab_free": (aux, 2),
        "gates_full": (warp, GATE_STAGES),
        "gates_free": (state + aux, GATE_STAGES),
        "products_full": (aux, config.product_stages),   # X, P, and through the aux warpgroup the gates
        "products_free": (state, config.product_stages),
        "o_full": (state // 2, 2),
        "o_free": (warp, 2),
        "tail_landed": (warp, 2),                         # a ragged chunk's K and V, before their foreign rows are zeroed
    }


@macro
def emit_output(tiles, half, parity, o, registers, lane_offset):
    # O of the chunk before, from accumulators to shared memory once the store of the one before that has read it
    to_registers(ROWS, 64, o, registers)
    T.barrier_wait(tiles.barriers["o_free"][half], parity)
    T.call_extern(
        "handle", "qla_store_transposed", T.address_of(registers[0]), T.access_ptr(tiles.o[half, 0, 0], "r", 64 * 64), lane_offset
    )


@macro
def emit_scores(tiles, stages, i, accumulator, registers, lane_offset, row, column, log_scale, warp, diagonal):
    # P = scale Gamma o R
    to_registers(64, 64, accumulator, registers)
    T.call_extern(
        "handle", "qla_decay_and_store", T.address_of(registers[0]), T.access_ptr(tiles.P[i % stages, 0, 0], "r", 64 * 64),
        lane_offset, T.address_of(row[0]), T.address_of(column[0]), log_scale, warp, diagonal,
    )  # fmt: skip
    from_registers(64, 64, registers, accumulator)


@macro
def keep_lower_triangle(accumulator, registers, pairs, operand, warp, diagonal):
    to_registers(64, 64, accumulator, registers)
    T.call_extern("handle", "qla_lower_triangle", T.address_of(registers[0]), T.address_of(pairs[0]), warp, diagonal)
    from_registers(64, 64, pairs, operand)


@macro
def read_state(problem, place, head, first_v, initial_state, state):
    if problem.split:
        T.copy(initial_state[place, head, first_v : first_v + ROWS, 0 : problem.K], state)
    elif problem.initial_state_dtype is None:
        T.clear(state)
    else:
        for a, b in T.Parallel(ROWS, problem.K):
            if problem.state_v_first:
                state[a, b] = T.cast(initial_state[place, head, first_v + a, b], "float32")
            else:
                state[a, b] = T.cast(initial_state[place, head, b, first_v + a], "float32")


@macro
def write_state(problem, n, head, first_v, state, final_state):
    for a, b in T.Parallel(ROWS, problem.K):
        if problem.state_v_first:
            final_state[n, head, first_v + a, b] = state[a, b]
        else:
            final_state[n, head, b, first_v + a] = state[a, b]


@macro
def hold_state(config, walk, tiles, thread, initial_state, final_state):
    # W = V - gamma o (K S);  S <- gamma_L S + X^T W;  O = scale gamma o (Q S) + P W, all transposed
    problem, C, K = walk.problem, walk.problem.C, walk.problem.K
    rows_policy = T.GemmWarpPolicy.FullRow
    state = T.alloc_fragment((ROWS, K), "float32")
    operand = T.alloc_fragment((ROWS, K), problem.dtype)
    u = T.alloc_fragment((ROWS, C), "float32")
    o = T.alloc_fragment((ROWS, C), "float32")
    w = T.alloc_fragment((ROWS, C), problem.dtype)
    v_registers = T.alloc_local((32,), problem.dtype)
    o_registers = T.alloc_local((32,), problem.dtype)
    u_registers = T.alloc_local((32,), "float32")
    w_registers = T.alloc_local((32,), problem.dtype)
    state_scale = T.alloc_local((2,), "float32")
    output_factor = T.alloc_local((16,), "float32")
    value_factor = T.alloc_local((16,), "float32")
    half = thread // 128
    lane = thread % 32
    column = 2 * (lane % 4)
    lane_offset = T.alloc_var("int32")
    lane_offset = transposed_lane_offset(thread)
    i = T.alloc_var("int32")             # chunks since the block began; j counts within the tile
    i = 0
    for step in T.serial(walk.steps):
        place, head, part = walk.coordinates(step)
        n, _row, _first, length, _slot, segment, last = bounds_of(walk, place)
        chunks = T.alloc_var("int32")
        chunks = T.max(T.ceildiv(length, C), 0)
        read_state(problem, place, head, part * ROWS, initial_state, state)
        T.clear(o)
        T.copy(state, operand)
        # No product may be in flight across the back edge: ptxas would serialise every wgmma of the kernel (C7514).
        for j in T.serial(chunks):
            wait_full(tiles.barriers, "k", config.key_stages, i)
            T.wgmma_gemm(operand, tiles.k[i % config.key_stages, :, :], u, transpose_B=True, clear_accum=True, policy=rows_policy)
            wait_full(tiles.barriers, "q", config.key_stages, i)
            # O of chunk i - 1 while K S runs; in the first round of a tile nonsense that nobody is told of.
            emit_output(tiles, half, (i + T.if_then_else(j > 0, 0, 1)) % 2, o, o_registers, lane_offset)
            T.wgmma_gemm(operand, tiles.q[i % config.key_stages, :, :], o, transpose_B=True, clear_accum=True, policy=rows_policy)
            if j > 0:
                T.barrier_arrive(tiles.barriers["o_full"][half])
            wait_full(tiles.barriers, "products", config.product_stages, i)
            gate_stage = i % GATE_STAGES
            T.call_extern(
                "handle", "qla_load_pair", T.address_of(state_scale[0]), T.access_ptr(tiles.state_scale[gate_stage, 0], "r", 2)
            )
            wait_full(tiles.barriers, "v", 2, i)
            T.call_extern(
                "handle", "qla_load_transposed", T.address_of(v_registers[0]),
                T.access_ptr(tiles.v[i % 2, 0, half * HALF], "r", C), lane_offset,
            )  # fmt: skip
            T.call_extern(
                "handle", "qla_load_first_columns", T.address_of(value_factor[0]),
                T.access_ptr(tiles.gates[gate_stage, GAMMA, column], "r", 1),
            )  # fmt: skip
            if state_scale[0] != 1.0:
                for a, b in T.Parallel(ROWS, K):
                    state[a, b] *= state_scale[0]
            T.wait_wgmma(1)              # K S is there, Q S may still run
            signal(tiles.barriers, "v_free", 2, i)
            signal(tiles.barriers, "k_free", config.key_stages, i)
            values_minus_decayed(
                C, u, v_registers, tiles.gates, gate_stage, column, value_factor, u_registers, w_registers, w
            )
            T.wgmma_gemm(w, tiles.X[i % config.product_stages, :, :], state, policy=rows_policy)
            T.call_extern(
                "handle", "qla_load_columns", T.address_of(output_factor[0]),
                T.access_ptr(tiles.gates[gate_stage, GAMMA_SCALED, column], "r", 1),
            )  # fmt: skip
            T.wait_wgmma(1)              # Q S is there
            signal(tiles.barriers, "q_free", config.key_stages, i)
            for a, b in T.Parallel(ROWS, C):
                o[a, b] *= output_factor[(b // 8) * 2 + b % 2]
            signal(tiles.barriers, "gates_free", GATE_STAGES, i)
            T.wgmma_gemm(w, tiles.P[i % config.product_stages, :, :], o, transpose_B=True, policy=rows_policy)
            T.wait_wgmma(1)              # S is there
            T.copy(state, operand)
            T.wait_wgmma(0)
            signal(tiles.barriers, "products_free", config.product_stages, i)
            i = i + 1
        emit_output(tiles, half, (i + T.if_then_else(chunks > 0, 0, 1)) % 2, o, o_registers, lane_offset)
        if chunks > 0:
            T.barrier_arrive(tiles.barriers["o_full"][half])
        if problem.has_final_state:
            if segment == last:
                if chunks > 0:
                    for a, b in T.Parallel(ROWS, K):
                        state[a, b] *= state_scale[1]
                write_state(problem, n, head, part * ROWS, state, final_state)


@macro
def make_products(config, walk, tiles, thread, log2_scale):
    # R = lower(Q K^T) Ab;  P = scale Gamma o R;  X = (gamma_L / gamma) o (Ab^T K), one chunk ahead of the state
    problem, C, K = walk.problem, walk.problem.C, walk.problem.K
    scores = T.alloc_fragment((C, C), "float32")
    lower = T.alloc_fragment((C, C), problem.dtype)
    product = T.alloc_fragment((C, C), "float32")
    registers = T.alloc_local((32,), "float32")
    pairs = T.alloc_local((32,), problem.dtype)
    row_factor = T.alloc_local((4,), "float32")
    column_factor = T.alloc_local((16,), "float32")
    warp = thread % 128 // 32
    lane = thread % 32
    row = 16 * warp + lane // 4
    column = 2 * (lane % 4)
    lane_offset = T.alloc_var("int32")
    lane_offset = row_lane_offset(thread)
    diagonal = T.alloc_var("uint32")     # of a pair of columns on the diagonal block: which half is on or below it
    diagonal = T.if_then_else(lane // 4 >= column, T.uint32(0xFFFF), T.uint32(0)) + T.if_then_else(
        lane // 4 >= column + 1, T.uint32(0xFFFF0000), T.uint32(0)
    )
    total = T.alloc_var("int32")         # this role sees one long sequence of chunks
    total = 0
    for step in T.serial(walk.steps):
        place, _head, _part = walk.coordinates(step)
        _n, _row, _first, length, _slot, _segment, _last = bounds_of(walk, place)
        total = total + T.max(T.ceildiv(length, C), 0)

    # At most 64 registers may belong to products in flight here, operands included: with 80 ptxas serialises wgmma (C7512).
    if total > 0:
        wait_full(tiles.barriers, "k", config.key_stages, 0)
        wait_full(tiles.barriers, "q", config.key_stages, 0)
    T.wgmma_gemm(tiles.q[0, :, :], tiles.k[0, :, :], product, transpose_B=True, clear_accum=True)
    T.wait_wgmma(0)
    keep_lower_triangle(product, registers, pairs, lower, warp, diagonal)
    for i in T.serial(total):
        wait_full(tiles.barriers, "Ab", 2, i)
        T.wgmma_gemm(lower, tiles.Ab[i % 2, :, :], scores, clear_accum=True)                                         # R(i)
        wait_full(tiles.barriers, "gates", GATE_STAGES, i)
        T.call_extern(
            "handle", "qla_load_rows", T.address_of(row_factor[0]),
            T.access_ptr(tiles.gates[i % GATE_STAGES, LOG_GAMMA, row], "r", 1), (TO_END - LOG_GAMMA) * C,
        )  # fmt: skip
        T.call_extern(
            "handle", "qla_load_columns", T.address_of(column_factor[0]),
            T.access_ptr(tiles.gates[i % GATE_STAGES, LOG_GAMMA, column], "r", 1),
        )  # fmt: skip
        if i > 0:                        # X and P of the chunk before: their proxy fence is done by now
            signal(tiles.barriers, "products_full", config.product_stages, i - 1)
        wait_free(tiles.barriers, "products", config.product_stages, i)
        T.wait_wgmma(0)
        signal(tiles.barriers, "gates_free", GATE_STAGES, i)
        stage = i % config.key_stages
        T.wgmma_gemm(tiles.Ab[i % 2, :, :], tiles.k[stage, :, 0:HALF], product, transpose_A=True, clear_accum=True)
        emit_scores(
            tiles, config.product_stages, i, scores, registers, lane_offset, row_factor, column_factor, log2_scale, warp, diagonal
        )
        T.wgmma_gemm(tiles.Ab[i % 2, :, :], tiles.k[stage, :, HALF:K], scores, transpose_A=True, clear_accum=True)
        T.wait_wgmma(1)
        emit_x(0, tiles.X, i % config.product_stages, product, registers, lane_offset, row_factor)
        T.wait_wgmma(0)
        signal(tiles.barriers, "k_free", config.key_stages, i)
        signal(tiles.barriers, "q_free", config.key_stages, i)
        signal(tiles.barriers, "Ab_free", 2, i)
        if i + 1 < total:
            wait_full(tiles.barriers, "k", config.key_stages, i + 1)
            wait_full(tiles.barriers, "q", config.key_stages, i + 1)
        # Q K^T(i + 1); after the last chunk it reads an old stage and is not used.
        ahead = (i + 1) % config.key_stages
        T.wgmma_gemm(tiles.q[ahead, :, :], tiles.k[ahead, :, :], product, transpose_B=True, clear_accum=True)
        emit_x(1, tiles.X, i % config.product_stages, scores, registers, lane_offset, row_factor)
        T.fence_proxy_async()
        T.wait_wgmma(0)
        keep_lower_triangle(product, registers, pairs, lower, warp, diagonal)
    if total > 0:
        signal(tiles.barriers, "products_full", config.product_stages, total - 1)


@macro
def load_keys(config, walk, tiles, k, Ab):
    # K and Ab of every chunk
    problem, C = walk.problem, walk.problem.C
    i = T.alloc_var("int32")
    tails = T.alloc_var("int32")
    i = 0
    tails = 0
    for step in T.serial(walk.steps):
        place, head, _part = walk.coordinates(step)
        _n, row, first, length, slot, _segment, _last = bounds_of(walk, place)
        for j in T.serial(T.max(T.ceildiv(length, C), 0)):
            stage = i % config.key_stages
            wait_free(tiles.barriers, "k", config.key_stages, i)
            load_rows(
                k, row, first + j * C, head // (problem.HV // problem.H), 0, problem.K, length - j * C, C,
                tiles.k, stage, tiles.barriers, "k_full", 0, tails,
            )  # fmt: skip
            if length - j * C < C:
                tails = tails + 1
            signal(tiles.barriers, "k_full", config.key_stages, i)
            wait_free(tiles.barriers, "Ab", 2, i)
            T.tma_copy(Ab[slot + j, head, 0:C, 0:C], tiles.Ab[i % 2, :, :], barrier=tiles.barriers["Ab_full"][i % 2])
            signal(tiles.barriers, "Ab_full", 2, i)
            i = i + 1


@macro
def load_queries(config, walk, tiles, q, v):
    # Q and V of every chunk. Foreign rows of Q only reach rows of O that are not stored, so they may stay.
    problem, C = walk.problem, walk.problem.C
    i = T.alloc_var("int32")
    tails = T.alloc_var("int32")
    i = 0
    tails = 0
    for step in T.serial(walk.steps):
        place, head, part = walk.coordinates(step)
        _n, row, first, length, _slot, _segment, _last = bounds_of(walk, place)
        key_head = head // (problem.HV // problem.H)
        for j in T.serial(T.max(T.ceildiv(length, C), 0)):
            start = first + j * C
            stage = i % config.key_stages
            wait_free(tiles.barriers, "q", config.key_stages, i)
            T.tma_copy(
                q[row, start : start + C, key_head, 0 : problem.K], tiles.q[stage, :, :], barrier=tiles.barriers["q_full"][stage]
            )
            signal(tiles.barriers, "q_full", config.key_stages, i)
            wait_free(tiles.barriers, "v", 2, i)
            load_rows(
                v, row, start, head, part * ROWS, ROWS, length - j * C, C,
                tiles.v, i % 2, tiles.barriers, "v_full", 1, tails,
            )  # fmt: skip
            if length - j * C < C:
                tails = tails + 1
            signal(tiles.barriers, "v_full", 2, i)
            i = i + 1


@macro
def prepare_gates(walk, tiles, lane, scale, g, A_log, dt_bias):
    problem, C = walk.problem, walk.problem.C
    i = T.alloc_var("int32")
    i = 0
    for step in T.serial(walk.steps):
        place, head, _part = walk.coordinates(step)
        _n, row, first, length, _slot, _segment, _last = bounds_of(walk, place)
        chunks = T.alloc_var("int32")
        chunks = T.max(T.ceildiv(length, C), 0)
        sum_gates(
            problem, row, first, first + length, chunks, head, lane, scale, g, A_log, dt_bias,
            tiles.gates, tiles.state_scale, tiles.barriers, i,
        )  # fmt: skip
        i = i + chunks


@macro
def store_output(walk, tiles, o):
    # O to memory by bulk copies; of a ragged chunk only the sequence's own rows, and zeros behind the last sequence
    problem, C = walk.problem, walk.problem.C
    stride = problem.HV * problem.V
    i = T.alloc_var("int32")
    i = 0
    for step in T.serial(walk.steps):
        place, head, part = walk.coordinates(step)
        n, row, first, length, _slot, segment, last = bounds_of(walk, place)
        for j in T.serial(T.max(T.ceildiv(length, C), 0)):
            start = first + j * C
            for half in T.unroll(2):
                T.barrier_wait(tiles.barriers["o_full"][half], i % 2)
                T.fence_proxy_async()    # on the reader's side of the barrier: the writers would wait for it
                column = part * ROWS + half * HALF
                if length - j * C >= C:
                    T.copy(tiles.o[half, :, :], o[row, start : start + C, head, column : column + HALF])
                else:
                    T.call_extern(
                        "handle", "qla_store_first_rows", T.access_ptr(tiles.o[half, 0, 0], "r", 1),
                        T.address_of(o[row, start, head, column]), T.int64(stride), length - j * C,
                    )  # fmt: skip
                T.barrier_arrive(tiles.barriers["o_free"][half])
            i = i + 1
        if problem.packed:
            if n == walk.N - 1 and segment == last and first + length < walk.tokens:
                T.call_extern(
                    "handle", "qla_zero_first_rows", T.address_of(o[0, first + length, head, part * ROWS]), T.int64(stride),
                    walk.tokens - first - length,
                )  # fmt: skip


def build(problem: Problem, config: Config):
    from tilelang.layout import make_swizzled_layout

    allow_register_indices()
    H, HV, K, V, C, dtype = problem.H, problem.HV, problem.K, problem.V, problem.C, problem.dtype
    B, tokens, slots, bounds = (T.dynamic(name) for name in ("B", "tokens", "slots", "bounds"))
    places = T.dynamic("places")
    N = bounds - 1 if problem.packed else B
    state_shape = (N, HV, V, K) if problem.state_v_first else (N, HV, K, V)
    initial_shape = (places, HV, V, K) if problem.split else state_shape
    initial_dtype = "float32" if problem.split else problem.initial_state_dtype or "float32"

    @T.prim_func
    def register_state_forward(
        q: T.Tensor((B, tokens, H, K), dtype),
        k: T.Tensor((B, tokens, H, K), dtype),
        v: T.Tensor((B, tokens, HV, V), dtype),
        Ab: T.Tensor((slots, HV, C, C), dtype),
        g: T.Tensor((B, tokens, HV), problem.gate_dtype),
        A_log: T.Tensor((HV,), "float32"),
        dt_bias: T.Tensor((HV,), "float32"),
        cu_seqlens: T.Tensor((bounds,), problem.index_dtype),     # before initial_state: N is taken from it, that may be absent
        initial_state: T.Tensor(initial_shape, initial_dtype),
        o: T.Tensor((B, tokens, HV, V), dtype),
        final_state: T.Tensor(state_shape, "float32"),
        scale: T.float32,
        log2_scale: T.float32,           # from the host: the loop would compute it anew for every chunk
        chunks_per_segment: T.int32,
        blocks: T.int32,
    ):
        with T.Kernel(blocks, threads=512, prelude=PRELUDE) as block:
            shared, barriers = allocate(buffers(problem, config), barrier_counts(config))
            tiles = Tiles(**shared, barriers=barriers)
            T.annotate_layout({tiles.v: make_swizzled_layout(tiles.v), tiles.o: make_swizzled_layout(tiles.o)})
            all_places = places if problem.split else N
            walk = Walk(problem, cu_seqlens, tokens, N, all_places, V // ROWS, chunks_per_segment, block, blocks)
            thread = T.get_thread_binding()
            if thread < 256:
                T.set_max_nreg(STATE.registers, 1)
                hold_state(config, walk, tiles, thread, initial_state, final_state)
            elif thread < 384:
                T.set_max_nreg(AUX.registers, 0)
                make_products(config, walk, tiles, thread, log2_scale)
            else:
                T.set_max_nreg(LOADERS.registers, 0)
                if thread < 416:
                    load_keys(config, walk, tiles, k, Ab)
                elif thread < 448:
                    prepare_gates(walk, tiles, thread - 416, scale, g, A_log, dt_bias)
                elif thread < 480:
                    store_output(walk, tiles, o)
                else:
                    load_queries(config, walk, tiles, q, v)

    return register_state_forward


TEMPLATE = Template(
    name="register_state_forward",
    problem=Problem,
    config=Config,
    arches=("sm_90a",),
    arguments=arguments,
    buffers=buffers,
    roles=roles,
    default_config=default_config,
    build=build,
    constraints=(shapes_are_covered,),
    # The automatic synchronisation gives one barrier id to two groups of threads here; every barrier is explicit.
    pass_configs={"tl.enable_fast_math": True, "tl.disable_thread_storage_sync": True},
)
