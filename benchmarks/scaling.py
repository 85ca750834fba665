"""How does the forward grow with the length of one sequence, and what does it cost to cut the same tokens into short ones?

    python benchmarks/scaling.py                                     both parts, every library that is installed
    python benchmarks/scaling.py --parts lengths --only-qla-jit --budget-seconds 60

`tokens`: one sequence of 64 tokens to a million, a row for each doubling: milliseconds, and bytes allocated above the inputs at
the highest, by library. `lengths`: as many sequences of 1 to 130 tokens as make 4,096, without states, whose bytes would hide
the rest: nanoseconds a token, and how many times those of the nearest multiple of the chunk. Each row is saved as it is measured.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import results
import torch
from systems import SYSTEMS, System
from timing import PROTOCOL, Budget, BudgetSpent, graph_of, interleaved_ms, peak_bytes
from workload import GATES, Inputs, Row, rotated_inputs

PARTS = ("tokens", "lengths")
TOKENS_HEADS, LENGTHS_HEADS = (8, 32), (2, 8)
TOKENS = tuple(2**power for power in range(6, 21))
LENGTHS, TOKENS_OF_LENGTHS, CHUNK = range(1, 131), 4096, 64


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if not torch.cuda.is_available():
        sys.exit("benchmarks/scaling.py times kernels on a GPU, and torch sees none here.")
    systems = [system for system in SYSTEMS if system.name in options.systems and system.installed]
    out, budget = options.out or results.default_path("scaling.json"), Budget(options.budget_seconds)
    document = results.begun(
        out, commit=options.commit, protocol=PROTOCOL + GATES["mixed"], distributions=(system.distribution for system in SYSTEMS)
    )
    todo = [("tokens", T) for T in TOKENS if "tokens" in options.parts]
    todo += [("lengths", length) for length in LENGTHS if "lengths" in options.parts]
    for part, size in todo:
        try:
            budget.require()
        except BudgetSpent as stop:
            print(f"stopped before {part} {size}: {stop}")
            break
        measured = one_sequence(size, systems) if part == "tokens" else short_sequences(size)
        kept = [row for row in document["rows"] if (row["part"], row["size"]) != (part, size)]
        document["rows"] = with_ratios([*kept, {"part": part, "size": size} | measured | {"commit": options.commit}])
        results.save(out, document)
        print(part, size, document["rows"][-1], flush=True)
    print(summary(document["rows"]))
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    names = [system.name for system in SYSTEMS]
    parser = argparse.ArgumentParser(description="How does the forward grow with the length of a sequence, and of many?")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--systems", nargs="+", choices=names, default=names, metavar="NAME", help=f"of {', '.join(names)}")
    parser.add_argument("--only-qla-jit", dest="systems", action="store_const", const=["qla_jit"], help="--systems qla_jit")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/<GPU>/scaling.json")
    parser.add_argument("--budget-seconds", type=float, help="begin no row after this time")
    parser.add_argument("--commit", default=results.current_commit(), help="where there is no git: which commit this is")
    return parser.parse_args(arguments)


def one_sequence(T: int, systems: Sequence[System]) -> dict[str, Any]:
    """Milliseconds and bytes of each library; why, where it cannot."""
    cache_bytes = torch.cuda.get_device_properties().L2_cache_size
    inputs = rotated_inputs(Row(*TOKENS_HEADS, (T,)), device="cuda", bytes_at_least=2 * cache_bytes)
    graphs, peaks, failed = {}, {}, {}
    for system in systems:
        try:
            calls = [system.prepare(x) for x in inputs]
            peaks[system.name] = peak_bytes(calls[0])
            graphs[system.name] = graph_of(calls)
        except Exception as error:       # a benchmark reports what a library answers and goes on with the next one
            failed[system.name] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            torch.cuda.synchronize()     # raises where the GPU itself is in an error state: nothing after it would be true
    times = {name: round(ms, 5) for name, ms in (interleaved_ms(graphs) if graphs else {}).items()}
    return {"ms": times, "peak_bytes": peaks, "failed": failed}


def short_sequences(length: int) -> dict[str, Any]:
    """Nanoseconds a token of qla_jit."""
    row = Row(*LENGTHS_HEADS, (length,) * (TOKENS_OF_LENGTHS // length))
    cache_bytes = torch.cuda.get_device_properties().L2_cache_size
    sets = rotated_inputs(in_one_sequence(row), device="cuda", bytes_at_least=2 * cache_bytes)
    inputs = [packed_in(x, row) for x in sets]
    ms = interleaved_ms({"qla_jit": graph_of([stateless_call(x) for x in inputs])})["qla_jit"]
    return {"ns_per_token": round(1e6 * ms / sum(row.seqlens), 3)}


def in_one_sequence(row: Row) -> Row:
    """The same tokens: a state for each of thousands of sequences would not be used."""
    return replace(row, seqlens=(sum(row.seqlens),))


def packed_in(x: Inputs, row: Row) -> Inputs:
    starts = torch.arange(len(row.seqlens) + 1, dtype=torch.int32) * row.seqlens[0]
    return replace(x, seqlens=row.seqlens, cu_seqlens=starts.to(x.q.device), cu_seqlens_cpu=starts)


def stateless_call(x: Inputs) -> Callable[[], torch.Tensor]:
    import qla_jit

    def call() -> torch.Tensor:
        o, _ = qla_jit.chunk_gated_delta_rule(
            x.q, x.k, x.v, x.g, x.beta, cu_seqlens=x.cu_seqlens, cu_seqlens_cpu=x.cu_seqlens_cpu
        )
        return o

    return call


def neighbour(length: int) -> int:
    """The nearest multiple of the chunk, the upper one of two, and at least one chunk."""
    return max((length + CHUNK // 2) // CHUNK, 1) * CHUNK


def with_ratios(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of lengths whose neighbour is measured say how many times its nanoseconds a token take."""
    by_length = {row["size"]: row["ns_per_token"] for row in rows if row["part"] == "lengths"}

    def rated(row: dict[str, Any]) -> dict[str, Any]:
        base = by_length.get(neighbour(row["size"])) if row["part"] == "lengths" else None
        return row if base is None else row | {"over_neighbour": round(row["ns_per_token"] / base, 3)}

    return [rated(row) for row in rows]


def summary(rows: Sequence[dict[str, Any]]) -> str:
    lines = []
    rated = [row for row in rows if "over_neighbour" in row]
    if rated:
        worst = max(rated, key=lambda row: row["over_neighbour"])
        above = [row["size"] for row in rated if row["over_neighbour"] > 1.5]
        lines.append(
            f"lengths: {worst['size']} is {worst['over_neighbour']} times as slow a token as {neighbour(worst['size'])}; "
            f"{len(above)} of {len(rated)} are more than 1.5 times as slow"
        )
    ours = [row for row in rows if row["part"] == "tokens" and "qla_jit" in row["ms"]]
    for row in sorted(ours, key=lambda row: row["size"]):
        T, ms = row["size"], row["ms"]
        others = {name: round(time / ms["qla_jit"], 2) for name, time in ms.items() if name != "qla_jit"}
        nanoseconds, peak = 1e6 * ms["qla_jit"] / T, row["peak_bytes"]["qla_jit"] / T
        lines.append(f"{T} tokens: {nanoseconds:.1f} ns and {peak:.0f} bytes a token; {others}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
