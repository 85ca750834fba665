"""How does a function become a verb of qla-tune, and with which code does it exit?"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable
from typing import Any

import typer

from ..errors import BundleError, InputError, QLAError, RecordError, UnsupportedError, VerificationError


class ExitCode(enum.IntEnum):
    OK = 0
    USAGE = 2                            # also what typer exits with
    PARTIAL = 3                          # a problem has no complete record, or a kernel was not built
    VERIFICATION = 4                     # also of bytes: a kernel or a bundle is damaged
    ENVIRONMENT = 5
    DATABASE = 6
    REGRESSION = 7
    MISSING = 8                          # a record that is needed is not there
    INTERRUPTED = 130


class NoSuchRecordError(QLAError):
    """A record that the command needs is not there."""


# The first that fits; other errors of ours are about the request.
ERROR_CODES: tuple[tuple[type[QLAError], ExitCode], ...] = (
    (NoSuchRecordError, ExitCode.MISSING),
    (RecordError, ExitCode.DATABASE),
    (VerificationError, ExitCode.VERIFICATION),
    (BundleError, ExitCode.VERIFICATION),
    (InputError, ExitCode.USAGE),
    (UnsupportedError, ExitCode.USAGE),
    (QLAError, ExitCode.ENVIRONMENT),
)

app = typer.Typer(
    name="qla-tune", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
    help="Tune the kernels of qla_jit, look at, check and move what was tuned, and build kernels ahead. Exit codes: 0 ok, "
    "2 usage, 3 partial, 4 verification failed or damaged, 5 environment unsuitable, 6 database invalid, 7 regression, "
    "8 required record missing, 130 interrupted.",
)


def verb(function: Callable[..., ExitCode], group: typer.Typer = app) -> Callable[..., None]:
    """Make a function that returns its exit code a command."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            code = function(*args, **kwargs)
        except KeyboardInterrupt:
            typer.echo("qla-tune: interrupted", err=True)
            code = ExitCode.INTERRUPTED
        except QLAError as error:
            typer.echo(f"qla-tune: {error}", err=True)
            code = next(code for kind, code in ERROR_CODES if isinstance(error, kind))
        raise typer.Exit(code)

    return group.command(function.__name__.rstrip("_"))(run)
