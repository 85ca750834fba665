"""Choose how a call is computed: the strategy, and a Config for each of its kernels."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .compiler import CompileRequest
from .errors import InvalidConfigError
from .kernel_templates.arch import Arch
from .kernel_templates.contract import Rejection
from .ops.inputs import CallFacts
from .ops.plan import strategies_for


@dataclass(frozen=True)
class Dispatch:
    """One way to compute a call."""

    strategy: str
    requests: Mapping[str, CompileRequest]       # the kernels by step, in launch order


@dataclass(frozen=True)
class Override:
    """What is to be used instead of the choice: a strategy, and configs by step; what is left out is chosen."""

    strategy: str | None = None
    configs: tuple[tuple[str, Any], ...] = ()


_override = Override()


def choose(facts: CallFacts, arch: Arch) -> Dispatch:
    """The strategy in force, or the preferred one; each config in force, or the template's default.

    Raises:
        UnsupportedError: no strategy serves the call.
        InvalidConfigError: a config in force cannot serve the call; carries the template's reason.
    """
    usable = {strategy.name: strategy for strategy in strategies_for(facts, arch)}
    if _override.strategy is None:
        strategy = list(usable.values())[-1]
    elif _override.strategy in usable:
        strategy = usable[_override.strategy]
    else:
        rejection = Rejection(f"strategy {_override.strategy} does not serve this call on {arch.name}; {', '.join(usable)} would")
        raise InvalidConfigError(str(rejection), rejection=rejection)
    configs = dict(_override.configs)
    requests = {}
    for name, step in strategy.steps(facts).items():
        config = configs.get(name)
        if config is None:
            config = step.template.default_config(step.problem, arch)
        rejection = step.template.rejection(step.problem, config, arch)
        if rejection is not None:
            raise InvalidConfigError(f"{name} cannot use {config} for {step.problem}: {rejection}", rejection=rejection)
        requests[name] = CompileRequest(step.template, step.problem, config, arch)
    return Dispatch(strategy.name, requests)


@contextlib.contextmanager
def override(strategy: str | None = None, **configs: Any) -> Iterator[None]:
    """Use this strategy, and these configs by step, for every call in the block: `with override(state_scan=Config(...))`.

    Process-wide, for experiments and for the tuner's worker; not for a process that serves several threads.
    """
    global _override
    saved = _override
    _override = Override(strategy, tuple(sorted(configs.items(), key=lambda item: item[0])))
    try:
        yield
    finally:
        _override = saved


def override_in_force() -> Override:
    """Hashable, for those who cache what was chosen."""
    return _override
