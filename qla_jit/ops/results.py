"""What the low-level operations return."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch


@dataclass(frozen=True)
class ForwardResult:
    """The outputs of a forward, and what its strategy makes on the way: g_sum and A that of `chunked`, Ab that of the others."""

    o: torch.Tensor                              # [B, T, HV, V], in q's dtype
    final_state: torch.Tensor | None             # [N, HV, K, V] or V-first; fp32 (fp64 for fp64 inputs); None if not asked for
    g_sum: torch.Tensor | None = None            # [chunks, HV, C], fp32, natural log: gates cumulated from each chunk's start
    A: torch.Tensor | None = None                # [chunks, HV, C, C], q's dtype: Gamma o A diag(beta)
    # [slots, HV, C, C], q's dtype: the inverse of each chunk without its gates, of `fused` and `split`; for
    # chunk_gated_delta_rule_bwd
    Ab: torch.Tensor | None = None


class Gradients(NamedTuple):
    """One gradient per input, in that input's shape and dtype; None where the input was None or unused.

    A tuple in FLA's order, so that `dq, dk, dv, db, dg, dh0, dA_log, ddt_bias = chunk_gated_delta_rule_bwd(...)` works.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    beta: torch.Tensor
    g: torch.Tensor
    initial_state: torch.Tensor | None
    A_log: torch.Tensor | None
    dt_bias: torch.Tensor | None
