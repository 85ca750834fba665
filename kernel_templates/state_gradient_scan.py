"""The recurrence over chunks, backwards: the gradient of the state after each chunk, of the values, and of the initial state.

Per sequence and value head, from the last chunk to the first, with dS' the gradient of the state after the chunk,
gamma = exp(g_sum), gamma_L its last value, P = scale Gamma o lower(Q K^T) and A from triangular_solve:

    dV_new = (gamma_L / gamma) o (K dS') + P^T dO
    dW     = A^T dV_new                                 the gradient of V, [B, T, HV, V]
    dS     = gamma_L dS' - K^T (gamma o dW) + scale Q^T (gamma o dO)

dS' of chunk j is kept as state_gradients[slot(j)], [slots, HV, K, V]. One block owns block_v columns of dS for a whole
sequence; dS stays in float32 accumulators and is rounded to the input dtype only as a matrix operand. The ragged last
chunk comes first and is loaded with guards, because tokens behind the end of a sequence may hold NaN. Tokens that belong
to no sequence get dV = 0.
"""

from dataclasses import dataclass

from .arch import ARCHES, Arch
from .contract import (
    Buffer,
    Rejection,
    Role,
    Template,
    block_divides_values,
    knob,
    pipeline_has_bulk_copies,
    stages_are_aligned,
)
from .language import T, macro
from .macros.chunk_tiles import load_guarded, padded_keys
from .macros.gates import LOG2E, decay_between
from .macros.sequences import sequence_bounds
from .macros.states import read_state, state_block, state_shape, write_state


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
    has_final_state_gradient: bool       # else it is zero
    has_initial_state: bool              # whose gradient is then wanted
    state_v_first: bool                  # gradients of initial and final state are [N, HV, V, K]


@dataclass(frozen=True)
class Config:
    block_v: int = knob(32, 64, 96, 128, why="columns of dS per block: fewer give more blocks, more reuse Q, K, A and Q K^T")
    threads: int = knob(128, 256, why="256 halve the accumulators per thread, for K = 256")
    stages: int = knob(0, 1, 2, why="chunks of Q, K, dO and A in flight; 0: no pipeline, for chips without bulk copies")


def arguments(problem: Problem) -> tuple[str, ...]:
    return (
        "q", "k", "do", "A", "g_sum", "cu_seqlens", "final_state_gradient", "state_gradients", "dv", "initial_state_gradient",
        "scale",
    )  # fmt: skip


CHUNK_TILES = 5                          # of what is loaded for a chunk


def buffers(problem: Problem, config: Config) -> tuple[Buffer, ...]:
    C, K, dtype = problem.C, padded_keys(problem), problem.dtype

    def chunk(kind: str, stages: int) -> tuple[Buffer, ...]:
        return (
            Buffer(f"q_{kind}", (C, K), dtype, stages),
            Buffer(f"k_{kind}", (C, K), dtype, stages),
            Buffer(f"do_{kind}", (C, config.block_v), dtype, stages),
            Buffer(f"A_{kind}", (C, C), dtype, stages),
            Buffer(f"g_{kind}", (C,), "float32", stages),
        )

    return (
        *(chunk("pipelined", config.stages) if config.stages else ()),
        # Guarded loads have tiles of their own: TileLang does not let go of a pipelined buffer after its loop.
        *chunk("guarded", 1),
        Buffer("state_tile", (K, config.block_v), dtype),
        Buffer("p_tile", (C, C), dtype),
        Buffer("values_tile", (C, config.block_v), dtype),
        Buffer("dw_tile", (C, config.block_v), dtype),
        Buffer("decayed_tile", (C, config.block_v), dtype),
    )


def roles(problem: Problem, config: Config) -> tuple[Role, ...]:
    accumulators = ((padded_keys(problem) + problem.C) * config.block_v + problem.C * problem.C) // config.threads
    return (Role("all", config.threads, registers=min(255, accumulators + 64)),)


def accumulators_fit(problem: Problem, config: Config, arch: Arch) -> Rejection | None:
    needed = (padded_keys(problem) * config.block_v + problem.C * max(problem.C, config.block_v)) // config.threads
    if needed > 160:                     # dS and one product; beyond that the compiler spills inside the loop
        return Rejection(f"dS and one product take {needed} registers a thread; 160 leave room for operands")
    return None


