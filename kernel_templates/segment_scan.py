"""What each segment of a sequence does to the state, for all segments but the last of a sequence, all at once.

A segment acts on the state that enters it as S' = M S + N. Columns of M obey the recurrence of S with V = 0 from the identity,
so that one scan serves both: items are rows of the transposed state, V of N and K of M.

    W  = V - gamma o (K S)            X = (gamma_L / gamma) o (Ab^T K)
    S' = gamma_L S + X^T W

A head whose gates decay by more than a threshold within the segment forgets what entered it: segment_plan then asks for the
last `warm_chunks` chunks only, from zero, and no M. Only segments before the last matter, so every chunk here is full.

The roles are those of register_state_forward without Q, P and O.
"""

from dataclasses import dataclass

from .arch import Arch
from .contract import Buffer, Role, Template, knob
from .language import T, macro
from .macros.launches import let_the_next_kernel_come, wait_for_the_kernel_before
from .macros.register_gates import (
    GAMMA,
    GATE_STAGES,
    LOG_GAMMA,
    TO_END,
    load_first_column_factors,
    load_row_factors,
    load_state_scale,
    scale_state,
    sum_gates,
)
from .macros.register_products import emit_x, load_transposed, values_minus_decayed
from .macros.register_roles import (
    AUX,
    HALF,
    KEYS,
    LOADERS,
    ROWS,
    STATE,
    WARP,
    Walk,
    allocate,
    allow_register_indices,
    in_tiles,
    item_of,
    load,
    shapes_are_covered,
    signal,
    wait_free,
    wait_full,
)
from .macros.register_tiles import PRELUDE, row_lane_offset, transposed_lane_offset


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
    gate_in_kernel: bool
    has_dt_bias: bool

    split = True                         # what register_roles asks of a problem: places are segments


@dataclass(frozen=True)
class Config:
    key_stages: int = knob(2, 3, 4, why="chunks of K in flight")
    product_stages: int = knob(1, 2, why="X made ahead of the state")


def arguments(problem: Problem) -> tuple[str, ...]:
    return (
        "k", "v", "Ab", "g", "A_log", "dt_bias", "cu_seqlens", "segments_before", "warm_chunks", "transfers",
        "chunks_per_segment", "blocks",
    )  # fmt: skip


def buffers(problem: Problem, config: Config) -> tuple[Buffer, ...]:
    C, dtype = problem.C, problem.dtype
    return (
        Buffer("k", (C, KEYS), dtype, config.key_stages),
        Buffer("v", (C, ROWS), dtype, 2),
        Buffer("Ab", (C, C), dtype, 2),
        Buffer("X", (C, KEYS), dtype, config.product_stages),
        Buffer("gates", (4, C), "float32", GATE_STAGES),
        Buffer("state_scale", (2,), "float32", GATE_STAGES),
    )


def roles(problem: Problem, config: Config) -> tuple[Role, ...]:
    return (STATE, AUX, LOADERS)


def default_config(problem: Problem, arch: Arch) -> Config:
    return Config(key_stages=3, product_stages=2)


@dataclass(frozen=True)
class Tiles:
    """The shared tiles and their barriers."""

    k: object
    v: object
    Ab: object
    X: object
    gates: object
    state_scale: object
    barriers: dict


def barrier_counts(config: Config) -> dict[str, tuple[int, int]]:
    """Arrivals and stages of each barrier. A tile is full when its writers say so, free when its readers do."""
    warp, state, aux = WARP, STATE.threads, AUX.threads
    return {
        "k_full": (warp, config.key_stages),
        "k_free": (state + aux, config.key_stages),
        "v_full": (warp, 2),
        "v_free": (state, 2),
        "Ab_full": (warp, 2),
        "Ab_free": (aux, 2),
        "gates_full": (warp, GATE_STAGES),
        "gates_free": (state + aux, GATE_STAGES),
        "products_full": (aux, config.product_stages),
        "products_free": (state, config.product_stages),
    }


@macro
def work_of(walk, step, warm_chunks):
    """(place, value head, part, row, first token, first slot, chunks) of an item; chunks is 0 where there is nothing to do."""
    C = walk.problem.C
    item = item_of(walk, step)
    chunks = T.alloc_var("int32")
    skipped = T.alloc_var("int32")
    chunks = 0
    skipped = 0
    if item.length > 0 and item.segment < item.last:
        chunks = warm_chunks[item.place, item.head]
        if chunks < 0:
            chunks = walk.L
        elif item.part == walk.parts - 1:
            chunks = 0                   # no M
        skipped = walk.L - chunks
    return item.place, item.head, item.part, item.row, item.first + skipped * C, item.slot + skipped, chunks


