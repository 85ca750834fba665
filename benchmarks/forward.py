"""How fast and how exact is the forward pass, beside FlashQLA, FlashInfer and FLA?

    python benchmarks/forward.py                          every row, every library that is installed
    python benchmarks/forward.py --only-qla-jit           keep the others' numbers of the file, measure ours again
    python benchmarks/forward.py --rows '16,64:*' '*:1024x8' --budget-seconds 500
    python benchmarks/forward.py --gates open             no head decays; into forward_open.json
    python benchmarks/forward.py --other-dims             other K and V than 128; into forward_dims.json
    python benchmarks/forward.py --cool                   each replay after a pause; into forward_cool.json

Results are merged into the output file after every row, so a run can be stopped and repeated: what this commit has measured
already is skipped. docs/performance.md says how the timing works and how to read the table.
"""

from __future__ import annotations

import argparse
import fnmatch
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import results
import torch
from systems import SYSTEMS, System, strategy_of
from timing import COOL_PROTOCOL, PROTOCOL, Budget, BudgetSpent, cool_ms, graph_of, interleaved_ms
from workload import ALL_ROWS, GATES, OTHER_DIMS_ROWS, ROWS, Inputs, Row, rotated_inputs

from qla_jit.device import gpu_info

EXPLAINED = (
    " FlashInfer takes the gates as gate_domain='log', which costs it one elementwise kernel."
    " rel_l2: ||x - x64|| / ||x64|| over all heads and tokens of one input set, x64 from the chunked reference in float64 "
    "(qla_jit.reference, which the tests hold against the token-by-token recurrence)."
)
Measured = Mapping[str, Mapping[str, Any]]


def main(arguments: Sequence[str] | None = None) -> int:
    options = forward_options(arguments)
    if options.cool:
        measure = functools.partial(measure_row, times=cool_ms)
        return measure_table("forward", options, SYSTEMS, measure, EXPLAINED, protocol=COOL_PROTOCOL)
    return measure_table("forward", options, SYSTEMS, measure_row, EXPLAINED)


def forward_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser("forward", SYSTEMS)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--all-rows", action="store_true", help=f"the {len(ALL_ROWS)} rows of FlashQLA's table, not {len(ROWS)}")
    which.add_argument("--other-dims", action="store_true", help=f"{len(OTHER_DIMS_ROWS)} rows of other head dims than 128")
    which.add_argument("--cool", action="store_true", help="time a GPU that has had little to do")
    options = parse(
        parser, arguments, lambda options: ALL_ROWS if options.all_rows else OTHER_DIMS_ROWS if options.other_dims else ROWS
    )
    if options.other_dims:
        options.table = "forward_dims"
    if options.cool:
        options.table = "forward_cool"
    return options


def measure_table(
    op: str,
    options: argparse.Namespace,
    known_systems: Sequence[System],
    measure_row: Callable[[Row, Sequence[System], Budget], Measured],
    explained: str,
    *,
    protocol: str = PROTOCOL,
) -> int:
    """The exit status of a benchmark: 1 if qla_jit failed on a row."""
    if not torch.cuda.is_available():
        sys.exit(f"benchmarks/{op}.py times kernels on a GPU, and torch sees none here.")
    systems = [system for system in known_systems if system.name in options.systems and system.installed]
    absent = sorted(set(options.systems) - {system.name for system in systems})
    if absent:
        print(f"not installed, left out: {', '.join(absent)}")

    gates = "" if options.gates == "mixed" else f"_{options.gates}"
    out = options.out or results.default_path(f"{options.table}{gates}.json")
    document = results.begun(
        out, commit=options.commit, protocol=protocol + GATES[options.gates] + explained,
        distributions=(system.distribution for system in known_systems),
    )  # fmt: skip
    budget = Budget(options.budget_seconds)
    missing = run(
        options.rows, document,
        op=op,
        systems=[system.name for system in systems],
        measure=lambda row: measure_row(row, systems, budget),
        save=lambda: results.save(out, document),
        budget=budget,
    )
    for row in missing:
        print(f"not measured: {row.name}")
    failures = [(row, failed) for row in document["rows"] if (failed := row["failed"].get("qla_jit"))]
    for row, failed in failures:
        print(f"qla_jit failed on H={row['H']} HV={row['HV']} {row['seqlens']}: {failed}")
    print(f"{out}: {len(document['rows'])} rows, {budget.spent:.0f} s")
    return 1 if failures else 0


