"""Write the measured numbers into README.md and the pages of docs/, from the JSON files under benchmarks/results.

    python benchmarks/fill_numbers.py [--check]

A section stands between "<!-- numbers: NAME -->" and "<!-- end of numbers -->". Figures are never typed by hand; --check says
which file is out of date instead of writing it.
"""

from __future__ import annotations

import re
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import dispatch
import results
from systems import SYSTEMS
from training import TRAINING_SYSTEMS
from workload import BACKWARD_HEAD_PAIRS, BACKWARD_SEQUENCE_SETS, HEAD_PAIRS, SEQUENCE_SETS, Row, lengths_name

ROOT = Path(__file__).resolve().parents[1]
FILES = ("README.md", "docs/performance.md", "docs/deployment.md")
SECTION = re.compile(r"(<!-- numbers: (\w+) -->\n).*?(<!-- end of numbers -->)", re.DOTALL)
SHAPES = {
    "forward": (HEAD_PAIRS, SEQUENCE_SETS),
    "backward": (tuple(sorted(BACKWARD_HEAD_PAIRS)), BACKWARD_SEQUENCE_SETS),
}
LENGTHS_SHOWN = (1, 2, 4, 8, 16, 32, 48, 63, 64, 65, 96, 127, 128, 129)          # of 130
NOT_MEASURED = "Not measured yet.\n"


def main(arguments: Sequence[str]) -> int:
    names = (
        "forward", "forward_open", "forward_decaying", "forward_cool", "forward_dims", "backward", "cold_start", "scaling",
        "dispatch",
    )  # fmt: skip
    forward, forward_open, forward_decaying, forward_cool, other_dims, backward, cold_start, scaling, choices = (
        results.load(results.RESULTS / "h200" / f"{name}.json") for name in names
    )
    sections = {
        "forward_summary": summary("forward", forward),
        "forward_table": forward_table(forward, "![Forward time by shape](forward_h200.svg)\n\n"),
        "open_summary": summary("forward", forward_open),
        "decaying_summary": summary("forward", forward_decaying),
        "cool_summary": summary("forward", forward_cool),
        "dims_table": forward_table(other_dims),
        "backward_summary": summary("backward", backward),
        "backward_table": backward_table(backward),
        "cold_start_summary": cold_start_table(cold_start, with_protocol=False),
        "cold_start_table": cold_start_table(cold_start, with_protocol=True),
        "shipped_table": shipped_table(cold_start),
        "warm_load_table": warm_load_table(cold_start),
        "scaling_table": scaling_table(scaling),
        "lengths_table": lengths_table(scaling),
        "dispatch_summary": dispatch_summary(choices),
    }
    stale = [name for name in FILES if filled((ROOT / name).read_text(), sections) != (ROOT / name).read_text()]
    if "--check" in arguments:
        for name in stale:
            print(f"{name} does not show the numbers of benchmarks/results: run python benchmarks/fill_numbers.py")
        return 1 if stale else 0
    for name in stale:
        (ROOT / name).write_text(filled((ROOT / name).read_text(), sections))
        print(f"{name}: filled")
    return 0


def filled(text: str, sections: dict[str, str]) -> str:
    return SECTION.sub(lambda match: match[1] + sections[match[2]] + match[3], text)


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    heading, *lines = (f"| {' | '.join(cells)} |" for cells in (columns, *rows))
    return "\n".join([heading, "|---" * len(columns) + "|", *lines]) + "\n\n"


