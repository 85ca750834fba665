"""Modules that wait until they are needed."""

from __future__ import annotations

import functools
import gc
from importlib import import_module
from typing import Any


@functools.cache
def imported(name: str) -> Any:
    """A module of this package, imported at its first time with the garbage collector at rest.

    What is imported stays, and a full collection that falls into it looks at all of torch too: 0.1 of 0.5 s of a first call.
    """
    if not gc.isenabled():
        return import_module(f"qla_jit.{name}")
    gc.disable()
    try:
        return import_module(f"qla_jit.{name}")
    finally:
        gc.enable()


class Later:
    """A module of this package, imported when something of it is first asked for."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(imported(self._name), attribute)