def default_config(problem: Problem, arch: Arch) -> Config:
    block_v = 32 if problem.V % 64 else 64
    threads = 256 if problem.K > 128 else 128
    return TEMPLATE.first_allowed(
        problem, arch, (Config(v, threads, stages) for v in (block_v, 32) for stages in (2, 1, 0))
    )


@dataclass(frozen=True)
class Tiles:
    """The shared tiles of one block."""

    q: object
    k: object
    do: object
    A: object
    g: object
    state: object
    p: object
    values: object
    dw: object
    decayed: object


@macro
def load_chunk(problem, row, start, valid, slot, head, first_v, q, k, do, A, g_sum, tiles):
    # what a chunk needs, with guards
    key_head = head // (problem.HV // problem.H)
    load_guarded(q, row, start, valid, key_head, 0, problem.K, tiles.q)
    load_guarded(k, row, start, valid, key_head, 0, problem.K, tiles.k)
    load_guarded(do, row, start, valid, head, first_v, tiles.do.shape[1], tiles.do)
    T.copy(A[slot, head, 0 : problem.C, 0 : problem.C], tiles.A)
    T.copy(g_sum[slot, head, 0 : problem.C], tiles.g)


@macro
def leave_chunk(slot, head, first_v, tiles, state, state_gradients):
    # state_gradients[slot] <- dS'
    T.copy(state, tiles.state)
    T.copy(tiles.state, state_gradients[slot, head, 0 : tiles.state.shape[0], first_v : first_v + tiles.do.shape[1]])


@macro
def masked_scores(scale, tiles, scores):
    # P = scale Gamma o (Q K^T), lower triangle
    C = tiles.p.shape[0]
    T.gemm(tiles.q, tiles.k, scores, transpose_B=True, clear_accum=True)
    for i, j in T.Parallel(C, C):
        decay = decay_between(tiles.g, i, j)
        scores[i, j] = T.if_then_else(i >= j, scores[i, j] * decay * scale, 0.0)
    T.copy(scores, tiles.p)


@macro
def value_gradients(tiles, values):
    # dV_new = (gamma_L / gamma) o (K dS') + P^T dO;  dW = A^T dV_new
    C, block_v = tiles.do.shape
    T.gemm(tiles.k, tiles.state, values, clear_accum=True)
    for i, j in T.Parallel(C, block_v):
        values[i, j] = values[i, j] * T.exp2((tiles.g[C - 1] - tiles.g[i]) * LOG2E)
    T.gemm(tiles.p, tiles.do, values, transpose_A=True)
    T.copy(values, tiles.values)
    T.gemm(tiles.A, tiles.values, values, transpose_A=True, clear_accum=True)
    T.copy(values, tiles.dw)


@macro
def update_state(scale, tiles, values, state):
    # dS <- gamma_L dS' - K^T (gamma o dW) + scale Q^T (gamma o dO)
    C, block_v = tiles.do.shape
    for i, j in T.Parallel(C, block_v):
        values[i, j] = -values[i, j] * T.exp2(tiles.g[i] * LOG2E)
    T.copy(values, tiles.values)
    for i, j in T.Parallel(C, block_v):
        tiles.decayed[i, j] = tiles.do[i, j] * (T.exp2(tiles.g[i] * LOG2E) * scale)
    for i, j in T.Parallel(tiles.state.shape[0], block_v):
        state[i, j] = state[i, j] * T.exp2(tiles.g[C - 1] * LOG2E)
    T.gemm(tiles.k, tiles.values, state, transpose_A=True)
    T.gemm(tiles.q, tiles.decayed, state, transpose_A=True)


@macro
def scan_chunk(scale, slot, head, first_v, tiles, scores, values, state, state_gradients):
    leave_chunk(slot, head, first_v, tiles, state, state_gradients)
    masked_scores(scale, tiles, scores)
    value_gradients(tiles, values)
    update_state(scale, tiles, values, state)


