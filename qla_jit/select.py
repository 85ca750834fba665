"""Choose how an operation of a call, its forward or its backward, is computed: the strategy, a Config for each of its kernels,
and the split of its sequences.

The first that answers: an override in force, the user's tuned records, those of QLA_JIT_DB_PATH, those that ship, the
template defaults. A record answers for its own kind of GPU and problem, only between the sizes that were measured, and only
where the default is the strategy that it was compared with; what it names is checked against the templates as they are today.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import EllipsisType, MappingProxyType
from typing import Any, Literal

from . import record_store
from .compiler import CompileRequest
from .errors import InvalidConfigError
from .interpolation import delaunay_weights
from .kernel_templates.arch import Arch
from .kernel_templates.contract import Rejection
from .once import first_time
from .ops.inputs import CallFacts, CallInputs
from .ops.plan import BACKWARD, FORWARD, Extents, Step, Strategy, chunk_of_sizes, strategies_of
from .record_store import Stored
from .tuning_records import Candidate, Entry, Hardware, Identity, Problem, Record, Rigor, Versions

# measured: at a point of the record. interpolated: between points. typical: no sizes were given, so the best on the whole.
Match = Literal["measured", "interpolated", "typical", "none"]

TIE = math.log(1.01)                     # entries that are closer than this take the record's order, which is the same everywhere
BUCKETS_PER_OCTAVE = 4                   # 4, 5, 6 and 7 times a power of two
# Octaves by which bucket() can move a point that is inside: three coordinates together, each half of the widest step, 4 to 5.
EDGE = 3 * math.log2(1 + 1 / BUCKETS_PER_OCTAVE) / 2

logger = logging.getLogger("qla_jit")


@dataclass(frozen=True)
class Way:
    """An entry of a record, as it would serve a call."""

    entry: Entry
    speedup: float                       # expected, over the default
    speedup_low: float                   # with the lower ends of the 95 % intervals
    regret: float                        # expected time over that of the best entry at each point, less 1
    rejection: Rejection | None          # why it cannot be used


@dataclass(frozen=True)
class Considered:
    """What a record says of a call."""

    stored: Stored
    match: Match                         # "none": the sizes are outside, or the default is another today: it says nothing
    ways: tuple[Way, ...] = ()           # the default first, as in the record
    chosen: Way | None = None
    points: tuple[int, ...] = ()         # of the record, around the call

    @property
    def says_default(self) -> bool:
        return self.chosen is not None and self.chosen is self.ways[0]


@dataclass(frozen=True)
class Dispatch:
    """One way to compute an operation of a call."""

    strategy: str
    requests: Mapping[str, CompileRequest]       # the kernels by step, in launch order
    facts: CallFacts                             # the call, in chunks of the size that the kernels are for
    split: int | None = None                     # chunks per segment; None: whole sequences
    split_for: int | None = None                 # chunks of the longest sequence that a cost model took it for; None: it is given
    source: Literal["override", "user", "directory", "shipped", "default"] = "default"
    considered: Considered | None = None         # the record that decided, also where it says that the default is best

    def segment_length(self, extents: Extents) -> int:
        """Chunks per segment of a call, where sequences are split: those of all sequences without a split.

        A cost model decides how many segments the longest sequence shall have, and calls that are looked up together with the
        sizes it was asked for have somewhat more or fewer chunks."""
        if self.split is None:
            return extents.chunks
        if self.split_for is None:
            return self.split
        segments = -(-self.split_for // self.split)
        return -(-extents.longest // segments)

    @property
    def match(self) -> Match:
        return "none" if self.considered is None else self.considered.match

    @property
    def rigor(self) -> Rigor:
        return Rigor.HEURISTIC if self.considered is None else self.considered.stored.record.rigor

    @property
    def expected_regret(self) -> float | None:
        """By how much the best entry of the record may be faster; None without a record."""
        return None if self.considered is None or self.considered.chosen is None else self.considered.chosen.regret

    @functools.cached_property
    def stale(self) -> tuple[str, ...]:
        """In what the software has changed since the record: reasons to tune again, not to distrust it."""
        if self.considered is None:
            return ()
        templates = {request.template.name: request.template.source_sha256() for request in self.requests.values()}
        return self.considered.stored.record.provenance.differences(Versions.here(), templates)


@dataclass(frozen=True)
class Override:
    """What is to be used instead of the choice: strategies, configs by step, splits; what is left out is chosen."""

    strategy: str | None = None
    backward_strategy: str | None = None
    configs: tuple[tuple[str, Any], ...] = ()
    split: int | EllipsisType | None = ...       # None is a split: whole sequences
    backward_split: int | EllipsisType | None = ...
    backward_bands: int | None = None            # of chunks that a backward goes through, one after the other

    @property
    def is_empty(self) -> bool:
        return self == Override()

    def strategy_of(self, op: str) -> str | None:
        return self.backward_strategy if op == BACKWARD else self.strategy

    def split_of(self, op: str) -> int | EllipsisType | None:
        return self.backward_split if op == BACKWARD else self.split


_override = Override()


def choose(
    facts: CallFacts,
    arch: Arch,
    *,
    op: str = FORWARD,
    hardware: Hardware | None = None,
    extents: Extents | None = None,
    preferred: str | None = None,
) -> Dispatch:
    """How to compute an operation of a call.

    Args:
        op: plan.FORWARD or plan.BACKWARD. For a backward facts.output_final_state says that the final state has a gradient.
        hardware: the GPU that will run it; None, where kernels are built ahead for any GPU of the arch, takes the defaults.
        extents: the sizes of the batch, in chunks of chunk_of_sizes(); None takes what is best on the whole. For a cache, see
            bucket().
        preferred: a strategy to take if it serves the call and no other is in force, whatever records say.

    Raises:
        UnsupportedError: no strategy serves the call. For a backward: its gradients come from the reference.
        InvalidConfigError: a strategy or config in force cannot serve the call; carries the reason.
    """
    facts, usable = _usable(op, facts, arch)
    forced_strategy, forced_split = _override.strategy_of(op), _override.split_of(op)
    if forced_strategy is None and preferred in usable:
        forced_strategy = preferred
    answer = None
    if hardware is not None and forced_strategy is None:
        answers = _considered(op, facts, usable, arch, hardware, extents)
        answer = next((found for found in answers if found.chosen is not None), None)
        if answer is None:
            _tell_untuned(op, facts, extents, hardware)
    entry = None if answer is None or answer.chosen is None or answer.says_default else answer.chosen.entry
    if entry is None:
        strategy, knobs = _preferred(usable, facts, arch, hardware, extents, forced_strategy), {}
    else:
        strategy, knobs = usable[entry.candidate.strategy], entry.candidate.configs
    requests = _requests(strategy, facts, arch, knobs=knobs, configs=dict(_override.configs))

    split = split_for = None
    if not isinstance(forced_split, EllipsisType):
        split = forced_split
    elif hardware is not None and extents is not None and facts.auto_cp:
        split, *others = strategy.splits(facts, extents, hardware.sm_count)
        split_for = None if split is None else extents.longest
        if answer is not None and entry is not None and not _splits_as_timed(strategy, answer, entry, facts, hardware.sm_count):
            rule = entry.split_rule
            ruled = None if rule is None else rule.split(HV=facts.HV, extents=extents, sm_count=hardware.sm_count)
            if ruled in others:
                split, split_for = ruled, None
    source = "override" if not _override.is_empty else "default" if answer is None else answer.stored.layer
    return Dispatch(strategy.name, requests, facts, split, split_for, source, answer)


def choose_backward(
    facts: CallFacts, arch: Arch, *, hardware: Hardware | None = None, extents: Extents | None = None
) -> Dispatch:
    """choose() of the gradients of a call."""
    return choose(facts, arch, op=BACKWARD, hardware=hardware, extents=extents)


def requests_for_any_size(facts: CallFacts, arch: Arch, *, op: str = FORWARD) -> list[CompileRequest]:
    """The kernels that calls may need where nothing was tuned, whatever their sizes: so that no later size compiles."""
    facts, usable = _usable(op, facts, arch)
    strategies = list(usable.values())
    first = max(number for number, strategy in enumerate(strategies) if strategy.suits is None)      # what it comes to at last
    by_strategy = (_requests(strategy, facts, arch, knobs={}) for strategy in strategies[first:])
    return list(dict.fromkeys(request for requests in by_strategy for request in requests.values()))     # they share kernels


def backward_requests_for_any_size(facts: CallFacts, arch: Arch) -> list[CompileRequest]:
    """requests_for_any_size() of the gradients of calls."""
    return requests_for_any_size(facts, arch, op=BACKWARD)


def requests_of_records(facts: CallFacts, arch: Arch, hardware: Hardware, *, op: str = FORWARD) -> list[CompileRequest]:
    """The kernels that tuned records may name for calls on this kind of GPU, whatever their sizes."""
    facts, usable = _usable(op, facts, arch)
    found: dict[CompileRequest, None] = {}
    for stored in record_store.find(Identity(op=op, hardware=hardware, problem=Problem.of(facts))):
        for entry in stored.record.entries[1:]:          # where the first, the default, is best, nothing of it is used
            if _entry_rejection(entry, facts, usable, arch) is None:
                candidate = entry.candidate
                requests = _requests(usable[candidate.strategy], facts, arch, knobs=candidate.configs)
                found.update(dict.fromkeys(requests.values()))
    return list(found)


def consider(
    facts: CallFacts, arch: Arch, hardware: Hardware, extents: Extents | None, *, op: str = FORWARD
) -> Iterator[Considered]:
    """What each record for this GPU and problem says of a call, in the order in which they are asked."""
    return _considered(op, *_usable(op, facts, arch), arch, hardware, extents)


def entry_rejection(entry: Entry, facts: CallFacts, arch: Arch, *, op: str = FORWARD) -> Rejection | None:
    """Why an entry of a record cannot serve a call with the strategies and templates as they are today, or None."""
    return _entry_rejection(entry, *_usable(op, facts, arch), arch)


def bucket(extents: Extents) -> Extents:
    """Extents that stand for all similar ones, so that a choice can be looked up instead of made: four to an octave.

    At 4, 5, 6 and 7 times powers of two, where the lengths are that people choose. Cost models count segments, and 96 chunks are
    three of 32; as 91, beside 32 others, they made five segments of four, and calls took up to 1.29 times as long.
    """
    return _bucket(extents.chunks, extents.longest, extents.sequences)


def extents_of(inputs: CallInputs, chunk_size: int | None = None) -> Extents:
    """The sizes of a call in chunks, of the call's own size unless another is given; upper bounds where only the GPU knows the
    lengths of packed sequences."""
    C, T, N = inputs.facts.chunk_size if chunk_size is None else chunk_size, inputs.T, inputs.N
    if inputs.starts is not None:
        return _packed_extents(inputs.starts, C)
    if inputs.facts.varlen:
        return Extents(chunks=T // C + N, longest=-(-T // C), sequences=N)
    chunks = -(-T // C)
    return Extents(chunks=N * chunks, longest=chunks, sequences=N)


def tune_command(facts: CallFacts, extents: Extents | None = None, *, op: str = FORWARD) -> str:
    """The command that tunes an operation of a kind of call."""
    words = [f"qla-tune tune --heads {facts.H}:{facts.HV} --dims {facts.K}:{facts.V}"]
    if op == BACKWARD:
        words.append("--backward")
    if (dtype := str(facts.dtype).removeprefix("torch.")) != "bfloat16":
        words.append(f"--dtype {dtype}")
    if facts.chunk_size != 64 and op != BACKWARD:                        # which takes chunks of its own
        words.append(f"--chunk-size {facts.chunk_size}")
    if facts.varlen:
        words.append("--packed")
    if extents is not None:
        words.append(f"--lengths {chunk_of_sizes(op, facts) * _rounded(extents.longest)}")
    return " ".join(words)


@contextlib.contextmanager
def override(
    strategy: str | None = None,
    *,
    backward_strategy: str | None = None,
    split: int | EllipsisType | None = ...,
    backward_split: int | EllipsisType | None = ...,
    backward_bands: int | None = None,
    **configs: Any,
) -> Iterator[None]:
    """Use these strategies, these splits (None: whole sequences), this number of bands of chunks and these configs by step, for
    every call in the block: `with override(state_scan=Config(...))`.

    Process-wide, for experiments and for the tuner's worker; not for a process that serves several threads.
    """
    global _override
    saved = _override
    by_step = tuple(sorted(configs.items(), key=lambda item: item[0]))
    _override = Override(strategy, backward_strategy, by_step, split, backward_split, backward_bands)
    try:
        yield
    finally:
        _override = saved


def override_in_force() -> Override:
    """Hashable, for those who cache what was chosen."""
    return _override


def _usable(op: str, facts: CallFacts, arch: Arch) -> tuple[CallFacts, dict[str, Strategy]]:
    """The call in chunks as the operation takes it, and the strategies that serve it by name, also those held back."""
    facts, strategies = strategies_of(op, facts, arch)
    return facts, {strategy.name: strategy for strategy in strategies}


def _preferred(
    usable: Mapping[str, Strategy],
    facts: CallFacts,
    arch: Arch,
    hardware: Hardware | None,
    extents: Extents | None,
    forced: str | None,
) -> Strategy:
    """The strategy in force, else the last that suits the sizes."""
    if forced in usable:
        return usable[forced]
    if forced is not None:
        rejection = Rejection(f"strategy {forced} does not serve this call on {arch.name}; {', '.join(usable)} would")
        raise InvalidConfigError(str(rejection), rejection=rejection)
    suitable = (
        strategy
        for strategy in reversed(usable.values())
        if strategy.suits is None
        or (hardware is not None and extents is not None and strategy.suits(facts, extents, hardware.sm_count))
    )
    return next(suitable)


def _requests(
    strategy: Strategy,
    facts: CallFacts,
    arch: Arch,
    *,
    knobs: Mapping[str, Mapping[str, Any]],
    configs: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, CompileRequest]:
    """The kernels of a strategy by step: with the config that is given, else with the knobs of a record, else the default."""
    requests = {}
    for name, step in strategy.steps(facts).items():
        if name in configs:
            config = configs[name]
        elif name in knobs:
            config = step.template.config(**knobs[name])
        else:
            config = step.template.default_config(step.problem, arch)
        requests[name] = _checked(name, step, config, arch)
    return requests


def _checked(name: str, step: Step, config: Any, arch: Arch) -> CompileRequest:
    rejection = step.template.rejection(step.problem, config, arch)
    if rejection is not None:
        raise InvalidConfigError(f"{name} cannot use {config} for {step.problem}: {rejection}", rejection=rejection)
    return CompileRequest(step.template, step.problem, config, arch)


def _splits_as_timed(strategy: Strategy, answer: Considered, entry: Entry, facts: CallFacts, sm_count: int) -> bool:
    """Whether the strategy's cost model takes what was timed at every point around the call. Then it is asked in between as well:
    it knows how segments fill the SMs, and a rule, the power of two next to a constant times a root, does not."""
    points = answer.stored.record.points
    around = {point: strategy.splits(facts, bucket(points[point].extents), sm_count)[0] for point in answer.points}
    return all((timed := entry.curve[point]) is not None and timed.split == split for point, split in around.items())


# What a record says


def _considered(
    op: str,
    facts: CallFacts,
    usable: Mapping[str, Strategy],
    arch: Arch,
    hardware: Hardware,
    extents: Extents | None,
) -> Iterator[Considered]:
    for stored in record_store.find(Identity(op=op, hardware=hardware, problem=Problem.of(facts))):
        yield _consider(stored, facts, usable, arch, hardware, extents)


def _consider(
    stored: Stored,
    facts: CallFacts,
    usable: Mapping[str, Strategy],
    arch: Arch,
    hardware: Hardware,
    extents: Extents | None,
) -> Considered:
    record = stored.record
    weights = _weights_of_points(record, extents)
    if weights is None or any(_default_is_another(record, point, facts, usable, arch, hardware) for point in weights):
        return Considered(stored, "none")
    match: Match = "interpolated"
    if extents is None:
        match = "typical"
    elif any(record.points[point].extents == extents for point in weights):
        match = "measured"
    best = {point: max(map(math.log, _speedups(record, point))) for point in weights}
    ways = tuple(_way(entry, weights, best, _entry_rejection(entry, facts, usable, arch)) for entry in record.entries)
    faster = [way for way in ways[1:] if way.rejection is None and way.speedup_low > 1]
    limit = max((math.log(way.speedup) for way in faster), default=0.0) - TIE
    chosen = next((way for way in faster if math.log(way.speedup) >= limit), ways[0])
    return Considered(stored, match, ways, chosen, tuple(weights))


def _default_is_another(
    record: Record, point: int, facts: CallFacts, usable: Mapping[str, Strategy], arch: Arch, hardware: Hardware
) -> bool:
    """Whether a point's speed-ups are over another strategy than the default of today, which may be faster than all of them."""
    timed = record.entries[0].curve[point]
    if timed is None or timed.strategy is None:
        return False
    return _preferred(usable, facts, arch, hardware, bucket(record.points[point].extents), None).name != timed.strategy


