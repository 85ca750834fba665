"""How candidates are timed, and what the times say: the protocol and its statistics, without a GPU in sight.

Protocol "graph-replay-2". A sample is one replay of a CUDA graph of several calls, which rotate over inputs that together hold
twice the L2. A block is two samples of every candidate, taken in one order and then in the other, so that a drift of the clock
falls on all alike; the next block is queued before this one ends, so that the GPU never waits for the host. Blocks count from
when the time per round has become flat. A block under thermal or hardware throttling, or that took 5 % more or less than the
median block, is dropped and counted. The clock is only told: what the driver reports stands still for a tenth of a second and
more while the clock moves (1965 MHz, then 1620, at block times that differ by 0.3 %).

A speed-up is the median over blocks of default / candidate, both of the same block. Its 95 % interval is that of the median by
order statistics: no assumption on the noise, no random numbers, the same answer for the same times.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

PROTOCOL = "graph-replay-2"
MIN_BLOCKS = 6                           # the fewest of which the median has a 95 % interval
SCREEN_BLOCKS, RACE_BLOCKS = 8, 24
TIE = 0.01                               # a ratio whose interval touches 1 +- this is a tie
MAX_DRIFT = 0.05
WARM_UP_US = 60_000                      # an H200 reaches its power limit, and its lasting clock, after about 30 ms of load
MAX_WARM_UP_US = 1_000_000
FLAT_ROUNDS, FLAT_SPREAD = 5, 0.01       # warm when so many rounds in a row differ by less than this


@dataclass(frozen=True)
class Clock:
    """The state of the GPU at one moment; None: not known."""

    sm_mhz: int | None = None
    throttled: bool | None = None        # by heat or by the hardware; the power limit of a busy card is its normal state


@dataclass(frozen=True)
class Block:
    """Microseconds per call of each candidate, the clock meanwhile, and how long the block took."""

    us: tuple[float, ...]
    clock: Clock = Clock()
    elapsed_us: float = 0.0


@dataclass(frozen=True)
class Estimate:
    """What the blocks say of one candidate: its time, and how much faster it is than another (above 1: faster)."""

    samples: int
    median_us: float
    mad_us: float                        # median absolute deviation
    speedup: float
    low: float
    high: float

    @property
    def ties(self) -> bool:
        """Whether the interval of the speed-up touches 1 +- TIE."""
        return self.low <= 1 + TIE and self.high >= 1 - TIE


class Timer(Protocol):
    """What measure() needs of a GPU; a fake one replays recorded times."""

    calls: Sequence[int]                 # per replay, by candidate

    def replay(self, candidate: int) -> Any:
        """Queue one replay; what wait() takes."""

    def wait(self, span: Any) -> float:
        """Microseconds that a replay took, once it has ended."""

    def clock(self) -> Clock: ...


def measure(timer: Timer, *, blocks: int) -> list[Block]:
    """Warm up, then take so many blocks, and one more for each that does not count, up to as many again."""
    stream = _blocks(timer)
    elapsed_us, rounds = 0.0, deque(maxlen=FLAT_ROUNDS)
    for block in stream:
        elapsed_us += block.elapsed_us
        rounds.append(sum(block.us))
        flat = len(rounds) == FLAT_ROUNDS and max(rounds) <= (1 + FLAT_SPREAD) * min(rounds)
        if elapsed_us >= MAX_WARM_UP_US or (elapsed_us >= WARM_UP_US and flat):
            break
    taken = [next(stream) for _ in range(blocks)]
    while len(sound(taken)) < blocks and len(taken) < 2 * blocks:
        taken.append(next(stream))
    return taken


def _blocks(timer: Timer) -> Iterator[Block]:
    """Blocks without end, one of them queued ahead."""
    forwards = range(len(timer.calls))

    def queue() -> tuple[list[tuple[int, Any]], list[tuple[int, Any]]]:
        return [(i, timer.replay(i)) for i in forwards], [(i, timer.replay(i)) for i in reversed(forwards)]

    queued = queue()
    while True:
        (first, second), queued = queued, queue()
        took = [0.0] * len(timer.calls)
        for i, span in first:
            took[i] += timer.wait(span)
        clock = timer.clock()            # in the middle of the block
        for i, span in second:
            took[i] += timer.wait(span)
        yield Block(tuple(took[i] / (2 * timer.calls[i]) for i in forwards), clock, sum(took))


def sound(blocks: Sequence[Block]) -> list[Block]:
    """The blocks that count."""
    cool = [block for block in blocks if not block.clock.throttled]
    if not cool:
        return []
    usual = statistics.median(sum(block.us) for block in cool)
    return [block for block in cool if abs(sum(block.us) - usual) <= MAX_DRIFT * usual]


def estimate(blocks: Sequence[Block], candidate: int, *, over: int = 0) -> Estimate:
    """The speed-up of one candidate over another; needs MIN_BLOCKS blocks."""
    assert len(blocks) >= MIN_BLOCKS, f"{len(blocks)} blocks have no 95 % interval"
    times = [block.us[candidate] for block in blocks]
    median_us = statistics.median(times)
    ratios = sorted(block.us[over] / block.us[candidate] for block in blocks)
    outside = _ranks_outside(len(ratios))
    return Estimate(
        samples=len(blocks),
        median_us=median_us,
        mad_us=statistics.median(abs(time - median_us) for time in times),
        speedup=statistics.median(ratios),
        low=ratios[outside],
        high=ratios[-1 - outside],
    )


def _ranks_outside(n: int) -> int:
    """How many sorted values of n lie below the 95 % interval of their median, and as many above."""
    below, outside = 0.0, -1
    while below <= 0.025:
        outside += 1
        below += math.comb(n, outside) / 2**n
    return outside - 1
