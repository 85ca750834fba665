"""Find the compiled kernel of a request: in memory, on disk (kernel_store.py), or by compiling it, once."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import platform
import shutil
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from . import compiler, kernel_store
from .cache_dir import bundle_dirs, cache_dirs, writable_cache_dir
from .compiler import CompileRequest
from .errors import CompileError, EnvironmentUnsuitable, KernelNotCachedError
from .kernel_store import KernelKey
from .launch import LoadedKernel, load
from .node_locks import one_of
from .once import first_time
from .settings import settings
from .templates import template_sources

ARTEFACT_FORMAT = 1                      # raise it when the files of an entry, or their use by launch.py, change
WAITING = "another process is compiling kernels that this one needs; it waits at most {:g} s for each"

logger = logging.getLogger("qla_jit")


@dataclass(frozen=True)
class CacheStats:
    """What get() did in this process."""

    memory_hits: int = 0
    disk_hits: int = 0                   # in a cache directory or in a bundle
    compiles: int = 0
    compile_seconds: float = 0.0         # summed over kernels, so more than the wall time when they compile in parallel
    load_seconds: float = 0.0            # finding, checking and loading entries on disk


_mutex = threading.Lock()                # guards the three below
_memory: dict[CompileRequest, LoadedKernel] = {}
_in_flight: dict[CompileRequest, Future[LoadedKernel]] = {}
_stats = CacheStats()


def get(requests: Sequence[CompileRequest]) -> list[LoadedKernel]:
    """The kernels of the requests, in their order; what neither memory nor disk has is compiled in parallel.

    Raises:
        CompileError, InvalidConfigError, EnvironmentUnsuitable: a kernel cannot be built. The others of the batch are kept.
        KernelNotCachedError: a kernel is missing and QLA_JIT_MODE is require.
    """
    try:
        kernels = [_memory[request] for request in requests]
    except KeyError:
        return _get_missing(requests)
    _count(memory_hits=len(kernels))
    return kernels


def key_of(request: CompileRequest) -> KernelKey:
    """The identity of the request's kernel on this machine."""
    return KernelKey(
        format=ARTEFACT_FORMAT,
        template=request.template.name,
        template_sha256=request.template.source_sha256(),
        problem=dataclasses.asdict(request.problem),
        config=dataclasses.asdict(request.config),
        arch=request.arch.name,
        pass_configs=dict(request.template.pass_configs),
        machine=platform.machine(),
        tilelang=compiler.tilelang_version(),
        nvcc=compiler.nvcc_version(),
    )


def may_be_asked_for(key: KernelKey) -> bool:
    """Whether a request of this version of qla_jit on this kind of machine can have such a key, whatever its nvcc."""
    there = (key.format, key.machine, key.tilelang, key.template_sha256)
    return there == (ARTEFACT_FORMAT, platform.machine(), compiler.tilelang_version(), template_sources().get(key.template))


def stats() -> CacheStats:
    """The counts since the process started."""
    return _stats


def loaded() -> dict[CompileRequest, LoadedKernel]:
    """The kernels that this process has loaded so far."""
    with _mutex:
        return dict(_memory)


def clear_memory() -> None:
    """Forget the loaded kernels, so that the next get() goes to the disk; for tests and benchmarks."""
    with _mutex:
        _memory.clear()


def _count(**increments: float) -> None:
    global _stats
    with _mutex:
        _stats = dataclasses.replace(_stats, **{name: getattr(_stats, name) + n for name, n in increments.items()})


# Between the threads of a process: one of them takes care of a request, and the others wait for its future.


def _get_missing(requests: Sequence[CompileRequest]) -> list[LoadedKernel]:
    mine: list[CompileRequest] = []
    futures: dict[CompileRequest, Future[LoadedKernel]] = {}
    memory_hits = 0
    with _mutex:
        for request in dict.fromkeys(requests):
            if request in _memory:
                futures[request] = Future()
                futures[request].set_result(_memory[request])
                memory_hits += 1
            elif request in _in_flight:
                futures[request] = _in_flight[request]
            else:
                futures[request] = _in_flight[request] = Future()
                mine.append(request)
    _count(memory_hits=memory_hits)
    try:
        _take_care_of(mine)
    except BaseException as error:
        for request in mine:
            _settle(request, error)
        raise
    return [futures[request].result() for request in requests]


def _settle(request: CompileRequest, outcome: LoadedKernel | BaseException) -> None:
    """Tell those who wait for a request; the first outcome counts."""
    with _mutex:
        future = _in_flight.pop(request, None)
        if isinstance(outcome, LoadedKernel):
            _memory[request] = outcome
    if future is None:
        return
    if isinstance(outcome, LoadedKernel):
        future.set_result(outcome)
    else:
        future.set_exception(outcome)


