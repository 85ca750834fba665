"""Does a call get what a session found, with the strategies and templates as they are? On a machine without a GPU that likes some
of their configs."""

import planted
import pytest
import torch
from planted import PlantedMachine

from qla_jit import record_store, select
from qla_jit.kernel_templates.arch import SM90A
from qla_jit.ops import plan
from qla_jit.ops.plan import BACKWARD, FORWARD
from qla_jit.tune.search_space import SearchSpace
from qla_jit.tune.session import TuneProblem, TuneRequest, tune, verify_records
from qla_jit.tune.worker import Failure
from qla_jit.tuning_records import Hardware, Problem, Record, Rigor
from qla_jit.workload import facts_of

# What the machine likes best: a step of the default strategy, with one knob turned.
LIKED = {FORWARD: ("chunk_inverse", "blocks_per_sm"), BACKWARD: ("register_state_scan", "product_stages")}
PROBLEM = Problem(H=2, HV=8, K=128, V=128, dtype="bfloat16", chunk_size=64, varlen=True)
FACTS = facts_of(PROBLEM, torch.device("cuda", 0))
LENGTHS = ((8192,), (2048,))


@pytest.fixture(autouse=True)
def no_other_records(tmp_path, monkeypatch):
    monkeypatch.delenv("QLA_JIT_DB_PATH", raising=False)
    monkeypatch.setattr("qla_jit.tuning_db.__path__", [str(tmp_path / "shipped")])
    yield
    record_store._open.cache_clear()


def liked_config(op):
    """Another value of the liked knob than the default's."""
    space = SearchSpace(FACTS, SM90A, planted.SM_COUNT, op)
    step, knob = LIKED[op]
    start = space.default(space.extents(LENGTHS[0]))
    default = dict(start.configs)[step]
    configs = [dict(candidate.configs)[step] for candidate in space.neighbours(start, step)]
    return next(config for config in configs if getattr(config, knob) != getattr(default, knob))


def tuned(op, tmp_path, machine):
    request = TuneRequest((TuneProblem(FACTS, LENGTHS, op=op),), finalists=3)
    (problem,) = tune(request, open_machine=lambda: machine, journal_dir=tmp_path).problems
    assert problem.outcome == "complete"
    return problem.record


@pytest.mark.parametrize("op", [FORWARD, BACKWARD])
def test_a_call_gets_the_config_that_was_found(op, tmp_path):
    (step, knob), liked = LIKED[op], liked_config(op)

    def cost(candidate, facts, extents):
        is_liked = candidate["configs"].get(step, {}).get(knob) == getattr(liked, knob)
        return 100.0 * extents.longest * (0.8 if is_liked else 1.0)

    machine = PlantedMachine(cost=cost)
    record = tuned(op, tmp_path, machine)
    assert Record.from_json(record.to_json()) == record
    assert (record.op, record.problem, record.rigor) == (op, PROBLEM, Rigor.CONFIRMED)
    record_store.save_user_records([record])
    here = machine.describe({})
    hardware = Hardware(arch=here["arch"], sm_count=here["sm_count"], l2_bytes=here["l2_bytes"])
    dispatch = select.choose(FACTS, SM90A, op=op, hardware=hardware, extents=plan.Extents(64, 64, 1))
    assert (dispatch.source, dispatch.match, dispatch.rigor, dispatch.stale) == ("user", "interpolated", Rigor.CONFIRMED, ())
    assert getattr(dispatch.requests[step].config, knob) == getattr(liked, knob)
    assert set(dispatch.requests.values()) <= set(select.requests_of_records(FACTS, SM90A, hardware, op=op))
    assert {v.failure for v in verify_records([record], open_machine=PlantedMachine)} == {None}


def test_a_candidate_of_the_backward_that_is_wrong_becomes_a_negative_of_its_record(tmp_path):
    wrong = Failure("wrong", "ragged-qwen: rms error of g is 1e-1")

    def planted_failure(stage, candidate):
        return wrong if stage == "verify full" and candidate["strategy"] == "registers" else None

    record = tuned(BACKWARD, tmp_path, PlantedMachine(planted=planted_failure, cost=lambda candidate, facts, extents: 100.0))
    assert {entry.candidate.strategy for entry in record.entries} == {"registers_split"}
    assert {(n.candidate.strategy, n.reason.value, n.detail) for n in record.negatives} == {("registers", "wrong", wrong.detail)}
