"""The gradient of the state behind every segment: that of the final state, and dS_{s-1} = M_s^T dS_s + D_s towards the first.

M_s is what segment_scan found for the forward. D_s, what a segment adds by itself, is what register_gradient_scan found with
`transfers_only`. That began the last segment of a sequence with the gradient of the final state, unless the head forgets it, so
dS_{last-1} = D_last, and the M that segment_scan does not have is not needed. A segment that forgets (warm_chunks >= 0) has none
either: dS_{s-1} = D_s.

Transposed, as segment_scan stores them: dS^T_{s-1} = dS^T_s M_s + D^T_s, float32 with tf32 products. One block owns block_v rows
of dS^T, that is columns of dS, of one sequence and value head, and goes from segment to segment. M is loaded ahead whether it
is wanted or not, as in segment_states.
"""

from dataclasses import dataclass

from .arch import Arch
from .contract import Buffer, Role, Template, block_divides_values, knob
from .language import T
from .macros.launches import let_the_next_kernel_come, wait_for_the_kernel_before
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
    has_final_state_gradient: bool       # else it is zero
    state_v_first: bool                  # the gradient of the final state is [N, HV, V, K]


@dataclass(frozen=True)
class Config:
    block_v: int = knob(16, 32, 64, why="columns of dS per block: fewer give more blocks that read M side by side")
    stages: int = knob(1, 2, why="transfers in flight")


def arguments(problem: Problem) -> tuple[str, ...]:
    return (
        "transfers", "warm_chunks", "cu_seqlens", "final_state_gradient", "own_gradients", "gradients",
        "chunks_per_segment", "tokens", "sequences",
    )  # fmt: skip


def buffers(problem: Problem, config: Config) -> tuple[Buffer, ...]:
    K = problem.K
    return (
        Buffer("M", (K, K), "float32", config.stages),
        Buffer("own", (config.block_v, K), "float32", config.stages),
        Buffer("gradient_tile", (config.block_v, K), "float32"),
    )


def roles(problem: Problem, config: Config) -> tuple[Role, ...]:
    return (Role("all", THREADS, registers=2 * config.block_v * problem.K // THREADS + 64),)


def default_config(problem: Problem, arch: Arch) -> Config:
    return Config(block_v=16, stages=2)


def build(problem: Problem, config: Config):
    HV, K, V, C, block_v = problem.HV, problem.K, problem.V, problem.C, config.block_v
    places, bounds, batch = (T.dynamic(name) for name in ("places", "bounds", "batch"))
    N = bounds - 1 if problem.packed else batch

    @T.prim_func
    def segment_state_gradients(
        transfers: T.Tensor((places, HV, V + K, K), "float32"),
        warm_chunks: T.Tensor((places, HV), "int32"),
        cu_seqlens: T.Tensor((bounds,), problem.index_dtype),
        final_state_gradient: T.Tensor(state_shape(problem, N), "float32"),
        own_gradients: T.Tensor((places, HV, V, K), "float32"),
        gradients: T.Tensor((places, HV, V, K), "float32"),
        chunks_per_segment: T.int32,
        tokens: T.int32,
        sequences: T.int32,
    ):
        with T.Kernel(V // block_v * HV * sequences, threads=THREADS) as block:
            M, own, gradient_tile = (T.alloc_shared(b.shape, b.dtype) for b in buffers(problem, config))
            gradient = T.alloc_fragment((block_v, K), "float32")
            product = T.alloc_fragment((block_v, K), "float32")
            wait_for_the_kernel_before()
            let_the_next_kernel_come()
            n, head, first_v = state_block(block, problem, block_v)
            _row, _first, length, _slot = sequence_bounds(problem.packed, cu_seqlens, tokens, n, C)
            boundaries = T.alloc_var("int32")
            last_place = T.alloc_var("int32")
            boundaries = T.max(T.ceildiv(T.ceildiv(length, C), chunks_per_segment), 1) - 1
            last_place = first_place(problem.packed, cu_seqlens, tokens, n, C, chunks_per_segment) + boundaries
            T.clear(gradient)
            if problem.has_final_state_gradient:
                read_transposed_state(problem, final_state_gradient, n, head, first_v, gradient)
            T.copy(gradient, gradients[last_place, head, first_v : first_v + block_v, 0:K])
            for s in T.Pipelined(boundaries, num_stages=config.stages):
                T.copy(transfers[last_place - s, head, V : V + K, 0:K], M)
                T.copy(own_gradients[last_place - s, head, first_v : first_v + block_v, 0:K], own)
                warm = T.alloc_var("int32")
                warm = warm_chunks[last_place - s, head]
                T.copy(gradient, gradient_tile)
                T.clear(product)
                for part in T.unroll(K // 32):
                    columns = slice(32 * part, 32 * part + 32)
                    T.gemm(gradient_tile[:, columns], M[:, columns], product, transpose_B=True)
                for i, j in T.Parallel(block_v, K):
                    # Where M is not wanted nobody wrote it: chosen away, it may be NaN.
                    wanted = s > 0 and warm < 0
                    gradient[i, j] = own[i, j] + T.if_then_else(wanted, product[i, j], 0.0)
                T.copy(gradient, gradients[last_place - s - 1, head, first_v : first_v + block_v, 0:K])

    return segment_state_gradients


TEMPLATE = Template(
    name="segment_state_gradients",
    problem=Problem,
    config=Config,
    arches=("sm_90a",),                  # programmatic dependent launch
    arguments=arguments,
    buffers=buffers,
    roles=roles,
    default_config=default_config,
    build=build,
    constraints=(block_divides_values,),
)
