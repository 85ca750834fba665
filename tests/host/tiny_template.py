"""The smallest real template, for tests of everything around templates: y = factor * x, or a compiler that misbehaves."""

from __future__ import annotations

import atexit
import functools
import hashlib
import os
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from qla_jit.compiler import CompileRequest, compile_to, nvcc_version
from qla_jit.kernel_templates.arch import ARCHES, SM90A
from qla_jit.kernel_templates.contract import Buffer, Rejection, Role, Template, knob
from qla_jit.kernel_templates.language import T


@dataclass(frozen=True)
class Problem:
    dtype: str = "float32"
    behaviour: str = "works"             # what build does: works, raises, exits, sleeps


@dataclass(frozen=True)
class Config:
    threads: int = knob(32, 64, 128, why="elements in flight per block")
    per_thread: int = knob(1, 2, 4, why="width of a load")


def arguments(problem):
    return ("x", "y", "factor")


def buffers(problem, config):
    return (Buffer("x", (config.threads * config.per_thread,), problem.dtype),)


def roles(problem, config):
    return (Role("scale", threads=config.threads, registers=8 * config.per_thread),)


def loads_are_aligned(problem, config, arch):
    if config.threads * config.per_thread > 256:
        return Rejection(f"threads={config.threads} x per_thread={config.per_thread} is more than 256 elements a block")
    return None


def default_config(problem, arch):
    return Config(threads=64, per_thread=1)


def build(problem, config):
    if problem.behaviour == "raises":
        raise RuntimeError("a layout that TileLang cannot infer")
    if problem.behaviour == "exits":
        os._exit(3)
    if problem.behaviour == "sleeps":
        time.sleep(60)
    dtype, block = problem.dtype, config.threads * config.per_thread
    N = T.dynamic("N")

    @T.prim_func
    def tiny_scale(x: T.Tensor((N,), dtype), y: T.Tensor((N,), dtype), factor: T.float32):
        with T.Kernel(T.ceildiv(N, block), threads=config.threads) as block_index:
            x_shared = T.alloc_shared((block,), dtype)
            T.copy(x[block_index * block], x_shared)
            for i in T.Parallel(block):
                if block_index * block + i < N:
                    y[block_index * block + i] = x_shared[i] * factor

    return tiny_scale


class _LocalTemplate(Template):
    """A template with nothing beside it: no macros, no language module."""

    def source_sha256(self):
        return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()


TEMPLATE = _LocalTemplate(
    name="tiny_scale",
    problem=Problem,
    config=Config,
    arches=tuple(ARCHES),
    arguments=arguments,
    buffers=buffers,
    roles=roles,
    default_config=default_config,
    build=build,
    constraints=(loads_are_aligned,),
)


needs_nvcc = pytest.mark.skipif(nvcc_version() is None, reason="compiles a kernel, and there is no nvcc")


def request(threads=64, per_thread=1, arch=SM90A, **problem):
    return CompileRequest(TEMPLATE, Problem(**problem), Config(threads, per_thread), arch)


@functools.cache
def built():
    """The directory of the artefacts of request(), compiled once for all tests, about ten seconds. Needs nvcc."""
    directory = Path(tempfile.mkdtemp(prefix="qla_jit-tests-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    compile_to(directory, request())
    return directory
