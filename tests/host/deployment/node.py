"""A machine with a cache of its own, on which real processes ask for kernels. Its compiler is a script that takes no time."""

from __future__ import annotations

import atexit
import functools
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiny_template import request

from qla_jit import compiler, kernel_cache, kernel_store
from qla_jit.compiler import EXECUTABLE
from qla_jit.launch import LoadedKernel

SECONDS = 100                            # after which a process that hangs is ended

# Runs as `python -m qla_jit.compiler REQUEST.json`. The executable of a kernel is the text of its config.
COMPILER = r"""#!/bin/sh
echo $$ >> "$NODE/compilations"
. "$NODE/behaviour"
for name in device.cu host.c build.json; do echo "$name of a kernel" > ../$name; done
sed -n 's/.*"config": {\([^}]*\)}.*/\1/p' "$3" > ../executable.so
"""
NVCC = """#!/bin/sh
echo 'Cuda compilation tools, release 13.0, V13.0.88'
"""


@dataclass(frozen=True)
class Outcome:
    """How a process ended."""

    answer: Any                          # what its function returned
    error: str | None                    # "CompileError: ..." if it raised
    messages: list[tuple[int, str]]      # (level, text) that qla_jit logged
    compiles: int
    signal: int | None                   # that ended it; nothing else is known then

    @property
    def warnings(self) -> list[str]:
        return [text for level, text in self.messages if level >= logging.WARNING]


class Process:
    """A process that was forked to call a function."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._reader, writer = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.close(self._reader)
                with open(writer, "w") as pipe:
                    pipe.write(json.dumps(_observe(function)))
            finally:
                os._exit(0)              # nothing of pytest's must run a second time
        os.close(writer)

    def outcome(self) -> Outcome:
        with open(self._reader) as pipe:
            text = pipe.read()
        _, status = os.waitpid(self.pid, 0)
        if os.WIFSIGNALED(status):
            return Outcome(None, None, [], 0, signal=os.WTERMSIG(status))
        return Outcome(**json.loads(text), signal=None)


class Node:
    """A cache directory, a temporary one, and the processes that use them."""

    def __init__(self, root: Path) -> None:
        self.root, self.cache, self.tmp = root, root / "cache", root / "tmp"
        self.environment: dict[str, str | None] = {                      # None: not set
            "NODE": str(root),
            "QLA_JIT_CACHE_DIR": str(self.cache),
            "XDG_CACHE_HOME": str(root / "home"),
            "TMPDIR": str(self.tmp),
        }
        self.tmp.mkdir(parents=True)
        self.compiler_first("")

    def compiler_first(self, commands: str) -> None:
        """What the compiler does, in shell, before it builds."""
        (self.root / "behaviour").write_text(commands)

    def fill(self) -> None:
        """Put the entry that ask() needs into the cache, as a process leaves it there."""
        shutil.copytree(_filled_cache(), self.cache)

    @property
    def compilations(self) -> int:
        """How many were begun."""
        log = self.root / "compilations"
        return len(log.read_text().splitlines()) if log.exists() else 0

    def start(self, function: Callable[[], Any]) -> Process:
        def on_this_node() -> Any:
            os.environ.update({name: value for name, value in self.environment.items() if value is not None})
            for name in (name for name, value in self.environment.items() if value is None):
                os.environ.pop(name, None)
            tempfile.tempdir = None
            tempfile._candidate_tempdir_list = lambda: [str(self.tmp)]               # no other node's /tmp
            return function()

        return Process(on_this_node)

    def run(self, function: Callable[[], Any]) -> Outcome:
        return self.start(function).outcome()

    def entry(self, threads: int = 64) -> Path:
        return kernel_store._entry(self.cache, kernel_cache.key_of(request(threads=threads)))

    def entries(self) -> list[Path]:
        return sorted(self.cache.glob("kernels/*/*/*"))


@functools.cache
def _filled_cache() -> Path:
    root = Path(tempfile.mkdtemp(prefix="qla_jit-tests-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    filled = Node(root)
    assert_served(filled.run(ask), compiles=1)
    return filled.cache


def ask(*threads: int) -> list[str]:
    """Call for kernels, and return what they compute."""
    return [kernel.launch() for kernel in kernel_cache.get([request(threads=n) for n in threads or (64,)])]


def ask_twice() -> list[str]:
    """As one process after the other; what the first compiles, the second must find."""
    answer = ask()
    kernel_cache.clear_memory()
    assert ask() == answer
    return answer


def right(*threads: int) -> list[str]:
    """What ask() must return."""
    return [f'"threads": {n}, "per_thread": 1' for n in threads or (64,)]


def load(directory: Path, *, digest: str) -> LoadedKernel:
    """In the place of launch.load()."""
    text = (directory / EXECUTABLE).read_text().rstrip()
    return LoadedKernel(lambda: text, "tiny_scale", ("x", "y", "factor"), digest, directory)


def assert_served(outcome: Outcome, threads: Sequence[int] = (64,), *, warnings: int = 0, compiles: int | None = None) -> None:
    """The right answer, no more warnings than that, and as many compilations."""
    assert outcome.error is None, outcome.error
    assert outcome.signal is None, f"killed by signal {outcome.signal}"
    assert outcome.answer == right(*threads), outcome.answer
    assert len(outcome.warnings) <= warnings, outcome.warnings
    assert compiles is None or outcome.compiles == compiles, f"{outcome.compiles} compilations, expected {compiles}"


def assert_nothing_is_in_staging(node: Node) -> None:
    left = list(node.cache.glob("staging/*"))
    assert left == [], f"left behind: {left}"


def assert_entries_are_whole(node: Node) -> None:
    for path in node.entries():
        manifest = kernel_store.Manifest.model_validate_json((path / kernel_store.MANIFEST).read_bytes())
        kernel_store._check(path, manifest.key)


def _observe(function: Callable[[], Any]) -> dict[str, Any]:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(SECONDS)
    messages: list[tuple[int, str]] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append((record.levelno, record.getMessage()))         # type: ignore[method-assign]
    logger = logging.getLogger("qla_jit")
    logger.handlers, logger.propagate = [handler], False
    logger.setLevel(logging.INFO)
    compiles, answer, error = kernel_cache.stats().compiles, None, None
    try:
        answer = function()
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    return {
        "answer": answer, "error": error, "messages": messages, "compiles": kernel_cache.stats().compiles - compiles,
    }


def install_compiler(directory: Path, monkeypatch: Any) -> None:
    """Let the script, and an nvcc that has a version and nothing else, be the compiler of this process and its children."""
    nvcc, python = directory / "cuda" / "bin" / "nvcc", directory / "python"
    nvcc.parent.mkdir(parents=True)
    for path, text in ((nvcc, NVCC), (python, COMPILER)):
        path.write_text(text)
        path.chmod(0o700)
    monkeypatch.setenv("CUDA_HOME", str(directory / "cuda"))
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(kernel_store, "load", load)
    monkeypatch.setattr(kernel_cache, "load", load)
    assert compiler.nvcc_version() == "13.0.88"