def summary(op: str, document: dict[str, Any]) -> str:
    """Milliseconds of qla_jit and, in brackets, how many times faster than the fastest other library, by shape. What has no
    number has no line and no column."""
    if not any("qla_jit" in entry["ms"] for entry in document["rows"]):
        return NOT_MEASURED
    shown = {(entry["H"], entry["HV"], tuple(entry["seqlens"])) for entry in document["rows"] if "qla_jit" in entry["ms"]}
    head_pairs, sequence_sets = SHAPES[op]
    head_pairs = [pair for pair in head_pairs if any(pair == (H, HV) for H, HV, _ in shown)]
    sequence_sets = [seqlens for seqlens in sequence_sets if any(seqlens == lengths for _, _, lengths in shown)]
    columns = ("sequences", *(f"H={H}, HV={HV}" for H, HV in head_pairs))
    rows = [
        (lengths_name(seqlens), *(summary_cell(results.find_row(document, Row(H, HV, seqlens))) for H, HV in head_pairs))
        for seqlens in sequence_sets
    ]
    ratios = [ratio for entry in document["rows"] if (ratio := speed_ratio(entry)) is not None]
    errors = [entry["rel_l2"] for entry in document["rows"] if entry["rel_l2"]]
    largest = ", ".join(f"{output} {max(error[output] for error in errors):.1e}" for output in results.OUTPUTS[op])
    said = [
        f"{op.capitalize()}, milliseconds; in brackets the time of the fastest other library over ours. {origin(document)}",
        f"Largest relative L2 error against float64: {largest}.",
    ]
    if ratios:
        said.insert(1, f"Geometric mean of the brackets: {statistics.geometric_mean(ratios):.2f} over {len(ratios)} rows.")
    return table(columns, rows) + " ".join(said) + "\n"


def forward_table(document: dict[str, Any], picture: str = "") -> str:
    """Every number of the document, one line a row."""
    if not document["rows"]:
        return NOT_MEASURED
    names = [system.name for system in SYSTEMS]
    columns = ("heads", "sequences", *(f"{name} ms" for name in names), "error o", "error state", "strategy")
    rows = []
    for entry in document["rows"]:
        times = [time_cell(entry, name) for name in names]
        error = [f"{entry['rel_l2'][output]:.2e}" if entry["rel_l2"] else "" for output in ("o", "state")]
        heads, sequences = results.row_of(entry).shape.replace(",", ", "), lengths_name(tuple(entry["seqlens"]))
        rows.append((heads, sequences, *times, *error, entry["strategy"] or ""))
    return picture + table(columns, rows) + f"{origin(document)} {document['protocol']}\n"


def backward_table(document: dict[str, Any]) -> str:
    """Every number of the document, one line a row; times and memory of all systems in one cell each."""
    if not document["rows"]:
        return NOT_MEASURED
    names = [system.name for system in TRAINING_SYSTEMS]
    columns = ["H, HV", "sequences", *(f"{what}: {' / '.join(names)}" for what in ("ms", "step ms", "peak MiB"))]
    columns += [*(f"error {output}" for output in results.OUTPUTS["backward"]), "strategy"]
    rows = []
    for entry in document["rows"]:
        steps = {name: f"{ms:.3f}" for name, ms in entry["step_ms"].items()}
        memory = {name: f"{peak / 2**20:.0f}" for name, peak in entry["peak_bytes"].items()}
        cells = [f"{entry['H']}, {entry['HV']}", lengths_name(tuple(entry["seqlens"]))]
        cells.append(" / ".join(time_cell(entry, name) or "-" for name in names))
        cells += [" / ".join(values.get(name, "-") for name in names) for values in (steps, memory)]
        cells += [f"{entry['rel_l2'][output]:.2e}" if entry["rel_l2"] else "" for output in results.OUTPUTS["backward"]]
        cells.append(entry.get("strategy") or "")        # rows of before 2026-11-30 do not say
        rows.append(cells)
    return table(columns, rows) + f"{origin(document)} {document['protocol']}\n"


def cold_start_table(document: dict[str, Any], *, with_protocol: bool) -> str:
    if not document["rows"]:
        return NOT_MEASURED
    columns = ("shape", "compile, s", "first call, empty cache, s", "load, s", "first call, warm cache, s", "host, µs")
    rows = []
    for entry in document["rows"]:
        cold, warm = entry["cold"], entry["warm"]
        rows.append((
            f"H={entry['H']}, HV={entry['HV']}, {entry['arch']}",
            f"{cold['compile_seconds']:.1f} ({cold['compiles']} kernels)",
            _seconds(cold["first_call_seconds"]),
            f"{warm['load_seconds']:.3f} ({warm['disk_hits']} kernels)",
            _seconds(warm["first_call_seconds"]),
            "" if warm["host_us"] is None else f"{warm['host_us']:.0f}",
        ))
    said = f"{origin(document)} {document['protocol']}" if with_protocol else origin(document)
    return table(columns, rows) + f"{said}\n"


