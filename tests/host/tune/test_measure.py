"""Does the protocol take the samples that it says, and do the statistics say what they should of recorded times?"""

import random

import pytest

from qla_jit.tune.measure import FLAT_ROUNDS, RACE_BLOCKS, TIE, WARM_UP_US, Block, Clock, estimate, measure, sound


class RecordedTimer:
    """Plays back times of rounds, one row of a matrix for each round of all candidates; the last row goes on for ever."""

    def __init__(self, rounds, calls=None, clocks=()):
        self.rounds, self.clocks = rounds, list(clocks)
        self.calls = calls or [1] * len(rounds[0])
        self.order, self.waited, self.most_in_flight = [], 0, 0

    def replay(self, candidate):
        number = len(self.order) // len(self.calls)
        self.order.append(candidate)
        self.most_in_flight = max(self.most_in_flight, len(self.order) - self.waited)
        return self.rounds[min(number, len(self.rounds) - 1)][candidate] * self.calls[candidate]

    def wait(self, span):
        self.waited += 1
        return span

    def clock(self):
        return self.clocks.pop(0) if self.clocks else Clock()


def test_candidates_are_replayed_in_one_order_and_then_in_the_other():
    timer = RecordedTimer([(5e3, 6e3, 7e3)])
    measure(timer, blocks=4)
    block = [0, 1, 2, 2, 1, 0]
    assert timer.order == block * (len(timer.order) // 6)


def test_a_block_is_queued_before_the_one_before_it_has_ended():
    timer = RecordedTimer([(5e3, 6e3)])
    measure(timer, blocks=4)
    assert timer.most_in_flight == 2 * 4                     # two blocks of two candidates, twice each


def test_a_block_has_the_mean_time_per_call_of_its_two_samples():
    rounds = [(5e3, 6e3)] * 40 + [(5e3, 6e3), (5.2e3, 6.6e3)] * 20
    blocks = measure(RecordedTimer(rounds, calls=[4, 10]), blocks=30)
    assert blocks[-1].us == pytest.approx((5.1e3, 6.3e3))
    assert blocks[-1].elapsed_us == pytest.approx(4 * 10.2e3 + 10 * 12.6e3)


def test_blocks_count_from_when_times_are_flat():
    cooling = [(20e3 * 0.9**n,) for n in range(30)]          # a clock that ramps up: each round is 10 % faster
    blocks = measure(RecordedTimer([*cooling, (800.0,)]), blocks=3)
    assert [block.us for block in blocks] == [(800.0,)] * 3


def test_warm_up_ends_even_if_times_never_become_flat():
    restless = random.Random(0)
    timer = RecordedTimer([(restless.uniform(1e4, 2e4),) for _ in range(500)])
    assert 5 <= len(measure(timer, blocks=5)) <= 10
    assert len(timer.order) < 2 * (100 + 10 + FLAT_ROUNDS)   # about a second of 15 ms replays


def test_warm_up_takes_its_time_though_times_are_flat_from_the_first():
    timer = RecordedTimer([(1e3,)])
    measure(timer, blocks=1)
    assert len(timer.order) >= WARM_UP_US / 1e3


def test_blocks_under_throttling_and_off_the_usual_time_are_dropped():
    blocks = [Block((600.0, 400.0))] * 5 + [Block((620.0, 425.0)), Block((610.0, 450.0)), Block((590.0, 350.0))]
    throttled = Block((600.0, 400.0), Clock(1755, True))
    assert sound([*blocks, throttled]) == blocks[:6]


def test_the_clock_that_the_driver_reports_decides_nothing():
    blocks = [Block((1.0,), Clock(mhz, False)) for mhz in (1965, 1965, 1620, 1620, None)]
    assert sound(blocks) == blocks


def test_a_block_that_does_not_count_is_taken_again():
    blocks = measure(RecordedTimer([(5e3,)] * 30 + [(6e3,)] * 2 + [(5e3,)] * 100), blocks=25)
    assert (len(blocks), len(sound(blocks))) == (26, 25)


def test_without_clocks_nothing_is_dropped():
    assert len(sound([Block((1.0,))] * 7)) == 7


def test_speed_up_is_the_median_of_paired_ratios():
    # The clock halves in the middle: both times double, and their ratio stays what it is.
    blocks = [Block((100.0, 80.0))] * 5 + [Block((200.0, 160.0))] * 5
    estimated = estimate(blocks, 1)
    assert (estimated.speedup, estimated.low, estimated.high) == (1.25, 1.25, 1.25)
    assert estimated.samples == 10


@pytest.mark.parametrize(
    ("samples", "outside"), [(6, 0), (8, 0), (9, 1), (20, 5), (24, 6)], ids=lambda value: f"{value}"
)
def test_interval_leaves_out_as_many_ratios_as_the_binomial_law_allows(samples, outside):
    blocks = [Block((100.0 + n, 100.0)) for n in range(samples)]
    estimated = estimate(blocks, 1)
    assert (estimated.low, estimated.high) == pytest.approx((1 + outside / 100, 1 + (samples - 1 - outside) / 100))


def test_interval_covers_the_true_ratio_about_19_times_in_20():
    draw = random.Random(1)

    def covered():
        estimated = estimate([Block((110 * draw.gauss(1, 0.01), 100 * draw.gauss(1, 0.01))) for _ in range(RACE_BLOCKS)], 1)
        return estimated.low <= 1.1 <= estimated.high

    assert 0.93 <= sum(covered() for _ in range(600)) / 600 <= 0.99


@pytest.mark.parametrize(
    ("low", "high", "ties"),
    [(1.02, 1.03, False), (1.009, 1.03, True), (0.97, 0.98, False), (0.97, 0.991, True), (0.95, 1.05, True)],
)
def test_a_tie_is_an_interval_that_touches_the_band_around_1(low, high, ties):
    blocks = [Block((ratio, 1.0)) for ratio in (low, *[(low + high) / 2] * 4, high)]
    assert estimate(blocks, 1).ties is ties
    assert TIE == 0.01


def test_the_same_times_give_the_same_answer():
    draw = random.Random(2)
    blocks = [Block((draw.gauss(100, 1), draw.gauss(90, 1))) for _ in range(RACE_BLOCKS)]
    assert estimate(blocks, 1) == estimate(list(blocks), 1)
