"""The state that enters every segment, from what each segment does to it: S_0 = initial, S_{s+1} = M_s S_s + N_s.

Transposed, as segment_scan stores them: S^T_{s+1} = S^T_s M^T_s + N^T_s, float32 with tf32 products (2e-4 a boundary, against
3e-3 by which bf16 operands round the state in every chunk). A segment that forgets (warm_chunks >= 0) has no M: S = N.
One block owns block_v rows of S^T, that is columns of S, of one sequence and value head, and goes from segment to segment. M is
loaded ahead whether it is wanted or not: a load that waits for the answer costs more than the bytes.
"""

from dataclasses import dataclass

from .arch import Arch
from .contract import Buffer, Role, Template, block_divides_values, knob
from .language import T
from .macros.launches import let_the_next_kernel_come, wait_for_the_kernel_before
from .macros.register_roles import KEYS, in_tiles, state_fits_tiles
from .macros.segments import first_place
from .macros.sequences import sequence_bounds
from .macros.states import read_transposed_state, state_block, state_shape

THREADS = 256


@dataclass(frozen=True)
class Problem:
    HV: int
    K: int
    V: int
    C: int
    packed: bool
    index_dtype: str
    initial_state_dtype: str | None
    state_v_first: bool


@dataclass(frozen=True)
class Config:
    block_v: int = knob(16, 32, 64, why="columns of S per block: fewer give more blocks that read M side by side")
    stages: int = knob(1, 2, why="transfers in flight")


def arguments(problem: Problem) -> tuple[str, ...]:
    return ("transfers", "warm_chunks", "cu_seqlens", "initial_state", "states", "chunks_per_segment", "tokens", "sequences")


def buffers(problem: Problem, config: Config) -> tuple[Buffer, ...]:
    return (
        Buffer("M", (KEYS, KEYS), "float32", config.stages),
        Buffer("N", (config.block_v, KEYS), "float32", config.stages),
        Buffer("state_tile", (config.block_v, KEYS), "float32"),
    )


def roles(problem: Problem, config: Config) -> tuple[Role, ...]:
    return (Role("all", THREADS, registers=2 * config.block_v * KEYS // THREADS + 64),)


def default_config(problem: Problem, arch: Arch) -> Config:
    return Config(block_v=16, stages=2)


def build(problem: Problem, config: Config):
    HV, C, block_v, tiled = problem.HV, problem.C, config.block_v, in_tiles(problem)
    K, V = tiled.K, tiled.V
    places, bounds, batch = (T.dynamic(name) for name in ("places", "bounds", "batch"))
    N = bounds - 1 if problem.packed else batch

    @T.prim_func
    def segment_states(
        transfers: T.Tensor((places, HV, V + K, K), "float32"),
        warm_chunks: T.Tensor((places, HV), "int32"),
        cu_seqlens: T.Tensor((bounds,), problem.index_dtype),
        initial_state: T.Tensor(state_shape(problem, N), problem.initial_state_dtype or "float32"),
        states: T.Tensor((places, HV, V, K), "float32"),
        chunks_per_segment: T.int32,
        tokens: T.int32,
        sequences: T.int32,
    ):
        with T.Kernel(V // block_v * HV * sequences, threads=THREADS) as block:
            M, N_tile, state_tile = (T.alloc_shared(b.shape, b.dtype) for b in buffers(problem, config))
            state = T.alloc_fragment((block_v, K), "float32")
            product = T.alloc_fragment((block_v, K), "float32")
            wait_for_the_kernel_before()
            let_the_next_kernel_come()
            n, head, first_v = state_block(block, tiled, block_v)
            _row, _first, length, _slot = sequence_bounds(problem.packed, cu_seqlens, tokens, n, C)
            place = first_place(problem.packed, cu_seqlens, tokens, n, C, chunks_per_segment)
            T.clear(state)
            if problem.initial_state_dtype is not None:
                read_transposed_state(tiled, initial_state, n, head, first_v, state)
            T.copy(state, states[place, head, first_v : first_v + block_v, 0:K])
            boundaries = T.max(T.ceildiv(T.ceildiv(length, C), chunks_per_segment), 1) - 1
            for s in T.Pipelined(boundaries, num_stages=config.stages):
                T.copy(transfers[place + s, head, V : V + K, 0:K], M)
                T.copy(transfers[place + s, head, first_v : first_v + block_v, 0:K], N_tile)
                wanted = T.alloc_var("int32")
                wanted = warm_chunks[place + s, head]
                T.copy(state, state_tile)
                T.clear(product)
                for part in T.unroll(K // 32):
                    T.gemm(state_tile[:, 32 * part : 32 * part + 32], M[32 * part : 32 * part + 32, :], product)
                for i, j in T.Parallel(block_v, K):
                    # Where M is not wanted nobody wrote it: chosen away, it may be NaN.
                    state[i, j] = N_tile[i, j] + T.if_then_else(wanted < 0, product[i, j], 0.0)
                T.copy(state, states[place + s + 1, head, first_v : first_v + block_v, 0:K])

    return segment_states


TEMPLATE = Template(
    name="segment_states",
    problem=Problem,
    config=Config,
    arches=("sm_90a",),                  # programmatic dependent launch
    arguments=arguments,
    buffers=buffers,
    roles=roles,
    default_config=default_config,
    build=build,
    constraints=(block_divides_values, state_fits_tiles),
)
