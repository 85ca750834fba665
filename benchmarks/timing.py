"""How a call is timed: CUDA-graph replays, the systems taking turns; what it allocates; how a run keeps within a time budget."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

REPLAYS = 20                             # the median is taken over these
CALLS_PER_GRAPH = 5                      # at least; more where that many input sets rotate
WARM_UP_MS = 60                          # an H200 reaches its power limit, and its lasting clock, after about 30 ms of load

PROTOCOL = (
    f"Milliseconds per call: median of {REPLAYS} replays of a CUDA graph of at least {CALLS_PER_GRAPH} calls, after "
    f"{WARM_UP_MS} ms of replays. The systems of a row that were measured together take turns replay by replay, in alternating "
    "order. Calls rotate over input sets that together hold twice the L2 cache. bf16, K = V = 128 where a row does not say "
    "otherwise, packed cu_seqlens, float32 "
    "initial state in and final state out."
)


PAUSE_SECONDS = 0.03                     # as long as it takes to get there, it takes to come back
COOL_REPLAYS = 9

COOL_PROTOCOL = (
    f"Milliseconds per call: median of {COOL_REPLAYS} replays of a CUDA graph of at least {CALLS_PER_GRAPH} calls, each after "
    f"{PAUSE_SECONDS * 1e3:g} ms without load, so that the power limit has no part in it. Otherwise as the table of steady times."
)


def captured(calls: Sequence[Callable[[], Any]]) -> torch.cuda.CUDAGraph:
    """A CUDA graph of the calls one after the other. Each runs twice before: compilation, tuning and caches come first."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            for call in calls:
                call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    return graph


def graph_of(calls_by_input: Sequence[Callable[[], Any]]) -> tuple[torch.cuda.CUDAGraph, int]:
    """A graph that goes through the input sets in turn, and how many calls it makes."""
    count = max(CALLS_PER_GRAPH, len(calls_by_input))
    return captured([calls_by_input[i % len(calls_by_input)] for i in range(count)]), count


def interleaved_ms(graphs: Mapping[str, tuple[torch.cuda.CUDAGraph, int]]) -> dict[str, float]:
    """Median milliseconds per call of each system. They take turns, so that all see the same clocks and temperature.

    Everything is queued before the first result is read: the GPU never waits for the host between two replays, so the
    launch of a graph is not part of its time, and the load is as steady as it would be in a busy server.
    """
    first_round_ms = sum(start.elapsed_time(end) for start, end in _queue_round(graphs, list(graphs), wait=True).values())
    warm_up_rounds = math.ceil(WARM_UP_MS / first_round_ms)
    forwards = list(graphs)
    spans = [
        _queue_round(graphs, forwards if i % 2 == 0 else forwards[::-1]) for i in range(warm_up_rounds + REPLAYS)
    ]
    torch.cuda.synchronize()
    return {
        name: statistics.median(span[name][0].elapsed_time(span[name][1]) / calls for span in spans[warm_up_rounds:])
        for name, (_, calls) in graphs.items()
    }


def cool_ms(graphs: Mapping[str, tuple[torch.cuda.CUDAGraph, int]]) -> dict[str, float]:
    """As interleaved_ms(), each replay after a pause: of a GPU that has had little to do."""
    found: dict[str, list[float]] = {name: [] for name in graphs}
    for turn in range(COOL_REPLAYS + 1):
        for name, (_, calls) in graphs.items():
            time.sleep(PAUSE_SECONDS)
            # The first replay is launched by the time that the second, which is timed, may begin.
            graphs[name][0].replay()
            start, end = _queue_round(graphs, [name], wait=True)[name]
            if turn > 0:
                found[name].append(start.elapsed_time(end) / calls)
    return {name: statistics.median(times) for name, times in found.items()}


def _queue_round(graphs: Mapping[str, Any], order: Sequence[str], *, wait: bool = False) -> dict[str, tuple[Any, Any]]:
    """Queue one replay of each graph; the events before and after it, by system."""
    spans = {}
    for name in order:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graphs[name][0].replay()
        end.record()
        spans[name] = (start, end)
    if wait:
        torch.cuda.synchronize()
    return spans


def alternating_ms(calls: Mapping[str, Callable[[], Any]], *, rounds: int = 5, calls_per_round: int = 10) -> dict[str, float]:
    """Median milliseconds per call of each system without a graph: the time of the GPU, or of the host where it is longer."""
    spans: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(1 + rounds):
        order = list(calls) if number % 2 == 0 else list(calls)[::-1]
        for name in order:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            start.record()
            for _ in range(calls_per_round):
                calls[name]()
            end.record()
            torch.cuda.synchronize()
            spans[name].append(start.elapsed_time(end) / calls_per_round)
    return {name: statistics.median(times[1:]) for name, times in spans.items()}


def host_us(call: Callable[[], Any], *, batches: int = 20, calls: int = 50) -> float:
    """Median microseconds of host time per call. A batch is short enough never to fill the launch queue, which would block."""
    for _ in range(calls):
        call()
    samples = []
    for _ in range(batches):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        samples.append((time.perf_counter() - start) / calls * 1e6)
    torch.cuda.synchronize()
    return statistics.median(samples)


def peak_bytes(call: Callable[[], Any]) -> int:
    """Memory that a call allocates at its highest, at its second time: what it keeps for good is there by then."""
    call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


class BudgetSpent(Exception):
    """The time budget does not cover the next step."""


class Budget:
    """Seconds that a run may take. `require` raises BudgetSpent when the next step would not end in time."""

    def __init__(self, seconds: float | None, *, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._start = now()
        self._seconds = seconds

    @property
    def spent(self) -> float:
        return self._now() - self._start

    def require(self, seconds: float = 0.0) -> None:
        if self._seconds is not None and self.spent + seconds > self._seconds:
            raise BudgetSpent(f"{self.spent:.0f} s of {self._seconds:.0f} s are spent, the next step takes about {seconds:.0f} s")