def _weights_of_points(record: Record, extents: Extents | None) -> dict[int, float] | None:
    """How much each point of the record counts for a call of these sizes; None: it is outside of them.

    Points that differ in their gates alone count alike: which gates will come is not known.
    """
    places: dict[Extents, list[int]] = {}
    for number, point in enumerate(record.points):
        places.setdefault(point.extents, []).append(number)
    if extents is None:
        of_places: dict[int, float] | None = {number: 1 / len(places) for number in range(len(places))}
    else:
        of_places = delaunay_weights([_octaves(place) for place in places], _octaves(extents), tolerance=EDGE)
    if of_places is None:
        return None
    numbers = list(places.values())
    return {point: weight / len(numbers[place]) for place, weight in of_places.items() for point in numbers[place]}


def _octaves(extents: Extents) -> tuple[float, float, float]:
    return math.log2(extents.chunks), math.log2(extents.longest), math.log2(extents.sequences)


def _speedups(record: Record, point: int) -> list[float]:
    """Of all entries that were timed at the point, the default's 1 first."""
    return [1.0] + [timed.speedup.value for entry in record.entries if (timed := entry.curve[point]) and timed.speedup]


def _way(entry: Entry, weights: Mapping[int, float], best: Mapping[int, float], rejection: Rejection | None) -> Way:
    value = low = regret = 0.0           # logarithms: a time between two points is on the line between theirs in a log-log plot
    for point, weight in weights.items():
        timed = entry.curve[point]
        if timed is None:
            return Way(entry, 0.0, 0.0, math.inf, rejection or Rejection("was not timed at the sizes around this call"))
        log_value = log_low = 0.0        # the default, over itself
        if timed.speedup is not None:
            log_value, log_low = math.log(timed.speedup.value), math.log(timed.speedup.low)
        value += weight * log_value
        low += weight * log_low
        regret += weight * (best[point] - log_value)
    return Way(entry, math.exp(value), math.exp(low), math.exp(regret) - 1, rejection)


