"""Launch a warp-specialised kernel on the CPU, from its template: what it computes. protocol.py looks at how it synchronises.

A template's build() is executed with a T that computes. Each warpgroup or single warp is a Python thread, of which one runs at a
time, until a barrier makes it wait for the others. A value of a warpgroup's threads is an array over threads, and so are their
registers: where an element of an accumulator or of a swizzled tile lies is computed by the template, and not taken for granted.
Python's `if` cannot be in two minds, so a warp whose lanes go different ways is run lane by lane.

Device helpers are CUDA text; emulated_helpers.py has the same in numpy. Bulk copies and products happen when they are issued, but
an accumulator may not be touched before it is waited for.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from emulated_helpers import HELPERS, LANE_HELPERS, WARPGROUP
from emulated_memory import (
    Array,
    Fragment,
    Global,
    Loop,
    Numbers,
    Pointer,
    Reference,
    Registers,
    cast,
    if_then_else,
    rounded,
    simplified,
    value_of,
)
from protocol import barrier_names, tilelang_replaced, traced_template

WARP = 32


class Ended(BaseException):
    """Another agent failed."""


class Agent(threading.Thread):
    """A warpgroup, a single warp, or a lane of one."""

    def __init__(self, block: Block, first_thread: int, threads: int, work: Callable[[], None]) -> None:
        super().__init__(name=f"threads {first_thread} to {first_thread + threads - 1}", daemon=True)
        self.block, self.first_thread, self.threads, self.work = block, first_thread, threads, work
        self.lane = first_thread % 32
        self.loop: Loop | None = None
        self.products: list[tuple[Fragment, Any]] = []       # in flight: accumulator, operand
        self.tiles = self.barriers = self.meetings = 0
        self.may_go_on: Callable[[], bool] = lambda: True
        self.waits_for = "its turn"
        self.turn = threading.Semaphore(0)
        self.failure: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self.wait_until(self.may_go_on, self.waits_for)
            self.work()
        except BaseException as failure:
            self.failure = failure
        self.waits_for = ""
        self.block.turn.release()

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        self.may_go_on, self.waits_for = condition, what
        self.block.turn.release()
        self.turn.acquire()
        if self.block.over:
            raise Ended

    def first_row(self, rows: int) -> int:
        """Of the 64 that a warpgroup holds of a fragment: one of `rows` is spread over rows / 64 warpgroups."""
        assert self.threads == WARPGROUP
        return self.first_thread // WARPGROUP % (rows // 64) * 64

    def values_of_warp(self, value: Any) -> list[Any]:
        """What each lane of the warp brought, once all have come."""
        assert self.threads == 1, "a warp that exchanges values is run lane by lane"
        self.meetings += 1
        meeting = self.block.meetings[self.first_thread // 32, self.meetings]
        meeting[self.lane] = value
        if len(meeting) < 32:
            self.wait_until(lambda: len(meeting) == 32, "the other lanes")
        return [meeting[lane] for lane in range(32)]


class Barrier:
    """Phases of an mbarrier."""

    def __init__(self, name: str, needed: int) -> None:
        self.name, self.needed = name, needed
        self.arrived = self.done = 0


class Block:
    """T, for one block of a kernel."""

    def __init__(self, number: int, sizes: Mapping[str, int], tile_names: Sequence[str], barrier_names: Sequence[str]) -> None:
        self.number, self.sizes, self.tile_names, self.barrier_names = number, sizes, tile_names, barrier_names
        self.agent: Agent = None         # the one that runs
        self.turn = threading.Semaphore(0)
        self.over = False
        self.blocks = 0                  # of the kernel
        self.tiles: list[Array] = []
        self.barriers: list[list[Barrier]] = []
        self.meetings: dict[tuple[int, int], dict[int, Any]] = defaultdict(dict)
        self.swizzled: set[str] = set()  # tiles that helpers take to be so
        self.laid_out: set[str] = set()  # those that are

    def run(self, work: Callable[[], None], warpgroups: int, warps: Sequence[int], by_lane: Sequence[int]) -> None:
        """`work` by each of the warpgroups and single warps; of the latter those in by_lane as 32 agents."""
        spans = [(number * WARPGROUP, WARPGROUP) for number in range(warpgroups)]
        for warp in warps:
            spans += [(warp * 32 + lane, 1) for lane in range(32)] if warp in by_lane else [(warp * 32, WARP)]
        agents = []
        for first, threads in spans:
            agents.append(Agent(self, first, threads, work))
            self.turn.acquire()
        try:
            while waiting := [agent for agent in agents if agent.waits_for]:
                ready = [agent for agent in waiting if agent.may_go_on()]
                assert ready, "deadlock: " + "; ".join(f"{agent.name} wait for {agent.waits_for}" for agent in waiting)
                for self.agent in ready:
                    self.agent.turn.release()
                    self.turn.acquire()
                    if self.agent.failure is not None:
                        raise self.agent.failure
        finally:
            self.over = True
            for agent in agents:
                agent.turn.release()
                agent.join()
        assert not any(agent.products for agent in agents), "a product is in flight at the end"
        assert not any(stage.arrived for stages in self.barriers for stage in stages), "a barrier is in the middle of a phase"
        assert self.swizzled <= self.laid_out, f"nothing says that {self.swizzled - self.laid_out} are swizzled"

    def names(self) -> dict[str, Any]:
        def ignored(*args: Any, **kwargs: Any) -> None:
            return None

        return dict(
            macro=lambda function: function, prim_func=lambda function: function, dynamic=self.sizes.__getitem__,
            Tensor=lambda shape, dtype: (tuple(shape), dtype), int32=int, int64=int, uint32=int, float32=float,
            Kernel=self.kernel, annotate_layout=self.annotate_layout, set_max_nreg=ignored,
            get_thread_binding=lambda: simplified(self.agent.first_thread + np.arange(self.agent.threads)),
            GemmWarpPolicy=SimpleNamespace(FullRow=None), serial=lambda extent: range(int(extent)), unroll=range,
            Parallel=lambda rows, columns: Loop(self.agent, rows, columns), clear=self.clear,
            ceildiv=lambda a, b: -(-a // b), max=np.maximum, min=np.minimum, cast=cast, if_then_else=if_then_else, exp=np.exp,
            exp2=np.exp2, log1p=np.log1p, alloc_var=ignored, evaluate=ignored,
            alloc_local=lambda shape, dtype: Registers(self.agent, (self.agent.threads, *shape), dtype),
            alloc_fragment=lambda shape, dtype: Fragment(self.agent, shape, dtype), alloc_shared=self.alloc_shared,
            alloc_barrier=self.alloc_barrier, address_of=Pointer, access_ptr=Pointer, copy=self.copy, tma_copy=self.copy,
            tma_store_wait=ignored, fence_proxy_async=ignored, wgmma_gemm=self.product, wait_wgmma=self.wait_products,
            call_extern=self.helper, barrier_wait=self.wait, barrier_arrive=self.arrive, pdl_sync=ignored, pdl_trigger=ignored,
        )  # fmt: skip

    @contextlib.contextmanager
    def kernel(self, blocks: int, *, threads: int, prelude: str) -> Iterator[int]:
        self.blocks = int(blocks)
        yield self.number

    def annotate_layout(self, layouts: Mapping[Array, Any]) -> None:
        self.laid_out |= {tile.name for tile in layouts}

    def alloc_shared(self, shape: Sequence[int], dtype: str, *, scope: str) -> Array:
        if self.agent.tiles == len(self.tiles):
            name = self.tile_names[len(self.tiles)]
            numbers = Numbers(self, np.full(shape, np.iinfo(np.int32).min), dtype, name)
            self.tiles.append(numbers if dtype == "int32" else Array(self, np.full(shape, np.nan, np.float32), dtype, name))
        self.agent.tiles += 1
        return self.tiles[self.agent.tiles - 1]

    def alloc_barrier(self, *, arrive_count: Sequence[int]) -> list[Barrier]:
        if self.agent.barriers == len(self.barriers):
            name = self.barrier_names[len(self.barriers)]
            self.barriers.append([Barrier(name, count) for count in arrive_count])
        self.agent.barriers += 1
        return self.barriers[self.agent.barriers - 1]

    def wait(self, barrier: Barrier, parity: int) -> None:
        if barrier.done % 2 == parity:
            self.agent.wait_until(lambda: barrier.done % 2 != parity, barrier.name)

    def arrive(self, barrier: Barrier) -> None:
        barrier.arrived += self.agent.threads
        assert barrier.arrived <= barrier.needed, f"more arrivals at {barrier.name} than the {barrier.needed} of a phase"
        if barrier.arrived == barrier.needed:
            barrier.arrived, barrier.done = 0, barrier.done + 1

    def clear(self, fragment: Fragment) -> None:
        fragment.note_write()
        fragment.values[:] = 0

    def copy(self, source: Fragment | Reference, target: Fragment | Reference, *, barrier: Barrier | None = None) -> None:
        source_array, target_array = (x if isinstance(x, Fragment) else x.array for x in (source, target))
        source_array.note_read()
        target_array.note_write()
        if isinstance(target, Fragment):
            rows = slice(target.first_row, target.first_row + 64)
            values = source.values if isinstance(source, Fragment) else source.read_block()[rows]
            target.values[:] = rounded(values, target.dtype)
        elif isinstance(source, Fragment):
            shape, inside, _ = target.block()
            assert shape == source.shape
            target.array.values[inside][source.first_row : source.first_row + 64] = rounded(source.values, target.array.dtype)
        else:
            target.write_block(source.read_block())

    def product(
        self, a: Fragment | Reference, b: Reference, c: Fragment, transpose_A: bool = False, transpose_B: bool = False,
        clear_accum: bool = False, policy: Any = None,
    ) -> None:  # fmt: skip
        """c += a b. Several in flight may add to one accumulator; nobody else may touch it before they are waited for."""
        if isinstance(a, Fragment):
            a.note_read()
            left = a.values
            assert not transpose_A
        else:
            left = a.read_block().T if transpose_A else a.read_block()
            left = left[c.first_row : c.first_row + 64]
        self.laid_out |= {x.array.name for x in (a, b) if isinstance(x, Reference)}
        right = b.read_block().T if transpose_B else b.read_block()
        # By torch, whose threads the tests bound: on a busy machine those of numpy wait for one another.
        product = (torch.from_numpy(left) @ torch.from_numpy(right)).numpy()
        c.values[:] = product + (0 if clear_accum else c.values)
        self.agent.products.append((c, a))

    def wait_products(self, running: int) -> None:
        self.agent.products = self.agent.products[max(len(self.agent.products) - running, 0) :]

    def helper(self, returns: str, name: str, *args: Any) -> None:
        args = tuple(map(value_of, args))
        if name in LANE_HELPERS:
            LANE_HELPERS[name](self.agent, *args)
        else:
            HELPERS[name](*args)


def launch(
    template: str,
    problem: Mapping[str, Any],
    config: Mapping[str, Any],
    *arguments: Any,
    sizes: Mapping[str, int],
    by_lane: Sequence[int],
) -> None:
    """What a compiled kernel does with its arguments: it fills its outputs, which are among them.

    Args:
        sizes: values of the kernel's dynamic dimensions.
        by_lane: those of the last four warps whose lanes go different ways.
    """
    module = traced_template(template)
    described, chosen = module.Problem(**problem), module.Config(**config)
    threads = sum(role.threads for role in module.roles(described, chosen))
    warpgroups = threads // WARPGROUP - 1                # the last one is of single warps
    warps = range(4 * warpgroups, threads // 32)
    values = [x.float().numpy() if isinstance(x, torch.Tensor) and x.dtype == torch.bfloat16 else x for x in arguments]
    values = [x.numpy() if isinstance(x, torch.Tensor) else x for x in values]
    tile_names = [buffer.name for buffer in module.buffers(described, chosen)]
    barriers = barrier_names(module, described, chosen)

    def work(block: Block) -> None:
        kernel = module.build(described, chosen)
        bound = {}
        parameters = inspect.signature(kernel).parameters.items()
        for (name, parameter), value, given in zip(parameters, values, arguments, strict=True):
            bound[name] = value
            if isinstance(value, np.ndarray):
                shape, dtype = parameter.annotation
                found = tuple(given.shape), str(given.dtype).removeprefix("torch.")
                assert found == (shape, dtype), f"{name} is {found}, not {(shape, dtype)}"
                bound[name] = Global(block, value, dtype, name)
        with np.errstate(all="ignore"):             # it is of a thread
            kernel(**bound)

    number, blocks = 0, 1
    while number < blocks:
        block = Block(number, sizes, tile_names, barriers)
        with mock.patch.dict(vars(module.T), block.names(), clear=True), tilelang_replaced():
            block.run(functools.partial(work, block), warpgroups, warps, [warps[number] for number in by_lane])
        number, blocks = number + 1, block.blocks
    for given, value in zip(arguments, values, strict=True):
        if isinstance(given, torch.Tensor):
            given.copy_(torch.from_numpy(value))
