"""Does a short tuning session on a GPU end with a record that select takes, and does a wrong kernel not get past it? For both
operations."""

from __future__ import annotations

import pytest
import torch

from qla_jit import tuning_records
from qla_jit.device import gpu_info
from qla_jit.errors import EnvironmentUnsuitable, UnsupportedError
from qla_jit.ops.plan import BACKWARD, FORWARD, Extents
from qla_jit.tune import bench, gpu, report, session
from qla_jit.tune.inputs import facts_to_json
from qla_jit.tune.measure import SCREEN_BLOCKS, estimate
from qla_jit.tune.operations import OPERATIONS
from qla_jit.tune.search_space import SearchSpace
from qla_jit.tune.session import TuneProblem, TuneRequest
from qla_jit.tune.verify import GuardedMemory, Judge, cases
from qla_jit.tune.worker import Failure
from qla_jit.workload import facts_of

pytestmark = pytest.mark.gpu

PROBLEM = tuning_records.Problem(H=2, HV=8, K=128, V=128, dtype="bfloat16", chunk_size=64, varlen=True)
BATCH = (8192,)


# What kernels write; dg and dbeta are cast and scaled by PyTorch afterwards, and may be elsewhere.
WRITTEN = {FORWARD: {"o", "final_state"}, BACKWARD: {"q", "k", "v"}}


@pytest.fixture(scope="module", params=[FORWARD, BACKWARD])
def space(request: pytest.FixtureRequest) -> SearchSpace:
    info = gpu_info(torch.device("cuda", 0))
    try:
        return SearchSpace(facts_of(PROBLEM, torch.device("cuda", 0)), info.arch, info.sm_count, request.param)
    except UnsupportedError as error:
        pytest.skip(str(error))


def default_of(space: SearchSpace):
    return space.default(Extents(128, 128, 1))


def runner(space: SearchSpace, candidate):
    return OPERATIONS[space.op].runner(candidate)


def reference(space: SearchSpace):
    return runner(space, space.start(space.strategies[-1], Extents(128, 128, 1)))


def test_the_start_of_every_strategy_passes_all_checks(space):
    judge = Judge(space.facts, reference(space), space.op)
    for strategy in space.strategies:
        candidate = space.start(strategy, Extents(128, 128, 1))
        verdict = judge.verdict(runner(space, candidate), cases(space.facts, candidate.split, full=True, op=space.op))
        assert not isinstance(verdict, Failure), (strategy.name, verdict)


def test_every_output_stands_in_guarded_memory(space):
    sample = OPERATIONS[space.op].sample(space.facts, (200, 0, 1), "mixed")
    with GuardedMemory() as memory:
        outputs = runner(space, default_of(space))(sample)
    places = {allocation.untyped_storage().data_ptr() for allocation in memory._allocations}
    assert {outputs[name].untyped_storage().data_ptr() for name in WRITTEN[space.op]} <= places


def test_a_kernel_that_scales_its_output_is_out(space):
    run = runner(space, default_of(space))
    judge = Judge(space.facts, reference(space), space.op)
    for name in WRITTEN[space.op]:
        verdict = judge.verdict(
            lambda sample, name=name: (outputs := run(sample)) | {name: outputs[name] * 1.02},
            cases(space.facts, None, full=False, op=space.op),
        )
        assert isinstance(verdict, Failure), name
        assert (verdict.reason, f"error of {name} is" in verdict.detail) == ("wrong", True)


def test_the_default_ties_with_itself(space):
    default = default_of(space)
    question = {"op": space.op, "facts": facts_to_json(space.facts), "candidates": [default.to_json()] * 2, "lengths": BATCH,
                "gates": "mixed", "blocks": 2 * SCREEN_BLOCKS}
    answer = gpu.time(question)
    timed = estimate(bench._blocks(answer), 1)
    assert timed.ties
    assert answer["floor_us"] is None or timed.median_us > answer["floor_us"]


def test_a_session_ends_with_a_record(space, tmp_path):
    records: list[tuning_records.Record] = []
    request = TuneRequest((TuneProblem(space.facts, (BATCH,), op=space.op),), finalists=2)
    try:
        result = session.tune(request, on_record=records.append, budget_seconds=60, journal_dir=tmp_path)
    except EnvironmentUnsuitable as error:
        pytest.skip(f"nothing can be timed here: {error}")
    assert tuning_records.Record.from_json(records[0].to_json()) == records[0]
    assert records[0].op == space.op
    assert "<svg" in report.html(result)
    assert {check.regressed for check in session.check_records(records)} <= {False}
