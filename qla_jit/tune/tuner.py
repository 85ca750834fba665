"""Tune one problem: from the strategies' defaults to a short list with times at every point.

    admit      build, drop what is the same code, verify on a first case     every candidate, before it is timed
    screen     the strategies' defaults at every point                       drops strategies that are far behind everywhere
    descend    search.py, at the points where a strategy is strong           few blocks, moves only beyond doubt
    split      the segment lengths at every point, with a strategy's best    gives the constant of its split rule
    verify     all cases                                                     what fails here does not race
    race       the default and the finalists side by side at every point     many blocks
    confirm    the winners against the default once more

What is known is whole after each step, so a tuner may be stopped at any: findings() has what there is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Literal

from .. import select
from ..errors import EnvironmentUnsuitable, VerificationError
from ..ops.inputs import CallFacts
from ..ops.plan import BACKWARD, FORWARD, Extents
from ..tuning_records import Rigor, SplitRule, Verdict
from .bench import Bench, Timing
from .choose import WHOLE, SplitTimes, choose, is_reachable, split_rule
from .measure import RACE_BLOCKS, SCREEN_BLOCKS, TIE, Estimate, estimate
from .search import descend
from .search_space import Candidate, SearchSpace
from .worker import Failure

Stage = Literal["preflight", "compile", "verify", "screen", "split", "race", "confirm", "record"]

FAR_BEHIND = 1.25                        # a strategy whose default is slower than this everywhere is not searched
STRONG = 1.02                            # a strategy is searched where it is within this of the best
ANCHORS = 2                              # points at which a strategy is searched, at most
SEARCH_SHARE = 0.5                       # of the time that a problem has; the rest is for the race


@dataclass(frozen=True)
class TuneProblem:
    """An operation of one call to tune: its static facts, and the batches to measure it on."""

    facts: CallFacts                         # facts.device is the GPU to tune on
    lengths: tuple[tuple[int, ...], ...]     # one entry a batch, the most important first: the tokens of each of its sequences
    gates: str = "mixed"                     # of inputs.GATE_PROFILES: which gates the timed inputs have
    op: str = FORWARD

    def __str__(self) -> str:
        backward = " backward" if self.op == BACKWARD else ""
        return f"{self.facts.H}:{self.facts.HV} {self.facts.K}:{self.facts.V}{backward}"


@dataclass(frozen=True)
class Event:
    """Something happened that a person who watches wants to see; `text` is one line."""

    stage: Stage
    problem: str                             # str(TuneProblem), or "" for the session as a whole
    text: str
    done: int = 0                            # of `total` in this stage of this problem; 0 of 0: it cannot be counted
    total: int = 0


@dataclass(frozen=True)
class Batch:
    """One point of the curves."""

    lengths: tuple[int, ...]
    extents: Extents

    @property
    def bucket(self) -> Extents:
        """The size that a call of these extents is looked up with."""
        return select.bucket(self.extents)


@dataclass(frozen=True)
class Trial:
    """A candidate that was looked at, and what came of it: a failure, or a time beside another candidate's."""

    candidate: Candidate
    label: str
    stage: Stage
    failure: Failure | None = None
    estimate: Estimate | None = None
    over: str = ""                           # what estimate.speedup compares with
    lengths: tuple[int, ...] = ()


@dataclass
class Finalist:
    """An entry of the record in the making. Its split is that of the rule, or the strategy's own without one.

    The default is the first. It may be another strategy at another size; its candidate here is that of the first batch.
    """

    candidate: Candidate                     # with any split
    rule: SplitRule | None = None
    verdict: Verdict | None = None


@dataclass(frozen=True)
class Race:
    """Times at one batch; candidates[0] is the default, and the columns of the blocks are in this order."""

    candidates: tuple[Candidate, ...]
    timing: Timing
    winner: int


@dataclass
class Findings:
    """What is known of a problem so far."""

    finalists: list[Finalist] = field(default_factory=list)              # the default first
    races: dict[Batch, Race] = field(default_factory=dict)
    split_times: dict[str, list[SplitTimes]] = field(default_factory=dict)       # by strategy
    trials: list[Trial] = field(default_factory=list)
    null_test: Estimate | None = None
    rigor: Rigor = Rigor.SCREENED


