"""The gated delta rule for prefill and training, chunk by chunk: the public operation and its low-level halves."""

from __future__ import annotations

import warnings

import torch

from ..errors import InputError
from ..imports import imported
from ..kernel_templates.macros.sequences import slot_count
from ..once import first_time
from . import fallback
from .graphs import graph_break
from .inputs import CPU_DTYPES, CallInputs, check_inputs, check_tensor, state_shape
from .kept import FromForward, Wanted
from .results import ForwardResult, Gradients, MidwayStates, SegmentStates


@graph_break                 # as in FLA: a graph cannot hold what launches kernels by itself
def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    chunk_indices: torch.Tensor | None = None,
    cp_context: object | None = None,
    use_gate_in_kernel: bool = False,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    chunk_size: int = 64,
    auto_cp: bool = True,
    head_first: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gated delta rule over sequences, computed chunk by chunk (Yang et al. 2024, arXiv:2412.06464).

    Per value head, with state S [K, V]: S decays by exp(g_t), what it holds under k_t is erased by the share beta_t, v_t is
    written there with the same share, and o_t = scale S^T q_t (docs/maths.md). The signature is that of
    flash-linear-attention, keyword for keyword.

    CUDA tensors go to the kernels, which the first call compiles, with those of the gradients if one is needed. CPU tensors
    go to the reference in PyTorch, and so do calls on a GPU that need gradients which no kernel there covers. Nothing
    waits for the GPU, except that the reference reads cu_seqlens.

    Gradients are those of q, k, v, g, beta, initial_state, A_log and dt_bias, each in its input's dtype and once
    differentiable. For the backward the inputs are kept and, where kernels make them and no hooks on saved tensors are in
    force, the inverses of chunks, 128 bytes a token and head of v, and where sequences are split 192 KiB a segment and head.

    Args:
        q, k: [B, T, H, K]; fp16 or bf16, on the CPU also fp32 and fp64. k is expected to have norm 1 along K.
        v: [B, T, HV, V] in q's dtype. HV is a multiple of H; HV / H consecutive value heads share a key head.
        g: [B, T, HV]; fp32, bf16 or fp16, on the CPU also fp64, as every other argument below that is not q's dtype.
            Natural log of the decay, at most 0; -1e4 or less, -inf included, resets the state. Logits with
            use_gate_in_kernel.
        beta: [B, T, HV], from 0 to 1, or to 2 where negative eigenvalues are wanted. Logits with
            use_beta_sigmoid_in_kernel.
        scale: factor of o, a Python number; None means K ** -0.5.
        initial_state: [N, HV, K, V], one per sequence; None means zeros. N is B without cu_seqlens.
        output_final_state: also return the state after each sequence's last token.
        use_qk_l2norm_in_kernel: divide q and k by sqrt(sum of squares + 1e-6) along K first.
        use_beta_sigmoid_in_kernel: take sigmoid(beta) for beta.
        allow_neg_eigval: take 2 sigmoid(beta); needs use_beta_sigmoid_in_kernel.
        state_v_first: states are [N, HV, V, K], initial and final.
        cu_seqlens: [N + 1], int32 or int64, rising from 0 to at most T: the start of each packed sequence, and the end of
            the last. Requires B == 1. Empty sequences are allowed and end in their initial state. Tokens from
            cu_seqlens[-1] on belong to no sequence: their o is 0.
        cu_seqlens_cpu: cu_seqlens on the CPU, for calls on a GPU: lets the values be checked and the work be divided by them.
        chunk_indices: accepted for compatibility, and not read: cu_seqlens says it all.
        cp_context: must be None; context parallelism over GPUs is not supported.
        use_gate_in_kernel: take -exp(A_log) softplus(g + dt_bias) for g.
        A_log, dt_bias: [HV], read only with use_gate_in_kernel, which needs A_log; dt_bias may be None. A_log may be -inf.
        chunk_size: 16, 32 or 64 tokens; changes rounding only.
        auto_cp: allow one long sequence to be split over the GPU's multiprocessors; changes rounding only.
        head_first: must be False.

    Returns:
        o [B, T, HV, V] in q's dtype, and the final state in the layout of the initial one, fp32 (fp64 for fp64 q), or
        None unless output_final_state.

    Raises:
        ShapeError, DtypeError, DeviceError, InputError: an argument does not fit; the message names it. All are ValueErrors;
            a missing A_log and a cp_context are AssertionErrors too, head_first a DeprecationWarning, as FLA raises them.
        UnsupportedError: no kernel template covers this problem on this GPU; the message says what is covered.
    """
    inputs = check_inputs(
        q,
        k,
        v,
        g,
        beta,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=cu_seqlens_cpu,
        cp_context=cp_context,
        use_gate_in_kernel=use_gate_in_kernel,
        A_log=A_log,
        dt_bias=dt_bias,
        chunk_size=chunk_size,
        auto_cp=auto_cp,
        head_first=head_first,
    )
    result = _differentiable_forward(inputs) if inputs.requires_grad else _forward(inputs)
    return result.o, result.final_state


@graph_break
def chunk_gated_delta_rule_fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    *,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    use_gate_in_kernel: bool = False,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    chunk_size: int = 64,
    auto_cp: bool = True,
) -> ForwardResult:
    """chunk_gated_delta_rule without autograd: for a caller's own autograd.Function, whose backward needs the inputs again.

    Arguments and errors are those of chunk_gated_delta_rule. g_sum is in natural-log units, where FLA's is in units of log 2;
    the two libraries' saved tensors cannot be exchanged. g_sum and A are None unless `chunked` computed the call, Ab if it did,
    segments unless it was split, midway unless the backward will go through chunks in two bands; all are None on the CPU. Who
    hands Ab, segments and midway to chunk_gated_delta_rule_bwd saves the backward from computing them anew; sequences are split
    as it will want them.
    """
    inputs = check_inputs(
        q,
        k,
        v,
        g,
        beta,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=cu_seqlens_cpu,
        use_gate_in_kernel=use_gate_in_kernel,
        A_log=A_log,
        dt_bias=dt_bias,
        chunk_size=chunk_size,
        auto_cp=auto_cp,
    )
    with torch.no_grad():
        return _forward(inputs, before_a_backward=True)


@graph_break
def chunk_gated_delta_rule_bwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    A: torch.Tensor | None,
    do: torch.Tensor,
    dht: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    *,
    g_sum: torch.Tensor | None = None,
    Ab: torch.Tensor | None = None,
    segments: SegmentStates | None = None,
    midway: MidwayStates | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    use_gate_in_kernel: bool = False,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    chunk_size: int = 64,
    auto_cp: bool = True,
) -> Gradients:
    """Gradients of chunk_gated_delta_rule_fwd, for a caller's own autograd.Function.

    Where no kernel covers them, and on the CPU, they come from the reference under autograd: right, but slow.

    Args:
        q, k, v, g, beta, scale, initial_state and the flags: as given to the forward. g is the gate itself, where FLA and
            FlashQLA take its cumulated sum; q, k, g and beta are those before l2norm, gate and sigmoid.
        A, g_sum: accepted for compatibility, and not read: they are computed anew.
        Ab, segments, midway: those of the ForwardResult of the same call. None, or from chunks or segments of another size
            than the backward takes: computed anew. Keep them as long as a CUDA graph that was captured with them.
        do: [B, T, HV, V], gradient of o.
        dht: gradient of the final state, in its shape; None means zeros.

    Returns:
        Gradients, each in the shape and dtype of its input; unpacks as dq, dk, dv, dbeta, dg, dh0, dA_log, ddt_bias.

    Raises:
        As the forward; ShapeError also if do or dht has not the shape of its output, or Ab not that of the forward's.
    """
    inputs = check_inputs(
        q,
        k,
        v,
        g,
        beta,
        scale=scale,
        initial_state=initial_state,
        output_final_state=dht is not None,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=cu_seqlens_cpu,
        use_gate_in_kernel=use_gate_in_kernel,
        A_log=A_log,
        dt_bias=dt_bias,
        chunk_size=chunk_size,
        auto_cp=auto_cp,
    )
    facts = inputs.facts
    check_tensor("do", do, inputs.v.shape, "[B, T, HV, V]", "as o", CPU_DTYPES, facts.device)
    if dht is not None:
        shape, axes = state_shape(inputs.N, facts.HV, facts.K, facts.V, state_v_first)
        check_tensor("dht", dht, shape, axes, "as the final state", CPU_DTYPES, facts.device)
    if Ab is not None:
        slots = slot_count(inputs.B, inputs.T, inputs.N, facts.chunk_size, facts.varlen)
        shape = (slots, facts.HV, facts.chunk_size, facts.chunk_size)
        check_tensor("Ab", Ab, shape, "[slots, HV, C, C]", "as in ForwardResult", (facts.dtype,), facts.device)

    for name, given, kind in (("segments", segments, SegmentStates), ("midway", midway, MidwayStates)):
        if given is not None and not isinstance(given, kind):
            raise InputError(f"{name} must be ForwardResult.{name} or None; got {type(given).__name__}")

    if inputs.q.is_cuda:
        backward = imported("ops.backward")
        if inputs.B * inputs.T == 0 or backward.kernels_for(inputs) is not None:
            return backward.backward(inputs, do, dht, FromForward(Ab, segments, midway))
        _warn_slow_gradients()
    return fallback.backward(inputs, do, dht)


def _differentiable_forward(inputs: CallInputs) -> ForwardResult:
    """The call where autograd will ask for gradients. Both directions go the same way, which is decided here."""
    if inputs.q.is_cuda:
        autograd = imported("ops.autograd")
        if autograd.covers(inputs):
            return autograd.differentiable_forward(inputs)
        _warn_slow_gradients()
    return fallback.forward(inputs)


def _forward(inputs: CallInputs, *, before_a_backward: bool = False) -> ForwardResult:
    """The call without autograd. before_a_backward: as that will want it."""
    if not inputs.q.is_cuda:
        return fallback.forward(inputs)
    # Not imported at the top: a CPU user needs no kernel machinery.
    wanted = imported("ops.backward").wanted_of_forward(inputs) if before_a_backward else Wanted()
    return imported("ops.pipeline").forward(inputs, wanted)


def _warn_slow_gradients() -> None:
    if first_time("slow gradients"):
        warnings.warn(
            "no kernel covers the gradients of this call of chunk_gated_delta_rule on this GPU; they come from the PyTorch "
            "reference, which is much slower; for inference, call it under torch.no_grad()",
            stacklevel=4,
        )
