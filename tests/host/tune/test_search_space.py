"""Are candidates exactly what the templates declare, in an order that never depends on a measurement?"""

import dataclasses

import planted
import pytest
from planted import FUSED, SM_COUNT, OutputConfig, ScanConfig

from qla_jit import select
from qla_jit.kernel_templates.arch import SM90A
from qla_jit.ops.plan import BACKWARD, FORWARD, Extents
from qla_jit.tune.search import descend, first_round
from qla_jit.tune.search_space import Candidate, SearchSpace, extents_of, lengths_of
from qla_jit.tuning_records import Hardware

LONG = Extents(chunks=512, longest=512, sequences=1)


@pytest.fixture
def space(strategies):
    return SearchSpace(planted.facts(), SM90A, SM_COUNT)


def plain(block_v=64, stages=2, threads=128):
    return Candidate("plain", (("scan", ScanConfig(block_v, stages)), ("output", OutputConfig(threads))))


@pytest.mark.parametrize("op", [FORWARD, BACKWARD])
@pytest.mark.parametrize("extents", [LONG, Extents(512, 64, 8), Extents(3, 3, 1)], ids=str)
def test_default_is_what_select_takes_without_records(strategies, op, extents):
    space = SearchSpace(planted.facts(), SM90A, SM_COUNT, op)
    hardware = Hardware(arch="sm_90a", sm_count=SM_COUNT, l2_bytes=1)    # of which there are no records
    dispatch = select.choose(space.facts, SM90A, op=op, hardware=hardware, extents=extents)
    assert space.requests(space.default(extents)) == list(dispatch.requests.values())
    assert (space.default(extents).strategy, space.default(extents).split) == (dispatch.strategy, dispatch.split)


def test_neighbours_turn_one_knob_and_keep_to_the_constraints(space):
    assert space.neighbours(plain(), "scan") == [plain(32), plain(64, 1), plain(64, 3), plain(128)]
    assert plain(128, 3) not in space.neighbours(plain(128), "scan")     # the template's constraint
    assert space.neighbours(plain(), "output") == [plain(threads=256)]


def test_a_template_that_is_added_adds_candidates(space, strategies, monkeypatch):
    wider = dataclasses.make_dataclass("Wider", [("block_v", int, dataclasses.field(metadata={"values": (64, 256), "why": ""}))],
                                       frozen=True)
    added = dataclasses.replace(strategies["plain"], name="added", steps=lambda facts: {
        "scan": planted.Step(dataclasses.replace(FUSED, config=wider, constraints=(), default_config=lambda p, a: wider(64)),
                             planted.Problem(8)),
    })
    monkeypatch.setitem(strategies, "added", added)
    start = space.start(added, LONG)
    assert space.strategies[0] is added
    assert [dict(c.configs)["scan"].block_v for c in space.neighbours(start, "scan")] == [256]


@pytest.mark.parametrize("chunk_size", [16, 64], ids=lambda C: f"C{C}")
def test_sizes_of_a_backward_are_in_its_own_chunks(strategies, chunk_size):
    space = SearchSpace(planted.facts()._replace(chunk_size=chunk_size), SM90A, SM_COUNT, BACKWARD)
    assert space.facts.chunk_size == 64
    assert space.extents((130, 64)) == Extents(chunks=4, longest=3, sequences=2)
    assert space.lengths(Extents(chunks=4, longest=3, sequences=2)) == (192, 64)


def test_json_gives_the_candidate_back(space):
    candidate = plain(32, 1, 256).with_split(16)
    assert space.from_json(candidate.to_json()) == candidate


def test_steps_that_json_leaves_out_take_their_default(space):
    assert space.from_json({"strategy": "plain", "configs": {"output": {"threads": 256}}, "split": None}) == plain(threads=256)


@pytest.mark.parametrize("damage", [{"strategy": "gone"}, {"configs": {"scan": {"warps": 4}}}], ids=str)
def test_what_is_not_known_any_more_is_an_error(space, damage):
    with pytest.raises((KeyError, TypeError)):
        space.from_json(plain().to_json() | damage)


def test_rank_puts_the_preferred_strategy_and_fewer_turned_knobs_first(space):
    default = space.default(LONG)
    expected = [default, default.with_split(8), default.with_split(16), plain(), plain(32), plain(64, 3), plain(32, 3)]
    assert sorted(reversed(expected), key=space.rank) == expected


def test_label_names_what_is_not_at_its_default(space):
    assert space.label(plain()) == "plain"
    assert space.label(plain(32, threads=256).with_split(8)) == "plain scan.block_v=32 output.threads=256 split=8"


@pytest.mark.parametrize(
    "extents", [Extents(5, 5, 1), Extents(512, 300, 4), Extents(12, 4, 3), Extents(9, 9, 3), Extents(513, 200, 7)], ids=str
)
def test_lengths_have_the_extents_that_they_were_made_for(extents):
    assert extents_of(lengths_of(extents, 64), 64) == extents


def test_extents_count_a_ragged_chunk_whole():
    assert extents_of((1, 64, 65, 0), 64) == Extents(chunks=4, longest=2, sequences=4)


def cheapest(cost):
    def better(best, challengers):
        asked.append((best, tuple(challengers)))
        return min([best, *challengers], key=cost)           # the first of equals: the incumbent

    asked = []
    return better, asked


def cost_of(candidate):
    return planted.cost_us(candidate.to_json(), planted.facts(), LONG)


def test_descent_finds_the_best_of_knobs_that_pay_alone(space):
    better, _ = cheapest(cost_of)
    assert descend(space, plain(), better=better, time_is_up=lambda: False) == plain(32, 2, 256)


def test_descent_times_nothing_twice(space):
    better, asked = cheapest(cost_of)
    descend(space, plain(), better=better, time_is_up=lambda: False)
    timed = [candidate for _, challengers in asked for candidate in challengers]
    assert len(timed) == len(set(timed))


def test_descent_ends_when_the_time_is_up(space):
    better, asked = cheapest(cost_of)
    assert descend(space, plain(), better=better, time_is_up=lambda: len(asked) == 1) == plain(32)


def test_descent_stays_where_nothing_is_better(space):
    better, asked = cheapest(lambda candidate: 1.0)
    assert descend(space, plain(), better=better, time_is_up=lambda: False) == plain()
    looked_at = [plain(), *(candidate for _, challengers in asked for candidate in challengers)]
    assert looked_at == first_round(space, plain())