def _entry_rejection(entry: Entry, facts: CallFacts, usable: Mapping[str, Strategy], arch: Arch) -> Rejection | None:
    candidate: Candidate = entry.candidate
    strategy = usable.get(candidate.strategy)
    if strategy is None:
        return Rejection(f"strategy {candidate.strategy} does not serve this call; {', '.join(usable)} would")
    if entry.split_rule is not None and not facts.auto_cp:
        return Rejection("it splits sequences, and the call has auto_cp=False")
    unknown = candidate.configs.keys() - strategy.steps(facts._replace(use_qk_l2norm_in_kernel=True)).keys()
    if unknown:
        return Rejection(f"{candidate.strategy} has no step {', '.join(sorted(unknown))} today")
    for name, step in strategy.steps(facts).items():
        knobs = candidate.configs.get(name)
        if knobs is None:
            continue
        fields = dataclasses.fields(step.template.config)
        types = {field.name: {type(value) for value in field.metadata["values"]} for field in fields}
        if knobs.keys() != types.keys() or any(type(value) not in types[knob] for knob, value in knobs.items()):
            return Rejection(f"{name} has other knobs today: {', '.join(types)}")
        rejection = step.template.rejection(step.problem, step.template.config(**knobs), arch)
        if rejection is not None:
            return Rejection(f"{name}: {rejection}")
    return None


