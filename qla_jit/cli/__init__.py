"""The command line, qla-tune: tune, look at, check and move what was tuned, and build, ship and keep kernels.

Results go to stdout, as plain tables or with --json as one JSON document; progress and errors go to stderr. command.py has the
exit codes, options.py what options mean; the other modules have the verbs.
"""

from __future__ import annotations

from . import cache, deployment, records, tuning  # noqa: F401    the app gets its verbs
from .command import ExitCode, app

__all__ = ["ExitCode", "app", "main"]


def main() -> None:
    app(prog_name="qla-tune")
