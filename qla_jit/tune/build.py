"""Compile candidates, several at a time and without a GPU, and rule out by what the compiler said of them.

With QLA_JIT_MODE=require only what is built already is a candidate: a run that pays for its GPU by the minute then spends none
of them on compiling.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

from .. import compiler, kernel_cache
from ..cache_dir import writable_cache_dir
from ..compiler import BUILD_REPORT, DEVICE_SOURCE, CompileRequest
from ..errors import CompileError, EnvironmentUnsuitable, InvalidConfigError, KernelNotCachedError
from ..launch import LoadedKernel
from ..settings import settings
from .search_space import Candidate, SearchSpace
from .worker import Failure

SPILLED_BYTES = 128                      # a thread; a template's default may spill more, and then others may too

OnKernel = Callable[[int, int], None]    # (kernels done, kernels in all)


def build(
    space: SearchSpace, candidates: Sequence[Candidate], *, on_kernel: OnKernel = lambda done, total: None
) -> list[str | Failure]:
    """For each candidate a hash of its generated source, the same for candidates that differ in nothing; or why it is out.

    Raises:
        EnvironmentUnsuitable: nothing can be compiled here, or the kernels cannot be kept for the worker to find.
    """
    if writable_cache_dir() is None:
        raise EnvironmentUnsuitable(
            "the tuner's worker finds the kernels in the cache directory, and none is writable; set QLA_JIT_CACHE_DIR to one"
        )
    needed = {candidate: space.requests(candidate) for candidate in candidates}
    defaults = [
        CompileRequest(step.template, step.problem, step.template.default_config(step.problem, space.arch), space.arch)
        for strategy in dict.fromkeys(candidate.strategy for candidate in candidates)
        for step in space.steps(strategy).values()
    ]
    built = compile_all([*defaults, *(request for requests in needed.values() for request in requests)], on_kernel=on_kernel)

    def outcome(candidate: Candidate) -> str | Failure:
        digest = hashlib.sha256(candidate.strategy.encode())
        for request in needed[candidate]:
            kernel = built[request]
            if isinstance(kernel, Failure):
                return kernel
            default = next(built[d] for d in defaults if (d.template, d.problem) == (request.template, request.problem))
            failure = None if isinstance(default, Failure) else _static_failure(request, _report(kernel), _report(default))
            if failure is not None:
                return failure
            digest.update((kernel.directory / DEVICE_SOURCE).read_bytes())
        return digest.hexdigest()

    return [outcome(candidate) for candidate in candidates]


def compile_all(
    requests: Sequence[CompileRequest], *, on_kernel: OnKernel = lambda done, total: None
) -> dict[CompileRequest, LoadedKernel | Failure]:
    """Build each request for itself, so that one that fails does not hide the others."""
    outcomes: dict[CompileRequest, LoadedKernel | Failure] = {}
    with ThreadPoolExecutor(settings().jobs, thread_name_prefix="qla_jit-tune") as pool:
        futures = {pool.submit(kernel_cache.get, [request]): request for request in dict.fromkeys(requests)}
        try:
            for done, future in enumerate(as_completed(futures), start=1):
                outcomes[futures[future]] = _kernel_or_failure(future)
                on_kernel(done, len(futures))
        except BaseException:            # Ctrl-C: leaving the pool would wait for its threads, and they for their compilers
            pool.shutdown(wait=False, cancel_futures=True)
            compiler.stop_all()
            raise
    return outcomes


def _kernel_or_failure(future: Any) -> LoadedKernel | Failure:
    try:
        return future.result()[0]
    except KernelNotCachedError:
        return Failure("static", "it is not built, and QLA_JIT_MODE=require forbids compiling")
    except (CompileError, InvalidConfigError) as error:
        lines = str(error.args[0]).splitlines()              # what did not compile, and the end of the compiler's log
        return Failure("compile", f"{lines[0]} {lines[-1]}" if len(lines) > 1 else lines[0])


def _report(kernel: LoadedKernel) -> dict[str, Any]:
    return json.loads((kernel.directory / BUILD_REPORT).read_text())["ptxas"]


def _static_failure(request: CompileRequest, report: dict[str, Any], default: dict[str, Any]) -> Failure | None:
    """Whether ptxas says that this kernel is slow where the default is not."""
    serialised = [remark for remark in report["remarks"] if "serialized" in remark]
    if serialised and not any("serialized" in remark for remark in default["remarks"]):
        return Failure("static", f"{request.template.name}: {serialised[0]}")
    spilled = _spilled_bytes(report)
    if spilled > max(SPILLED_BYTES, _spilled_bytes(default)):
        return Failure("static", f"{request.template.name} spills {spilled} bytes a thread; {SPILLED_BYTES} are tolerated")
    return None


def _spilled_bytes(report: dict[str, Any]) -> int:
    kinds = ("spill_store_bytes", "spill_load_bytes")
    return sum(function[kind] or 0 for function in report["functions"].values() for kind in kinds)
