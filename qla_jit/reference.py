"""The gated delta rule in plain PyTorch: the oracle of the tests, and the path for tensors that no kernel serves.

One function in two forms, token by token (the definition) and chunk by chunk (what the kernels do), equal up to rounding.
It computes in float32, or in float64 for float64 inputs and on request, and autograd differentiates it. The maths with
its symbols is in docs/maths.md.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F

L2NORM_EPS = 1e-6
# A gate below this counts as this. exp(-1e4) is 0 in float32 and float64, so it resets the state exactly, as -inf would;
# but the difference of two cumulated gates stays a number, where inf - inf is NaN.
RESET_GATE = -1e4


def l2norm(x: torch.Tensor, eps: float = L2NORM_EPS) -> torch.Tensor:
    """x / sqrt(sum(x^2) + eps) over the last axis; an all-zero row stays zero."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + eps)


def gate(g: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor | None = None) -> torch.Tensor:
    """Natural log of the decay from its logits g [..., HV]: -exp(A_log) * softplus(g + dt_bias), with A_log, dt_bias [HV].

    A_log = -inf, which bf16 checkpoints contain, gives exactly -0: a head without decay.
    """
    return -A_log.exp() * F.softplus(g if dt_bias is None else g + dt_bias)


def beta_from_logits(beta: torch.Tensor, *, allow_neg_eigval: bool = False) -> torch.Tensor:
    """sigmoid(beta), or twice that, which lets the eigenvalue of the erase step along k reach -1."""
    return 2 * beta.sigmoid() if allow_neg_eigval else beta.sigmoid()


