"""What is in a cache or a bundle, is it whole, and what of it may go?

All of it while others read: an entry leaves by a rename, so that a reader has loaded it, and keeps it, or misses it. What is
removed is first moved to `staging/`; what a process left there when it was killed goes with the next gc().
"""

from __future__ import annotations

import contextlib
import shutil
import time
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from . import kernel_cache, kernel_store
from .cache_dir import twice
from .errors import EnvironmentUnsuitable
from .kernel_store import KernelKey

STAGING_SECONDS = 3600.0                 # publishing takes seconds; what is in staging/ for longer, nobody will come back for

SECTIONS = ("kernels", "records", "logs", "quarantine", "staging")


@dataclass(frozen=True)
class CachedKernel:
    """An entry of a cache or a bundle, as its manifest describes it."""

    path: Path
    key: KernelKey | None                # None: the manifest cannot be read
    bytes: int
    age_seconds: float                   # since it was stored; when it was last used is not known

    @property
    def usable(self) -> bool:
        """Whether this version of qla_jit may ask for it."""
        return self.key is not None and kernel_cache.may_be_asked_for(self.key)


@dataclass(frozen=True)
class Usage:
    """What a part of a cache or a bundle takes."""

    section: str
    files: int
    bytes: int


@dataclass(frozen=True)
class Removed:
    """What went, or would go."""

    path: Path
    bytes: int


def cached_kernels(directory: Path) -> list[CachedKernel]:
    """The entries of a cache or a bundle. The files are not checked; damage() does that.

    Raises:
        EnvironmentUnsuitable: the directory cannot be read.
    """
    found = []
    with _trouble(directory, "read"):
        for path in kernel_store.entries_in(directory):
            with contextlib.suppress(FileNotFoundError):                 # another process removed it
                found.append(CachedKernel(path, _key(path), _size(path), time.time() - path.stat().st_mtime))
    return found


def usage(directory: Path) -> list[Usage]:
    """How many files and bytes each part of a cache or a bundle has.

    Raises:
        EnvironmentUnsuitable: the directory cannot be read.
    """
    used = []
    with _trouble(directory, "read"):
        for section in SECTIONS:
            sizes = list(_sizes(directory / section))
            used.append(Usage(section, len(sizes), sum(sizes)))
    return used


def damage(entry: Path) -> str | None:
    """In what an entry is not what was stored; None if it is whole, or another process has removed it."""
    try:
        kernel_store.verified(entry)
    except (OSError, ValueError) as error:
        return str(error) if entry.exists() else None
    return None


def remove(kernels: Iterable[CachedKernel], directory: Path) -> list[Removed]:
    """Remove entries from a cache or a bundle; those that another process removed first are not in the answer.

    Raises:
        EnvironmentUnsuitable: the directory cannot be written.
    """
    kernels, removed = list(kernels), []
    if not kernels:                                          # then a staging/ made here would only be in a builder's way
        return removed
    staging = directory / "staging"
    with _trouble(directory, "changed"):
        has_staging = staging.exists()                       # a bundle has none
        staging.mkdir(mode=0o700, exist_ok=True)
        for kernel in kernels:
            if _take_out(kernel.path, staging):
                removed.append(Removed(kernel.path, kernel.bytes))
        if not has_staging:
            with contextlib.suppress(OSError):               # another process uses it by now
                staging.rmdir()
    return removed


def leftovers(directory: Path) -> list[Removed]:
    """What nobody will ask for: quarantined entries, and staging directories of processes that were killed.

    Raises:
        EnvironmentUnsuitable: the directory cannot be read.
    """
    abandoned = time.time() - STAGING_SECONDS
    found = []
    with _trouble(directory, "read"):
        for section in ("quarantine", "staging"):
            for path in sorted(directory.glob(f"{section}/*")):
                with contextlib.suppress(FileNotFoundError):             # its owner has just published or removed it
                    if section == "quarantine" or path.lstat().st_mtime < abandoned:
                        found.append(Removed(path, _size(path)))
    return found


def gc(directory: Path) -> list[Removed]:
    """Remove the leftovers; what could not be removed is not in the answer.

    Raises:
        EnvironmentUnsuitable: the directory cannot be read.
    """
    removed = []
    for leftover in leftovers(directory):
        place = leftover.path.with_name(_new_name())
        with contextlib.suppress(OSError):
            leftover.path.rename(place)                      # first, so that an owner that still lives cannot publish half of it
            _delete(place)
            removed.append(leftover)
    return removed


@contextlib.contextmanager
def _trouble(directory: Path, done: str) -> Iterator[None]:
    """Trouble with the disk as an error of ours."""
    try:
        yield
    except OSError as error:
        raise EnvironmentUnsuitable(f"{directory} cannot be {done}: {error.strerror} at {error.filename}") from None


def _take_out(entry: Path, staging: Path) -> bool:
    place = staging / _new_name()
    try:
        entry.rename(place)
    except FileNotFoundError:
        return False
    with contextlib.suppress(OSError):                       # then it stays for gc()
        _delete(place)
    return True


def _delete(entry: Path) -> None:
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry)
    else:                                                    # something else that stood in its place
        entry.unlink()


def _new_name() -> str:
    return f"removed-{uuid.uuid4().hex[:16]}"


def _key(entry: Path) -> KernelKey | None:
    try:
        return twice(lambda: kernel_store.manifest_of(entry)).key
    except (OSError, ValueError):
        return None


def _size(path: Path) -> int:
    return sum(_sizes(path))


def _sizes(path: Path) -> Iterable[int]:
    """Of the files below a directory, as far as they are still there."""
    for file in path.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            if file.is_file():
                yield file.stat().st_size
