"""Locks between the processes of a user on this machine, such as the ranks of a job.

A lock is a file on the node's own disk, wherever the cache is; the system releases it when its owner dies. Locks save time and
memory, and are not needed for correctness: who cannot have one, or has waited for long, goes on without.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from .cache_dir import refusal, temporary_dir

POLL_SECONDS = 0.05

_held: set[int] = set()                  # descriptors


@contextlib.contextmanager
def one_of(names: Sequence[str], *, seconds: float, on_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold a lock, the first of these that is free.

    Args:
        seconds: how long to wait for it at most.
        on_wait: called each time that all of them are found to be held by others.
    """
    descriptor = _wait_for_one(names, seconds, on_wait)
    try:
        yield
    finally:
        if descriptor is not None:
            _held.discard(descriptor)
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)       # closing alone would not, if a process was forked meanwhile
            os.close(descriptor)


def lock_file(name: str) -> Path:
    """The file of a lock.

    Raises:
        OSError: there is no place for it.
    """
    why = refusal(temporary_dir())
    if why is not None:
        raise PermissionError(why)
    directory = temporary_dir() / "locks"
    directory.mkdir(mode=0o700, exist_ok=True)
    return directory / f"{name}.lock"


def _wait_for_one(names: Sequence[str], seconds: float, on_wait: Callable[[], None]) -> int | None:
    deadline = time.monotonic() + seconds
    try:
        files = [lock_file(name) for name in names]
        while time.monotonic() < deadline:
            for file in files:
                if (descriptor := _taken(file)) is not None:
                    return descriptor
            on_wait()
            time.sleep(POLL_SECONDS)
    except OSError:                      # no place for locks, or a file system without them
        pass
    return None


def _taken(file: Path) -> int | None:
    """The descriptor that holds the lock of a file; None if somebody else does."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            return None
        raise
    _held.add(descriptor)
    return descriptor


def _close_the_parents() -> None:
    """In a forked process: else the locks would be held for as long as it lives, even if the parent is killed."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_close_the_parents)