def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    use_gate_in_kernel: bool = False,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    chunk_size: int | None = 64,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gated delta rule (Yang et al. 2024, arXiv:2412.06464). The arguments are taken as they are: ops/inputs.py checks.

    Args:
        q, k: [B, T, H, K], any float dtype. k is expected to have norm 1 along K, or use_qk_l2norm_in_kernel set.
        v: [B, T, HV, V]; HV is a multiple of H, and HV / H consecutive value heads share a key head.
        g: [B, T, HV], natural log of the decay, at most 0. Down from RESET_GATE, -inf included, it resets the state.
            With use_gate_in_kernel: logits for gate(g, A_log, dt_bias).
        beta: [B, T, HV]. With use_beta_sigmoid_in_kernel: logits for beta_from_logits.
        scale: factor of o; None means K ** -0.5.
        initial_state: [N, HV, K, V], or [N, HV, V, K] with state_v_first; None means zeros.
        cu_seqlens: [N + 1] integers, the start of each packed sequence; requires B == 1 and is read on the host. None
            means N = B sequences of T tokens. Tokens from cu_seqlens[-1] on belong to no sequence: their o is 0.
        chunk_size: tokens per chunk; None goes token by token.
        dtype: what to compute in and to return; None means float64 if q is float64, else float32.

    Returns:
        o [B, T, HV, V], and the final state in the layout of the initial one. An empty sequence ends as it began.
    """
    if dtype is None:
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    if scale is None:
        scale = q.shape[-1] ** -0.5
    # Autocast would round the operands of every matmul.
    with torch.autocast(q.device.type, enabled=False):
        q, k, v, g, beta = (x.to(dtype) for x in (q, k, v, g, beta))
        if use_qk_l2norm_in_kernel:
            q, k = l2norm(q), l2norm(k)
        if use_beta_sigmoid_in_kernel:
            beta = beta_from_logits(beta, allow_neg_eigval=allow_neg_eigval)
        if use_gate_in_kernel:
            g = gate(g, A_log.to(dtype), None if dt_bias is None else dt_bias.to(dtype))
        g = torch.where(g < RESET_GATE, RESET_GATE, g)       # a NaN stays one; not clamp(), whose gradient at the bound varies

        B, T, H, K = q.shape
        HV, V = v.shape[2:]
        q, k = (x.repeat_interleave(HV // H, dim=2) for x in (scale * q, k))          # [B, T, HV, K]
        tokens = [x.transpose(1, 2) for x in (q, k, v, g, beta)]                      # [B, HV, T, ...]

        N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
        if initial_state is None:
            state = v.new_zeros(N, HV, K, V)
        else:
            state = initial_state.to(dtype, copy=True)
            if state_v_first:
                state = state.mT

        if cu_seqlens is None:
            o, state = _one_length(*tokens, state, chunk_size)
        else:
            starts = cu_seqlens.tolist() if T else [0] * (N + 1)      # without tokens there is nothing to wait for
            results = [
                _one_length(*(x[:, :, first:end] for x in tokens), state[n : n + 1], chunk_size)
                for n, (first, end) in enumerate(pairwise(starts))
            ]
            tail = v.new_zeros(B, HV, T - starts[-1], V)
            o = torch.cat([*(o for o, _ in results), tail], dim=2)
            state = torch.cat([state for _, state in results])
        return o.transpose(1, 2).contiguous(), (state.mT if state_v_first else state).contiguous()


def recurrent_gated_delta_rule(q, k, v, g, beta, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """gated_delta_rule token by token: the definition, and the oracle with dtype=torch.float64."""
    return gated_delta_rule(q, k, v, g, beta, chunk_size=None, **options)


def chunk_gated_delta_rule(q, k, v, g, beta, *, chunk_size: int = 64, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """gated_delta_rule chunk by chunk: T / chunk_size serial steps instead of T."""
    return gated_delta_rule(q, k, v, g, beta, chunk_size=chunk_size, **options)


def _one_length(q, k, v, g, beta, state, chunk_size: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """o [B, HV, T, V] and the final state [B, HV, K, V] of B sequences of equal length; q is scaled already."""
    if k.shape[2] == 0:
        return v, state
    if chunk_size is None:
        return _scan_tokens(q, k, v, g, beta, state)
    return _scan_chunks(q, k, v, g, beta, state, chunk_size)


def _scan_tokens(q, k, v, g, beta, state):
    decay = g.exp()
    outputs = []
    for t in range(k.shape[2]):
        q_t, k_t, v_t = (x[:, :, t, None] for x in (q, k, v))              # rows: [B, HV, 1, K or V]
        state = decay[:, :, t, None, None] * state
        error = v_t - k_t @ state
        state = state + k_t.mT @ (beta[:, :, t, None, None] * error)
        outputs.append(q_t @ state)
    return torch.cat(outputs, dim=2), state


def _scan_chunks(q, k, v, g, beta, state, C):
    T, K, V = k.shape[2], k.shape[3], v.shape[3]
    NC = -(-T // C)
    # Padding of the last chunk: k = 0 and beta = 0 write nothing, g = 0 keeps the state.
    q, k, v = (F.pad(x, (0, 0, 0, NC * C - T)).unflatten(2, (NC, C)) for x in (q, k, v))      # [B, HV, NC, C, K or V]
    g, beta = (F.pad(x, (0, NC * C - T)).unflatten(2, (NC, C)) for x in (g, beta))            # [B, HV, NC, C]
    beta = beta[..., None]

    # In float64: after a reset of -1e4 a float32 sum would leave the later ratios of its chunk with an error of 2e-4.
    g_sum = g.double().cumsum(-1)
    decay_to_end = (g_sum[..., -1:] - g_sum).exp().to(k.dtype)[..., None]                     # gamma_L / gamma
    gamma = g_sum.exp().to(k.dtype)[..., None]
    # Masked before exp: above the diagonal the exponent is positive and would overflow.
    future = torch.ones(C, C, dtype=torch.bool, device=k.device).triu(1)
    differences = g_sum[..., :, None] - g_sum[..., None, :]
    Gamma = differences.masked_fill(future, float("-inf")).exp().to(k.dtype)                  # [B, HV, NC, C, C]

    # V_new = U - X S, with (I + strictlower(diag(beta) Gamma o K K^T)) [U X] = diag(beta) [V gamma o K]
    L = (beta * Gamma * (k @ k.mT)).tril(-1)
    UX = torch.linalg.solve_triangular(L, beta * torch.cat([v, gamma * k], dim=-1), upper=False, unitriangular=True)
    U, X = UX.split([V, K], dim=-1)
    P = Gamma * (q @ k.mT)
    q_from_start, k_to_end = gamma * q, decay_to_end * k

    outputs = []
    for n in range(NC):
        v_new = U[:, :, n] - X[:, :, n] @ state
        outputs.append(q_from_start[:, :, n] @ state + P[:, :, n] @ v_new)
        state = gamma[:, :, n, -1:] * state + k_to_end[:, :, n].mT @ v_new
    return torch.cat(outputs, dim=2)[:, :, :T], state
