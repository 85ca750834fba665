"""Load a compiled kernel, to be called. TileLang is not imported: its runtime library is enough, and loads in milliseconds."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tvm_ffi

from .compiler import BUILD_REPORT, EXECUTABLE


@dataclass(frozen=True, eq=False)
class LoadedKernel:
    """A kernel that is ready to launch."""

    launch: Callable[..., None]          # the entry point itself: positional tensors, ints, floats and Nones, in the order of
                                         # `arguments`; runs on PyTorch's current stream of the tensors' device
    name: str
    arguments: tuple[str, ...]
    digest: str                          # of its KernelKey
    directory: Path                      # its artefacts; not needed any more, and gone if they could not be kept

    def __call__(self, *args: Any) -> None:
        self.launch(*args)


def load(directory: Path, *, digest: str) -> LoadedKernel:
    """Load the artefacts that compile_to() made. The files may be removed afterwards.

    Raises:
        OSError, RuntimeError, ValueError: the files are incomplete, or made for another machine.
    """
    load_runtime()
    report = json.loads((directory / BUILD_REPORT).read_text())
    # The function keeps its module, and so the library, loaded.
    launch = tvm_ffi.load_module(str(directory / EXECUTABLE))[report["function"]]
    return LoadedKernel(launch, report["function"], tuple(report["arguments"]), digest, directory)


@functools.cache
def load_runtime() -> None:
    """Give the kernels' host code the symbols that it expects to find in the process."""
    package = importlib.util.find_spec("tilelang")
    assert package is not None, "tilelang is a dependency of qla_jit"
    assert package.origin is not None, "tilelang is a regular package"
    libraries = Path(package.origin).with_name("lib")
    for name in ("libtvm_runtime.so", "libtilelang.so"):         # module loading and launches; tensor maps for bulk copies
        ctypes.CDLL(str(libraries / name), ctypes.RTLD_GLOBAL)
