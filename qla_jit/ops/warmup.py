"""Have the kernels of a layer ready before its first call."""

from __future__ import annotations

import torch

from .. import enumeration, kernel_cache
from ..build_command import build_command, told_on_a_miss
from ..device import gpu_count, gpu_info
from ..enumeration import Variants
from ..errors import DeviceError, EnvironmentUnsuitable, InputError
from ..models import ModelShape
from ..models import model as model_shape
from ..tuning_records import Hardware
from .inputs import INDEX_DTYPES


def warmup(
    *,
    model: str | None = None,
    tp: int = 1,
    heads: tuple[int, int] | None = None,
    dims: tuple[int, int] = (128, 128),
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.bfloat16,
    chunk_size: int = 64,
    packed: bool | None = None,
    index_dtypes: tuple[torch.dtype, ...] = INDEX_DTYPES,
    initial_state: bool | None = None,
    output_final_state: bool | None = None,
    state_dtype: torch.dtype = torch.float32,
    g_dtype: torch.dtype = torch.float32,
    beta_dtype: torch.dtype = torch.float32,
    state_v_first: bool = False,
    use_qk_l2norm_in_kernel: bool = True,
    use_gate_in_kernel: bool = False,
    dt_bias: bool = True,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    backward: bool = False,
) -> int:
    """Load every kernel that calls of a layer will need on this GPU, whatever their sizes, and compile those that no cache has.

    Afterwards such calls neither compile nor read the disk. Nothing runs on the GPU. With QLA_JIT_MODE=require nothing is
    compiled, so that this tells at the start of a server whether its kernels are all there.

    Args:
        model: one of models.json, as "qwen3.5-27b"; tp is the number of GPUs that share its heads.
        heads, dims: instead of a model, the (H, HV) of one GPU and (K, V).
        device: the GPU; None is the current one.
        packed, initial_state, output_final_state: True or False if all calls are with, or without, cu_seqlens, an initial
            state, a final state; None covers both.
        index_dtypes: of cu_seqlens.
        dtype: of q, k and v. state_dtype is that of the initial state.
        use_qk_l2norm_in_kernel: True covers calls without it too.
        dt_bias: whether there is one, where use_gate_in_kernel.
        chunk_size, g_dtype, beta_dtype, state_v_first, use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval: as in
            the calls.
        backward: True covers the gradients too, of calls that need them.

    Returns:
        The number of kernels that are ready.

    Raises:
        InputError, DtypeError, DeviceError: no call can be like this, or not exactly one of model and heads is given.
        EnvironmentUnsuitable: there is no GPU, or no nvcc for what must be compiled.
        UnsupportedError: no kernel serves such calls, or their gradients, on this GPU.
        KernelNotCachedError: kernels are missing and QLA_JIT_MODE is require.
        CompileError: a kernel does not build.
    """
    if (model is None) == (heads is None) or (model is None and tp != 1):
        raise InputError(
            f"the layer must be given by model and tp, or by heads and dims; got model={model!r}, tp={tp}, heads={heads!r}"
        )
    shape = ModelShape(*heads, *dims) if heads is not None else model_shape(model).on(tp)
    variants = Variants(
        dtype=dtype,
        chunk_size=chunk_size,
        packed=packed,
        index_dtypes=index_dtypes,
        initial_state=initial_state,
        output_final_state=output_final_state,
        state_dtype=state_dtype,
        g_dtype=g_dtype,
        beta_dtype=beta_dtype,
        state_v_first=state_v_first,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel,
        dt_bias=dt_bias,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        backward=backward,
    )
    if gpu_count() == 0:
        raise EnvironmentUnsuitable(
            "warmup loads the kernels of the GPU that is here, and PyTorch sees none; "
            "to compile on a machine without a GPU, use qla-tune build"
        )
    target = torch.device("cuda" if device is None else device)
    if target.type != "cuda":
        raise DeviceError(f"warmup is for a CUDA GPU, calls on the CPU take no kernels; got device={device!r}; leave it out")
    gpu = gpu_info(target)
    requests = enumeration.kernels(shape, variants, gpu.arch, [Hardware.of(gpu)])
    with told_on_a_miss(lambda: build_command(shape, variants, gpu)):
        return len(kernel_cache.get(requests))
