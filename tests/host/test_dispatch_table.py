"""Is the digest of what a process decided the same where it must be, and do ranks that differ learn in what?"""

import dataclasses
import hashlib
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
import records
import torch
from records import DEFAULT, H200, WIDE, entry
from tiny_template import request

import qla_jit
from qla_jit import kernel_cache, select
from qla_jit.device import GpuInfo
from qla_jit.dispatch_table import DispatchDifference, dispatch_digest
from qla_jit.errors import EnvironmentUnsuitable
from qla_jit.ops import backward, pipeline
from qla_jit.ops.inputs import check_inputs
from qla_jit.ops.plan import BACKWARD
from qla_jit.tuning_records import save_directory

RANKS = 4


@pytest.fixture(autouse=True)
def empty(tmp_path, monkeypatch):
    """A process that has decided nothing, on an H200 by name, whose kernels load at once."""
    monkeypatch.setenv("QLA_JIT_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("QLA_JIT_DB_PATH", raising=False)
    for module in (backward, pipeline):
        monkeypatch.setattr(module, "_ready", {})
        monkeypatch.setattr(module, "gpu_info", lambda device: GpuInfo("H200", records.ARCH, H200.sm_count, H200.l2_bytes))
    monkeypatch.setattr(kernel_cache, "_memory", {})

    def get(requests):
        for asked in requests:
            digest = hashlib.sha256(str(asked).encode()).hexdigest()
            kernel_cache._memory.setdefault(asked, SimpleNamespace(launch=None, digest=digest))
        return [kernel_cache._memory[asked] for asked in requests]

    monkeypatch.setattr(kernel_cache, "get", get)


def call(T=300, **flags):
    q, v, g = torch.empty(1, T, 2, 128), torch.empty(1, T, 8, 128), torch.empty(1, T, 8)
    return check_inputs(q.bfloat16(), q.bfloat16(), v.bfloat16(), g, g, **flags)


def after(*decisions):
    """The digest once these have been taken, in a process that had taken none."""
    for module in (backward, pipeline):
        module._ready.clear()
    kernel_cache._memory.clear()
    for decide in decisions:
        decide()
    return dispatch_digest()


def forward(T=300, device=None, **flags):
    def decide():
        inputs = call(T, **flags)
        if device is not None:
            inputs = dataclasses.replace(inputs, facts=inputs.facts._replace(device=torch.device("cuda", device)))
        pipeline.kernels_for(inputs)

    return decide


def with_override(**override):
    def decide():
        with select.override(**override):
            pipeline.kernels_for(call())

    return decide


def test_the_digest_is_32_bytes_and_stays_while_nothing_new_is_decided():
    first = after(forward())
    assert isinstance(first, bytes)
    assert len(first) == 32
    pipeline.kernels_for(call())
    pipeline.kernels_for(call(T=301))            # the same rounded size
    assert qla_jit.dispatch_digest() == first


def test_neither_the_order_of_decisions_nor_the_index_of_the_gpu_counts():
    short, long = forward(300), forward(30_000)
    assert after(short, long) == after(long, short)
    assert after(forward(device=0)) == after(forward(device=3))


@pytest.mark.parametrize(
    "other",
    [
        (), (forward(30_000),), (forward(), forward(30_000)), (forward(output_final_state=True),),
        (with_override(strategy="chunked"),), (forward(), lambda: backward.kernels_for(call())),
        (forward(), lambda: kernel_cache.get([request()])),
    ],
    ids=["nothing", "another-size", "one-size-more", "another-call", "override", "backward", "one-kernel-more"],
)
def test_each_decision_counts(other):
    assert after(*other) != after(forward())


def test_a_kernel_that_was_built_otherwise_counts():
    before = after(lambda: kernel_cache.get([request()]))
    kernel_cache._memory[request()].digest = "of another nvcc"
    assert dispatch_digest() != before


def test_another_choice_of_config_counts_even_where_both_kernels_are_loaded(monkeypatch):
    pipeline.kernels_for(call())
    one = dispatch_digest()
    ((key, kernels),) = pipeline._ready.items()
    dispatch = kernels.dispatch
    requests = dispatch.requests.items()
    other = {step: select.CompileRequest(r.template, r.problem, "another config", r.arch) for step, r in requests}
    monkeypatch.setitem(pipeline._ready, key, pipeline.Kernels(dataclasses.replace(dispatch, requests=other), kernels.launch))
    assert dispatch_digest() != one


def test_a_record_of_gradients_that_only_one_rank_has_is_a_difference(tmp_path, monkeypatch):
    def gradients():
        backward.kernels_for(call(T=4096))

    without = after(gradients)
    default = (100.0, 400.0)
    faster = entry(WIDE, 80.0, 320.0, default=default)
    save_directory(tmp_path / "db", [records.record(op=BACKWARD, entries=(entry(DEFAULT, *default), faster))])
    monkeypatch.setenv("QLA_JIT_DB_PATH", str(tmp_path / "db"))
    assert after(gradients) != without


def test_a_difference_is_told_by_rank():
    difference = DispatchDifference("forward H=2", {"fused": (0, 2), "chunked": (1,), None: (3,)})
    assert str(difference) == "forward H=2\n  ranks 0, 2: fused\n  rank 1: chunked\n  rank 3: nothing"


def test_without_a_process_group_it_says_what_is_missing():
    with pytest.raises(EnvironmentUnsuitable, match=r"torch.distributed, which is not initialised"):
        qla_jit.dispatch_differences()


RANK = textwrap.dedent("""
    import sys
    from types import SimpleNamespace
    import torch.distributed as dist
    import qla_jit
    from qla_jit import kernel_cache
    from qla_jit.errors import EnvironmentUnsuitable
    from tiny_template import request

    rank, ranks, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    kernels = kernel_cache._memory
    kernels[request(threads=32)] = SimpleNamespace(digest="a" * 64)
    print("agree:", qla_jit.dispatch_differences())

    pair = dist.new_group([1, 3])
    kernels[request(threads=64)] = SimpleNamespace(digest=("b" if rank != 2 else "c") * 64)
    if rank == 3:
        kernels[request(threads=128)] = SimpleNamespace(digest="d" * 64)
    for difference in qla_jit.dispatch_differences():
        print("all:", difference.key.split("Config")[1], dict(difference.decisions))
    if rank in (1, 3):
        for difference in qla_jit.dispatch_differences(pair):
            print("pair:", dict(difference.decisions))
    dist.barrier()
    if rank != 0:
        try:
            qla_jit.dispatch_differences(timeout_seconds=1)
        except EnvironmentUnsuitable as error:
            print("absent:", str(error).split(" for ")[0])
""")


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this PyTorch has no torch.distributed")
def test_four_ranks_learn_the_same_about_their_differences_and_do_not_hang(tmp_path):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(RANKS), str(tmp_path / "store")],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        )
        for rank in range(RANKS)
    ]
    told = []
    for process in processes:
        out, err = process.communicate(timeout=180)
        assert process.returncode == 0, err
        told.append(out.splitlines())
    ours, theirs = ["'" + letter * 64 + "'" for letter in "bc"]
    for rank, lines in enumerate(told):
        assert lines[:3] == [
            "agree: ()",
            f"all: (threads=128, per_thread=1) {{None: (0, 1, 2), '{'d' * 64}': (3,)}}",
            f"all: (threads=64, per_thread=1) {{{ours}: (0, 1, 3), {theirs}: (2,)}}",
        ]
        pair = [f"pair: {{None: (1,), '{'d' * 64}': (3,)}}"] if rank in (1, 3) else []
        assert lines[3:] == pair + ([f"absent: rank {rank} waited 1 s"] if rank else [])
