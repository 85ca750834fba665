"""Gates and write strengths of each chunk, made ready for the kernels that follow.

For every chunk slot and value head, over the tokens i of the chunk:

    g_i     = -exp(A_log) softplus(g_i + dt_bias)     if the gate is computed here, else as given; at least RESET
    g_sum_i = g_0 + ... + g_i
    beta_i  = sigmoid(beta_i), times 2 with negative eigenvalues; else as given

Outputs are float32 and chunk-indexed, [slots, HV, C]: contiguous for whoever reads one chunk of one head. Behind the last
token of a sequence g_sum keeps its last value and beta is 0, so that such tokens neither decay nor write.

It also sets the counters of lists of chunks (macros/chunk_lists.py) to 0 for whoever fills those.

A backward divides by beta. For it, |beta| of a token is at least 2 ** beta_floor: a token that writes nothing then writes a
share too small to be seen.
"""

from dataclasses import dataclass

from .arch import ARCHES, Arch
from .contract import Buffer, Rejection, Role, Template, knob
from .language import T
from .macros.gates import at_least_reset, gate_of_logit
from .macros.sequences import locate_chunk


@dataclass(frozen=True)
class Problem:
    HV: int
    C: int
    gate_dtype: str
    beta_dtype: str
    packed: bool                         # sequences are given by cu_seqlens
    index_dtype: str                     # of cu_seqlens
    gate_in_kernel: bool
    has_dt_bias: bool
    beta_sigmoid: bool
    negative_eigenvalues: bool
    beta_floor: int | None               # None: beta as it is
    clears_counts: bool = False


@dataclass(frozen=True)
class Config:
    heads: int = knob(8, 16, 32, 64, why="value heads per block: 32 fill a line of g, 8 are 2 to 3 times as fast")
    threads: int = knob(128, 256, why="the kernel waits for memory; threads are loads in flight")


def arguments(problem: Problem) -> tuple[str, ...]:
    return ("g", "beta", "A_log", "dt_bias", "cu_seqlens", "g_sum", "beta_chunks", "counts")


def buffers(problem: Problem, config: Config) -> tuple[Buffer, ...]:
    return (
        Buffer("gates", (problem.C, config.heads), "float32"),
        Buffer("strengths", (problem.C, config.heads), "float32"),
    )


def roles(problem: Problem, config: Config) -> tuple[Role, ...]:
    return (Role("all", config.threads, registers=32),)


def heads_not_mostly_idle(problem: Problem, config: Config, arch: Arch) -> Rejection | None:
    if config.heads > 8 and config.heads >= 2 * problem.HV:
        return Rejection(f"a block of {config.heads} heads is at least half empty for HV={problem.HV}")
    return None


def default_config(problem: Problem, arch: Arch) -> Config:
    return Config(heads=8, threads=256)


def build(problem: Problem, config: Config):
    HV, C = problem.HV, problem.C
    B, tokens, slots, bounds = (T.dynamic(name) for name in ("B", "tokens", "slots", "bounds"))
    bands = T.dynamic("bands")

    @T.prim_func
    def gate_cumsum(
        g: T.Tensor((B, tokens, HV), problem.gate_dtype),
        beta: T.Tensor((B, tokens, HV), problem.beta_dtype),
        A_log: T.Tensor((HV,), "float32"),
        dt_bias: T.Tensor((HV,), "float32"),
        cu_seqlens: T.Tensor((bounds,), problem.index_dtype),
        g_sum: T.Tensor((slots, HV, C), "float32"),
        beta_chunks: T.Tensor((slots, HV, C), "float32"),
        counts: T.Tensor((bands,), "int32"),
    ):
        with T.Kernel(slots, T.ceildiv(HV, config.heads), threads=config.threads) as (slot, head_block):
            gates, strengths = (T.alloc_shared(b.shape, b.dtype) for b in buffers(problem, config))
            n, start, valid = locate_chunk(problem.packed, cu_seqlens, bounds - 1, tokens, slot, C)
            row = T.alloc_var("int32")
            row = 0 if problem.packed else n
            if problem.clears_counts:
                if slot == 0 and head_block == 0 and T.get_thread_binding() == 0:
                    for band in T.serial(bands):
                        counts[band] = 0
            if valid > 0:
                for i, j in T.Parallel(C, config.heads):
                    h = head_block * config.heads + j
                    gate = T.alloc_var("float32")
                    strength = T.alloc_var("float32")
                    gate = 0.0
                    strength = 0.0
                    if i < valid and h < HV:
                        gate = T.cast(g[row, start + i, h], "float32")
                        strength = T.cast(beta[row, start + i, h], "float32")
                        if problem.gate_in_kernel:
                            if problem.has_dt_bias:
                                gate = gate + dt_bias[h]
                            gate = gate_of_logit(gate, A_log[h])
                        if problem.beta_sigmoid:
                            strength = T.sigmoid(strength)
                            if problem.negative_eigenvalues:
                                strength = 2.0 * strength
                        if problem.beta_floor is not None:
                            # A choice and not a maximum: a NaN must stay visible.
                            floor = 2.0**problem.beta_floor
                            nearest = T.if_then_else(strength < 0.0, -floor, floor)
                            strength = T.if_then_else(T.abs(strength) < floor, nearest, strength)
                        gate = at_least_reset(gate)
                    gates[i, j] = gate
                    strengths[i, j] = strength
                T.cumsum(gates, dim=0)
                for j, i in T.Parallel(config.heads, C):
                    if head_block * config.heads + j < HV:
                        g_sum[slot, head_block * config.heads + j, i] = gates[i, j]
                        beta_chunks[slot, head_block * config.heads + j, i] = strengths[i, j]

    return gate_cumsum


TEMPLATE = Template(
    name="gate_cumsum",
    problem=Problem,
    config=Config,
    arches=tuple(ARCHES),
    arguments=arguments,
    buffers=buffers,
    roles=roles,
    default_config=default_config,
    build=build,
    constraints=(heads_not_mostly_idle,),
)