class Tuner:
    """Tunes one problem. share_left says how much of the problem's time is left, from 1 down; what is below 0 is overdrawn."""

    def __init__(
        self, problem: TuneProblem, space: SearchSpace, bench: Bench, *, finalists: int,
        on_event: Callable[[Event], None], share_left: Callable[[], float],
    ) -> None:
        self.findings = Findings()
        self._problem, self._space, self._bench = problem, space, bench
        self._most_finalists = finalists
        self._on_event, self._share_left = on_event, share_left
        by_extents: dict[Extents, tuple[int, ...]] = {}
        for lengths in problem.lengths:
            by_extents.setdefault(space.extents(lengths), lengths)
        self._batches = [Batch(lengths, extents) for extents, lengths in by_extents.items() if extents.chunks]
        self._admitted: dict[Candidate, bool] = {}
        self._leaders: dict[str, Candidate] = {}             # the best configs of each strategy, as the search found them
        self._by_source: dict[tuple[str, int | None], Candidate] = {}
        bench.on_kernel = lambda done, total: self._tell("compile", f"{done} of {total} kernels", done, total)

    def run(self) -> None:
        """Go through the stages.

        Raises:
            VerificationError: the default itself does not pass.
            EnvironmentUnsuitable: the default against itself gives an interval beyond 1 +- 1 %, or times are disturbed.
        """
        self._admit_default()
        self._test_noise()
        starts = self._screen_strategies()
        found = [[*self._descend(start), start] for start in starts]
        self._shortlist([candidate for turn in zip_longest(*found) for candidate in turn if candidate is not None])
        self._find_split_rules()
        self._verify_finalists()
        self._race()
        self._confirm()

    # Stages

    def _admit_default(self) -> None:
        if not self._batches:
            raise EnvironmentUnsuitable(f"{self._problem}: expected a batch with tokens; got {self._problem.lengths}")
        for default in dict.fromkeys(self._default(batch) for batch in self._batches):
            if not self._admit([default]):
                failure = self.findings.trials[-1].failure
                raise VerificationError(
                    f"{self._problem}: the default itself is out ({failure.reason}: {failure.detail}); "
                    "no other candidate can be judged on this machine"
                )
        self.findings.finalists = [Finalist(self._default(self._batches[0]))]

    def _test_noise(self) -> None:
        """Time the default against itself: what is seen then is what cannot be told apart."""
        batch = self._batches[0]
        default = self._default(batch)
        timing = self._bench.time(self._space, batch.lengths, self._problem.gates, [default, default], blocks=RACE_BLOCKS)
        if isinstance(timing, Failure):
            raise EnvironmentUnsuitable(f"{self._problem}: the default cannot be timed ({timing.reason}): {timing.detail}")
        null = self.findings.null_test = estimate(timing.blocks, 1)
        text = f"the default against itself: {null.speedup:.3f}x [{null.low:.3f}, {null.high:.3f}]"
        self._tell("preflight", text)
        if not 1 - TIE <= null.low <= null.high <= 1 + TIE:
            raise EnvironmentUnsuitable(
                f"{self._problem}: {text}, where 1 +- {TIE:.0%} is needed to tell candidates apart; "
                "stop what else runs on the GPU, or lock its clock"
            )

    def _screen_strategies(self) -> list[Candidate]:
        """The default candidates of the strategies that are worth a search, the default first."""
        first = self._batches[0].extents
        starts = self._admit([self._space.start(strategy, first) for strategy in self._space.strategies])
        share_of_best = {start: 0.0 for start in starts}
        for batch in list(self._batches):
            here = {start: at_batch(self._space, Finalist(start), batch) for start in starts}
            race = self._time([self._default(batch), *self._admit(list(here.values()))], batch, "screen", SCREEN_BLOCKS)
            if race is None:
                continue
            self.findings.races[batch] = race
            medians = [estimate(race.timing.blocks, column).median_us for column in range(len(race.candidates))]
            for start, candidate in here.items():
                if candidate in race.candidates:
                    share = min(medians) / medians[race.candidates.index(candidate)]
                    share_of_best[start] = max(share_of_best[start], share)
        if not self.findings.races:
            raise EnvironmentUnsuitable(f"{self._problem}: none of the batches can be timed on this GPU")
        self.findings.finalists += [Finalist(start) for start in starts if not self._is_default(start)]
        return [start for start in starts if share_of_best[start] * FAR_BEHIND >= 1]

    def _descend(self, start: Candidate) -> list[Candidate]:
        """Where the search from a strategy's default ends, at each of its anchors."""
        ends: list[Candidate] = []
        for batch in self._anchors(start):
            if self._share_left() <= 1 - SEARCH_SHARE:
                break

            def better(best: Candidate, challengers: Sequence[Candidate], batch: Batch = batch) -> Candidate:
                admitted = self._admit(challengers)
                race = self._time([best, *admitted], batch, "screen", SCREEN_BLOCKS) if admitted else None
                return best if race is None else race.candidates[race.winner]

            begin = at_batch(self._space, Finalist(ends[-1] if ends else start), batch)
            if not self._admit([begin]):
                continue
            end = descend(self._space, begin, better=better, time_is_up=lambda: self._share_left() <= 1 - SEARCH_SHARE)
            ends.append(end)
        return ends

    def _shortlist(self, found: Sequence[Candidate]) -> None:
        """Who races: the default, and the first of those found, which the strategies give in turn."""
        default = self.findings.finalists[0]
        by_configs: dict[tuple, Candidate] = {}
        for candidate in found:
            # With another split the default's configs are another candidate.
            if len(self._all_splits(candidate.strategy)) > 1 or not self._is_default(candidate):
                by_configs.setdefault((candidate.strategy, candidate.configs), candidate)
        challengers = list(by_configs.values())[: self._most_finalists - 1]
        for candidate in challengers:
            self._leaders.setdefault(candidate.strategy, candidate)
        self.findings.finalists = [default, *(Finalist(c) for c in sorted(challengers, key=self._space.rank))]

    def _find_split_rules(self) -> None:
        """One rule for each strategy that splits: the best segment hardly depends on the other knobs."""
        for strategy, leader in self._leaders.items():
            if len(self._all_splits(strategy)) < 2:
                continue
            times = []
            for batch in list(self._batches):
                splits = self._space.splits(strategy, batch.extents)
                tried = [split for split in splits if split == splits[0] or is_reachable(split, batch.bucket)]
                admitted = self._admit([leader.with_split(split) for split in tried])
                race = self._time(admitted, batch, "split", SCREEN_BLOCKS) if admitted and self._share_left() > 0 else None
                if race is not None:
                    times.append(SplitTimes(batch.bucket, {
                        candidate.split: estimate(race.timing.blocks, column).median_us
                        for column, candidate in enumerate(race.candidates)
                    }))
            self.findings.split_times[strategy] = times
            rule = split_rule(times, HV=self._space.facts.HV, sm_count=self._space.sm_count) or WHOLE
            for finalist in self.findings.finalists[1:]:
                if finalist.candidate.strategy == strategy:
                    finalist.rule = rule

    def _verify_finalists(self) -> None:
        """All cases with the most and the fewest segments in use, the first case with those in between; who fails is out."""
        reference = self._reference()
        passed = []
        for number, finalist in enumerate(self.findings.finalists):
            self._tell("verify", self._space.label(finalist.candidate), number + 1, len(self.findings.finalists))
            is_default = finalist is self.findings.finalists[0]
            in_use = {self._default(b) if is_default else at_batch(self._space, finalist, b) for b in self._batches}
            by_segments = sorted(in_use, key=lambda candidate: math.inf if candidate.split is None else candidate.split)
            if len(self._admit(by_segments)) == len(by_segments):
                extremes = dict.fromkeys([by_segments[0], by_segments[-1]]) if not is_default else by_segments
                verdicts = [self._bench.verify(self._space, candidate, reference=reference, full=True) for candidate in extremes]
                failures = [(c, v) for c, v in zip(extremes, verdicts, strict=True) if isinstance(v, Failure)]
                for candidate, failure in failures:
                    self._reject(candidate, "verify", failure)
                if not failures:
                    finalist.verdict = verdicts[0]
                    passed.append(finalist)
            if not passed:
                detail = self.findings.trials[-1].failure.detail
                raise VerificationError(f"{self._problem}: the default does not pass all checks: {detail}")
        self.findings.finalists = passed

    def _race(self) -> None:
        screened, self.findings.races = self.findings.races, {}
        try:
            for number, batch in enumerate(list(self._batches)):
                if self.findings.races and self._share_left() <= 0:
                    return
                others = [at_batch(self._space, finalist, batch) for finalist in self.findings.finalists[1:]]
                race = self._time([self._default(batch), *others], batch, "race", RACE_BLOCKS)
                if race is not None:
                    self.findings.races[batch] = race
                    winner = race.candidates[race.winner]
                    said = self._said(estimate(race.timing.blocks, race.winner)) if race.winner else "default confirmed"
                    text = f"{batch_name(batch.lengths)}: {self._space.label(winner)} {said}"
                    self._tell("race", text, number + 1, len(self._batches))
                    self.findings.rigor = Rigor.RACED
        finally:
            self.findings.races = self.findings.races or screened        # stopped before the first

    def _confirm(self) -> None:
        """Race each winner with the default once more; all must win again."""
        agreed = len(self.findings.races) == len(self._batches)
        for batch, race in self.findings.races.items():
            if not race.winner or not agreed:
                continue
            if self._share_left() <= 0:
                return
            pair = [race.candidates[0], race.candidates[race.winner]]
            timing = self._bench.time(
                self._space, batch.lengths, self._problem.gates, pair, blocks=RACE_BLOCKS, again=1
            )
            agreed = not isinstance(timing, Failure) and choose(timing.blocks) == 1
            said = "not again" if not agreed else self._said(estimate(timing.blocks, 1))
            self._tell("confirm", f"{batch_name(batch.lengths)}: {self._space.label(pair[1])} {said}")
        if agreed:
            self.findings.rigor = Rigor.CONFIRMED

    # Steps that several stages take

    def _admit(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Those that build, are not the same code as one before, and pass the first case."""
        fresh = [candidate for candidate in dict.fromkeys(candidates) if candidate not in self._admitted]
        built = self._bench.build(self._space, fresh) if fresh else []
        for number, (candidate, outcome) in enumerate(zip(fresh, built, strict=True), start=1):
            self._tell("verify", self._space.label(candidate), number, len(fresh))
            failure = outcome if isinstance(outcome, Failure) else self._failure_of(candidate, outcome)
            self._admitted[candidate] = failure is None
            if failure is not None:
                self._reject(candidate, "compile" if isinstance(outcome, Failure) else "verify", failure)
        return [candidate for candidate in dict.fromkeys(candidates) if self._admitted[candidate]]

    def _failure_of(self, candidate: Candidate, source: str) -> Failure | None:
        twin = self._by_source.setdefault((source, candidate.split), candidate)
        if twin != candidate:
            return Failure("static", f"its generated code is that of {self._space.label(twin)}")
        verdict = self._bench.verify(self._space, candidate, reference=self._reference(), full=False)
        return verdict if isinstance(verdict, Failure) else None

    def _time(self, candidates: Sequence[Candidate], batch: Batch, stage: Stage, blocks: int) -> Race | None:
        """Time candidates side by side, the one to beat first; who fails at it is out, and with the default the batch. None:
        nobody is left."""
        ranked = list(dict.fromkeys([candidates[0], *sorted(candidates[1:], key=self._space.rank)]))

        def ask(chosen: Sequence[Candidate]) -> Timing | Failure:
            return self._bench.time(self._space, batch.lengths, self._problem.gates, chosen, blocks=blocks)

        timing = ask(ranked)
        if isinstance(timing, Failure):
            timing = ask(ranked[:1])
            if isinstance(timing, Failure):
                self._reject(ranked[0], stage, timing, batch.lengths)
                if ranked[0] == self._default(batch):
                    self._batches.remove(batch)
                    return None
                self._admitted[ranked[0]] = False
                return self._time(ranked[1:], batch, stage, blocks) if len(ranked) > 1 else None
            for candidate in ranked[1:]:
                alone = ask([ranked[0], candidate])
                if isinstance(alone, Failure):
                    self._throw_out(candidate, stage, alone, batch.lengths)
            ranked = [candidate for candidate in ranked if self._admitted[candidate]]
            timing = ask(ranked)
            if isinstance(timing, Failure):
                raise EnvironmentUnsuitable(f"candidates can be timed alone and not together ({timing.reason}): {timing.detail}")
        estimates = [estimate(timing.blocks, column) for column in range(len(ranked))]
        for candidate, estimated in zip(ranked, estimates, strict=True):
            if timing.floor_us is not None and estimated.median_us < timing.floor_us:
                detail = f"{estimated.median_us:.1f} us; its inputs alone take {timing.floor_us:.1f} us to read"
                self._throw_out(candidate, stage, Failure("too_fast", detail), batch.lengths)
        if not all(self._admitted[candidate] for candidate in ranked):
            if not self._admitted[ranked[0]]:
                raise VerificationError(f"{self._problem}: {self._space.label(ranked[0])} is faster than memory can be read")
            return self._time([candidate for candidate in ranked if self._admitted[candidate]], batch, stage, blocks)
        race = Race(tuple(ranked), timing, choose(timing.blocks))
        label = self._space.label(ranked[0])
        self.findings.trials += [
            Trial(candidate, self._space.label(candidate), stage, None, estimated, label, batch.lengths)
            for candidate, estimated in zip(ranked, estimates, strict=True)
        ]
        return race

    def _throw_out(self, candidate: Candidate, stage: Stage, failure: Failure, lengths: tuple[int, ...]) -> None:
        self._admitted[candidate] = False
        self._reject(candidate, stage, failure, lengths)

    def _reject(self, candidate: Candidate, stage: Stage, failure: Failure, lengths: tuple[int, ...] = ()) -> None:
        label = self._space.label(candidate)
        self.findings.trials.append(Trial(candidate, label, stage, failure, lengths=lengths))
        self._tell(stage, f"{label} is out, {failure.reason}: {failure.detail.splitlines()[0]}")

    def _default(self, batch: Batch) -> Candidate:
        return self._space.default(batch.extents)

    def _is_default(self, candidate: Candidate) -> bool:
        """Whether it is what runs at every size anyway."""
        return all(at_batch(self._space, Finalist(candidate), batch) == self._default(batch) for batch in self._batches)

    def _reference(self) -> Candidate:
        """The baseline strategy with its defaults: its error is the measure of others."""
        return self._space.start(self._space.strategies[-1], self._batches[0].extents)

    def _all_splits(self, strategy: str) -> set[int | None]:
        return {split for batch in self._batches for split in self._space.splits(strategy, batch.extents)}

    def _anchors(self, start: Candidate) -> list[Batch]:
        """Where to search from a strategy's default: at the most and the fewest chunks of the batches where it is strong."""
        slower_than_best: dict[Batch, float] = {}
        for batch, race in self.findings.races.items():
            here = at_batch(self._space, Finalist(start), batch)
            if here in race.candidates:
                medians = [estimate(race.timing.blocks, column).median_us for column in range(len(race.candidates))]
                slower_than_best[batch] = medians[race.candidates.index(here)] / min(medians)
        strong = [batch for batch, factor in slower_than_best.items() if factor <= STRONG]
        strong = sorted(strong or [min(slower_than_best, key=slower_than_best.__getitem__)], key=lambda b: -b.extents.chunks)
        return list(dict.fromkeys([strong[0], strong[-1]]))[:ANCHORS]

    def _tell(self, stage: Stage, text: str, done: int = 0, total: int = 0) -> None:
        self._on_event(Event(stage, str(self._problem), text, done, total))

    def _said(self, estimated: Estimate) -> str:
        return f"{estimated.speedup:.3f}x [{estimated.low:.3f}, {estimated.high:.3f}]"


def at_batch(space: SearchSpace, finalist: Finalist, batch: Batch) -> Candidate:
    """A finalist with the split that a call of this size would get; as select.choose() does it."""
    splits = space.splits(finalist.candidate.strategy, batch.extents)
    if finalist.rule is None:
        return finalist.candidate.with_split(splits[0])
    ruled = finalist.rule.split(HV=space.facts.HV, extents=batch.bucket, sm_count=space.sm_count)
    return finalist.candidate.with_split(ruled if ruled in splits else splits[0])


def batch_name(lengths: tuple[int, ...]) -> str:
    """(4096,) * 8 -> "4096x8"; (1024, 7168) -> "1024+7168"."""
    counts = dict.fromkeys(lengths, 0)
    for length in lengths:
        counts[length] += 1
    return "+".join(f"{length}x{count}" if count > 1 else f"{length}" for length, count in counts.items())
