"""Which command builds the kernels of a call? Said where QLA_JIT_MODE=require misses one."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator

import torch

from .device import GpuInfo
from .enumeration import Variants
from .errors import KernelNotCachedError
from .models import ModelShape
from .ops.inputs import CallFacts

# The option of qla-tune build that makes a field of Variants something else than its default.
_FLAGS = {
    "state_v_first": {True: "--state-v-first"},
    "use_qk_l2norm_in_kernel": {False: "--no-l2norm"},
    "use_gate_in_kernel": {True: "--gate-in-kernel"},
    "dt_bias": {False: "--no-dt-bias"},
    "use_beta_sigmoid_in_kernel": {True: "--beta-sigmoid"},
    "allow_neg_eigval": {True: "--neg-eigval"},
    "backward": {True: "--backward"},
    "packed": {True: "--packed", False: "--not-packed"},
    "initial_state": {True: "--initial-state", False: "--no-initial-state"},
    "output_final_state": {True: "--final-state", False: "--no-final-state"},
}
_VALUES = {
    "dtype": "--dtype",
    "chunk_size": "--chunk-size",
    "state_dtype": "--state-dtype",
    "g_dtype": "--gate-dtype",
    "beta_dtype": "--beta-dtype",
}


def build_command(shape: ModelShape, variants: Variants, gpu: GpuInfo) -> str:
    """The command that builds what calls like these need on a GPU."""
    words = ["qla-tune build", f"--arch {gpu.arch.name} --sm-count {gpu.sm_count}"]
    words.append(f"--heads {shape.H}:{shape.HV} --dims {shape.K}:{shape.V}")
    usual = Variants()
    for field in dataclasses.fields(Variants):
        value = getattr(variants, field.name)
        if value == getattr(usual, field.name):
            continue
        if field.name == "index_dtypes":
            words += [f"--index-dtype {_plain(dtype)}" for dtype in value]
        elif field.name in _VALUES:
            words.append(f"{_VALUES[field.name]} {_plain(value)}")
        else:
            words.append(_FLAGS[field.name][value])
    return " ".join([*words, "--out DIR"])


def build_command_of_call(facts: CallFacts, gpu: GpuInfo, *, backward: bool = False) -> str:
    """The command that builds what calls of this very kind need, whatever their sizes."""
    usual = Variants()
    variants = Variants(
        dtype=facts.dtype,
        chunk_size=facts.chunk_size,
        packed=facts.varlen,
        index_dtypes=usual.index_dtypes if facts.cu_seqlens_dtype is None else (facts.cu_seqlens_dtype,),
        initial_state=facts.state_dtype is not None,
        output_final_state=facts.output_final_state,
        state_dtype=usual.state_dtype if facts.state_dtype is None else facts.state_dtype,
        g_dtype=facts.g_dtype,
        beta_dtype=facts.beta_dtype,
        state_v_first=facts.state_v_first,
        use_qk_l2norm_in_kernel=facts.use_qk_l2norm_in_kernel,
        use_gate_in_kernel=facts.use_gate_in_kernel,
        dt_bias=not facts.use_gate_in_kernel or facts.dt_bias_dtype is not None,
        use_beta_sigmoid_in_kernel=facts.use_beta_sigmoid_in_kernel,
        allow_neg_eigval=facts.allow_neg_eigval,
        backward=backward,
    )
    return build_command(ModelShape(facts.H, facts.HV, facts.K, facts.V), variants, gpu)


@contextlib.contextmanager
def told_on_a_miss(command: Callable[[], str]) -> Iterator[None]:
    """Add the command that helps to a KernelNotCachedError of the block."""
    try:
        yield
    except KernelNotCachedError as error:
        raise KernelNotCachedError(f"{error}\nTo build it for QLA_JIT_BUNDLE_PATH=DIR: {command()}") from None


def _plain(value: torch.dtype | int) -> str:
    return str(value).removeprefix("torch.")
