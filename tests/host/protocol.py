"""Run the roles of a warp-specialised kernel as plain Python, and look for accesses to shared tiles that nothing orders.

A template's build() is executed with a T that records instead of generating code: once for each warpgroup or single warp, which
gives what it does in program order. What orders events of different roles are the barriers alone: check() gives each event a
vector clock, phase by phase, so that it finds every race of the protocol whatever the schedule, and every deadlock.

It knows the two proxies. wgmma and bulk copies read and write shared memory through the async one: what was written by ordinary
stores must be fenced before, by whoever wrote it or by whoever starts the operation, and a tile stays in use until the
operation is waited for. Registers, global memory and values are not looked at.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import qla_jit.kernel_templates

TRACED = "traced_kernel_templates"

# What device helpers do with the shared tiles among their arguments, in order: r, w, or R for all rows of a stage.
HELPERS = {
    "qla_add_scaled_rows": "r", "qla_decay_and_store": "w", "qla_gate_gradient": "R", "qla_keep_and_erase": "r",
    "qla_list_chunk": "",
    "qla_load_columns": "r", "qla_load_first_columns": "r", "qla_load_pair": "r", "qla_load_rows": "r", "qla_load_tile": "r",
    "qla_load_transposed": "r", "qla_lower_triangle": "", "qla_scale_column_pairs": "r", "qla_scale_columns": "r",
    "qla_scale_rows_and_store": "w", "qla_scan64": "", "qla_mark_resets": "",
    "qla_score_gradient": "w", "qla_store_columns": "w",
    "qla_store_accumulator": "",
    "qla_store_diagonal": "w", "qla_store_first_rows": "r", "qla_store_overlap": "rrw", "qla_store_rows": "w",
    "qla_store_scaled": "w", "qla_store_transposed": "w", "qla_subtract_scaled": "r", "qla_zero_first_rows": "",
    "qla_zero_rows": "w", "qla_add_products": "",
}  # fmt: skip


@dataclass(frozen=True)
class Region:
    """A stage of a shared tile, or one row of it where several roles write rows of one stage."""

    tile: str
    stage: int
    row: int | None = None

    def overlaps(self, other: Region) -> bool:
        return (self.tile, self.stage) == (other.tile, other.stage) and (None in (self.row, other.row) or self.row == other.row)


@dataclass(frozen=True)
class Event:
    """What an agent does: read, write, product, load, store (a bulk copy to global memory), fence, arrive, wait, products_done,
    stores_done."""

    kind: str
    regions: tuple[Region, ...] = ()
    barrier: tuple[str, int] | None = None       # (name, stage)
    number: int = 0                              # parity of a wait; operations that may still run
    unused: tuple[str, ...] = ()                 # tiles from which registers were loaded that nobody has used when it arrives
    fresh: tuple[str, ...] = ()                  # tiles that it has written since it last waited for a product, or fenced


@dataclass(frozen=True)
class Agent:
    """A warpgroup or a single warp; its threads do the same."""

    name: str
    thread: int                                  # the first of them
    threads: int


@dataclass
class Trace:
    """What the agents of one block do."""

    agents: list[Agent]
    events: dict[str, list[Event]]
    arrivals: dict[tuple[str, int], int]         # that complete a phase
    waits: dict[str, list[int]] = field(default_factory=dict)            # for the kernel before: behind how many events


def trace(
    template: str,
    problem: Mapping[str, Any],
    config: Mapping[str, Any],
    agents: Sequence[Agent],
    sizes: Mapping[str, int],
    tensors: Mapping[str, Callable[..., Any]],
    scalars: Mapping[str, Any],
    *,
    block: int = 0,
    rows_apart: Sequence[str] = (),
    numbers: Mapping[str, Callable[[], Iterator[int]]] = MappingProxyType({}),
) -> Trace:
    """The events of one block.

    Args:
        sizes: values of the kernel's dynamic dimensions.
        tensors: of global tensors whose elements decide what is done, the element for given indices.
        scalars: the other arguments whose values matter.
        rows_apart: tiles whose rows are written by several agents at a time.
        numbers: of tiles whose elements decide what is done, what an agent reads there, one after the other.
    """
    module = traced_template(template)
    described, chosen = module.Problem(**problem), module.Config(**config)
    tiles = [buffer.name for buffer in module.buffers(described, chosen)]
    found = Trace(list(agents), {}, {})
    for agent in agents:
        read = {tiles.index(name): values() for name, values in numbers.items()}
        recorder = Recorder(agent, sizes, block, [tiles.index(name) for name in rows_apart], read)
        with mock.patch.dict(vars(module.T), recorder.names(), clear=True), tilelang_replaced():
            kernel = module.build(described, chosen)
            shapes = {name: parameter.annotation for name, parameter in inspect.signature(kernel).parameters.items()}
            kernel(**{name: scalars.get(name, Global(tensors.get(name), shape)) for name, shape in shapes.items()})
        assert recorder.lets_come == 1, f"{agent.name} lets the next kernel come, once"
        found.waits[agent.name] = recorder.waits
        named = dict(zip(recorder.barriers, barrier_names(module, described, chosen), strict=True))
        found.events[agent.name] = [renamed(event, tiles, named) for event in recorder.events]
        found.arrivals = {
            (named[number], stage): count for number, counts in recorder.barriers.items() for stage, count in enumerate(counts)
        }
    return found


def barrier_names(module: ModuleType, problem: Any, config: Any) -> list[str]:
    known = {"problem": problem, "config": config}
    return list(module.barrier_counts(*(known[name] for name in inspect.signature(module.barrier_counts).parameters)))


def renamed(event: Event, tiles: Sequence[str], barriers: Mapping[str, str]) -> Event:
    regions = tuple(Region(tiles[int(r.tile)], r.stage, r.row) for r in event.regions)
    barrier = event.barrier and (barriers[event.barrier[0]], event.barrier[1])
    unused, fresh = (tuple(tiles[int(tile)] for tile in told) for told in (event.unused, event.fresh))
    return Event(event.kind, regions, barrier, event.number, unused, fresh)


@functools.cache
def traced_template(name: str) -> ModuleType:
    """A template and what it imports, once more under another name, so that their T may be changed."""
    folder = Path(qla_jit.kernel_templates.__file__).parent
    spec = importlib.util.spec_from_file_location(TRACED, folder / "__init__.py", submodule_search_locations=[str(folder)])
    package = importlib.util.module_from_spec(spec)
    with mock.patch.dict(sys.modules, {TRACED: package}):
        spec.loader.exec_module(package)
        return importlib.import_module(f"{TRACED}.{name}")


@contextlib.contextmanager
def tilelang_replaced() -> Iterator[None]:
    """What templates take from TileLang itself while they are built."""
    layout = SimpleNamespace(make_swizzled_layout=lambda tile: None)
    tilelang = SimpleNamespace(analysis=SimpleNamespace(), layout=layout, language=SimpleNamespace())
    with mock.patch.dict(
        sys.modules, {"tilelang": tilelang, "tilelang.layout": layout, "tilelang.language": tilelang.language}
    ):
        yield


class Global:
    """A tensor in global memory: its elements, where they matter, else something to copy from or to."""

    def __init__(self, element: Callable[..., Any] | None, shape: Sequence[int]) -> None:
        self.element = element
        self.shape = shape

    def __getitem__(self, index: Any) -> Any:
        return self if self.element is None else self.element(*(index if isinstance(index, tuple) else (index,)))

    def __setitem__(self, index: Any, value: Any) -> None:
        pass

    def __float__(self) -> float:
        return 0.5

    def __mul__(self, other: Any) -> float:
        return 0.5


class Registers:
    """Values that nobody looks at."""

    def __init__(self, shape: Sequence[int], dtype: str) -> None:
        self.shape = shape

    def __getitem__(self, index: Any) -> Element:
        return Element(self)

    def __setitem__(self, index: Any, value: Any) -> None:
        pass


class Element(float):
    """One of those values."""

    def __new__(cls, registers: Registers) -> Element:
        element = super().__new__(cls, 0.5)
        element.registers = registers
        return element


@dataclass
class Tile:
    """A tile in shared memory."""

    number: int
    shape: tuple[int, ...]
    recorder: Recorder

    def __hash__(self) -> int:
        return self.number

    def __getitem__(self, index: tuple[Any, ...]) -> Reference | int:
        if self.number not in self.recorder.numbers:
            return Reference(self, index)
        self.recorder.access("read", Reference(self, index))
        return next(self.recorder.numbers[self.number])

    def __setitem__(self, index: tuple[Any, ...], value: Any) -> None:
        self.recorder.access("write", Reference(self, index))


@dataclass(frozen=True)
class Reference:
    tile: Tile
    index: tuple[Any, ...]

    def __truediv__(self, other: Any) -> float:
        self.tile.recorder.access("read", self)
        return 0.5


@dataclass
class Recorder:
    """T, for one agent."""

    agent: Agent
    sizes: Mapping[str, int]
    block: int
    rows_apart: Sequence[int]
    numbers: Mapping[int, Iterator[int]]         # what is read of a tile, by its number
    events: list[Event] = field(default_factory=list)
    barriers: dict[str, list[int]] = field(default_factory=dict)         # arrivals of each stage
    waits: list[int] = field(default_factory=list)                       # for the kernel before: behind how many events
    lets_come: int = 0                           # the kernel behind
    tiles: int = 0
    unused: dict[Registers, str] = field(default_factory=dict)           # registers, and the tile that they were loaded from
    fresh: set[str] = field(default_factory=set)

    def names(self) -> dict[str, Any]:
        def ignored(*args: Any, **kwargs: Any) -> None:
            return None

        return dict(
            macro=lambda function: function, prim_func=lambda function: function, dynamic=self.sizes.__getitem__,
            Tensor=lambda shape, dtype: shape, int32=int, int64=int, uint32=int, float32=float, Kernel=self.kernel,
            annotate_layout=ignored, set_max_nreg=ignored, get_thread_binding=lambda: self.agent.thread,
            GemmWarpPolicy=SimpleNamespace(FullRow=None), serial=lambda extent: range(int(extent)), unroll=range,
            Parallel=lambda *extents: (), clear=ignored,
            ceildiv=lambda a, b: -(-a // b), max=max, min=min, cast=lambda value, dtype: value,
            if_then_else=lambda condition, yes, no: yes if condition else no, exp=ignored_value, exp2=ignored_value,
            log1p=ignored_value, alloc_var=lambda dtype: 0, alloc_local=Registers,
            alloc_fragment=Registers, alloc_shared=self.alloc_shared, alloc_barrier=self.alloc_barrier,
            address_of=lambda element: element, evaluate=ignored, access_ptr=lambda target, *args: target, copy=self.copy,
            tma_copy=self.bulk_copy, tma_store_wait=lambda number: self.record("stores_done", number=number),
            fence_proxy_async=lambda: self.record("fence"), wgmma_gemm=self.product,
            wait_wgmma=lambda number: self.record("products_done", number=number), call_extern=self.helper,
            barrier_wait=lambda barrier, parity: self.record("wait", barrier=barrier, number=parity),
            barrier_arrive=lambda barrier: self.record("arrive", barrier=barrier),
            pdl_sync=lambda: self.waits.append(len(self.events)), pdl_trigger=self.let_come,
        )  # fmt: skip

    def let_come(self) -> None:
        self.lets_come += 1

    def record(self, kind: str, *regions: Region, barrier: tuple[str, int] | None = None, number: int = 0) -> None:
        told = (tuple(self.unused.values()), tuple(self.fresh)) if kind == "arrive" else ((), ())
        self.events.append(Event(kind, regions, barrier, int(number), *told))
        if kind == "write":
            self.fresh |= {region.tile for region in regions}
        elif kind in ("products_done", "fence"):
            self.fresh.clear()

    @contextlib.contextmanager
    def kernel(self, blocks: int, *, threads: int, prelude: str) -> Iterator[int]:
        yield self.block

    def alloc_shared(self, shape: Sequence[int], dtype: str, *, scope: str) -> Tile:
        self.tiles += 1
        return Tile(self.tiles - 1, tuple(shape), self)

    def alloc_barrier(self, *, arrive_count: Sequence[int]) -> list[tuple[str, int]]:
        name = str(len(self.barriers))
        self.barriers[name] = list(arrive_count)
        return [(name, stage) for stage in range(len(arrive_count))]

    def region(self, reference: Reference, *, all_rows: bool = False) -> Region:
        stage, row, *_ = reference.index
        apart = reference.tile.number in self.rows_apart and isinstance(row, int) and not all_rows
        return Region(str(reference.tile.number), int(stage), row if apart else None)

    def access(self, kind: str, *references: Reference) -> None:
        self.record(kind, *(self.region(reference) for reference in references))

    def helper(self, returns: str, name: str, *args: Any) -> None:
        shared = [arg for arg in args if isinstance(arg, Reference)]
        modes = HELPERS[name]
        assert len(shared) == len(modes), f"{name} has {len(shared)} shared arguments; HELPERS says {modes!r}"
        for reference, mode in zip(shared, modes, strict=True):
            self.record("write" if mode == "w" else "read", self.region(reference, all_rows=mode == "R"))
        registers = [arg.registers for arg in args if isinstance(arg, Element)]
        for used in registers:
            self.unused.pop(used, None)
        if name.startswith("qla_load_"):
            self.unused[registers[0]] = str(shared[0].tile.number)

    def product(self, a: Any, b: Any, c: Any, **options: Any) -> None:
        self.access("product", *(operand for operand in (a, b) if isinstance(operand, Reference)))

    def bulk_copy(self, source: Any, target: Any, *, barrier: tuple[str, int] | None = None) -> None:
        if isinstance(target, Reference):
            self.record("load", self.region(target), barrier=barrier)
        else:
            self.access("store", source)

    def copy(self, source: Any, target: Any) -> None:
        if isinstance(source, Reference):        # lowered to a bulk copy that is waited for
            self.access("store", source)
            self.record("stores_done")
        assert not isinstance(target, Reference), "into shared memory only by bulk copies and helpers"


def ignored_value(x: Any) -> float:
    return 0.5


Clock = dict[Any, int]                           # by component: an agent, or what it has in flight of a kind


def join(clock: Clock, other: Clock) -> None:
    for component, time in other.items():
        clock[component] = max(clock.get(component, 0), time)


@dataclass(frozen=True)
class Access:
    """component and time: of the agent, or of the operation in flight, which is over when a clock has that time."""

    what: str
    component: Any
    time: int
    ordinary: bool                               # not through the async proxy

    def over(self, clock: Clock) -> bool:
        return clock.get(self.component, 0) >= self.time


@dataclass
class Phases:
    """A barrier: what is known by whoever has waited for a phase."""

    needed: int
    arrived: int = 0
    clock: Clock = field(default_factory=dict)           # of the phase that is not complete yet
    fenced: Clock = field(default_factory=dict)
    done: list[tuple[Clock, Clock]] = field(default_factory=list)
    waits: list[tuple[int, str, int]] = field(default_factory=list)      # (phase, agent, time)


@dataclass
class State:
    """Of one agent."""

    events: list[Event]
    at: int = 0
    clock: Clock = field(default_factory=dict)           # what is known to have happened
    fenced: Clock = field(default_factory=dict)          # ordinary accesses that the async proxy sees
    issued: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    last_wait: dict[tuple[str, int], tuple[int, int]] = field(default_factory=dict)      # barrier: (phase, parity)


def check(found: Trace) -> list[str]:
    """What is wrong with the protocol, at most once for each pair of places."""
    states = {agent.name: State(found.events[agent.name]) for agent in found.agents}
    barriers = {name: Phases(needed) for name, needed in found.arrivals.items()}
    reads: dict[Region, list[Access]] = defaultdict(list)
    writes: dict[Region, list[Access]] = defaultdict(list)
    problems: dict[str, None] = {}
    # Copies fill tiles again as soon as they are free, and read them as soon as they are full. An arrival does not wait for
    # loads and stores in front of it (docs/tilelang.md).
    everything = [event for events in found.events.values() for event in events]
    filled, read_out = (
        {region.tile for event in everything if event.kind == kind for region in event.regions} for kind in ("load", "store")
    )

    def ordered(state: State, what: str, region: Region, access: Access, *, writes_too: bool) -> None:
        for kept, verb in ((writes, "written"), (reads, "read")) if writes_too else ((writes, "written"),):
            for other in kept:
                if other.overlaps(region):
                    for earlier in kept[other]:
                        if not earlier.over(state.clock) and earlier.component != access.component:
                            problems[f"{what}: {region.tile} is still {verb} by {earlier.what}"] = None
                        elif earlier.ordinary and not access.ordinary and verb == "written" and not earlier.over(state.fenced):
                            problems[f"{what}: {region.tile} was written by {earlier.what} and not fenced"] = None

    def note(kept: dict[Region, list[Access]], region: Region, access: Access) -> None:
        kept[region] = [a for a in kept[region] if a.component != access.component] + [access]

    def step(agent: Agent, state: State, event: Event) -> bool:
        """Whether the agent could go on."""
        name, clock = agent.name, state.clock
        what = f"{name} {event.kind}"
        if event.kind == "wait":
            phases = barriers[event.barrier]
            before, parity = state.last_wait.get(event.barrier, (-1, 1))
            phase = before if parity == event.number else before + 1
            if phase >= len(phases.done):
                return False
            if phase < len(phases.done) - 1:
                problems[f"{name} is overtaken while it waits at {event.barrier[0]}"] = None
            if phase >= 0:
                join(clock, phases.done[phase][0])
                join(state.fenced, phases.done[phase][1])
            state.last_wait[event.barrier] = phase, event.number
        clock[name] = clock.get(name, 0) + 1
        if event.kind == "wait":
            phases.waits.append((phase, name, clock[name]))
        elif event.kind in ("read", "write"):
            access = Access(what, name, clock[name], ordinary=True)
            for region in event.regions:
                ordered(state, what, region, access, writes_too=event.kind == "write")
                note(writes if event.kind == "write" else reads, region, access)
        elif event.kind in ("product", "store", "load"):
            component = (event.kind, name, event.barrier)
            state.issued[component] += 1
            access = Access(what, component, state.issued[component], ordinary=False)
            for region in event.regions:
                ordered(state, what, region, access, writes_too=event.kind == "load")
                note(writes if event.kind == "load" else reads, region, access)
            if event.kind == "load":
                join(barriers[event.barrier].clock, {component: access.time})
        elif event.kind in ("products_done", "stores_done"):
            component = ("product" if event.kind == "products_done" else "store", name, None)
            join(clock, {component: max(state.issued[component] - event.number, 0)})
        elif event.kind == "fence":
            join(state.fenced, clock)
        elif event.kind == "arrive":
            for tile in filled.intersection(event.unused):
                if event.barrier[0] == f"{tile}_free":
                    problems[f"{what}: {tile} is free before what was loaded from it has been used"] = None
            for tile in read_out.intersection(event.fresh):
                if event.barrier[0] == f"{tile}_full":
                    problems[f"{what}: {tile} is full at once behind its stores"] = None
            phases = barriers[event.barrier]
            join(phases.clock, clock)
            join(phases.fenced, state.fenced)
            phases.arrived += agent.threads
            if phases.arrived > phases.needed:
                problems[f"{what}: more arrivals at {event.barrier[0]} than the {phases.needed} of a phase"] = None
            if phases.arrived == phases.needed:
                # A phase later, a parity means another phase: whoever waits for the one before must have been told.
                for phase, waiter, time in phases.waits:
                    if phase == len(phases.done) - 1 and phases.clock.get(waiter, 0) < time:
                        problems[f"{waiter} may be overtaken while it waits at {event.barrier[0]}"] = None
                phases.waits = [wait for wait in phases.waits if wait[0] >= len(phases.done)]
                phases.done.append((dict(phases.clock), dict(phases.fenced)))
                phases.arrived = 0
        return True

    while True:
        moved = False
        for agent in found.agents:
            state = states[agent.name]
            while state.at < len(state.events) and step(agent, state, state.events[state.at]):
                state.at += 1
                moved = True
        if not moved:
            break
    for name, state in states.items():
        if state.at < len(state.events):
            event = state.events[state.at]
            problems[f"{name} waits for ever at {event.barrier[0]}, event {state.at} of {len(state.events)}"] = None
    for name, phases in barriers.items():
        if phases.arrived:
            problems[f"{name[0]} ends in the middle of a phase"] = None
    return list(problems)
