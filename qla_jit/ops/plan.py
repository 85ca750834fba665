"""The strategies that compute a call: which kernels, in which order, for which problems."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import UnsupportedError
from ..kernel_templates import chunk_output, gate_cumsum, l2norm, state_scan, triangular_solve
from ..kernel_templates.arch import Arch
from ..kernel_templates.contract import Rejection, Template
from .inputs import CallFacts

KEY_DIMS = (64, 96, 128, 192, 256)
VALUE_DIMS = (64, 96, 128, 192, 256, 512)

_NAMES = {
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
    torch.int32: "int32",
    torch.int64: "int64",
}


@dataclass(frozen=True)
class Step:
    """One kernel of a strategy: the template and the problem that the call poses to it."""

    template: Template
    problem: Any


@dataclass(frozen=True)
class Extents:
    """The run-time sizes that decide how fast a kernel is, in chunks. Never part of a kernel key."""

    chunks: int                          # of all sequences together; an upper bound where the host does not know the lengths
    longest: int                         # of the longest sequence, likewise
    sequences: int


def whole_sequences(facts: CallFacts, extents: Extents, sm_count: int) -> tuple[int | None, ...]:
    """The splits of a strategy that never splits."""
    return (None,)


@dataclass(frozen=True)
class Strategy:
    """A named composition of templates that computes the whole forward; pipeline.py launches it under the same name."""

    name: str
    rejection: Callable[[CallFacts, Arch], Rejection | None]     # why it cannot serve a call, or None
    steps: Callable[[CallFacts], dict[str, Step]]                # its kernels by name, in launch order
    # Chunks per segment that are worth trying, None for whole sequences; the first is the default.
    splits: Callable[[CallFacts, Extents, int], tuple[int | None, ...]] = whole_sequences


def strategies_for(facts: CallFacts, arch: Arch) -> list[Strategy]:
    """The strategies that can serve a call, the baseline first.

    Raises:
        UnsupportedError: there is none; the message gives each one's reason.
    """
    reasons = {strategy.name: strategy.rejection(facts, arch) for strategy in STRATEGIES.values()}
    usable = [strategy for strategy in STRATEGIES.values() if reasons[strategy.name] is None]
    if not usable:
        told = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        raise UnsupportedError(
            f"no kernel covers this call on {arch.name}: {told}; "
            "pad the head dims with zeros, or move the inputs to the CPU for the reference implementation"
        )
    return usable


def covers_head_dims(facts: CallFacts, arch: Arch) -> Rejection | None:
    if facts.K not in KEY_DIMS or facts.V not in VALUE_DIMS:
        return Rejection(f"got K={facts.K}, V={facts.V}; K must be one of {KEY_DIMS} and V one of {VALUE_DIMS}")
    return None


def prepare_steps(facts: CallFacts) -> dict[str, Step]:
    """What every strategy begins with: unit rows if asked for, and the gates of each chunk."""
    steps = {}
    if facts.use_qk_l2norm_in_kernel:
        steps["l2norm"] = Step(l2norm.TEMPLATE, l2norm.Problem(K=facts.K, dtype=_NAMES[facts.dtype]))
    steps["gate_cumsum"] = Step(
        gate_cumsum.TEMPLATE,
        gate_cumsum.Problem(
            HV=facts.HV,
            C=facts.chunk_size,
            gate_dtype=_NAMES[facts.g_dtype],
            beta_dtype=_NAMES[facts.beta_dtype],
            **packing(facts),
            gate_in_kernel=facts.use_gate_in_kernel,
            has_dt_bias=facts.dt_bias_dtype is not None,
            beta_sigmoid=facts.use_beta_sigmoid_in_kernel,
            negative_eigenvalues=facts.allow_neg_eigval,
        ),
    )
    return steps


def chunked_steps(facts: CallFacts) -> dict[str, Step]:
    """Every intermediate in memory: gates -> solve -> state scan -> chunk output."""
    heads = dict(H=facts.H, HV=facts.HV, K=facts.K)
    chunks = dict(C=facts.chunk_size, dtype=_NAMES[facts.dtype], **packing(facts))
    scan = state_scan.Problem(**heads, **chunks, V=facts.V, **states(facts))
    return prepare_steps(facts) | {
        "triangular_solve": Step(triangular_solve.TEMPLATE, triangular_solve.Problem(**heads, **chunks)),
        "state_scan": Step(state_scan.TEMPLATE, scan),
        "chunk_output": Step(chunk_output.TEMPLATE, chunk_output.Problem(**heads, **chunks, V=facts.V)),
    }


def packing(facts: CallFacts) -> dict[str, Any]:
    return dict(packed=facts.varlen, index_dtype=_NAMES[facts.cu_seqlens_dtype] if facts.varlen else "int32")


def states(facts: CallFacts) -> dict[str, Any]:
    return dict(
        initial_state_dtype=None if facts.state_dtype is None else _NAMES[facts.state_dtype],
        has_final_state=facts.output_final_state,
        state_v_first=facts.state_v_first,
    )


# In the order in which they are preferred when nothing was tuned: the last that serves the call.
STRATEGIES = {
    strategy.name: strategy
    for strategy in (Strategy("chunked", covers_head_dims, chunked_steps),)
}
