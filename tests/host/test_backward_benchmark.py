"""Does the backward benchmark keep its books, and are its exact gradients those of the whole call?"""

from __future__ import annotations

import weakref

import pytest
import torch
from test_benchmarks import FakeClock, script

from qla_jit import reference
from qla_jit.device import GpuInfo
from qla_jit.kernel_templates.arch import SM90A

backward, fill_numbers, forward, results, systems, timing, training, workload = map(
    script, ("backward", "fill_numbers", "forward", "results", "systems", "timing", "training", "workload")
)
ROW = workload.Row(2, 4, (65, 3))


@pytest.fixture
def on_the_cpu(monkeypatch):
    """measure_row with the GPU's part replaced."""
    monkeypatch.setattr(backward, "rotated_inputs", lambda row, **_: [workload.make_inputs(row, device="cpu")])
    monkeypatch.setattr(backward, "graph_of", lambda calls: (len(calls), 5))
    monkeypatch.setattr(backward, "interleaved_ms", lambda graphs: dict.fromkeys(graphs, 0.25))
    monkeypatch.setattr(backward, "alternating_ms", lambda steps: {name: len(step()) for name, step in steps.items()})
    monkeypatch.setattr(backward, "peak_bytes", lambda call: 1000)
    monkeypatch.setattr(backward, "gpu_info", lambda device: GpuInfo("NVIDIA H200", SM90A, 132, 60 << 20))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: type("", (), {"L2_cache_size": 1}))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


def test_the_rows_are_those_of_flash_qla_with_ours_and_what_matters_most_comes_first():
    rows = workload.BACKWARD_ROWS
    assert len(set(rows)) == len(rows) == 7 * 8
    assert [row.name for row in rows[:3]] == ["16,64:32768", "16,32:32768", "2,8:32768"]
    assert {sum(row.seqlens) for row in rows} == {8192, 32768}
    assert {len(row.seqlens) for row in rows} == {1, 2, 4, 8}
    assert [system.name for system in training.TRAINING_SYSTEMS] == ["qla_jit", "flash_qla", "fla"]


def test_errors_are_told_over_all_sets_together():
    exact = [[torch.tensor([3.0, 4.0]).double() for _ in training.NAMES], [torch.zeros(2).double() for _ in training.NAMES]]
    found = [[torch.tensor([3.0, 4.5]) for _ in training.NAMES], [torch.tensor([0.0, -1.2]) for _ in training.NAMES]]
    assert backward.errors((lambda x=x: x for x in found), exact) == dict.fromkeys(training.NAMES, 1.3 / 5)


@pytest.mark.parametrize(
    ("seqlens", "sets"), [((2**18,), 1), ((2**16,), 4), ((2**17,) * 2, 1), ((8,), backward.ERROR_SETS)], ids=str
)
def test_errors_are_told_over_as_many_sets_as_make_a_million_values(monkeypatch, seqlens, sets):
    made = []
    monkeypatch.setattr(backward, "make_inputs", lambda row, seed, **_: made.append(seed) or inputs[0])
    monkeypatch.setattr(backward, "make_cotangents", lambda x, seed: seed)
    inputs = [workload.make_inputs(ROW, device="cpu")] * 3
    found = backward.error_sets(workload.Row(2, 4, seqlens), inputs, [0, 1, 2])
    assert [seed for _, seed in found] == list(range(sets))
    assert made == list(range(3, sets))


def test_each_gradient_is_held_against_float64_and_a_system_that_cannot_is_recorded(on_the_cpu, monkeypatch):
    exact, held_against = backward.float64_gradients, []
    monkeypatch.setattr(backward, "float64_gradients", lambda x, y: held_against.append(x) or exact(x, y))

    def refused(x, y):
        raise ValueError("K must be 64")

    ours = training.TRAINING_SYSTEMS[0]
    found = backward.measure_row(ROW, [ours, systems.System("fla", "torch", "torch", refused)], timing.Budget(None))
    assert found["fla"] == {"failed": "ValueError: K must be 64"}
    errors = found["qla_jit"].pop("rel_l2")
    assert len(held_against) == backward.ERROR_SETS
    assert list(errors) == list(results.OUTPUTS["backward"])
    assert all(1e-8 < error < 3e-3 for error in errors.values()), errors         # bf16 gradients of a float32 reference
    assert errors["dg"] < 1e-5
    assert found["qla_jit"] == {"strategy": "registers", "peak_bytes": 1000, "ms": 0.25, "step_ms": 6}


def test_what_a_graph_reads_stays_while_it_is_timed(on_the_cpu, monkeypatch):
    """The inverses that a forward kept belong to nobody else; a graph would read memory that is gone."""
    kept = {}

    def prepare(x, y):
        ours, inverses = training.TRAINING_SYSTEMS[0].prepare(x, y), torch.ones(1)
        kept[len(kept)] = weakref.ref(inverses)
        return training.Calls(lambda: (ours.gradients(), inverses)[0], ours.step)

    def timed(graphs):
        assert list(graphs) == ["a", "b"]
        assert all(inverses() is not None for inverses in kept.values())
        return dict.fromkeys(graphs, 0.25)

    monkeypatch.setattr(backward, "ERROR_SETS", 1)
    monkeypatch.setattr(backward, "interleaved_ms", timed)
    backward.measure_row(ROW, [systems.System(name, "torch", "torch", prepare) for name in "ab"], timing.Budget(None))
    assert len(kept) == 2


