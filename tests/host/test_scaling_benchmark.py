"""Does the benchmark of sizes call what it says, and tell lengths that are slow for what they are?"""

from __future__ import annotations

import pytest
import torch
from scripts import script

from qla_jit import reference

scaling, systems, workload = map(script, ("scaling", "systems", "workload"))


@pytest.fixture
def on_the_cpu(monkeypatch):
    """Both parts with the GPU's part replaced."""
    monkeypatch.setattr(scaling, "rotated_inputs", lambda row, **_: [workload.make_inputs(row, device="cpu")])
    monkeypatch.setattr(scaling, "graph_of", lambda calls: (len(calls), 5))
    monkeypatch.setattr(scaling, "interleaved_ms", lambda graphs: dict.fromkeys(graphs, 0.5))
    monkeypatch.setattr(scaling, "peak_bytes", lambda call: 1000)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: type("", (), {"L2_cache_size": 1}))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


@pytest.mark.parametrize(("length", "multiple"), [(1, 64), (63, 64), (65, 64), (95, 64), (96, 128), (128, 128), (130, 128)])
def test_a_length_is_held_against_the_nearest_multiple_of_a_chunk(length, multiple):
    assert scaling.neighbour(length) == multiple


def test_ratios_follow_when_the_neighbour_is_measured():
    rows = [{"part": "lengths", "size": 65, "ns_per_token": 30.0}, {"part": "tokens", "size": 64, "ms": {}}]
    assert scaling.with_ratios(rows) == rows
    rows = scaling.with_ratios([*rows, {"part": "lengths", "size": 64, "ns_per_token": 20.0}])
    assert [row.get("over_neighbour") for row in rows] == [1.5, None, 1.0]
    assert "65 is 1.5 times as slow a token as 64; 0 of 2 are more" in scaling.summary(rows)


def test_short_sequences_are_the_same_tokens_cut_differently(on_the_cpu):
    assert scaling.short_sequences(100) == {"ns_per_token": round(0.5e6 / 4000, 3)}
    x = scaling.packed_in(workload.make_inputs(scaling.Row(2, 8, (200,)), device="cpu"), scaling.Row(2, 8, (100, 100)))
    expected, _ = reference.recurrent_gated_delta_rule(x.q, x.k, x.v, x.g, x.beta, cu_seqlens=torch.tensor([0, 100, 200]))
    assert torch.allclose(scaling.stateless_call(x)().float(), expected, atol=1e-2)


def test_a_library_that_cannot_is_recorded_and_the_others_are_timed(on_the_cpu):
    def refused(x):
        raise ValueError("no")

    ours = systems.System("qla_jit", "torch", "torch", lambda x: lambda: None)
    row = scaling.one_sequence(64, [ours, systems.System("fla", "torch", "torch", refused)])
    assert row == {"ms": {"qla_jit": 0.5}, "peak_bytes": {"qla_jit": 1000}, "failed": {"fla": "ValueError: no"}}
    text = scaling.summary([{"part": "tokens", "size": 64} | row | {"ms": {"qla_jit": 0.5, "fla": 1.0}}])
    assert text == "64 tokens: 7812.5 ns and 16 bytes a token; {'fla': 2.0}"
