"""Does each verb of qla-tune do what it says, and exit with the code that it says?"""

import dataclasses
import json
import re
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import records
import torch
import typer
from records import DEFAULT, H200, entry, negative, problem

from qla_jit import bundle, cli, device, doctor, enumeration, once, record_store, tuning_db
from qla_jit.bundle import Built
from qla_jit.cli import deployment, options
from qla_jit.device import GpuInfo
from qla_jit.doctor import Finding
from qla_jit.enumeration import Variants
from qla_jit.errors import EnvironmentUnsuitable
from qla_jit.models import ModelShape
from qla_jit.ops.plan import BACKWARD, FORWARD
from qla_jit.tune import report, session
from qla_jit.tune.session import Check, Event, ProblemResult, SessionResult, Verification
from qla_jit.tuning_records import Hardware, Rigor, Versions, load, save, save_directory

GPU = "sm_90a:132:60"
OTHER = records.record(problem=problem(H=16, HV=48))
STALE = records.record().provenance.model_copy(update={"versions": Versions(tilelang="0.0.1")})


@pytest.fixture(autouse=True)
def places(tmp_path, monkeypatch):
    """No records anywhere but under tmp_path, and an H200 as the GPU."""
    monkeypatch.setenv("QLA_JIT_CACHE_DIR", str(tmp_path / "cache"))
    for name in ("QLA_JIT_DB_PATH", "QLA_JIT_BUNDLE_PATH", "QLA_JIT_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(tuning_db, "__path__", [str(tmp_path / "shipped")])
    monkeypatch.setattr(options, "gpu_count", lambda: 1)
    monkeypatch.setattr(options, "gpu_info", lambda device: GpuInfo("NVIDIA H200", records.ARCH, H200.sm_count, H200.l2_bytes))
    once._said.clear()
    yield tmp_path
    record_store._open.cache_clear()


def kept():
    return record_store.user_records()


# tune


@dataclasses.dataclass
class FakeSession:
    """Stands for the tuner: hands over one record for each problem."""

    outcome: str = "complete"
    requests: list = dataclasses.field(default_factory=list)
    options: dict = dataclasses.field(default_factory=dict)

    def tune(self, request, *, on_event, on_record, **options):
        self.requests.append(request)
        self.options = options
        results = []
        for number, of in enumerate(request.problems):
            on_event(Event("race", str(of), "block 3", 3, 30))
            record = None
            if number == 0 or self.outcome == "complete":
                record = records.record(op=of.op, problem=records.Problem.of(of.facts), rigor=Rigor.CONFIRMED)
                on_record(record)
            results.append(ProblemResult(of, self.outcome if number else "complete", record, None, None, ""))
        machine = dataclasses.make_dataclass("Machine", H200.model_dump())(**H200.model_dump())
        return SessionResult(tuple(results), self.outcome, machine, 1.0)


@pytest.fixture
def fake(monkeypatch):
    fake = FakeSession()
    monkeypatch.setattr(session, "tune", fake.tune)
    return fake


def test_tune_by_heads_keeps_the_records_and_shows_a_table(run, fake):
    text = run("tune", "--heads", "2:8,4:16", "--dims", "128:128", "--lengths", "2048:8192", "--budget", "1h30m", "--resume")
    problems = fake.requests[0].problems
    assert [(p.facts.H, p.facts.HV, p.lengths, p.gates) for p in problems] == [
        (2, 8, ((2048,), (4096,), (8192,)), "mixed"), (4, 16, ((2048,), (4096,), (8192,)), "mixed"),
    ]
    assert fake.options == {"resume": True, "budget_seconds": 5400.0}
    assert sorted((r.problem.H, r.problem.HV) for r in kept()) == [(2, 8), (4, 16)]
    assert "race: 2:8 128:128 block 3" in text
    assert "1.250" in text
    assert "state_scan(block_v=128, threads=256)" in text


@pytest.mark.parametrize(("words", "op"), [((), FORWARD), (("--backward",), BACKWARD)], ids=["forward", "backward"])
def test_tune_is_about_gradients_where_asked(run, fake, words, op):
    text = run("tune", "--heads", "2:8", *words)
    assert [problem.op for problem in fake.requests[0].problems] == [op]
    assert ("2:8 128:128 backward  complete" in text) == (op == BACKWARD)
    assert [record.op for record in kept()] == [op]


def test_tune_by_model(run, fake):
    run("tune", "--model", "qwen3.5-27b", "--tp", 2, "--tp", 4, "--packed", "--dtype", "float16")
    assert [(p.facts.H, p.facts.HV, p.facts.varlen) for p in fake.requests[0].problems] == [(8, 24, True), (4, 12, True)]


def test_tune_by_workload_reports_the_confirmed_share(run, fake, places):
    (places / "host-1.json").write_text(json.dumps({
        "schema_version": 1,
        "calls": [
            {"problem": problem().model_dump(), "chunks": 64, "longest": 64, "sequences": 1, "count": 3},
            {"problem": problem().model_dump(), "chunks": 4096, "longest": 4096, "sequences": 1, "count": 1},
        ],
    }))
    assert run("tune", "--workload", places / "host-1.json", "--json")["confirmed_share"] == 0.75
    assert fake.requests[0].problems[0].lengths == ((4096 * 64,), (64 * 64,))


def test_the_confirmed_share_of_gradients_is_that_of_their_records(run, fake, places):
    calls = {"problem": problem(chunk_size=32).model_dump(), "chunks": 128, "longest": 128, "sequences": 1, "count": 3}
    (places / "host-1.json").write_text(json.dumps({"schema_version": 1, "calls": [calls]}))
    words = ("tune", "--workload", places / "host-1.json", "--backward", "--json")
    record_store.save_user_records([records.record(rigor=Rigor.CONFIRMED)])
    assert run(*words)["confirmed_share"] == 0
    record_store.save_user_records([records.record(op=BACKWARD, rigor=Rigor.CONFIRMED)])         # in chunks of 64
    assert run(*words)["confirmed_share"] == 1


def test_tune_writes_its_report(run, fake, places, monkeypatch):
    monkeypatch.setattr(report, "html", lambda result: f"<p>{result.outcome}</p>")
    run("tune", "--heads", "2:8", "--report", places / "out.html")
    assert (places / "out.html").read_text() == "<p>complete</p>"
    run("tune", "--heads", "2:8", "--report", places / "missing" / "out.html", code=2)
    assert len(fake.requests) == 1               # before hours of work, not after


def test_records_name_the_command_without_the_paths_of_this_machine(run, fake, places):
    (places / "counts.json").write_text('{"schema_version": 1, "calls": []}')
    run("tune", "--heads", "2:8", "--lengths", "4096")
    assert fake.requests[0].command == "qla-tune tune --heads 2:8 --lengths 4096"


@pytest.mark.parametrize(("outcome", "code"), [("complete", 0), ("failed", 3), ("budget spent", 3), ("interrupted", 130)])
def test_tune_exits_by_its_outcome_and_keeps_what_was_ready(run, fake, outcome, code):
    fake.outcome = outcome
    told = run("tune", "--heads", "2:8,4:16", "--json", code=code)
    assert told["outcome"] == outcome
    assert len(kept()) == (2 if outcome == "complete" else 1)


@pytest.mark.parametrize(
    "words",
    [
        (), ("--heads", "2:8", "--model", "qwen3.5-27b"), ("--tp", "2"), ("--heads", "two"), ("--heads", "3:8"),
        ("--dims", "128:128"), ("--model", "gpt"), ("--model", "olmo-hybrid", "--tp", "4"),
        ("--heads", "2:8", "--budget", "soon"), ("--heads", "2:8", "--dtype", "float32"),
        ("--heads", "2:8", "--lengths", "1+2"), ("--finalists", "1"), ("--nonsense",),
    ],
    ids=" ".join,
)
def test_tune_with_options_that_make_no_sense(run, fake, words):
    run("tune", *words, code=2)
    assert fake.requests == []


def test_an_unsuitable_machine_exits_with_its_reason(run, monkeypatch):
    def refuse(*_, **__):
        raise EnvironmentUnsuitable("another tuner is on the GPU")

    monkeypatch.setattr(session, "tune", refuse)
    assert "another tuner" in run("tune", "--heads", "2:8", code=5)


def test_ctrl_c_exits_with_130(run, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(session, "tune", interrupt)
    run("tune", "--heads", "2:8", code=130)


# show and explain


def test_show_lists_every_layer_and_filters(run, places):
    save_directory(places / "shipped", [OTHER])
    record_store.save_user_records([records.record(provenance=STALE)])
    rows = run("show", "--json")
    assert [(row["layer"], row["heads"], row["gpu"], row["speedup"]) for row in rows] == [
        ("user", "2:8", GPU, "1.250"), ("shipped", "16:48", GPU, "1.250"),
    ]
    assert "tilelang 0.0.1 ->" in rows[0]["stale"]
    assert [row["heads"] for row in run("show", "--json", "--heads", "16:48")] == ["16:48"]
    assert run("show", "--json", "--layer", "directory") == []
    assert "16:48" in run("show")


def test_show_lists_both_operations(run):
    record_store.save_user_records([records.record(op=op) for op in (FORWARD, BACKWARD)])
    assert sorted(row["op"] for row in run("show", "--json")) == [BACKWARD, FORWARD]
    assert re.search(r"layer +op +gpu", text := run("show"))
    assert re.search(r"user +gdn_backward +sm_90a", text)


def test_show_tells_the_gain_at_the_sizes_where_there_is_one(run):
    record_store.save_user_records([records.record(times=(100.0, 400.0), wide=(125.0, 320.0))])
    (row,) = run("show", "--json")
    assert row["speedup"] == f"{1.25**0.5:.3f}"
    assert row["config"].endswith(", at 1 of 2 sizes")


def test_show_curves_has_the_times_and_what_was_thrown_out(run):
    record_store.save_user_records([records.record(negatives=(negative(),))])
    text = run("show", "--curves")
    assert "320.0" in text
    assert "1.250 [1.238, 1.262]" in text
    assert "thrown out, racy: chunked state_scan(block_v=32): launch 3 differed" in text
    assert run("show", "--curves", "--json")[0]["record"]["rigor"] == "raced"


def test_explain_says_what_answers_and_what_else_there_was(run):
    record_store.save_user_records([records.record(provenance=STALE)])
    told = run("explain", "--heads", "2:8", "--lengths", "4096", "--gpu", GPU, "--json")
    answer = told["answer"]
    assert (answer["source"], answer["match"], answer["rigor"]) == ("user", "interpolated", "raced")
    assert answer["configs"]["state_scan"]["block_v"] == 128
    assert answer["stale"][0].startswith("tilelang 0.0.1 ->")
    assert [(way["config"], way["chosen"]) for way in told["asked"][0]["ways"]] == [
        ("default", False), ("chunked state_scan(block_v=128, threads=256)", True),
    ]
    text = run("explain", "--heads", "2:8", "--lengths", "4096")         # on the GPU that is here
    assert "answer: user, match interpolated, rigor raced, expected regret 0.0%" in text
    assert "-> " in text


def test_explain_names_the_nearest_record_and_the_command_on_a_miss(run):
    record_store.save_user_records([records.record(), OTHER])
    told = run("explain", "--heads", "2:8", "--lengths", "4096", "--gpu", "sm_90a:78:60", "--json")
    assert told["answer"]["source"] == "default"
    assert told["nearest"]["differs_in"] == ["sm_count (132 there, 78 asked)"]
    assert told["command"] == "qla-tune tune --heads 2:8 --dims 128:128 --lengths 4096"
    text = run("explain", "--heads", "2:8", "--lengths", "4096", "--gpu", "sm_90a:78:60")
    assert "nearest record, user: differs in sm_count" in text
    assert text.rstrip().endswith(told["command"])


def test_explain_is_about_gradients_where_asked(run):
    record_store.save_user_records([records.record(), records.record(op=BACKWARD)])
    told = run("explain", "--heads", "2:8", "--lengths", "4096", "--backward", "--chunk-size", 16, "--json")
    assert told["call"].startswith("gdn_backward 2:8 128:128 bfloat16 C64 on")
    assert told["extents"] == {"chunks": 64, "longest": 64, "sequences": 1}
    answer = told["answer"]
    assert (answer["source"], answer["match"], answer["strategy"]) == ("user", "interpolated", "chunked")
    assert answer["configs"]["state_scan"]["block_v"] == 128
    assert "state_gradient_scan" in answer["configs"]
    run("explain", "--heads", "2:8", "--lengths", "4096", "--backward", "--require", "raced")


def test_explain_names_the_nearest_record_of_the_operation(run):
    record_store.save_user_records([records.record(), records.record(op=BACKWARD, problem=problem(H=16, HV=48))])
    told = run("explain", "--heads", "2:8", "--lengths", "4096", "--backward", "--json")
    assert told["nearest"]["differs_in"] == ["H (16 there, 2 asked)", "HV (48 there, 8 asked)"]
    assert told["command"] == "qla-tune tune --heads 2:8 --dims 128:128 --backward --lengths 4096"


def test_explain_says_when_the_sizes_are_outside(run):
    record_store.save_user_records([records.record()])
    assert "the sizes are outside of what was measured" in run("explain", "--heads", "2:8", "--lengths", "65536")


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("--require", "raced"), 0), (("--require", "confirmed"), 8), (("--require", "raced", "--lengths", "65536"), 8),
        (("--lengths", "1:8"), 2), (("--gpu", "sm_90a"), 2), (("--gpu", "sm_1:132:60"), 2), (("--device", "1"), 5),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else str(value),
)
def test_explain_exits_with(run, words, code):
    record_store.save_user_records([records.record()])
    run("explain", "--heads", "2:8", *words, code=code)