def _take_care_of(requests: Sequence[CompileRequest]) -> None:
    missing: dict[CompileRequest, KernelKey] = {}
    for request in requests:
        key = key_of(request)
        kernel = _from_disk(key)
        if kernel is None:
            missing[request] = key
        else:
            _settle(request, kernel)
    if not missing:
        return
    if settings().mode == "require":
        raise KernelNotCachedError("\n".join(_not_cached(request, key) for request, key in missing.items()))
    logger.info("compiling, because the kernel cache (%s) does not have: %s", _places(), "; ".join(str(r) for r in missing))

    def build(request: CompileRequest) -> None:
        try:
            _settle(request, _build(request, missing[request]))
        except Exception as error:       # the rest of the batch goes on
            _settle(request, error)

    if len(missing) == 1:
        build(*missing)
        return
    with ThreadPoolExecutor(min(len(missing), settings().jobs), thread_name_prefix="qla_jit-compile") as pool:
        try:
            list(pool.map(build, missing))
        except BaseException:            # Ctrl-C: leaving the pool would wait for its threads, and they for their compilers
            pool.shutdown(wait=False, cancel_futures=True)
            compiler.stop_all()
            raise


def _build(request: CompileRequest, key: KernelKey) -> LoadedKernel:
    seconds = settings().compile_timeout
    with one_of([key.digest()], seconds=seconds, on_wait=functools.partial(_tell_once, WAITING.format(seconds))):
        # Another process may have built it while this one waited for the lock.
        return _from_disk(key) or _compile(request, key)


def _from_disk(key: KernelKey) -> LoadedKernel | None:
    started = time.perf_counter()
    kernel = kernel_store.find(key)
    if kernel is not None:
        _count(disk_hits=1, load_seconds=time.perf_counter() - started)
    return kernel


def _compile(request: CompileRequest, key: KernelKey) -> LoadedKernel:
    build = _build_directory()
    try:
        try:
            with _build_slot():
                started = time.perf_counter()
                compiler.compile_to(build, request)
        except CompileError as error:
            error.key = key.digest()
            error.log_path = kernel_store.keep_log(build / compiler.LOG, key)
            raise
        _count(compiles=1, compile_seconds=time.perf_counter() - started)
        entry = kernel_store.store(build, key)
        if entry is not None:
            with contextlib.suppress(OSError, RuntimeError, ValueError):             # it cannot be read back, or not be run there
                return load(entry, digest=key.digest())
        # Not stored, or another process stored this kernel first: the build at hand is the one that is known to be whole.
        try:
            return load(build, digest=key.digest())
        except (OSError, RuntimeError, ValueError) as error:
            raise CompileError(f"{request} was compiled and cannot be loaded from {build}: {error}", key=key.digest()) from error
    finally:
        # No TemporaryDirectory: a process that was forked meanwhile would remove it when it ends.
        shutil.rmtree(build, ignore_errors=True)


def _build_slot() -> contextlib.AbstractContextManager[None]:
    """One of QLA_JIT_JOBS: all processes of a user on this machine share them, however many ranks start at once."""
    return one_of([f"slot-{number}" for number in range(settings().jobs)], seconds=settings().compile_timeout)


def _build_directory() -> Path:
    """A new directory on the node's own disk, wherever the cache is: only the copy into it can meet trouble with the cache."""
    try:
        return Path(tempfile.mkdtemp(prefix="qla_jit-build-"))
    except OSError as error:             # a container may have a volume for the cache, and nothing else that can be written
        cache = writable_cache_dir()
        if cache is not None:
            with contextlib.suppress(OSError):
                return Path(tempfile.mkdtemp(prefix="qla_jit-build-", dir=cache))
        raise EnvironmentUnsuitable(
            f"compiling a kernel needs a directory to work in, and none can be made: {error}. Set TMPDIR or QLA_JIT_CACHE_DIR to "
            "a directory that can be written, or QLA_JIT_BUNDLE_PATH to what qla-tune build made."
        ) from None


def _forget_the_parents_work() -> None:
    """In a forked process: the threads that compile, and would answer those who wait, exist in the parent only."""
    global _mutex
    _mutex = threading.Lock()
    _in_flight.clear()


os.register_at_fork(after_in_child=_forget_the_parents_work)


def _tell_once(message: str) -> None:
    if first_time(message):
        logger.info(message)


def _not_cached(request: CompileRequest, key: KernelKey) -> str:
    found = kernel_store.nearest(key)
    if found is None:
        nearest = f"no kernel of the template {key.template} is there"
    else:
        nearest = f"the nearest one differs in {', '.join(found[1])}, and is {found[0]}"
    return (
        f"{request} is not in the kernel cache ({_places()}), and QLA_JIT_MODE=require forbids compiling; {nearest}. Make the "
        "same call once with QLA_JIT_MODE=lookup where nvcc is installed, or set QLA_JIT_CACHE_DIR to a cache that has it, or "
        "QLA_JIT_BUNDLE_PATH to a directory that qla-tune build made."
    )


def _places() -> str:
    return ", ".join(map(str, (*(directory.path for directory in cache_dirs()), *bundle_dirs()))) or "memory only"
