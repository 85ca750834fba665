"""warpgroup_gradients compiles without serialised products in every config, and says what it cannot do."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from test_templates import lowered

from qla_jit import compiler, kernel_cache
from qla_jit.compiler import CompileRequest
from qla_jit.kernel_templates.arch import SM80, SM90A
from qla_jit.kernel_templates.warpgroup_gradients import TEMPLATE, Problem

QWEN = Problem(H=2, HV=8, K=128, V=128, C=64, dtype="bfloat16", packed=True, index_dtype="int32")


@pytest.mark.parametrize("changes", [{"packed": False, "index_dtype": "int64"}, {"HV": 2}], ids=str)
def test_it_lowers_to_bulk_copies_and_warpgroup_products(changes: dict[str, Any]) -> None:
    source = lowered(TEMPLATE, replace(QWEN, **changes), SM90A)
    assert "tma_load" in source
    assert "wgmma" in source


@pytest.mark.parametrize(
    ("changes", "arch", "reason"),
    [({"C": 32}, SM90A, "C=32"), ({"V": 256}, SM90A, "V=256"), ({"dtype": "float16"}, SM90A, "float16"), ({}, SM80, "sm_80")],
    ids=str,
)
def test_what_it_cannot_do_is_rejected_with_the_reason(changes: dict[str, Any], arch: Any, reason: str) -> None:
    problem = replace(QWEN, **changes)
    rejection = TEMPLATE.rejection(problem, TEMPLATE.default_config(problem, arch), arch)
    assert rejection is not None
    assert reason in str(rejection)


def test_two_stages_of_everything_do_not_fit() -> None:
    assert {(config.key_stages, config.value_stages) for config in TEMPLATE.configs(QWEN, SM90A)} == {(1, 1), (1, 2), (2, 1)}


@pytest.mark.timeout(900)
def test_no_product_is_serialised_and_spills_are_few(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if compiler.find_nvcc() is None:
        pytest.skip("needs nvcc")
    monkeypatch.setenv("QLA_JIT_CACHE_DIR", str(tmp_path))
    (kernel,) = kernel_cache.get([CompileRequest(TEMPLATE, QWEN, TEMPLATE.default_config(QWEN, SM90A), SM90A)])
    ptxas = json.loads((kernel.directory / compiler.BUILD_REPORT).read_text())["ptxas"]
    assert ptxas["functions"], "the build reports nothing of ptxas"
    for function in ptxas["functions"].values():
        assert function["spill_store_bytes"] <= 128      # of the single warps, which have 24 registers
    assert not [remark for remark in ptxas["remarks"] if "serialized" in remark]
