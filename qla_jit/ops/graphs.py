"""Keep the operations out of the graphs of torch.compile."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def graph_break(function: Function) -> Function:
    """torch.compiler.disable, put off until something in the process is compiled: it imports torch._dynamo, which takes
    seconds, makes a directory among the temporary ones, and raises where there is no such place."""
    disabled: Callable[..., Any] | None = None

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal disabled
        if disabled is None:
            if "torch._dynamo" not in sys.modules:
                return function(*args, **kwargs)
            disabled = torch.compiler.disable(function)
        return disabled(*args, **kwargs)

    return call                          # type: ignore[return-value]
