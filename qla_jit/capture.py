"""Count the calls of a process, so that what is really run can be tuned: QLA_JIT_CAPTURE names a directory.

A call is counted by its problem and its sizes, rounded as in select.bucket(); no content of a tensor is kept. Of the
gates, quantiles of a sample are taken at the 1st, 2nd, 4th, 8th, ... call of each problem and sizes. They come from the
GPU when they are ready, at a later call: nothing here waits for the GPU, and nothing is launched while a graph is captured.
Each process writes a file of its own, once a minute and when it ends. `load_workload` adds them up.
"""

from __future__ import annotations

import atexit
import functools
import math
import os
import platform
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import Field, PositiveInt, ValidationError

from .errors import RecordError
from .once import warn_once
from .ops.inputs import CallInputs
from .ops.plan import Extents
from .select import bucket, extents_of
from .settings import settings
from .tuning_records import Model, Problem

QUANTILES = (0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99)
SAMPLED_TOKENS = 1_024
LOWEST_GATE = -1e4                       # as the kernels take it: this and everything below resets the state
FLUSH_SECONDS = 60.0
MAX_FILE_BYTES = 16 << 20

Gate = Annotated[float, Field(ge=LOWEST_GATE)]


class CountedCalls(Model):
    """How often a problem was computed at some sizes, in chunks."""

    problem: Problem
    chunks: PositiveInt
    longest: PositiveInt
    sequences: PositiveInt
    count: PositiveInt

    @property
    def extents(self) -> Extents:
        return Extents(chunks=self.chunks, longest=self.longest, sequences=self.sequences)


class SampledGates(Model):
    """Quantiles of the natural logarithm of the decay, per token and head: the mean over the samples."""

    problem: Problem
    samples: PositiveInt
    quantiles: tuple[Gate, Gate, Gate, Gate, Gate, Gate, Gate]       # at QUANTILES

    @property
    def median(self) -> float:
        return self.quantiles[QUANTILES.index(0.5)]


class Workload(Model):
    """What was counted, by one process or by many."""

    schema_version: Literal[1] = 1
    calls: tuple[CountedCalls, ...]
    gates: tuple[SampledGates, ...] = ()


@dataclass
class _GateSum:
    samples: int
    sums: list[float]


