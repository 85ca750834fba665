"""Find directories that caches may use: QLA_JIT_CACHE_DIR, the user's cache directory, then a private temporary one; and
those of QLA_JIT_BUNDLE_PATH, which are only read.

They hold code that this process will run, so a directory that others can write to is not used. Trouble is never an error:
it costs one warning, and the next directory is taken.
"""

from __future__ import annotations

import functools
import logging
import os
import stat
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import platformdirs

from .settings import settings

Result = TypeVar("Result")

logger = logging.getLogger("qla_jit")


@dataclass(frozen=True)
class CacheDir:
    """A directory that passed the checks."""

    path: Path
    writable: bool


def cache_dirs() -> tuple[CacheDir, ...]:
    """The directories in use, in the order in which to read them. None but the last is written, and that only if writable."""
    return _open(settings().cache_dir, _user_dir(), temporary_dir())


def writable_cache_dir() -> Path | None:
    """Where new entries go; None when nothing on disk can be used, so that they live in memory only."""
    found = cache_dirs()
    return found[-1].path if found and found[-1].writable else None


def bundle_dirs() -> tuple[Path, ...]:
    """The directories of QLA_JIT_BUNDLE_PATH that can be trusted, in its order. Nothing is created or written there."""
    return _trusted(settings().bundle_path)


def temporary_dir() -> Path:
    """This user's directory on the node's own disk, for locks and as the last place for a cache. See refusal()."""
    try:
        parent = tempfile.gettempdir()
    except FileNotFoundError:            # no file can be made anywhere: a read-only container, a full disk; refusal() says so
        parent = "/tmp"
    return Path(parent, f"qla_jit-{os.geteuid()}")


def _user_dir() -> Path:
    try:
        return platformdirs.user_cache_path("qla_jit")
    except RuntimeError:                 # no HOME, and the user is not in the database of users; refusal() says so
        return Path("~/.cache/qla_jit")


def refusal(path: Path) -> str | None:
    """Create a directory if need be; why it cannot be trusted, or None."""
    if not path.is_absolute():
        return f"{path} is not an absolute path (this user has no home directory?)"
    try:
        twice(lambda: path.mkdir(mode=0o700, parents=True, exist_ok=True))
    except OSError as error:
        return f"{path} cannot be used: {error.strerror}"
    return distrust(path)


def distrust(path: Path) -> str | None:
    """Why a directory cannot be read and trusted as it is, or None."""
    try:
        # Everyone can put a link with the temporary directory's name in its place.
        status = twice(path.lstat if path == temporary_dir() else path.stat)
    except OSError as error:
        return f"{path} cannot be used: {error.strerror}"
    if not stat.S_ISDIR(status.st_mode):
        return f"{path} is not a directory"
    if status.st_uid not in (os.geteuid(), 0):                           # the administrator could change this process anyway
        return f"{path} belongs to another user (uid {status.st_uid})"
    if status.st_mode & 0o022:
        return f"{path} can be written by others (mode {stat.S_IMODE(status.st_mode):04o}; chmod go-w would do)"
    if not os.access(path, os.R_OK | os.X_OK):
        return f"{path} is not readable"
    return None


def twice(attempt: Callable[[], Result]) -> Result:
    """A second attempt where the first failed: a network file system says ESTALE of what was replaced meanwhile, and a directory
    may be removed between two steps."""
    try:
        return attempt()
    except OSError:
        return attempt()


def kernels_in(directory: Path) -> int:
    """How many kernels a cache or a bundle holds, whole or damaged; kernel_store.py has the layout."""
    return sum(1 for _ in directory.glob("kernels/*/*/*/manifest.json"))


@functools.cache
def _trusted(paths: tuple[Path, ...]) -> tuple[Path, ...]:
    reasons = {path: distrust(path) for path in paths}
    complaints = [why for why in reasons.values() if why is not None]
    if complaints:
        logger.warning("%s; no prebuilt kernels are taken from there (QLA_JIT_BUNDLE_PATH)", "; ".join(complaints))
    return tuple(path for path, why in reasons.items() if why is None)


@functools.cache
def _open(configured: Path | None, user: Path, temporary: Path) -> tuple[CacheDir, ...]:
    found: list[CacheDir] = []
    complaints: list[str] = []
    for path in (configured, user, temporary / "cache"):
        if path is None:
            continue
        why = refusal(temporary) if path.parent == temporary else None
        why = refusal(path) if why is None else why
        if why is not None:
            complaints.append(why)
            continue
        found.append(CacheDir(path, writable=os.access(path, os.W_OK)))
        if found[-1].writable:
            break
        complaints.append(f"{path} is read only")
    if complaints:
        if not found or not found[-1].writable:
            consequence = "nothing new is cached on disk"
        else:
            consequence = f"new entries are cached in {path}" + (", which may not last" if path.parent == temporary else "")
        logger.warning("%s; %s. Set QLA_JIT_CACHE_DIR to a directory of your own.", "; ".join(complaints), consequence)
    return tuple(found)
