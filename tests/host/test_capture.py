"""Are calls counted by what decides their speed, cheaply, and can the counts be added up?"""

import dataclasses
import os
import subprocess
import sys
import textwrap

import pytest
import torch
from cases import Case, arguments

from qla_jit import capture
from qla_jit.capture import QUANTILES, Recorder, load_workload
from qla_jit.errors import RecordError
from qla_jit.ops.inputs import check_inputs
from qla_jit.ops.plan import Extents
from qla_jit.select import bucket, extents_of


def call(T=130, B=1, H=1, HV=2, dtype=torch.bfloat16, **more):
    q = torch.zeros(B, T, H, 64, dtype=dtype)
    v = torch.zeros(B, T, HV, 64, dtype=dtype)
    gates = {"g": torch.zeros(B, T, HV), "beta": torch.zeros(B, T, HV)}
    return check_inputs(q=q, k=q, v=v, **(gates | more))


def packed(*lengths, told=True):
    starts = torch.tensor([0, *lengths]).cumsum(0)
    inputs = call(T=int(starts[-1]), cu_seqlens=starts)
    return inputs if told else dataclasses.replace(inputs, starts=None)


def written(recorder):
    recorder.flush()
    return load_workload(recorder.path)


@pytest.mark.parametrize(
    ("inputs", "extents"),
    [
        (call(T=130), Extents(chunks=3, longest=3, sequences=1)),
        (call(T=64, B=5), Extents(chunks=5, longest=1, sequences=5)),
        (packed(130, 1, 0, 64), Extents(chunks=5, longest=3, sequences=4)),
        (packed(0, 0, 5), Extents(chunks=1, longest=1, sequences=3)),
        (packed(130, 1, 0, 64, told=False), Extents(chunks=3 + 4, longest=4, sequences=4)),
    ],
    ids=["one", "batch", "packed", "empty-sequences", "lengths-on-the-GPU"],
)
def test_extents_are_those_of_the_sequences_or_a_bound_of_them(inputs, extents):
    assert extents_of(inputs) == extents


def test_calls_are_counted_by_problem_and_size(tmp_path):
    recorder = Recorder(tmp_path)
    for inputs in [call(), call(), call(), call(T=64), call(HV=4), call(scale=2.0), packed(130)]:
        recorder.note(inputs)
    most, *others = [(c.problem.HV, c.problem.varlen, c.chunks, c.count) for c in written(recorder).calls]
    assert most == (2, False, 3, 4)
    assert sorted(others) == [(2, False, 1, 1), (2, True, 3, 1), (4, False, 3, 1)]


def test_lengths_that_differ_little_are_counted_together(tmp_path):
    recorder = Recorder(tmp_path)
    for T in range(64 * 600, 64 * 640, 64):
        recorder.note(call(T=T))
    (calls,) = written(recorder).calls
    assert (calls.count, calls.extents) == (40, bucket(Extents(chunks=620, longest=620, sequences=1)))


def test_gates_are_sampled_more_and_more_rarely(tmp_path):
    recorder = Recorder(tmp_path)
    for _ in range(100):
        recorder.note(call())
    (gates,) = written(recorder).gates
    assert gates.samples == 7                    # calls 1, 2, 4, ... 64


@pytest.mark.parametrize("T", [1, 1000, 5000], ids=lambda T: f"T{T}")
def test_the_quantiles_are_those_of_the_gates(tmp_path, T):
    g = -torch.rand(1, T, 2) * torch.arange(1, T + 1).view(1, T, 1) / T
    recorder = Recorder(tmp_path)
    recorder.note(call(T=T, g=g))
    (gates,) = written(recorder).gates
    exact = torch.quantile(g.flatten(), torch.tensor(QUANTILES))
    assert gates.quantiles == pytest.approx(exact.tolist(), abs=0.05 if T > 1 else 1)
    assert list(gates.quantiles) == sorted(gates.quantiles)
    assert gates.median == gates.quantiles[3]


def test_gates_that_are_computed_in_the_kernel_are_sampled_as_gates(tmp_path):
    recorder = Recorder(tmp_path)
    recorder.note(call(use_gate_in_kernel=True, A_log=torch.full((2,), 2.0).log(), dt_bias=torch.ones(2)))
    (gates,) = written(recorder).gates
    assert gates.median == pytest.approx(-2 * torch.nn.functional.softplus(torch.ones(())).item(), abs=1e-3)


