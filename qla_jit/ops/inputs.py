"""Check the arguments of a public operation once, and hold them in the form that every later stage takes as given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..errors import DeviceError, DtypeError, InputError, ShapeError, UnsupportedError

CPU = torch.device("cpu")
CHUNK_SIZES = (16, 32, 64)
KERNEL_DTYPES = (torch.bfloat16, torch.float16)                       # of q, k and v on a GPU
GPU_DTYPES = (torch.float32, torch.bfloat16, torch.float16)           # of every other float tensor on a GPU
CPU_DTYPES = (*GPU_DTYPES, torch.float64)                             # of every float tensor on the CPU
INDEX_DTYPES = (torch.int32, torch.int64)


class ArgumentError(InputError, AssertionError):
    """An argument is refused, or misses its partner. Also an AssertionError, which is what FLA raises here."""


class RemovedArgumentError(InputError, DeprecationWarning):
    """The argument was removed from the API. Also a DeprecationWarning, which is what FLA raises here."""


class CallFacts(NamedTuple):
    """What stays the same from batch to batch: hashable, and enough to choose and key the kernels of a call."""

    device: torch.device
    dtype: torch.dtype                           # of q, k, v and o
    g_dtype: torch.dtype
    beta_dtype: torch.dtype
    state_dtype: torch.dtype | None              # of the initial state; None without one
    A_log_dtype: torch.dtype | None              # None unless use_gate_in_kernel
    dt_bias_dtype: torch.dtype | None            # None without one
    cu_seqlens_dtype: torch.dtype | None         # None for B sequences of T tokens each
    H: int
    HV: int
    K: int
    V: int
    chunk_size: int
    output_final_state: bool
    state_v_first: bool
    use_qk_l2norm_in_kernel: bool
    use_beta_sigmoid_in_kernel: bool
    allow_neg_eigval: bool
    use_gate_in_kernel: bool
    auto_cp: bool

    @property
    def varlen(self) -> bool:
        return self.cu_seqlens_dtype is not None

    @property
    def has_initial_state(self) -> bool:
        return self.state_dtype is not None


@dataclass(frozen=True, slots=True)
class CallInputs:
    """Checked arguments. Every tensor is contiguous and on facts.device, optional ones are None when absent."""

    facts: CallFacts
    q: torch.Tensor                              # [B, T, H, K]
    k: torch.Tensor                              # [B, T, H, K]
    v: torch.Tensor                              # [B, T, HV, V]
    g: torch.Tensor                              # [B, T, HV]; logits if facts.use_gate_in_kernel
    beta: torch.Tensor                           # [B, T, HV]; logits if facts.use_beta_sigmoid_in_kernel
    initial_state: torch.Tensor | None           # [N, HV, K, V], or [N, HV, V, K] if facts.state_v_first
    A_log: torch.Tensor | None                   # [HV], present exactly if facts.use_gate_in_kernel
    dt_bias: torch.Tensor | None                 # [HV]
    cu_seqlens: torch.Tensor | None              # [N + 1], present exactly if facts.varlen
    starts: tuple[int, ...] | None               # cu_seqlens as far as the host knows it: values checked; else None
    scale: float
    B: int
    T: int
    N: int

    @property
    def requires_grad(self) -> bool:
        """Whether autograd will ask for a backward."""
        tensors = (self.q, self.k, self.v, self.g, self.beta, self.initial_state, self.A_log, self.dt_bias)
        return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def check_inputs(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    cp_context: object = None,
    use_gate_in_kernel: bool = False,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    chunk_size: int = 64,
    auto_cp: bool = True,
    head_first: bool = False,
) -> CallInputs:
    """The arguments of chunk_gated_delta_rule, checked; an error of ours for the first that does not fit.

    The checks that FLA makes come in FLA's order. Nothing is read from a GPU: the values in cu_seqlens are checked where
    the host has them, on the CPU or in cu_seqlens_cpu.
    """
    # The axes of q, k and v first: every later message relies on them.
    for name, x, axes in (("q", q, "[B, T, H, K]"), ("k", k, "[B, T, H, K]"), ("v", v, "[B, T, HV, V]")):
        _check_is_tensor(name, x, axes)
        if x.ndim != 4:
            raise ShapeError(f"{name} must be {axes}; got shape {tuple(x.shape)}; add the missing axes or split the packed ones")
    B, T, H, K = qk_shape = q.shape
    HV, V = v.shape[2:]
    if k.shape != qk_shape:
        raise ShapeError(f"q and k must have the same shape [B, T, H, K]; got q {tuple(qk_shape)}, k {tuple(k.shape)}")
    if 0 in (H, K, HV, V):
        raise ShapeError(f"heads and head dims must be at least 1; got q {tuple(qk_shape)}, v {tuple(v.shape)}")
    if HV % H:
        raise ShapeError(
            f"v must have a multiple of the {H} heads of q and k, HV / H value heads sharing a key head; "
            f"got HV = {HV}: q {tuple(qk_shape)}, v {tuple(v.shape)}"
        )
    if head_first:
        raise RemovedArgumentError(
            "head_first must be left out, inputs are [B, T, H, ...]; got head_first=True; pass x.transpose(1, 2) of each"
        )
    if chunk_size not in CHUNK_SIZES:
        raise InputError(f"chunk_size must be one of {CHUNK_SIZES}; got {chunk_size!r}; leave it out for 64")
    if cp_context is not None:
        raise ArgumentError(
            f"cp_context must be None, a sequence stays on one GPU; got {type(cp_context).__name__}; "
            "gather the sequences and leave cp_context out"
        )

    if scale is None:
        scale = K**-0.5
    elif isinstance(scale, torch.Tensor):
        raise InputError("scale must be a Python number, so that it is known without a wait for the GPU; got a tensor")
    device, dtype = q.device, q.dtype
    if q.is_cpu:
        allowed = CPU_DTYPES
        _check_dtype("q", dtype, CPU_DTYPES)
    elif q.is_cuda:
        allowed = GPU_DTYPES
        if dtype not in KERNEL_DTYPES:
            raise UnsupportedError(
                f"q, k and v must be {_names(KERNEL_DTYPES)} on a GPU; got {dtype}; cast them, or move all inputs to the CPU"
            )
    else:
        raise DeviceError(f"q must be on a CUDA GPU or on the CPU; got {device}; move all inputs with .to('cuda') or .to('cpu')")
    check_tensor("k", k, qk_shape, "[B, T, H, K]", "as q", (dtype,), device)
    check_tensor("v", v, (B, T, HV, V), "[B, T, HV, V]", "B and T as in q", (dtype,), device)
    check_tensor("g", g, (B, T, HV), "[B, T, HV]", "one value per token and head of v", allowed, device)
    check_tensor("beta", beta, (B, T, HV), "[B, T, HV]", "one value per token and head of v", allowed, device)

    if cu_seqlens is not None:
        N, starts = _check_sequences(cu_seqlens, cu_seqlens_cpu, B, T, device)
    elif cu_seqlens_cpu is None:
        N, starts = B, None
    else:
        raise ArgumentError("cu_seqlens_cpu is the host's copy of cu_seqlens and needs it; got cu_seqlens=None; pass both")
    if initial_state is not None:
        meaning = "one state per sequence, V before K exactly if state_v_first"
        check_tensor("initial_state", initial_state, *state_shape(N, HV, K, V, state_v_first), meaning, allowed, device)
    if not use_gate_in_kernel:
        A_log = dt_bias = None                   # as in FLA, they are not looked at
    elif A_log is None:
        raise ArgumentError("use_gate_in_kernel=True needs A_log [HV]; got A_log=None; pass it, or the log of the decay as g")
    else:
        check_tensor("A_log", A_log, (HV,), "[HV]", "one value per head of v", allowed, device)
        if dt_bias is not None:
            check_tensor("dt_bias", dt_bias, (HV,), "[HV]", "one value per head of v", allowed, device)
    if allow_neg_eigval and not use_beta_sigmoid_in_kernel:
        raise InputError(
            "allow_neg_eigval=True doubles the sigmoid that use_beta_sigmoid_in_kernel=True takes of beta; got False for it; "
            "set it, or pass beta between 0 and 2 and leave allow_neg_eigval out"
        )

    facts = CallFacts(
        device=device,
        dtype=dtype,
        g_dtype=g.dtype,
        beta_dtype=beta.dtype,
        state_dtype=None if initial_state is None else initial_state.dtype,
        A_log_dtype=None if A_log is None else A_log.dtype,
        dt_bias_dtype=None if dt_bias is None else dt_bias.dtype,
        cu_seqlens_dtype=None if cu_seqlens is None else cu_seqlens.dtype,
        H=H,
        HV=HV,
        K=K,
        V=V,
        chunk_size=chunk_size,
        output_final_state=output_final_state,
        state_v_first=state_v_first,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        use_gate_in_kernel=use_gate_in_kernel,
        auto_cp=auto_cp,
    )
    return CallInputs(
        facts=facts,
        q=q.contiguous(),
        k=k.contiguous(),
        v=v.contiguous(),
        g=g.contiguous(),
        beta=beta.contiguous(),
        initial_state=None if initial_state is None else initial_state.contiguous(),
        A_log=None if A_log is None else A_log.contiguous(),
        dt_bias=None if dt_bias is None else dt_bias.contiguous(),
        cu_seqlens=None if cu_seqlens is None else cu_seqlens.contiguous(),
        starts=starts,
        scale=float(scale),
        B=B,
        T=T,
        N=N,
    )


def state_shape(N: int, HV: int, K: int, V: int, state_v_first: bool) -> tuple[tuple[int, ...], str]:
    """The shape of a state, and the names of its axes."""
    return ((N, HV, V, K), "[N, HV, V, K]") if state_v_first else ((N, HV, K, V), "[N, HV, K, V]")


def check_tensor(
    name: str,
    x: torch.Tensor,
    shape: tuple[int, ...],
    axes: str,
    meaning: str,
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
) -> None:
    """Raise the error that fits if x is not a tensor of this shape (axes and meaning say what it is), dtypes and device."""
    _check_is_tensor(name, x, axes)
    if x.shape != shape:
        raise ShapeError(f"{name} must be {axes} = {tuple(shape)}, {meaning}; got {tuple(x.shape)}")
    _check_dtype(name, x.dtype, dtypes)
    if x.device != device:
        raise DeviceError(f"{name} must be on {device}; got {x.device}; move it with .to({str(device)!r})")


def _check_is_tensor(name: str, x: object, axes: str) -> None:
    if not isinstance(x, torch.Tensor):
        raise InputError(f"{name} must be a torch.Tensor {axes}; got {type(x).__name__}")


def _check_dtype(name: str, dtype: torch.dtype, allowed: tuple[torch.dtype, ...]) -> None:
    if dtype not in allowed:
        raise DtypeError(f"{name} must be {_names(allowed)}; got {dtype}; cast it with .to({allowed[0]})")


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return " or ".join(map(str, dtypes))


def _check_sequences(
    cu_seqlens: torch.Tensor, cu_seqlens_cpu: torch.Tensor | None, B: int, T: int, device: torch.device
) -> tuple[int, tuple[int, ...] | None]:
    """The number of packed sequences, and their starts if the host has them."""
    if B != 1:
        raise ShapeError(
            f"cu_seqlens needs B = 1, all sequences packed along T; got B = {B}; "
            "reshape each input to [1, B * T, ...], or leave cu_seqlens out"
        )
    _check_is_tensor("cu_seqlens", cu_seqlens, "[N + 1]")
    shape = cu_seqlens.shape
    if len(shape) != 1 or shape[0] < 2:
        raise ShapeError(f"cu_seqlens must be [N + 1], the starts of N >= 1 sequences and the end; got {tuple(shape)}")
    check_tensor("cu_seqlens", cu_seqlens, shape, "[N + 1]", "", INDEX_DTYPES, device)
    N = shape[0] - 1
    if cu_seqlens_cpu is not None:
        check_tensor("cu_seqlens_cpu", cu_seqlens_cpu, shape, "[N + 1]", "as cu_seqlens", INDEX_DTYPES, CPU)
    on_host = cu_seqlens if cu_seqlens.is_cpu else cu_seqlens_cpu
    if on_host is None:
        return N, None

    starts = on_host.tolist()
    if on_host is cu_seqlens and cu_seqlens_cpu is not None and cu_seqlens_cpu.tolist() != starts:
        raise InputError("cu_seqlens_cpu must hold the values of cu_seqlens; got others; leave it out on the CPU")
    if starts[0] != 0:
        raise InputError(f"cu_seqlens must begin with 0; got {starts[0]}; slice the inputs to begin at the first sequence")
    if starts[-1] > T:
        raise InputError(f"cu_seqlens must end at T = {T} or before; got {starts[-1]}; these are tokens of another batch")
    if starts != sorted(starts):
        n = next(n for n in range(N) if starts[n] > starts[n + 1])
        raise InputError(f"cu_seqlens must not fall; got {starts[n + 1]} at {n + 1} after {starts[n]}; sum the lengths up")
    return N, tuple(starts)
