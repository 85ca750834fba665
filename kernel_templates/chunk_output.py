"""The output of each chunk from the state that enters it and the values it writes.

    P = Gamma o (Q K^T) on and below the diagonal, Gamma_ij = exp(g_sum_i - g_sum_j)
    O = scale (gamma o (Q S) + P V_new)

Chunks are independent: one block computes block_v columns of one chunk of one value head. Rows of Q and K behind the end
of a sequence may hold anything, NaN included: a row of O depends on its own row of Q and on earlier rows of K only, and
rows that are no token of the sequence are not stored. Tokens behind the last packed sequence get O = 0.
"""

from dataclasses import dataclass

from .arch import ARCHES, Arch
from .contract import Buffer, Role, Template, block_divides_values, knob, pipeline_has_bulk_copies, warps_have_work
from .language import T, macro
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


@dataclass(frozen=True)
class Config:
    block_v: int = knob(32, 64, 96, 128, why="columns of O per block: more repeat Q K^T less, fewer fit more blocks on an SM")
    threads: int = knob(64, 128, 256, why="256 halve the accumulators per thread; a chunk of 16 has work for 64")
    stages: int = knob(0, 1, 2, 3, why="columns of Q and K in flight; 0: no pipeline, for chips without bulk copies")


def arguments(problem: Problem) -> tuple[str, ...]:
    return ("q", "k", "v_new", "states", "g_sum", "cu_seqlens", "o", "scale")


def buffers(problem: Problem, config: Config) -> tuple[Buffer, ...]:
    C, block_k, dtype, stages = problem.C, keys_at_a_time(problem), problem.dtype, max(config.stages, 1)
    return (
        Buffer("q_tile", (C, block_k), dtype, stages),
        Buffer("k_tile", (C, block_k), dtype, stages),
        Buffer("state_tile", (block_k, config.block_v), dtype, stages),
        Buffer("v_new_tile", (C, config.block_v), dtype),
        Buffer("p_tile", (C, C), dtype),
        Buffer("o_tile", (C, config.block_v), dtype),
        Buffer("g_tile", (C,), "float32"),
    )


def keys_at_a_time(problem: Problem) -> int:
    """Columns of Q and K in shared memory. With all 256 one block fits an SM and waits for each of its loads: 1.9 ms, not 0.6."""
    return problem.K if problem.K <= 96 else 64


def roles(problem: Problem, config: Config) -> tuple[Role, ...]:
    accumulators = problem.C * (problem.C + config.block_v) // config.threads
    return (Role("all", config.threads, registers=accumulators + 48),)


def default_config(problem: Problem, arch: Arch) -> Config:
    threads = 64 if problem.C == 16 else 128
    return TEMPLATE.first_allowed(
        problem, arch, (Config(block_v, threads, stages) for stages in (2, 0) for block_v in (128, 64, 96, 32))
    )


@macro
def masked_scores(C, g_tile, scores, p_tile):
    # P = Gamma o (Q K^T), lower triangle. Above the diagonal nothing is kept: there K may be foreign and Gamma overflow.
    for i, j in T.Parallel(C, C):
        decay = decay_between(g_tile, i, j)
        scores[i, j] = T.if_then_else(i >= j, scores[i, j] * decay, 0.0)
    T.copy(scores, p_tile)


def build(problem: Problem, config: Config):
    H, HV, K, V, C, dtype = problem.H, problem.HV, problem.K, problem.V, problem.C, problem.dtype
    block_k, block_v = keys_at_a_time(problem), config.block_v
    B, tokens, slots, bounds = (T.dynamic(name) for name in ("B", "tokens", "slots", "bounds"))

    @T.prim_func
    def chunk_output(
        q: T.Tensor((B, tokens, H, K), dtype),
        k: T.Tensor((B, tokens, H, K), dtype),
        v_new: T.Tensor((slots, HV, C, V), dtype),
        states: T.Tensor((slots, HV, K, V), dtype),
        g_sum: T.Tensor((slots, HV, C), "float32"),
        cu_seqlens: T.Tensor((bounds,), problem.index_dtype),
        o: T.Tensor((B, tokens, HV, V), dtype),
        scale: T.float32,
    ):
        # Heads vary fastest: the blocks in flight share the Q and K of a chunk in L2. Only x may exceed 65,535 blocks.
        with T.Kernel(HV * slots, V // block_v, threads=config.threads) as (block, value_block):
            head = block % HV
            slot = block // HV
            q_tile, k_tile, state_tile, v_new_tile, p_tile, o_tile, g_tile = (
                T.alloc_shared(b.shape, b.dtype) for b in buffers(problem, config)
            )
            scores = T.alloc_fragment((C, C), "float32")
            output = T.alloc_fragment((C, block_v), "float32")
            n, start, valid = locate_chunk(problem.packed, cu_seqlens, bounds - 1, tokens, slot, C)
            row = T.alloc_var("int32")
            row = 0 if problem.packed else n
            key_head = head // (HV // H)
            first_v = value_block * block_v

            if valid > 0:
                T.copy(v_new[slot, head, 0:C, first_v : first_v + block_v], v_new_tile)
                T.copy(g_sum[slot, head, 0:C], g_tile)
                T.clear(output)
                T.clear(scores)
                for part in T.Pipelined(K // block_k, num_stages=config.stages):
                    first_k = part * block_k
                    T.copy(q[row, start : start + C, key_head, first_k : first_k + block_k], q_tile)
                    T.copy(states[slot, head, first_k : first_k + block_k, first_v : first_v + block_v], state_tile)
                    T.copy(k[row, start : start + C, key_head, first_k : first_k + block_k], k_tile)
                    T.gemm(q_tile, state_tile, output)
                    T.gemm(q_tile, k_tile, scores, transpose_B=True)
                for i, j in T.Parallel(C, block_v):
                    output[i, j] = output[i, j] * T.exp2(g_tile[i] * LOG2E)
                masked_scores(C, g_tile, scores, p_tile)
                T.gemm(p_tile, v_new_tile, output)
                for i, j in T.Parallel(C, block_v):
                    output[i, j] = output[i, j] * scale
                T.copy(output, o_tile)
                if valid == C:
                    T.copy(o_tile, o[row, start : start + C, head, first_v : first_v + block_v])
                else:
                    for i, j in T.Parallel(C, block_v):
                        if i < valid:
                            o[row, start + i, head, first_v + j] = o_tile[i, j]
            if problem.packed:
                if n == bounds - 2 and valid < C:
                    for i, j in T.Parallel(C, block_v):
                        if i >= valid and start + i >= cu_seqlens[n + 1] and start + i < tokens:
                            o[0, start + i, head, first_v + j] = T.cast(0.0, dtype)

    return chunk_output


TEMPLATE = Template(
    name="chunk_output",
    problem=Problem,
    config=Config,
    arches=tuple(ARCHES),
    arguments=arguments,
    buffers=buffers,
    roles=roles,
    default_config=default_config,
    build=build,
    constraints=(block_divides_values, warps_have_work, pipeline_has_bulk_copies),
    pass_configs={"tl.enable_fast_math": True},
)
