"""Do calls get the best that could run? At sizes that were tuned and at others, with the records that are installed and without.

    python benchmarks/dispatch.py                                    the forward
    python benchmarks/dispatch.py --op gdn_backward
    python benchmarks/dispatch.py --rows '16,64:*' --budget-seconds 60

What is timed on a row, in turns: what a call is given; what it would be given without records; and every strategy but the
baseline, with every split that it offers, in the default config of its templates. `regret` is how much longer the first takes
than the best of all, `speedup` how much less than the second. A row is merged into the output file as soon as it is measured.
"""

from __future__ import annotations

import argparse
import fnmatch
import functools
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import results
import torch
from timing import PROTOCOL, Budget, BudgetSpent, graph_of, interleaved_ms
from workload import ALL_HEAD_PAIRS, GATES, ROWS, Row

from qla_jit import select
from qla_jit.device import GpuInfo, gpu_info
from qla_jit.ops.plan import BACKWARD, FORWARD
from qla_jit.tune.operations import OPERATIONS
from qla_jit.tune.search_space import Candidate, SearchSpace
from qla_jit.tuning_records import Hardware, Problem
from qla_jit.workload import facts_of

# No multiples of what is tuned, and more ways to divide the tokens.
UNTUNED_SETS = (
    (1500,), (3000,), (12000,), (24000,), (5000, 3000), (20000, 6000), (1500,) * 6, (6000,) * 4, (9000, 700, 700, 3000),
)  # fmt: skip
UNTUNED_ROWS = tuple(Row(H, HV, seqlens) for seqlens in UNTUNED_SETS for H, HV in ALL_HEAD_PAIRS)
TABLE = (*ROWS, *UNTUNED_ROWS)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if not torch.cuda.is_available():
        sys.exit("benchmarks/dispatch.py times kernels on a GPU, and torch sees none here.")
    out, gpu = options.out or results.default_path("dispatch.json"), gpu_info(torch.device("cuda", 0))
    document = results.begun(out, commit=options.commit, protocol=PROTOCOL + GATES["mixed"])
    budget = Budget(options.budget_seconds)
    for position, row in enumerate(options.rows):
        try:
            budget.require()
        except BudgetSpent as stop:
            print(f"stopped: {stop}; not measured: {' '.join(left.name for left in options.rows[position:])}")
            break
        measured = measure_row(row, options.op, gpu)
        key = {"op": options.op, "H": row.H, "HV": row.HV, "seqlens": list(row.seqlens)}
        kept = [entry for entry in document["rows"] if {name: entry[name] for name in key} != key]
        run = {"commit": options.commit, "date": document["date"]}
        document["rows"] = [*kept, key | measured | {"measured": run}]
        results.save(out, document)
        print(f"{row.name:22s} {describe(measured)}", flush=True)
    print(summary([row for row in document["rows"] if row["op"] == options.op]))
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Do calls get the best that could run?")
    parser.add_argument("--op", choices=(FORWARD, BACKWARD), default=FORWARD)
    parser.add_argument("--rows", nargs="+", default=["*"], metavar="PATTERN", help="of names such as '16,64:4096x8'")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/<GPU>/dispatch.json")
    parser.add_argument("--budget-seconds", type=float, help="begin no row after this time")
    parser.add_argument("--commit", default=results.current_commit(), help="where there is no git: which commit this is")
    options = parser.parse_args(arguments)
    options.rows = [row for row in TABLE if any(fnmatch.fnmatchcase(row.name, pattern) for pattern in options.rows)]
    if not options.rows:
        parser.error("--rows matches no row")
    return options


def measure_row(row: Row, op: str, gpu: GpuInfo) -> dict[str, Any]:
    """Times by candidate, and what they say of the one that a call is given."""
    problem = Problem(H=row.H, HV=row.HV, K=row.K, V=row.V, dtype="bfloat16", chunk_size=64, varlen=True)
    space = SearchSpace(facts_of(problem, torch.device("cuda", 0)), gpu.arch, gpu.sm_count, op)
    extents = space.extents(row.seqlens)
    size = select.bucket(extents)
    dispatch = select.choose(space.facts, gpu.arch, op=op, hardware=Hardware.of(gpu), extents=size)
    chosen = Candidate(
        dispatch.strategy, tuple((step, request.config) for step, request in dispatch.requests.items()), dispatch.split
    )
    default = space.default(extents)
    candidates = {space.label(candidate): candidate for candidate in (chosen, default, *alternatives(space, row.seqlens))}
    ms = times(space, row.seqlens, candidates, l2_bytes=gpu.l2_bytes)
    return judged(ms, space.label(chosen), space.label(default)) | {"match": dispatch.match}


def alternatives(space: SearchSpace, seqlens: tuple[int, ...]) -> list[Candidate]:
    """Every strategy but the baseline with every split that it offers, configs at their defaults."""
    extents = space.extents(seqlens)
    starts = [space.start(strategy, extents) for strategy in space.strategies[:-1]]
    return [start.with_split(split) for start in starts for split in space.splits(start.strategy, extents)]


def times(
    space: SearchSpace, seqlens: tuple[int, ...], candidates: Mapping[str, Candidate], *, l2_bytes: int
) -> dict[str, float]:
    """Milliseconds of a call by each candidate; calls rotate over inputs that together hold twice the L2 cache."""
    operation = OPERATIONS[space.op]
    reads, _ = operation.bytes(space.facts, seqlens)
    samples = [operation.sample(space.facts, seqlens, "mixed", seed=seed) for seed in range(math.ceil(2 * l2_bytes / reads))]
    graphs = {
        label: graph_of([functools.partial(operation.runner(candidate), sample) for sample in samples])
        for label, candidate in candidates.items()
    }
    return {label: round(ms, 5) for label, ms in interleaved_ms(graphs).items()}


def judged(ms: Mapping[str, float], chosen: str, default: str) -> dict[str, Any]:
    best = min(ms, key=lambda label: ms[label])
    return {
        "ms": dict(ms), "chosen": chosen, "default": default, "best": best,
        "regret": round(ms[chosen] / ms[best] - 1, 4), "speedup": round(ms[default] / ms[chosen], 4),
    }  # fmt: skip


def describe(measured: Mapping[str, Any]) -> str:
    text = f"{measured['ms'][measured['chosen']]:.3f} ms by {measured['chosen']} ({measured['match']})"
    if measured["regret"]:
        text += f"; {measured['best']} is {measured['regret']:.1%} faster"
    return text if measured["chosen"] == measured["default"] else f"{text}; {measured['speedup']:.3f} x the default"


def summary(rows: Sequence[Mapping[str, Any]]) -> str:
    """Of one operation: regrets where nothing was tuned and where it was, and the least and the mean gain of the records."""
    untuned = {(row.H, row.HV, row.seqlens) for row in UNTUNED_ROWS}
    lines = []
    for what, of_untuned in (("tuned sizes and their like", False), ("sizes that were not tuned", True)):
        found = [row for row in rows if ((row["H"], row["HV"], tuple(row["seqlens"])) in untuned) == of_untuned]
        if found:
            regrets, speedups = [row["regret"] for row in found], [row["speedup"] for row in found]
            lines.append(
                f"{what}: {len(found)} rows; regret {statistics.median(regrets):.1%} in the median, {max(regrets):.1%} at most; "
                f"{min(speedups):.3f} to {max(speedups):.3f} x the defaults, mean {statistics.geometric_mean(speedups):.3f}"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
