"""Run a tuning session: what `qla-tune tune`, `verify` and `check` do, without a terminal.

    tune(request, ...)                 search, verify, race, and hand over one record per problem as it is ready
    verify_records(records, ...)       run the admission checks of stored records again
    check_records(records, ...)        time stored records again and compare with their intervals
    prebuild(request, ...)             compile what the search looks at first, on a machine without a GPU

Progress goes to `on_event` as Event values; nothing is printed. Ctrl-C is not an error here: the result says "interrupted", and
holds what was ready.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from .. import select, tuning_records
from ..cache_dir import writable_cache_dir
from ..errors import EnvironmentUnsuitable, QLAError, VerificationError
from ..kernel_templates.arch import ARCHES, Arch
from ..settings import settings
from ..tuning_records import Entry, Record, Versions
from ..workload import facts_of
from . import bench as benches
from .bench import Ask, Bench, Machine, machine_of
from .build import compile_all
from .inputs import facts_to_json
from .measure import PROTOCOL, RACE_BLOCKS, TIE, estimate
from .recording import record_of
from .search import first_round
from .search_space import Candidate, SearchSpace
from .tuner import Event, Findings, TuneProblem, Tuner, batch_name
from .worker import Failure, only_tuner

Outcome = Literal["complete", "failed", "budget spent", "interrupted"]
OnEvent = Callable[[Event], None]


@dataclass(frozen=True)
class TuneRequest:
    """What to tune, and how far to look."""

    problems: tuple[TuneProblem, ...]
    finalists: int = 4                       # candidates that are raced, the default among them
    command: str = ""                        # for the records' provenance: what a person would type to do it again


@dataclass(frozen=True)
class ProblemResult:
    """What became of one problem."""

    problem: TuneProblem
    outcome: Outcome
    record: Record | None                    # as it was handed to on_record
    findings: Findings                       # every trial and time, for the report
    space: SearchSpace
    reason: str = ""                         # of an outcome that is not "complete"


@dataclass(frozen=True)
class SessionResult:
    """What a session did."""

    problems: tuple[ProblemResult, ...]
    outcome: Outcome                         # the worst of the problems'
    machine: Machine
    seconds: float


@dataclass(frozen=True)
class Verification:
    """One entry of a stored record, looked at again: failure is None if it passed, else the reason."""

    record: Record
    candidate: tuning_records.Candidate
    failure: str | None


@dataclass(frozen=True)
class Check:
    """One point of a stored record, timed again against the default."""

    record: Record
    text: str                                # "2:8 128:128 at 32768: 1.210x [1.200, 1.220], recorded 1.230x [1.220, 1.240]"
    regressed: bool                          # the new interval lies below the recorded one by more than a tie


def tune(
    request: TuneRequest,
    *,
    on_event: OnEvent = lambda event: None,
    on_record: Callable[[Record], None] = lambda record: None,
    resume: bool = False,
    budget_seconds: float | None = None,
    journal_dir: Path | None = None,
    open_machine: Callable[[], AbstractContextManager[Ask]] = benches.gpu,
) -> SessionResult:
    """Find, verify and race candidates for each problem.

    Args:
        on_event: progress, as it happens, in the calling thread.
        on_record: receives the record of a problem as soon as it is final: store it there.
        resume: take answered questions from the journal of an earlier session on the same problem, GPU kind and software.
        budget_seconds: for the whole session, shared evenly by the problems that are left; None is no limit. When it is
            spent, what has been timed becomes a record, and problems not yet begun are left out.
        journal_dir: where answers are written as they come; None is `tuning/` in the cache directory.
        open_machine: what to run on; tests put a machine without a GPU here.

    Raises:
        EnvironmentUnsuitable: no GPU that can be used, another tuner on it, MIG, MPS or throttling; or no problem got a record,
            because times are too noisy (the default against itself has an interval beyond 1 +- 1 %).
    """
    session = _Session(request, on_event, on_record, time.monotonic(), budget_seconds)
    device = request.problems[0].facts.device
    assert all(problem.facts.device == device for problem in request.problems), "a session tunes on one GPU"
    with _opened(open_machine, device.index or 0, on_event) as (ask, machine):
        results = session.run(ask, machine, resume=resume, journal_dir=journal_dir)
    worst = max((result.outcome for result in results), key=("complete", "failed", "budget spent", "interrupted").index)
    return SessionResult(tuple(results), worst, machine, time.monotonic() - session.started)


@dataclass(frozen=True)
class _Session:
    request: TuneRequest
    on_event: OnEvent
    on_record: Callable[[Record], None]
    started: float
    budget_seconds: float | None

    def run(self, ask: Ask, machine: Machine, *, resume: bool, journal_dir: Path | None) -> list[ProblemResult]:
        results: list[ProblemResult] = []
        for number, problem in enumerate(self.request.problems):
            space = _space(problem, ARCHES[machine.arch], machine.sm_count)
            if results and results[-1].outcome == "interrupted":
                results.append(ProblemResult(problem, "interrupted", None, Findings(), space, "not begun"))
                continue
            if self._seconds_left() <= 0:
                results.append(ProblemResult(problem, "budget spent", None, Findings(), space, "not begun"))
                continue
            share = self._seconds_left() / (len(self.request.problems) - number)
            bench = Bench(ask, _journal(space, machine, journal_dir, resume=resume))
            bench.recall()
            results.append(self._tune_one(problem, space, bench, machine, share))
        if not any(result.record for result in results) and all(result.outcome == "failed" for result in results):
            raise EnvironmentUnsuitable("; ".join(dict.fromkeys(result.reason for result in results)))
        return results

    def _tune_one(
        self, problem: TuneProblem, space: SearchSpace, bench: Bench, machine: Machine, seconds: float
    ) -> ProblemResult:
        begun = time.monotonic()

        def share_left() -> float:
            return 1.0 if self.budget_seconds is None else 1 - (time.monotonic() - begun) / seconds

        tuner = Tuner(
            problem, space, bench, finalists=self.request.finalists, on_event=self.on_event, share_left=share_left
        )
        outcome: Outcome = "complete"
        reason = ""
        try:
            tuner.run()
        except KeyboardInterrupt:
            outcome, reason = "interrupted", "Ctrl-C"
        except QLAError as error:
            outcome, reason = "failed", str(error)
            if isinstance(error, VerificationError):
                tuner.findings.races.clear()             # times of a default that is wrong are worth nothing
        if outcome == "complete" and share_left() <= 0:
            outcome, reason = "budget spent", f"{seconds:.0f} s are spent"
        record = record_of(problem, space, machine, tuner.findings, command=self.request.command)
        if record is not None:
            self.on_record(record)
        self.on_event(Event("record", str(problem), reason if record is None else f"{outcome}, {record.rigor.value}"))
        return ProblemResult(problem, outcome, record, tuner.findings, space, reason)

    def _seconds_left(self) -> float:
        return float("inf") if self.budget_seconds is None else self.budget_seconds - (time.monotonic() - self.started)


def verify_records(
    records: Sequence[Record],
    *,
    device: int = 0,
    on_event: OnEvent = lambda event: None,
    open_machine: Callable[[], AbstractContextManager[Ask]] = benches.gpu,
) -> list[Verification]:
    """Run the full admission checks of every entry of the records again, on this GPU.

    Raises:
        EnvironmentUnsuitable: as tune(); or a record is of another kind of GPU.
    """
    results = []
    with _opened(open_machine, device, on_event) as (ask, machine):
        bench = Bench(ask)
        for record in records:
            problem, space = _of_record(record, machine, device)
            reference = space.start(space.strategies[-1], record.points[0].extents)
            for number, entry in enumerate(record.entries, start=1):
                on_event(Event("verify", str(problem), entry.candidate.strategy, number, len(record.entries)))
                failure = _verify_entry(bench, space, entry, record, reference)
                results.append(Verification(record, entry.candidate, failure))
    return results


def check_records(
    records: Sequence[Record],
    *,
    device: int = 0,
    points: int | None = None,
    on_event: OnEvent = lambda event: None,
    open_machine: Callable[[], AbstractContextManager[Ask]] = benches.gpu,
) -> list[Check]:
    """Time the best entry of stored points again against the default, after a change of driver or toolkit.

    Args:
        points: how many points of each record, spread over them; None is all. Points where the default was best are passed over.

    Raises:
        EnvironmentUnsuitable: as tune(); or a record is of another kind of GPU.
    """
    checks = []
    with _opened(open_machine, device, on_event) as (ask, machine):
        bench = Bench(ask)
        for record in records:
            problem, space = _of_record(record, machine, device)
            won = _won_points(record)
            chosen = won if points is None else won[:: max(1, -(-len(won) // points))]
            for number, (index, entry) in enumerate(chosen, start=1):
                on_event(Event("race", str(problem), entry.candidate.strategy, number, len(chosen)))
                checks.append(_check_point(bench, space, problem, record, index, entry))
    return checks


def prebuild(
    request: TuneRequest,
    *,
    arch: Arch,
    sm_count: int,
    searched: Collection[str] | None = None,
    on_event: OnEvent = lambda event: None,
) -> list[str]:
    """Compile the kernels of the search's first round for a GPU that need not be here; the reasons of those that failed.

    The cache directory, copied to the machine with the GPU, saves the tuning run its compile time. With QLA_JIT_MODE=require that
    run looks at nothing else.

    Args:
        searched: strategies of which every neighbour of the default is built; of others only the default. None is all.
    """
    kernels = []
    for problem in request.problems:
        space = _space(problem, arch, sm_count)
        extents = space.extents(problem.lengths[0])
        for strategy in space.strategies:
            start = space.start(strategy, extents)
            candidates = first_round(space, start) if searched is None or strategy.name in searched else [start]
            kernels += [kernel for candidate in candidates for kernel in space.requests(candidate)]
    outcomes = compile_all(
        kernels, on_kernel=lambda done, total: on_event(Event("compile", "", f"{done} of {total} kernels", done, total))
    )
    return [outcome.detail for outcome in outcomes.values() if isinstance(outcome, Failure)]


@contextlib.contextmanager
def _opened(
    open_machine: Callable[[], AbstractContextManager[Ask]], device: int, on_event: OnEvent
) -> Iterator[tuple[Ask, Machine]]:
    """The machine, once the checks before a flight have passed; nobody else tunes on it meanwhile."""
    with open_machine() as ask:
        machine = machine_of(ask, device)
        with only_tuner(machine.uuid):
            _preflight(machine, on_event)
            yield ask, machine


def _preflight(machine: Machine, on_event: OnEvent) -> None:
    state = machine.state
    text = f"{machine.name}, {machine.arch}, {machine.sm_count} SMs, driver {state.driver or 'unknown'}"
    on_event(Event("preflight", "", text))
    faults = []
    if state.other_processes:
        faults.append(f"other processes run on it: {', '.join(map(str, state.other_processes))}")
    if state.mig:
        faults.append("it is divided by MIG, and times of a part are not those of a whole")
    if state.mps:
        faults.append("it is shared through MPS")
    if state.throttled:
        faults.append("it is throttled by heat or by the hardware")
    if faults:
        raise EnvironmentUnsuitable(f"{machine.name} cannot be timed now: {'; '.join(faults)}")
    unknown = [name for name in ("other_processes", "mig", "mps", "throttled") if getattr(state, name) is None]
    if unknown:
        on_event(Event("preflight", "", f"the driver does not tell: {', '.join(unknown)}"))


def _space(problem: TuneProblem, arch: Arch, sm_count: int) -> SearchSpace:
    return SearchSpace(problem.facts, arch, sm_count, problem.op)


def _journal(space: SearchSpace, machine: Machine, directory: Path | None, *, resume: bool) -> Path | None:
    """The journal of a problem on this kind of GPU with this software; a new one unless resume. None: nowhere to write."""
    if directory is None:
        cache = writable_cache_dir()
        if cache is None:
            return None
        directory = cache / "tuning"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    templates = {
        step.template.name: step.template.source_sha256()
        for strategy in space.strategies for step in space.steps(strategy.name).values()
    }
    identity = [
        PROTOCOL, space.op, facts_to_json(space.facts), machine.arch, machine.sm_count, machine.l2_bytes,
        machine.state.driver, Versions.here().model_dump(), templates,
        settings().mode == "require",    # then what was not built is out
    ]
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    path = directory / f"{digest[:32]}.jsonl"
    if not resume:
        path.unlink(missing_ok=True)
    return path


def _of_record(record: Record, machine: Machine, device: int) -> tuple[TuneProblem, SearchSpace]:
    here = tuning_records.Hardware(arch=machine.arch, sm_count=machine.sm_count, l2_bytes=machine.l2_bytes)
    if record.hardware != here:
        raise EnvironmentUnsuitable(f"expected records for this GPU, {here}; got one for {record.hardware}")
    facts = facts_of(record.problem, torch.device("cuda", device))
    space = SearchSpace(facts, ARCHES[machine.arch], machine.sm_count, record.op)
    lengths = tuple(space.lengths(point.extents) for point in record.points)
    return TuneProblem(facts, lengths, record.points[0].gates, record.op), space


def _candidate(space: SearchSpace, entry: Entry) -> Candidate:
    return space.from_json({"strategy": entry.candidate.strategy, "configs": entry.candidate.configs, "split": None})


def _verify_entry(bench: Bench, space: SearchSpace, entry: Entry, record: Record, reference: Candidate) -> str | None:
    if entry is record.entries[0]:
        variants = [space.default(point.extents) for point in record.points]
    else:
        rejection = select.entry_rejection(entry, space.facts, space.arch, op=space.op)
        if rejection is not None:
            return str(rejection)
        variants = [_candidate(space, entry).with_split(measured.split) for measured in entry.curve if measured is not None]
    for variant in dict.fromkeys(variants):
        (built,) = bench.build(space, [variant])
        if isinstance(built, Failure):
            return f"{built.reason}: {built.detail}"
        verdict = bench.verify(space, variant, reference=reference, full=True)
        if isinstance(verdict, Failure):
            return f"{verdict.reason}: {verdict.detail}"
    return None


def _won_points(record: Record) -> list[tuple[int, Entry]]:
    """The points where an entry beat the default beyond doubt, with the best entry."""
    won = []
    for index in range(len(record.points)):
        timed = [entry for entry in record.entries[1:] if entry.curve[index] is not None]
        best = max(timed, key=lambda entry: entry.curve[index].speedup.value, default=None)
        if best is not None and best.curve[index].speedup.low > 1 + TIE:
            won.append((index, best))
    return won


def _check_point(
    bench: Bench, space: SearchSpace, problem: TuneProblem, record: Record, index: int, entry: Entry
) -> Check:
    recorded, lengths, point = entry.curve[index], problem.lengths[index], record.points[index]
    where = f"{problem} at {batch_name(lengths)}"
    rejection = select.entry_rejection(entry, space.facts, space.arch, op=space.op)
    if rejection is not None:
        return Check(record, f"{where}: {rejection}", regressed=True)
    pair = [space.default(point.extents), _candidate(space, entry).with_split(recorded.split)]
    built = bench.build(space, pair)
    failure = next((outcome for outcome in built if isinstance(outcome, Failure)), None)
    timing = failure or bench.time(space, lengths, point.gates, pair, blocks=RACE_BLOCKS)
    if isinstance(timing, Failure):
        return Check(record, f"{where}: {timing.reason}: {timing.detail}", regressed=True)
    now, then = estimate(timing.blocks, 1), recorded.speedup
    text = (
        f"{where}: {now.speedup:.3f}x [{now.low:.3f}, {now.high:.3f}], "
        f"recorded {then.value:.3f}x [{then.low:.3f}, {then.high:.3f}]; "
        f"{now.median_us:.1f} us, recorded {recorded.median_us:.1f} us"
    )
    return Check(record, text, regressed=now.high < (1 - TIE) * then.low)
