"""Print what a bug report needs: versions, GPUs, cache directories, settings. Run `python -m qla_jit.collect_env`."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import shutil
import subprocess
from collections.abc import Callable

from .settings import VARIABLES, Variable, available_cpus, settings

PACKAGES = ("qla_jit", "torch", "tilelang", "apache-tvm-ffi", "triton", "diskcache", "pydantic")


def report() -> str:
    """One line for each fact, or more where there are more; a fact that cannot be found out says why."""
    facts: list[tuple[str, Callable[[], str]]] = [
        *((package, functools.partial(_package, package)) for package in PACKAGES),
        ("python", lambda: f"{platform.python_version()} on {platform.platform()}"),
        ("CUDA of torch", _torch_cuda),
        ("nvcc", _nvcc),
        ("driver", _driver),
        ("GPUs", _gpus),
        ("CPUs", lambda: f"{available_cpus()} of {os.cpu_count()} may be used"),
        ("cache", _caches),
        ("bundles", _bundles),
        *((variable.name, functools.partial(_setting, variable)) for variable in VARIABLES),
    ]
    width = max(len(name) for name, _ in facts) + 2
    return "\n".join(name.ljust(width) + _found(find).replace("\n", "\n" + " " * width) for name, find in facts)


def _found(find: Callable[[], str]) -> str:
    # The installation that is asked may be broken in any way; that is when the report is needed.
    try:
        return find()
    except Exception as error:
        return f"unknown: {type(error).__name__}: {error}"


def _package(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _torch_cuda() -> str:
    import torch

    return torch.version.cuda or "none: a build for the CPU only"


def _nvcc() -> str:
    from .compiler import find_nvcc, nvcc_version

    nvcc = find_nvcc()
    return "not found" if nvcc is None else f"{nvcc_version()} at {nvcc}"


def _driver() -> str:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "unknown: there is no nvidia-smi"
    query = [tool, "--query-gpu=driver_version,name,compute_cap", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, timeout=60, check=True).stdout.strip()


def _gpus() -> str:
    import torch

    from .device import gpu_count, gpu_info

    indices = range(gpu_count())
    lines = [f"{index}: {_found(lambda index=index: str(gpu_info(torch.device('cuda', index))))}" for index in indices]
    return "\n".join(lines) or "none that PyTorch can use"


def _caches() -> str:
    from .cache_dir import cache_dirs, kernels_in

    lines = []
    for directory in cache_dirs():
        kernels = kernels_in(directory.path)
        quarantined = sum(1 for _ in directory.path.glob("quarantine/*"))
        access = "writable" if directory.writable else "read only"
        lines.append(f"{directory.path}: {access}, {kernels} kernels, {quarantined} in quarantine")
    return "\n".join(lines) or "memory only"


def _bundles() -> str:
    from .cache_dir import bundle_dirs, distrust, kernels_in

    used = bundle_dirs()
    lines = [
        f"{path}: {kernels_in(path)} kernels" if path in used else f"not used: {distrust(path)}"
        for path in settings().bundle_path
    ]
    return "\n".join(lines) or "none"


def _setting(variable: Variable) -> str:
    value = variable.read()
    return f"{'set' if os.environ.get(variable.name) else 'default'}: {value}"


if __name__ == "__main__":
    print(report())
