"""What has this process said already? Nothing is said twice, also where threads come to say it at the same time."""

from __future__ import annotations

import logging

logger = logging.getLogger("qla_jit")

_said: dict[tuple[str, ...], object] = {}


def first_time(*what: str) -> bool:
    """Whether nobody in this process has asked for the same before; of threads that ask together, one is the first.

    It needs no lock, which a forked process could find locked for ever: setdefault with strings is not interrupted.
    """
    mine = object()
    return _said.setdefault(what, mine) is mine


def warn_once(message: str) -> None:
    """Log a warning, the first time that it comes up."""
    if first_time(message):
        logger.warning(message)