def run(
    rows: Sequence[Row],
    document: dict[str, Any],
    *,
    op: str = "forward",
    systems: Sequence[str],
    measure: Callable[[Row], Measured],
    save: Callable[[], None],
    budget: Budget,
) -> list[Row]:
    """Measure the rows that this commit has not measured, saving after each. Returns those that the budget left out."""
    last_row_seconds = 0.0
    todo = [row for row in rows if not results.is_done(document, row, systems, commit=document["commit"])]
    for position, row in enumerate(todo):
        started = budget.spent
        try:
            budget.require(last_row_seconds)
            measured = measure(row)
        except BudgetSpent as stop:
            print(f"stopped: {stop}")
            return todo[position:]
        results.merge_row(document, row, measured=measured, commit=document["commit"], date=document["date"], op=op)
        save()
        last_row_seconds = budget.spent - started
        print(describe(row, measured), f"[{last_row_seconds:.1f} s]", flush=True)
    return []


def measure_row(
    row: Row,
    systems: Sequence[System],
    budget: Budget,
    times: Callable[[Mapping[str, tuple[torch.cuda.CUDAGraph, int]]], dict[str, float]] = interleaved_ms,
) -> Measured:
    """Time and error of each system on one row. A library that cannot do the row is a result too."""
    cache_bytes = torch.cuda.get_device_properties().L2_cache_size
    inputs = rotated_inputs(row, device="cuda", bytes_at_least=2 * cache_bytes)
    o64, state64 = float64_result(inputs[0])
    graphs, measured = {}, {}
    for system in systems:
        budget.require()
        try:
            calls = [system.prepare(x) for x in inputs]
            o, final_state = calls[0]()
            measured[system.name] = {"rel_l2": {"o": rel_l2(o, o64), "state": rel_l2(final_state, state64)}}
            if system.name == "qla_jit":
                measured[system.name]["strategy"] = strategy_of(inputs[0], gpu_info(inputs[0].q.device))
            graphs[system.name] = graph_of(calls)
        except Exception as error:       # a benchmark reports what a library answers and goes on with the next one
            measured[system.name] = {"failed": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
            torch.cuda.synchronize()     # raises where the GPU itself is in an error state: nothing after it would be true
    del o64, state64
    for name, ms in (times(graphs) if graphs else {}).items():
        measured[name]["ms"] = round(ms, 5)
    return measured


def float64_result(x: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    from qla_jit.reference import chunk_gated_delta_rule

    return chunk_gated_delta_rule(
        x.q, x.k, x.v, x.g, x.beta, initial_state=x.initial_state, cu_seqlens=x.cu_seqlens_cpu, dtype=torch.float64
    )


def rel_l2(result: torch.Tensor, exact: torch.Tensor) -> float:
    return float(f"{((result.double() - exact).norm() / exact.norm()).item():.4g}")


def describe(row: Row, measured: Measured) -> str:
    cells = [
        f"{name} {result['ms']:.3f}" if "ms" in result else f"{name} failed ({result['failed'][:60]})"
        for name, result in measured.items()
    ]
    ours = measured.get("qla_jit", {}).get("rel_l2")
    error = "; error " + " ".join(f"{output} {error:.2e}" for output, error in ours.items()) if ours else ""
    return f"{row.name:18s} ms: {', '.join(cells)}{error}"


def make_parser(op: str, systems: Sequence[System]) -> argparse.ArgumentParser:
    names = [system.name for system in systems]
    parser = argparse.ArgumentParser(description=f"How fast and how exact is the {op} pass, beside other libraries?")
    parser.set_defaults(table=op)
    parser.add_argument("--systems", nargs="+", choices=names, default=names, metavar="NAME", help=f"of {', '.join(names)}")
    parser.add_argument("--only-qla-jit", dest="systems", action="store_const", const=["qla_jit"], help="--systems qla_jit")
    parser.add_argument("--rows", nargs="+", default=["*"], metavar="PATTERN", help="of names such as '16,64:4096x8'")
    parser.add_argument("--gates", choices=GATES, default="mixed", help="mixed: every fourth head never decays")
    parser.add_argument("--out", type=Path, help=f"default: benchmarks/results/<GPU>/{op}.json, or {op}_<gates>.json")
    parser.add_argument("--budget-seconds", type=float, help="stop before this much time is spent")
    parser.add_argument("--commit", default=results.current_commit(), help="where there is no git: which commit this is")
    return parser


def parse(
    parser: argparse.ArgumentParser,
    arguments: Sequence[str] | None,
    table_of: Callable[[argparse.Namespace], Sequence[Row]],
) -> argparse.Namespace:
    """The options, with the rows themselves in place of the patterns."""
    options = parser.parse_args(arguments)
    table = table_of(options)
    for pattern in options.rows:
        if not any(fnmatch.fnmatchcase(row.name, pattern) for row in table):
            parser.error(f"--rows {pattern!r} matches none of: {' '.join(row.name for row in table)}")
    wanted = (row for row in table if any(fnmatch.fnmatchcase(row.name, pattern) for pattern in options.rows))
    options.rows = [replace(row, gates=options.gates) for row in wanted]
    return options


if __name__ == "__main__":
    sys.exit(main())
