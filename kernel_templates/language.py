"""TileLang's language, imported on first use.

Describing a kernel (problem, config, budget, key) must not cost TileLang's import, about a second on top of torch: a
process with a warm kernel cache never pays it. So templates take T and macro from here.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any


class _Language:
    """Stands for tilelang.language; each name is fetched when it is first used."""

    def __getattr__(self, name: str) -> Any:
        value = getattr(importlib.import_module("tilelang.language"), name)
        setattr(self, name, value)
        return value


T: Any = _Language()


def macro(function: Any) -> Any:
    """tilelang.language.macro, applied when the function is first called, which is while a kernel is being built."""
    compiled = None

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal compiled
        if compiled is None:
            compiled = T.macro(function)
        return compiled(*args, **kwargs)

    return call
