"""What could be tried for a call: strategies x configs x splits, as the templates and strategies declare them.

The full product is never walked. search.py goes step by step, and asks here for the neighbours of what is best so far:
candidates that differ in one knob of one step. A template that is added adds candidates, with no change here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .. import select
from ..compiler import CompileRequest
from ..kernel_templates.arch import Arch
from ..ops.inputs import CallFacts
from ..ops.plan import FORWARD, Extents, Step, Strategy, chunk_of_sizes, strategies_of


@dataclass(frozen=True)
class Candidate:
    """One way to compute a call."""

    strategy: str
    configs: tuple[tuple[str, Any], ...]     # (step, Config of its template), in launch order
    split: int | None = None                 # chunks per segment; None: whole sequences

    def to_json(self) -> dict[str, Any]:
        configs = {step: dataclasses.asdict(config) for step, config in self.configs}
        return {"strategy": self.strategy, "configs": configs, "split": self.split}

    def with_split(self, split: int | None) -> Candidate:
        return dataclasses.replace(self, split=split)

    def with_config(self, step: str, config: Any) -> Candidate:
        configs = tuple((name, config if name == step else old) for name, old in self.configs)
        return dataclasses.replace(self, configs=configs)


@dataclass(frozen=True)
class SearchSpace:
    """The candidates for an operation of one call on one kind of GPU.

    Raises:
        UnsupportedError: no strategy serves it.
    """

    facts: CallFacts                         # in chunks as the operation takes the call
    arch: Arch
    sm_count: int
    op: str = FORWARD

    def __post_init__(self) -> None:
        facts, _ = strategies_of(self.op, self.facts, self.arch)
        object.__setattr__(self, "facts", facts)

    @property
    def strategies(self) -> list[Strategy]:
        """Those that serve the call, the baseline last."""
        _, usable = strategies_of(self.op, self.facts, self.arch)
        return usable[::-1]

    def extents(self, lengths: tuple[int, ...]) -> Extents:
        """The sizes of a batch, as a call of it is looked up with before they are rounded."""
        return extents_of(lengths, chunk_of_sizes(self.op, self.facts))

    def lengths(self, extents: Extents) -> tuple[int, ...]:
        """A batch of these sizes, in tokens."""
        return lengths_of(extents, chunk_of_sizes(self.op, self.facts))

    def default(self, extents: Extents) -> Candidate:
        """What runs at these sizes when nothing was tuned; as select.choose() has it."""
        size = select.bucket(extents)
        suitable = (s for s in self.strategies if s.suits is None or s.suits(self.facts, size, self.sm_count))
        return self.start(next(suitable), extents)

    def start(self, strategy: Strategy, extents: Extents) -> Candidate:
        """A strategy with the default config of each of its templates, and its default split."""
        steps = strategy.steps(self.facts)
        configs = tuple((name, step.template.default_config(step.problem, self.arch)) for name, step in steps.items())
        return Candidate(strategy.name, configs, self.splits(strategy.name, extents)[0])

    def steps(self, strategy: str) -> dict[str, Step]:
        return self._strategy(strategy).steps(self.facts)

    def splits(self, strategy: str, extents: Extents) -> tuple[int | None, ...]:
        """Chunks per segment that are worth timing, the default first; for the size that stands for these, as in a call."""
        return self._strategy(strategy).splits(self.facts, select.bucket(extents), self.sm_count)

    def neighbours(self, candidate: Candidate, step: str) -> list[Candidate]:
        """The candidates that differ in one knob of this step and that the template's constraints allow, in grid order."""
        template, problem = (described := self.steps(candidate.strategy)[step]).template, described.problem
        here = dict(candidate.configs)[step]
        return [
            candidate.with_config(step, config)
            for config in template.configs(problem, self.arch)
            if _knobs_that_differ(config, here) == 1
        ]

    def requests(self, candidate: Candidate) -> list[CompileRequest]:
        """The kernels of a candidate."""
        steps, configs = self.steps(candidate.strategy), dict(candidate.configs)
        return [CompileRequest(step.template, step.problem, configs[name], self.arch) for name, step in steps.items()]

    def from_json(self, data: Mapping[str, Any]) -> Candidate:
        """The candidate that to_json() wrote; a step that it leaves out takes its template's default.

        Raises:
            KeyError, TypeError: the strategy or a knob is not known here any more.
        """
        def config(name: str, step: Step) -> Any:
            knobs = data["configs"].get(name)
            return step.template.default_config(step.problem, self.arch) if knobs is None else step.template.config(**knobs)

        steps = self.steps(data["strategy"])
        return Candidate(data["strategy"], tuple((name, config(name, step)) for name, step in steps.items()), data["split"])

    def rank(self, candidate: Candidate) -> tuple[Any, ...]:
        """Where a candidate stands in the fixed order that decides ties: its strategy, fewest knobs turned, their values.

        It depends on declarations alone, never on a measurement, so two runs and eight processes agree.
        """
        names = [strategy.name for strategy in self.strategies]
        turned, values = 0, []
        for name, step in self.steps(candidate.strategy).items():
            config, default = dict(candidate.configs)[name], step.template.default_config(step.problem, self.arch)
            turned += _knobs_that_differ(config, default)
            for knob in dataclasses.fields(config):
                choices = knob.metadata["values"]
                value = getattr(config, knob.name)
                values.append(choices.index(value) if value in choices else len(choices))
        return names.index(candidate.strategy), turned, tuple(values), candidate.split is not None, candidate.split or 0

    def label(self, candidate: Candidate) -> str:
        """A candidate for people: its strategy, the knobs that are not at their default, and the split."""
        turned = []
        for name, step in self.steps(candidate.strategy).items():
            config, default = dict(candidate.configs)[name], step.template.default_config(step.problem, self.arch)
            turned += [
                f"{name}.{knob.name}={getattr(config, knob.name)}"
                for knob in dataclasses.fields(config)
                if getattr(config, knob.name) != getattr(default, knob.name)
            ]
        if candidate.split is not None:
            turned.append(f"split={candidate.split}")
        return " ".join([candidate.strategy, *turned])

    def _strategy(self, name: str) -> Strategy:
        return {strategy.name: strategy for strategy in self.strategies}[name]


def lengths_of(extents: Extents, chunk_size: int) -> tuple[int, ...]:
    """Whole chunks of tokens for sequences of these sizes: the longest first, the others alike."""
    rest, others = extents.chunks - extents.longest, extents.sequences - 1
    return tuple(chunk_size * chunks for chunks in (
        extents.longest, *(rest // others + (number < rest % others) for number in range(others))
    ))


def extents_of(lengths: tuple[int, ...], chunk_size: int) -> Extents:
    """The sizes of a batch of sequences, in chunks."""
    chunks = [-(-length // chunk_size) for length in lengths]
    return Extents(chunks=sum(chunks), longest=max(chunks), sequences=len(chunks))


def _knobs_that_differ(one: Any, other: Any) -> int:
    return sum(getattr(one, knob.name) != getattr(other, knob.name) for knob in dataclasses.fields(one))
