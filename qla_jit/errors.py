"""Which errors qla_jit raises, and what each one carries.

    QLAError
    ├── InputError (ValueError)                   an argument of a public function does not fit
    │   ├── ShapeError
    │   ├── DtypeError
    │   └── DeviceError
    ├── UnsupportedError (NotImplementedError)    no template covers this problem on this GPU
    ├── InvalidConfigError                        a config breaks a constraint of its template; carries the rejection
    ├── CompileError                              a kernel did not build; carries its key and the path of its log
    ├── KernelNotCachedError                      QLA_JIT_MODE=require and the kernel is not in the cache
    ├── RecordError                               a tuning record is damaged or does not match its schema
    ├── BundleError                               a bundle of prebuilt kernels is damaged or made for another system
    ├── VerificationError                         a kernel's result is wrong or differs between launches
    └── EnvironmentUnsuitable                     the machine lacks something or is set up in a way that cannot work

Every message says what was expected, what came, and what to do.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .kernel_templates.contract import Rejection


class QLAError(Exception):
    """Base of every error that qla_jit raises on purpose."""


class InputError(QLAError, ValueError):
    """An argument does not fit. Also a ValueError, so that code written for FLA keeps catching it."""


class ShapeError(InputError):
    """A tensor's shape, or a length or head count, does not fit."""


class DtypeError(InputError):
    """A tensor's dtype does not fit."""


class DeviceError(InputError):
    """A tensor is on the wrong device, or tensors are on different devices."""


class UnsupportedError(QLAError, NotImplementedError):
    """No template covers this problem on this GPU; the message lists what exists.

    Also a NotImplementedError, which is what PyTorch raises for a missing kernel and what callers with a fallback catch.
    """


class InvalidConfigError(QLAError):
    """A config breaks a constraint of its template. `rejection` is the constraint's own answer, with the numbers."""

    def __init__(self, message: str, *, rejection: Rejection) -> None:
        super().__init__(message)
        self.rejection = rejection


class CompileError(QLAError):
    """A kernel did not build. `key` is its KernelKey's digest and `log_path` the compiler's log; None where there is none."""

    def __init__(self, message: str, *, key: str | None = None, log_path: Path | None = None) -> None:
        super().__init__(message)
        self.key = key
        self.log_path = log_path

    def __str__(self) -> str:
        return super().__str__() + (f"\nThe whole log: {self.log_path}" if self.log_path is not None else "")


class KernelNotCachedError(QLAError):
    """Compiling is switched off (QLA_JIT_MODE=require) and the kernel is not in the cache."""


class RecordError(QLAError):
    """A tuning record is damaged or does not match its schema."""


class BundleError(QLAError):
    """A bundle of prebuilt kernels is damaged, untrusted, or made for another system."""


class VerificationError(QLAError):
    """A kernel's result is wrong, or differs between launches on the same input."""


class EnvironmentUnsuitable(QLAError):
    """The machine, or a setting, cannot serve the request; the message says what to install or change."""
