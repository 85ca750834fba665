"""The gradient of the state after each chunk, of the values and of the initial state, with that gradient in registers.

As state_gradient_scan. With G = Gamma o Ab, P = scale Gamma o lower(Q K^T), gamma = exp(g), from the last chunk to the first:

    dV_new = (gamma_L / gamma) o (K dS') + P^T dO
    dW     = G^T dV_new                                 the gradient of V, [B, T, HV, V]
    dS     = gamma_L dS' - K^T (gamma o dW) + scale Q^T (gamma o dO)

dS' of each chunk is kept, transposed: state_gradients is [rows, HV, V, K]. Two warpgroups hold dS transposed, as
register_state_forward holds S, and rescale it as rarely. A third makes P and G one chunk ahead, single warps load, sum the
gates and store. The last product does not wait for the others: dO and Q are there before the chunk begins.

It goes through the chunks of a band (macros/bands.py) and leaves the gradient in front of them as `carried` to the next one. It
needs nothing of register_state_scan, beside which it may run.

With `split` every segment begins with the gradient of the state behind it, from segment_state_gradients. What that needs is found
by a pass before, `transfers_only`: every segment but the first of a sequence begins with zero, the last one with the gradient of
the final state, and nothing is kept but the gradient of the state in front of it. Of a head that forgets, the first warm_chunks
chunks of a segment suffice, as segment_plan says: it begins with zero behind those, the last segment too.
"""

from dataclasses import dataclass

