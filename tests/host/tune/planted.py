"""A machine without a GPU: strategies and templates of its own, times from a cost model, and planted candidates that misbehave.

In the tests' process it is PlantedMachine, an Ask. As a script it is a worker process, for what only a process can do: hang,
crash, fail at a CUDA error.
"""

from __future__ import annotations

import json
import math
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from qla_jit.kernel_templates.arch import SM90A
from qla_jit.kernel_templates.contract import Rejection, Role, Template, knob
from qla_jit.ops.inputs import CallFacts
from qla_jit.ops.plan import Extents, Step, Strategy
from qla_jit.tune.inputs import facts_from_json
from qla_jit.tune.search_space import extents_of
from qla_jit.tune.worker import Failure, serve


@dataclass(frozen=True)
class Problem:
    HV: int


@dataclass(frozen=True)
class ScanConfig:
    block_v: int = knob(32, 64, 128, why="columns per block")
    stages: int = knob(1, 2, 3, why="chunks in flight")


@dataclass(frozen=True)
class OutputConfig:
    threads: int = knob(128, 256, why="threads per block")


def stages_fit(problem, config, arch):
    if config.block_v == 128 and config.stages == 3:
        return Rejection("block_v=128 with stages=3 needs too much shared memory")
    return None


def build(problem, config):
    raise AssertionError("nothing is compiled here")


def template(name, config, default, constraints=()):
    return Template(
        name=name, problem=Problem, config=config, arches=("sm_90a",), arguments=lambda problem: (),
        buffers=lambda problem, config: (), roles=lambda problem, config: (Role("all", 128, registers=32),),
        default_config=lambda problem, arch: default, build=build, constraints=constraints,
    )


SCAN = template("scan", ScanConfig, ScanConfig(block_v=64, stages=2), (stages_fit,))
OUTPUT = template("output", OutputConfig, OutputConfig(threads=128))
FUSED = template("fused", ScanConfig, ScanConfig(block_v=64, stages=1), (stages_fit,))


def powers_of_two(facts: CallFacts, extents: Extents, sm_count: int) -> tuple[int | None, ...]:
    return (None, *(2**n for n in range(2, 10) if 2**n < extents.longest))


STRATEGIES = {
    strategy.name: strategy
    for strategy in (
        Strategy("plain", lambda facts, arch: None,
                 lambda facts: {"scan": Step(SCAN, Problem(facts.HV)), "output": Step(OUTPUT, Problem(facts.HV))}),
        Strategy("split", lambda facts, arch: None, lambda facts: {"fused": Step(FUSED, Problem(facts.HV))}, powers_of_two,
                 suits=lambda facts, extents, sm_count: extents.sequences * facts.HV < 64),
    )
}
SM_COUNT = 132


def facts(H: int = 2, HV: int = 8) -> CallFacts:
    return CallFacts(
        device=torch.device("cuda", 0), dtype=torch.bfloat16, g_dtype=torch.float32, beta_dtype=torch.float32,
        state_dtype=torch.float32, A_log_dtype=None, dt_bias_dtype=None, cu_seqlens_dtype=torch.int32, H=H, HV=HV, K=128, V=128,
        chunk_size=64, output_final_state=True, state_v_first=False, use_qk_l2norm_in_kernel=False,
        use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, use_gate_in_kernel=False, auto_cp=True,
    )


def cost_us(candidate: dict[str, Any], of: CallFacts, extents: Extents) -> float:
    """Splitting pays where there are fewer heads than SMs; the best scan block is 32, the best fused one 128 with 2 stages."""
    configs = candidate["configs"]
    if candidate["strategy"] == "plain":
        scan, output = configs["scan"], configs["output"]
        factor = {32: 0.85, 64: 1.0, 128: 1.2}[scan["block_v"]] * {1: 1.1, 2: 1.0, 3: 1.004}[scan["stages"]]
        return 40 + extents.longest * 2.0 * factor + extents.chunks * of.HV * {128: 0.010, 256: 0.009}[output["threads"]]
    fused = configs["fused"]
    factor = {32: 1.1, 64: 1.0, 128: 0.9}[fused["block_v"]] * {1: 1.0, 2: 0.9, 3: 0.902}[fused["stages"]]
    split = candidate["split"] or extents.longest
    serial = min(split, extents.longest)
    waves = max(1.0, of.HV * extents.chunks / serial / SM_COUNT)
    return 30 + factor * (1.8 * serial * waves + 6 * waves)


