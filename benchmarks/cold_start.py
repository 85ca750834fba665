"""What does a first call cost: compiling, loading what was compiled before, and the host's share of every later call?

    python benchmarks/cold_start.py [--heads 8,24] [--out FILE]

Two fresh processes share a new, empty kernel cache: the first compiles, the second finds its kernels on disk. On a machine
without a GPU the kernels are built and loaded for --arch and nothing is launched.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import results
import torch
from systems import checked, qla_jit_call
from timing import host_us
from workload import K, Row, V, make_inputs

from qla_jit.device import gpu_info

TOKENS = 2048                            # the host's time does not depend on it; short, so that the GPU keeps up with the host

PROTOCOL = (
    "Seconds of fresh processes on an empty and then a warm kernel cache. compile_seconds and load_seconds are those of "
    "qla_jit.kernel_cache.stats(), summed over the kernels, which compile side by side; first_call_seconds is the wall time "
    "from the first call to its result, torch imported and CUDA initialised; host_us is the host time of one call with all "
    f"checks on, T = {TOKENS}: median of 20 batches of 50 calls, the GPU waited for between batches only."
)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    if options.stage:
        print(json.dumps(run_stage(*options.heads, options.arch)))
        return
    has_gpu = torch.cuda.is_available()
    with tempfile.TemporaryDirectory(prefix="qla_jit_cold_") as cache:
        cold, warm = (run_process(arguments, stage, Path(cache)) for stage in ("cold", "warm"))
    assert warm["compiles"] == 0, f"the second process compiled again: {warm}"
    H, HV = options.heads
    arch = gpu_info(torch.device("cuda")).arch.name if has_gpu else options.arch
    row = {"op": "forward", "H": H, "HV": HV, "K": K, "V": V, "arch": arch, "cold": cold, "warm": warm}
    document = {
        "gpu": results.gpu_name(),
        "cpus": os.cpu_count(),
        "versions": results.versions(["qla_jit"]),
        "commit": options.commit,
        "date": results.now(),
        "protocol": PROTOCOL,
        "rows": [row],
    }
    print(json.dumps(row, indent=1))
    if options.out is not None or has_gpu:
        out = options.out or results.default_path("cold_start.json")
        results.save(out, document)
        print(out)


def run_process(arguments: Sequence[str] | None, stage: str, cache: Path) -> dict[str, Any]:
    """The measurements of one fresh process."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    command = [sys.executable, __file__, *given, "--stage", stage]
    environment = {**os.environ, "QLA_JIT_CACHE_DIR": str(cache)}
    child = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(child.stdout.splitlines()[-1])


def run_stage(H: int, HV: int, arch: str) -> dict[str, Any]:
    """Inside of a fresh process: the first call, or without a GPU the kernels alone; then the host's time."""
    has_gpu = torch.cuda.is_available()
    x = make_inputs(Row(H, HV, (TOKENS,)), device="cuda" if has_gpu else "cpu")
    started = time.perf_counter()
    importlib.import_module("qla_jit.ops.pipeline")                      # all that a call on a GPU imports
    import_seconds = time.perf_counter() - started
    from qla_jit import kernel_cache, select
    from qla_jit.kernel_templates.arch import ARCHES

    first_call_seconds = host = None
    if has_gpu:
        call = qla_jit_call(x)
        torch.cuda.synchronize()
        started = time.perf_counter()
        call()
        torch.cuda.synchronize()
        first_call_seconds = time.perf_counter() - started
        host = host_us(call)
    else:
        kernel_cache.get(select.requests_for_any_size(checked(x).facts, ARCHES[arch]))
    stats = kernel_cache.stats()
    return {
        "import_seconds": round(import_seconds, 4),
        "compiles": stats.compiles,
        "compile_seconds": round(stats.compile_seconds, 3),
        "disk_hits": stats.disk_hits,
        "load_seconds": round(stats.load_seconds, 4),
        "first_call_seconds": None if first_call_seconds is None else round(first_call_seconds, 3),
        "host_us": None if host is None else round(host, 1),
        "imported_tilelang": "tilelang" in sys.modules,
    }


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    def heads(text: str) -> tuple[int, int]:
        H, HV = text.split(",")
        return int(H), int(HV)

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", type=heads, default=(8, 24), metavar="H,HV", help="default 8,24: Qwen3.5-27B on two GPUs")
    parser.add_argument("--arch", default="sm_90a", help="what to build for where there is no GPU")
    parser.add_argument("--out", type=Path, help="default with a GPU: benchmarks/results/<GPU>/cold_start.json; without: none")
    parser.add_argument("--commit", default=results.current_commit(), help="where there is no git: which commit this is")
    parser.add_argument("--stage", choices=("cold", "warm"), help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
