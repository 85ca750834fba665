"""Do ties go by the fixed order, must the default be beaten, and is the split rule's constant the best one?"""

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qla_jit.ops.plan import Extents
from qla_jit.tune.choose import WHOLE, SplitTimes, choose, constants_for, is_reachable, split_rule
from qla_jit.tune.measure import RACE_BLOCKS, Block

SMS = 132


def race(costs, *, noise, seed):
    draw = random.Random(seed)
    return [Block(tuple(cost * math.exp(draw.gauss(0, noise)) for cost in costs)) for _ in range(RACE_BLOCKS)]


@pytest.mark.parametrize(
    ("costs", "winner"),
    [
        ((100, 80, 90), 1),              # the fastest
        ((100, 90, 80), 2),
        ((100, 80.3, 80), 1),            # 0.4 % is a tie: the first in order
        ((100, 99.8, 99.5), 0),          # nothing beats the default beyond doubt
        ((100, 120, 130), 0),
        ((100,), 0),
    ],
    ids=str,
)
def test_the_first_that_ties_with_the_fastest_wins_if_it_beats_the_default(costs, winner):
    assert choose(race(costs, noise=0.001, seed=0)) == winner


def test_one_that_ties_with_both_the_fastest_and_the_default_does_not_win():
    # 0: default; 2 is 1.6 % faster; 1 lies between, so that it ties with each of them.
    assert choose(race((100, 99.2, 98.4), noise=0.0001, seed=0)) in (0, 2)


def test_a_fast_but_noisy_candidate_does_not_win():
    draw = random.Random(0)
    blocks = [Block((100.0, 95.0 * math.exp(draw.gauss(0, 0.2)))) for _ in range(RACE_BLOCKS)]
    assert choose(blocks) == 0


# Costs that are equal to within 0.3 % or differ by 4 % and more, as classes of configs do; steps of 1 % in between would be
# decided by noise under any rule.
classes = st.lists(st.sampled_from([1.0, 0.96, 0.9, 0.8]), min_size=1, max_size=7)
wobble = st.floats(0, 0.003)


@given(classes, st.data(), st.integers(0, 2**32), st.integers(0, 2**32))
def test_two_runs_with_different_noise_agree(levels, data, seed_one, seed_two):
    costs = [100.0, *(100 * level * (1 - data.draw(wobble)) for level in levels)]
    assert choose(race(costs, noise=0.003, seed=seed_one)) == choose(race(costs, noise=0.003, seed=seed_two))


@pytest.mark.parametrize("split", [4, 16, 64, None], ids=lambda split: f"split-{split}")
@pytest.mark.parametrize("HV", [8, 64], ids=lambda HV: f"HV{HV}")
def test_constants_are_those_for_which_the_rule_gives_the_split(split, HV):
    extents = Extents(chunks=512, longest=300, sequences=3)
    low, high = constants_for(split, HV, extents, SMS)
    for constant in (low * 1.001, math.sqrt(low * high), high * 0.999):
        rule = WHOLE.model_copy(update={"low": constant, "high": constant})
        assert rule.split(HV=HV, extents=extents, sm_count=SMS) == split


def test_only_powers_of_two_below_the_longest_sequence_can_be_given():
    extents = Extents(chunks=100, longest=64, sequences=2)
    assert [split for split in (None, 4, 12, 32, 64, 128) if is_reachable(split, extents)] == [None, 4, 32]


def timed(chunks, HV, best_constant):
    """Times whose best split is the one nearest to a constant, in octaves."""
    extents = Extents(chunks=chunks, longest=chunks, sequences=1)
    ideal = best_constant * math.sqrt(HV * chunks / SMS)
    splits = [2**n for n in range(2, 12) if 2**n < chunks]
    us = {split: 100 * (1 + 0.2 * abs(math.log2(split / ideal))) for split in splits}
    return SplitTimes(extents, us | {None: 100 * (1 + 0.2 * abs(math.log2(chunks / ideal)))})


@pytest.mark.parametrize("constant", [2.0, 3.0, 7.0], ids=lambda constant: f"constant-{constant:g}")
def test_the_rule_finds_the_constant_that_the_times_were_made_with(constant):
    times = [timed(chunks, 8, constant) for chunks in (32, 64, 128, 256, 512)]
    rule = split_rule(times, HV=8, sm_count=SMS)
    assert rule.low <= constant * 1.1
    assert rule.high >= constant / 1.1
    assert rule.regret < 0.1


def test_no_constant_at_all_loses_less_than_the_rule():
    times = [timed(chunks, 8, constant) for chunks, constant in ((32, 1.0), (128, 4.0), (512, 2.0))]
    rule = split_rule(times, HV=8, sm_count=SMS)

    def regret(constant):
        probe = WHOLE.model_copy(update={"low": constant, "high": constant})
        splits = [probe.split(HV=8, extents=point.extents, sm_count=SMS) for point in times]
        timed_us = [point.us.get(split, point.us[4]) for split, point in zip(splits, times, strict=True)]
        return max(us / min(point.us.values()) - 1 for us, point in zip(timed_us, times, strict=True))

    assert rule.regret == pytest.approx(min(regret(2 ** (n / 16)) for n in range(-64, 128)), abs=1e-3)


def test_where_the_rule_gives_what_was_not_tried_the_default_split_serves():
    times = [SplitTimes(Extents(256, 256, 1), {16: 10.0, 64: 30.0}), SplitTimes(Extents(64, 64, 1), {32: 5.0, 16: 9.0})]
    rule = split_rule(times, HV=132, sm_count=SMS)
    assert rule.split(HV=132, extents=times[0].extents, sm_count=SMS) == 16
    assert rule.regret == 0              # it gives 8 at the second point, where the default of 32 is best


def test_sequences_that_are_best_whole_give_a_rule_that_leaves_them_whole():
    times = [SplitTimes(Extents(n, n, 1), {None: 10.0, 4: 20.0, 8: 15.0}) for n in (32, 64)]
    rule = split_rule(times, HV=64, sm_count=SMS)
    assert [rule.split(HV=64, extents=point.extents, sm_count=SMS) for point in times] == [None, None]
    assert rule.regret == 0


def test_without_times_of_splits_there_is_no_rule():
    assert split_rule([SplitTimes(Extents(32, 32, 1), {None: 10.0})], HV=8, sm_count=SMS) is None
    assert split_rule([], HV=8, sm_count=SMS) is None


def test_the_rule_does_not_depend_on_the_order_of_the_times():
    times = [timed(chunks, 8, 3.0) for chunks in (32, 128, 512)]
    rules = {split_rule(list(order), HV=8, sm_count=SMS) for order in itertools.permutations(times)}
    assert len(rules) == 1
