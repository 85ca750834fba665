"""The worker process on the GPU: it says what the GPU is, checks candidates, and times them. Started by worker.py.

Questions are {"do": "describe" | "verify" | "time", ...}; the functions of these names say what else is in them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..device import gpu_info
from ..errors import EnvironmentUnsuitable
from ..ops.inputs import CallFacts
from .gpu_state import Nvml
from .inputs import facts_from_json
from .measure import Clock, measure
from .operations import OPERATIONS, Sample
from .search_space import Candidate, SearchSpace
from .verify import Judge, cases
from .worker import Failure, serve

SAMPLE_US = 1_000                        # a replay lasts at least this long, so that its launch and the clock's tick are noise
MAX_CALLS = 100                          # per graph
MEMORY_SHARE = 0.8                       # of the free memory that a question may need
PROBE_CHUNKS = 16                        # a sequence of the short call that tells how much memory a chunk takes
LEAST_READ = 0.5                         # of the inputs comes from memory in any case, though the L2 may keep some of the rest


def handle(question: dict[str, Any]) -> Any:
    return {"describe": describe, "verify": verify, "time": time}[question["do"]](question)


def describe(question: Mapping[str, Any]) -> dict[str, Any]:
    """The GPU {"device": index}: what it is, and the state that it is in."""
    if not torch.cuda.is_available():
        raise EnvironmentUnsuitable("PyTorch sees no CUDA GPU; tune on the machine that will run the kernels, or one like it")
    device = torch.device("cuda", question["device"])
    torch.ones(1, device=device)         # a context, so that this process is among those that NVML lists
    gpu, properties = gpu_info(device), torch.cuda.get_device_properties(device)
    return {
        "name": gpu.name, "arch": gpu.arch.name, "sm_count": gpu.sm_count, "l2_bytes": gpu.l2_bytes,
        "uuid": _uuid(device), "memory_bytes": properties.total_memory,
        "state": dataclasses.asdict(_nvml(device).state()),
    }


def verify(question: Mapping[str, Any]) -> dict[str, Any]:
    """Check a candidate: {"op", "facts", "candidate", "reference", "full"}, the candidates as JSON."""
    space = _space(question)
    candidate = space.from_json(question["candidate"])
    judge = _judge(space.op, space.facts, space.from_json(question["reference"]))
    of = cases(space.facts, candidate.split, full=question["full"], op=space.op)
    verdict = judge.verdict(OPERATIONS[space.op].runner(candidate), of)
    return {"failure": verdict.to_json()} if isinstance(verdict, Failure) else {"verdict": verdict.model_dump(mode="json")}


def time(question: Mapping[str, Any]) -> dict[str, Any]:
    """Time candidates on one batch: {"op", "facts", "lengths", "gates", "candidates", "blocks"}."""
    space = _space(question)
    operation, facts, lengths = OPERATIONS[space.op], space.facts, tuple(question["lengths"])
    candidates = [space.from_json(candidate) for candidate in question["candidates"]]
    reads, writes = operation.bytes(facts, lengths)
    cold = 2 * gpu_info(facts.device).l2_bytes
    sets = min(math.ceil(cold / reads), MAX_CALLS)
    workspace = max(_workspace_bytes(candidate, space, lengths) for candidate in candidates)
    key = (space.op, facts, lengths, question["gates"], sets)
    if key not in _held:
        _held.clear()                    # before the new ones are made: both may not fit
    shortage = _shortage(facts.device, workspace + (0 if _held else sets * reads + writes))
    if shortage is not None:
        return {"failure": shortage.to_json()}
    if not _held:
        _held[key] = [operation.sample(facts, lengths, question["gates"], seed=seed) for seed in range(sets)]
    samples = _held[key]

    # Graphs that never run at the same time, and whose results nobody keeps, may share their memory.
    pool = torch.cuda.graph_pool_handle()
    graphs, calls = [], []
    for candidate in candidates:
        run = operation.runner(candidate)
        run(samples[0])                  # loads its kernels
        count = min(max(math.ceil(SAMPLE_US / _elapsed_us(functools.partial(run, samples[0]))), sets), MAX_CALLS)
        graphs.append(_captured([functools.partial(run, samples[i % sets]) for i in range(count)], pool))
        calls.append(count)

    blocks = measure(_GpuTimer(graphs, calls, _nvml(facts.device)), blocks=question["blocks"])
    torch.cuda.synchronize(facts.device)
    state = _nvml(facts.device).state()
    knows_floor = state.memory_bytes_per_us is not None and sets * reads >= cold
    return {
        "blocks": [dataclasses.asdict(block) for block in blocks],
        "input_sets": sets,
        "floor_us": LEAST_READ * reads / state.memory_bytes_per_us if knows_floor else None,
        "other_processes": state.other_processes,
    }


class _GpuTimer:
    """measure.Timer over CUDA graphs."""

    def __init__(self, graphs: Sequence[torch.cuda.CUDAGraph], calls: Sequence[int], nvml: Nvml) -> None:
        self.calls = calls
        self._graphs = graphs
        self._nvml = nvml

    def replay(self, candidate: int) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        self._graphs[candidate].replay()
        end.record()
        return start, end

    def wait(self, span: tuple[torch.cuda.Event, torch.cuda.Event]) -> float:
        start, end = span
        end.synchronize()
        return start.elapsed_time(end) * 1e3

    def clock(self) -> Clock:
        return self._nvml.clock()


def _captured(calls: Sequence[Callable[[], Any]], pool: Any) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        for call in calls:
            call()
    return graph


def _elapsed_us(call: Callable[[], Any]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    call()
    end.record()
    end.synchronize()
    return max(start.elapsed_time(end) * 1e3, 1.0)


def _shortage(device: torch.device, needed: int) -> Failure | None:
    free, _ = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if needed <= MEMORY_SHARE * free:
        return None
    return Failure("oom", f"needs {needed / 2**30:.1f} GiB beside what is held; {free / 2**30:.1f} GiB are free, "
                          f"of which {MEMORY_SHARE:.0%} may be used")


def _workspace_bytes(candidate: Candidate, space: SearchSpace, lengths: tuple[int, ...]) -> int:
    """What a run takes beside its inputs, from what a shorter one of as many sequences takes."""
    operation, facts = OPERATIONS[space.op], space.facts
    short = tuple(min(length, PROBE_CHUNKS * facts.chunk_size) for length in lengths)
    sample = operation.sample(facts, short, "open")
    before = torch.cuda.memory_allocated(facts.device)
    torch.cuda.reset_peak_memory_stats(facts.device)
    operation.runner(candidate)(sample)
    taken = torch.cuda.max_memory_allocated(facts.device) - before
    return math.ceil(taken * max(sum(lengths) / max(sum(short), 1), 1))


_held: dict[tuple[Any, ...], list[Sample]] = {}                          # the inputs of the last question


@functools.lru_cache(maxsize=1)
def _judge(op: str, facts: CallFacts, reference: Candidate) -> Judge:
    return Judge(facts, OPERATIONS[op].runner(reference), op)


@functools.cache
def _nvml(device: torch.device) -> Nvml:
    return Nvml(_uuid(device))


def _uuid(device: torch.device) -> str:
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def _space(question: Mapping[str, Any]) -> SearchSpace:
    facts = facts_from_json(question["facts"])
    torch.cuda.set_device(facts.device)
    gpu = gpu_info(facts.device)
    return SearchSpace(facts, gpu.arch, gpu.sm_count, question["op"])


if __name__ == "__main__":
    serve(handle)
