"""Read the QLA_JIT_* environment variables. No other module does.

Values are read at each call of settings(), so that a test or a notebook may change os.environ at any time.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from .errors import EnvironmentUnsuitable

Mode = Literal["lookup", "require"]


@dataclass(frozen=True)
class Settings:
    """What the environment asked for; VARIABLES says what each field means."""

    mode: Mode
    cache_dir: Path | None               # None: the user's cache directory
    bundle_path: tuple[Path, ...]
    bundle_keys: tuple[Path, ...]
    db_path: tuple[Path, ...]
    capture: Path | None                 # None: nothing is counted
    jobs: int
    compile_timeout: float               # seconds
    backward_bands: int | None           # None: by size


@dataclass(frozen=True)
class Variable:
    """One environment variable: the Settings field that it fills, and what the documentation says of it."""

    name: str
    field: str
    meaning: str
    default: str                         # for people; read() gives the value
    parse: Callable[[str], Any]          # raises ValueError, whose text says what was expected
    fallback: Callable[[], Any]

    def read(self) -> Any:
        text = os.environ.get(self.name, "").strip()
        if not text:
            return self.fallback()
        try:
            return self.parse(text)
        except ValueError as error:
            raise EnvironmentUnsuitable(
                f"{self.name}: expected {error}; got {text!r}. Unset it for the default: {self.default}"
            ) from None


def settings() -> Settings:
    """The settings as the environment has them now.

    Raises:
        EnvironmentUnsuitable: a variable holds a value that cannot be used; the message names it.
    """
    return Settings(**{variable.field: variable.read() for variable in VARIABLES})


@functools.cache
def available_cpus() -> int:
    """CPUs that this process may use: its affinity mask, and the cgroup's CPU quota, which cpu_count() ignores."""
    cpus = len(os.sched_getaffinity(0))
    for limit_files in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):                # cgroup v2, v1
        try:
            quota, period = " ".join(Path("/sys/fs/cgroup", name).read_text() for name in limit_files).split()
        except (OSError, ValueError):
            continue
        if quota.isdigit() and int(period) > 0:                          # "max" and -1 mean no limit
            cpus = min(cpus, math.ceil(int(quota) / int(period)))
    return max(cpus, 1)


def _mode(text: str) -> str:
    if text not in get_args(Mode):
        raise ValueError(f"one of {', '.join(get_args(Mode))}")
    return text


def _absolute_path(text: str) -> Path:
    path = Path(os.path.expanduser(text))                    # Path.expanduser raises for a user without a home directory
    if not path.is_absolute():
        # A relative path would mean another cache after each change of directory.
        raise ValueError("an absolute path")
    return path


def _absolute_paths(text: str) -> tuple[Path, ...]:
    try:
        return tuple(_absolute_path(part) for part in text.split(os.pathsep) if part)
    except ValueError:
        raise ValueError(f"absolute paths separated by {os.pathsep!r}") from None


def _positive(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise ValueError("a whole number of at least 1")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ValueError("a number of seconds above 0")
    return seconds


VARIABLES: tuple[Variable, ...] = (
    Variable(
        "QLA_JIT_MODE", "mode",
        "What a call may do: `lookup` selects and compiles, `require` never compiles and raises on a kernel that is not cached.",
        "lookup", _mode, lambda: "lookup",
    ),
    Variable(
        "QLA_JIT_CACHE_DIR", "cache_dir",
        "Where compiled kernels and tuned records are kept.",
        "the user's cache directory (`$XDG_CACHE_HOME/qla_jit` or `~/.cache/qla_jit`)", _absolute_path, lambda: None,
    ),
    Variable(
        "QLA_JIT_BUNDLE_PATH", "bundle_path",
        "Directories of prebuilt kernels (`qla-tune build`) and their records to read, never written, separated like PATH; "
        "asked after the cache.",
        "none", _absolute_paths, lambda: (),
    ),
    Variable(
        "QLA_JIT_BUNDLE_KEYS", "bundle_keys",
        "PEM files of ed25519 public keys, separated like PATH: `qla-tune install` takes only bundles that one of them signed.",
        "none", _absolute_paths, lambda: (),
    ),
    Variable(
        "QLA_JIT_DB_PATH", "db_path",
        "Directories of tuned records to read, never written, separated like PATH; the first one that answers wins.",
        "none", _absolute_paths, lambda: (),
    ),
    Variable(
        "QLA_JIT_CAPTURE", "capture",
        "A directory in which each process counts the shapes and gates of its calls on a GPU, as a workload for "
        "`qla-tune tune --workload`.",
        "none", _absolute_path, lambda: None,
    ),
    Variable(
        "QLA_JIT_JOBS", "jobs",
        "How many kernels compile at the same time, in all processes of a user on a machine.",
        "the CPUs that the process may use", _positive, available_cpus,
    ),
    Variable(
        "QLA_JIT_COMPILE_TIMEOUT", "compile_timeout",
        "Seconds after which the compilation of one kernel is stopped.",
        "600", _seconds, lambda: 600.0,
    ),
    Variable(
        "QLA_JIT_BACKWARD_BANDS", "backward_bands",
        "In how many parts, one after the other, a backward goes through the chunks of each sequence: 2 lower the peak of a step "
        "by a fifth, for 3 % more time of a long one and up to a sixth of a short one. Read when calls of a size are first seen; "
        "for K = V = 128.",
        "2 where that takes a quarter off 64 MiB or more of states and values of chunks; else 1", _positive, lambda: None,
    ),
)
