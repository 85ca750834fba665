"""The gated delta rule token by token, for decoding."""

from __future__ import annotations

import torch

from ..errors import InputError
from . import fallback
from .graphs import graph_break
from .inputs import check_inputs


@graph_break
def fused_recurrent_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gated delta rule over sequences, token by token (Yang et al. 2024, arXiv:2412.06464).

    CPU and CUDA tensors alike go to the reference in PyTorch, which makes a few small operations per token and reads
    cu_seqlens on the host: meant for a handful of tokens. Gradients come from autograd.

    Args:
        g: as for chunk_gated_delta_rule; None means no decay.
        beta: as for chunk_gated_delta_rule; None means 1.

        All others are those of chunk_gated_delta_rule.

    Returns:
        o [B, T, HV, V] in q's dtype, and the final state, fp32 (fp64 for fp64 q), or None unless output_final_state.

    Raises:
        As chunk_gated_delta_rule, and InputError if a flag asks for logits that were not given.
    """
    if g is None:
        if use_gate_in_kernel:
            raise InputError("use_gate_in_kernel=True needs logits g [B, T, HV]; got g=None; pass them, or leave the flag out")
        g = torch.zeros(v.shape[:3], dtype=torch.float32, device=v.device)
    if beta is None:
        if use_beta_sigmoid_in_kernel:
            raise InputError(
                "use_beta_sigmoid_in_kernel=True needs logits beta [B, T, HV]; got beta=None; pass them, or leave the flag out"
            )
        beta = torch.ones(v.shape[:3], dtype=torch.float32, device=v.device)
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
        use_gate_in_kernel=use_gate_in_kernel,
        A_log=A_log,
        dt_bias=dt_bias,
    )
    result = fallback.forward(inputs, by_chunk=False)
    return result.o, result.final_state
