"""How far from the float64 recurrence is each library, by family of gates, betas and keys?

    python benchmarks/accuracy.py [--out FILE] [--systems qla_jit flash_qla fla]

Writes {"gpu", "versions", "commit", "date", "rows": [{"case", "rel_l2": {system: {"o", "state"}}}]}. The inputs are those of
the device tests (tests/cases.py), K = V = 128 in bf16, so that the bounds there can be held against these numbers.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import results
import torch
from cases import GATES, Case, arguments, oracle, relative_l2
from systems import SYSTEMS
from workload import Inputs

BASE = Case(H=2, HV=8, K=128, V=128, lengths=(200, 64, 1, 447, 1024), dtype=torch.bfloat16)
CASES = [
    *(replace(BASE, gates=gates) for gates in GATES),
    *(replace(BASE, betas=betas) for betas in ("beta0", "beta1", "beta2")),
    *(replace(BASE, keys="collinear", gates=gates) for gates in ("mixed", "qwen", "open")),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--systems", nargs="+", default=["qla_jit", "flash_qla", "fla"])
    parser.add_argument("--commit", default=None, help="where there is no git: the commit that runs")
    options = parser.parse_args()
    systems = [system for system in SYSTEMS if system.name in options.systems and system.installed]
    rows = []
    for case in CASES:
        call = arguments(case, device="cuda")
        expected_o, expected_state = oracle(call)
        tensors = {name: call[name] for name in ("q", "k", "v", "g", "beta", "initial_state", "cu_seqlens")}
        inputs = Inputs(case.lengths, **tensors, cu_seqlens_cpu=call["cu_seqlens"].cpu())
        errors = {}
        for system in systems:
            o, final_state = system.prepare(inputs)()
            errors[system.name] = {"o": relative_l2(o, expected_o), "state": relative_l2(final_state, expected_state)}
        rows.append({"case": str(case), "rel_l2": errors})
        print(case, *(f"{name} {e['o']:.2e} {e['state']:.2e}" for name, e in errors.items()), sep="  ", flush=True)
    results.save(options.out or results.default_path("accuracy.json"), {
        "gpu": results.gpu_name(),
        "versions": results.versions(system.distribution for system in systems),
        "commit": options.commit or results.current_commit(),
        "date": results.now(),
        "rows": rows,
    })  # fmt: skip


if __name__ == "__main__":
    main()
