"""Which kernels will the calls of a layer need, whatever their sizes? Known before there is a call, and without a GPU.

What pipeline.kernels_for() and backward.kernels_for() ask for is among them, for every call that a Variants describes.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection
from dataclasses import dataclass

import torch

from . import select
from .compiler import CompileRequest
from .errors import DtypeError, InputError
from .kernel_templates.arch import Arch
from .models import ModelShape
from .ops.inputs import CHUNK_SIZES, GPU_DTYPES, INDEX_DTYPES, KERNEL_DTYPES, CallFacts
from .ops.plan import BACKWARD, FORWARD
from .tuning_records import Hardware


@dataclass(frozen=True)
class Variants:
    """The calls to be ready for. Each field is as in a call of chunk_gated_delta_rule; None is "with and without".

    By default: bf16, everything else float32, packed or not, with and without states at either end, gates and beta as they are.

    Raises:
        DtypeError, InputError: no call on a GPU can be like this.
    """

    dtype: torch.dtype = torch.bfloat16                  # of q, k and v
    chunk_size: int = 64
    packed: bool | None = None                           # whether there are cu_seqlens
    index_dtypes: tuple[torch.dtype, ...] = INDEX_DTYPES                 # of cu_seqlens
    initial_state: bool | None = None                    # whether there is one
    output_final_state: bool | None = None
    state_dtype: torch.dtype = torch.float32             # of the initial state
    g_dtype: torch.dtype = torch.float32
    beta_dtype: torch.dtype = torch.float32
    state_v_first: bool = False
    use_qk_l2norm_in_kernel: bool = True                 # one small kernel more; calls without it are served too
    use_gate_in_kernel: bool = False
    dt_bias: bool = True                                 # whether there is one, where use_gate_in_kernel
    use_beta_sigmoid_in_kernel: bool = False
    allow_neg_eigval: bool = False
    backward: bool = False                               # whether calls are differentiated; those without are served too

    def __post_init__(self) -> None:
        dtypes = {"dtype": KERNEL_DTYPES, "state_dtype": GPU_DTYPES, "g_dtype": GPU_DTYPES, "beta_dtype": GPU_DTYPES}
        for name, allowed in dtypes.items():
            _check_dtypes(name, (getattr(self, name),), allowed)
        _check_dtypes("index_dtypes", self.index_dtypes, INDEX_DTYPES)
        if self.chunk_size not in CHUNK_SIZES:
            raise InputError(f"chunk_size must be one of {CHUNK_SIZES}; got {self.chunk_size!r}; leave it out for 64")
        if self.allow_neg_eigval and not self.use_beta_sigmoid_in_kernel:
            raise InputError("allow_neg_eigval=True needs use_beta_sigmoid_in_kernel=True; got False for it; set both or neither")

    def calls(self, shape: ModelShape) -> list[CallFacts]:
        """One call of each kind.

        Raises:
            InputError: the value heads cannot share the key heads evenly.
        """
        if shape.H < 1 or shape.HV < 1 or shape.HV % shape.H:
            raise InputError(f"heads must be H and a multiple of it as HV, at least 1; got {shape.H}:{shape.HV}")
        indices: list[torch.dtype | None] = [] if self.packed else [None]
        indices += [] if self.packed is False else self.index_dtypes
        ends = itertools.product(_cases(self.initial_state), _cases(self.output_final_state))
        return [
            CallFacts(
                device=torch.device("cuda"),
                dtype=self.dtype,
                g_dtype=self.g_dtype,
                beta_dtype=self.beta_dtype,
                state_dtype=self.state_dtype if initial_state else None,
                A_log_dtype=torch.float32 if self.use_gate_in_kernel else None,
                dt_bias_dtype=torch.float32 if self.use_gate_in_kernel and self.dt_bias else None,
                cu_seqlens_dtype=index_dtype,
                H=shape.H,
                HV=shape.HV,
                K=shape.K,
                V=shape.V,
                chunk_size=self.chunk_size,
                output_final_state=final_state,
                state_v_first=self.state_v_first,
                use_qk_l2norm_in_kernel=self.use_qk_l2norm_in_kernel,
                use_beta_sigmoid_in_kernel=self.use_beta_sigmoid_in_kernel,
                allow_neg_eigval=self.allow_neg_eigval,
                use_gate_in_kernel=self.use_gate_in_kernel,
                auto_cp=True,                            # without it, fewer kernels are asked for
            )
            for (initial_state, final_state), index_dtype in itertools.product(ends, indices)
        ]


def kernels(shape: ModelShape, variants: Variants, arch: Arch, gpus: Collection[Hardware]) -> list[CompileRequest]:
    """The kernels that calls of a layer may need: the defaults, and what the tuned records for these kinds of GPU name.

    Raises:
        InputError: the value heads cannot share the key heads evenly.
        UnsupportedError: no strategy serves the calls, or no kernels their gradients.
    """
    requests: dict[CompileRequest, None] = {}
    ops = (FORWARD, BACKWARD) if variants.backward else (FORWARD,)
    for facts, op in itertools.product(variants.calls(shape), ops):
        requests.update(dict.fromkeys(select.requests_for_any_size(facts, arch, op=op)))
        for hardware in gpus:
            requests.update(dict.fromkeys(select.requests_of_records(facts, arch, hardware, op=op)))
    return list(requests)


def _cases(choice: bool | None) -> tuple[bool, ...]:
    return (False, True) if choice is None else (choice,)


def _check_dtypes(name: str, dtypes: Collection[torch.dtype], allowed: Collection[torch.dtype]) -> None:
    if not dtypes or not set(dtypes) <= set(allowed):
        got = ", ".join(map(str, dtypes)) or "none"
        raise DtypeError(f"{name} must be of {', '.join(map(str, allowed))}; got {got}; kernels on a GPU take no other")
