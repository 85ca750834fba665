"""The verbs that need a GPU: tune, verify, check."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer

from .. import record_store
from ..capture import load_workload
from ..errors import InputError
from ..ops.plan import OPS
from ..record_store import Stored
from ..tune import report, session
from ..tuning_records import Hardware
from ..workload import DEFAULT_LENGTHS, Target, coverage, facts_of, parse_batches, targets_of
from .command import ExitCode, NoSuchRecordError, verb
from .options import (
    AsJson,
    Backward,
    ChunkSize,
    Device,
    Dims,
    Dtype,
    Heads,
    LayerFilter,
    Models,
    Packed,
    Tp,
    hardware_of,
    op_of,
    parse_seconds,
    problem_of,
    shapes_of,
    stored_records,
)
from .output import describe, label, print_json, print_table, progress, stale


@verb
def tune(
    heads: Heads = None,
    dims: Dims = None,
    models_: Models = None,
    tp: Tp = None,
    workload: Annotated[Path | None, typer.Option("--workload", help="What QLA_JIT_CAPTURE wrote: a file or directory.")] = None,
    lengths: Annotated[
        str, typer.Option("--lengths", help="Batches: 2048:32768 (powers of two), 4x8192, 8192+300 (packed), with commas.")
    ] = DEFAULT_LENGTHS,
    packed: Packed = False,
    backward: Backward = False,
    dtype: Dtype = "bfloat16",
    chunk_size: ChunkSize = 64,
    gates: Annotated[str, typer.Option("--gates", help="Gates of the timed inputs: mixed, qwen, open or closed.")] = "mixed",
    budget: Annotated[str | None, typer.Option("--budget", help="Time for the whole run: 10m, 90s, 1h30m.")] = None,
    finalists: Annotated[int, typer.Option("--finalists", min=2, help="Candidates that are raced.")] = 4,
    report_path: Annotated[Path | None, typer.Option("--report", help="Write the session as an HTML page.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where a run of the same problem was stopped.")] = False,
    device: Device = 0,
    as_json: AsJson = False,
) -> ExitCode:
    """Find, verify and race configs, and keep the best as your records."""
    if report_path is not None and not report_path.parent.is_dir():
        raise InputError(f"--report must be a file in a directory that is there; got {report_path}")
    seconds = None if budget is None else parse_seconds(budget)
    captured = None if workload is None else load_workload(workload)
    if [bool(heads or dims), bool(models_ or tp), captured is not None].count(True) != 1:
        raise InputError("what to tune must be given by --heads and --dims, by --model and --tp, or by --workload")
    if captured is not None:
        targets = targets_of(captured)
    else:
        batches = parse_batches(lengths, packed=packed)
        targets = [
            Target(problem_of(*head_counts, *head_dims, dtype, chunk_size, packed), batches, gates)
            for head_counts, head_dims in shapes_of(heads, dims, models_, tp)
        ]
    op = op_of(backward)
    request = session.TuneRequest(
        tuple(
            session.TuneProblem(facts_of(target.problem, torch.device("cuda", device)), target.batches, target.gates, op)
            for target in targets
        ),
        finalists=finalists,
        command=_own_command(),
    )
    with progress() as on_event:
        result = session.tune(
            request, on_event=on_event, on_record=lambda record: record_store.save_user_records([record]),
            resume=resume, budget_seconds=seconds,
        )
    if report_path is not None:
        report_path.write_text(report.html(result))
    results = [
        {
            "problem": str(of_problem.problem),
            "outcome": of_problem.outcome,
            "reason": of_problem.reason,
            "record": None if of_problem.record is None else describe(of_problem.record),
        }
        for of_problem in result.problems
    ]
    covered = None
    if captured is not None:
        hardware = Hardware(arch=result.machine.arch, sm_count=result.machine.sm_count, l2_bytes=result.machine.l2_bytes)
        covered = coverage(captured, hardware, op=op)
    if as_json:
        print_json({"outcome": result.outcome, "seconds": result.seconds, "problems": results, "confirmed_share": covered})
    else:
        print_table(
            ("problem", "outcome", "rigor", "speedup", "config"),
            [
                (row["problem"], row["outcome"] + (f": {row['reason']}" if row["reason"] else ""))
                + (("", "", "") if row["record"] is None else tuple(row["record"][key] for key in ("rigor", "speedup", "config")))
                for row in results
            ],
        )
        if covered is not None:
            typer.echo(f"{covered:.0%} of the captured calls have confirmed records")
    return {"complete": ExitCode.OK, "interrupted": ExitCode.INTERRUPTED}.get(result.outcome, ExitCode.PARTIAL)


@verb
def verify(
    heads: Heads = None, dims: Dims = None, layer: LayerFilter = None, device: Device = 0, as_json: AsJson = False
) -> ExitCode:
    """Run the admission checks of stored records again, on this GPU."""
    found = _of_this_gpu(stored_records(heads, dims, layer), device)
    with progress() as on_event:
        results = session.verify_records([s.record for s in found], device=device, on_event=on_event)
    rows = [(str(r.record.identity), label(r.candidate), r.failure or "passed") for r in results]
    if as_json:
        print_json([dict(zip(("record", "candidate", "result"), row, strict=True)) for row in rows])
    else:
        print_table(("record", "candidate", "result"), rows)
    return ExitCode.VERIFICATION if any(result.failure is not None for result in results) else ExitCode.OK


@verb
def check(
    heads: Heads = None,
    dims: Dims = None,
    layer: LayerFilter = None,
    most: Annotated[int | None, typer.Option("--records", min=1, help="At most so many records, stale ones first.")] = None,
    points: Annotated[int | None, typer.Option("--points", min=1, help="At most so many points of each record.")] = None,
    device: Device = 0,
    as_json: AsJson = False,
) -> ExitCode:
    """Time stored records again, after a change of driver or toolkit, and say which became slower."""
    found = sorted(_of_this_gpu(stored_records(heads, dims, layer), device), key=lambda s: not stale(s.record))[:most]
    with progress() as on_event:
        results = session.check_records([s.record for s in found], device=device, points=points, on_event=on_event)
    if as_json:
        print_json([{"record": str(r.record.identity), "text": r.text, "regressed": r.regressed} for r in results])
    else:
        print_table(("", "point"), [("slower" if r.regressed else "ok", r.text) for r in results])
    return ExitCode.REGRESSION if any(result.regressed for result in results) else ExitCode.OK


def _of_this_gpu(found: Sequence[Stored], device: int) -> list[Stored]:
    hardware = hardware_of(None, device)
    mine = [s for s in found if s.record.hardware == hardware and s.record.op in OPS]
    if not mine:
        here = f"{hardware.arch} with {hardware.sm_count} SMs"
        raise NoSuchRecordError(f"there are no such records for this GPU, {here}; qla-tune show lists what there is")
    return mine


def _own_command() -> str:
    """The command line as it goes into records: without paths, which are this machine's."""
    return shlex.join(["qla-tune", *(Path(word).name if "/" in word else word for word in sys.argv[1:])])[:2_000]
