"""What a results file holds, and how several short runs fill one.

    {"gpu", "versions", "commit", "date", "protocol", "rows": [row, ...]}

gpu, versions, commit and date are those of the last run that wrote the file. A row says for each system which run its number
is from (`measured`), so that a file filled in several sessions stays honest:

    {"op": "forward", "H", "HV", "seqlens", "strategy",              and "K", "V" where they are not 128
     "ms": {system: milliseconds}, "rel_l2": {"o", "state"},          qla_jit's error
     "peer_rel_l2": {system: {"o", "state"}},                         the others' on the same inputs
     "measured": {system: {"commit", "date"}}, "failed": {system: why}}

A row of the backward has "op": "backward", errors of the six gradients in place of "o" and "state", and

    {"step_ms": {system: milliseconds of a forward and backward}, "peak_bytes": {system: of such a step, above its inputs}}
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from systems import SYSTEMS
from workload import BACKWARD_ROWS, OTHER_DIMS_ROWS, ROWS, K, Row, V

TABLES = {"forward": (*ROWS, *OTHER_DIMS_ROWS), "backward": BACKWARD_ROWS}
OUTPUTS = {"forward": ("o", "state"), "backward": ("dq", "dk", "dv", "dg", "dbeta", "dh0")}        # whose errors a row has
RESULTS = Path(__file__).parent / "results"


def now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%MZ")


def current_commit() -> str:
    """The commit of this checkout, with "-dirty" where files differ from it; "unknown" outside of git."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def gpu_name() -> str | None:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def default_path(name: str) -> Path:
    """Where the results of this GPU are kept, benchmarks/results/h200/NAME for an NVIDIA H200."""
    gpu = gpu_name()
    assert gpu is not None, "only numbers of a GPU have a place of their own"
    return RESULTS / gpu.lower().removeprefix("nvidia ").replace(" ", "_") / name


def versions(distributions: Iterable[str] = ()) -> dict[str, str | None]:
    """Versions of what decides the numbers; None for what is not there."""
    found: dict[str, str | None] = {"python": platform.python_version(), "cuda": torch.version.cuda}
    for name in ("torch", "triton", "tilelang", *sorted(set(distributions))):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def load(path: Path) -> dict[str, Any]:
    """The document at `path`, or an empty one."""
    return json.loads(path.read_text()) if path.exists() else {"rows": []}


def begun(path: Path, *, commit: str, protocol: str, distributions: Iterable[str] = ()) -> dict[str, Any]:
    """The document at `path`, or an empty one, with what this run is. It ends the process if the numbers are another GPU's."""
    earlier, gpu = load(path), gpu_name()
    if earlier.get("gpu", gpu) != gpu:
        sys.exit(f"{path} holds the numbers of another GPU, {earlier['gpu']}, and this is {gpu}: pass another --out.")
    return {
        "gpu": gpu,
        # A library that is not installed now may have numbers of an earlier run in the file.
        "versions": {name: found or earlier.get("versions", {}).get(name) for name, found in versions(distributions).items()},
        "commit": commit,
        "date": now(),
        "protocol": protocol,
        "rows": earlier["rows"],
    }


def save(path: Path, document: Mapping[str, Any]) -> None:
    """Write the whole document or leave the old one: a run may be stopped at any time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = path.with_suffix(".tmp")
    staged.write_text(json.dumps(document, indent=1) + "\n")
    os.replace(staged, path)


def row_of(entry: Mapping[str, Any]) -> Row:
    dims = {name: entry[name] for name in ("K", "V") if name in entry}
    return Row(entry["H"], entry["HV"], tuple(entry["seqlens"]), **dims)


def find_row(document: Mapping[str, Any], row: Row) -> dict[str, Any] | None:
    """Of any gates: a document has one kind."""
    wanted = (row.shape, row.seqlens)
    return next((entry for entry in document["rows"] if ((found := row_of(entry)).shape, found.seqlens) == wanted), None)


def new_row(row: Row, op: str) -> dict[str, Any]:
    of_op = {} if op == "forward" else {"step_ms": {}, "peak_bytes": {}}
    dims = {} if (row.K, row.V) == (K, V) else {"K": row.K, "V": row.V}
    return {"op": op, "H": row.H, "HV": row.HV, **dims, "seqlens": list(row.seqlens), "strategy": None, **of_op,
            "ms": {}, "rel_l2": None, "peer_rel_l2": {}, "measured": {}, "failed": {}}


def merge_row(
    document: dict[str, Any],
    row: Row,
    *,
    measured: Mapping[str, Mapping[str, Any]],
    commit: str,
    date: str,
    op: str = "forward",
) -> None:
    """Put new measurements into the document; what this run did not measure stays.

    measured: {system: {"ms", "rel_l2": {output: error}}}, with "strategy" for qla_jit and for the backward with "step_ms" and
    "peak_bytes"; or {system: {"failed": why}}.
    """
    entry = find_row(document, row)
    if entry is None:
        entry = new_row(row, op)
        document["rows"].append(entry)
        document["rows"].sort(key=_table_order)
    for system, result in measured.items():
        by_system = [name for name in ("ms", "step_ms", "peak_bytes") if name in entry]
        for name in (*by_system, "peer_rel_l2", "failed"):
            entry[name].pop(system, None)
        entry["measured"][system] = {"commit": commit, "date": date}
        if "failed" in result:
            entry["failed"][system] = result["failed"]
            continue
        for name in by_system:
            entry[name][system] = result[name]
        if system == "qla_jit":
            entry["rel_l2"] = result["rel_l2"]
            entry["strategy"] = result["strategy"]
        else:
            entry["peer_rel_l2"][system] = result["rel_l2"]


def _table_order(entry: Mapping[str, Any]) -> tuple[int, ...]:
    row, rows = row_of(entry), TABLES[entry["op"]]
    return (rows.index(row),) if row in rows else (len(rows), row.H, row.HV, *row.seqlens)


def is_done(document: Mapping[str, Any], row: Row, systems: Iterable[str], *, commit: str) -> bool:
    """Whether this very commit has measured all of these systems on this row. A dirty or unknown commit never has."""
    entry = find_row(document, row)
    if entry is None or commit == "unknown" or commit.endswith("-dirty"):
        return False
    return all(entry["measured"].get(system, {}).get("commit") == commit for system in systems)


def problems(document: Mapping[str, Any]) -> list[str]:
    """What is wrong with a document; empty when it may be published."""
    found = [f"{key} is missing" for key in ("gpu", "versions", "commit", "date", "protocol") if not document.get(key)]
    known = {system.name for system in SYSTEMS}
    for entry in document["rows"]:
        name = row_of(entry).name
        unknown = {*entry["ms"], *entry["failed"]} - known
        if unknown:
            found.append(f"{name}: unknown systems {sorted(unknown)}")
        if "qla_jit" not in entry["ms"]:
            found.append(f"{name}: no time of qla_jit; failed: {entry['failed'].get('qla_jit', 'no, not run')}")
        elif not all(0 <= entry["rel_l2"][output] < float("inf") for output in OUTPUTS[entry["op"]]):
            found.append(f"{name}: rel_l2 is not a finite number: {entry['rel_l2']}")
        found += [f"{name}: {system} took {ms} ms" for system, ms in entry["ms"].items() if not ms > 0]
    return found