@dataclass
class PlantedMachine:
    """Answers as a GPU would. planted: what a candidate (as JSON) does, by stage; None is behaving well."""

    noise: float = 0.002                 # relative standard deviation of a sample
    seed: int = 0
    planted: Callable[[str, dict[str, Any]], Failure | None] = lambda stage, candidate: None
    cost: Callable[[dict[str, Any], CallFacts, Extents], float] = cost_us
    same_source: Callable[[dict[str, Any]], Any] = lambda candidate: candidate["configs"]
    floor_us: float | None = None
    state: dict[str, Any] = field(default_factory=dict)
    interrupt_at: int | None = None      # the question at which Ctrl-C is pressed
    seconds_per_question: float = 0.0
    questions: list[dict[str, Any]] = field(default_factory=list)
    now: float = 0.0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def __enter__(self) -> PlantedMachine:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def __call__(self, question: dict[str, Any], *, on_kernel: Callable[[int, int], None]) -> Any:
        json.dumps(question)             # what cannot go over the pipe is an error here too
        if question["do"] != "describe":
            self.questions.append(question)
            self.now += self.seconds_per_question
            if self.interrupt_at is not None and len(self.questions) >= self.interrupt_at:
                self.interrupt_at = None
                raise KeyboardInterrupt
        return getattr(self, question["do"])(question)

    def describe(self, question):
        quiet = dict(driver="590.48", max_sm_mhz=1980, max_memory_mhz=3201, memory_bytes_per_us=4.8e6, other_processes=(),
                     mig=False, mps=False, throttled=False)
        return dict(name="NVIDIA H200", arch=SM90A.name, sm_count=SM_COUNT, l2_bytes=50 << 20, uuid=f"GPU-planted-{os.getpid()}",
                    memory_bytes=141 << 30, state=quiet | self.state)

    def build(self, question):
        outcomes = []
        for candidate in question["candidates"]:
            failure = self.planted("build", candidate)
            source = {"source": json.dumps([candidate["strategy"], self.same_source(candidate)], sort_keys=True)}
            outcomes.append(source if failure is None else {"failure": failure.to_json()})
        return outcomes

    def verify(self, question):
        failure = self.planted("verify full" if question["full"] else "verify", question["candidate"])
        return {"failure": failure.to_json()} if failure else {"verdict": VERDICT}

    def time(self, question):
        failure = next((f for c in question["candidates"] if (f := self.planted("time", c))), None)
        if failure:
            return {"failure": failure.to_json()}
        of = facts_from_json(question["facts"])
        extents = extents_of(tuple(question["lengths"]), of.chunk_size)
        costs = [self.cost(candidate, of, extents) for candidate in question["candidates"]]
        blocks = []
        for _ in range(question["blocks"]):
            us = [cost * math.exp(self.random.gauss(0, self.noise)) for cost in costs]
            blocks.append({"us": us, "clock": {"sm_mhz": 1755, "throttled": False}, "elapsed_us": sum(us)})
        return {"blocks": blocks, "floor_us": self.floor_us, "other_processes": []}


VERDICT = dict(
    oracle="float64", errors={"o": dict(rms=0.004, max=0.01, over_reference=1.0)}, repeats=8, guards_intact=True,
    cases=["ragged-mixed"],
)


# As a script: `python planted.py`, a worker that does what a question says, or what a planted config says.


def misbehave(how: str) -> Any:
    if how == "hang":
        time.sleep(600)
    elif how == "segfault":
        os.kill(os.getpid(), 11)
    elif how == "exit":
        print("the driver gave up", file=sys.stderr)
        sys.stderr.flush()
        os._exit(7)
    elif how == "cuda error":
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    elif how == "out of memory":
        raise torch.OutOfMemoryError("tried to allocate 300 GiB")
    elif how == "bug":
        raise TypeError("a mistake of ours")
    elif how == "chatter":
        print("a library prints to stdout")
    return {"pid": os.getpid()}


def handle(question: dict[str, Any]) -> Any:
    if "how" in question:
        return misbehave(question["how"])
    if question["do"] == "verify":
        scan = question["candidate"]["configs"].get("scan", {})
        for knobs, how in PLANTED_IN_WORKER:
            if scan == knobs:
                misbehave(how)
    return PlantedMachine()(question, on_kernel=lambda done, total: None)


PLANTED_IN_WORKER = (
    (asdict(ScanConfig(32, 2)), "hang"),
    (asdict(ScanConfig(128, 2)), "segfault"),
    (asdict(ScanConfig(64, 3)), "out of memory"),
)

if __name__ == "__main__":
    serve(handle)
