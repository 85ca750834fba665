"""Do the benchmarks keep their books: what is measured, what is merged, where a run stops, what is published?"""

import json

import pytest
import torch
from scripts import ROOT, script

fill_numbers, forward, results, systems, timing, workload = map(
    script, ("fill_numbers", "forward", "results", "systems", "timing", "workload")
)
Row = workload.Row
ROW, OTHER_ROW = Row(2, 8, (2048,)), Row(16, 64, (4096,) * 8)


def measured(ms, **peers):
    """What measure_row returns: qla_jit's time, and other systems' times or reasons."""
    error = {"o": 4e-3, "state": 3e-3}
    found = {"qla_jit": {"ms": ms, "rel_l2": error, "strategy": "chunked"}}
    return found | {name: {"ms": p, "rel_l2": error} if isinstance(p, float) else {"failed": p} for name, p in peers.items()}


def document(*rows, commit="abc"):
    made = {"gpu": "NVIDIA H200", "versions": {"torch": "2.13.0"}, "commit": commit, "date": "2026-12-01T10:00Z",
            "protocol": "as timed", "rows": []}
    for row, found in rows:
        results.merge_row(made, row, measured=found, commit=commit, date=made["date"])
    return made


class FakeClock:
    def __init__(self):
        self.seconds = 0.0

    def __call__(self):
        return self.seconds


def test_the_table_has_five_head_pairs_by_seven_sequence_sets_and_the_full_one_nine_by_nineteen():
    assert len(workload.ROWS) == len(set(workload.ROWS)) == 35
    assert len(workload.ALL_ROWS) == len(set(workload.ALL_ROWS)) == 171
    assert set(workload.ROWS) <= set(workload.ALL_ROWS)
    assert [system.name for system in systems.SYSTEMS] == ["qla_jit", "flash_qla", "flashinfer", "flashinfer_cp", "fla"]


