"""Does a server with QLA_JIT_MODE=require and without nvcc find the kernel of every call of a layer that was built for?

The commands are those of qla-tune build, the records those that ship, the GPU is an H200 by name. What is built and looked for
are keys: nothing is compiled.
"""

from __future__ import annotations

import functools
import itertools
import shlex
import tempfile

import pytest
import records
import torch
from records import H200

import qla_jit
from qla_jit import bundle, compiler, kernel_cache, kernel_store, record_store
from qla_jit.build_command import build_command
from qla_jit.device import GpuInfo
from qla_jit.enumeration import Variants
from qla_jit.errors import KernelNotCachedError
from qla_jit.launch import LoadedKernel
from qla_jit.models import ModelShape, model, models
from qla_jit.ops import autograd, backward, pipeline
from qla_jit.ops import warmup as warmup_module
from qla_jit.ops.inputs import CallInputs, check_inputs, state_shape

GPU = GpuInfo("NVIDIA H200", records.ARCH, H200.sm_count, H200.l2_bytes)
BUILDERS_NVCC = "13.0.88"

# A few tokens; where some chains leave SMs idle; many short sequences; where long ones are split.
LENGTHS = ((40, 5), (3584, 512), (512,) * 8, (28672, 4096))

# A name for each shape that the models of models.json have.
SHAPES = {model(name).on(1): name for name in models()}

# What a call may have that is compiled in, beside states and cu_seqlens, which are varied below.
FLAGS = (
    {},
    {"use_qk_l2norm_in_kernel": True},
    {"state_v_first": True},
    {"chunk_size": 32},
    {"chunk_size": 16},
    {"auto_cp": False},
    {"dtype": torch.float16},
    {"g_dtype": torch.bfloat16},
    {"beta_dtype": torch.bfloat16},
    {"state_dtype": torch.bfloat16},
    {"use_gate_in_kernel": True},
    {"use_gate_in_kernel": True, "dt_bias": False},
    {"use_beta_sigmoid_in_kernel": True},
    {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True},
    {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True},
)


