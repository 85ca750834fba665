"""How each library computes the same packed forward call: one System for each column of the table."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING

import torch
from workload import Inputs

if TYPE_CHECKING:
    from qla_jit.device import GpuInfo
    from qla_jit.ops.inputs import CallInputs

Call = Callable[[], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class System:
    """A column: `prepare` imports the library and returns the call, which gives (o [1, T, HV, V], state [N, HV, K, V])."""

    name: str                            # key in the JSON
    module: str                          # what has to be importable
    distribution: str                    # whose version goes into the JSON
    prepare: Callable[[Inputs], Call]

    @property
    def installed(self) -> bool:
        return importlib.util.find_spec(self.module) is not None

    @property
    def version(self) -> str | None:
        try:
            return metadata.version(self.distribution)
        except metadata.PackageNotFoundError:
            return None


def qla_jit_call(x: Inputs) -> Call:
    import qla_jit

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        return qla_jit.chunk_gated_delta_rule(
            x.q, x.k, x.v, x.g, x.beta, initial_state=x.initial_state, output_final_state=True,
            cu_seqlens=x.cu_seqlens, cu_seqlens_cpu=x.cu_seqlens_cpu,
        )

    return call


def checked(x: Inputs) -> CallInputs:
    from qla_jit.ops.inputs import check_inputs

    return check_inputs(
        x.q, x.k, x.v, x.g, x.beta, initial_state=x.initial_state, output_final_state=True,
        cu_seqlens=x.cu_seqlens, cu_seqlens_cpu=x.cu_seqlens_cpu,
    )


def strategy_of(x: Inputs, gpu: GpuInfo, *, backward: bool = False) -> str:
    """How qla_jit computes the call on such a GPU, with the chunks of a segment where it splits: "split/32"."""
    from qla_jit import select
    from qla_jit.ops.plan import BACKWARD, FORWARD, chunk_of_sizes
    from qla_jit.tuning_records import Hardware

    inputs, op = checked(x), BACKWARD if backward else FORWARD
    extents = select.bucket(select.extents_of(inputs, chunk_of_sizes(op, inputs.facts)))
    dispatch = select.choose(inputs.facts, gpu.arch, op=op, hardware=Hardware.of(gpu), extents=extents)
    return dispatch.strategy if dispatch.split is None else f"{dispatch.strategy}/{dispatch.split}"


def flash_qla_call(x: Inputs) -> Call:
    # The low-level entry: the public one adds autograd on top of it.
    from flash_qla import chunk_gated_delta_rule_fwd

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        _, _, o, _, final_state, _ = chunk_gated_delta_rule_fwd(
            x.q, x.k, x.v, x.g, x.beta, initial_state=x.initial_state, cu_seqlens=x.cu_seqlens, output_final_state=True,
        )
        return o, final_state

    return call


def flashinfer_call(x: Inputs, *, use_cp: str | bool = "auto") -> Call:
    from flashinfer.gdn_prefill import chunk_gated_delta_rule

    q, k, v, g, beta = (tensor[0] for tensor in (x.q, x.k, x.v, x.g, x.beta))      # [T, heads, ...]
    state_v_first = x.initial_state.transpose(-1, -2).contiguous()                 # [N, HV, V, K]: it knows no other layout
    max_seqlen = max(x.seqlens)

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        o, final_state = chunk_gated_delta_rule(
            q, k, v, g, beta, initial_state=state_v_first, output_final_state=True,
            cu_seqlens=x.cu_seqlens, max_seqlen=max_seqlen, use_cp=use_cp, gate_domain="log",
        )
        return o[None], final_state.transpose(-1, -2)

    return call


def flashinfer_cp_call(x: Inputs) -> Call:
    return flashinfer_call(x, use_cp=True)


def fla_call(x: Inputs) -> Call:
    os.environ["FLA_FLASH_QLA"] = "0"    # else it hands the call to FlashQLA, which has a column of its own
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        return chunk_gated_delta_rule(
            x.q, x.k, x.v, x.g, x.beta, initial_state=x.initial_state, output_final_state=True,
            cu_seqlens=x.cu_seqlens, cu_seqlens_cpu=x.cu_seqlens_cpu,
        )

    return call


SYSTEMS = (
    System("qla_jit", module="qla_jit", distribution="qla_jit", prepare=qla_jit_call),
    System("flash_qla", module="flash_qla", distribution="flash-qla", prepare=flash_qla_call),
    System("flashinfer", module="flashinfer", distribution="flashinfer-python", prepare=flashinfer_call),
    System("flashinfer_cp", module="flashinfer", distribution="flashinfer-python", prepare=flashinfer_cp_call),
    System("fla", module="fla", distribution="fla-core", prepare=fla_call),
)
