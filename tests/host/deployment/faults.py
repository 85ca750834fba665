"""Let something happen at calls to the file system, which are chosen by the directory that they touch and counted.

For a process that was forked for the purpose: what is replaced here is never put back.
"""

from __future__ import annotations

import builtins
import fcntl
import io
import math
import os
import pathlib
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Where a function is looked up by those who call it. No os.close: its failure is the end of no data that was not synced.
FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "chmod": (os,),
    "flock": (fcntl,),
    "fsync": (os,),
    "listdir": (os,),
    "lstat": (os,),
    "mkdir": (os,),
    "open": (os, io, builtins),
    "rename": (os,),
    "replace": (os,),
    "rmdir": (os,),
    "scandir": (os,),
    "stat": (os,),
    "unlink": (os,),
}


class Faults:
    """The faults that inject() put in place; `hits` says whether they happened, `calls` what was called."""

    def __init__(self, under: Path, happen: Callable[[str], None], first: int, last: float) -> None:
        self.under, self.happen, self.first, self.last = str(under), happen, first, last
        self.calls: list[str] = []
        self.hits = 0

    def check(self, function: str, target: Any, dir_fd: int | None) -> None:
        path = _path(target, dir_fd)
        if path != self.under and not path.startswith(self.under + "/"):
            return
        self.calls.append(f"{function} {path.removeprefix(self.under)}")
        if self.first <= len(self.calls) <= self.last:
            self.hits += 1
            self.happen(path)


def inject(
    fault: int | signal.Signals | Callable[[], None],
    *,
    under: Path,
    functions: tuple[str, ...] = tuple(FUNCTIONS),
    first: int = 1,
    last: float = math.inf,
) -> Faults:
    """Let the first to the last of the calls that touch `under` fail with an errno, or happen after a signal or a function."""

    def happen(path: str) -> None:
        if isinstance(fault, signal.Signals):
            os.kill(os.getpid(), fault)
        elif isinstance(fault, int):
            raise OSError(fault, os.strerror(fault), path)
        else:
            fault()

    faults = Faults(under, happen, first, last)
    for name in functions:
        for home in FUNCTIONS[name]:
            real = getattr(home, name)
            setattr(home, name, _checked(name, real, faults))
            if home in (os, io) and hasattr(pathlib, "_NormalAccessor"):         # Python 3.10 keeps functions of its own
                for accessor_name, function in vars(pathlib._NormalAccessor).items():
                    if function is real:
                        setattr(pathlib._NormalAccessor, accessor_name, staticmethod(_checked(name, real, faults)))
    return faults


def _checked(name: str, real: Callable[..., Any], faults: Faults) -> Callable[..., Any]:
    def checked(target: Any = ".", *args: Any, **kwargs: Any) -> Any:
        faults.check(name, target, kwargs.get("dir_fd"))
        return real(target, *args, **kwargs)

    return checked


def _path(target: Any, dir_fd: int | None) -> str:
    """The absolute path that a call is about; a descriptor's, too."""
    if isinstance(target, int):
        return os.readlink(f"/proc/self/fd/{target}")
    path = os.fsdecode(target)
    return os.path.join(os.getcwd() if dir_fd is None else os.readlink(f"/proc/self/fd/{dir_fd}"), path)
