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

With rows = 64 a block has one state warpgroup and half of the columns. X and P are then made twice, but a chunk takes 1.4 us
instead of 1.9: for calls that would leave half of the SMs without an item.

S is kept as 2^c times the accumulators, c the sum of log2 decays, and the accumulators are rescaled only when c has fallen
below RESCALE_BELOW: 64 products a thread and chunk less.

On an H200 a chunk takes 1.9 us with half of the SMs busy and 2.2 to 2.5 with all of them, near the power limit; two products on
the path instead of three and no round trip of S are why (docs/performance.md).
"""

from dataclasses import dataclass

from .arch import Arch
from .contract import Buffer, Role, Template, knob
from .language import T, macro
from .macros.launches import let_the_next_kernel_come, wait_for_the_kernel_before
from .macros.register_gates import (
    GAMMA,
    GAMMA_SCALED,
    GATE_STAGES,
    LOG_GAMMA,
    TO_END,
    load_column_factors,
    load_first_column_factors,
    load_row_factors,
    load_state_scale,
    prepare_gates,
    scale_state,
)
from .macros.register_products import (
    decay_and_store,
    diagonal_mask,
    emit_values,
    emit_x,
    load_transposed,
    start_rows_store,
    values_minus_decayed,
    zero_behind,
)
from .macros.register_roles import (
    AUX,
    HALF,
    KEYS,
    LOADERS,
    ROLES_OF_HALVES,
    ROWS,
    STATE,
    WARP,
    Walk,
    allocate,
    allow_register_indices,
    in_tiles,
    initial_state_tensor,
    item_of,
    load_keys,
    load_values,
    read_initial_state,
    shapes_are_covered,
    signal,
    wait_free,
    wait_full,
)
from .macros.register_tiles import PRELUDE, from_registers, row_lane_offset, to_registers, transposed_lane_offset
from .macros.states import state_shape, write_transposed_state


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
    rows: int = ROWS                     # of the transposed state in an item: ROWS or HALF


@dataclass(frozen=True)
class Config:
    key_stages: int = knob(2, 3, 4, why="chunks of K and of Q in flight; 2 cost 20 %, the aux warpgroup wants them a chunk early")
    product_stages: int = knob(1, 2, why="X and P made ahead of the state; 1 costs 24 %")


def arguments(problem: Problem) -> tuple[str, ...]:
    return (
        "q", "k", "v", "Ab", "g", "A_log", "dt_bias", "cu_seqlens", "segments_before", "initial_state", "o", "final_state",
        "midway", "scale", "log2_scale", "chunks_per_segment", "blocks",
    )  # fmt: skip


def buffers(problem: Problem, config: Config) -> tuple[Buffer, ...]:
    C, dtype = problem.C, problem.dtype
    return (
        Buffer("q", (C, KEYS), dtype, config.key_stages),
        Buffer("k", (C, KEYS), dtype, config.key_stages),
        Buffer("v", (C, problem.rows), dtype, 2),
        Buffer("Ab", (C, C), dtype, 2),
        Buffer("X", (C, KEYS), dtype, config.product_stages),
        Buffer("P", (C, C), dtype, config.product_stages),
        Buffer("o", (C, HALF), dtype, problem.rows // HALF),         # one for each state warpgroup
        Buffer("gates", (4, C), "float32", GATE_STAGES),
        Buffer("state_scale", (2,), "float32", GATE_STAGES),
    )


def roles(problem: Problem, config: Config) -> tuple[Role, ...]:
    return (STATE, AUX, LOADERS) if problem.rows == ROWS else ROLES_OF_HALVES


def default_config(problem: Problem, arch: Arch) -> Config:
    return Config(key_stages=4 if problem.rows == HALF else 3, product_stages=2)


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


def barrier_counts(problem: Problem, config: Config) -> dict[str, tuple[int, int]]:
    """Arrivals and stages of each barrier. A tile is full when its writers say so, free when its readers do."""
    warp, halves = WARP, problem.rows // HALF
    state, aux, _ = (role.threads for role in roles(problem, config))
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
        "o_full": (state // halves, halves),
        "o_free": (warp, halves),
        "tail_landed": (warp, 2),                         # a ragged chunk's K and V, before their foreign rows are zeroed
    }


@macro
def emit_scores(tiles, stages, i, accumulator, registers, lane_offset, row, column, log_scale, warp, diagonal):
    # P = scale Gamma o R
    to_registers(64, 64, accumulator, registers)
    decay_and_store(registers, tiles.P, i % stages, lane_offset, row, column, log_scale, warp, diagonal)
    from_registers(64, 64, registers, accumulator)


@macro
def keep_lower_triangle(accumulator, registers, pairs, operand, warp, diagonal):
    to_registers(64, 64, accumulator, registers)
    T.call_extern("handle", "qla_lower_triangle", T.address_of(registers[0]), T.address_of(pairs[0]), warp, diagonal)
    from_registers(64, 64, pairs, operand)


@macro
def keep_midway(item, state, factor, midway):
    # For a backward that goes through chunks in two bands (macros/bands.py): its state scan begins here.
    rows, K = state.shape
    for a, b in T.Parallel(rows, K):
        midway[item.place, item.head, item.part * rows + a, b] = factor * state[a, b]


@macro
def hold_state(config, walk, tiles, thread, initial_state, final_state, midway):
    # W = V - gamma o (K S);  S <- gamma_L S + X^T W;  O = scale gamma o (Q S) + P W, all transposed
    problem, C, K, rows = walk.problem, walk.problem.C, walk.problem.K, walk.rows
    rows_policy = T.GemmWarpPolicy.FullRow
    state = T.alloc_fragment((rows, K), "float32")
    operand = T.alloc_fragment((rows, K), problem.dtype)
    u = T.alloc_fragment((rows, C), "float32")
    o = T.alloc_fragment((rows, C), "float32")
    w = T.alloc_fragment((rows, C), problem.dtype)
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
        item = item_of(walk, step)
        chunks = T.alloc_var("int32")
        chunks = walk.chunks(item)
        read_initial_state(problem, item, initial_state, state)
        T.clear(o)
        T.copy(state, operand)
        # No product may be in flight across the back edge: ptxas would serialise every wgmma of the kernel (C7514).
        for j in T.serial(chunks):
            wait_full(tiles.barriers, "k", config.key_stages, i)
            T.wgmma_gemm(operand, tiles.k[i % config.key_stages, :, :], u, transpose_B=True, clear_accum=True, policy=rows_policy)
            wait_full(tiles.barriers, "q", config.key_stages, i)
            # O of chunk i - 1 while K S runs; in the first round of a tile nonsense that nobody is told of.
            emit_values(tiles, "o", half, (i + T.if_then_else(j > 0, 0, 1)) % 2, o, o_registers, lane_offset)
            T.wgmma_gemm(operand, tiles.q[i % config.key_stages, :, :], o, transpose_B=True, clear_accum=True, policy=rows_policy)
            wait_full(tiles.barriers, "products", config.product_stages, i)
            gate_stage = i % GATE_STAGES
            load_state_scale(tiles, gate_stage, state_scale)
            wait_full(tiles.barriers, "v", 2, i)
            load_transposed(tiles.v, i % 2, half, v_registers, lane_offset)
            load_first_column_factors(tiles.gates, gate_stage, GAMMA, column, value_factor)
            if state_scale[0] != 1.0:
                scale_state(state, state_scale, 0)
            T.wait_wgmma(1)              # K S is there, Q S may still run
            if j > 0:
                T.barrier_arrive(tiles.barriers["o_full"][half])         # not behind its stores at once: docs/tilelang.md
            signal(tiles.barriers, "k_free", config.key_stages, i)
            values_minus_decayed(C, u, v_registers, tiles.gates, gate_stage, column, value_factor, u_registers, w_registers, w)
            signal(tiles.barriers, "v_free", 2, i)           # not before v_registers were used: docs/tilelang.md
            T.wgmma_gemm(w, tiles.X[i % config.product_stages, :, :], state, policy=rows_policy)
            load_column_factors(tiles.gates, gate_stage, GAMMA_SCALED, column, output_factor)
            T.wait_wgmma(1)              # Q S is there
            signal(tiles.barriers, "q_free", config.key_stages, i)
            for a, b in T.Parallel(rows, C):
                o[a, b] *= output_factor[(b // 8) * 2 + b % 2]
            signal(tiles.barriers, "gates_free", GATE_STAGES, i)
            T.wgmma_gemm(w, tiles.P[i % config.product_stages, :, :], o, transpose_B=True, policy=rows_policy)
            T.wait_wgmma(1)              # S is there
            T.copy(state, operand)
            T.wait_wgmma(0)
            signal(tiles.barriers, "products_free", config.product_stages, i)
            i = i + 1
            if midway.shape[0] > 0:
                if j + 1 == chunks // 2:
                    keep_midway(item, state, state_scale[1], midway)
        emit_values(tiles, "o", half, (i + T.if_then_else(chunks > 0, 0, 1)) % 2, o, o_registers, lane_offset)
        T.fence_proxy_async()            # once an item, where no product gives the stores time
        if chunks > 0:
            T.barrier_arrive(tiles.barriers["o_full"][half])
        if problem.has_final_state:
            if item.segment == item.last:
                if chunks > 0:
                    scale_state(state, state_scale, 1)
                write_transposed_state(problem, item.n, item.head, item.part * rows, state, final_state)


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
    diagonal = T.alloc_var("uint32")
    diagonal = diagonal_mask(lane)
    total = T.alloc_var("int32")         # this role sees one long sequence of chunks
    total = 0
    for step in T.serial(walk.steps):
        item = item_of(walk, step)
        total = total + walk.chunks(item)

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
        load_row_factors(tiles.gates, i % GATE_STAGES, LOG_GAMMA, row, row_factor, (TO_END - LOG_GAMMA) * C)
        load_column_factors(tiles.gates, i % GATE_STAGES, LOG_GAMMA, column, column_factor)
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
def store_output(walk, tiles, o):
    # O to memory by bulk copies; of a ragged chunk only the sequence's own rows, and zeros behind the last sequence
    halves = walk.rows // HALF
    i = T.alloc_var("int32")
    i = 0
    for step in T.serial(walk.steps):
        item = item_of(walk, step)
        for j in T.serial(walk.chunks(item)):
            for half in T.unroll(halves):
                T.barrier_wait(tiles.barriers["o_full"][half], i % 2)
                start_rows_store(tiles.o, half, walk, item, j, o)
            if halves == 2:
                T.tma_store_wait(1)
                T.barrier_arrive(tiles.barriers["o_free"][0])
            T.tma_store_wait(0)
            T.barrier_arrive(tiles.barriers["o_free"][halves - 1])
            i = i + 1
        zero_behind(walk, item, o)


def build(problem: Problem, config: Config):
    from tilelang.layout import make_swizzled_layout

    allow_register_indices()
    H, HV, K, V, C, dtype = problem.H, problem.HV, problem.K, problem.V, problem.C, problem.dtype
    tiled = in_tiles(problem, problem.rows)
    state, aux, loaders = roles(problem, config)
    first_loader = state.threads + aux.threads
    threads = first_loader + loaders.threads
    aux_grows = int(problem.rows == HALF)                # from an equal share of all registers; else it gives some away
    B, tokens, slots, bounds = (T.dynamic(name) for name in ("B", "tokens", "slots", "bounds"))
    places, midway_places = T.dynamic("places"), T.dynamic("midway_places")
    N = bounds - 1 if problem.packed else B

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
        segments_before: T.Tensor((N + 1,), "int32"),
        initial_state: initial_state_tensor(problem, N, places),
        o: T.Tensor((B, tokens, HV, V), dtype),
        final_state: T.Tensor(state_shape(problem, N), "float32"),
        midway: T.Tensor((midway_places, HV, tiled.V, KEYS), "float32"),       # no places where no backward wants it
        scale: T.float32,
        log2_scale: T.float32,           # from the host: the loop would compute it anew for every chunk
        chunks_per_segment: T.int32,
        blocks: T.int32,
    ):
        with T.Kernel(blocks, threads=threads, prelude=PRELUDE) as block:
            shared, barriers = allocate(buffers(problem, config), barrier_counts(problem, config))
            tiles = Tiles(**shared, barriers=barriers)
            let_the_next_kernel_come()
            T.annotate_layout({tiles.v: make_swizzled_layout(tiles.v), tiles.o: make_swizzled_layout(tiles.o)})
            walk = Walk(
                tiled, cu_seqlens, tokens, N, segments_before, tiled.V // problem.rows, chunks_per_segment, block, blocks,
                rows=problem.rows,
            )
            thread = T.get_thread_binding()
            if thread < state.threads:
                T.set_max_nreg(state.registers, 1)
                if problem.split:
                    wait_for_the_kernel_before()         # which makes the states of segments
                hold_state(config, walk, tiles, thread, initial_state, final_state, midway)
            elif thread < first_loader:
                T.set_max_nreg(aux.registers, aux_grows)
                make_products(config, walk, tiles, thread, log2_scale)
            else:
                T.set_max_nreg(loaders.registers, 0)
                if thread < first_loader + 32:
                    load_keys(config, walk, tiles, k, Ab, inverses_come_late=not problem.split)
                elif thread < first_loader + 64:
                    prepare_gates(walk, tiles, thread - first_loader - 32, scale, g, A_log, dt_bias)
                elif thread < first_loader + 96:
                    store_output(walk, tiles, o)
                else:
                    load_values(config, walk, tiles, v, q=q)

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