# verify and check


def test_verify_looks_at_the_records_of_this_gpu_and_fails_with_the_reason(run, monkeypatch):
    elsewhere = records.record(hardware=Hardware(arch="sm_90a", sm_count=78, l2_bytes=60 << 20))
    record_store.save_user_records([records.record(), elsewhere])
    seen = []

    def verify_records(of, *, device, on_event):
        seen.extend(of)
        return [Verification(of[0], e.candidate, failure) for e, failure in zip(of[0].entries, failures, strict=True)]

    monkeypatch.setattr(session, "verify_records", verify_records)
    failures = (None, None)
    run("verify")
    failures = (None, "racy: launch 3 differed")
    assert [row["result"] for row in run("verify", "--json", code=4)] == ["passed", "racy: launch 3 differed"]
    assert seen == [records.record()] * 2
    run("verify", "--heads", "32:32", code=8)


def test_check_times_stale_records_first_and_exits_with_7_on_a_regression(run, monkeypatch):
    record_store.save_user_records([records.record(), records.record(problem=problem(HV=16), provenance=STALE)])
    asked = []

    def check_records(of, *, device, points, on_event):
        asked.append(([r.problem.HV for r in of], points))
        return [Check(of[0], "2:16 at 4096: 0.91x", regressed)]

    monkeypatch.setattr(session, "check_records", check_records)
    regressed = False
    run("check")
    regressed = True
    assert run("check", "--records", 1, "--points", 2, "--json", code=7)[0]["regressed"]
    assert asked == [([16, 8], None), ([16], 2)]


