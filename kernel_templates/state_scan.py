"""The recurrence over chunks: the state that enters each chunk, the values it writes, and the final state.

Per sequence and value head, with gamma = exp(g_sum), gamma_L its last value, and A from triangular_solve:

    W     = V - gamma o (K S)
    V_new = A W                                         [slots, HV, C, V]
    S'    = gamma_L S + K^T ((gamma_L / gamma) o V_new)

S enters chunk j as states[slot(j)], [slots, HV, K, V]. One block owns block_v columns of S for a whole sequence; S stays in
float32 accumulators and is rounded to the input dtype only as a matrix operand. Full chunks come through the software
pipeline; the ragged last chunk is loaded with guards, because tokens behind the end of a sequence may hold NaN.
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
from .macros.gates import LOG2E
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
    initial_state_dtype: str | None      # None: the state starts at zero
    has_final_state: bool
    state_v_first: bool                  # initial and final state are [N, HV, V, K]


@dataclass(frozen=True)
class Config:
    block_v: int = knob(32, 64, 96, 128, why="columns of S per block: fewer give more blocks, more reuse K and A")
    threads: int = knob(128, 256, why="256 halve the accumulators per thread, for K = 256")
    stages: int = knob(0, 1, 2, 3, why="chunks of K, V and A in flight; 0: no pipeline, for chips without bulk copies")


def arguments(problem: Problem) -> tuple[str, ...]:
    return ("k", "v", "A", "g_sum", "cu_seqlens", "initial_state", "states", "v_new", "final_state")


def buffers(problem: Problem, config: Config) -> tuple[Buffer, ...]:
    C, K, dtype = problem.C, padded_keys(problem), problem.dtype

    def chunk(kind: str, stages: int) -> tuple[Buffer, ...]:
        return (
            Buffer(f"k_{kind}", (C, K), dtype, stages),
            Buffer(f"v_{kind}", (C, config.block_v), dtype, stages),
            Buffer(f"A_{kind}", (C, C), dtype, stages),
            Buffer(f"g_{kind}", (C,), "float32", stages),
        )

    return (
        *(chunk("pipelined", config.stages) if config.stages else ()),
        # Guarded loads have tiles of their own: TileLang does not let go of a pipelined buffer after its loop.
        *chunk("guarded", 1),
        Buffer("state_tile", (K, config.block_v), dtype),
        Buffer("w_tile", (C, config.block_v), dtype),
        Buffer("v_new_tile", (C, config.block_v), dtype),
        Buffer("v_decayed_tile", (C, config.block_v), dtype),
    )


def roles(problem: Problem, config: Config) -> tuple[Role, ...]:
    accumulators = (padded_keys(problem) + 2 * problem.C) * config.block_v // config.threads
    return (Role("all", config.threads, registers=min(255, accumulators + 64)),)


def accumulators_fit(problem: Problem, config: Config, arch: Arch) -> Rejection | None:
    needed = (padded_keys(problem) + problem.C) * config.block_v // config.threads
    if needed > 192:                     # S and one product; beyond that the compiler spills inside the loop
        return Rejection(f"S and one product take {needed} registers a thread; 192 leave room for operands")
    return None


def default_config(problem: Problem, arch: Arch) -> Config:
    # K = 256, V = 512: 64 columns take 1.6 times as long for a single sequence, and 0.8 times for eight of them.
    block_v = 32 if problem.V % 64 or problem.K > 128 else 64
    return TEMPLATE.first_allowed(problem, arch, (Config(v, 128, stages) for v in (block_v, 32) for stages in (2, 1, 0)))


@dataclass(frozen=True)
class Tiles:
    """The shared tiles of one block."""

    k: object
    v: object
    A: object
    g: object
    state: object
    w: object
    v_new: object
    v_decayed: object


@macro
def load_chunk(problem, row, start, valid, slot, head, first_v, k, v, A, g_sum, tiles):
    # what a chunk needs, with guards
    load_guarded(k, row, start, valid, head // (problem.HV // problem.H), 0, problem.K, tiles.k)
    load_guarded(v, row, start, valid, head, first_v, tiles.v.shape[1], tiles.v)
    T.copy(A[slot, head, 0 : problem.C, 0 : problem.C], tiles.A)
    T.copy(g_sum[slot, head, 0 : problem.C], tiles.g)


@macro
def enter_chunk(slot, head, first_v, tiles, state, states):
    # states[slot] <- S
    T.copy(state, tiles.state)
    T.copy(tiles.state, states[slot, head, 0 : tiles.state.shape[0], first_v : first_v + tiles.v.shape[1]])


@macro
def write_values(slot, head, first_v, tiles, values, v_new):
    # W = V - gamma o (K S);  V_new = A W
    C, block_v = tiles.v.shape
    T.gemm(tiles.k, tiles.state, values, clear_accum=True)
    for i, j in T.Parallel(C, block_v):
        values[i, j] = tiles.v[i, j] - T.exp2(tiles.g[i] * LOG2E) * values[i, j]
    T.copy(values, tiles.w)
    T.gemm(tiles.A, tiles.w, values, clear_accum=True)
    T.copy(values, tiles.v_new)
    T.copy(tiles.v_new, v_new[slot, head, 0:C, first_v : first_v + block_v])


@macro
def update_state(tiles, values, state):
    # S <- gamma_L S + K^T ((gamma_L / gamma) o V_new)
    C, block_v = tiles.v.shape
    for i, j in T.Parallel(C, block_v):
        values[i, j] = values[i, j] * T.exp2((tiles.g[C - 1] - tiles.g[i]) * LOG2E)
    T.copy(values, tiles.v_decayed)
    for i, j in T.Parallel(tiles.state.shape[0], block_v):
        state[i, j] = state[i, j] * T.exp2(tiles.g[C - 1] * LOG2E)
    T.gemm(tiles.k, tiles.v_decayed, state, transpose_A=True)


@macro
def scan_chunk(slot, head, first_v, tiles, state, values, states, v_new):
    enter_chunk(slot, head, first_v, tiles, state, states)
    write_values(slot, head, first_v, tiles, values, v_new)
    update_state(tiles, values, state)


def build(problem: Problem, config: Config):
    H, HV, K, V, C, dtype = problem.H, problem.HV, problem.K, problem.V, problem.C, problem.dtype
    block_v, rows = config.block_v, padded_keys(problem)
    B, tokens, slots, bounds = (T.dynamic(name) for name in ("B", "tokens", "slots", "bounds"))
    N = bounds - 1 if problem.packed else B

    @T.prim_func
    def state_scan(
        k: T.Tensor((B, tokens, H, K), dtype),
        v: T.Tensor((B, tokens, HV, V), dtype),
        A: T.Tensor((slots, HV, C, C), dtype),
        g_sum: T.Tensor((slots, HV, C), "float32"),
        cu_seqlens: T.Tensor((bounds,), problem.index_dtype),     # before initial_state: N is taken from it, that may be absent
        initial_state: T.Tensor(state_shape(problem, N), problem.initial_state_dtype or "float32"),
        states: T.Tensor((slots, HV, K, V), dtype),
        v_new: T.Tensor((slots, HV, C, V), dtype),
        final_state: T.Tensor(state_shape(problem, N), "float32"),
    ):
        with T.Kernel(V // block_v * HV * N, threads=config.threads) as block:
            n, head, first_v = state_block(block, problem, block_v)
            tiles = [T.alloc_shared(b.shape, b.dtype) for b in buffers(problem, config)]
            guarded = Tiles(*tiles[-8:])
            pipelined = Tiles(*tiles[:4], *tiles[-4:])
            state = T.alloc_fragment((rows, block_v), "float32")
            values = T.alloc_fragment((C, block_v), "float32")
            row, first, length, first_slot = sequence_bounds(problem.packed, cu_seqlens, tokens, n, C)
            key_head = head // (HV // H)

            T.clear(state)
            if problem.initial_state_dtype is not None:
                read_state(problem, initial_state, n, head, first_v, state)

            if config.stages:
                for chunk in T.Pipelined(length // C, num_stages=config.stages):
                    slot = first_slot + chunk
                    start = first + chunk * C
                    T.copy(k[row, start : start + C, key_head, 0:rows], pipelined.k)
                    T.copy(v[row, start : start + C, head, first_v : first_v + block_v], pipelined.v)
                    T.copy(A[slot, head, 0:C, 0:C], pipelined.A)
                    T.copy(g_sum[slot, head, 0:C], pipelined.g)
                    scan_chunk(slot, head, first_v, pipelined, state, values, states, v_new)
                # An `if`, not a loop from length // C on: TileLang takes a loop of at most one round for one round.
                if length % C > 0:
                    slot = first_slot + length // C
                    start = first + length // C * C
                    load_chunk(problem, row, start, length % C, slot, head, first_v, k, v, A, g_sum, guarded)
                    scan_chunk(slot, head, first_v, guarded, state, values, states, v_new)
            else:
                for chunk in T.serial(T.ceildiv(length, C)):
                    slot = first_slot + chunk
                    start = first + chunk * C
                    load_chunk(problem, row, start, length - chunk * C, slot, head, first_v, k, v, A, g_sum, guarded)
                    scan_chunk(slot, head, first_v, guarded, state, values, states, v_new)

            if problem.has_final_state:
                write_state(problem, n, head, first_v, state, final_state)

    return state_scan


TEMPLATE = Template(
    name="state_scan",
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
