"""Does the worker's code for the GPU do what the protocol says? On the CPU, with stand-ins for CUDA graphs, events and memory."""

import types

import planted
import pytest
import torch

from qla_jit import select
from qla_jit.device import GpuInfo
from qla_jit.errors import EnvironmentUnsuitable
from qla_jit.kernel_templates.arch import SM90A
from qla_jit.ops import fallback, plan
from qla_jit.ops.plan import BACKWARD, FORWARD
from qla_jit.ops.results import ForwardResult
from qla_jit.tune import gpu, operations
from qla_jit.tune.gpu_state import GpuState, Nvml
from qla_jit.tune.inputs import facts_to_json
from qla_jit.tune.measure import Clock
from qla_jit.tune.search_space import SearchSpace
from qla_jit.tune.session import TuneProblem, TuneRequest, tune

GIB = 2**30
FACTS = planted.facts(H=1, HV=2)._replace(device=torch.device("cpu"), K=16, V=16, chunk_size=16)


class FakeCuda:
    """One event clock for all: a replay takes 100 us a call."""

    def __init__(self):
        self.us, self.free, self.allocated, self.peak = 0.0, 4 * GIB, 0, 1 * 2**20
        self.graphs = []

    def event(self, enable_timing):
        event = types.SimpleNamespace(at=None, synchronize=lambda: None)
        event.record = lambda: setattr(event, "at", self.us)
        event.elapsed_time = lambda end: (end.at - event.at) / 1e3
        return event

    def captured(self, calls, pool):
        for call in calls:
            call()
        self.graphs.append(len(calls))

        def replay():
            self.us += 100.0 * len(calls)

        return types.SimpleNamespace(replay=replay)


@pytest.fixture
def cuda(monkeypatch, strategies):
    fake = FakeCuda()
    stand_ins = dict(
        Event=fake.event, synchronize=lambda *a: None, set_device=lambda d: None, graph_pool_handle=lambda: (0, 0),
        mem_get_info=lambda d: (fake.free, 141 * GIB), memory_reserved=lambda d: fake.allocated,
        memory_allocated=lambda d: fake.allocated, reset_peak_memory_stats=lambda d: None,
        max_memory_allocated=lambda d: fake.allocated + fake.peak,
    )
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(gpu, "gpu_info", lambda device: GpuInfo("H200", SM90A, 132, 1 << 16))
    monkeypatch.setattr(gpu, "_captured", fake.captured)
    monkeypatch.setattr(gpu, "_held", {})
    state = GpuState(memory_bytes_per_us=1e3, other_processes=())
    monkeypatch.setattr(gpu, "_nvml", lambda device: types.SimpleNamespace(clock=lambda: Clock(1755, False), state=lambda: state))

    def forward(inputs):
        fake.us += 130.0                 # an eager call: the launch takes longer than the kernel
        result = fallback.forward(inputs)
        return ForwardResult(torch.empty_like(inputs.v).copy_(result.o), result.final_state)

    def backward(inputs, do, dht):
        fake.us += 130.0
        return fallback.backward(inputs, do, dht)

    monkeypatch.setattr(operations.pipeline, "forward", forward)
    monkeypatch.setattr(operations.backward, "backward", backward)
    monkeypatch.setattr(plan, "BACKWARD_CHUNK_SIZES", (FACTS.chunk_size,))
    return fake


@pytest.fixture(params=[FORWARD, BACKWARD])
def question(cuda, request):
    op = request.param
    space = SearchSpace(FACTS, SM90A, 132, op)
    candidates = [space.start(strategy, planted.Extents(4, 4, 1)).to_json() for strategy in space.strategies]
    return dict(op=op, facts=facts_to_json(FACTS), lengths=[64], gates="mixed", candidates=candidates, blocks=4)


def bytes_of(question, lengths):
    return operations.OPERATIONS[question["op"]].bytes(FACTS, lengths)


