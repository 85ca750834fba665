"""What to take, given the times: the tie rule, and the constant of the split rule with its regret."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..ops.plan import Extents
from ..tuning_records import SplitRule
from .measure import Block, estimate

# SplitRule takes 2**round(log2(constant * unit)) chunks, so the constants of one split span a factor of sqrt(2) either way.
HALF_OCTAVE = math.sqrt(2)
MOST_CHUNKS = 2.0**20                    # stands for infinity: a constant that leaves every sequence whole
WHOLE = SplitRule(low=MOST_CHUNKS, high=MOST_CHUNKS, regret=0)


def choose(blocks: Sequence[Block]) -> int:
    """The candidate to take, of candidates in the fixed order with the one to beat (the default) first.

    The first that ties with the fastest; but only one that beats the default beyond doubt, else the default. As the order
    decides between those that cannot be told apart, two runs agree although their noise differs.
    """
    candidates = range(len(blocks[0].us))
    fastest = max(candidates, key=lambda candidate: estimate(blocks, candidate).speedup)
    for candidate in candidates:
        near_fastest = candidate == fastest or estimate(blocks, fastest, over=candidate).ties
        estimated = estimate(blocks, candidate)
        if near_fastest and (candidate == 0 or (estimated.low > 1 and not estimated.ties)):
            return candidate
    return 0


@dataclass(frozen=True)
class SplitTimes:
    """Microseconds at one point for each split that was tried, the strategy's default first; None: whole sequences."""

    extents: Extents
    us: Mapping[int | None, float]


def unit(HV: int, extents: Extents, sm_count: int) -> float:
    """What SplitRule multiplies its constant with."""
    return math.sqrt(HV * extents.chunks / sm_count)


def constants_for(split: int | None, HV: int, extents: Extents, sm_count: int) -> tuple[float, float]:
    """The constants (low, high) of SplitRule that give this split."""
    if split is None:
        return 2.0 ** math.ceil(math.log2(extents.longest)) / HALF_OCTAVE / unit(HV, extents, sm_count), MOST_CHUNKS
    return split / HALF_OCTAVE / unit(HV, extents, sm_count), split * HALF_OCTAVE / unit(HV, extents, sm_count)


def is_reachable(split: int | None, extents: Extents) -> bool:
    """Whether SplitRule can give this split."""
    return split is None or (split < extents.longest and split == 2 ** round(math.log2(split)))


def split_rule(times: Sequence[SplitTimes], *, HV: int, sm_count: int) -> SplitRule | None:
    """The constant that loses least at the worst point, as the interval in which it changes nothing; None without times of
    segments. Where a constant gives a split that was not tried, the strategy's default serves, as select.choose() has it."""
    if not any(split is not None for point in times for split in point.us):
        return None
    edges = sorted({
        float(f"{edge:.6g}")             # two points may have the same edge but for the last bit
        for point in times for split in point.us
        if is_reachable(split, point.extents) for edge in constants_for(split, HV, point.extents, sm_count)
    })
    rules = [SplitRule(low=low, high=high, regret=0) for low, high in itertools.pairwise(edges)]
    judged = [(_regrets(rule, times, HV, sm_count), rule) for rule in rules]
    # Among equals the widest interval, which is the farthest from a change for other lengths.
    regrets, rule = min(judged, key=lambda item: (round(max(item[0]), 4), round(sum(item[0]), 4), -item[1].high / item[1].low))
    return rule.model_copy(update={"regret": round(max(regrets), 4)})


def _regrets(rule: SplitRule, times: Sequence[SplitTimes], HV: int, sm_count: int) -> list[float]:
    """What the rule loses at each point against the best split there."""
    regrets = []
    for point in times:
        us = point.us.get(rule.split(HV=HV, extents=point.extents, sm_count=sm_count), next(iter(point.us.values())))
        regrets.append(us / min(point.us.values()) - 1)
    return regrets
