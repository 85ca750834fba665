"""Does a call get its kernels by problem, size and override, and choose only once for each?"""

import tempfile
from types import SimpleNamespace

import pytest
import records
import torch

from qla_jit import kernel_cache, record_store, select, tuning_db
from qla_jit.device import GpuInfo
from qla_jit.kernel_templates import state_scan
from qla_jit.ops import pipeline, plan
from qla_jit.ops.inputs import check_inputs
from qla_jit.record_store import save_user_records


@pytest.fixture(autouse=True)
def _a_gpu_without_kernels(tmp_path, monkeypatch):
    """An H200 by name; a "kernel" is the request that it was made for."""
    # Records of these tests are about the baseline's kernels: no other strategy is the default here.
    monkeypatch.setattr(plan, "STRATEGIES", {"chunked": plan.STRATEGIES["chunked"]})
    monkeypatch.setenv("QLA_JIT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("QLA_JIT_DB_PATH", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(tuning_db, "__path__", [str(tmp_path / "shipped")])
    monkeypatch.setattr(pipeline, "_ready", {})
    gpu = GpuInfo("NVIDIA H200", records.ARCH, records.H200.sm_count, records.H200.l2_bytes)
    monkeypatch.setattr(pipeline, "gpu_info", lambda device: gpu)
    monkeypatch.setattr(kernel_cache, "get", lambda requests: [SimpleNamespace(launch=request) for request in requests])
    yield
    record_store._open.cache_clear()


def call(tokens, batches=1):
    q, v, g = torch.empty(batches, tokens, 2, 128), torch.empty(batches, tokens, 8, 128), torch.empty(batches, tokens, 8)
    return check_inputs(q.bfloat16(), q.bfloat16(), v.bfloat16(), g, g)


def block_v(tokens):
    return pipeline.kernels_for(call(tokens)).launch["state_scan"].config.block_v


def test_a_record_decides_at_its_sizes_and_the_default_elsewhere():
    save_user_records([records.record()])                        # 32 to 128 chunks: 128 columns
    assert [block_v(tokens) for tokens in (512, 4096, 65536)] == [64, 128, 64]


def test_calls_of_about_the_same_size_share_a_choice(monkeypatch):
    chosen = []
    choose = select.choose
    monkeypatch.setattr(select, "choose", lambda *args, **kwargs: chosen.append(kwargs["extents"]) or choose(*args, **kwargs))
    for tokens in (64 * 100, 64 * 100 - 5, 64 * 101, 64 * 200):
        pipeline.kernels_for(call(tokens))
    pipeline.kernels_for(call(64 * 100, batches=2))
    assert [(e.chunks, e.sequences) for e in chosen] == [(96, 1), (192, 1), (192, 2)]


def test_an_override_holds_for_its_block_only():
    config = state_scan.Config(block_v=32, threads=128, stages=2)
    assert block_v(4096) == 64
    with select.override(state_scan=config):
        assert block_v(4096) == 32
    assert block_v(4096) == 64


def test_the_split_comes_with_the_kernels():
    with select.override(split=16):
        assert pipeline.kernels_for(call(4096)).dispatch.split == 16
    assert pipeline.kernels_for(call(4096)).dispatch.split is None