@macro
def hold_state(config, walk, tiles, thread, warm_chunks, transfers):
    # W = V - gamma o (K S);  S <- gamma_L S + X^T W, transposed
    problem, C, K = walk.problem, walk.problem.C, walk.problem.K
    rows_policy = T.GemmWarpPolicy.FullRow
    state = T.alloc_fragment((ROWS, K), "float32")
    operand = T.alloc_fragment((ROWS, K), problem.dtype)
    u = T.alloc_fragment((ROWS, C), "float32")
    w = T.alloc_fragment((ROWS, C), problem.dtype)
    v_registers = T.alloc_local((32,), problem.dtype)
    u_registers = T.alloc_local((32,), "float32")
    w_registers = T.alloc_local((32,), problem.dtype)
    state_scale = T.alloc_local((2,), "float32")
    value_factor = T.alloc_local((16,), "float32")
    half = thread // 128
    lane = thread % 32
    column = 2 * (lane % 4)
    lane_offset = T.alloc_var("int32")
    lane_offset = transposed_lane_offset(thread)
    i = T.alloc_var("int32")             # chunks of K, X and gates since the block began; M has no V
    i_v = T.alloc_var("int32")
    i = 0
    i_v = 0
    for step in T.serial(walk.steps):
        place, head, part, _row, _first, _slot, chunks = work_of(walk, step, warm_chunks)
        for a, b in T.Parallel(ROWS, K):
            state[a, b] = T.if_then_else(part == walk.parts - 1 and a == b, 1.0, 0.0)
        T.copy(state, operand)
        for j in T.serial(chunks):
            stage = i % config.product_stages
            wait_full(tiles.barriers, "k", config.key_stages, i)
            T.wgmma_gemm(operand, tiles.k[i % config.key_stages, :, :], u, transpose_B=True, clear_accum=True, policy=rows_policy)
            wait_full(tiles.barriers, "products", config.product_stages, i)
            gate_stage = i % GATE_STAGES
            load_state_scale(tiles, gate_stage, state_scale)
            if part < walk.parts - 1:
                wait_full(tiles.barriers, "v", 2, i_v)
                load_transposed(tiles.v, i_v % 2, half, v_registers, lane_offset)
            else:
                for e in T.unroll(32):
                    v_registers[e] = T.cast(0.0, problem.dtype)
            load_first_column_factors(tiles.gates, gate_stage, GAMMA, column, value_factor)
            if state_scale[0] != 1.0:
                scale_state(state, state_scale, 0)
            T.wait_wgmma(0)
            signal(tiles.barriers, "k_free", config.key_stages, i)
            values_minus_decayed(C, u, v_registers, tiles.gates, gate_stage, column, value_factor, u_registers, w_registers, w)
            signal(tiles.barriers, "gates_free", GATE_STAGES, i)
            if part < walk.parts - 1:
                signal(tiles.barriers, "v_free", 2, i_v)             # not before v_registers were used: docs/tilelang.md
                i_v = i_v + 1
            T.wgmma_gemm(w, tiles.X[stage, :, :], state, policy=rows_policy)
            T.wait_wgmma(0)
            T.copy(state, operand)
            signal(tiles.barriers, "products_free", config.product_stages, i)
            i = i + 1
        if chunks > 0:
            scale_state(state, state_scale, 1)
            T.copy(state, transfers[place, head, part * ROWS : part * ROWS + ROWS, 0:K])


@macro
def make_products(config, walk, tiles, thread, warm_chunks):
    # X = (gamma_L / gamma) o (Ab^T K), ahead of the state
    C, K = walk.problem.C, walk.problem.K
    left = T.alloc_fragment((C, HALF), "float32")
    right = T.alloc_fragment((C, HALF), "float32")
    registers = T.alloc_local((32,), "float32")
    row_factor = T.alloc_local((4,), "float32")
    warp = thread % 128 // 32
    lane = thread % 32
    row = 16 * warp + lane // 4
    lane_offset = T.alloc_var("int32")
    lane_offset = row_lane_offset(thread)
    total = T.alloc_var("int32")
    total = 0
    for step in T.serial(walk.steps):
        _place, _head, _part, _row, _first, _slot, chunks = work_of(walk, step, warm_chunks)
        total = total + chunks
    for i in T.serial(total):
        wait_full(tiles.barriers, "k", config.key_stages, i)
        wait_full(tiles.barriers, "Ab", 2, i)
        T.wgmma_gemm(tiles.Ab[i % 2, :, :], tiles.k[i % config.key_stages, :, 0:HALF], left, transpose_A=True, clear_accum=True)
        T.wgmma_gemm(tiles.Ab[i % 2, :, :], tiles.k[i % config.key_stages, :, HALF:K], right, transpose_A=True, clear_accum=True)
        wait_full(tiles.barriers, "gates", GATE_STAGES, i)
        load_row_factors(tiles.gates, i % GATE_STAGES, LOG_GAMMA, row, row_factor, (TO_END - LOG_GAMMA) * C)
        wait_free(tiles.barriers, "products", config.product_stages, i)
        T.wait_wgmma(1)
        emit_x(0, tiles.X, i % config.product_stages, left, registers, lane_offset, row_factor)
        T.wait_wgmma(0)
        signal(tiles.barriers, "k_free", config.key_stages, i)
        signal(tiles.barriers, "Ab_free", 2, i)
        emit_x(1, tiles.X, i % config.product_stages, right, registers, lane_offset, row_factor)
        signal(tiles.barriers, "gates_free", GATE_STAGES, i)
        T.fence_proxy_async()
        signal(tiles.barriers, "products_full", config.product_stages, i)