def test_graphs_rotate_over_inputs_of_twice_the_l2_and_last_a_millisecond(cuda, question):
    answer = gpu.handle({"do": "time", **question})
    reads, _ = bytes_of(question, (64,))
    assert answer["input_sets"] == -(-2 * (1 << 16) // reads)
    assert cuda.graphs == [max(answer["input_sets"], 8)] * 2             # 8 eager calls of 130 us are a millisecond
    assert [block["us"] for block in answer["blocks"]] == [pytest.approx((100.0, 100.0))] * 4
    assert answer["blocks"][0]["clock"] == {"sm_mhz": 1755, "throttled": False}


def test_no_call_can_be_faster_than_half_its_inputs_from_memory(question):
    reads, _ = bytes_of(question, (64,))
    assert gpu.handle({"do": "time", **question})["floor_us"] == pytest.approx(0.5 * reads / 1e3)


def test_inputs_stay_for_the_next_question_on_the_same_batch(question):
    gpu.time(question)
    (held,) = gpu._held.values()
    gpu.time(question)
    assert next(iter(gpu._held.values())) is held
    gpu.time(question | {"lengths": [32]})
    assert next(iter(gpu._held.values())) is not held


def test_what_does_not_fit_is_declared_and_not_tried(cuda, question):
    cuda.free = 1 << 10
    failure = gpu.time(question)["failure"]
    assert failure["reason"] == "oom"
    assert "are free" in failure["detail"]
    assert cuda.graphs == []


def test_a_workspace_is_scaled_from_a_short_call(cuda, question):
    cuda.peak = GIB                      # of a call of 16 chunks; 64 of them do not fit
    cuda.free = 3 * GIB
    failure = gpu.time(question | {"lengths": [64 * 16]})["failure"]
    assert failure["reason"] == "oom"
    assert failure["detail"].startswith("needs 4.0 GiB")


def test_a_verdict_and_a_failure_are_json(question):
    candidate, reference = question["candidates"]
    verify = dict(op=question["op"], facts=question["facts"], candidate=candidate, reference=reference)
    gpu._judge.cache_clear()
    assert gpu.handle({"do": "verify", "full": False, **verify})["verdict"]["repeats"] == 8


def test_candidates_run_with_their_strategy_configs_and_split(question, monkeypatch):
    seen = []

    def run(*arguments):
        seen.append(select.override_in_force())
        raise RuntimeError("not launched")

    operation = operations.OPERATIONS[question["op"]]
    candidate = SearchSpace(FACTS, SM90A, 132).from_json(question["candidates"][0])
    monkeypatch.setattr(operations.pipeline, "forward", run)
    monkeypatch.setattr(operations.backward, "backward", run)
    with pytest.raises(RuntimeError, match="not launched"):
        operation.runner(candidate.with_split(8))(operation.sample(FACTS, (20,), "mixed"))
    (override,) = seen
    assert (override.strategy_of(question["op"]), override.split_of(question["op"])) == ("split", 8)
    assert override.configs == candidate.configs
    other = BACKWARD if question["op"] == FORWARD else FORWARD
    assert (override.strategy_of(other), override.split_of(other)) == (None, ...)
    assert select.override_in_force().is_empty


def test_a_machine_without_the_management_library_knows_nothing(monkeypatch):
    monkeypatch.setattr("ctypes.CDLL", lambda name: (_ for _ in ()).throw(OSError("not there")))
    nvml = Nvml("GPU-0")
    assert nvml.clock() == Clock(None, None)
    assert nvml.state() == GpuState()


def test_without_a_gpu_a_session_says_so(strategies):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    request = TuneRequest((TuneProblem(planted.facts(), ((2048,),)),))
    with pytest.raises(EnvironmentUnsuitable, match="cuda:0 cannot be used: EnvironmentUnsuitable: PyTorch sees no CUDA GPU"):
        tune(request)
