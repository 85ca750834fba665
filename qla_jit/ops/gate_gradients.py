"""From the gradients of log decays and write strengths to those of what the caller passed: g, A_log, dt_bias, beta."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from ..reference import RESET_GATE
from .inputs import CallInputs


class GateGradients(NamedTuple):
    """Each in the dtype of its input."""

    g: torch.Tensor                              # [B, T, HV]
    A_log: torch.Tensor | None                   # [HV]
    dt_bias: torch.Tensor | None                 # [HV]


def gate_gradients(inputs: CallInputs, dg: torch.Tensor, *, resets_have_none: bool) -> GateGradients:
    """dg: [B, T, HV], fp32, gradient of the log decay after the gate. A gate below RESET_GATE was replaced by it: it has none.

    resets_have_none: dg is 0 there already. Three kernels of PyTorch less, 8 us of calls that may take 150.
    """
    if inputs.A_log is None:
        dg = dg if resets_have_none else dg.masked_fill(inputs.g < RESET_GATE, 0.0)
        return GateGradients(dg.to(inputs.g.dtype), None, None)
    g = inputs.g.float()
    logit = g if inputs.dt_bias is None else g + inputs.dt_bias
    A = inputs.A_log.float().exp()
    gate = -A * F.softplus(logit)
    # Chosen and not multiplied: behind the last sequence dg is 0, and g may be anything, NaN too.
    counts = gate >= RESET_GATE
    dlogit = (dg * (-A * logit.sigmoid())).where(counts, 0.0)
    return GateGradients(
        dlogit.to(inputs.g.dtype),
        # d gate / d A_log is the gate itself, 0 also for a head without decay, whose A_log is -inf.
        (dg * gate).where(counts, 0.0).sum((0, 1)).to(inputs.A_log.dtype),
        None if inputs.dt_bias is None else dlogit.sum((0, 1)).to(inputs.dt_bias.dtype),
    )


def beta_gradient(inputs: CallInputs, dbeta: torch.Tensor) -> torch.Tensor:
    """dbeta: [B, T, HV], fp32, gradient of the write strength after the sigmoid. The result is in the dtype of beta."""
    if inputs.facts.use_beta_sigmoid_in_kernel:
        sigmoid = inputs.beta.float().sigmoid()
        factor = 2.0 if inputs.facts.allow_neg_eigval else 1.0
        dbeta = dbeta * (factor * sigmoid * (1 - sigmoid))
    return dbeta.to(inputs.beta.dtype)
