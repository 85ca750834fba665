"""How much of each segment must be scanned: the chunks at its end that its gates have not forgotten, per value head.

    warm_chunks[place, head] = fewest chunks at the end of the segment whose log decays sum to below THRESHOLD
                             = -1 if the whole segment decays by less: then its transfer matrix is needed too

With `backwards` the same of the chunks at the start, for gradients, which come from behind. What is behind the last segment of a
sequence matters there and what is in front of the first does not; a ragged chunk at the end is taken not to decay.

Where it is not `backwards` it also counts the segments before each sequence, by which blocks that take turns find theirs.

The neglected part of the state is at most exp(THRESHOLD) of it, because the delta rule without gates is a contraction for
unit keys and strengths in [0, 2]. One block per place and 32 heads: lanes are heads, warps are chunks. One block more counts.
"""

from dataclasses import dataclass

from .arch import Arch
from .contract import Buffer, Role, Template, knob
from .language import T
from .macros.gates import at_least_reset, gate_of_logit
from .macros.launches import let_the_next_kernel_come, wait_for_the_kernel_before
from .macros.segments import count_segments, locate_segment

# exp(-10) = 4.5e-5 of the state, against the 3e-3 by which bf16 operands round it.
THRESHOLD = -10.0
HEADS = 32


@dataclass(frozen=True)
class Problem:
    HV: int
    C: int
    gate_dtype: str
    packed: bool
    index_dtype: str
    gate_in_kernel: bool
    has_dt_bias: bool
    backwards: bool = False              # from the start of each segment but the first; else from the end of each but the last


@dataclass(frozen=True)
class Config:
    warps: int = knob(4, 8, 16, why="chunks that are summed side by side")


def arguments(problem: Problem) -> tuple[str, ...]:
    return ("g", "A_log", "dt_bias", "cu_seqlens", "warm_chunks", "segments_before", "chunks_per_segment")


def buffers(problem: Problem, config: Config) -> tuple[Buffer, ...]:
    return (Buffer("sums", (config.warps, HEADS), "float32"),)


def roles(problem: Problem, config: Config) -> tuple[Role, ...]:
    return (Role("all", HEADS * config.warps, registers=32),)


def default_config(problem: Problem, arch: Arch) -> Config:
    return Config(warps=16)


def build(problem: Problem, config: Config):
    HV, C, warps = problem.HV, problem.C, config.warps
    B, tokens, bounds, places = (T.dynamic(name) for name in ("B", "tokens", "bounds", "places"))
    N = bounds - 1 if problem.packed else B

    @T.prim_func
    def segment_plan(
        g: T.Tensor((B, tokens, HV), problem.gate_dtype),
        A_log: T.Tensor((HV,), "float32"),
        dt_bias: T.Tensor((HV,), "float32"),
        cu_seqlens: T.Tensor((bounds,), problem.index_dtype),
        warm_chunks: T.Tensor((places, HV), "int32"),
        segments_before: T.Tensor((N + 1,), "int32"),
        chunks_per_segment: T.int32,
    ):
        blocks = places if problem.backwards else places + 1
        with T.Kernel(blocks, T.ceildiv(HV, HEADS), threads=HEADS * warps) as (place, head_block):
            sums = T.alloc_shared((warps, HEADS), "float32")
            wait_for_the_kernel_before()
            let_the_next_kernel_come()
            thread = T.get_thread_binding()
            lane = thread % HEADS
            warp = thread // HEADS
            head = head_block * HEADS + lane
            total = T.alloc_var("float32")
            chunk = T.alloc_var("float32")
            gate = T.alloc_var("float32")
            found = T.alloc_var("int32")
            _n, row, first, length, _slot, segment, last = locate_segment(
                problem.packed, cu_seqlens, N, tokens, place, C, chunks_per_segment
            )
            wanted = segment > 0 if problem.backwards else segment < last
            if length > 0 and wanted:
                total = 0.0
                found = -1
                chunks = length // C     # only the last segment may have a ragged one, behind these
                for turn in T.serial(T.ceildiv(chunks, warps)):
                    chunk = 0.0
                    j = turn * warps + warp
                    if head < HV and j < chunks:
                        at = first + (j if problem.backwards else chunks - 1 - j) * C
                        for i in T.unroll(C):
                            gate = T.cast(g[row, at + i, head], "float32")
                            if problem.gate_in_kernel:
                                if problem.has_dt_bias:
                                    gate = gate + dt_bias[head]
                                gate = gate_of_logit(gate, A_log[head])
                            chunk = chunk + at_least_reset(gate)
                    sums[warp, lane] = chunk
                    T.sync_threads()
                    for w in T.unroll(warps):
                        total = total + sums[w, lane]
                        if found < 0 and total < THRESHOLD:
                            found = turn * warps + w + 1
                    T.sync_threads()
                if head < HV and warp == 0:
                    warm_chunks[place, head] = found
            if not problem.backwards:
                if place == places and head_block == 0:
                    for turn in T.serial(T.ceildiv(N + 1, HEADS * warps)):
                        n = turn * HEADS * warps + thread
                        if n <= N:
                            segments_before[n] = count_segments(problem.packed, cu_seqlens, tokens, n, C, chunks_per_segment)

    return segment_plan


TEMPLATE = Template(
    name="segment_plan",
    problem=Problem,
    config=Config,
    arches=("sm_90a",),                  # programmatic dependent launch
    arguments=arguments,
    buffers=buffers,
    roles=roles,
    default_config=default_config,
    build=build,
    pass_configs={"tl.enable_fast_math": True},
)
