"""JIT kernel compiler and autotuner for Gated Delta Network linear attention.

Names are fetched when they are first used: `import qla_jit` by itself loads neither torch nor TileLang.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .dispatch_table import DispatchDifference, dispatch_differences, dispatch_digest
    from .errors import (
        BundleError,
        CompileError,
        DeviceError,
        DtypeError,
        EnvironmentUnsuitable,
        InputError,
        InvalidConfigError,
        KernelNotCachedError,
        QLAError,
        RecordError,
        ShapeError,
        UnsupportedError,
        VerificationError,
    )
    from .ops.chunk import chunk_gated_delta_rule, chunk_gated_delta_rule_bwd, chunk_gated_delta_rule_fwd
    from .ops.recurrent import fused_recurrent_gated_delta_rule
    from .ops.results import ForwardResult, Gradients
    from .ops.warmup import warmup

    __version__: str

__all__ = [
    "BundleError",
    "CompileError",
    "DeviceError",
    "DispatchDifference",
    "DtypeError",
    "EnvironmentUnsuitable",
    "ForwardResult",
    "Gradients",
    "InputError",
    "InvalidConfigError",
    "KernelNotCachedError",
    "QLAError",
    "RecordError",
    "ShapeError",
    "UnsupportedError",
    "VerificationError",
    "chunk_gated_delta_rule",
    "chunk_gated_delta_rule_bwd",
    "chunk_gated_delta_rule_fwd",
    "dispatch_differences",
    "dispatch_digest",
    "fused_recurrent_gated_delta_rule",
    "warmup",
]

_MODULES = {
    "DispatchDifference": "dispatch_table",
    "ForwardResult": "ops.results",
    "Gradients": "ops.results",
    "chunk_gated_delta_rule": "ops.chunk",
    "chunk_gated_delta_rule_bwd": "ops.chunk",
    "chunk_gated_delta_rule_fwd": "ops.chunk",
    "dispatch_differences": "dispatch_table",
    "dispatch_digest": "dispatch_table",
    "fused_recurrent_gated_delta_rule": "ops.recurrent",
    "warmup": "ops.warmup",
}                                                # every other public name is in errors


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("qla_jit")
    elif name in __all__:
        from .imports import imported

        value = getattr(imported(_MODULES.get(name, "errors")), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
