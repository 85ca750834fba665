"""The state that enters each chunk and the values it writes, for a backward, with the state in registers.

As register_state_forward without its output; with G = Gamma o Ab, gamma = exp(g) and X = (gamma_L / gamma) o (Ab^T K):

    W     = V - gamma o (K S)
    V_new = G W                                         [rows, HV, C, V]
    S'    = gamma_L S + X^T W

S enters each chunk transposed: states is [rows, HV, V, K]. Both are kept for the chunks of a band (macros/bands.py), which is
reached from the first chunk on, or from `midway`, where the forward kept that; `listed` says where they lie. The roles are those
of register_state_forward: two warpgroups hold S transposed, a third makes X and G one chunk ahead, single warps load, sum the
gates and store.
"""

from dataclasses import dataclass

from .arch import Arch
from .contract import Buffer, Role, Template, knob
from .language import T, macro
from .macros.bands import BandWalk, band_item
from .macros.chunk_lists import COLUMNS, LISTING, list_chunk
from .macros.launches import let_the_next_kernel_come, wait_if_early, wait_unless_early
from .macros.register_gates import (
    GAMMA,
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
from .macros.register_outputs import (
    PRELUDE,
    STATE_COPIES,
    decay_inverse,
    emit_state,
    free_states,
    start_state_store,
    state_barriers,
    state_buffer,
    state_is_emitted,
)
from .macros.register_products import diagonal_mask, emit_values, emit_x, load_transposed, values_minus_decayed
from .macros.register_roles import (
    AUX,
    HALF,
    LOADERS,
    ROWS,
    STATE,
    WARP,
    allocate,
    allow_register_indices,
    initial_state_tensor,
    load_keys,
    load_values,
    read_initial_state,
    shapes_fill_tiles,
    signal,
    wait_free,
    wait_full,
)
from .macros.register_tiles import row_lane_offset, transposed_lane_offset


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
    state_v_first: bool                  # the initial state is [N, HV, V, K]
    gate_in_kernel: bool
    has_dt_bias: bool
    split: bool = False                  # sequences come in segments, whose initial states are [places, HV, V, K] in float32


@dataclass(frozen=True)
class Config:
    key_stages: int = knob(2, 3, why="chunks of K in flight; 3 fit where X and G have one stage")
    product_stages: int = knob(1, 2, why="X and G made ahead of the state")


def arguments(problem: Problem) -> tuple[str, ...]:
    return (
        "k", "v", "Ab", "g", "A_log", "dt_bias", "cu_seqlens", "segments_before", "initial_state", "midway", "states",
        "v_new", "listed", "counts", "chunks_per_segment", "bands", "band", "early", "blocks",
    )  # fmt: skip


def buffers(problem: Problem, config: Config) -> tuple[Buffer, ...]:
    C, K, dtype = problem.C, problem.K, problem.dtype
    return (
        Buffer("k", (C, K), dtype, config.key_stages),
        Buffer("v", (C, ROWS), dtype, 2),
        Buffer("Ab", (C, C), dtype, 2),
        Buffer("X", (C, K), dtype, config.product_stages),
        Buffer("G", (C, C), dtype, config.product_stages),
        Buffer("v_new", (C, HALF), dtype, 2),            # one for each state warpgroup
        state_buffer(dtype),
        Buffer("gates", (4, C), "float32", GATE_STAGES),
        Buffer("state_scale", (2,), "float32", GATE_STAGES),
    )


def roles(problem: Problem, config: Config) -> tuple[Role, ...]:
    return (STATE, AUX, LOADERS)


def default_config(problem: Problem, arch: Arch) -> Config:
    return Config(key_stages=2, product_stages=2)


@dataclass(frozen=True)
class Tiles:
    """The shared tiles and their barriers."""

    k: object
    v: object
    Ab: object
    X: object
    G: object
    v_new: object
    s: object
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
        "products_full": (aux, config.product_stages),   # X, G, and through the aux warpgroup the gates
        "products_free": (state, config.product_stages),
        "v_new_full": (state // 2, 2),
        "v_new_free": (warp, 2),
        **state_barriers(state // 2),
        "tail_landed": (warp, 2),                         # a ragged chunk's K and V, before their foreign rows are zeroed
    }


@dataclass(frozen=True)
class StateWalk(BandWalk):
    """A band is reached from the first chunk on, unless the state in front of it is there."""

    midway_places: object

    def begin(self, item):
        return T.if_then_else((self.midway_places > 0) & (self.band == 0), self.low(item), 0)


@macro
def read_state(walk, item, initial_state, midway, state):
    first_v = item.part * ROWS
    if item.begin > 0:
        T.copy(midway[item.place, item.head, first_v : first_v + ROWS, 0 : walk.problem.K], state)
    else:
        read_initial_state(walk.problem, item, initial_state, state)


@macro
def hold_state(config, walk, tiles, thread, initial_state, midway):
    # W = V - gamma o (K S);  V_new = G W;  S <- gamma_L S + X^T W, all transposed
    problem, C, K = walk.problem, walk.problem.C, walk.problem.K
    rows_policy = T.GemmWarpPolicy.FullRow
    state = T.alloc_fragment((ROWS, K), "float32")
    operand = T.alloc_fragment((ROWS, K), problem.dtype)
    u = T.alloc_fragment((ROWS, C), "float32")
    v_new = T.alloc_fragment((ROWS, C), "float32")
    w = T.alloc_fragment((ROWS, C), problem.dtype)
    v_registers = T.alloc_local((32,), problem.dtype)
    new_registers = T.alloc_local((32,), problem.dtype)
    u_registers = T.alloc_local((32,), "float32")
    w_registers = T.alloc_local((32,), problem.dtype)
    s_registers = T.alloc_local((64,), "float32")
    state_scale = T.alloc_local((2,), "float32")
    value_factor = T.alloc_local((16,), "float32")
    half = thread // 128
    lane = thread % 32
    column = 2 * (lane % 4)
    lane_offset = T.alloc_var("int32")
    lane_offset = transposed_lane_offset(thread)
    row_offset = T.alloc_var("int32")
    row_offset = row_lane_offset(thread)
    i = T.alloc_var("int32")             # chunks since the block began; j counts within the item
    i = 0
    for step in T.serial(walk.steps):
        item = band_item(walk, step)
        chunks = T.alloc_var("int32")
        chunks = walk.chunks(item)
        read_state(walk, item, initial_state, midway, state)
        T.clear(v_new)
        T.copy(state, operand)
        state_scale[1] = 1.0
        # No product may be in flight across the back edge: ptxas would serialise every wgmma of the kernel (C7514).
        for j in T.serial(chunks):
            wait_full(tiles.barriers, "k", config.key_stages, i)
            T.wgmma_gemm(operand, tiles.k[i % config.key_stages, :, :], u, transpose_B=True, clear_accum=True, policy=rows_policy)
            # V_new of chunk i - 1 while K S runs; in the first round of an item nonsense that nobody is told of.
            emit_values(tiles, "v_new", half, (i + T.if_then_else(j > 0, 0, 1)) % 2, v_new, new_registers, lane_offset)
            emit_state(tiles, half, i, state, s_registers, row_offset, state_scale[1])
            wait_full(tiles.barriers, "products", config.product_stages, i)
            gate_stage = i % GATE_STAGES
            load_state_scale(tiles, gate_stage, state_scale)
            wait_full(tiles.barriers, "v", 2, i)
            load_transposed(tiles.v, i % 2, half, v_registers, lane_offset)
            load_first_column_factors(tiles.gates, gate_stage, GAMMA, column, value_factor)
            if state_scale[0] != 1.0:
                scale_state(state, state_scale, 0)
            T.wait_wgmma(0)
            if j > 0:
                T.barrier_arrive(tiles.barriers["v_new_full"][half])     # not at once: as emit_state says
            state_is_emitted(tiles, half, i)
            signal(tiles.barriers, "k_free", config.key_stages, i)
            values_minus_decayed(C, u, v_registers, tiles.gates, gate_stage, column, value_factor, u_registers, w_registers, w)
            signal(tiles.barriers, "v_free", 2, i)           # not before v_registers were used: docs/tilelang.md
            signal(tiles.barriers, "gates_free", GATE_STAGES, i)
            T.wgmma_gemm(w, tiles.X[i % config.product_stages, :, :], state, policy=rows_policy)
            T.wgmma_gemm(
                w, tiles.G[i % config.product_stages, :, :], v_new, transpose_B=True, clear_accum=True, policy=rows_policy
            )
            T.wait_wgmma(1)              # S is there
            T.copy(state, operand)
            T.wait_wgmma(0)
            signal(tiles.barriers, "products_free", config.product_stages, i)
            i = i + 1
        emit_values(tiles, "v_new", half, (i + T.if_then_else(chunks > 0, 0, 1)) % 2, v_new, new_registers, lane_offset)
        T.fence_proxy_async()            # once an item, where no product gives the stores time
        if chunks > 0:
            T.barrier_arrive(tiles.barriers["v_new_full"][half])


@macro
def make_products(config, walk, tiles, thread):
    # X = (gamma_L / gamma) o (Ab^T K);  G = Gamma o Ab, one chunk ahead of the state
    C, K = walk.problem.C, walk.problem.K
    left = T.alloc_fragment((C, HALF), "float32")
    right = T.alloc_fragment((C, HALF), "float32")
    registers = T.alloc_local((32,), "float32")
    inverse = T.alloc_local((32,), "float32")
    row_factor = T.alloc_local((4,), "float32")
    column_factor = T.alloc_local((16,), "float32")
    warp = thread % 128 // 32
    lane = thread % 32
    row = 16 * warp + lane // 4
    column = 2 * (lane % 4)
    lane_offset = T.alloc_var("int32")
    lane_offset = row_lane_offset(thread)
    mask = T.alloc_var("uint32")
    mask = diagonal_mask(lane)
    diagonal = mask                      # one copy for every use
    total = T.alloc_var("int32")
    total = 0
    for step in T.serial(walk.steps):
        item = band_item(walk, step)
        total = total + walk.chunks(item)
    for i in T.serial(total):
        stage = i % config.key_stages
        made = i % config.product_stages
        wait_full(tiles.barriers, "k", config.key_stages, i)
        wait_full(tiles.barriers, "Ab", 2, i)
        T.wgmma_gemm(tiles.Ab[i % 2, :, :], tiles.k[stage, :, 0:HALF], left, transpose_A=True, clear_accum=True)
        wait_full(tiles.barriers, "gates", GATE_STAGES, i)
        load_row_factors(tiles.gates, i % GATE_STAGES, LOG_GAMMA, row, row_factor, (TO_END - LOG_GAMMA) * C)
        load_column_factors(tiles.gates, i % GATE_STAGES, LOG_GAMMA, column, column_factor)
        wait_free(tiles.barriers, "products", config.product_stages, i)
        signal(tiles.barriers, "gates_free", GATE_STAGES, i)
        decay_inverse(tiles, i % 2, made, inverse, lane_offset, row_factor, column_factor, warp, diagonal)
        T.wgmma_gemm(tiles.Ab[i % 2, :, :], tiles.k[stage, :, HALF:K], right, transpose_A=True, clear_accum=True)
        T.wait_wgmma(1)
        emit_x(0, tiles.X, made, left, registers, lane_offset, row_factor)
        T.wait_wgmma(0)
        signal(tiles.barriers, "k_free", config.key_stages, i)
        signal(tiles.barriers, "Ab_free", 2, i)
        emit_x(1, tiles.X, made, right, registers, lane_offset, row_factor)
        T.fence_proxy_async()
        signal(tiles.barriers, "products_full", config.product_stages, i)


@macro
def start_values_store(problem, tiles, i, row, head, part, v_new, is_kept):
    for half in T.unroll(2):
        T.barrier_wait(tiles.barriers["v_new_full"][half], i % 2)
        T.fence_proxy_async()            # on the reader's side of the barrier: the writers would wait for it
        column = part * ROWS + half * HALF
        if is_kept:
            T.tma_copy(tiles.v_new[half, :, :], v_new[row, head, 0 : problem.C, column : column + HALF])


@macro
def free_values(tiles):
    for half in T.unroll(2):
        T.barrier_arrive(tiles.barriers["v_new_free"][half])


@macro
def store_outputs(walk, tiles, states, v_new, listed, counts):
    # S before each chunk of the band, V_new behind it, and where it lies. The copies of a chunk are in flight together, those of
    # S into the next.
    problem = walk.problem
    i = T.alloc_var("int32")
    i = 0
    for step in T.serial(walk.steps):
        item = band_item(walk, step)
        chunks = T.alloc_var("int32")
        chunks = walk.chunks(item)
        low, row = item.kept_from, item.kept_at
        for j in T.serial(chunks):
            if j > 0:
                start_values_store(problem, tiles, i - 1, row + j - 1, item.head, item.part, v_new, j > low)
            start_state_store(tiles, i, states, row + j, item.head, item.part, j >= low)
            if j >= low:
                list_chunk(listed, counts[walk.band], row + j, item, j, problem.C)
            T.tma_store_wait(STATE_COPIES)
            if j > 0:
                free_values(tiles)
            if i > 0:
                free_states(tiles, i - 1)
            i = i + 1
        if chunks > 0:
            start_values_store(problem, tiles, i - 1, row + chunks - 1, item.head, item.part, v_new, chunks > low)
            T.tma_store_wait(0)
            free_values(tiles)


def build(problem: Problem, config: Config):
    from tilelang.layout import make_swizzled_layout

    allow_register_indices()
    H, HV, K, V, C, dtype = problem.H, problem.HV, problem.K, problem.V, problem.C, problem.dtype
    B, tokens, slots, bounds = (T.dynamic(name) for name in ("B", "tokens", "slots", "bounds"))
    places, midway_places, rows, bands_counted = (
        T.dynamic(name) for name in ("places", "midway_places", "rows", "bands_counted")
    )
    N = bounds - 1 if problem.packed else B

    @T.prim_func
    def register_state_scan(
        k: T.Tensor((B, tokens, H, K), dtype),
        v: T.Tensor((B, tokens, HV, V), dtype),
        Ab: T.Tensor((slots, HV, C, C), dtype),
        g: T.Tensor((B, tokens, HV), problem.gate_dtype),
        A_log: T.Tensor((HV,), "float32"),
        dt_bias: T.Tensor((HV,), "float32"),
        cu_seqlens: T.Tensor((bounds,), problem.index_dtype),     # before initial_state: N is taken from it, that may be absent
        segments_before: T.Tensor((N + 1,), "int32"),
        initial_state: initial_state_tensor(problem, N, places),
        midway: T.Tensor((midway_places, HV, V, K), "float32"),                # no places where it is not known
        states: T.Tensor((rows, HV, V, K), dtype),
        v_new: T.Tensor((rows, HV, C, V), dtype),
        listed: T.Tensor((rows, COLUMNS), "int32"),      # the chunks of the band
        counts: T.Tensor((bands_counted,), "int32"),     # how many each band has; 0 before this kernel
        chunks_per_segment: T.int32,
        bands: T.int32,
        band: T.int32,
        early: T.int32,
        blocks: T.int32,
    ):
        with T.Kernel(blocks, threads=512, prelude=PRELUDE + LISTING) as block:
            shared, barriers = allocate(buffers(problem, config), barrier_counts(config))
            tiles = Tiles(**shared, barriers=barriers)
            wait_unless_early(early)
            let_the_next_kernel_come()
            T.annotate_layout({tile: make_swizzled_layout(tile) for tile in (tiles.v, tiles.v_new, tiles.s)})
            walk = StateWalk(
                problem, cu_seqlens, tokens, N, segments_before, V // ROWS, chunks_per_segment, block, blocks, bands, band,
                midway_places,
            )
            thread = T.get_thread_binding()
            if thread < 256:
                T.set_max_nreg(STATE.registers, 1)
                hold_state(config, walk, tiles, thread, initial_state, midway)
            elif thread < 384:
                T.set_max_nreg(AUX.registers, 0)
                make_products(config, walk, tiles, thread)
            else:
                T.set_max_nreg(LOADERS.registers, 0)
                if thread < 416:
                    load_keys(config, walk, tiles, k, Ab, item_at=band_item)
                elif thread < 448:
                    prepare_gates(walk, tiles, thread - 416, 1.0, g, A_log, dt_bias, item_at=band_item)
                elif thread < 480:
                    store_outputs(walk, tiles, states, v_new, listed, counts)
                else:
                    load_values(config, walk, tiles, v, item_at=band_item)
            wait_if_early(early)

    return register_state_scan


TEMPLATE = Template(
    name="register_state_scan",
    problem=Problem,
    config=Config,
    arches=("sm_90a",),
    arguments=arguments,
    buffers=buffers,
    roles=roles,
    default_config=default_config,
    build=build,
    constraints=(shapes_fill_tiles,),
    pass_configs={"tl.enable_fast_math": True, "tl.disable_thread_storage_sync": True},
)
