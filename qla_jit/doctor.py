"""Can this machine compile, run and tune kernels, and if not, what is to be done?

What may hang or crash is asked in a process of its own.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from . import compiler, record_store
from .cache_dir import bundle_dirs, cache_dirs, distrust, refusal
from .cache_tools import cached_kernels
from .settings import VARIABLES, settings
from .tuning_records import Versions

SECONDS = 120                            # for each process that is asked

# From and up to which release, by the leading numbers, the project's tests have run.
TESTED = {"tilelang": ("0.1.15", "0.1.15"), "torch": ("2.11", "2.13"), "cuda": ("13.0", "13.0")}

Status = Literal["ok", "warning", "failed"]


@dataclass(frozen=True)
class Finding:
    """What was found, and for anything but "ok" what to do."""

    check: str
    status: Status
    found: str
    advice: str = ""


def examine() -> list[Finding]:
    """Every check, in the order in which they build on each other."""
    checks: list[tuple[str, Callable[[str], Finding]]] = [
        ("settings", _settings), ("versions", _versions), ("tilelang", _tilelang), ("nvcc", _nvcc), ("driver", _driver),
        ("gpu", _gpu), ("cache directory", _cache), ("bundles", _bundles), ("records", _records),
    ]
    findings = []
    for name, check in checks:
        try:
            findings.append(check(name))
        except Exception as error:       # a broken installation may fail in any way; that is when this is run
            found = f"{type(error).__name__}: {error}"
            findings.append(Finding(name, "failed", found, "python -m qla_jit.collect_env tells more"))
    return findings


def _settings(name: str) -> Finding:
    settings()                           # raises, and names the variable and what it expects
    there = [variable.name for variable in VARIABLES if variable.name in os.environ]
    return Finding(name, "ok", ", ".join(there) or "none is set")


def _versions(name: str) -> Finding:
    here = Versions.here().model_dump()
    untested = []
    for package, (first, last) in TESTED.items():
        version = here[package]
        if version is not None and not _numbers(first) <= _numbers(version)[: len(_numbers(last))] <= _numbers(last):
            untested.append(f"{package} {version} (tested: {first} to {last})")
    found = ", ".join(f"{package} {version}" for package, version in here.items() if version is not None)
    if untested:
        return Finding(name, "warning", "not tested with " + ", ".join(untested), "run the tests before you trust the results")
    return Finding(name, "ok", found)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version.split("+")[0])))


def _tilelang(name: str) -> Finding:
    advice = "pip install --force-reinstall tilelang"
    if settings().mode == "require":     # nothing is compiled: importing TileLang would need a directory to write to
        child = _run([sys.executable, "-c", "from qla_jit.launch import load_runtime; load_runtime()"])
        if child.returncode == 0:
            return Finding(name, "ok", f"the run-time library of {compiler.tilelang_version()} loads")
        return Finding(name, "failed", f"its run-time library does not load: {_last_line(child.stderr)}", advice)
    with tempfile.TemporaryDirectory() as scratch:
        environment = os.environ | {"TILELANG_CACHE_DIR": scratch, "CUDA_VISIBLE_DEVICES": ""}
        child = _run([sys.executable, "-c", "import tilelang; print(tilelang.__version__)"], env=environment, cwd=scratch)
    if child.returncode == 0:
        return Finding(name, "ok", f"{child.stdout.split()[-1]} can be imported")
    return Finding(name, "failed", f"cannot be imported: {_last_line(child.stderr)}", advice)


def _nvcc(name: str) -> Finding:
    nvcc = compiler.find_nvcc()
    if nvcc is None and settings().mode == "require":
        return Finding(name, "ok", "not found, and not needed: QLA_JIT_MODE=require never compiles")
    if nvcc is None:
        advice = "install the CUDA toolkit or the package nvidia-cuda-nvcc, or use a cache that was filled elsewhere"
        return Finding(name, "failed", "not found", advice)
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch, "empty.cu")
        source.write_text("__global__ void empty() {}\n")
        child = _run([str(nvcc), "-arch=sm_90a", "-cubin", "-o", str(source.with_suffix(".cubin")), str(source)])
    if child.returncode == 0:
        return Finding(name, "ok", f"{compiler.nvcc_version()} at {nvcc} compiles")
    return Finding(name, "failed", f"{nvcc} does not compile: {_last_line(child.stderr)}", "it needs g++ and CUDA 12.8 or later")


def _driver(name: str) -> Finding:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return Finding(name, "warning", "there is no nvidia-smi", "without a GPU kernels can be compiled, not run or tuned")
    child = _run([tool, "--query-gpu=driver_version", "--format=csv,noheader"])
    if child.returncode == 0:
        return Finding(name, "ok", child.stdout.splitlines()[0])
    return Finding(name, "failed", f"nvidia-smi: {_last_line(child.stdout + child.stderr)}", "repair the driver")


def _gpu(name: str) -> Finding:
    child = _run([sys.executable, "-c", textwrap.dedent("""
        import torch
        from qla_jit.device import gpu_count, gpu_info
        for index in range(gpu_count()):
            gpu = gpu_info(torch.device("cuda", index))
            torch.zeros(1, device=f"cuda:{index}").item()
            print(f"{gpu.name}: {gpu.arch.name}, {gpu.sm_count} SMs, {gpu.l2_bytes >> 20} MiB of L2")
    """)])
    if child.returncode != 0:
        return Finding(name, "failed", _last_line(child.stderr), "see whether another process has filled or broken the GPU")
    if child.stdout:
        return Finding(name, "ok", "; ".join(child.stdout.splitlines()))
    return Finding(name, "warning", "none that PyTorch can use", "running kernels needs a driver and a CUDA build of PyTorch")


def _cache(name: str) -> Finding:
    found, configured = cache_dirs(), settings().cache_dir
    if not found or not found[-1].writable:
        return Finding(name, "warning", "no directory can be written to", "set QLA_JIT_CACHE_DIR to a directory of your own")
    if configured is not None and found[-1].path != configured:
        why = refusal(configured) or "it is read only"
        return Finding(name, "warning", f"{found[-1].path} is used, not {configured}: {why}", "repair it, or name another one")
    return Finding(name, "ok", str(found[-1].path))


def _bundles(name: str) -> Finding:
    used = bundle_dirs()
    bad = [why for path in settings().bundle_path if path not in used and (why := distrust(path)) is not None]
    if bad:
        return Finding(name, "failed", "; ".join(bad), "repair QLA_JIT_BUNDLE_PATH or the directories that it names")
    kernels = {path: cached_kernels(path) for path in used}
    usable = {path: sum(kernel.usable for kernel in found) for path, found in kernels.items()}
    told = [f"{usable[path]} of {len(found)} kernels in {path} are for these versions" for path, found in kernels.items()]
    if 0 in usable.values():
        advice = "name what was --out of qla-tune build, made with the same qla_jit and TileLang on the same kind of machine"
        return Finding(name, "failed", "; ".join(told), advice)
    return Finding(name, "ok", "; ".join(told) or "QLA_JIT_BUNDLE_PATH is not set")


def _records(name: str) -> Finding:
    with _warnings() as warnings:
        layers = [stored.layer for stored in record_store.everything()]
    if warnings:
        advice = "repair or remove what is named; qla-tune prune cleans the user's records"
        return Finding(name, "failed", "; ".join(warnings), advice)
    return Finding(name, "ok", ", ".join(f"{layers.count(layer)} {layer}" for layer in ("user", "directory", "shipped")))


@contextlib.contextmanager
def _warnings() -> Iterator[list[str]]:
    """What qla_jit warns of in the block."""
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())          # type: ignore[method-assign]
    logger = logging.getLogger("qla_jit")
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)


def _run(command: list[str], *, env: Mapping[str, str] | None = None, cwd: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, timeout=SECONDS, check=False)


def _last_line(text: str) -> str:
    return text.strip().splitlines()[-1] if text.strip() else "no output"