# Moving records


def test_export_and_import_bring_records_from_one_cache_to_another(run, places, monkeypatch):
    record_store.save_user_records([records.record(), OTHER])
    run("export", places / "out")
    assert load(places / "out" / "gdn_forward.sm_90a.json") == [records.record(), OTHER]
    monkeypatch.setenv("QLA_JIT_CACHE_DIR", str(places / "other"))
    assert run("import", places / "out", "--json") == {"read": 2, "taken": 2}
    assert len(kept()) == 2
    run("export", places / "one.json", "--heads", "16:48")
    assert load(places / "one.json") == [OTHER]


def test_export_of_nothing_is_a_miss(run, places):
    run("export", places / "out", code=8)
    assert not (places / "out").exists()


def test_import_takes_all_or_nothing(run, places):
    save(places / "a.json", [records.record()])
    (places / "b.json").write_text('{"schema_version": 1, "records": [{}]}')
    assert "b.json" in run("import", places / "a.json", places / "b.json", code=6)
    assert kept() == []


@pytest.mark.parametrize(("prefer", "taken"), [("rigor", 0), ("newest", 1), ("ours", 0)])
def test_import_keeps_what_is_preferred(run, places, prefer, taken):
    record_store.save_user_records([records.record(rigor=Rigor.CONFIRMED)])
    save(places / "a.json", [records.record(days=1)])
    assert run("import", places / "a.json", "--prefer", prefer, "--json") == {"read": 1, "taken": taken}
    assert [r.rigor for r in kept()] == [Rigor.RACED if taken else Rigor.CONFIRMED]


