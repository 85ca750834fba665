"""Run a tuning session: what `qla-tune tune`, `verify` and `check` do, without a terminal.

    tune(request, ...)                 search, verify, race, and hand over one record per problem as it is ready
    verify_records(records, ...)       run the admission checks of stored records again
    check_records(records, ...)        time stored records again and compare with their intervals
    prebuild(request, ...)             compile what the search looks at first, on a machine without a GPU

Progress goes to `on_event` as Event values; nothing is printed. Ctrl-C is not an error here: the result says `interrupted`, and
holds what was ready.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ..ops.inputs import CallFacts

Stage = Literal["preflight", "compile", "verify", "screen", "race", "confirm", "record"]
Outcome = Literal["complete", "budget spent", "interrupted"]


@dataclass(frozen=True)
class TuneProblem:
    """One call to tune: its static facts, and the batches to measure it on."""

    facts: CallFacts                         # facts.device is the GPU to tune on
    lengths: tuple[tuple[int, ...], ...]     # one entry a batch: the tokens of each of its sequences
    gates: str = "mixed"                     # of measure.GATE_PROFILES: which gates the timed inputs have
    weights: tuple[float, ...] = ()          # share of each batch in the workload; empty: all alike


@dataclass(frozen=True)
class TuneRequest:
    """What to tune, and how far to look."""

    problems: tuple[TuneProblem, ...]
    finalists: int = 4                       # candidates that are raced, the default among them


@dataclass(frozen=True)
class Event:
    """Something happened that a person who watches wants to see; `text` is one line."""

    stage: Stage
    problem: str                             # "H2 HV8 K128 V128", or "" for the session as a whole
    text: str
    done: int = 0                            # of `total` in this stage of this problem
    total: int = 0
    best: str = ""                           # the best candidate so far and its ratio to the default


@dataclass(frozen=True)
class ProblemResult:
    """What became of one problem."""

    problem: TuneProblem
    outcome: Outcome
    record: object | None                    # the tuning record that was handed to on_record; None: too little was measured
    trials: tuple[object, ...] = ()          # every candidate that was looked at, with its outcome and reason
    why_no_record: str = ""


@dataclass(frozen=True)
class SessionResult:
    """What a session did. Exit code 0 when all is complete, 3 when a problem has no record, 130 when interrupted."""

    problems: tuple[ProblemResult, ...]
    outcome: Outcome
    conditions: dict[str, object] = field(default_factory=dict)      # of the machine, for the report


@dataclass(frozen=True)
class Verification:
    """One stored record, looked at again: failure is None if it passed, else the reason."""

    record: object
    failure: str | None


@dataclass(frozen=True)
class Check:
    """One point of a stored record, timed again against the default."""

    record: object
    text: str                                # "H2 HV8 1x32768: 1.21x [1.20, 1.22], stored 1.23x [1.22, 1.24]"
    regressed: bool                          # the new interval lies below the stored one


def tune(
    request: TuneRequest,
    *,
    on_event: Callable[[Event], None] = lambda event: None,
    on_record: Callable[[object], None] = lambda record: None,
    resume: bool = False,
    budget_seconds: float | None = None,
    journal_dir: Path | None = None,
) -> SessionResult:
    """Find, verify and race candidates for each problem.

    Args:
        on_event: progress, as it happens, in the calling thread.
        on_record: receives the record of a problem as soon as it is final: store it there.
        resume: take finished trials from the journal of an earlier session on the same problem, GPU kind and kernels.
        budget_seconds: for the whole session, shared evenly by the problems that are left; None is no limit. When it is
            spent, what has been raced becomes a record, and problems not yet begun are left out.
        journal_dir: where trials are written as they end; None is `tuning/` in the cache directory.

    Raises:
        EnvironmentUnsuitable: no supported GPU, another tuner on it, MIG or MPS, throttling, or too noisy to measure
            (the default against itself has an interval wider than 1 %).
    """
    raise NotImplementedError


def verify_records(
    records: Sequence[object], *, device: int = 0, on_event: Callable[[Event], None] = lambda event: None
) -> list[Verification]:
    """Run the full admission checks of every dispatch of the records again, on this GPU."""
    raise NotImplementedError


def check_records(
    records: Sequence[object], *, device: int = 0, on_event: Callable[[Event], None] = lambda event: None
) -> list[Check]:
    """Time each stored point again against the default, and say which left its interval: after a change of driver or toolkit."""
    raise NotImplementedError


def prebuild(request: TuneRequest, *, arch: str, on_event: Callable[[Event], None] = lambda event: None) -> list[str]:
    """Compile the kernels of the search's first pass; the reasons of those that did not build. Needs no GPU."""
    raise NotImplementedError
