"""After a warmup, does no call ask for a kernel that is not ready?"""

import inspect
import itertools
import re
import tempfile
from dataclasses import fields
from types import SimpleNamespace

import pytest
import records
import torch
from records import DEFAULT, H200, WIDE, entry

import qla_jit
from qla_jit import kernel_cache, record_store, tuning_db
from qla_jit.device import GpuInfo
from qla_jit.enumeration import Variants
from qla_jit.errors import DeviceError, DtypeError, EnvironmentUnsuitable, InputError, KernelNotCachedError, UnsupportedError
from qla_jit.models import ModelShape, model, models
from qla_jit.ops import autograd, backward, pipeline
from qla_jit.ops import warmup as warmup_module
from qla_jit.ops.inputs import check_inputs, state_shape
from qla_jit.ops.plan import BACKWARD

# One chunk; where a few chains leave SMs idle; where long sequences are split.
LENGTHS = (1, 4096, 32768)


@pytest.fixture(autouse=True)
def asked(tmp_path, monkeypatch):
    """An H200 by name; a "kernel" is the request that it was made for. The requests of each get()."""
    monkeypatch.setenv("QLA_JIT_CACHE_DIR", str(tmp_path / "cache"))
    for name in ("QLA_JIT_DB_PATH", "QLA_JIT_BUNDLE_PATH", "QLA_JIT_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(tuning_db, "__path__", [str(tmp_path / "shipped")])
    gpu = GpuInfo("NVIDIA H200", records.ARCH, H200.sm_count, H200.l2_bytes)
    requests = []

    def get(batch):
        requests.append(set(batch))
        return [SimpleNamespace(launch=request) for request in batch]

    for module in (backward, pipeline):
        monkeypatch.setattr(module, "_ready", {})
    for module in (backward, pipeline, warmup_module):
        monkeypatch.setattr(module, "gpu_info", lambda device: gpu)
    monkeypatch.setattr(warmup_module, "gpu_count", lambda: 1)
    monkeypatch.setattr(kernel_cache, "get", get)
    yield requests
    record_store._open.cache_clear()


def call(shape, T, *, index_dtype=None, with_state=False, final_state=True, dtype=torch.bfloat16, **flags):
    """A call of one long and one short sequence, or of one sequence where they are not packed. Nothing touches its memory."""
    q = torch.empty(1, T, shape.H, shape.K, dtype=dtype)
    v = torch.empty(1, T, shape.HV, shape.V, dtype=dtype)
    g = torch.empty(1, T, shape.HV)
    cu_seqlens = None if index_dtype is None else torch.tensor([0, T - T // 8, T], dtype=index_dtype)
    N = 1 if cu_seqlens is None else 2
    state = None
    if with_state:
        state = torch.empty(state_shape(N, shape.HV, shape.K, shape.V, flags.get("state_v_first", False))[0])
    if flags.get("use_gate_in_kernel"):
        flags["A_log"] = torch.empty(shape.HV)
        flags["dt_bias"] = torch.empty(shape.HV)
    return check_inputs(q, q, v, g, g, initial_state=state, output_final_state=final_state, cu_seqlens=cu_seqlens, **flags)


def strategies_of_calls(ready, asked, shape, **kinds):
    """Make a call of each length, with and without states; the strategies that they took. Each must find its kernels ready."""
    strategies = set()
    for T, with_state, final_state in itertools.product(LENGTHS, (False, True), (False, True)):
        del asked[:]
        inputs = call(shape, T, with_state=with_state, final_state=final_state, **kinds)
        strategies.add(pipeline.kernels_for(inputs).dispatch.strategy)
        (needed,) = asked
        assert needed <= ready, {str(request) for request in needed - ready}
    return strategies


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64, None], ids=str)
@pytest.mark.parametrize("tp", [1, 2], ids="tp{}".format)
@pytest.mark.parametrize("name", models())
def test_calls_of_every_model_ask_for_nothing_else(asked, name, tp, index_dtype):
    count = qla_jit.warmup(model=name, tp=tp)
    (ready,) = asked
    assert count == len(ready)
    taken = strategies_of_calls(ready, asked, model(name).on(tp), index_dtype=index_dtype)
    assert taken <= ({"fused", "fused_halves", "split"} if model(name).K <= 128 else {"chunked"})


@pytest.mark.parametrize(
    "flags",
    [
        {"use_qk_l2norm_in_kernel": True},
        {"use_gate_in_kernel": True},
        {"use_beta_sigmoid_in_kernel": True},
        {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True},
        {"state_v_first": True},
        {"chunk_size": 32},
        {"dtype": torch.float16},
        {},
        {"auto_cp": False},
    ],
    ids=lambda flags: "-".join(f"{name}={value}" for name, value in flags.items()) or "none",
)
def test_calls_with_each_flag_ask_for_nothing_else(asked, flags):
    qla_jit.warmup(heads=(4, 8), **{name: value for name, value in flags.items() if name != "auto_cp"})
    (ready,) = asked
    for index_dtype in (torch.int32, torch.int64, None):
        strategies_of_calls(ready, asked, ModelShape(H=4, HV=8, K=128, V=128), index_dtype=index_dtype, **flags)


@pytest.mark.parametrize("flags", [{}, {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True}], ids=["plain", "layer"])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64, None], ids=str)
@pytest.mark.parametrize("name", ["qwen3.5-27b", "olmo-hybrid", "fla-gated-deltanet"])
def test_a_training_step_asks_for_nothing_else(asked, name, index_dtype, flags):
    qla_jit.warmup(model=name, backward=True, **flags)
    (ready,) = asked
    for T, with_state, final_state in itertools.product(LENGTHS, (False, True), (False, True)):
        del asked[:]
        inputs = call(model(name), T, index_dtype=index_dtype, with_state=with_state, final_state=final_state, **flags)
        assert autograd.covers(inputs)
        assert all(needed <= ready for needed in asked)