@macro
def load_keys(config, walk, tiles, k, Ab, warm_chunks):
    problem, C = walk.problem, walk.problem.C
    i = T.alloc_var("int32")
    i = 0
    for step in T.serial(walk.steps):
        _place, head, _part, row, first, slot, chunks = work_of(walk, step, warm_chunks)
        key_head = head // (problem.HV // problem.H)
        for j in T.serial(chunks):
            start = first + j * C
            stage = i % config.key_stages
            load(tiles, "k", config.key_stages, i, k[row, start : start + C, key_head, 0 : problem.K], stage)
            load(tiles, "Ab", 2, i, Ab[slot + j, head, 0:C, 0:C])
            i = i + 1


@macro
def load_values(walk, tiles, v, warm_chunks):
    C = walk.problem.C
    i = T.alloc_var("int32")
    i = 0
    for step in T.serial(walk.steps):
        _place, head, part, row, first, _slot, chunks = work_of(walk, step, warm_chunks)
        if part < walk.parts - 1:
            for j in T.serial(chunks):
                start = first + j * C
                load(tiles, "v", 2, i, v[row, start : start + C, head, part * ROWS : part * ROWS + ROWS])
                i = i + 1


@macro
def prepare_gates(walk, tiles, lane, g, A_log, dt_bias, warm_chunks):
    problem, C = walk.problem, walk.problem.C
    i = T.alloc_var("int32")
    i = 0
    for step in T.serial(walk.steps):
        _place, head, _part, row, first, _slot, chunks = work_of(walk, step, warm_chunks)
        sum_gates(problem, row, first, first + chunks * C, chunks, head, lane, 1.0, g, A_log, dt_bias, tiles, i)
        i = i + chunks


def build(problem: Problem, config: Config):
    from tilelang.layout import make_swizzled_layout

    allow_register_indices()
    H, HV, K, V, C, dtype = problem.H, problem.HV, problem.K, problem.V, problem.C, problem.dtype
    tiled = in_tiles(problem)
    B, tokens, slots, bounds, places = (T.dynamic(name) for name in ("B", "tokens", "slots", "bounds", "places"))
    N = bounds - 1 if problem.packed else B

    @T.prim_func
    def segment_scan(
        k: T.Tensor((B, tokens, H, K), dtype),
        v: T.Tensor((B, tokens, HV, V), dtype),
        Ab: T.Tensor((slots, HV, C, C), dtype),
        g: T.Tensor((B, tokens, HV), problem.gate_dtype),
        A_log: T.Tensor((HV,), "float32"),
        dt_bias: T.Tensor((HV,), "float32"),
        cu_seqlens: T.Tensor((bounds,), problem.index_dtype),
        segments_before: T.Tensor((N + 1,), "int32"),
        warm_chunks: T.Tensor((places, HV), "int32"),
        transfers: T.Tensor((places, HV, tiled.V + KEYS, KEYS), "float32"),
        chunks_per_segment: T.int32,
        blocks: T.int32,
    ):
        with T.Kernel(blocks, threads=512, prelude=PRELUDE) as block:
            shared, barriers = allocate(buffers(problem, config), barrier_counts(config))
            tiles = Tiles(**shared, barriers=barriers)
            wait_for_the_kernel_before()
            let_the_next_kernel_come()
            T.annotate_layout({tiles.v: make_swizzled_layout(tiles.v)})
            walk = Walk(tiled, cu_seqlens, tokens, N, segments_before, tiled.V // ROWS + 1, chunks_per_segment, block, blocks)
            thread = T.get_thread_binding()
            if thread < 256:
                T.set_max_nreg(STATE.registers, 1)
                hold_state(config, walk, tiles, thread, warm_chunks, transfers)
            elif thread < 384:
                T.set_max_nreg(AUX.registers, 0)
                make_products(config, walk, tiles, thread, warm_chunks)
            else:
                T.set_max_nreg(LOADERS.registers, 0)
                if thread < 416:
                    load_keys(config, walk, tiles, k, Ab, warm_chunks)
                elif thread < 448:
                    prepare_gates(walk, tiles, thread - 416, g, A_log, dt_bias, warm_chunks)
                elif thread < 480:
                    load_values(walk, tiles, v, warm_chunks)

    return segment_scan


TEMPLATE = Template(
    name="segment_scan",
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
