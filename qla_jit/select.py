"""Choose the Config for one kernel: an override in force, or the template's default."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from .errors import InvalidConfigError
from .kernel_templates.arch import Arch
from .kernel_templates.contract import Template

_overrides: dict[str, Any] = {}


def config_for(template: Template, problem: Any, arch: Arch) -> Any:
    """The Config that a kernel of `template` is compiled with.

    Raises:
        InvalidConfigError: the config in force cannot serve this problem on this arch; carries the template's reason.
    """
    config = _overrides.get(template.name)
    if config is None:
        config = template.default_config(problem, arch)
    rejection = template.rejection(problem, config, arch)
    if rejection is not None:
        raise InvalidConfigError(f"{template.name} cannot use {config} for {problem}: {rejection}", rejection=rejection)
    return config


@contextlib.contextmanager
def override(**configs: Any) -> Iterator[None]:
    """Use these configs, by template name, for every call inside the block: `with override(state_scan=Config(...))`.

    Process-wide, for experiments and for the tuner's worker; not for code that serves several threads.
    """
    saved = dict(_overrides)
    _overrides.update(configs)
    try:
        yield
    finally:
        _overrides.clear()
        _overrides.update(saved)


def overrides_in_force() -> tuple[tuple[str, Any], ...]:
    """The overrides as a hashable value, for those who cache what they selected."""
    return tuple(sorted(_overrides.items(), key=lambda item: item[0]))
