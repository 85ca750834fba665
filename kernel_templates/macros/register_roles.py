"""Warp roles that the register-state kernels share: how a block walks through its work, and who loads K, Ab and the gates.

A block is persistent. Its work is a list of items: a sequence, or a segment of one, times a value head, times a part of the
state's rows. Every role walks through the same list on its own; barriers say when a shared tile is full and when it is free.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..arch import Arch
from ..contract import Buffer, Rejection, Role
from ..language import T, macro
from .gates import LOG2E, at_least_reset, gate_of_logit
from .register_tiles import from_registers, to_registers
from .segments import locate_segment
from .sequences import sequence_bounds

ROWS = 128                               # rows of the transposed state in an item, 64 for each state warpgroup
HALF = 64                                # columns of one swizzled shared tile
GATE_STAGES = 3
RESCALE_BELOW = -40.0                    # log2: 2^40 times a bf16 product is far inside float32
WARP = 32

# 192 + 192 + 104 + 24 registers a thread are all that 512 threads can have. 184 for the state spills, 96 for aux makes ptxas
# serialise wgmma (C7512); no other split compiled.
STATE, AUX, LOADERS = Role("state", 256, 192), Role("aux", 128, 104), Role("loaders", 128, 24)

# Rows of the gates tile, over tokens i: gamma 2^c for W, (gamma_L / gamma) 2^-c' for X, scale gamma 2^c for O, log2 gamma.
GAMMA, TO_END, GAMMA_SCALED, LOG_GAMMA = range(4)


def shapes_are_covered(problem: Any, config: Any, arch: Arch) -> Rejection | None:
    if problem.C != 64 or problem.K != ROWS or problem.V % ROWS:
        return Rejection(f"written for C=64, K={ROWS}, V a multiple of {ROWS}; got C={problem.C}, K={problem.K}, V={problem.V}")
    if problem.dtype != "bfloat16":
        return Rejection(f"written for bfloat16, whose range the rescaled state needs; got {problem.dtype}")
    return None


def allocate(buffers: Sequence[Buffer], barrier_counts: Mapping[str, tuple[int, int]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The shared tiles by name, every one with a leading axis of stages, and the barriers by name: (arrivals, stages)."""
    tiles, barriers = {}, {}
    for buffer in buffers:
        scope = "shared" if buffer.dtype == "float32" else "shared.dyn"
        tiles[buffer.name] = T.alloc_shared((buffer.stages, *buffer.shape), buffer.dtype, scope=scope)
    for name, (arrivals, stages) in barrier_counts.items():
        barriers[name] = T.alloc_barrier(arrive_count=[arrivals] * stages)
    return tiles, barriers


def allow_register_indices() -> None:
    """Let registers be indexed inside T.Parallel, where they fold to constants. The check's own option is not registered."""
    import tilelang

    tilelang.analysis.ParallelLocalIndexChecker = lambda: lambda module: module


@dataclass(frozen=True)
class Walk:
    """The items of a block: item = block + step * blocks."""

    problem: object
    cu_seqlens: object
    tokens: object
    N: object
    places: object                       # segments, if the problem is split into them; else sequences
    parts: int                           # items per segment and value head
    L: object                            # chunks per segment
    block: object
    blocks: object

    @property
    def steps(self):
        return T.ceildiv(self.places * self.problem.HV * self.parts - self.block, self.blocks)

    def coordinates(self, step):
        """(place, value head, part). Neighbours differ in the head: they share Q and K in L2."""
        item = self.block + step * self.blocks
        return item // (self.problem.HV * self.parts), item % self.problem.HV, item // self.problem.HV % self.parts


@macro
def bounds_of(walk, place):
    """(sequence, batch row, first token, tokens, first slot, segment, last segment) of a place."""
    problem, C = walk.problem, walk.problem.C
    if problem.split:
        n, row, first, length, slot, segment, last = locate_segment(
            problem.packed, walk.cu_seqlens, walk.N, walk.tokens, place, C, walk.L
        )
        return n, row, first, length, slot, segment, last
    else:
        row, first, length, slot = sequence_bounds(problem.packed, walk.cu_seqlens, walk.tokens, place, C)
        return place, row, first, length, slot, 0, 0