@pytest.mark.parametrize(
    ("seqlens", "name"),
    [((32768,), "32768"), ((16384,) * 2, "16384x2"), ((1024, 7168), "1024+7168"), ((8, 8, 1, 8), "8x2+1+8")],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_lengths_have_short_names(seqlens, name):
    assert workload.lengths_name(seqlens) == name


def test_inputs_have_the_documented_shapes_and_gates():
    x = workload.make_inputs(Row(2, 8, (60, 4)), device="cpu")
    assert x.q.shape == x.k.shape == (1, 64, 2, 128)
    assert x.v.shape == (1, 64, 8, 128)
    assert x.initial_state.shape == (2, 8, 128, 128)
    assert x.cu_seqlens.tolist() == x.cu_seqlens_cpu.tolist() == [0, 60, 64]
    assert (x.g <= 0).all()


@pytest.mark.parametrize(
    ("gates", "never_decay"), [("mixed", [False, False, False, True] * 2), ("open", [True] * 8), ("decaying", [False] * 8)]
)
def test_a_table_says_which_heads_never_decay(gates, never_decay):
    assert set(workload.GATES) == {"mixed", "open", "decaying"}
    [row] = forward.forward_options(["--gates", gates, "--rows", "2,8:2048"]).rows
    assert ((workload.make_inputs(row, device="cpu").g == 0).all(dim=1)[0]).tolist() == never_decay


def test_rotated_inputs_differ_fill_the_cache_and_share_their_lengths():
    row = Row(2, 8, (64,))
    one = workload.make_inputs(row, device="cpu").bytes
    sets = workload.rotated_inputs(row, device="cpu", bytes_at_least=2 * one + 1)
    assert len(sets) == 3
    assert not torch.equal(sets[0].q, sets[1].q)
    assert all(x.cu_seqlens is sets[0].cu_seqlens for x in sets)


def test_a_later_run_of_one_system_keeps_the_numbers_of_the_others():
    book = document((ROW, measured(0.07, fla=0.082, flash_qla=0.071)))
    results.merge_row(book, ROW, measured=measured(0.05), commit="def", date="2026-12-02T10:00Z")
    (entry,) = book["rows"]
    assert entry["ms"] == {"qla_jit": 0.05, "fla": 0.082, "flash_qla": 0.071}
    commits = {system: run["commit"] for system, run in entry["measured"].items()}
    assert commits == {"qla_jit": "def", "fla": "abc", "flash_qla": "abc"}


def test_a_failure_replaces_the_time_and_a_time_the_failure():
    book = document((ROW, measured(0.07, flashinfer_cp=0.06)))
    results.merge_row(book, ROW, measured=measured(0.07, flashinfer_cp="ValueError: no"), commit="abc", date="d")
    assert book["rows"][0]["failed"] == {"flashinfer_cp": "ValueError: no"}
    assert "flashinfer_cp" not in book["rows"][0]["ms"]
    results.merge_row(book, ROW, measured=measured(0.07, flashinfer_cp=0.06), commit="abc", date="d")
    assert book["rows"][0]["failed"] == {}
    assert book["rows"][0]["ms"]["flashinfer_cp"] == 0.06


def test_rows_stand_in_the_order_of_the_table():
    book = document((OTHER_ROW, measured(0.8)), (ROW, measured(0.07)))
    assert [(entry["H"], entry["HV"]) for entry in book["rows"]] == [(2, 8), (16, 64)]


@pytest.mark.parametrize(
    ("commit", "asked", "done"),
    [("abc", ["qla_jit"], True), ("abc", ["qla_jit", "fla"], False), ("def", ["qla_jit"], False),
     ("abc-dirty", ["qla_jit"], False), ("unknown", ["qla_jit"], False)],
    ids=lambda value: "+".join(value) if isinstance(value, list) else str(value),
)
def test_a_row_is_done_when_this_very_commit_measured_every_system(commit, asked, done):
    book = document((ROW, measured(0.07)), commit="abc" if commit == "def" else commit)
    assert results.is_done(book, ROW, asked, commit=commit) is done


def test_saving_leaves_one_whole_file(tmp_path):
    path = tmp_path / "h200" / "forward.json"
    book = document((ROW, measured(0.07)))
    results.save(path, book)
    assert results.load(path) == book
    assert [p.name for p in path.parent.iterdir()] == ["forward.json"]


def test_a_budget_stops_before_the_row_that_would_exceed_it_and_a_second_run_goes_on_there(tmp_path):
    rows, path, clock = workload.ROWS[:6], tmp_path / "forward.json", FakeClock()
    measured_rows = []

    def measure(row):
        clock.seconds += 10
        measured_rows.append(row)
        return measured(0.1)

    def one_run(seconds):
        book = document() | {"rows": results.load(path)["rows"]}
        return forward.run(
            rows, book, systems=["qla_jit"], measure=measure, save=lambda: results.save(path, book),
            budget=timing.Budget(seconds, now=clock),
        )

    assert one_run(25) == list(rows[2:])         # a third row of 10 s would end at 30 s
    assert len(results.load(path)["rows"]) == 2
    assert one_run(None) == []
    assert measured_rows == list(rows)


def test_a_budget_that_ends_inside_of_a_row_drops_that_row_only():
    clock = FakeClock()
    budget = timing.Budget(25, now=clock)

    def measure(row):
        for _ in range(2):
            budget.require()
            clock.seconds += 8 if row == workload.ROWS[0] else 20
        return measured(0.1)

    book = document()
    missing = forward.run(workload.ROWS[:3], book, systems=["qla_jit"], measure=measure, save=lambda: None, budget=budget)
    assert missing == list(workload.ROWS[1:3])
    assert len(book["rows"]) == 1


def test_what_was_measured_before_a_crash_is_in_the_file(tmp_path):
    path, book = tmp_path / "forward.json", document()

    def measure(row):
        if row == workload.ROWS[1]:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return measured(0.1)

    with pytest.raises(RuntimeError, match="illegal memory access"):
        forward.run(
            workload.ROWS[:3], book, systems=["qla_jit"], measure=measure, save=lambda: results.save(path, book),
            budget=timing.Budget(None),
        )
    assert len(results.load(path)["rows"]) == 1


def test_each_system_is_held_against_float64_and_one_that_cannot_is_recorded(monkeypatch):
    # The GPU's part is replaced, so that the rest of measure_row runs here: inputs, oracle, errors, what is reported.
    def rounded(x):
        o, state = forward.float64_result(x)
        return lambda: (o.bfloat16(), state.float())

    def refused(x):
        raise ValueError("K must be 64")

    monkeypatch.setattr(forward, "rotated_inputs", lambda row, **_: [workload.make_inputs(row, device="cpu")])
    monkeypatch.setattr(forward, "graph_of", lambda calls: (len(calls), 5))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: type("", (), {"L2_cache_size": 1}))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    prepare = {"fla": rounded, "flashinfer_cp": refused}
    columns = [systems.System(name, "torch", "torch", prepare[name]) for name in prepare]
    times = lambda graphs: dict.fromkeys(graphs, 0.25)  # noqa: E731
    found = forward.measure_row(Row(1, 2, (65, 3)), columns, timing.Budget(None), times)
    assert found["fla"]["ms"] == 0.25
    assert 1e-4 < found["fla"]["rel_l2"]["o"] < 4e-3
    assert found["fla"]["rel_l2"]["state"] < 1e-6
    assert found["flashinfer_cp"] == {"failed": "ValueError: K must be 64"}


