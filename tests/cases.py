"""Inputs that the tests share: families of gates, betas and keys, sets of sequence lengths, and one builder of calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from itertools import accumulate, groupby
from typing import Any

import torch
import torch.nn.functional as F

from qla_jit import reference

Draw = Callable[..., torch.Tensor]               # standard normal float32 values of the shape given


# Natural log of the decay, [B, T, HV] float32. Together they are what real models and hard masks produce.
def _mixed(draw: Draw, B: int, T: int, HV: int) -> torch.Tensor:
    g = F.logsigmoid(draw(B, T, HV)) / 16
    g[..., ::4] = 0                              # every fourth head never forgets
    return g


def _qwen(draw: Draw, B: int, T: int, HV: int) -> torch.Tensor:
    A = torch.linspace(0, 16, HV)                # Qwen3-Next's initial range; -21 per token where A = 16
    return -A * F.softplus(0.5 * draw(B, T, HV) + 1)


def _reset(draw: Draw, B: int, T: int, HV: int) -> torch.Tensor:
    g = F.logsigmoid(draw(B, T, HV)) / 16
    g[:, 37::100] = -1e4                         # inside a chunk of 16, 32 or 64
    return g


def _minus_inf(draw: Draw, B: int, T: int, HV: int) -> torch.Tensor:
    g = F.logsigmoid(draw(B, T, HV)) / 16
    g[:, :1] = float("-inf")                     # on the first token, alone, and twice in a row
    g[:, 37::100] = float("-inf")
    g[:, 70:72] = float("-inf")
    return g


GATES: dict[str, Callable[[Draw, int, int, int], torch.Tensor]] = {
    "mixed": _mixed,
    "qwen": _qwen,
    "open": lambda draw, *shape: torch.zeros(shape),
    "closed": lambda draw, *shape: torch.full(shape, -21.0),
    "reset": _reset,
    "minus_inf": _minus_inf,
}

BETAS: dict[str, Callable[[Draw, int, int, int], torch.Tensor]] = {
    "random": lambda draw, *shape: draw(*shape).sigmoid(),
    "beta0": lambda draw, *shape: torch.zeros(shape),
    "some_beta0": lambda draw, *shape: torch.sigmoid(draw(*shape)) * (draw(*shape) > 0),
    "beta1": lambda draw, *shape: torch.ones(shape),
    "beta2": lambda draw, *shape: torch.full(shape, 2.0),
}


def _collinear(draw: Draw, B: int, T: int, H: int, K: int) -> torch.Tensor:
    return F.normalize(draw(B, 1, H, K) + 0.05 * draw(B, T, H, K), dim=-1)        # the solve's off-diagonal is near beta


def _zero_rows(draw: Draw, B: int, T: int, H: int, K: int) -> torch.Tensor:
    k = draw(B, T, H, K)
    k[:, ::3] = 0
    return k


KEYS: dict[str, Callable[[Draw, int, int, int, int], torch.Tensor]] = {
    "unit": lambda draw, *shape: F.normalize(draw(*shape), dim=-1),
    "collinear": _collinear,
    "zero_rows": _zero_rows,                     # for l2norm: the other rows are not of unit norm
}

# Lengths of packed sequences around the chunk of 64: below, at and above one and two chunks, single tokens, empty ones.
RAGGED_LENGTHS = ((1,), (63,), (64,), (65,), (128,), (129,), (0, 1, 63, 0, 64, 65, 1), (200, 1, 0))


@dataclass(frozen=True)
class Case:
    """One call, by what is particular about it. str(case) is a test id made from the values that are not the default."""

    H: int = 2
    HV: int = 4
    K: int = 16
    V: int = 24
    lengths: tuple[int, ...] = (129,)
    packed: bool = True                          # False: equal lengths, one batch entry each
    tail: int = 0                                # tokens after the last packed sequence
    gates: str = "mixed"
    betas: str = "random"
    keys: str = "unit"
    initial_state: bool = True
    state_v_first: bool = False
    l2norm: bool = False
    in_kernel: bool = False                      # gate and beta given as logits; betas="beta2" allows negative eigenvalues
    dtype: torch.dtype = torch.float64           # of q, k and v
    gate_dtype: torch.dtype = torch.float32      # of g and beta
    state_dtype: torch.dtype = torch.float32     # of the initial state

    def __str__(self) -> str:
        runs = [(length, len(list(run))) for length, run in groupby(self.lengths)]
        lengths = "+".join(f"{length}x{count}" if count > 1 else f"{length}" for length, count in runs)
        parts = [f"H{self.H}-HV{self.HV}-K{self.K}-V{self.V}-{lengths}-{self.gates}-{self.betas}-{self.keys}"]
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) and value != field.default:
                parts.append(field.name if value else f"no_{field.name}")
            elif isinstance(value, torch.dtype) and value != field.default:
                parts.append(f"{field.name}_{str(value).removeprefix('torch.')}")
        return "-".join(parts + [f"tail{self.tail}"] * bool(self.tail))


def arguments(case: Case, *, device: str = "cpu", seed: int = 0) -> dict[str, Any]:
    """The case as arguments of chunk_gated_delta_rule. The values do not depend on the device."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    H, HV, K, V, N = case.H, case.HV, case.K, case.V, len(case.lengths)
    if case.packed:
        B, T = 1, sum(case.lengths) + case.tail
    else:
        B, T = N, case.lengths[0]
        assert set(case.lengths) == {T}, "without packing all lengths are equal"
    state_shape = (N, HV, V, K) if case.state_v_first else (N, HV, K, V)
    cu_seqlens = torch.tensor([0, *accumulate(case.lengths)], dtype=torch.int32)
    call: dict[str, Any] = dict(
        q=draw(B, T, H, K).to(case.dtype),
        k=KEYS[case.keys](draw, B, T, H, K).to(case.dtype),
        v=draw(B, T, HV, V).to(case.dtype),
        g=(draw(B, T, HV) if case.in_kernel else GATES[case.gates](draw, B, T, HV)).to(case.gate_dtype),
        beta=(draw(B, T, HV) if case.in_kernel else BETAS[case.betas](draw, B, T, HV)).to(case.gate_dtype),
        initial_state=(K**-0.5 * draw(*state_shape)).to(case.state_dtype) if case.initial_state else None,
        cu_seqlens=cu_seqlens if case.packed else None,
    )
    if case.in_kernel:
        call |= dict(A_log=torch.linspace(0, 16, HV).log(), dt_bias=torch.ones(HV))        # A_log[0] is -inf
    call = {name: x if x is None else x.to(device) for name, x in call.items()}
    return call | dict(
        output_final_state=True,
        state_v_first=case.state_v_first,
        use_qk_l2norm_in_kernel=case.l2norm,
        use_gate_in_kernel=case.in_kernel,
        use_beta_sigmoid_in_kernel=case.in_kernel,
        allow_neg_eigval=case.in_kernel and case.betas == "beta2",
    )


def oracle(call: dict[str, Any], *, by_chunk: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """o and final state of a call in float64, where its tensors are; by_chunk is the quicker one for long sequences."""
    form = reference.chunk_gated_delta_rule if by_chunk else reference.recurrent_gated_delta_rule
    return form(**{name: x for name, x in call.items() if name != "output_final_state"}, dtype=torch.float64)


def relative_l2(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """||actual - expected|| / ||expected||; the absolute error where nothing but zeros is expected."""
    error, size = (actual.double() - expected.double()).norm().item(), expected.double().norm().item()
    return error / size if size else error


def fill_free_memory_with_nan() -> None:
    """Whatever the next call on the GPU allocates and does not write shows as NaN."""
    torch.full((64 * 2**20,), float("nan"), device="cuda")
