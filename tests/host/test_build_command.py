"""Does the command that a miss names build what was missing?"""

import shlex
import tempfile
from dataclasses import fields

import pytest
import records
import torch
from records import H200

from qla_jit import bundle, enumeration, kernel_cache, select, tuning_db
from qla_jit.build_command import build_command, build_command_of_call
from qla_jit.bundle import Built
from qla_jit.device import GpuInfo
from qla_jit.enumeration import Variants
from qla_jit.errors import KernelNotCachedError
from qla_jit.models import ModelShape
from qla_jit.ops import backward, pipeline
from qla_jit.ops import warmup as warmup_module
from qla_jit.ops.inputs import check_inputs

GPU = GpuInfo("NVIDIA H200", records.ARCH, H200.sm_count, H200.l2_bytes)
SHAPE = ModelShape(4, 8, 128, 64)


@pytest.fixture(autouse=True)
def _places(tmp_path, monkeypatch):
    monkeypatch.setenv("QLA_JIT_CACHE_DIR", str(tmp_path / "cache"))
    for name in ("QLA_JIT_DB_PATH", "QLA_JIT_BUNDLE_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("QLA_JIT_MODE", "require")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(tuning_db, "__path__", [str(tmp_path / "shipped")])
    for module in (backward, pipeline):
        monkeypatch.setattr(module, "_ready", {})
    for module in (backward, pipeline, warmup_module):
        monkeypatch.setattr(module, "gpu_info", lambda device: GPU)
    monkeypatch.setattr(warmup_module, "gpu_count", lambda: 1)
    kernel_cache.clear_memory()


@pytest.fixture
def built(run, tmp_path, monkeypatch):
    """Run a command; the requests that it would compile."""
    found = []

    def build(requests, directory, *, on_kernel):
        found.extend(requests)
        return Built(len(requests), 0, 0.0, ())

    monkeypatch.setattr(bundle, "build", build)

    def of(command):
        program, *words = shlex.split(command.replace("DIR", str(tmp_path / "out")))
        assert program == "qla-tune"
        found.clear()
        run(*words)
        return set(found)

    return of


CASES = [
    Variants(),
    Variants(dtype=torch.float16, chunk_size=32, packed=True, index_dtypes=(torch.int32,)),
    Variants(packed=False, initial_state=True, output_final_state=False, state_dtype=torch.bfloat16, state_v_first=True),
    Variants(initial_state=False, output_final_state=True, use_qk_l2norm_in_kernel=False),
    Variants(use_gate_in_kernel=True, dt_bias=False, g_dtype=torch.bfloat16),
    Variants(use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True, beta_dtype=torch.float16, backward=True),
]


@pytest.mark.parametrize("variants", CASES, ids=lambda v: build_command(SHAPE, v, GPU).split("128:64 ")[1])
def test_the_command_builds_what_the_variants_are(built, variants):
    assert built(build_command(SHAPE, variants, GPU)) == set(enumeration.kernels(SHAPE, variants, GPU.arch, []))


def test_the_cases_change_every_field():
    usual = Variants()
    assert {f.name for f in fields(Variants)} == {
        f.name for case in CASES for f in fields(Variants) if getattr(case, f.name) != getattr(usual, f.name)
    }


@pytest.mark.parametrize("variants", CASES, ids=lambda v: build_command(SHAPE, v, GPU).split("128:64 ")[1])
def test_the_command_for_one_call_builds_that_call_at_any_size(built, variants):
    for facts in variants.calls(SHAPE):
        made = built(build_command_of_call(facts, GPU, backward=variants.backward))
        assert made >= set(select.requests_for_any_size(facts, GPU.arch))
        if variants.backward:
            assert made >= set(select.backward_requests_for_any_size(facts, GPU.arch))


def command_in(error):
    (line,) = [line for line in str(error.value).splitlines() if line.startswith("To build it for QLA_JIT_BUNDLE_PATH=DIR: ")]
    return line.split(": ", 1)[1]


def test_a_call_that_misses_names_the_command_that_builds_it(built):
    q, v, g = torch.empty(1, 300, 4, 128), torch.empty(1, 300, 8, 64), torch.empty(1, 300, 8)
    inputs = check_inputs(q.bfloat16(), q.bfloat16(), v.bfloat16(), g, g, use_qk_l2norm_in_kernel=True)
    with pytest.raises(KernelNotCachedError, match="no kernel of the template") as error:
        pipeline.kernels_for(inputs)
    dispatch, _ = pipeline.choice_for(inputs)
    assert built(command_in(error)) >= set(dispatch.requests.values())
    with pytest.raises(KernelNotCachedError) as error:
        backward.kernels_for(inputs)
    assert built(command_in(error)) >= set(select.choose_backward(inputs.facts, GPU.arch).requests.values())


def test_a_warmup_that_misses_names_the_command_that_builds_it_all(built):
    with pytest.raises(KernelNotCachedError) as error:
        warmup_module.warmup(heads=(4, 8), dims=(128, 64), packed=True, index_dtypes=(torch.int32,))
    variants = Variants(packed=True, index_dtypes=(torch.int32,))
    assert built(command_in(error)) == set(enumeration.kernels(SHAPE, variants, GPU.arch, []))