@pytest.fixture(autouse=True)
def built(run, tmp_path, monkeypatch):
    """A server that has what a command builds; the keys of it, without nvcc."""
    monkeypatch.setenv("QLA_JIT_CACHE_DIR", str(tmp_path / "cache"))
    for name in ("QLA_JIT_MODE", "QLA_JIT_DB_PATH", "QLA_JIT_BUNDLE_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for module in (backward, pipeline, warmup_module):
        monkeypatch.setattr(module, "gpu_info", lambda device: GPU)
    monkeypatch.setattr(warmup_module, "gpu_count", lambda: 1)
    monkeypatch.setattr(kernel_cache, "key_of", functools.cache(kernel_cache.key_of))
    shipped: set[str] = set()

    def build(requests, directory, *, on_kernel):
        shipped.update(kernel_cache.key_of(request).without_nvcc().digest() for request in requests)
        return bundle.Built(len(requests), 0, 0.0, ())

    def find(key):
        assert key.nvcc is None, "a server has none"
        digest = key.digest()
        return LoadedKernel(print, key.template, (), digest, tmp_path) if digest in shipped else None

    def of(command: str) -> set[str]:
        forget(monkeypatch)
        shipped.clear()
        monkeypatch.delenv("QLA_JIT_MODE", raising=False)
        monkeypatch.setattr(compiler, "nvcc_version", lambda: BUILDERS_NVCC)
        run(*shlex.split(command.replace("DIR", str(tmp_path / "out")))[1:])
        kernel_cache.key_of.cache_clear()
        monkeypatch.setattr(compiler, "nvcc_version", lambda: None)
        monkeypatch.setenv("QLA_JIT_MODE", "require")
        return shipped

    monkeypatch.setattr(bundle, "build", build)
    monkeypatch.setattr(bundle, "add_records", lambda records, directory: None)
    monkeypatch.setattr(kernel_store, "find", find)
    yield of
    kernel_cache.clear_memory()
    record_store._open.cache_clear()


def forget(monkeypatch):
    """As a new process knows nothing."""
    kernel_cache.clear_memory()
    for module in (backward, pipeline):
        monkeypatch.setattr(module, "_ready", {})


def call(
    shape: ModelShape,
    lengths: tuple[int, ...],
    *,
    index_dtype: torch.dtype | None,
    with_state: bool,
    final_state: bool,
    dtype: torch.dtype = torch.bfloat16,
    g_dtype: torch.dtype = torch.float32,
    beta_dtype: torch.dtype = torch.float32,
    state_dtype: torch.dtype = torch.float32,
    dt_bias: bool = True,
    **flags,
) -> CallInputs:
    """A call of packed sequences, or of one sequence as long as all of them. Nothing touches its memory."""
    T, (H, HV, K, V) = sum(lengths), (shape.H, shape.HV, shape.K, shape.V)
    q, v = torch.empty(1, T, H, K, dtype=dtype), torch.empty(1, T, HV, V, dtype=dtype)
    g, beta = torch.empty(1, T, HV, dtype=g_dtype), torch.empty(1, T, HV, dtype=beta_dtype)
    packing = state = None
    if index_dtype is not None:
        packing = torch.tensor([0, *itertools.accumulate(lengths)], dtype=index_dtype)
    if with_state:
        N = 1 if packing is None else len(lengths)
        state = torch.empty(state_shape(N, HV, K, V, flags.get("state_v_first", False))[0], dtype=state_dtype)
    if flags.get("use_gate_in_kernel"):
        flags["A_log"] = torch.empty(HV)
        flags["dt_bias"] = torch.empty(HV) if dt_bias else None
    return check_inputs(q, q, v, g, beta, initial_state=state, output_final_state=final_state, cu_seqlens=packing, **flags)


def assert_no_call_misses(shape: ModelShape, *, differentiated: bool, **flags) -> None:
    kinds = itertools.product(LENGTHS, (torch.int32, torch.int64, None), (False, True), (False, True))
    for lengths, index_dtype, with_state, final_state in kinds:
        inputs = call(shape, lengths, index_dtype=index_dtype, with_state=with_state, final_state=final_state, **flags)
        pipeline.kernels_for(inputs)
        if differentiated:
            assert autograd.covers(inputs), "its gradients have kernels"


def variants_of(flags: dict[str, object], **more: bool) -> Variants:
    return Variants(**{name: value for name, value in flags.items() if name != "auto_cp"}, **more)


def id_of(flags: dict[str, object]) -> str:
    return "-".join(f"{name}={str(value).removeprefix('torch.')}" for name, value in flags.items()) or "none"


@pytest.mark.parametrize("flags", FLAGS, ids=id_of)
@pytest.mark.parametrize("shape", SHAPES, ids=SHAPES.get)
def test_no_call_of_a_model_with_a_flag_misses_in_either_direction(built, monkeypatch, shape, flags):
    variants = variants_of(flags, backward=True)
    shipped = built(build_command(shape, variants, GPU))
    assert_no_call_misses(shape, differentiated=True, **flags)
    forget(monkeypatch)
    assert qla_jit.warmup(heads=(shape.H, shape.HV), dims=(shape.K, shape.V), **vars(variants)) == len(shipped)


@pytest.mark.parametrize("tp", [1, 2], ids="tp{}".format)
@pytest.mark.parametrize("name", models())
def test_the_command_of_the_documentation_covers_all_calls_of_inference(built, monkeypatch, name, tp):
    shipped = built(f"qla-tune build --arch sm_90a --sm-count 132 --model {name} --tp {tp} --out DIR")
    for use_qk_l2norm_in_kernel in (False, True):
        assert_no_call_misses(model(name).on(tp), differentiated=False, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel)
    forget(monkeypatch)
    assert qla_jit.warmup(model=name, tp=tp) == len(shipped)


def test_a_kernel_that_was_not_built_is_missed(built):
    """So that the tests above can fail."""
    shape = model("qwen3.5-27b").on(2)
    shipped = built(build_command(shape, Variants(), GPU))
    inputs = call(shape, LENGTHS[0], index_dtype=torch.int32, with_state=True, final_state=True)
    dispatch, _ = pipeline.choice_for(inputs)
    shipped.remove(kernel_cache.key_of(dispatch.requests["chunk_inverse"]).digest())
    with pytest.raises(KernelNotCachedError, match="chunk_inverse"):
        assert_no_call_misses(shape, differentiated=False)
    with pytest.raises(KernelNotCachedError, match=r"chunk_inverse(.|\n)*qla-tune build .* --heads 8:24"):
        qla_jit.warmup(model="qwen3.5-27b", tp=2)