def build(problem: Problem, config: Config):
    H, HV, K, V, C, dtype = problem.H, problem.HV, problem.K, problem.V, problem.C, problem.dtype
    block_v, rows = config.block_v, padded_keys(problem)
    B, tokens, slots, bounds = (T.dynamic(name) for name in ("B", "tokens", "slots", "bounds"))
    N = bounds - 1 if problem.packed else B

    @T.prim_func
    def state_gradient_scan(
        q: T.Tensor((B, tokens, H, K), dtype),
        k: T.Tensor((B, tokens, H, K), dtype),
        do: T.Tensor((B, tokens, HV, V), dtype),
        A: T.Tensor((slots, HV, C, C), dtype),
        g_sum: T.Tensor((slots, HV, C), "float32"),
        cu_seqlens: T.Tensor((bounds,), problem.index_dtype),     # before what is shaped by N, and may be absent
        final_state_gradient: T.Tensor(state_shape(problem, N), "float32"),
        state_gradients: T.Tensor((slots, HV, K, V), dtype),
        dv: T.Tensor((B, tokens, HV, V), dtype),
        initial_state_gradient: T.Tensor(state_shape(problem, N), "float32"),
        scale: T.float32,
    ):
        with T.Kernel(V // block_v * HV * N, threads=config.threads) as block:
            n, head, first_v = state_block(block, problem, block_v)
            tiles = [T.alloc_shared(b.shape, b.dtype) for b in buffers(problem, config)]
            own = tiles[-CHUNK_TILES:]
            guarded = Tiles(*tiles[-2 * CHUNK_TILES : -CHUNK_TILES], *own)
            pipelined = Tiles(*tiles[:CHUNK_TILES], *own)
            state = T.alloc_fragment((rows, block_v), "float32")
            values = T.alloc_fragment((C, block_v), "float32")
            scores = T.alloc_fragment((C, C), "float32")
            row, first, length, first_slot = sequence_bounds(problem.packed, cu_seqlens, tokens, n, C)
            key_head = head // (HV // H)
            full = length // C

            T.clear(state)
            if problem.has_final_state_gradient:
                read_state(problem, final_state_gradient, n, head, first_v, state)

            if length % C > 0:
                start = first + full * C
                slot = first_slot + full
                load_chunk(problem, row, start, length % C, slot, head, first_v, q, k, do, A, g_sum, guarded)
                scan_chunk(scale, slot, head, first_v, guarded, scores, values, state, state_gradients)
                for i, j in T.Parallel(C, block_v):
                    if i < length % C:
                        dv[row, start + i, head, first_v + j] = guarded.dw[i, j]
            if config.stages:
                for step in T.Pipelined(full, num_stages=config.stages):
                    slot = first_slot + full - 1 - step
                    start = first + (full - 1 - step) * C
                    T.copy(q[row, start : start + C, key_head, 0:rows], pipelined.q)
                    T.copy(k[row, start : start + C, key_head, 0:rows], pipelined.k)
                    T.copy(do[row, start : start + C, head, first_v : first_v + block_v], pipelined.do)
                    T.copy(A[slot, head, 0:C, 0:C], pipelined.A)
                    T.copy(g_sum[slot, head, 0:C], pipelined.g)
                    scan_chunk(scale, slot, head, first_v, pipelined, scores, values, state, state_gradients)
                    T.copy(pipelined.dw, dv[row, start : start + C, head, first_v : first_v + block_v])
            else:
                for step in T.serial(full):
                    slot = first_slot + full - 1 - step
                    start = first + (full - 1 - step) * C
                    load_chunk(problem, row, start, C, slot, head, first_v, q, k, do, A, g_sum, guarded)
                    scan_chunk(scale, slot, head, first_v, guarded, scores, values, state, state_gradients)
                    T.copy(guarded.dw, dv[row, start : start + C, head, first_v : first_v + block_v])

            if problem.has_initial_state:
                write_state(problem, n, head, first_v, state, initial_state_gradient)
            if problem.packed:
                if n == bounds - 2:
                    behind = first + length
                    for step in T.serial(T.ceildiv(tokens - behind, C)):
                        for i, j in T.Parallel(C, block_v):
                            if behind + step * C + i < tokens:
                                dv[0, behind + step * C + i, head, first_v + j] = T.cast(0.0, dtype)

    return state_gradient_scan


TEMPLATE = Template(
    name="state_gradient_scan",
    problem=Problem,
    config=Config,
    arches=tuple(ARCHES),
    arguments=arguments,
    buffers=buffers,
    roles=roles,
    default_config=default_config,
    build=build,
    constraints=(block_divides_values, accumulators_fit, pipeline_has_bulk_copies, stages_are_aligned),
    pass_configs={"tl.enable_fast_math": True},
)
