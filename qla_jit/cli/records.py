"""The verbs that look at tuned records and move them: show, explain, export, import, merge, diff, prune."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from .. import record_store, select
from ..errors import EnvironmentUnsuitable, InputError
from ..kernel_templates.arch import ARCHES
from ..ops.plan import chunk_of_sizes
from ..tune.search_space import extents_of
from ..tuning_records import Identity, Problem, Record, Rigor, diff, merge, save, save_directory
from ..workload import facts_of, parse_batches
from .command import ExitCode, NoSuchRecordError, verb
from .options import (
    AsJson,
    Backward,
    ChunkSize,
    Device,
    Dims,
    Dtype,
    Gpu,
    Heads,
    LayerFilter,
    LayerOption,
    Packed,
    Prefer,
    PreferOption,
    hardware_of,
    load_records,
    op_of,
    problem_of,
    shapes_of,
    stored_records,
)
from .output import (
    describe,
    describe_considered,
    describe_dispatch,
    print_curves,
    print_explanation,
    print_json,
    print_table,
    stale,
)


@verb
def show(
    heads: Heads = None,
    dims: Dims = None,
    layer: LayerFilter = None,
    curves: Annotated[bool, typer.Option("--curves", help="Also the times at every point, and what was thrown out.")] = False,
    as_json: AsJson = False,
) -> ExitCode:
    """List the tuned records."""
    found = stored_records(heads, dims, layer)
    if as_json:
        told = [{"layer": s.layer, "place": str(s.place), **describe(s.record)} for s in found]
        for row, s in zip(told, found if curves else (), strict=False):
            row["record"] = json.loads(s.record.to_json())
        print_json(told)
        return ExitCode.OK
    keys = ("op", "gpu", "heads", "dims", "dtype", "chunk", "packed", "rigor", "speedup", "config", "recorded", "stale")
    print_table(("layer", *keys), [(s.layer, *(describe(s.record)[key] for key in keys)) for s in found])
    for s in found if curves else ():
        typer.echo(f"\n{s.record.identity}, {s.layer}: {s.place}")
        print_curves(s.record)
    return ExitCode.OK


@verb
def explain(
    heads: Heads = None,
    dims: Dims = None,
    seqlens: Annotated[str | None, typer.Option("--lengths", help="One batch: 8192, 4x8192, or packed 8192+300+1.")] = None,
    backward: Backward = False,
    packed: Packed = False,
    dtype: Dtype = "bfloat16",
    chunk_size: ChunkSize = 64,
    gpu: Gpu = None,
    device: Device = 0,
    require: Annotated[Rigor | None, typer.Option("--require", help="Exit with 8 unless a record of this rigor answers.")] = None,
    as_json: AsJson = False,
) -> ExitCode:
    """Say how a call would be computed, which record decided it, and what else there was."""
    shapes = shapes_of(heads, dims, None, None)
    batches = () if seqlens is None else parse_batches(seqlens, packed=packed)
    if len(shapes) != 1 or len(batches) > 1:
        raise InputError("explain is about one call: give one pair of --heads and --dims, and one batch as --lengths")
    problem = problem_of(*shapes[0][0], *shapes[0][1], dtype, chunk_size, packed)
    hardware = hardware_of(gpu, device)
    facts, op = facts_of(problem, torch.device("cuda", device)), op_of(backward)
    extents = extents_of(batches[0], chunk_of_sizes(op, facts)) if batches else None
    arch = ARCHES[hardware.arch]
    dispatch = select.choose(facts, arch, op=op, hardware=hardware, extents=extents)
    asked = list(select.consider(facts, arch, hardware, extents, op=op))
    identity = Identity(op=op, hardware=hardware, problem=Problem.of(dispatch.facts))
    nearest = _nearest(identity) if not asked else None
    data = {
        "call": str(identity),
        "extents": None if extents is None else dataclasses.asdict(extents),
        "answer": describe_dispatch(dispatch),
        "asked": [describe_considered(considered) for considered in asked],
        "nearest": nearest,
        "command": select.tune_command(facts, extents, op=op),
    }
    if as_json:
        print_json(data)
    else:
        print_explanation(data)
    if require is not None and (dispatch.match == "none" or dispatch.rigor.rank < require.rank):
        got = "none" if dispatch.match == "none" else dispatch.rigor.value
        raise NoSuchRecordError(f"expected a {require.value} record for these sizes; got {got}; {data['command']}")
    return ExitCode.OK


@verb
def export(
    path: Annotated[Path, typer.Argument(help="A directory, which gets a file for each operation and arch; or a .json file.")],
    heads: Heads = None,
    dims: Dims = None,
    layer: LayerFilter = LayerOption.USER,
    as_json: AsJson = False,
) -> ExitCode:
    """Write records to JSON files, to be shipped or read through QLA_JIT_DB_PATH."""
    found = [s.record for s in stored_records(heads, dims, layer)]
    if not found:
        raise NoSuchRecordError("there are no such records; qla-tune show lists what there is")
    return _written(path, found, as_json)


@verb
def import_(
    paths: Annotated[list[Path], typer.Argument(help="JSON files, or directories of them.")],
    prefer: Prefer = PreferOption.RIGOR,
    as_json: AsJson = False,
) -> ExitCode:
    """Take JSON files into your records: all of them, or none if one is damaged."""
    incoming: list[Record] = []
    for path in paths:
        incoming = merge(incoming, load_records(path), prefer=prefer.preference)
    kept = record_store.save_user_records(incoming, prefer=prefer.preference)
    taken = sum(record in incoming for record in kept)
    if as_json:
        print_json({"read": len(incoming), "taken": taken})
    else:
        typer.echo(f"{taken} of {len(incoming)} records taken; for the others there is a better one, by {prefer.value}")
    return ExitCode.OK


@verb
def merge_(
    paths: Annotated[list[Path], typer.Argument(help="JSON files or directories; the first is ours.")],
    out: Annotated[Path, typer.Option("--out", help="A directory, or a .json file.")],
    prefer: Prefer = PreferOption.RIGOR,
    as_json: AsJson = False,
) -> ExitCode:
    """Make one set of records of several."""
    merged: list[Record] = []
    for path in paths:
        merged = merge(merged, load_records(path), prefer=prefer.preference)
    return _written(out, merged, as_json)


@verb
def diff_(
    ours: Annotated[Path, typer.Argument(help="A JSON file or a directory.")],
    theirs: Annotated[Path, typer.Argument(help="A JSON file or a directory.")],
    as_json: AsJson = False,
) -> ExitCode:
    """Say what theirs has, lacks, or has otherwise."""
    found = diff(load_records(ours), load_records(theirs))
    rows = [(difference.kind, str(difference.identity), ", ".join(difference.fields)) for difference in found]
    if as_json:
        print_json([dict(zip(("kind", "record", "fields"), row, strict=True)) for row in rows])
    else:
        print_table(("", "record", "fields"), rows)
    return ExitCode.OK


@verb
def prune(
    heads: Heads = None,
    dims: Dims = None,
    only_stale: Annotated[bool, typer.Option("--stale", help="Stale records.")] = False,
    below: Annotated[Rigor | None, typer.Option("--below", help="Records of less rigor.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="All that --heads and --dims name.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be removed.")] = False,
    as_json: AsJson = False,
) -> ExitCode:
    """Remove from your records what cannot be read, and what the options name."""
    doomed = [
        s.record for s in stored_records(heads, dims, LayerOption.USER)
        if everything or (only_stale and stale(s.record)) or (below is not None and s.record.rigor.rank < below.rank)
    ]
    if not dry_run:
        record_store.drop_unreadable()
        record_store.delete_user_records(record.identity for record in doomed)
    names = [str(record.identity) for record in doomed]
    if as_json:
        print_json({"removed": names, "dry_run": dry_run})
    else:
        print_table(("would be removed" if dry_run else "removed",), [(name,) for name in names])
    return ExitCode.OK


def _nearest(identity: Identity) -> dict[str, Any] | None:
    """The record of the same operation that differs in the fewest fields."""
    wanted = _flat(identity)
    candidates = []
    for stored in record_store.everything():
        if stored.record.op != identity.op:
            continue
        there = _flat(stored.record.identity)
        differs_in = [f"{name} ({there[name]} there, {wanted[name]} asked)" for name in wanted if there[name] != wanted[name]]
        candidates.append({"layer": stored.layer, "place": str(stored.place), "differs_in": differs_in})
    return min(candidates, key=lambda candidate: len(candidate["differs_in"]), default=None)


def _flat(identity: Identity) -> dict[str, Any]:
    return {**identity.hardware.model_dump(), **identity.problem.model_dump()}


def _written(path: Path, records: Sequence[Record], as_json: bool) -> ExitCode:
    try:
        if path.suffix == ".json":
            save(path, records)
            files = [path]
        else:
            files = save_directory(path, records)
    except OSError as error:
        raise EnvironmentUnsuitable(f"{path} cannot be written: {error.strerror}") from None
    if as_json:
        print_json({"records": len(records), "files": [str(file) for file in files]})
    else:
        typer.echo(f"{len(records)} records in {', '.join(map(str, files))}")
    return ExitCode.OK
