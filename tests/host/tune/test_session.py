"""Does a whole session find the planted best, throw out what misbehaves with its reason, and survive what happens to it?"""

import contextlib
import dataclasses
import json

import planted
import pytest
from conftest import PLANTED_WORKER
from planted import PlantedMachine

from qla_jit import tuning_records
from qla_jit.errors import EnvironmentUnsuitable
from qla_jit.kernel_templates.arch import SM90A
from qla_jit.ops.plan import BACKWARD, FORWARD
from qla_jit.tune import session
from qla_jit.tune.session import TuneProblem, TuneRequest, check_records, tune, verify_records
from qla_jit.tune.worker import Failure, Worker
from qla_jit.tuning_records import Record

pytestmark = pytest.mark.usefixtures("strategies")

LENGTHS = ((8192,), (32768,), (2048,), (4096,) * 8)

both = pytest.mark.parametrize("op", [FORWARD, BACKWARD])


def request(HV=8, lengths=LENGTHS, problems=1, op=FORWARD):
    facts = (planted.facts(H=2 + n, HV=HV * (2 + n) // 2) for n in range(problems))
    return TuneRequest(tuple(TuneProblem(of, lengths, op=op) for of in facts))


def run(machine, tmp_path, of=None, op=FORWARD, **options):
    return tune(of or request(op=op), open_machine=lambda: machine, journal_dir=tmp_path / "journal", **options)


def only(result):
    (problem,) = result.problems
    return problem


def configs_of(record):
    return [(entry.candidate.strategy, entry.candidate.configs) for entry in record.entries]


BEST_PLAIN = ("plain", {"scan": {"block_v": 32, "stages": 2}, "output": {"threads": 256}})
BEST_SPLIT = ("split", {"fused": {"block_v": 128, "stages": 2}})


@both
def test_a_session_finds_the_planted_best_of_each_strategy(tmp_path, op):
    problem = only(run(PlantedMachine(), tmp_path, op=op))
    assert problem.outcome == "complete"
    assert configs_of(problem.record)[0] == ("split", {"fused": {"block_v": 64, "stages": 1}})       # the default
    told = [[measured.strategy for measured in entry.curve] for entry in problem.record.entries[:2]]
    assert told == [["split", "split", "split", "plain"], [None] * 4]                   # of the default alone
    assert BEST_SPLIT in configs_of(problem.record)
    best = problem.record.entries[configs_of(problem.record).index(BEST_SPLIT)]
    assert all(measured.speedup.low > 1.1 for measured in best.curve)


@both
def test_the_split_of_the_best_entry_is_that_of_the_cost_model(tmp_path, op):
    record = only(run(PlantedMachine(noise=0.0005), tmp_path, op=op)).record
    best = record.entries[configs_of(record).index(BEST_SPLIT)]
    facts, (strategy, configs) = planted.facts(), BEST_SPLIT
    for point, measured in zip(record.points, best.curve, strict=True):
        costs = {
            split: planted.cost_us({"strategy": strategy, "configs": configs, "split": split}, facts, point.extents)
            for split in planted.powers_of_two(facts, point.extents, planted.SM_COUNT)
        }
        assert measured.split == best.split_rule.split(HV=8, extents=point.extents, sm_count=planted.SM_COUNT)
        assert costs[measured.split] / min(costs.values()) - 1 <= best.split_rule.regret + 0.02


def test_speed_ups_are_over_what_is_the_default_at_each_size(tmp_path):
    problem = only(run(PlantedMachine(), tmp_path))
    defaults = [race.candidates[0].strategy for race in problem.findings.races.values()]
    assert defaults == ["split", "split", "split", "plain"]  # eight sequences of eight heads fill the GPU


@both
def test_the_record_is_whole(tmp_path, op):
    handed_over = []
    record = only(run(PlantedMachine(), tmp_path, op=op, on_record=handed_over.append)).record
    assert handed_over == [record]
    assert record.op == op
    assert Record.from_json(record.to_json()) == record
    assert [point.chunks for point in record.points] == [128, 512, 32, 512]
    assert record.rigor is tuning_records.Rigor.CONFIRMED
    assert all(entry.verdict is not None for entry in record.entries)
    assert record.provenance.gpu == "NVIDIA H200"
    assert record.provenance.versions.driver == "590.48"
    assert set(record.provenance.templates) == {"scan", "output", "fused"}


def test_a_strategy_that_is_far_behind_everywhere_is_not_searched(tmp_path):
    machine = PlantedMachine(cost=lambda c, f, e: planted.cost_us(c, f, e) * (3 if c["strategy"] == "plain" else 1))
    run(machine, tmp_path)
    configs = {json.dumps(c["configs"]) for q in machine.questions for c in q.get("candidates", ()) if c["strategy"] == "plain"}
    assert len(configs) == 1


def test_where_nothing_beats_the_default_it_is_confirmed(tmp_path):
    problem = only(run(PlantedMachine(cost=lambda candidate, facts, extents: 100.0), tmp_path))
    assert all(race.winner == 0 for race in problem.findings.races.values())
    assert all(m.speedup is None or m.speedup.low <= 1.01 for entry in problem.record.entries for m in entry.curve)


@pytest.mark.parametrize("seeds", [(0, 1), (2, 3), (4, 5)], ids=str)
def test_two_sessions_with_different_noise_choose_alike(tmp_path, seeds):
    one, two = (only(run(PlantedMachine(noise=0.003, seed=seed), tmp_path / str(seed))) for seed in seeds)

    def winners(problem):
        return [problem.space.label(race.candidates[race.winner]) for race in problem.findings.races.values()]

    assert winners(one) == winners(two)


def planting(knobs, stage, failure):
    """Fails at a stage where the fused kernel has these knobs."""
    def planted_failure(at, candidate):
        return failure if at == stage and candidate["configs"].get("fused") == knobs else None

    return planted_failure


# Each is planted in the fused configs that the cost model likes best, so that the search must step over it.
PLANTED = [
    ("build", Failure("compile", "ptxas: too many registers")),
    ("build", Failure("static", "fused spills 400 bytes a thread")),
    ("verify", Failure("wrong", "ragged-mixed: rms error of o is 1e-1")),
    ("verify", Failure("racy", "launch 3 of 8 gives another o")),
    ("verify", Failure("hang", "no answer within 120 s")),
    ("verify", Failure("crash", "CUDA error: an illegal memory access was encountered\nCompile with TORCH_USE_CUDA_DSA")),
    ("time", Failure("oom", "needs 200 GiB")),
    ("time", Failure("hang", "no answer within 120 s")),
    ("verify full", Failure("wrong", "ragged-open: max error of final_state is 2e-1")),
]


@both
@pytest.mark.parametrize(("stage", "failure"), PLANTED, ids=lambda value: getattr(value, "reason", value))
def test_a_planted_failure_is_out_with_its_reason_and_the_tuner_goes_on(tmp_path, stage, failure, op):
    knobs = {"block_v": 128, "stages": 2}
    problem = only(run(PlantedMachine(planted=planting(knobs, stage, failure)), tmp_path, op=op))
    record = problem.record
    assert BEST_SPLIT not in configs_of(record)
    rejected = [trial for trial in problem.findings.trials if trial.failure is not None]
    assert {trial.failure for trial in rejected} == {failure}
    recorded = {(n.candidate.strategy, json.dumps(n.candidate.configs), n.reason.value, n.detail) for n in record.negatives}
    if failure.reason == "static":
        assert not recorded              # not a danger, only slow
    else:
        assert {(strategy, detail) for strategy, _, _, detail in recorded} == {("split", failure.detail.splitlines()[0])}
    assert len(record.entries) > 1       # others were found
    assert problem.outcome == "complete"


@both
def test_one_that_is_faster_than_memory_can_be_read_is_out(tmp_path, op):
    def cost(candidate, facts, extents):
        skips = candidate["configs"].get("fused") == {"block_v": 128, "stages": 1}
        return 2.0 if skips else planted.cost_us(candidate, facts, extents)

    problem = only(run(PlantedMachine(cost=cost, floor_us=10.0), tmp_path, op=op))
    (negative,) = {n.candidate.configs["fused"]["stages"]: n for n in problem.record.negatives}.values()
    assert negative.reason.value == "too_fast"
    assert "2.0 us; its inputs alone take 10.0 us to read" in negative.detail
    assert all(measured.median_us > 10 for entry in problem.record.entries for measured in entry.curve)


def test_a_batch_that_the_default_cannot_run_is_left_out(tmp_path):
    class Small(PlantedMachine):
        def time(self, question):
            if question["lengths"] == [32768]:
                return {"failure": {"reason": "oom", "detail": "needs 200 GiB"}}
            return super().time(question)

    problem = only(run(Small(), tmp_path))
    assert [point.chunks for point in problem.record.points] == [128, 32, 512]
    assert problem.record.rigor is tuning_records.Rigor.CONFIRMED


def test_a_split_that_does_not_fit_is_left_out_alone(tmp_path):
    def planted_failure(stage, candidate):
        oom = stage == "time" and candidate["split"] == 8 and candidate["strategy"] == "split"
        return Failure("oom", "needs 200 GiB") if oom else None

    record = only(run(PlantedMachine(planted=planted_failure), tmp_path)).record
    assert len(record.points) == len(LENGTHS)
    assert all(measured is None or measured.split != 8 for entry in record.entries for measured in entry.curve)
    assert {negative.split for negative in record.negatives} == {8}


def test_identical_generated_code_is_timed_once(tmp_path):
    # `threads` of the output changes nothing in the code.
    def source(candidate):
        return {step: {k: v for k, v in knobs.items() if k != "threads"} for step, knobs in candidate["configs"].items()}

    machine = PlantedMachine(same_source=source)
    problem = only(run(machine, tmp_path))
    timed = [c["configs"].get("output") for q in machine.questions if q["do"] == "time" for c in q["candidates"]]
    assert {"threads": 256} not in timed
    assert any("its generated code is that of plain" in t.failure.detail for t in problem.findings.trials if t.failure)


@contextlib.contextmanager
def planted_worker(patience):
    """What needs a process of its own goes to one that really hangs and crashes; what is built is built here."""
    builder = PlantedMachine()
    with Worker(PLANTED_WORKER) as worker:
        def ask(question, *, on_kernel):
            if question["do"] == "build":
                return builder(question, on_kernel=on_kernel)
            return worker.ask(question, seconds=patience if worker.is_running else 60)

        yield ask


def test_hanging_and_crashing_processes_become_negatives_and_the_session_ends_well(monkeypatch):
    # Only the plain strategy, whose neighbours of the scan hang, crash and run out of memory.
    unusable = dataclasses.replace(planted.STRATEGIES["split"], rejection=lambda facts, arch: "not here")
    monkeypatch.setitem(planted.STRATEGIES, "split", unusable)
    result = tune(request(lengths=((4096,) * 8,)), open_machine=lambda: planted_worker(patience=1.5))
    record = only(result).record
    reasons = {json.dumps(n.candidate.configs["scan"]): n.reason.value for n in record.negatives}
    assert reasons == {
        '{"block_v": 32, "stages": 2}': "hang",
        '{"block_v": 128, "stages": 2}': "crash",
        '{"block_v": 64, "stages": 3}': "oom",
    }
    assert record.entries[-1].candidate.configs["output"] == {"threads": 256}


def test_every_answer_is_on_disk_when_the_next_question_is_asked(tmp_path):
    seen = []

    class Watching(PlantedMachine):
        def __call__(self, question, *, on_kernel):
            if question["do"] != "describe":
                lines = [line for path in (tmp_path / "journal").glob("*.jsonl") for line in path.read_text().splitlines()]
                seen.append((len(self.questions), len(lines)))
            return super().__call__(question, on_kernel=on_kernel)

    run(Watching(), tmp_path)
    assert len(seen) > 20
    assert all(asked == written for asked, written in seen)


@both
def test_resume_asks_nothing_that_was_answered(tmp_path, op):
    first = only(run(PlantedMachine(), tmp_path, op=op))
    machine = PlantedMachine(seed=9)
    second = only(run(machine, tmp_path, op=op, resume=True))
    assert machine.questions == []
    same = {"provenance": None}
    assert second.record.model_dump() | same == first.record.model_dump() | same


@both
@pytest.mark.parametrize("question", [5, 20, 40])
def test_after_an_interruption_resume_ends_where_an_undisturbed_session_does(tmp_path, question, op):
    whole = only(run(PlantedMachine(noise=0.0), tmp_path / "whole", op=op))
    interrupted = PlantedMachine(noise=0.0, interrupt_at=question)
    assert only(run(interrupted, tmp_path, op=op)).outcome == "interrupted"
    machine = PlantedMachine(noise=0.0)
    resumed = only(run(machine, tmp_path, op=op, resume=True))
    assert len(interrupted.questions) - 1 + len(machine.questions) == total_questions(tmp_path)
    assert configs_of(resumed.record) == configs_of(whole.record)


def total_questions(tmp_path):
    return sum(len(path.read_text().splitlines()) for path in (tmp_path / "journal").glob("*.jsonl"))


def test_a_journal_line_that_was_cut_off_is_asked_again(tmp_path):
    run(PlantedMachine(), tmp_path)
    (journal,) = (tmp_path / "journal").glob("*.jsonl")
    journal.write_text(journal.read_text()[:-40])
    machine = PlantedMachine()
    assert only(run(machine, tmp_path, resume=True)).outcome == "complete"
    assert len(machine.questions) == 1


def test_answers_about_one_operation_are_not_taken_for_the_other(tmp_path):
    run(PlantedMachine(), tmp_path)
    machine = PlantedMachine()
    run(machine, tmp_path, op=BACKWARD, resume=True)
    assert len(machine.questions) > 20
    assert {question["op"] for question in machine.questions} == {BACKWARD}
    assert len(list((tmp_path / "journal").glob("*.jsonl"))) == 2


def test_a_session_may_tune_both_operations(tmp_path):
    problems = request().problems + request(op=BACKWARD).problems
    result = run(PlantedMachine(), tmp_path, of=TuneRequest(problems))
    assert [(of.record.op, of.record.rigor.value) for of in result.problems] == [
        ("gdn_forward", "confirmed"), ("gdn_backward", "confirmed")
    ]


@pytest.mark.parametrize("chunk_size", [16, 32, 64], ids=lambda C: f"C{C}")
def test_gradients_of_calls_in_any_chunks_are_tuned_as_one_problem(tmp_path, chunk_size):
    problem = TuneProblem(planted.facts()._replace(chunk_size=chunk_size), ((8192,),), op=BACKWARD)
    record = only(run(PlantedMachine(), tmp_path, of=TuneRequest((problem,)))).record
    assert record.problem.chunk_size == 64
    assert [point.chunks for point in record.points] == [128]


def test_without_resume_a_session_begins_anew(tmp_path):
    run(PlantedMachine(), tmp_path)
    machine = PlantedMachine()
    run(machine, tmp_path)
    assert len(machine.questions) > 20


def count_of_questions(tmp_path):
    machine = PlantedMachine()
    run(machine, tmp_path / "count")
    return machine.questions


def test_ctrl_c_in_the_race_keeps_the_points_that_were_raced(tmp_path):
    questions = count_of_questions(tmp_path)
    races = [n for n, q in enumerate(questions, 1) if q["do"] == "time" and q["blocks"] == 24 and len(q["candidates"]) > 2]
    handed_over = []
    result = run(PlantedMachine(interrupt_at=races[2]), tmp_path, on_record=handed_over.append)
    record = only(result).record
    assert (result.outcome, handed_over) == ("interrupted", [record])
    assert len(record.points) == 2
    assert record.rigor is tuning_records.Rigor.RACED


def test_ctrl_c_in_the_search_keeps_the_strategies_times(tmp_path):
    problem = only(run(PlantedMachine(interrupt_at=40), tmp_path))
    assert problem.record.rigor is tuning_records.Rigor.SCREENED
    assert len(problem.record.points) == len(LENGTHS)


def test_after_ctrl_c_the_other_problems_are_not_begun(tmp_path):
    result = run(PlantedMachine(interrupt_at=40), tmp_path, of=request(problems=3))
    assert [(p.outcome, p.reason) for p in result.problems] == [
        ("interrupted", "Ctrl-C"), ("interrupted", "not begun"), ("interrupted", "not begun")
    ]


@both
@pytest.mark.parametrize("budget", [60, 110, 1000])
def test_a_budget_is_kept_and_what_was_timed_is_recorded(tmp_path, monkeypatch, budget, op):
    machine = PlantedMachine(seconds_per_question=1.0)
    monkeypatch.setattr(session.time, "monotonic", lambda: machine.now)
    result = run(machine, tmp_path, of=request(problems=2, op=op), budget_seconds=budget)
    # A stage that is under way is finished: full verification, and the first race.
    assert machine.now <= budget + 40
    assert all(problem.record is not None for problem in result.problems)
    assert result.outcome == ("complete" if budget == 1000 else "budget spent")


def test_problems_for_which_no_time_is_left_are_not_begun(tmp_path, monkeypatch):
    machine = PlantedMachine(seconds_per_question=1.0)
    monkeypatch.setattr(session.time, "monotonic", lambda: machine.now)
    result = run(machine, tmp_path, of=request(problems=3), budget_seconds=15)
    assert result.problems[-1].reason == "not begun"
    assert result.problems[0].record is not None


def test_too_much_noise_refuses_to_record(tmp_path):
    with pytest.raises(EnvironmentUnsuitable, match=r"the default against itself.*stop what else runs"):
        run(PlantedMachine(noise=0.04), tmp_path)


def test_times_that_drift_refuse_to_record(tmp_path):
    with pytest.raises(EnvironmentUnsuitable, match=r"of 24 blocks of times were disturbed by times that drift"):
        run(PlantedMachine(noise=0.2), tmp_path)


@pytest.mark.parametrize(
    ("state", "told"),
    [
        (dict(other_processes=(4711,)), "other processes run on it: 4711"),
        (dict(mig=True), "MIG"),
        (dict(mps=True), "MPS"),
        (dict(throttled=True), "throttled"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_unsuitable_machine_is_named_before_anything_is_asked(tmp_path, state, told):
    machine = PlantedMachine(state=state)
    with pytest.raises(EnvironmentUnsuitable, match=told):
        run(machine, tmp_path)
    assert machine.questions == []


def test_what_the_driver_does_not_tell_is_said_and_stops_nothing(tmp_path):
    events = []
    state = dict.fromkeys(("other_processes", "mig", "mps", "throttled", "driver", "max_sm_mhz"))
    assert run(PlantedMachine(state=state), tmp_path, on_event=events.append).outcome == "complete"
    assert "the driver does not tell: other_processes, mig, mps, throttled" in [event.text for event in events]


def test_throttled_times_are_an_error_and_are_not_kept(tmp_path):
    class Hot(PlantedMachine):
        def time(self, question):
            answer = super().time(question)
            for block in answer["blocks"]:
                block["clock"]["throttled"] = True
            return answer

    with pytest.raises(EnvironmentUnsuitable, match="24 of 24 blocks of times were disturbed by throttling"):
        run(Hot(), tmp_path)
    assert only(run(PlantedMachine(), tmp_path, resume=True)).outcome == "complete"


def test_a_default_that_is_wrong_ends_the_problem(tmp_path):
    wrong = planting({"block_v": 64, "stages": 1}, "verify", Failure("wrong", "the reference template's own o has the error 1e0"))
    with pytest.raises(EnvironmentUnsuitable, match="the default itself is out"):
        run(PlantedMachine(planted=wrong), tmp_path)


def test_events_tell_the_stages_in_order(tmp_path):
    events = []
    run(PlantedMachine(), tmp_path, on_event=events.append)
    stages = list(dict.fromkeys(event.stage for event in events))
    assert [stage for stage in stages if stage in ("preflight", "verify", "race", "confirm", "record")] == [
        "preflight", "verify", "race", "confirm", "record"
    ]
    assert any(event.total and event.done <= event.total for event in events)


@both
def test_stored_records_are_verified_again(tmp_path, op):
    record = only(run(PlantedMachine(), tmp_path, op=op)).record
    assert {v.failure for v in verify_records([record], open_machine=PlantedMachine)} == {None}
    racy = planting({"block_v": 128, "stages": 2}, "verify full", Failure("racy", "launch 2 gives another o"))
    failures = [v for v in verify_records([record], open_machine=lambda: PlantedMachine(planted=racy)) if v.failure]
    assert [(v.candidate.strategy, v.failure) for v in failures] == [("split", "racy: launch 2 gives another o")]


@both
def test_check_passes_where_nothing_changed_and_tells_what_got_slower(tmp_path, op):
    record = only(run(PlantedMachine(), tmp_path, op=op)).record
    unchanged = check_records([record], open_machine=lambda: PlantedMachine(seed=5))
    assert len(unchanged) == len(LENGTHS)
    assert not any(check.regressed for check in unchanged)

    def slower(candidate, facts, extents):
        return planted.cost_us(candidate, facts, extents) * (1.3 if candidate["configs"] == BEST_SPLIT[1] else 1)

    checks = check_records([record], open_machine=lambda: PlantedMachine(cost=slower), points=2)
    assert len(checks) == 2
    assert all(check.regressed for check in checks)
    assert f"2:8 128:128{' backward' if op == BACKWARD else ''} at 8192: " in checks[0].text


def test_a_record_of_another_gpu_is_refused(tmp_path):
    record = only(run(PlantedMachine(), tmp_path)).record
    other = record.model_copy(update={"hardware": record.hardware.model_copy(update={"sm_count": 78})})
    with pytest.raises(EnvironmentUnsuitable, match="expected records for this GPU"):
        check_records([other], open_machine=PlantedMachine)


@both
def test_prebuild_compiles_the_first_round(monkeypatch, op):
    asked = []

    def compile_all(requests, *, on_kernel):
        asked.extend(requests)
        return {requests[0]: Failure("compile", "scan did not compile")}

    monkeypatch.setattr(session, "compile_all", compile_all)
    assert session.prebuild(request(op=op), arch=SM90A, sm_count=132) == ["scan did not compile"]
    assert {r.template.name for r in asked} == {"scan", "output", "fused"}
    assert len({(r.template.name, r.config) for r in asked}) == 5 + 2 + 5
    asked.clear()
    session.prebuild(request(op=op), arch=SM90A, sm_count=132, searched=("split",))
    assert len({(r.template.name, r.config) for r in asked}) == 1 + 1 + 5


def test_a_default_that_fails_only_the_full_checks_leaves_no_record(tmp_path):
    wrong = planting({"block_v": 64, "stages": 1}, "verify full", Failure("racy", "ragged-open: launch 2 of 8 gives another o"))
    with pytest.raises(EnvironmentUnsuitable, match="the default does not pass all checks: ragged-open"):
        run(PlantedMachine(planted=wrong), tmp_path, on_record=lambda record: pytest.fail("recorded"))