def test_an_error_state_of_the_gpu_ends_the_run(monkeypatch):
    def broken(x):
        raise RuntimeError("CUDA error")

    def synchronize():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(forward, "rotated_inputs", lambda row, **_: [workload.make_inputs(row, device="cpu")])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: type("", (), {"L2_cache_size": 1}))
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        forward.measure_row(Row(1, 1, (3,)), [systems.System("fla", "torch", "torch", broken)], timing.Budget(None))


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_without_a_gpu_the_forward_benchmark_says_so(tmp_path):
    with pytest.raises(SystemExit, match="torch sees none"):
        forward.main(["--out", str(tmp_path / "forward.json")])


def test_numbers_of_two_gpus_do_not_mix(tmp_path, monkeypatch):
    path = tmp_path / "forward.json"
    results.save(path, document((ROW, measured(0.07))))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 PCIe")
    with pytest.raises(SystemExit, match="another GPU, NVIDIA H200"):
        forward.main(["--out", str(path)])
    assert results.default_path("forward.json") == results.RESULTS / "h100_pcie" / "forward.json"


def test_rows_of_other_head_dims_have_a_table_of_their_own():
    options = forward.forward_options(["--other-dims", "--rows", "30,30,96,192:2048", "6,6,256,512:*"])
    first, *others = options.rows
    assert (options.table, first.name, len(others)) == ("forward_dims", "30,30,96,192:2048", len(workload.SEQUENCE_SETS))
    x = workload.make_inputs(first, device="cpu")
    assert (x.q.shape[2:], x.v.shape[2:], x.initial_state.shape[1:]) == ((30, 96), (30, 192), (30, 96, 192))
    assert forward.forward_options([]).table == "forward"


def test_times_of_a_cool_gpu_have_a_table_of_their_own():
    options = forward.forward_options(["--cool"])
    assert options.table == "forward_cool"
    assert options.rows == list(workload.ROWS)


def test_each_cool_replay_comes_after_a_pause(monkeypatch):
    pauses = []
    graph = type("", (), {"replay": lambda self: None})()
    event = type("", (), {"record": lambda self: None, "elapsed_time": lambda self, end: 10.0})
    monkeypatch.setattr(timing.time, "sleep", pauses.append)
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: event())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert timing.cool_ms({"one": (graph, 5), "other": (graph, 4)}) == {"one": 2.0, "other": 2.5}
    assert pauses == [timing.PAUSE_SECONDS] * 2 * (timing.COOL_REPLAYS + 1)


def test_head_dims_tell_rows_apart():
    usual, other = Row(6, 6, (2048,)), Row(6, 6, (2048,), K=256, V=512)
    made = document((usual, measured(1.0)), (other, measured(2.0)))
    assert [results.find_row(made, row)["ms"] for row in (usual, other)] == [{"qla_jit": 1.0}, {"qla_jit": 2.0}]
    assert [results.row_of(entry) for entry in made["rows"]] == [other, usual]               # in the order of the table
    lines = fill_numbers.forward_table(made).splitlines()
    assert lines[2].startswith("| 6, 6, 256, 512 | 2048 | 2.000 |")
    assert lines[3].startswith("| 6, 6 | 2048 | 1.000 |")