class Recorder:
    """The counts of one process."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / f"{platform.node() or 'host'}-{os.getpid()}.json"
        self._lock = threading.Lock()
        self._problems: dict[object, Problem] = {}
        self._counts: dict[tuple[Problem, Extents], int] = {}
        self._gates: dict[Problem, _GateSum] = {}
        self._on_the_way: list[tuple[Problem, torch.Tensor, torch.cuda.Event | None]] = []
        self._flushed = time.monotonic()

    def note(self, inputs: CallInputs) -> None:
        """Count a call."""
        facts = inputs.facts
        with self._lock:
            problem = self._problems.get(facts)
            if problem is None:
                problem = self._problems[facts] = Problem.of(facts)
            key = problem, bucket(extents_of(inputs))
            count = self._counts[key] = self._counts.get(key, 0) + 1
            if count & (count - 1) == 0 and not (inputs.g.is_cuda and torch.cuda.is_current_stream_capturing()):
                self._on_the_way.append((problem, *_start_quantiles(inputs)))
            self._collect()
            if time.monotonic() - self._flushed > FLUSH_SECONDS:
                self._write()

    def flush(self) -> None:
        """Write the file."""
        with self._lock:
            self._collect()
            self._write()

    def _collect(self) -> None:
        """Take in the quantiles that have arrived."""
        waiting = []
        for problem, quantiles, arrival in self._on_the_way:
            if arrival is not None and not arrival.query():
                waiting.append((problem, quantiles, arrival))
                continue
            values = quantiles.tolist()
            if not any(map(math.isnan, values)):
                found = self._gates.setdefault(problem, _GateSum(0, [0.0] * len(QUANTILES)))
                found.samples += 1
                found.sums = [total + value for total, value in zip(found.sums, values, strict=True)]
        self._on_the_way = waiting

    def _write(self) -> None:
        self._flushed = time.monotonic()
        gates = (_sampled(problem, found.samples, found.sums) for problem, found in self._gates.items())
        text = _workload(self._counts, gates).model_dump_json(indent=1)
        partial = self.path.with_suffix(".partial")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(text)
            partial.replace(self.path)
        except OSError as error:
            warn_once(f"calls cannot be counted in {self.path}: {error.strerror}. QLA_JIT_CAPTURE names the directory.")


def note(inputs: CallInputs) -> None:
    """Count a call, if QLA_JIT_CAPTURE was set when the first call came."""
    recorder = _recorder()
    if recorder is not None:
        recorder.note(inputs)


def load_workload(path: Path) -> Workload:
    """Add up a file, or all the files of a directory.

    Raises:
        RecordError: there is none, or one is too large or does not match the schema.
    """
    paths = sorted(path.glob("*.json")) if path.is_dir() else [path]
    if not paths:
        raise RecordError(f"expected files of counted calls in {path}; there are none; run with QLA_JIT_CAPTURE={path}")
    counts: dict[tuple[Problem, Extents], int] = {}
    gates: dict[Problem, _GateSum] = {}
    for workload in map(_load, paths):
        for calls in workload.calls:
            key = calls.problem, calls.extents
            counts[key] = counts.get(key, 0) + calls.count
        for sampled in workload.gates:
            found = gates.setdefault(sampled.problem, _GateSum(0, [0.0] * len(QUANTILES)))
            found.samples += sampled.samples
            found.sums = [total + sampled.samples * value for total, value in zip(found.sums, sampled.quantiles, strict=True)]
    return _workload(counts, (_sampled(problem, found.samples, found.sums) for problem, found in gates.items()))


@functools.cache
def _recorder() -> Recorder | None:
    directory = settings().capture
    if directory is None:
        return None
    recorder = Recorder(directory)
    atexit.register(recorder.flush)
    return recorder


def _start_quantiles(inputs: CallInputs) -> tuple[torch.Tensor, torch.cuda.Event | None]:
    """Where the quantiles of the call's gates will be on the host, and the event after which they are."""
    with torch.no_grad():
        HV = inputs.facts.HV
        tokens = inputs.g.view(-1, HV)
        sample = tokens[:: -(-len(tokens) // SAMPLED_TOKENS)].float()
        if inputs.A_log is not None:
            shift = 0.0 if inputs.dt_bias is None else inputs.dt_bias.float()
            sample = -inputs.A_log.float().exp() * torch.nn.functional.softplus(sample + shift)
        # No torch.quantile: its list of quantiles would have to be copied to the GPU.
        values = sample.clamp(min=LOWEST_GATE, max=0.0).flatten().sort().values
        quantiles = torch.stack([values[round(q * (len(values) - 1))] for q in QUANTILES])
        if not quantiles.is_cuda:
            return quantiles, None
        on_host = torch.empty(len(QUANTILES), pin_memory=True)
        on_host.copy_(quantiles, non_blocking=True)
        arrival = torch.cuda.Event()
        arrival.record()
        return on_host, arrival


def _workload(counts: dict[tuple[Problem, Extents], int], gates: Iterable[SampledGates]) -> Workload:
    calls = [
        CountedCalls(problem=problem, chunks=e.chunks, longest=e.longest, sequences=e.sequences, count=count)
        for (problem, e), count in counts.items()
    ]
    return Workload(calls=tuple(sorted(calls, key=lambda c: (-c.count, str(c)))), gates=tuple(sorted(gates, key=str)))


def _sampled(problem: Problem, samples: int, sums: list[float]) -> SampledGates:
    return SampledGates(problem=problem, samples=samples, quantiles=tuple(round(total / samples, 4) for total in sums))


def _load(path: Path) -> Workload:
    try:
        with path.open("rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {error.strerror}") from None
    if len(text) > MAX_FILE_BYTES:
        raise RecordError(f"{path}: expected at most {MAX_FILE_BYTES:,} B")
    try:
        return Workload.model_validate_json(text)
    except ValidationError as error:
        raise RecordError(f"{path} is not a file of counted calls: {error.errors(include_url=False)[0]['msg']}") from None
