"""Keep the compilations of all processes of a user on this machine, such as the ranks of a job, to QLA_JIT_JOBS together.

A slot is a file on the node's own disk, and who holds its lock compiles. The system releases the lock when its owner dies. Slots
save memory and time, and are not needed for correctness: who cannot have one, or has waited for long, goes on without.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from .cache_dir import refusal, temporary_dir
from .settings import settings

POLL_SECONDS = 0.1

_held: set[int] = set()                  # descriptors


@contextlib.contextmanager
def build_slot() -> Iterator[None]:
    """Hold one of the slots, after waiting for it no longer than a compilation may take."""
    descriptor = _wait_for_one()
    try:
        yield
    finally:
        if descriptor is not None:
            _held.discard(descriptor)
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)       # closing alone would not, if a process was forked meanwhile
            os.close(descriptor)


def _wait_for_one() -> int | None:
    deadline = time.monotonic() + settings().compile_timeout
    try:
        directory = _directory()
        while time.monotonic() < deadline:
            for number in range(settings().jobs):
                if (descriptor := _taken(directory / f"{number}.lock")) is not None:
                    return descriptor
            time.sleep(POLL_SECONDS)
    except OSError:                      # no place for locks, or a file system without them
        pass
    return None


def _directory() -> Path:
    why = refusal(temporary_dir())
    if why is not None:
        raise PermissionError(why)
    directory = temporary_dir() / "slots"
    directory.mkdir(mode=0o700, exist_ok=True)
    return directory


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
    """In a forked process: else the slots would be held for as long as it lives, even if the parent is killed."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_close_the_parents)