def test_a_row_pattern_that_matches_nothing_is_an_error(capsys):
    with pytest.raises(SystemExit):
        forward.forward_options(["--rows", "3,9:*"])
    assert "matches none of" in capsys.readouterr().err


def test_only_qla_jit_names_one_system():
    assert forward.forward_options(["--only-qla-jit"]).systems == ["qla_jit"]


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda book: book.pop("gpu"), "gpu is missing"),
        (lambda book: book["rows"][0]["ms"].pop("qla_jit"), "no time of qla_jit"),
        (lambda book: book["rows"][0]["rel_l2"].update(o=float("nan")), "not a finite number"),
        (lambda book: book["rows"][0]["ms"].update(fla=0.0), "fla took 0.0 ms"),
        (lambda book: book["rows"][0]["ms"].update(other=1.0), "unknown systems"),
    ],
    ids=["no-gpu", "no-time", "nan", "zero-time", "unknown-system"],
)
def test_a_document_that_may_not_be_published_is_recognised(spoil, problem):
    book = document((ROW, measured(0.07, fla=0.082)))
    assert results.problems(book) == []
    spoil(book)
    (found,) = results.problems(book)
    assert problem in found


PUBLISHED = sorted((ROOT / "benchmarks" / "results").glob("*/*ward.json"))


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_the_published_documents_are_sound(path):
    assert results.problems(json.loads(path.read_text())) == []


def test_the_summary_compares_with_the_fastest_other_library():
    book = document((ROW, measured(0.05, fla=0.082, flash_qla=0.06)), (OTHER_ROW, measured(0.8)))
    summary = fill_numbers.summary("forward", book)
    assert "0.050 (1.20x)" in summary
    assert "| 0.800 |" in summary
    assert "Geometric mean of the brackets: 1.20 over 1 rows" in summary
    assert "NVIDIA H200, 2026-12-01" in summary


def test_the_table_shows_times_failures_and_gaps():
    table = fill_numbers.forward_table(document((ROW, measured(0.05, fla="ValueError: no"))))
    (line,) = (line for line in table.splitlines() if line.startswith("| 2, 8 |"))
    assert line == "| 2, 8 | 2048 | 0.050 |  |  |  | failed | 4.00e-03 | 3.00e-03 | chunked |"


def test_the_cold_start_table_leaves_open_what_a_machine_without_a_gpu_cannot_measure():
    stage = {"compiles": 4, "compile_seconds": 72.52, "disk_hits": 0, "load_seconds": 0.0}
    stage |= {"first_call_seconds": None, "host_us": None}
    cold_start = document() | {
        "rows": [{"H": 8, "HV": 24, "arch": "sm_90a", "cold": stage, "warm": stage | {"disk_hits": 4, "load_seconds": 0.0125}}]
    }
    table = fill_numbers.cold_start_table(cold_start, with_protocol=False)
    assert "| H=8, HV=24, sm_90a | 72.5 (4 kernels) |  | 0.013 (4 kernels) |  |  |" in table
    assert "as timed" not in table


def test_filling_replaces_a_section_and_nothing_else():
    text = "before\n<!-- numbers: a -->\nold\n<!-- end of numbers -->\nafter\n<!-- numbers: b -->\n<!-- end of numbers -->\n"
    once = fill_numbers.filled(text, {"a": "new\n", "b": "also\n"})
    assert once == text.replace("old", "new").replace("b -->\n", "b -->\nalso\n")
    assert fill_numbers.filled(once, {"a": "new\n", "b": "also\n"}) == once


def test_the_plot_shows_every_measured_system_and_is_the_same_each_time(tmp_path):
    pytest.importorskip("matplotlib")
    plot_forward = script("plot_forward")
    source = tmp_path / "forward.json"
    results.save(source, document((ROW, measured(0.05, fla=0.082)), (OTHER_ROW, measured(0.8, flashinfer=0.829))))
    drawn = []
    for name in ("a.svg", "b.svg"):
        plot_forward.main([str(source), str(tmp_path / name)])
        drawn.append((tmp_path / name).read_text())
    assert drawn[0] == drawn[1]
    assert "#000000" not in drawn[0], "black is invisible on a dark page"
    assert "#ffffff" not in drawn[0], "white is invisible on a light page"
    assert all(colour in drawn[0] for colour in ("#e5534b", "#3fa45b", "#4c8ed9"))