from .arch import Arch
from .contract import Buffer, Rejection, Role, Template, knob
from .language import T, macro
from .macros.bands import BandWalk, band_item
from .macros.launches import let_the_next_kernel_come, wait_if_early, wait_unless_early
from .macros.register_gates import (
    ERASE,
    FROM_END,
    GATE_STAGES,
    LOG_GAMMA,
    READ,
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
from .macros.register_products import (
    decay_and_store,
    diagonal_mask,
    load_transposed,
    start_rows_store,
    store_transposed,
    zero_behind,
)
from .macros.register_roles import (
    AUX,
    HALF,
    LOADERS,
    ROWS,
    STATE,
    WARP,
    Walk,
    allocate,
    allow_register_indices,
    item_of,
    load,
    load_rows,
    shapes_fill_tiles,
    signal,
    wait_free,
    wait_full,
)
from .macros.register_tiles import from_registers, row_lane_offset, to_registers, transposed_lane_offset
from .macros.states import read_transposed_state, state_shape, write_transposed_state


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
    has_final_state_gradient: bool       # else it is zero
    has_initial_state: bool              # whose gradient is then wanted
    state_v_first: bool                  # gradients of initial and final state are [N, HV, V, K]
    gate_in_kernel: bool
    has_dt_bias: bool
    split: bool = False                  # in segments: the gradient behind each takes the place of the final state's
    transfers_only: bool = False         # the pass before: that in front of each takes the place of the initial state's


@dataclass(frozen=True)
class Config:
    key_stages: int = knob(2, 3, why="chunks of Q and of K in flight; 3 of both fit beside no outputs only")
    product_stages: int = knob(1, 2, why="P and G made ahead of the state")


def arguments(problem: Problem) -> tuple[str, ...]:
    return (
        "q", "k", "do", "Ab", "g", "A_log", "dt_bias", "cu_seqlens", "segments_before", "final_state_gradient",
        "state_gradients", "dv", "initial_state_gradient", "warm_chunks", "carried",
        "scale", "log2_scale", "chunks_per_segment", "bands", "band", "early", "blocks",
    )  # fmt: skip


def buffers(problem: Problem, config: Config) -> tuple[Buffer, ...]:
    C, K, dtype = problem.C, problem.K, problem.dtype
    outputs = (
        Buffer("dw", (C, HALF), dtype, 2),               # one for each state warpgroup
        state_buffer(dtype),
    )
    return (
        Buffer("q", (C, K), dtype, config.key_stages),
        Buffer("k", (C, K), dtype, config.key_stages),
        Buffer("do", (C, ROWS), dtype, 2),
        Buffer("Ab", (C, C), dtype, 2),
        Buffer("P", (C, C), dtype, config.product_stages),
        Buffer("G", (C, C), dtype, config.product_stages),
        *(() if problem.transfers_only else outputs),
        Buffer("gates", (4, C), "float32", GATE_STAGES),
        Buffer("state_scale", (2,), "float32", GATE_STAGES),
    )


def roles(problem: Problem, config: Config) -> tuple[Role, ...]:
    return (STATE, AUX, LOADERS)


def transfers_are_of_segments(problem: Problem, config: Config, arch: Arch) -> Rejection | None:
    if problem.transfers_only and not problem.split:
        return Rejection("transfers_only=True asks for transfers of segments, but split=False")
    return None


def default_config(problem: Problem, arch: Arch) -> Config:
    return Config(key_stages=3, product_stages=2) if problem.transfers_only else Config(key_stages=2, product_stages=1)


@dataclass(frozen=True)
class Tiles:
    """The shared tiles and their barriers."""

    q: object
    k: object
    do: object
    Ab: object
    P: object
    G: object
    gates: object
    state_scale: object
    barriers: dict
    dw: object = None                    # not where transfers alone are made
    s: object = None


def barrier_counts(problem: Problem, config: Config) -> dict[str, tuple[int, int]]:
    """Arrivals and stages of each barrier. A tile is full when its writers say so, free when its readers do."""
    warp, state, aux = WARP, STATE.threads, AUX.threads
    outputs = {
        "dw_full": (state // 2, 2),
        "dw_free": (warp, 2),
        **state_barriers(state // 2),
    }
    return {
        "q_full": (warp, config.key_stages),
        "q_free": (state + aux, config.key_stages),
        "k_full": (warp, config.key_stages),
        "k_free": (state + aux, config.key_stages),
        "do_full": (warp, 2),
        "do_free": (state, 2),
        "Ab_full": (warp, 2),
        "Ab_free": (aux, 2),
        "gates_full": (warp, GATE_STAGES),
        "gates_free": (state + aux, GATE_STAGES),
        "products_full": (aux, config.product_stages),   # P, G, and through the aux warpgroup the gates
        "products_free": (state, config.product_stages),
        **({} if problem.transfers_only else outputs),
        "tail_landed": (warp, 3),                         # a ragged chunk's K, Q and dO, before their foreign rows are zeroed
    }


@dataclass(frozen=True)
class WarmWalk(Walk):
    """The items of a block, of which transfers need the first warm_chunks chunks."""

    warm_chunks: object

    def chunks(self, item):
        every = super().chunks(item)
        # Of a place without a segment nobody wrote warm_chunks: it has none anyway.
        warm = self.warm_chunks[item.place, item.head]
        # Nobody asks what the first segment adds to the gradient in front of it.
        return T.if_then_else(item.segment == 0, 0, T.if_then_else(warm < 0, every, T.min(warm, every)))


@macro
def item_at(walk, step):
    """With no chunks but those of the band; transfers are of all chunks."""
    if walk.problem.transfers_only:
        return item_of(walk, step)
    else:
        return band_item(walk, step)


@macro
def read_state(walk, item, final_state_gradient, carried, state):
    problem, first_v = walk.problem, item.part * ROWS
    if problem.transfers_only:
        T.clear(state)
        if problem.has_final_state_gradient:
            if item.segment == item.last:
                if walk.warm_chunks[item.place, item.head] < 0:
                    read_transposed_state(problem, final_state_gradient, item.n, item.head, first_v, state)
    else:
        if walk.band > 0:
            T.copy(carried[item.place, item.head, first_v : first_v + ROWS, 0 : problem.K], state)
        elif problem.split:
            T.copy(final_state_gradient[item.place, item.head, first_v : first_v + ROWS, 0 : problem.K], state)
        elif problem.has_final_state_gradient:
            read_transposed_state(problem, final_state_gradient, item.n, item.head, first_v, state)
        else:
            T.clear(state)


@macro
def write_state(walk, item, state, carried, initial_state_gradient):
    problem, first_v = walk.problem, item.part * ROWS
    if problem.transfers_only:
        T.copy(state, initial_state_gradient[item.place, item.head, first_v : first_v + ROWS, 0 : problem.K])
    else:
        if walk.band < walk.bands - 1:
            T.copy(state, carried[item.place, item.head, first_v : first_v + ROWS, 0 : problem.K])
        elif problem.has_initial_state:
            if item.segment == 0:
                write_transposed_state(problem, item.n, item.head, first_v, state, initial_state_gradient)


@macro
def hold_state(config, walk, tiles, thread, final_state_gradient, carried, initial_state_gradient):
    # dV_new = (gamma_L / gamma) o (K dS') + P^T dO;  dW = G^T dV_new
    # dS <- gamma_L dS' - K^T (gamma o dW) + scale Q^T (gamma o dO), all transposed
    problem, C, K = walk.problem, walk.problem.C, walk.problem.K
    rows_policy = T.GemmWarpPolicy.FullRow
    state = T.alloc_fragment((ROWS, K), "float32")
    operand = T.alloc_fragment((ROWS, K), problem.dtype)
    u = T.alloc_fragment((ROWS, C), "float32")
    dw = T.alloc_fragment((ROWS, C), "float32")
    values = T.alloc_fragment((ROWS, C), problem.dtype)
    output = T.alloc_fragment((ROWS, C), problem.dtype)
    decayed = T.alloc_fragment((ROWS, C), problem.dtype)
    erased = T.alloc_fragment((ROWS, C), problem.dtype)
    do_registers = T.alloc_local((32,), problem.dtype)
    decayed_registers = T.alloc_local((32,), problem.dtype)
    erased_registers = T.alloc_local((32,), problem.dtype)
    dw_registers = T.alloc_local((32,), problem.dtype)
    u_registers = T.alloc_local((32,), "float32")
    s_registers = T.alloc_local((64,), "float32")
    state_scale = T.alloc_local((2,), "float32")
    factor = T.alloc_local((16,), "float32")
    half = thread // 128
    lane = thread % 32
    column = 2 * (lane % 4)
    lane_offset = T.alloc_var("int32")
    lane_offset = transposed_lane_offset(thread)
    row_offset = T.alloc_var("int32")
    row_offset = row_lane_offset(thread)
    i = T.alloc_var("int32")             # chunks since the block began
    i = 0
    for step in T.serial(walk.steps):
        item = item_at(walk, step)
        chunks = T.alloc_var("int32")
        chunks = walk.chunks(item)
        read_state(walk, item, final_state_gradient, carried, state)
        T.copy(state, operand)
        state_scale[1] = 1.0
        # No product may be in flight across the back edge: ptxas would serialise every wgmma of the kernel (C7514).
        for j in T.serial(chunks):
            key_stage = i % config.key_stages
            stage = i % config.product_stages
            gate_stage = i % GATE_STAGES
            wait_full(tiles.barriers, "k", config.key_stages, i)
            T.wgmma_gemm(operand, tiles.k[key_stage, :, :], u, transpose_B=True, clear_accum=True, policy=rows_policy)
            if not problem.transfers_only:
                emit_state(tiles, half, i, state, s_registers, row_offset, state_scale[1])
            wait_full(tiles.barriers, "do", 2, i)
            load_transposed(tiles.do, i % 2, half, do_registers, lane_offset)
            wait_full(tiles.barriers, "products", config.product_stages, i)
            load_state_scale(tiles, gate_stage, state_scale)
            T.call_extern(
                "handle", "qla_scale_column_pairs", T.address_of(do_registers[0]), T.address_of(decayed_registers[0]),
                T.access_ptr(tiles.gates[gate_stage, READ, column], "r", 1),
            )  # fmt: skip
            from_registers(ROWS, C, decayed_registers, decayed)
            from_registers(ROWS, C, do_registers, output)
            load_first_column_factors(tiles.gates, gate_stage, FROM_END, column, factor)
            if state_scale[0] != 1.0:
                scale_state(state, state_scale, 0)
            wait_full(tiles.barriers, "q", config.key_stages, i)
            T.wgmma_gemm(decayed, tiles.q[key_stage, :, :], state, policy=rows_policy)
            T.wait_wgmma(1)              # K dS' is there
            if not problem.transfers_only:
                state_is_emitted(tiles, half, i)
            signal(tiles.barriers, "do_free", 2, i)
            to_registers(ROWS, C, u, u_registers)
            T.call_extern(
                "handle", "qla_scale_columns", T.address_of(u_registers[0]), T.address_of(factor[0]),
                T.access_ptr(tiles.gates[gate_stage, FROM_END, column], "r", 1),
            )  # fmt: skip
            from_registers(ROWS, C, u_registers, u)
            T.wgmma_gemm(output, tiles.P[stage, :, :], u, policy=rows_policy)
            T.wait_wgmma(0)
            signal(tiles.barriers, "q_free", config.key_stages, i)
            T.copy(u, values)
            T.wgmma_gemm(values, tiles.G[stage, :, :], dw, clear_accum=True, policy=rows_policy)
            T.wait_wgmma(0)
            signal(tiles.barriers, "products_free", config.product_stages, i)
            to_registers(ROWS, C, dw, u_registers)
            T.call_extern(
                "handle", "qla_keep_and_erase", T.address_of(u_registers[0]), T.address_of(dw_registers[0]),
                T.address_of(erased_registers[0]), T.access_ptr(tiles.gates[gate_stage, ERASE, column], "r", 1),
            )  # fmt: skip
            from_registers(ROWS, C, erased_registers, erased)
            signal(tiles.barriers, "gates_free", GATE_STAGES, i)
            T.wgmma_gemm(erased, tiles.k[key_stage, :, :], state, policy=rows_policy)
            if not problem.transfers_only:
                T.barrier_wait(tiles.barriers["dw_free"][half], (i + 1) % 2)
                store_transposed(dw_registers, tiles.dw, half, lane_offset)
            T.wait_wgmma(0)
            if not problem.transfers_only:
                T.barrier_arrive(tiles.barriers["dw_full"][half])        # not at once: as emit_state says
            T.copy(state, operand)
            signal(tiles.barriers, "k_free", config.key_stages, i)
            i = i + 1
        if chunks > 0:
            scale_state(state, state_scale, 1)
        if chunks > 0 or not problem.transfers_only:
            write_state(walk, item, state, carried, initial_state_gradient)


@macro
def make_products(config, walk, tiles, thread, log2_scale):
    # P = scale Gamma o lower(Q K^T);  G = Gamma o Ab, one chunk ahead of the state
    C = walk.problem.C
    scores = T.alloc_fragment((C, C), "float32")
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
        item = item_at(walk, step)
        total = total + walk.chunks(item)
    for i in T.serial(total):
        stage = i % config.key_stages
        made = i % config.product_stages
        wait_full(tiles.barriers, "k", config.key_stages, i)
        wait_full(tiles.barriers, "q", config.key_stages, i)
        T.wgmma_gemm(tiles.q[stage, :, :], tiles.k[stage, :, :], scores, transpose_B=True, clear_accum=True)
        wait_full(tiles.barriers, "gates", GATE_STAGES, i)
        load_row_factors(tiles.gates, i % GATE_STAGES, LOG_GAMMA, row, row_factor, (TO_END - LOG_GAMMA) * C)
        load_column_factors(tiles.gates, i % GATE_STAGES, LOG_GAMMA, column, column_factor)
        wait_full(tiles.barriers, "Ab", 2, i)
        wait_free(tiles.barriers, "products", config.product_stages, i)
        signal(tiles.barriers, "gates_free", GATE_STAGES, i)
        decay_inverse(tiles, i % 2, made, inverse, lane_offset, row_factor, column_factor, warp, diagonal)
        signal(tiles.barriers, "Ab_free", 2, i)
        T.wait_wgmma(0)
        signal(tiles.barriers, "k_free", config.key_stages, i)
        signal(tiles.barriers, "q_free", config.key_stages, i)
        to_registers(C, C, scores, registers)
        decay_and_store(registers, tiles.P, made, lane_offset, row_factor, column_factor, log2_scale, warp, diagonal)
        T.fence_proxy_async()
        signal(tiles.barriers, "products_full", config.product_stages, i)


@macro
def load_keys(config, walk, tiles, q, k):
    # K and Q of every chunk, the last first
    problem, C = walk.problem, walk.problem.C
    i = T.alloc_var("int32")
    tails = T.alloc_var("int32")
    i = 0
    tails = 0
    for step in T.serial(walk.steps):
        item = item_at(walk, step)
        key_head = item.head // (problem.HV // problem.H)
        chunks = T.alloc_var("int32")
        chunks = walk.chunks(item)
        for j in T.serial(chunks):
            at = (chunks - 1 - j) * C
            start = item.first + at
            count = item.length - at
            stage = i % config.key_stages
            wait_free(tiles.barriers, "k", config.key_stages, i)
            load_rows(tiles, "k", stage, k[item.row, start : start + C, key_head, 0 : problem.K], count, 0, tails)
            signal(tiles.barriers, "k_full", config.key_stages, i)
            wait_free(tiles.barriers, "q", config.key_stages, i)
            load_rows(tiles, "q", stage, q[item.row, start : start + C, key_head, 0 : problem.K], count, 1, tails)
            signal(tiles.barriers, "q_full", config.key_stages, i)
            if count < C:
                tails = tails + 1
            i = i + 1


@macro
def load_values(walk, tiles, do, Ab):
    # dO and Ab of every chunk, the last first
    C = walk.problem.C
    i = T.alloc_var("int32")
    tails = T.alloc_var("int32")
    i = 0
    tails = 0
    for step in T.serial(walk.steps):
        item = item_at(walk, step)
        chunks = T.alloc_var("int32")
        chunks = walk.chunks(item)
        for j in T.serial(chunks):
            at = (chunks - 1 - j) * C
            start = item.first + at
            count = item.length - at
            column = item.part * ROWS
            load(tiles, "Ab", 2, i, Ab[item.slot + chunks - 1 - j, item.head, 0:C, 0:C])
            wait_free(tiles.barriers, "do", 2, i)
            load_rows(tiles, "do", i % 2, do[item.row, start : start + C, item.head, column : column + ROWS], count, 2, tails)
            if count < C:
                tails = tails + 1
            signal(tiles.barriers, "do_full", 2, i)
            i = i + 1


@macro
def store_outputs(walk, tiles, state_gradients, dv):
    # dS' and dW of each chunk, and zeros behind the last sequence. Copies are in flight into the next chunk.
    i = T.alloc_var("int32")
    i = 0
    for step in T.serial(walk.steps):
        item = item_at(walk, step)
        chunks = T.alloc_var("int32")
        chunks = walk.chunks(item)
        for j in T.serial(chunks):
            chunk = chunks - 1 - j
            start_state_store(tiles, i, state_gradients, item.kept_at + chunk, item.head, item.part)
            if i > 0:
                T.tma_store_wait(STATE_COPIES)
                free_states(tiles, i - 1)
                for half in T.unroll(2):
                    T.barrier_arrive(tiles.barriers["dw_free"][half])
            for half in T.unroll(2):
                T.barrier_wait(tiles.barriers["dw_full"][half], i % 2)
                start_rows_store(tiles.dw, half, walk, item, chunk, dv)
            i = i + 1
        if walk.band == 0:               # an item ends where its sequence does
            zero_behind(walk, item, dv)
    T.tma_store_wait(0)


def build(problem: Problem, config: Config):
    from tilelang.layout import make_swizzled_layout

    allow_register_indices()
    H, HV, K, V, C, dtype = problem.H, problem.HV, problem.K, problem.V, problem.C, problem.dtype
    B, tokens, slots, bounds = (T.dynamic(name) for name in ("B", "tokens", "slots", "bounds"))
    places, rows, carried_places = (T.dynamic(name) for name in ("places", "rows", "carried_places"))
    N = bounds - 1 if problem.packed else B
    segment_shape = (places, HV, V, K)
    initial_shape = segment_shape if problem.transfers_only else state_shape(problem, N)
    final_shape = segment_shape if problem.split and not problem.transfers_only else state_shape(problem, N)

    @T.prim_func
    def register_gradient_scan(
        q: T.Tensor((B, tokens, H, K), dtype),
        k: T.Tensor((B, tokens, H, K), dtype),
        do: T.Tensor((B, tokens, HV, V), dtype),
        Ab: T.Tensor((slots, HV, C, C), dtype),
        g: T.Tensor((B, tokens, HV), problem.gate_dtype),
        A_log: T.Tensor((HV,), "float32"),
        dt_bias: T.Tensor((HV,), "float32"),
        cu_seqlens: T.Tensor((bounds,), problem.index_dtype),     # before what is shaped by N, and may be absent
        segments_before: T.Tensor((N + 1,), "int32"),
        final_state_gradient: T.Tensor(final_shape, "float32"),
        state_gradients: T.Tensor((rows, HV, V, K), dtype),
        dv: T.Tensor((B, tokens, HV, V), dtype),
        initial_state_gradient: T.Tensor(initial_shape, "float32"),
        warm_chunks: T.Tensor((places if problem.split else N, HV), "int32"),     # where transfers alone are made
        carried: T.Tensor((carried_places, HV, V, K), "float32"),                # no places of a single band
        scale: T.float32,
        log2_scale: T.float32,           # from the host: the loop would compute it anew for every chunk
        chunks_per_segment: T.int32,
        bands: T.int32,
        band: T.int32,
        early: T.int32,
        blocks: T.int32,
    ):
        with T.Kernel(blocks, threads=512, prelude=PRELUDE) as block:
            shared, barriers = allocate(buffers(problem, config), barrier_counts(problem, config))
            tiles = Tiles(**shared, barriers=barriers)
            if problem.transfers_only:
                wait_unless_early(early)
            let_the_next_kernel_come()
            swizzled = [tile for tile in (tiles.do, tiles.dw, tiles.s, tiles.Ab) if tile is not None]
            T.annotate_layout({tile: make_swizzled_layout(tile) for tile in swizzled})
            items = (problem, cu_seqlens, tokens, N, segments_before, V // ROWS, chunks_per_segment, block, blocks)
            walk = WarmWalk(*items, warm_chunks) if problem.transfers_only else BandWalk(*items, bands, band)
            thread = T.get_thread_binding()
            if thread < 256:
                T.set_max_nreg(STATE.registers, 1)
                if not problem.transfers_only:
                    wait_unless_early(early)             # the others need nothing of it
                hold_state(config, walk, tiles, thread, final_state_gradient, carried, initial_state_gradient)
            elif thread < 384:
                T.set_max_nreg(AUX.registers, 0)
                make_products(config, walk, tiles, thread, log2_scale)
            else:
                T.set_max_nreg(LOADERS.registers, 0)
                if thread < 416:
                    load_keys(config, walk, tiles, q, k)
                elif thread < 448:
                    prepare_gates(walk, tiles, thread - 416, scale, g, A_log, dt_bias, backwards=True, item_at=item_at)
                elif thread < 480:
                    if not problem.transfers_only:
                        wait_unless_early(early)         # memory of the kernel before may have been given to these
                        store_outputs(walk, tiles, state_gradients, dv)
                else:
                    load_values(walk, tiles, do, Ab)
            wait_if_early(early)

    return register_gradient_scan


TEMPLATE = Template(
    name="register_gradient_scan",
    problem=Problem,
    config=Config,
    arches=("sm_90a",),
    arguments=arguments,
    buffers=buffers,
    roles=roles,
    default_config=default_config,
    build=build,
    constraints=(shapes_fill_tiles, transfers_are_of_segments),
    pass_configs={"tl.enable_fast_math": True, "tl.disable_thread_storage_sync": True},
)