def test_what_records_name_is_ready_too(asked):
    default, wide = entry(DEFAULT, 100.0, 400.0), entry(WIDE, 80.0, 320.0, default=(100.0, 400.0))
    record_store.save_user_records([records.record(entries=(default, wide))])
    qla_jit.warmup(heads=(2, 8))
    (ready,) = asked
    taken = strategies_of_calls(ready, asked, ModelShape(H=2, HV=8, K=128, V=128))
    assert taken == {"fused_halves", "split", "chunked"}         # 4096 tokens are 64 chunks, between those of the record


def test_what_records_of_gradients_name_is_ready_too(asked):
    default, wide = entry(DEFAULT, 100.0, 400.0), entry(WIDE, 80.0, 320.0, default=(100.0, 400.0))
    record_store.save_user_records([records.record(op=BACKWARD, entries=(default, wide))])
    qla_jit.warmup(heads=(2, 8), backward=True)
    (ready,) = asked
    del asked[:]
    taken = {backward.kernels_for(call(ModelShape(H=2, HV=8, K=128, V=128), T)).dispatch.strategy for T in LENGTHS}
    assert taken == {"registers", "registers_split", "chunked"}          # 4096 tokens are 64 chunks, between those of the record
    assert all(needed <= ready for needed in asked)


def test_kinds_that_are_ruled_out_are_not_asked_for(asked):
    qla_jit.warmup(heads=(2, 8), packed=True, index_dtypes=(torch.int32,), initial_state=True, output_final_state=True)
    qla_jit.warmup(heads=(2, 8))
    few, all_kinds = asked
    assert few < all_kinds
    assert {(request.problem.packed, request.problem.index_dtype) for request in few if hasattr(request.problem, "packed")} == {
        (True, "int32")
    }


def test_a_warmup_says_what_is_missing_where_nothing_may_be_compiled(monkeypatch):
    def get(requests):
        raise KernelNotCachedError("not in the kernel cache")

    monkeypatch.setattr(kernel_cache, "get", get)
    with pytest.raises(KernelNotCachedError):
        qla_jit.warmup(model="qwen3.5-27b", tp=2)


def test_without_a_gpu_the_error_names_what_works_without_one(monkeypatch):
    monkeypatch.setattr(warmup_module, "gpu_count", lambda: 0)
    with pytest.raises(EnvironmentUnsuitable, match=r"PyTorch sees none; .* qla-tune build"):
        qla_jit.warmup(model="qwen3.5-27b")


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({}, InputError, "by model and tp, or by heads and dims"),
        ({"model": "qwen3.5-27b", "heads": (2, 8)}, InputError, "by model and tp, or by heads and dims"),
        ({"heads": (2, 8), "tp": 2}, InputError, "by model and tp, or by heads and dims"),
        ({"model": "gpt"}, InputError, "no heads of a model 'gpt'"),
        ({"model": "qwen3.5-27b", "tp": 5}, InputError, "tensor parallel size of 5"),
        ({"heads": (3, 8)}, InputError, "got 3:8"),
        ({"heads": (2, 8), "dims": (100, 128)}, UnsupportedError, "K=100"),
        ({"heads": (2, 8), "dtype": torch.float32}, DtypeError, "got torch.float32"),
        ({"heads": (2, 8), "device": "cpu"}, DeviceError, "got device='cpu'"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_what_cannot_be_warmed_up_is_refused(asked, arguments, error, says):
    with pytest.raises(error, match=re.escape(says)):
        qla_jit.warmup(**arguments)
    assert asked == []


def test_it_takes_every_variant_with_the_same_default_and_documents_its_parameters():
    parameters = inspect.signature(qla_jit.warmup).parameters
    assert {name: parameters[name].default for name in (field.name for field in fields(Variants))} == vars(Variants())
    documented = set(re.findall(r"\w+", qla_jit.warmup.__doc__.split("Args:")[1].split("Returns:")[0]))
    assert set(parameters) <= documented