def test_merge_and_diff(run, places):
    save(places / "a.json", [records.record()])
    save(places / "b.json", [records.record(rigor=Rigor.CONFIRMED), OTHER])
    run("merge", places / "a.json", places / "b.json", "--out", places / "merged.json")
    assert load(places / "merged.json") == [records.record(rigor=Rigor.CONFIRMED), OTHER]
    assert [(row["kind"], row["fields"]) for row in run("diff", places / "a.json", places / "merged.json", "--json")] == [
        ("changed", "rigor: raced -> confirmed"), ("added", ""),
    ]
    assert "changed" in run("diff", places / "a.json", places / "merged.json")
    run("merge", places / "a.json", places / "missing.json", "--out", places / "x.json", code=6)
    run("merge", places / "a.json", "--out", places / "a.json" / "x.json", code=5)


@pytest.mark.parametrize(
    ("words", "left"),
    [
        ((), [8, 16, 48]), (("--stale",), [8, 48]), (("--below", "confirmed"), [48]), (("--all", "--heads", "2:8"), [16, 48]),
        (("--all",), []), (("--all", "--dry-run"), [8, 16, 48]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_prune_removes_what_its_options_name(run, words, left):
    record_store.save_user_records([
        records.record(), records.record(problem=problem(HV=16), provenance=STALE),
        records.record(problem=problem(H=16, HV=48), rigor=Rigor.CONFIRMED),
    ])
    told = run("prune", *words, "--json")
    assert sorted(r.problem.HV for r in kept()) == left
    assert len(told["removed"]) == (3 if told["dry_run"] else 3 - len(left))


@pytest.mark.parametrize("verb", ["verify", "check"])
def test_records_of_both_operations_are_looked_at_and_unknown_ones_are_not(run, monkeypatch, verb):
    record_store.save_user_records([records.record(op=op) for op in (FORWARD, BACKWARD, "gdn_decode")])
    seen = []
    monkeypatch.setattr(session, f"{verb}_records", lambda of, **options: seen.extend(of) or [])
    run(verb)
    assert {record.op for record in seen} == {FORWARD, BACKWARD}


def test_both_operations_go_into_files_of_their_own_and_back(run, places):
    record_store.save_user_records([records.record(op=op) for op in (FORWARD, BACKWARD)])
    run("export", places / "out")
    assert {path.name for path in (places / "out").iterdir()} == {"gdn_forward.sm_90a.json", "gdn_backward.sm_90a.json"}
    ours = places / "out" / "gdn_forward.sm_90a.json"
    assert [row["kind"] for row in run("diff", ours, places / "out", "--json")] == ["added"]
    run("merge", ours, places / "out", "--out", places / "merged")
    assert {record.op for path in (places / "merged").iterdir() for record in load(path)} == {FORWARD, BACKWARD}
    run("prune", "--all")
    assert run("import", places / "merged", "--json") == {"read": 2, "taken": 2}


def test_prune_leaves_shipped_records_alone(run, places):
    save_directory(places / "shipped", [OTHER])
    run("prune", "--all")
    assert [s.record for s in record_store.everything()] == [OTHER]


# build


@pytest.fixture
def bundles(monkeypatch):
    """Stands for the compiler: the requests of each bundle, and one failure for each in `failures`."""
    fake = SimpleNamespace(requests=[], failures=())

    def build(requests, directory, *, on_kernel):
        on_kernel(1, len(requests))
        fake.requests.append(requests)
        return Built(len(requests), 1000, 2.5, fake.failures)

    monkeypatch.setattr(bundle, "build", build)
    return fake


GPU_OPTIONS = ("--arch", "sm_90a", "--sm-count", 132)


def test_build_compiles_the_kernels_of_a_model_and_shows_a_table(run, bundles, places):
    text = run("build", *GPU_OPTIONS, "--model", "qwen3.5-27b", "--tp", 2, "--tp", 4, "--out", places / "out")
    assert [{request.problem.HV for request in requests if hasattr(request.problem, "HV")} for requests in bundles.requests] == [
        {24}, {12},
    ]
    assert re.search(r"problem +kernels +bytes +seconds\n8:24 128:128 +\d+ +1000 +2.5\n4:12 128:128", text)
    assert f"compile: 8:24 128:128 1 of {len(bundles.requests[0])} kernels" in text


@pytest.mark.parametrize(
    ("options", "variants"),
    [
        ((), Variants()),
        (("--packed", "--index-dtype", "int32"), Variants(packed=True, index_dtypes=(torch.int32,))),
        (("--not-packed", "--initial-state", "--no-final-state"),
         Variants(packed=False, initial_state=True, output_final_state=False)),
        (("--state-dtype", "bfloat16", "--state-v-first"), Variants(state_dtype=torch.bfloat16, state_v_first=True)),
        (("--gate-in-kernel", "--no-dt-bias", "--gate-dtype", "bfloat16"),
         Variants(use_gate_in_kernel=True, dt_bias=False, g_dtype=torch.bfloat16)),
        (("--beta-sigmoid", "--neg-eigval", "--beta-dtype", "float16"),
         Variants(use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True, beta_dtype=torch.float16)),
        (("--backward",), Variants(backward=True)),
        (("--no-l2norm", "--dtype", "float16", "--chunk-size", 32),
         Variants(use_qk_l2norm_in_kernel=False, dtype=torch.float16, chunk_size=32)),
    ],
    ids=lambda value: " ".join(map(str, value)) or "default" if isinstance(value, tuple) else "",
)
def test_build_takes_the_variants_of_calls_as_options(run, bundles, places, options, variants):
    run("build", *GPU_OPTIONS, "--heads", "2:8", "--out", places / "out", *options)
    assert bundles.requests == [enumeration.kernels(ModelShape(2, 8, 128, 128), variants, records.ARCH, [])]


@pytest.mark.parametrize(
    ("options", "counted"),
    [(GPU_OPTIONS, True), ((*GPU_OPTIONS, "--l2-mib", 60), True), ((*GPU_OPTIONS, "--l2-mib", 50), False),
     (("--arch", "sm_90a", "--sm-count", 114), False)],
    ids=lambda value: " ".join(map(str, value[2:])) if isinstance(value, tuple) else "",
)
def test_build_adds_what_the_records_of_that_gpu_name(run, bundles, places, options, counted):
    record_store.save_user_records([records.record()])
    run("build", *options, "--heads", "2:8", "--not-packed", "--out", places / "out")
    blocks = {request.config.block_v for request in bundles.requests[0] if request.template.name == "state_scan"}
    assert blocks == ({128} if counted else set())


@pytest.mark.parametrize(
    ("words", "ops"),
    [((), {FORWARD}), (("--backward",), {FORWARD, BACKWARD}), (("--backward", "--chunk-size", 16), {BACKWARD})],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, tuple) else "",
)
def test_a_bundle_has_the_records_of_gradients_where_it_is_for_gradients(run, bundles, places, words, ops):
    record_store.save_user_records([records.record(), records.record(op=BACKWARD)])
    told = run("build", *GPU_OPTIONS, "--heads", "2:8", "--not-packed", "--out", places / "out", "--json", *words)
    shipped = {record.op for path in (places / "out" / "records").glob("*.json") for record in load(path)}
    assert (told["records"], shipped) == (len(ops), ops)


def test_build_tells_what_did_not_compile_and_exits_with_3(run, bundles, places):
    bundles.failures = ("state_scan for sm_90a did not compile: exit status 1",)
    told = run("build", *GPU_OPTIONS, "--heads", "2:8", "--out", places / "out", "--json", code=3)
    assert told["directory"] == str(places / "out")
    assert told["problems"][0]["problem"] == "2:8 128:128"
    assert told["problems"][0]["failures"] == list(bundles.failures)


def options_of(command):
    """Of a verb, or of all in a group."""
    names = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    return names.union(*map(options_of, getattr(command, "commands", {}).values()))


def test_the_page_for_operators_is_right_about_the_options_and_the_kernels_that_they_make(run, bundles, places):
    page = (Path(__file__).resolve().parents[2] / "docs" / "deployment.md").read_text()
    options = options_of(typer.main.get_command(cli.app))
    ours = "\n".join(line for line in page.splitlines() if not re.search(r"SBATCH|srun|COPY --from|--read-only --user", line))
    assert set(re.findall(r"(?<![\w-])--[a-z][\w-]*", ours)) <= options
    told = re.search(r"default\nis (\d+) kernels, (\d+) with gradients, .* is (\d+)\.", page, re.DOTALL)
    build = ["build", *GPU_OPTIONS, "--model", "qwen3.5-27b", "--tp", "2", "--out", places / "out"]
    for more in ([], ["--backward"], re.search(r"`(--packed .*?)`, as an inference", page)[1].split()):
        run(*build, *more)
    assert [len(requests) for requests in bundles.requests] == [int(count) for count in told.groups()]


@pytest.mark.parametrize(
    "words",
    [
        ("--arch", "sm_91", "--sm-count", 132, "--heads", "2:8"), GPU_OPTIONS, (*GPU_OPTIONS, "--heads", "2:8", "--tp", 2),
        (*GPU_OPTIONS, "--heads", "2:8", "--dtype", "float32"), (*GPU_OPTIONS, "--heads", "2:8", "--index-dtype", "int16"),
        (*GPU_OPTIONS, "--heads", "2:8", "--neg-eigval"), (*GPU_OPTIONS, "--heads", "2:8", "--dims", "100:128"),
        (*GPU_OPTIONS, "--heads", "3:8"), (*GPU_OPTIONS, "--heads", "2:8", "--sm-count", 0),
    ],
    ids=lambda words: " ".join(map(str, words)),
)
def test_build_refuses_what_it_cannot_build(run, bundles, places, words):
    run("build", *words, "--out", places / "out", code=2)
    assert bundles.requests == []


# doctor


@pytest.mark.parametrize(("status", "code"), [("ok", 0), ("warning", 0), ("failed", 5)])
def test_doctor_fails_if_a_check_does(run, monkeypatch, status, code):
    monkeypatch.setattr(deployment, "examine", lambda: [Finding("nvcc", status, "not found", "install it")])
    assert "install it" in run("doctor", code=code)


def test_doctor_tells_of_a_damaged_record_file_and_of_a_bad_cache_directory(places, monkeypatch):
    (places / "shipped").mkdir()
    (places / "shipped" / "gdn_forward.sm_90a.json").write_text("{")
    (places / "cache").mkdir()
    (places / "cache").chmod(0o777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(places / "home"))
    monkeypatch.setattr(doctor, "_run", lambda *_, **__: (_ for _ in ()).throw(TimeoutError("hangs")))
    findings = {finding.check: finding for finding in doctor.examine()}
    assert (findings["records"].status, findings["cache directory"].status) == ("failed", "warning")
    assert "gdn_forward.sm_90a.json" in findings["records"].found
    assert "can be written by others" in findings["cache directory"].found
    assert (findings["tilelang"].status, findings["tilelang"].found) == ("failed", "TimeoutError: hangs")


@pytest.mark.parametrize(("mode", "status"), [("lookup", "failed"), ("require", "ok")])
def test_doctor_misses_nvcc_only_where_kernels_may_be_compiled(monkeypatch, mode, status):
    monkeypatch.setenv("QLA_JIT_MODE", mode)
    monkeypatch.setattr(doctor.compiler, "find_nvcc", lambda: None)
    assert doctor._nvcc("nvcc").status == status


@pytest.mark.parametrize(
    ("version", "status"), [("0.1.15", "ok"), ("0.1.15.post1", "ok"), ("0.1.14", "warning"), ("0.2.0", "warning")]
)
def test_doctor_warns_of_versions_that_were_not_tested(monkeypatch, version, status):
    monkeypatch.setattr(doctor.Versions, "here", lambda: Versions(tilelang=version, torch="2.13.1+cpu", cuda="13.0.88"))
    assert doctor._versions("versions").status == status


def commands():
    """The verbs by name, those of a group as in "cache ls"."""
    named = {command.name: command for command in cli.app.registered_commands}
    for group in cli.app.registered_groups:
        named |= {f"{group.name} {command.name}": command for command in group.typer_instance.registered_commands}
    return named


def test_every_verb_can_print_json():
    for name, command in commands().items():
        assert "as_json" in command.callback.__wrapped__.__annotations__, name


def test_the_documentation_has_every_verb_and_exit_code():
    page = (Path(__file__).resolve().parents[2] / "docs" / "tuning.md").read_text()
    rows = [line.split("|")[1].strip() for line in page.splitlines() if line.startswith("| ")]
    documented = [name for row in rows if row.startswith("`") for name in re.findall(r"`([\w ]+)`", row)]
    assert sorted(documented) == sorted(commands())
    assert [int(row) for row in rows if row.isdigit()] == list(cli.ExitCode)


def test_no_gpu_is_asked_for_a_list(run, monkeypatch):
    monkeypatch.setattr(device, "_gpu_info", lambda index: pytest.fail("a GPU was asked"))
    record_store.save_user_records([records.record(entries=(entry(DEFAULT, 1.0, 2.0),))])
    assert run("show", "--json")[0]["config"] == "default"
