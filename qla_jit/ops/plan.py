"""Decide which kernels compute a call, in which order, before any tensor is looked at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .. import select
from ..compiler import CompileRequest
from ..errors import UnsupportedError
from ..kernel_templates import chunk_output, gate_cumsum, l2norm, state_scan, triangular_solve
from ..kernel_templates.arch import Arch
from ..kernel_templates.contract import Template
from .inputs import CallFacts

KEY_DIMS = (64, 96, 128, 192, 256)
VALUE_DIMS = (64, 96, 128, 192, 256, 512)

_NAMES = {
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
    torch.int32: "int32",
    torch.int64: "int64",
}


@dataclass(frozen=True)
class Step:
    """One kernel of a strategy."""

    template: Template
    problem: Any

    def request(self, arch: Arch) -> CompileRequest:
        return CompileRequest(self.template, self.problem, select.config_for(self.template, self.problem, arch), arch)


@dataclass(frozen=True)
class ForwardPlan:
    """A strategy for one set of facts: the steps by name, in launch order."""

    strategy: str
    steps: dict[str, Step]

    def requests(self, arch: Arch) -> list[CompileRequest]:
        return [step.request(arch) for step in self.steps.values()]


def plan_forward(facts: CallFacts) -> ForwardPlan:
    """The baseline strategy, "chunked": gates -> solve -> state scan -> chunk output, every intermediate in memory.

    Raises:
        UnsupportedError: no template covers the head dims.
    """
    if facts.K not in KEY_DIMS or facts.V not in VALUE_DIMS:
        raise UnsupportedError(
            f"no kernel covers K={facts.K}, V={facts.V}: K must be one of {KEY_DIMS} and V one of {VALUE_DIMS}; "
            "pad the head dims with zeros, or move the inputs to the CPU for the reference implementation"
        )
    C, dtype = facts.chunk_size, _NAMES[facts.dtype]
    packed = facts.varlen
    index_dtype = _NAMES[facts.cu_seqlens_dtype] if packed else "int32"
    heads = dict(H=facts.H, HV=facts.HV, K=facts.K)
    chunks = dict(C=C, dtype=dtype, packed=packed, index_dtype=index_dtype)

    steps = {}
    if facts.use_qk_l2norm_in_kernel:
        steps["l2norm"] = Step(l2norm.TEMPLATE, l2norm.Problem(K=facts.K, dtype=dtype))
    steps["gate_cumsum"] = Step(
        gate_cumsum.TEMPLATE,
        gate_cumsum.Problem(
            HV=facts.HV,
            C=C,
            gate_dtype=_NAMES[facts.g_dtype],
            beta_dtype=_NAMES[facts.beta_dtype],
            packed=packed,
            index_dtype=index_dtype,
            gate_in_kernel=facts.use_gate_in_kernel,
            has_dt_bias=facts.dt_bias_dtype is not None,
            beta_sigmoid=facts.use_beta_sigmoid_in_kernel,
            negative_eigenvalues=facts.allow_neg_eigval,
        ),
    )
    steps["triangular_solve"] = Step(triangular_solve.TEMPLATE, triangular_solve.Problem(**heads, **chunks))
    steps["state_scan"] = Step(
        state_scan.TEMPLATE,
        state_scan.Problem(
            **heads,
            **chunks,
            V=facts.V,
            initial_state_dtype=None if facts.state_dtype is None else _NAMES[facts.state_dtype],
            has_final_state=facts.output_final_state,
            state_v_first=facts.state_v_first,
        ),
    )
    steps["chunk_output"] = Step(chunk_output.TEMPLATE, chunk_output.Problem(**heads, **chunks, V=facts.V))
    return ForwardPlan("chunked", steps)