@pytest.mark.parametrize(("gate", "median"), [(float("-inf"), -1e4), (float("nan"), None)], ids=["minus-inf", "nan"])
def test_gates_that_json_cannot_hold(tmp_path, gate, median):
    recorder = Recorder(tmp_path)
    recorder.note(call(g=torch.full((1, 130, 2), gate)))
    assert [gates.median for gates in written(recorder).gates] == ([] if median is None else [median])


class LateArrival:
    ready = False

    def query(self):
        return self.ready


def test_nothing_is_waited_for(tmp_path, monkeypatch):
    arrival = LateArrival()
    monkeypatch.setattr(capture, "_start_quantiles", lambda inputs: (torch.zeros(len(QUANTILES)), arrival))
    recorder = Recorder(tmp_path)
    recorder.note(call())
    assert written(recorder).gates == ()
    arrival.ready = True
    assert [gates.samples for gates in written(recorder).gates] == [1]


def test_processes_write_files_of_their_own_and_these_are_added_up(tmp_path):
    for process, (T, g) in enumerate([(130, -1.0), (130, -3.0), (64, -3.0)]):
        recorder = Recorder(tmp_path)
        recorder.path = tmp_path / f"host-{process}.json"
        recorder.note(call(T=T, g=torch.full((1, T, 2), g)))
        recorder.flush()
    workload = load_workload(tmp_path)
    assert [(c.chunks, c.count) for c in workload.calls] == [(3, 2), (1, 1)]
    (gates,) = workload.gates
    assert (gates.samples, gates.median) == (3, pytest.approx(-7 / 3, abs=1e-3))


def test_a_file_is_written_once_a_minute(tmp_path, monkeypatch):
    clock = iter([0.0, 30.0, 61.0, 61.0, 62.0])
    monkeypatch.setattr(capture.time, "monotonic", lambda: next(clock))
    recorder = Recorder(tmp_path)
    recorder.note(call())
    assert not recorder.path.exists()
    recorder.note(call())
    assert load_workload(tmp_path).calls[0].count == 2


def test_trouble_with_the_directory_is_one_warning(tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    recorder = Recorder(tmp_path / "file")
    recorder.note(call())
    for _ in range(3):
        recorder.flush()
    assert len(caplog.records) == 1
    assert "QLA_JIT_CAPTURE" in caplog.text


@pytest.mark.parametrize("text", ["", "{}", '{"schema_version": 2, "calls": []}', "\x80\x04."], ids=repr)
def test_a_file_of_anything_else_is_refused(tmp_path, text):
    (tmp_path / "host-1.json").write_text(text)
    with pytest.raises(RecordError, match=r"host-1\.json"):
        load_workload(tmp_path)


def test_an_empty_directory_is_refused_with_what_to_do(tmp_path):
    with pytest.raises(RecordError, match=f"run with QLA_JIT_CAPTURE={tmp_path}"):
        load_workload(tmp_path)


@pytest.mark.parametrize("directory", [None, "counts"], ids=["off", "on"])
def test_the_variable_switches_it_on_and_the_end_of_the_process_writes(tmp_path, directory):
    environment = {name: value for name, value in os.environ.items() if name != "QLA_JIT_CAPTURE"}
    if directory is not None:
        environment["QLA_JIT_CAPTURE"] = str(tmp_path / directory)
    code = """
        import torch
        from qla_jit import capture
        from qla_jit.ops.inputs import check_inputs
        q, g = torch.zeros(1, 3, 1, 64, dtype=torch.bfloat16), torch.zeros(1, 3, 1)
        capture.note(check_inputs(q, q, q, g, g))
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], env=environment, check=True, timeout=120)
    if directory is None:
        assert list(tmp_path.iterdir()) == []
    else:
        assert load_workload(tmp_path / directory).calls[0].count == 1


@pytest.mark.gpu
def test_on_a_gpu_the_gates_arrive_without_a_wait(tmp_path):
    given = arguments(Case(K=64, V=64, dtype=torch.bfloat16), device="cuda")
    recorder = Recorder(tmp_path)
    inputs = check_inputs(**given)
    torch.cuda.set_sync_debug_mode("error")
    try:
        recorder.note(inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert [gates.samples for gates in written(recorder).gates] == [1]