@macro
def wait_full(barriers, name, stages, i):
    T.barrier_wait(barriers[name + "_full"][i % stages], i // stages % 2)


@macro
def wait_free(barriers, name, stages, i):
    T.barrier_wait(barriers[name + "_free"][i % stages], (i // stages + 1) % 2)


@macro
def signal(barriers, name, stages, i):
    T.barrier_arrive(barriers[name][i % stages])


@macro
def load_rows(source, row, start, head, first_column, columns, count, C, tile, stage, barriers, full, landed, tails):
    """One chunk of K or V by bulk copy, on the barrier named `full`; the caller signals it.

    A chunk with fewer than C tokens lands on a barrier of its own first: its foreign rows may hold NaN and are zeroed."""
    last_column = first_column + columns
    if count >= C:
        T.tma_copy(
            source[row, start : start + C, head, first_column:last_column], tile[stage, :, :], barrier=barriers[full][stage]
        )
    else:
        T.tma_copy(
            source[row, start : start + C, head, first_column:last_column], tile[stage, :, :],
            barrier=barriers["tail_landed"][landed],
        )  # fmt: skip
        T.barrier_arrive(barriers["tail_landed"][landed])
        T.barrier_wait(barriers["tail_landed"][landed], tails % 2)
        T.call_extern("handle", "qla_zero_rows", T.access_ptr(tile[stage, 0, 0], "r", 1), count)
        T.fence_proxy_async()


@macro
def emit_x(half, X, stage, accumulator, registers, lane_offset, factors):
    # X, columns [64 half, 64 half + 64): rows scaled by gamma_L / gamma
    to_registers(64, HALF, accumulator, registers)
    T.call_extern(
        "handle", "qla_scale_rows_and_store", T.address_of(registers[0]), T.access_ptr(X[stage, 0, half * HALF], "r", 64),
        lane_offset, factors[2], factors[3],
    )  # fmt: skip
    from_registers(64, HALF, registers, accumulator)


@macro
def values_minus_decayed(C, u, v_registers, gates, stage, column, first_factors, u_registers, w_registers, w):
    # W = V - gamma o (K S), in bf16
    to_registers(ROWS, C, u, u_registers)
    T.call_extern(
        "handle", "qla_subtract_scaled", T.address_of(u_registers[0]), T.address_of(v_registers[0]), T.address_of(w_registers[0]),
        T.address_of(first_factors[0]), T.access_ptr(gates[stage, GAMMA, column], "r", 1),
    )  # fmt: skip
    from_registers(ROWS, C, w_registers, w)


@macro
def fetch_gate(row, token, end, head, g, gate):
    # As it is in memory: nothing may wait for the load here. No decay behind the end of the sequence.
    gate[0] = 0.0
    if token < end:
        gate[0] = T.cast(g[row, token, head], "float32")


@macro
def log2_decay(problem, token, end, head, A_log, dt_bias, gate, decay):
    # decay[0] <- log2 of the decay of a token, from what fetch_gate found
    decay[0] = gate[0]
    if problem.gate_in_kernel:
        if token < end:
            if problem.has_dt_bias:
                decay[0] = decay[0] + dt_bias[head]
            decay[0] = gate_of_logit(decay[0], A_log[head])
    decay[0] = at_least_reset(decay[0]) * LOG2E


@macro
def sum_gates(problem, row, first, end, chunks, head, lane, scale, g, A_log, dt_bias, gates, state_scale, barriers, i):
    """gamma and its relatives of the chunks of one item, and when the state must be rescaled. i counts chunks of the block.

    S is 2^c times the accumulators. The gates of the next chunk are under way while this one is worked on."""
    C = problem.C
    c = T.alloc_var("float32")
    c_next = T.alloc_var("float32")
    sums = T.alloc_local((3,), "float32")
    upper = T.alloc_local((1,), "float32")
    low = T.alloc_local((1,), "float32")
    high = T.alloc_local((1,), "float32")
    c = 0.0
    fetch_gate(row, first + lane, end, head, g, low)
    fetch_gate(row, first + lane + 32, end, head, g, high)
    for j in T.serial(chunks):
        token = first + j * C + lane
        stage = (i + j) % GATE_STAGES
        log2_decay(problem, token, end, head, A_log, dt_bias, low, sums)
        log2_decay(problem, token + 32, end, head, A_log, dt_bias, high, upper)
        sums[1] = upper[0]
        fetch_gate(row, token + C, end, head, g, low)
        fetch_gate(row, token + C + 32, end, head, g, high)
        T.call_extern("handle", "qla_scan64", T.address_of(sums[0]))
        wait_free(barriers, "gates", GATE_STAGES, i + j)
        c_next = c + sums[2]
        if lane == 0:
            state_scale[stage, 0] = T.if_then_else(c_next < RESCALE_BELOW, T.exp2(c_next), 1.0)
            state_scale[stage, 1] = T.if_then_else(c_next < RESCALE_BELOW, 1.0, T.exp2(c_next))
        c_next = T.if_then_else(c_next < RESCALE_BELOW, 0.0, c_next)
        for e in T.unroll(2):
            gates[stage, LOG_GAMMA, e * 32 + lane] = sums[e]
            gates[stage, GAMMA, e * 32 + lane] = T.exp2(sums[e] + c)
            gates[stage, TO_END, e * 32 + lane] = T.exp2(sums[2] - sums[e] - c_next)
            gates[stage, GAMMA_SCALED, e * 32 + lane] = T.exp2(sums[e] + c) * scale
        c = c_next
        signal(barriers, "gates_full", GATE_STAGES, i + j)
