"""Make the calls that candidates are checked and timed on, and write the facts of a call as JSON.

Times depend on the gates: how much of a sequence has to be read back to know a state follows from how fast it forgets. So the
profile of the gates is part of what was measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F

from ..ops.inputs import CallFacts, CallInputs, check_inputs, state_shape

Draw = Callable[..., torch.Tensor]               # standard normal float32 values of the shape given


def _mixed(draw: Draw, B: int, T: int, HV: int) -> torch.Tensor:
    g = F.logsigmoid(draw(B, T, HV)) / 16
    g[..., 3::4] = 0                     # heads that never forget
    return g


def _qwen(draw: Draw, B: int, T: int, HV: int) -> torch.Tensor:
    A = torch.linspace(0, 16, HV, device=draw(1).device)                 # Qwen3-Next's initial range
    return -A * F.softplus(draw(B, T, HV) / 2 + 1)


# Natural log of the decay, [B, T, HV], by profile.
GATE_PROFILES: dict[str, Callable[[Draw, int, int, int], torch.Tensor]] = {
    "mixed": _mixed,                             # about -0.05 a token; every fourth head at 0
    "qwen": _qwen,                               # from 0 to -21 a token, by head
    "open": lambda draw, *shape: 0 * draw(*shape),
    "closed": lambda draw, *shape: 0 * draw(*shape) - 21,
}


def make_call(
    facts: CallFacts, lengths: tuple[int, ...], gates: str, *, seed: int = 0, tail: int = 0
) -> dict[str, Any]:
    """Arguments of chunk_gated_delta_rule for sequences of these lengths, all equal unless facts.varlen.

    tail tokens follow the last packed sequence and belong to none. Where gates or beta come as logits, the profile is not
    used: their distribution follows from normal logits.
    """
    generator = torch.Generator(device=facts.device).manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=facts.device, generator=generator)

    N = len(lengths)
    B, T = (1, sum(lengths) + tail) if facts.varlen else (N, lengths[0])
    assert facts.varlen or set(lengths) == {T}, f"lengths {lengths} differ, and the call is not packed"
    H, HV, K, V = facts.H, facts.HV, facts.K, facts.V
    call: dict[str, Any] = dict(
        q=F.normalize(draw(B, T, H, K), dim=-1).to(facts.dtype),
        k=F.normalize(draw(B, T, H, K), dim=-1).to(facts.dtype),
        v=draw(B, T, HV, V).to(facts.dtype),
        g=(draw(B, T, HV) if facts.use_gate_in_kernel else GATE_PROFILES[gates](draw, B, T, HV)).to(facts.g_dtype),
        beta=(draw(B, T, HV) if facts.use_beta_sigmoid_in_kernel else draw(B, T, HV).sigmoid()).to(facts.beta_dtype),
    )
    if facts.state_dtype is not None:
        shape, _ = state_shape(N, HV, K, V, facts.state_v_first)
        call["initial_state"] = (K**-0.5 * draw(*shape)).to(facts.state_dtype)
    if facts.A_log_dtype is not None:
        call["A_log"] = torch.linspace(0, 2.7, HV, device=facts.device).to(facts.A_log_dtype)
    if facts.dt_bias_dtype is not None:
        call["dt_bias"] = torch.ones(HV, device=facts.device, dtype=facts.dt_bias_dtype)
    if facts.varlen:
        starts = torch.tensor([0, *accumulate(lengths)], dtype=facts.cu_seqlens_dtype)
        call |= dict(cu_seqlens=starts.to(facts.device), cu_seqlens_cpu=starts)
    flags = (
        "output_final_state", "use_qk_l2norm_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval", "state_v_first",
        "use_gate_in_kernel", "chunk_size", "auto_cp",
    )
    return call | {flag: getattr(facts, flag) for flag in flags}


def checked(facts: CallFacts, call: Mapping[str, Any]) -> CallInputs:
    """The call as the pipeline takes it."""
    inputs = check_inputs(**call)
    assert inputs.facts == facts, f"expected the call to have {facts}; got {inputs.facts}"
    return inputs


def call_bytes(facts: CallFacts, lengths: tuple[int, ...]) -> tuple[int, int]:
    """Bytes that a call must read, and must write, at least."""
    T, N, width = sum(lengths), len(lengths), facts.dtype.itemsize
    state = N * facts.HV * facts.K * facts.V
    reads = T * (2 * facts.H * facts.K + facts.HV * facts.V) * width
    reads += T * facts.HV * (facts.g_dtype.itemsize + facts.beta_dtype.itemsize)
    reads += 0 if facts.state_dtype is None else state * facts.state_dtype.itemsize
    writes = T * facts.HV * facts.V * width + (state * 4 if facts.output_final_state else 0)
    return reads, writes


def facts_to_json(facts: CallFacts) -> dict[str, Any]:
    return {
        name: str(value) if isinstance(value, torch.dtype | torch.device) else value for name, value in facts._asdict().items()
    }


def facts_from_json(data: Mapping[str, Any]) -> CallFacts:
    """The facts that facts_to_json() wrote."""
    def parsed(name: str, value: Any) -> Any:
        if name == "device":
            return torch.device(value)
        return getattr(torch, value.removeprefix("torch.")) if isinstance(value, str) else value

    return CallFacts(**{name: parsed(name, value) for name, value in data.items()})
