"""Does the benchmark of choices time what it says, and judge it right?"""

from __future__ import annotations

import pytest
from records import H200
from scripts import script

from qla_jit import select
from qla_jit.device import GpuInfo
from qla_jit.kernel_templates.arch import SM90A
from qla_jit.ops.plan import BACKWARD, FORWARD

dispatch, workload = map(script, ("dispatch", "workload"))
GPU = GpuInfo("NVIDIA H200", SM90A, H200.sm_count, H200.l2_bytes)
Row = workload.Row


@pytest.fixture
def timed(monkeypatch):
    """What is to be timed, with times in the order of candidates: 1, 2, 3 ... ms unless the test says others."""
    seen, given = [], {}

    def times(space, seqlens, candidates, *, l2_bytes):
        seen.append(candidates)
        return {label: given.get(label, float(number)) for number, label in enumerate(candidates, start=1)}

    monkeypatch.setattr(dispatch, "times", times)
    return seen, given


def test_what_is_chosen_runs_beside_every_strategy_and_split_but_the_baseline(timed):
    seen, _ = timed
    row = dispatch.measure_row(Row(2, 8, (32768,)), FORWARD, GPU)
    [candidates] = seen
    assert {(candidate.strategy, candidate.split) for candidate in candidates.values()} == {
        ("fused", None), ("fused_halves", None), ("split", None), *(("split", L) for L in (4, 8, 16, 32, 64, 128, 256))
    }  # fmt: skip
    assert row["chosen"] in candidates
    assert row["default"] in candidates
    assert list(row["ms"]) == list(candidates)


def test_regret_is_over_the_best_and_the_speedup_over_the_default():
    row = dispatch.judged({"tuned": 1.1, "default": 1.32, "split": 1.0}, "tuned", "default")
    assert (row["best"], row["regret"], row["speedup"]) == ("split", 0.1, 1.2)
    assert "split is 10.0% faster; 1.200 x the default" in dispatch.describe(row | {"match": "interpolated"})


def test_where_the_record_says_the_default_both_are_one_measurement(timed, monkeypatch):
    monkeypatch.setattr(select.record_store, "find", lambda identity: [])
    seen, _ = timed
    row = dispatch.measure_row(Row(16, 64, (4096,) * 8), FORWARD, GPU)
    assert row["match"] == "none"
    assert row["chosen"] == row["default"]
    assert row["speedup"] == 1
    assert len(seen[0]) == len(row["ms"])


def test_the_backward_has_its_own_candidates(timed):
    seen, _ = timed
    row = dispatch.measure_row(Row(16, 32, (8192,)), BACKWARD, GPU)
    assert {candidate.strategy for candidate in seen[0].values()} == {"registers", "registers_split"}
    assert row["chosen"].startswith("registers")


def test_the_summary_keeps_tuned_and_untuned_sizes_apart():
    def row(of, regret, speedup):
        return {"op": FORWARD, "H": of.H, "HV": of.HV, "seqlens": list(of.seqlens), "regret": regret, "speedup": speedup}

    tuned, other = workload.ROWS[0], dispatch.UNTUNED_ROWS[0]
    text = dispatch.summary([row(tuned, 0.01, 1.0), row(other, 0.2, 0.98), row(dispatch.UNTUNED_ROWS[1], 0.0, 1.1)])
    assert "tuned sizes and their like: 1 rows; regret 1.0% in the median, 1.0% at most; 1.000 to 1.000 x" in text
    assert "sizes that were not tuned: 2 rows; regret 10.0% in the median, 20.0% at most; 0.980 to 1.100 x" in text


def test_no_size_is_in_both_tables_and_rows_are_taken_by_name():
    assert len(set(dispatch.TABLE)) == len(dispatch.TABLE) == 35 + 9 * 9
    assert {row.seqlens for row in dispatch.parse(["--rows", "2,8:3000"]).rows} == {(3000,)}
    with pytest.raises(SystemExit):
        dispatch.parse(["--rows", "nothing"])