@pytest.mark.parametrize("heads", [1, 2, 3], ids=lambda heads: f"{heads}-heads-at-a-time")
def test_the_exact_gradients_are_those_of_the_whole_call(monkeypatch, heads):
    row = workload.Row(3, 6, (65, 3))
    x = workload.make_inputs(row, device="cpu")
    y = training.make_cotangents(x)
    chunks, heads_per_key = 3, 2
    monkeypatch.setattr(backward, "ORACLE_BYTES", heads * backward.ORACLE_BYTES_PER_CHUNK * chunks * heads_per_key)
    leaves = [t.double().requires_grad_() for t in (x.q, x.k, x.v, x.g, x.beta, x.initial_state)]
    outputs = reference.chunk_gated_delta_rule(*leaves[:5], initial_state=leaves[5], cu_seqlens=x.cu_seqlens_cpu)
    whole = torch.autograd.grad(outputs, leaves, (y.do.double(), y.dht.double()))
    for name, found, expected in zip(training.NAMES, backward.float64_gradients(x, y), whole, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12, msg=name)


def test_the_step_gives_the_gradients_of_the_low_level_half():
    x = workload.make_inputs(ROW, device="cpu")
    calls = training.qla_jit_calls(x, training.make_cotangents(x))
    for name, low_level, step in zip(training.NAMES, calls.gradients(), calls.step(), strict=True):
        assert torch.equal(low_level, step), name


def test_a_row_keeps_each_number_by_system():
    document = {"rows": []}
    error = dict.fromkeys(training.NAMES, 4e-3)
    fla = {"ms": 5.0, "step_ms": 9.0, "peak_bytes": 10**9, "rel_l2": error}
    results.merge_row(document, ROW, measured={"fla": fla}, commit="abc", date="d", op="backward")
    ours = {"ms": 2.0, "step_ms": 3.0, "peak_bytes": 10**8, "rel_l2": error, "strategy": "registers"}
    for measured in ({"failed": "CompileError: no"}, ours):
        results.merge_row(document, ROW, measured={"qla_jit": measured}, commit="def", date="d", op="backward")
    (row,) = document["rows"]
    assert row["op"] == "backward"
    assert row["ms"] == {"fla": 5.0, "qla_jit": 2.0}
    assert row["step_ms"] == {"fla": 9.0, "qla_jit": 3.0}
    assert row["peak_bytes"] == {"fla": 10**9, "qla_jit": 10**8}
    assert (row["rel_l2"], row["peer_rel_l2"], row["failed"]) == (error, {"fla": error}, {})
    assert row["strategy"] == "registers"
    assert [problem for problem in results.problems(document) if ROW.name in problem] == []
    row["rel_l2"]["dg"] = float("nan")
    assert any("not a finite number" in problem for problem in results.problems(document))


def test_the_tables_show_times_memory_and_errors():
    document = {"gpu": "NVIDIA H200", "versions": {}, "commit": "abc", "date": "2026-12-01T10:00Z", "protocol": "", "rows": []}
    row, error = workload.BACKWARD_ROWS[0], dict.fromkeys(training.NAMES, 4e-3) | {"dg": 6e-3}
    measured = {name: {"ms": ms, "step_ms": 2 * ms, "peak_bytes": 2**30, "rel_l2": error} for name, ms in
                (("qla_jit", 2.0), ("flash_qla", 3.0))}
    measured["qla_jit"]["strategy"] = "registers_split/32"
    results.merge_row(document, row, measured=measured | {"fla": {"failed": "no"}}, commit="abc", date="d", op="backward")
    summary, table = fill_numbers.summary("backward", document), fill_numbers.backward_table(document)
    assert "2.000 (1.50x)" in summary
    assert "dq 4.0e-03" in summary
    assert "dg 6.0e-03" in summary
    (line,) = (line for line in table.splitlines() if line.startswith("| 16, 64 |"))
    assert "| 2.000 / 3.000 / failed | 4.000 / 6.000 / - | 1024 / 1024 / - | 4.00e-03 |" in line
    assert line.endswith("| registers_split/32 |")
    only = "| sequences | H=16, HV=64 |\n|---|---|\n| 32768 | 2.000 (1.50x) |\n\n"
    assert summary.startswith(only), "what has no number is left out"
    assert fill_numbers.backward_table({"rows": []}) == fill_numbers.NOT_MEASURED


def test_a_run_goes_on_where_the_budget_of_the_last_one_ended():
    clock, document, done = FakeClock(), {"rows": [], "commit": "abc", "date": "d"}, []

    def measure(row):
        clock.seconds += 10
        done.append(row)
        error = dict.fromkeys(training.NAMES, 1e-3)
        return {"qla_jit": {"ms": 1.0, "step_ms": 2.0, "peak_bytes": 3, "rel_l2": error, "strategy": "registers"}}

    for seconds in (25, None):
        forward.run(
            workload.BACKWARD_ROWS[:4], document, op="backward", systems=["qla_jit"], measure=measure, save=lambda: None,
            budget=timing.Budget(seconds, now=clock),
        )
    assert done == list(workload.BACKWARD_ROWS[:4])
    assert [results.find_row(document, row)["op"] for row in done] == ["backward"] * 4


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_without_a_gpu_the_benchmark_says_so(tmp_path):
    with pytest.raises(SystemExit, match=r"benchmarks/backward\.py .* torch sees none"):
        backward.main(["--out", str(tmp_path / "backward.json")])
