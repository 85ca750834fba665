"""Does a short tuning session on a GPU end with a record that select takes, and does a wrong kernel not get past it?"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from qla_jit import tuning_records
from qla_jit.device import gpu_info
from qla_jit.errors import EnvironmentUnsuitable
from qla_jit.ops import pipeline
from qla_jit.ops.plan import Extents
from qla_jit.tune import bench, gpu, report, session
from qla_jit.tune.inputs import checked, facts_to_json, make_call
from qla_jit.tune.measure import SCREEN_BLOCKS, estimate
from qla_jit.tune.search_space import SearchSpace
from qla_jit.tune.session import TuneProblem, TuneRequest
from qla_jit.tune.verify import GuardedMemory, Judge, cases
from qla_jit.tune.worker import Failure
from qla_jit.workload import facts_of

pytestmark = pytest.mark.gpu

PROBLEM = tuning_records.Problem(H=2, HV=8, K=128, V=128, dtype="bfloat16", chunk_size=64, varlen=True)
BATCH = (8192,)


@pytest.fixture(scope="module")
def space() -> SearchSpace:
    info = gpu_info(torch.device("cuda", 0))
    return SearchSpace(facts_of(PROBLEM, torch.device("cuda", 0)), info.arch, info.sm_count)


def default_of(space: SearchSpace):
    return space.default(Extents(128, 128, 1))


def test_the_default_passes_all_checks(space):
    default = default_of(space)
    judge = Judge(space.facts, gpu._runner(space.start(space.strategies[-1], Extents(128, 128, 1))))
    verdict = judge.verdict(gpu._runner(default), cases(space.facts, default.split, full=True))
    assert not isinstance(verdict, Failure), verdict
    assert max(error.over_reference for error in verdict.errors.values()) <= 1.25


def test_every_output_stands_in_guarded_memory(space):
    inputs = checked(space.facts, make_call(space.facts, (200, 0, 1), "mixed"))
    with GuardedMemory() as memory:
        result = gpu._runner(default_of(space))(inputs)
    places = {allocation.untyped_storage().data_ptr() for allocation in memory._allocations}
    assert {x.untyped_storage().data_ptr() for x in (result.o, result.final_state)} <= places


def test_a_kernel_that_scales_its_output_is_out(space):
    def scaled(inputs):
        result = pipeline.forward(inputs)
        return dataclasses.replace(result, o=result.o * 1.02)

    judge = Judge(space.facts, gpu._runner(default_of(space)))
    verdict = judge.verdict(scaled, cases(space.facts, None, full=False))
    assert isinstance(verdict, Failure)
    assert verdict.reason == "wrong"


def test_the_default_ties_with_itself(space):
    default = default_of(space)
    question = {"facts": facts_to_json(space.facts), "candidates": [default.to_json()] * 2, "lengths": BATCH, "gates": "mixed",
                "blocks": 2 * SCREEN_BLOCKS}
    answer = gpu.time(question)
    timed = estimate(bench._blocks(answer), 1)
    assert timed.ties
    assert answer["floor_us"] is None or timed.median_us > answer["floor_us"]


def test_a_session_ends_with_a_record(space, tmp_path):
    records: list[tuning_records.Record] = []
    request = TuneRequest((TuneProblem(space.facts, (BATCH,)),), finalists=2)
    try:
        result = session.tune(request, on_record=records.append, budget_seconds=60, journal_dir=tmp_path)
    except EnvironmentUnsuitable as error:
        pytest.skip(f"nothing can be timed here: {error}")
    assert tuning_records.Record.from_json(records[0].to_json()) == records[0]
    assert "<svg" in report.html(result)
    assert {check.regressed for check in session.check_records(records)} <= {False}
