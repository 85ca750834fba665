"""Write what a tuner found as a tuning record."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any

from ..tuning_records import (
    Candidate as RecordedCandidate,
)
from ..tuning_records import (
    Entry,
    Hardware,
    Measurement,
    Negative,
    Point,
    Problem,
    Provenance,
    Ratio,
    Reason,
    Record,
    Versions,
)
from .bench import Machine
from .measure import PROTOCOL, estimate
from .search_space import Candidate, SearchSpace
from .tuner import Batch, Finalist, Findings, Race, Trial, TuneProblem, at_batch

NEGATIVE_REASONS = {reason.value for reason in Reason}


def record_of(problem: TuneProblem, space: SearchSpace, machine: Machine, findings: Findings, *, command: str) -> Record | None:
    """The record, or None while no batch has been timed."""
    if not findings.races:
        return None
    batches = list(findings.races)
    at = [_columns(space, batch, race, findings.finalists) for batch, race in findings.races.items()]
    entries = [
        Entry(
            candidate=_recorded(finalist.candidate),
            split_rule=finalist.rule,
            verdict=finalist.verdict,
            curve=tuple(
                None if columns[number] is None else _measurement(race, columns[number], is_default=number == 0)
                for race, columns in zip(findings.races.values(), at, strict=True)
            ),
        )
        for number, finalist in enumerate(findings.finalists)
    ]
    versions = Versions.here()
    if machine.state.driver is not None:
        versions = versions.model_copy(update={"driver": machine.state.driver})
    return Record(
        op=space.op,
        hardware=Hardware(arch=machine.arch, sm_count=machine.sm_count, l2_bytes=machine.l2_bytes),
        problem=Problem.of(space.facts),
        rigor=findings.rigor,
        points=tuple(point_of(batch, problem.gates) for batch in batches),
        entries=tuple(entry for entry in entries if any(entry.curve)),
        negatives=_negatives(findings.trials, versions),
        provenance=Provenance(
            versions=versions,
            templates=_template_hashes(space, findings.finalists),
            gpu=machine.name,
            sm_mhz=machine.state.max_sm_mhz,
            memory_mhz=machine.state.max_memory_mhz,
            recorded=datetime.now(timezone.utc).replace(microsecond=0),
            command=command,
        ),
    )


def point_of(batch: Batch, gates: str) -> Point:
    return Point(
        chunks=batch.extents.chunks, longest=batch.extents.longest, sequences=batch.extents.sequences, gates=gates
    )


def _columns(space: SearchSpace, batch: Batch, race: Race, finalists: Sequence[Finalist]) -> list[int | None]:
    """The column of each finalist in a race: the default's is 0, another's that of its configs with the split that it gets."""
    columns: list[int | None] = [0]
    for finalist in finalists[1:]:
        candidate = at_batch(space, finalist, batch)
        columns.append(race.candidates.index(candidate) if candidate in race.candidates else None)
    return columns


def _measurement(race: Race, column: int, *, is_default: bool) -> Measurement:
    estimated, timing = estimate(race.timing.blocks, column), race.timing
    return Measurement(
        protocol=PROTOCOL,
        samples=estimated.samples,
        median_us=estimated.median_us,
        mad_us=estimated.mad_us,
        speedup=None if is_default else Ratio(value=estimated.speedup, low=estimated.low, high=estimated.high),
        split=race.candidates[column].split,
        strategy=race.candidates[column].strategy if is_default else None,
        sm_mhz=timing.sm_mhz,
        dropped=timing.dropped,
        throttled=timing.throttled,
        contended=timing.contended,
    )


def _negatives(trials: Sequence[Trial], versions: Versions) -> tuple[Negative, ...]:
    """What must not be tried again; each candidate once."""
    found = {
        trial.candidate: trial.failure for trial in trials
        if trial.failure is not None and trial.failure.reason in NEGATIVE_REASONS
    }
    return tuple(
        Negative(
            candidate=_recorded(candidate), split=candidate.split, reason=Reason(failure.reason),
            detail=failure.detail.splitlines()[0][:2000],      # the rest is of this machine: logs and their paths
            versions=versions,
        )
        for candidate, failure in found.items()
    )


def _template_hashes(space: SearchSpace, finalists: Sequence[Finalist]) -> dict[str, str]:
    templates = {
        step.template.name: step.template
        for finalist in finalists for step in space.steps(finalist.candidate.strategy).values()
    }
    return {name: template.source_sha256() for name, template in templates.items()}


def _recorded(candidate: Candidate) -> RecordedCandidate:
    data: dict[str, Any] = candidate.to_json()
    return RecordedCandidate(strategy=data["strategy"], configs=data["configs"])
