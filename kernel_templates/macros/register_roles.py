"""Warp roles of the register-state kernels: how a block walks through its work, and who loads.

A block is persistent. Its work is a list of items: a sequence, or a segment of one, times a value head, times a part of the
state's rows. Every role walks through the same list on its own; barriers say when a shared tile is full and when it is free.
"""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

from ..arch import Arch
from ..contract import Buffer, Rejection, Role
from ..language import T, macro
from .launches import wait_for_the_kernel_before
from .segments import locate_rank
from .sequences import sequence_bounds
from .states import read_transposed_state, state_shape

ROWS = 128                               # rows of the transposed state in an item, 64 for each state warpgroup
KEYS = 128                               # its columns, and those of the tiles of Q and K
HALF = 64                                # columns of one swizzled shared tile
WARP = 32

# 192 + 192 + 104 + 24 registers a thread are all that 512 threads can have. 184 for the state spills, 96 for aux makes ptxas
# serialise wgmma (C7512); no other split compiled.
STATE, AUX, LOADERS = Role("state", 256, 192), Role("aux", 128, 104), Role("loaders", 128, 24)
ROLES_OF_HALVES = Role("state", 128, 216), Role("aux", 128, 216), Role("loaders", 128, 40)     # with one state warpgroup


def parts_of(V: int, rows: int = ROWS) -> int:
    """Items of a sequence, or of a segment, for each value head."""
    return -(-V // rows)


def in_tiles(problem: Any, rows: int = ROWS) -> Any:
    """The problem with K and V as tiles have them: bulk copies fill them up with zeros, and store nothing that is not there."""
    return replace(problem, K=KEYS, V=parts_of(problem.V, rows) * rows)


def shapes_fill_tiles(problem: Any, config: Any, arch: Arch) -> Rejection | None:
    if problem.K != KEYS or problem.V % ROWS:
        return Rejection(f"written for K={KEYS} and V a multiple of {ROWS}; got K={problem.K}, V={problem.V}")
    return shapes_are_covered(problem, config, arch)


def state_fits_tiles(problem: Any, config: Any, arch: Arch) -> Rejection | None:
    if problem.K > KEYS or problem.K % 8 or problem.V % HALF:
        return Rejection(
            f"written for K of at most {KEYS}, a multiple of 8, and V a multiple of {HALF}; got K={problem.K}, V={problem.V}"
        )
    return None


def shapes_are_covered(problem: Any, config: Any, arch: Arch) -> Rejection | None:
    if (refused := state_fits_tiles(problem, config, arch)) is not None:
        return refused
    if problem.C != 64:
        return Rejection(f"written for C=64; got C={problem.C}")
    if problem.dtype != "bfloat16":
        return Rejection(f"written for bfloat16, whose range the rescaled state needs; got {problem.dtype}")
    return None


def allocate(buffers: Sequence[Buffer], barrier_counts: Mapping[str, tuple[int, int]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The shared tiles by name, every one with a leading axis of stages, and the barriers by name: (arrivals, stages)."""
    tiles, barriers = {}, {}
    for buffer in buffers:
        scope = "shared" if buffer.dtype in ("float32", "int32") else "shared.dyn"
        tiles[buffer.name] = T.alloc_shared((buffer.stages, *buffer.shape), buffer.dtype, scope=scope)
    for name, (arrivals, stages) in barrier_counts.items():
        barriers[name] = T.alloc_barrier(arrive_count=[arrivals] * stages)
    return tiles, barriers


def allow_register_indices() -> None:
    """Let registers be indexed inside T.Parallel, where they fold to constants. The check's own option is not registered."""
    import tilelang

    tilelang.analysis.ParallelLocalIndexChecker = lambda: lambda module: module


@dataclass(frozen=True)
class Item:
    """One step of a block."""

    place: object                        # segment, if the problem is split into them; else sequence
    head: object                         # value head
    part: object                         # of the state's rows
    n: object                            # sequence
    row: object                          # batch row
    first: object                        # token
    length: object                       # tokens
    slot: object                         # of the first chunk
    segment: object                      # 0, unless the problem is split
    last: object                         # segment of the sequence


@dataclass(frozen=True)
class Walk:
    """The items of a block: item = block + step * blocks."""

    problem: object
    cu_seqlens: object
    tokens: object
    N: object
    segments_before: object              # of each sequence and of all, if the problem is split into segments
    parts: int                           # items per segment and value head
    L: object                            # chunks per segment
    block: object
    blocks: object
    _: KW_ONLY
    rows: int = ROWS                     # of the state in an item

    @property
    def steps(self):
        segments = self.segments_before[self.N] if self.problem.split else self.N
        return T.ceildiv(segments * self.problem.HV * self.parts - self.block, self.blocks)

    def coordinates(self, step):
        """(rank, value head, part). Neighbours differ in the head: they share Q and K in L2."""
        item = self.block + step * self.blocks
        return item // (self.problem.HV * self.parts), item % self.problem.HV, item // self.problem.HV % self.parts

    @property
    def divides_fast(self):
        """Whether coordinates() may stay expressions. With parts of 24 heads each element of an initial state was divided for
        anew, and a block took 20 us to begin. Where divisors are powers of two, or heads alone, chunks are up to 2 % faster."""
        items = self.problem.HV * self.parts
        return self.parts == 1 or items & (items - 1) == 0

    def chunks(self, item):
        """Chunks of an item that are gone through. An expression: who needs it more than once keeps it in a variable."""
        return T.max(T.ceildiv(item.length, self.problem.C), 0)


@macro
def in_a_variable(value):
    """In a variable: an expression is computed anew wherever it is used."""
    variable = T.alloc_var("int32")
    variable = value
    return variable


@macro
def item_of(walk, step):
    problem, C = walk.problem, walk.problem.C
    rank, head, part = walk.coordinates(step)
    if not walk.divides_fast:
        rank, head, part = in_a_variable(rank), in_a_variable(head), in_a_variable(part)
    if problem.split:
        place, n, row, first, length, slot, segment, last = locate_rank(
            problem.packed, walk.cu_seqlens, walk.segments_before, walk.N, walk.tokens, rank, C, walk.L
        )
        return Item(place, head, part, n, row, first, length, slot, segment, last)
    else:
        row, first, length, slot = sequence_bounds(problem.packed, walk.cu_seqlens, walk.tokens, rank, C)
        return Item(rank, head, part, rank, row, first, length, slot, 0, 0)


@macro
def wait_full(barriers, name, stages, i):
    T.barrier_wait(barriers[name + "_full"][i % stages], i // stages % 2)


@macro
def wait_free(barriers, name, stages, i):
    T.barrier_wait(barriers[name + "_free"][i % stages], (i // stages + 1) % 2)


@macro
def signal(barriers, name, stages, i):
    T.barrier_arrive(barriers[name][i % stages])


def load(tiles, name, stages, i, source, stage=None):
    """The tile `name` by bulk copy, once it is free. `stage` is i % stages, where the caller has that in a variable.

    No macro, which would keep a copy of i."""
    stage = i % stages if stage is None else stage
    wait_free(tiles.barriers, name, stages, i)
    T.evaluate(T.tma_copy(source, getattr(tiles, name)[stage, :, :], barrier=tiles.barriers[name + "_full"][stage]))
    signal(tiles.barriers, name + "_full", stages, i)


@macro
def load_rows(tiles, name, stage, source, count, landed, tails):
    """The same for a chunk of which `count` tokens are the sequence's; the caller waits, and signals that it is full.

    With fewer than C it lands on barrier `landed` first: its foreign rows may hold NaN and are zeroed."""
    tile, barriers = getattr(tiles, name), tiles.barriers
    if count >= tile.shape[1]:
        T.tma_copy(source, tile[stage, :, :], barrier=barriers[name + "_full"][stage])
    else:
        T.tma_copy(source, tile[stage, :, :], barrier=barriers["tail_landed"][landed])
        T.barrier_arrive(barriers["tail_landed"][landed])
        T.barrier_wait(barriers["tail_landed"][landed], tails % 2)
        T.call_extern("handle", "qla_zero_rows", T.access_ptr(tile[stage, 0, 0], "r", 1), count, tile.shape[2] // HALF)
        T.fence_proxy_async()


@macro
def load_keys(config, walk, tiles, k, Ab, inverses_come_late=False, item_at=item_of):
    # K and Ab of every chunk. Where the kernel before makes the inverses, it is waited for in front of the first of them.
    problem, C = walk.problem, walk.problem.C
    i = T.alloc_var("int32")
    tails = T.alloc_var("int32")
    i = 0
    tails = 0
    for step in T.serial(walk.steps):
        item = item_at(walk, step)
        key_head = item.head // (problem.HV // problem.H)
        for j in T.serial(walk.chunks(item)):
            start = item.first + j * C
            count = item.length - j * C
            stage = i % config.key_stages
            wait_free(tiles.barriers, "k", config.key_stages, i)
            load_rows(tiles, "k", stage, k[item.row, start : start + C, key_head, 0 : problem.K], count, 0, tails)
            if count < C:
                tails = tails + 1
            signal(tiles.barriers, "k_full", config.key_stages, i)
            if inverses_come_late:
                if i == 0:
                    wait_for_the_kernel_before()
            load(tiles, "Ab", 2, i, Ab[item.slot + j, item.head, 0:C, 0:C])
            i = i + 1
    if inverses_come_late:
        if i == 0:                       # this block ends behind the kernel before in any case
            wait_for_the_kernel_before()


@macro
def load_values(config, walk, tiles, v, q=None, item_at=item_of):
    # V of every chunk, and Q if it is wanted. Foreign rows of Q only reach rows of O that are not stored, so they may stay.
    problem, C = walk.problem, walk.problem.C
    i = T.alloc_var("int32")
    tails = T.alloc_var("int32")
    i = 0
    tails = 0
    for step in T.serial(walk.steps):
        item = item_at(walk, step)
        key_head = item.head // (problem.HV // problem.H)
        for j in T.serial(walk.chunks(item)):
            start = item.first + j * C
            count = item.length - j * C
            column = item.part * walk.rows
            if q is not None:
                stage = i % config.key_stages
                load(tiles, "q", config.key_stages, i, q[item.row, start : start + C, key_head, 0 : problem.K], stage)
            wait_free(tiles.barriers, "v", 2, i)
            load_rows(tiles, "v", i % 2, v[item.row, start : start + C, item.head, column : column + walk.rows], count, 1, tails)
            if count < C:
                tails = tails + 1
            signal(tiles.barriers, "v_full", 2, i)
            i = i + 1


def initial_state_tensor(problem, N, places):
    """The states that scans begin with: of segments, in whole tiles, or of sequences."""
    if problem.split:
        return T.Tensor((places, problem.HV, in_tiles(problem).V, KEYS), "float32")
    return T.Tensor(state_shape(problem, N), problem.initial_state_dtype or "float32")


@macro
def read_initial_state(problem, item, initial_state, state):
    rows = state.shape[0]
    first_v = item.part * rows
    if problem.split:
        T.copy(initial_state[item.place, item.head, first_v : first_v + rows, 0 : problem.K], state)
    elif problem.initial_state_dtype is None:
        T.clear(state)
    else:
        read_transposed_state(problem, initial_state, item.place, item.head, first_v, state)