def shipped_table(document: dict[str, Any]) -> str:
    """A bundle that was used where nothing could be compiled or written."""
    if "shipped" not in document:
        return NOT_MEASURED
    part = document["shipped"]
    rows = []
    for name in ("forward", "training"):
        used = part[name]
        first_call = _seconds(used["first_call_seconds"])
        rows.append((name, str(used["disk_hits"]), f"{used['load_seconds']:.3f}", first_call, f"{used['import_seconds']:.2f}"))
    said = (
        f"A bundle that was built {part['built']}: {part['kernels']} kernels for {', '.join(part['arch'])}, "
        f"{part['bytes'] / 1e6:.1f} MB, packed {part['packed_bytes'] / 1e6:.1f} MB. {part_origin(document, part)}"
    )
    return table(("", "kernels loaded", "load, s", "first call, s", "import, s"), rows) + f"{said}\n"


def warm_load_table(document: dict[str, Any]) -> str:
    """Loading the same kernels from qla_jit's cache and from TileLang's."""
    if "warm_load" not in document:
        return NOT_MEASURED
    part = document["warm_load"]
    rows = [
        (name, f"{loaded['seconds']:.3f}", str(loaded["files"]), f"{loaded['import_seconds']:.2f}")
        for name, loaded in ((name, part[name]) for name in ("qla_jit", "tilelang"))
    ]
    said = f"{part['kernels']} kernels for {part['arch']}. {part_origin(document, part)}"
    return table(("cache of", "load, s", "files touched", "import, s"), rows) + f"{said}\n"


def scaling_table(document: dict[str, Any]) -> str:
    """One sequence, by its length."""
    rows = [row for row in document["rows"] if row["part"] == "tokens" and "qla_jit" in row["ms"]]
    if not rows:
        return NOT_MEASURED
    cells = []
    for row in rows:
        ms, tokens = row["ms"]["qla_jit"], row["size"]
        cells.append((str(tokens), f"{ms:.3f}", f"{1e6 * ms / tokens:.1f}", f"{row['peak_bytes']['qla_jit'] / tokens:.0f}"))
    return table(("tokens", "ms", "ns a token", "bytes a token"), cells) + f"{origin(document)}\n"


def lengths_table(document: dict[str, Any]) -> str:
    """The same tokens in sequences of one length."""
    by_length = {row["size"]: row for row in document["rows"] if row["part"] == "lengths"}
    shown = [by_length[length] for length in LENGTHS_SHOWN if length in by_length]
    if not shown:
        return NOT_MEASURED
    cells = []
    for title, name, digits in (("ns a token", "ns_per_token", 1), ("over the nearest multiple of 64", "over_neighbour", 2)):
        values = (row.get(name) for row in shown)
        cells.append((title, *("" if value is None else f"{value:.{digits}f}" for value in values)))
    return table(("tokens a sequence", *(str(row["size"]) for row in shown)), cells) + f"{origin(document)}\n"


def dispatch_summary(document: dict[str, Any]) -> str:
    """What calls are given beside all that could run, by operation."""
    operations = dict.fromkeys(row["op"] for row in document["rows"])
    lines = [
        f"- `{op}`, {line}" for op in operations
        for line in dispatch.summary([row for row in document["rows"] if row["op"] == op]).splitlines()
    ]
    return "\n".join(lines) + f"\n\n{origin(document)}\n" if lines else NOT_MEASURED


def part_origin(document: dict[str, Any], part: dict[str, Any]) -> str:
    return origin(document | {name: part[name] for name in ("commit", "date")})


def time_cell(entry: dict[str, Any], system: str) -> str:
    if system in entry["ms"]:
        return f"{entry['ms'][system]:.3f}"
    return "failed" if system in entry["failed"] else ""


def summary_cell(entry: dict[str, Any] | None) -> str:
    if entry is None or "qla_jit" not in entry["ms"]:
        return ""
    ratio = speed_ratio(entry)
    return f"{entry['ms']['qla_jit']:.3f}" + (f" ({ratio:.2f}x)" if ratio is not None else "")


def speed_ratio(entry: dict[str, Any]) -> float | None:
    """Time of the fastest other library over ours: above 1 where ours is faster."""
    others = [ms for name, ms in entry["ms"].items() if name != "qla_jit"]
    return min(others) / entry["ms"]["qla_jit"] if others and "qla_jit" in entry["ms"] else None


def origin(document: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in document["versions"].items() if version)
    return f"{document['gpu'] or 'No GPU'}, {document['date'][:10]}, commit {document['commit']}; {versions}."


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