# Every layer of a model asks for the same sizes.
@functools.lru_cache(maxsize=1024)
def _bucket(chunks: int, longest: int, sequences: int) -> Extents:
    return Extents(_rounded(chunks), _rounded(longest), _rounded(sequences))


@functools.lru_cache(maxsize=64)
def _packed_extents(starts: tuple[int, ...], C: int) -> Extents:
    chunks = [(end - start + C - 1) // C for start, end in itertools.pairwise(starts)]
    return Extents(chunks=max(sum(chunks), 1), longest=max(*chunks, 1), sequences=len(chunks))


def _rounded(value: int) -> int:
    if value <= 2 * BUCKETS_PER_OCTAVE:
        return value                     # steps of an eighth and more are kept
    step = 2 ** (value.bit_length() - 1) // BUCKETS_PER_OCTAVE
    below = value // step * step
    return below if value * value < below * (below + step) else below + step      # the nearer one by ratio


def _tell_untuned(op: str, facts: CallFacts, extents: Extents | None, hardware: Hardware) -> None:
    # Once a process and operation, and no warning: the defaults are verified, and a library that works is silent.
    if first_time("untuned", op):
        logger.info(
            "%s runs with default configs: nothing was tuned for H=%d, HV=%d, K=%d, V=%d at this size on %s with %d SMs. "
            "To tune it: %s",
            op, facts.H, facts.HV, facts.K, facts.V, hardware.arch, hardware.sm_count, tune_command(facts, extents, op=op),
        )
