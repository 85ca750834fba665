"""The command line, qla-tune: tune, look at, check and move what was tuned, and build kernels ahead.

Results go to stdout, as plain tables or with --json as one JSON document; progress and errors go to stderr.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from . import bundle, enumeration, record_store, select
from .capture import load_workload
from .cli_output import (
    describe,
    describe_considered,
    describe_dispatch,
    label,
    print_curves,
    print_explanation,
    print_json,
    print_table,
    progress,
    stale,
)
from .device import gpu_count, gpu_info
from .doctor import examine
from .enumeration import Variants
from .errors import EnvironmentUnsuitable, InputError, QLAError, RecordError, UnsupportedError, VerificationError
from .kernel_templates.arch import ARCHES
from .models import ModelShape, model, models
from .ops.inputs import GPU_DTYPES, INDEX_DTYPES, KERNEL_DTYPES
from .record_store import Stored
from .tune import report, session
from .tune.search_space import extents_of
from .tune.session import Event
from .tuning_records import (
    FORWARD,
    Hardware,
    Identity,
    Preference,
    Problem,
    Record,
    Rigor,
    diff,
    load,
    merge,
    save,
    save_directory,
)
from .workload import DEFAULT_LENGTHS, Target, coverage, facts_of, parse_batches, parse_pairs, targets_of


class ExitCode(enum.IntEnum):
    OK = 0
    USAGE = 2                            # also what typer exits with
    PARTIAL = 3                          # a problem has no complete record, or a kernel was not built
    VERIFICATION = 4
    ENVIRONMENT = 5
    DATABASE = 6
    REGRESSION = 7
    MISSING = 8                          # a record that is needed is not there
    INTERRUPTED = 130


class NoSuchRecordError(QLAError):
    """A record that the command needs is not there."""


# The first that fits; other errors of ours are about the request.
ERROR_CODES: tuple[tuple[type[QLAError], ExitCode], ...] = (
    (NoSuchRecordError, ExitCode.MISSING),
    (RecordError, ExitCode.DATABASE),
    (VerificationError, ExitCode.VERIFICATION),
    (InputError, ExitCode.USAGE),
    (UnsupportedError, ExitCode.USAGE),
    (QLAError, ExitCode.ENVIRONMENT),
)

app = typer.Typer(
    name="qla-tune", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
    help="Tune the kernels of qla_jit, look at, check and move what was tuned, and build kernels ahead. Exit codes: 0 ok, "
    "2 usage, 3 partial, 4 verification failed, 5 environment unsuitable, 6 database invalid, 7 regression, "
    "8 required record missing, 130 interrupted.",
)


class PreferOption(str, enum.Enum):
    RIGOR = "rigor"
    NEWEST = "newest"
    FASTEST = "fastest"
    OURS = "ours"

    @property
    def preference(self) -> Preference:
        return self.value


class LayerOption(str, enum.Enum):
    USER = "user"
    DIRECTORY = "directory"
    SHIPPED = "shipped"


Heads = Annotated[list[str] | None, typer.Option("--heads", help="H:HV, as in 2:8; several with commas or by repetition.")]
Dims = Annotated[list[str] | None, typer.Option("--dims", help="K:V, as in 128:128.")]
Dtype = Annotated[str, typer.Option("--dtype", help="bfloat16 or float16.")]
ChunkSize = Annotated[int, typer.Option("--chunk-size", help="Tokens per chunk: 16, 32 or 64.")]
Packed = Annotated[bool, typer.Option("--packed", help="Sequences are packed (cu_seqlens).")]
LayerFilter = Annotated[LayerOption | None, typer.Option("--layer", help="Only records of this layer.")]
Prefer = Annotated[PreferOption, typer.Option("--prefer", help="Which record is kept where there are two.")]
Models = Annotated[list[str] | None, typer.Option("--model", help=f"One of {', '.join(models())}.")]
Tp = Annotated[list[int] | None, typer.Option("--tp", help="GPUs that share the heads of the model.")]
Device = Annotated[int, typer.Option("--device", help="Index of the GPU.")]
Gpu = Annotated[str | None, typer.Option("--gpu", help="ARCH:SMS:L2_MIB, as in sm_90a:132:60, instead of the GPU that is here.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


def main() -> None:
    app(prog_name="qla-tune")


def verb(function: Callable[..., ExitCode]) -> Callable[..., None]:
    """Make a function that returns its exit code a command."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            code = function(*args, **kwargs)
        except KeyboardInterrupt:
            typer.echo("qla-tune: interrupted", err=True)
            code = ExitCode.INTERRUPTED
        except QLAError as error:
            typer.echo(f"qla-tune: {error}", err=True)
            code = next(code for kind, code in ERROR_CODES if isinstance(error, kind))
        raise typer.Exit(code)

    return app.command(function.__name__.rstrip("_"))(run)


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
            Target(_problem(*head_counts, *head_dims, dtype, chunk_size, packed), batches, gates)
            for head_counts, head_dims in _shapes(heads, dims, models_, tp)
        ]
    request = session.TuneRequest(
        tuple(
            session.TuneProblem(
                facts_of(target.problem, torch.device("cuda", device)), target.batches, target.gates
            )
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
        covered = coverage(captured, hardware)
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
    keys = ("gpu", "heads", "dims", "dtype", "chunk", "packed", "rigor", "speedup", "config", "recorded", "stale")
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
    packed: Packed = False,
    dtype: Dtype = "bfloat16",
    chunk_size: ChunkSize = 64,
    gpu: Gpu = None,
    device: Device = 0,
    require: Annotated[Rigor | None, typer.Option("--require", help="Exit with 8 unless a record of this rigor answers.")] = None,
    as_json: AsJson = False,
) -> ExitCode:
    """Say how a call would be computed, which record decided it, and what else there was."""
    shapes = _shapes(heads, dims, None, None)
    batches = () if seqlens is None else parse_batches(seqlens, packed=packed)
    if len(shapes) != 1 or len(batches) > 1:
        raise InputError("explain is about one call: give one pair of --heads and --dims, and one batch as --lengths")
    problem = _problem(*shapes[0][0], *shapes[0][1], dtype, chunk_size, packed)
    hardware = hardware_of(gpu, device)
    facts = facts_of(problem, torch.device("cuda", device))
    extents = extents_of(batches[0], chunk_size) if batches else None
    arch = ARCHES[hardware.arch]
    dispatch = select.choose(facts, arch, hardware=hardware, extents=extents)
    asked = list(select.consider(facts, arch, hardware, extents))
    identity = Identity(op=FORWARD, hardware=hardware, problem=problem)
    nearest = _nearest(identity) if not asked else None
    data = {
        "call": str(identity),
        "extents": None if extents is None else dataclasses.asdict(extents),
        "answer": describe_dispatch(dispatch),
        "asked": [describe_considered(considered) for considered in asked],
        "nearest": nearest,
        "command": select.tune_command(facts, extents),
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


@verb
def build(
    arch: Annotated[str, typer.Option("--arch", help=f"Of the GPU that will run them: {', '.join(ARCHES)}.")],
    sm_count: Annotated[int, typer.Option("--sm-count", min=1, help="Of that GPU; with --arch it says whose records count.")],
    out: Annotated[Path, typer.Option("--out", help="A directory, to be named by QLA_JIT_BUNDLE_PATH.")],
    l2_mib: Annotated[
        int | None, typer.Option("--l2-mib", min=1, help="L2 of that GPU; by default records for any size of it count.")
    ] = None,
    heads: Heads = None,
    dims: Dims = None,
    models_: Models = None,
    tp: Tp = None,
    dtype: Dtype = "bfloat16",
    chunk_size: ChunkSize = 64,
    packed: Annotated[bool | None, typer.Option("--packed/--not-packed", help="Only calls with, or without, cu_seqlens.")] = None,
    index_dtypes: Annotated[
        list[str] | None, typer.Option("--index-dtype", help="Of cu_seqlens: int32 or int64; by default both.")
    ] = None,
    initial_state: Annotated[
        bool | None, typer.Option("--initial-state/--no-initial-state", help="Only calls with, or without, an initial state.")
    ] = None,
    final_state: Annotated[
        bool | None, typer.Option("--final-state/--no-final-state", help="Only calls that want, or do not, the final state.")
    ] = None,
    state_dtype: Annotated[str, typer.Option("--state-dtype", help="Of the initial state.")] = "float32",
    gate_dtype: Annotated[str, typer.Option("--gate-dtype", help="Of g.")] = "float32",
    beta_dtype: Annotated[str, typer.Option("--beta-dtype", help="Of beta.")] = "float32",
    state_v_first: Annotated[bool, typer.Option("--state-v-first", help="States are [N, HV, V, K].")] = False,
    l2norm: Annotated[bool, typer.Option("--l2norm/--no-l2norm", help="Also for calls that normalise q and k.")] = True,
    gate_in_kernel: Annotated[bool, typer.Option("--gate-in-kernel", help="Only calls whose g holds logits.")] = False,
    dt_bias: Annotated[bool, typer.Option("--dt-bias/--no-dt-bias", help="With --gate-in-kernel.")] = True,
    beta_sigmoid: Annotated[bool, typer.Option("--beta-sigmoid", help="Only calls whose beta holds logits.")] = False,
    neg_eigval: Annotated[bool, typer.Option("--neg-eigval", help="With --beta-sigmoid: allow_neg_eigval.")] = False,
    as_json: AsJson = False,
) -> ExitCode:
    """Compile what calls on a GPU that need not be here will ask for, into a directory that is shipped with the model."""
    if arch not in ARCHES:
        raise InputError(f"--arch must be one of {', '.join(ARCHES)}; got {arch!r}")
    if bool(heads or dims) == bool(models_ or tp):
        raise InputError("what to build must be given by --heads and --dims, or by --model and --tp")
    variants = Variants(
        dtype=_dtype(dtype, "--dtype", KERNEL_DTYPES),
        chunk_size=chunk_size,
        packed=packed,
        index_dtypes=tuple(_dtype(text, "--index-dtype", INDEX_DTYPES) for text in index_dtypes or ("int32", "int64")),
        initial_state=initial_state,
        output_final_state=final_state,
        state_dtype=_dtype(state_dtype, "--state-dtype", GPU_DTYPES),
        g_dtype=_dtype(gate_dtype, "--gate-dtype", GPU_DTYPES),
        beta_dtype=_dtype(beta_dtype, "--beta-dtype", GPU_DTYPES),
        state_v_first=state_v_first,
        use_qk_l2norm_in_kernel=l2norm,
        use_gate_in_kernel=gate_in_kernel,
        dt_bias=dt_bias,
        use_beta_sigmoid_in_kernel=beta_sigmoid,
        allow_neg_eigval=neg_eigval,
    )
    gpus = _gpus_with_records(arch, sm_count, l2_mib)
    needed = {
        f"{H}:{HV} {K}:{V}": enumeration.kernels(ModelShape(H, HV, K, V), variants, ARCHES[arch], gpus)
        for (H, HV), (K, V) in _shapes(heads, dims, models_, tp)
    }
    results = {}
    with progress() as on_event:
        for problem, requests in needed.items():

            def on_kernel(done: int, total: int, problem: str = problem) -> None:
                on_event(Event("compile", problem, f"{done} of {total} kernels", done, total))

            results[problem] = bundle.build(requests, out, on_kernel=on_kernel)
    if as_json:
        rows = [{"problem": problem, **dataclasses.asdict(built)} for problem, built in results.items()]
        print_json({"directory": str(out.absolute()), "problems": rows})
    else:
        print_table(
            ("problem", "kernels", "bytes", "seconds"),
            [(problem, built.kernels, built.bytes, f"{built.seconds:.1f}") for problem, built in results.items()],
        )
    failures = [failure for built in results.values() for failure in built.failures]
    for failure in failures:
        typer.echo(f"not built: {failure}", err=True)
    return ExitCode.PARTIAL if failures else ExitCode.OK


@verb
def doctor(as_json: AsJson = False) -> ExitCode:
    """Check whether this machine can compile, run and tune kernels, and say what to do about it."""
    findings = examine()
    if as_json:
        print_json([dataclasses.asdict(finding) for finding in findings])
    else:
        print_table(("check", "", "found", "what to do"), [(f.check, f.status, f.found, f.advice) for f in findings])
    return ExitCode.ENVIRONMENT if any(finding.status == "failed" for finding in findings) else ExitCode.OK


# What the options mean


def parse_seconds(text: str) -> float:
    """"90s", "10m", "1h30m", "600".

    Raises:
        InputError: it is none of these, or nothing.
    """
    match = re.fullmatch(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s?)?", text.strip(), re.ASCII)
    seconds = 0 if match is None else sum(int(part or 0) * unit for part, unit in zip(match.groups(), (3600, 60, 1), strict=True))
    if seconds <= 0:
        raise InputError(f"a time must be as in 90s, 10m or 1h30m; got {text!r}")
    return float(seconds)


def hardware_of(text: str | None, device: int) -> Hardware:
    """The kind of GPU that --gpu names, or the one that is here.

    Raises:
        InputError: --gpu is not ARCH:SMS:L2_MIB.
        EnvironmentUnsuitable: there is no GPU.
    """
    if text is not None:
        match = re.fullmatch(r"(sm_\w+):([1-9]\d{0,3}):([1-9]\d{0,3})", text, re.ASCII)
        if match is None or match[1] not in ARCHES:
            known = ", ".join(ARCHES)
            raise InputError(f"--gpu must be ARCH:SMS:L2_MIB with an arch of {known}, as in sm_90a:132:60; got {text!r}")
        return Hardware(arch=match[1], sm_count=int(match[2]), l2_bytes=int(match[3]) << 20)
    if device >= gpu_count():
        raise EnvironmentUnsuitable(f"there is no GPU {device}; name one, as in --gpu sm_90a:132:60, or see qla-tune doctor")
    return Hardware.of(gpu_info(torch.device("cuda", device)))


def stored_records(heads: Sequence[str] | None, dims: Sequence[str] | None, layer: LayerOption | None) -> list[Stored]:
    """The records that the options name."""
    head_counts = None if not heads else parse_pairs(heads, "--heads")
    head_dims = None if not dims else parse_pairs(dims, "--dims")
    return [
        s for s in record_store.everything()
        if (layer is None or s.layer == layer.value)
        and (head_counts is None or (s.record.problem.H, s.record.problem.HV) in head_counts)
        and (head_dims is None or (s.record.problem.K, s.record.problem.V) in head_dims)
    ]


def load_records(path: Path) -> list[Record]:
    """The records of a file, or of all files of a directory.

    Raises:
        RecordError: as load(); or a directory without files.
    """
    if not path.is_dir():
        return load(path)
    files = sorted(path.glob("*.json"))
    if not files:
        raise RecordError(f"expected JSON files in {path}; there are none")
    return [record for file in files for record in load(file)]


def _shapes(
    heads: Sequence[str] | None, dims: Sequence[str] | None, names: Sequence[str] | None, tp: Sequence[int] | None
) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Pairs of (H, HV) and (K, V)."""
    if names:
        shapes = [model(name).on(size) for name in names for size in tp or [1]]
        return list(dict.fromkeys(((shape.H, shape.HV), (shape.K, shape.V)) for shape in shapes))
    if tp:
        raise InputError("--tp shares the heads of a --model; got none")
    if not heads:
        raise InputError("the heads must be given, as in --heads 2:8")
    return [(pair, of_dims) for pair in parse_pairs(heads, "--heads") for of_dims in parse_pairs(dims or ["128:128"], "--dims")]


def _dtype(text: str, option: str, allowed: Sequence[torch.dtype]) -> torch.dtype:
    names = {str(dtype).removeprefix("torch."): dtype for dtype in allowed}
    if text not in names:
        raise InputError(f"{option} must be one of {', '.join(names)}; got {text!r}")
    return names[text]


def _gpus_with_records(arch: str, sm_count: int, l2_mib: int | None) -> set[Hardware]:
    """The kinds of GPU that the options may mean, as far as there are records for them."""
    return {
        hardware
        for hardware in (stored.record.hardware for stored in record_store.everything())
        if (hardware.arch, hardware.sm_count) == (arch, sm_count) and l2_mib in (None, hardware.l2_bytes >> 20)
    }


def _problem(H: int, HV: int, K: int, V: int, dtype: str, chunk_size: int, packed: bool) -> Problem:
    if dtype not in ("bfloat16", "float16") or chunk_size not in (16, 32, 64) or HV % H:
        raise InputError(
            "expected --dtype bfloat16 or float16, --chunk-size 16, 32 or 64, and a multiple of H as HV; "
            f"got {dtype}, {chunk_size}, {H}:{HV}"
        )
    return Problem(H=H, HV=HV, K=K, V=V, dtype=dtype, chunk_size=chunk_size, varlen=packed)


def _of_this_gpu(found: Sequence[Stored], device: int) -> list[Stored]:
    hardware = hardware_of(None, device)
    mine = [s for s in found if s.record.hardware == hardware]
    if not mine:
        here = f"{hardware.arch} with {hardware.sm_count} SMs"
        raise NoSuchRecordError(f"there are no such records for this GPU, {here}; qla-tune show lists what there is")
    return mine


def _own_command() -> str:
    """The command line as it goes into records: without paths, which are this machine's."""
    return shlex.join(["qla-tune", *(Path(word).name if "/" in word else word for word in sys.argv[1:])])[:2_000]


def _nearest(identity: Identity) -> dict[str, Any] | None:
    """The record that differs in the fewest fields."""
    wanted = _flat(identity)
    candidates = []
    for stored in record_store.everything():
        there = _flat(stored.record.identity)
        differs_in = [f"{name} ({there[name]} there, {wanted[name]} asked)" for name in wanted if there[name] != wanted[name]]
        candidates.append({"layer": stored.layer, "place": str(stored.place), "differs_in": differs_in})
    return min(candidates, key=lambda candidate: len(candidate["differs_in"]), default=None)


def _flat(identity: Identity) -> dict[str, Any]:
    return {"op": identity.op, **identity.hardware.model_dump(), **identity.problem.model_dump()}


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
