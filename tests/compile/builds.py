"""What the tests of this folder do with a template: lower it without nvcc, compile it, ask why it refuses a problem."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from qla_jit import compiler, kernel_cache
from qla_jit.compiler import CompileRequest
from qla_jit.kernel_templates.arch import SM90A, Arch
from qla_jit.kernel_templates.contract import Template


def lowered(template: Template, problem: Any, arch: Arch) -> str:
    """The CUDA source of a kernel in its default config, made without nvcc."""
    import tilelang
    from tilelang import tvm

    config = template.default_config(problem, arch)
    assert template.rejection(problem, config, arch) is None
    target = tvm.target.Target(arch.target)
    with target, tvm.transform.PassContext(opt_level=3, config=dict(template.pass_configs)):
        return tilelang.lower(template.build(problem, config), target=target).kernel_source


def ptxas_reports(kernels: Iterable[tuple[Template, Any, Any]], cache: Path) -> list[dict[str, Any]]:
    """What ptxas says of the builds for Hopper of (template, problem, config); a config of None is the default."""
    if compiler.find_nvcc() is None:
        pytest.skip("needs nvcc")
    requests = [
        CompileRequest(template, problem, template.default_config(problem, SM90A) if config is None else config, SM90A)
        for template, problem, config in kernels
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QLA_JIT_CACHE_DIR", str(cache))
        built = kernel_cache.get(requests)
    reports = [json.loads((kernel.directory / compiler.BUILD_REPORT).read_text())["ptxas"] for kernel in built]
    assert all(report["functions"] for report in reports), "a build reports nothing of ptxas"
    return reports


def serialised(ptxas: dict[str, Any]) -> list[str]:
    """Remarks that every product of a kernel waits for the one before."""
    return [remark for remark in ptxas["remarks"] if "serialized" in remark]


def refusal(template: Template, problem: Any, arch: Arch) -> str:
    """Why a template refuses a problem in the config that it would choose."""
    rejection = template.rejection(problem, template.default_config(problem, arch), arch)
    assert rejection is not None
    return str(rejection)
