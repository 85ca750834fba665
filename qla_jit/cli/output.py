"""How does qla-tune tell what it found? Plain tables, JSON, and a progress bar on stderr."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ..select import Considered, Dispatch
from ..templates import template_sources
from ..tune.session import Event
from ..tuning_records import Candidate, Entry, Record, Versions


def print_json(data: Any) -> None:
    typer.echo(json.dumps(data, indent=1))


def print_table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    texts = [[str(cell) for cell in row] for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    for row in texts:
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def print_curves(record: Record) -> None:
    rows, default = [], record.entries[0].candidate
    for number, entry in enumerate(record.entries):
        for point, timed in zip(record.points, entry.curve, strict=True):
            if timed is not None:
                ratio = timed.speedup
                speedup = "" if ratio is None else f"{ratio.value:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]"
                place = (point.chunks, point.longest, point.sequences, point.gates, timed.split or "")
                rows.append(("default" if number == 0 else label(entry.candidate, default), *place, timed.median_us, speedup))
    print_table(("config", "chunks", "longest", "sequences", "gates", "split", "us", "speedup"), rows)
    for negative in record.negatives:
        typer.echo(f"thrown out, {negative.reason.value}: {label(negative.candidate, default)}: {negative.detail}")


def print_explanation(data: Mapping[str, Any]) -> None:
    answer = data["answer"]
    typer.echo(data["call"] + ("" if data["extents"] is None else ", " + _told_extents(data["extents"])))
    facts = [f"answer: {answer['source']}", f"match {answer['match']}", f"rigor {answer['rigor']}"]
    if answer["expected_regret"] is not None:
        facts += [f"expected regret {answer['expected_regret']:.1%}", f"{answer['age_days']} days old"]
    typer.echo(", ".join(facts))
    if answer["stale"]:
        typer.echo(f"stale: {', '.join(answer['stale'])}")
    split = "whole sequences" if answer["split"] is None else f"split every {answer['split']} chunks"
    typer.echo(f"{answer['strategy']}, {split}")
    for step, knobs in answer["configs"].items():
        typer.echo(f"  {step}: {knobs}")
    for asked in data["asked"]:
        silent = "the sizes are outside of what was measured, or the default is another today"
        match = silent if asked["match"] == "none" else asked["match"]
        typer.echo(f"\n{asked['layer']}, {asked['place']}: {match}")
        if asked["ways"]:
            rows = []
            for way in asked["ways"]:
                mark, times = "->" if way["chosen"] else "", (f"{way[key]:.3f}" for key in ("speedup", "low"))
                rows.append((mark, way["config"], *times, way["rejection"] or ""))
            print_table(("", "config", "speedup", "at least", "why not"), rows)
    if data["nearest"] is not None:
        typer.echo(f"\nnearest record, {data['nearest']['layer']}: differs in {', '.join(data['nearest']['differs_in'])}")
    if answer["match"] == "none":
        typer.echo(f"\nto tune it: {data['command']}")


def describe(record: Record) -> dict[str, Any]:
    """A record in a few words."""
    problem, hardware = record.problem, record.hardware
    speedup, config = gain(record)
    return {
        "op": record.op,
        "gpu": f"{hardware.arch}:{hardware.sm_count}:{hardware.l2_bytes >> 20}",
        "heads": f"{problem.H}:{problem.HV}",
        "dims": f"{problem.K}:{problem.V}",
        "dtype": problem.dtype,
        "chunk": problem.chunk_size,
        "packed": "yes" if problem.varlen else "no",
        "rigor": record.rigor.value,
        "speedup": f"{speedup:.3f}",
        "config": config,
        "recorded": f"{record.provenance.recorded:%Y-%m-%d}",
        "stale": ", ".join(stale(record)),
    }


def gain(record: Record) -> tuple[float, str]:
    """What calls get at the measured points: the geometric mean of the best speed-ups, and the config that is best most often."""
    default = record.entries[0]
    logs: list[float] = []
    winners: list[Entry] = []
    for index in range(len(record.points)):
        timed = [entry for entry in record.entries[1:] if entry.curve[index] and entry.curve[index].speedup.low > 1]
        best = max(timed, key=lambda entry: entry.curve[index].speedup.low, default=None)
        if best is not None:
            logs.append(math.log(best.curve[index].speedup.value))
            winners.append(best)
    if not winners:
        return 1.0, "default"
    usual = max(winners, key=winners.count)
    name = label(usual.candidate, default.candidate)
    where = "" if winners.count(usual) == len(record.points) else f", at {winners.count(usual)} of {len(record.points)} sizes"
    return math.exp(sum(logs) / len(record.points)), name + where


def label(candidate: Candidate, default: Candidate | None = None) -> str:
    """A candidate by its strategy and its knobs; those that are the default's are left out."""
    words = [candidate.strategy]
    for step, knobs in candidate.configs.items():
        usual = {} if default is None or default.strategy != candidate.strategy else default.configs.get(step, {})
        turned = [f"{knob}={value}" for knob, value in knobs.items() if knob not in usual or usual[knob] != value]
        if turned:
            words.append(f"{step}({', '.join(turned)})")
    return " ".join(words)


def stale(record: Record) -> tuple[str, ...]:
    """In what the software has changed since the record, as far as it is known without building anything."""
    return record.provenance.differences(_versions(), template_sources())


@functools.cache
def _versions() -> Versions:
    return Versions.here()


def describe_dispatch(dispatch: Dispatch) -> dict[str, Any]:
    record = None if dispatch.considered is None else dispatch.considered.stored.record
    return {
        "source": dispatch.source,
        "match": dispatch.match,
        "rigor": dispatch.rigor.value,
        "expected_regret": dispatch.expected_regret,
        "age_days": None if record is None else (datetime.now(timezone.utc) - record.provenance.recorded).days,
        "stale": list(dispatch.stale),
        "strategy": dispatch.strategy,
        "split": dispatch.split,
        "configs": {step: dataclasses.asdict(request.config) for step, request in dispatch.requests.items()},
    }


def describe_considered(considered: Considered) -> dict[str, Any]:
    default = considered.stored.record.entries[0].candidate
    return {
        "layer": considered.stored.layer,
        "place": str(considered.stored.place),
        "match": considered.match,
        "ways": [
            {
                "config": "default" if number == 0 else label(way.entry.candidate, default),
                "speedup": way.speedup,
                "low": way.speedup_low,
                "rejection": None if way.rejection is None else str(way.rejection),
                "chosen": way is considered.chosen,
            }
            for number, way in enumerate(considered.ways)
        ],
    }


def _told_extents(extents: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {value}" for name, value in extents.items())


@contextlib.contextmanager
def progress() -> Iterator[Callable[[Event], None]]:
    """A bar on stderr with the stage, and how far it is; lines where stderr is no terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda event: typer.echo(f"{event.stage}: {event.problem} {event.text}".rstrip(), err=True)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)

        def on_event(event: Event) -> None:
            description = f"{event.problem} {event.stage}: {event.text}".strip()
            bar.update(task, description=description, completed=event.done, total=event.total or None)

        yield on_event
