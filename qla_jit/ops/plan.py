"""The strategies that compute a call: which kernels, in which order, for which problems."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import UnsupportedError
from ..imports import Later
from ..kernel_templates import (
    chunk_inverse,
    chunk_output,
    gate_cumsum,
    l2norm,
    register_state_forward,
    segment_plan,
    segment_scan,
    segment_states,
    state_scan,
    triangular_solve,
)
from ..kernel_templates.arch import Arch
from ..kernel_templates.contract import Rejection, Template
from ..kernel_templates.macros.register_roles import HALF, ROWS, parts_of
from ..kernel_templates.macros.segments import place_count
from . import splits
from .inputs import CallFacts
from .operands import transfers_shape
from .splits import Sizes, best_backward_split, best_split

# Those that a forward alone has no use for: a fifth of what its first call would import.
chunk_gradients = Later("kernel_templates.chunk_gradients")
l2norm_backward = Later("kernel_templates.l2norm_backward")
register_gradient_scan = Later("kernel_templates.register_gradient_scan")
register_state_scan = Later("kernel_templates.register_state_scan")
segment_state_gradients = Later("kernel_templates.segment_state_gradients")
state_gradient_scan = Later("kernel_templates.state_gradient_scan")
warpgroup_gradients = Later("kernel_templates.warpgroup_gradients")

# The operations that strategies compute, as their tuned records are named.
OPS = FORWARD, BACKWARD = "gdn_forward", "gdn_backward"

KEY_DIMS = (64, 96, 128, 192, 256)
VALUE_DIMS = (64, 96, 128, 192, 256, 512)

# Of memory for what segments do to the state, at most. Every sequence has a place for it, so thousands of short ones beside
# a long one would take more than the chunk states of the baseline do.
TRANSFER_BYTES = 2**30

# Tokens per chunk of the backward, the first that a strategy serves: fewer chunks are fewer states in memory. It need not
# have the forward's chunks: of what the forward makes it takes the inverses at most, and makes its own for other chunks.
BACKWARD_CHUNK_SIZES = (64, 32)

# The backward divides by beta, whose exponent is at least this: v_new is about beta large, and must not be a denormal number.
# In bf16 a token with beta = 0 then writes 2^-24 of its v, half of what fp32 rounds away beside a state, so that the forward may
# have the floor too and both directions share chunk_inverse.
BETA_FLOORS = {torch.bfloat16: -24, torch.float16: -14}

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
    """A named composition of templates that computes a whole forward, or all gradients of one.

    pipeline.py launches those of the forward under their names, backward.py those of the backward.
    """

    name: str
    rejection: Callable[[CallFacts, Arch], Rejection | None]     # why it cannot serve a call, or None
    steps: Callable[[CallFacts], dict[str, Step]]                # its kernels by name, in launch order
    # Chunks per segment that are worth trying, None for whole sequences; the first is the default.
    splits: Callable[[CallFacts, Extents, int], tuple[int | None, ...]] = whole_sequences
    # Whether it is the better choice for these sizes on so many SMs, as far as is known without tuning; None: for all.
    suits: Callable[[CallFacts, Extents, int], bool] | None = None


def strategies_of(op: str, facts: CallFacts, arch: Arch) -> tuple[CallFacts, list[Strategy]]:
    """The strategies that can serve an operation of a call, the baseline first, and the call in chunks as they take it.

    Raises:
        UnsupportedError: there is none; the message gives each one's reason.
    """
    return backward_strategies_for(facts, arch) if op == BACKWARD else (facts, strategies_for(facts, arch))


def chunk_of_sizes(op: str, facts: CallFacts) -> int:
    """Tokens per chunk in which the sizes of a batch are told to the strategies of an operation, and stand in its records.

    For the backward it is the first of its own sizes, also where only another one serves the call: known without asking.
    """
    return BACKWARD_CHUNK_SIZES[0] if op == BACKWARD else facts.chunk_size


def strategies_for(facts: CallFacts, arch: Arch) -> list[Strategy]:
    """The strategies that can serve a call, the baseline first.

    Raises:
        UnsupportedError: there is none; the message gives each one's reason.
    """
    usable, reasons = _usable(STRATEGIES, facts, arch)
    if not usable:
        raise UnsupportedError(
            f"no kernel covers this call on {arch.name}: {reasons}; "
            "pad the head dims with zeros, or move the inputs to the CPU for the reference implementation"
        )
    return usable


def backward_strategies_for(facts: CallFacts, arch: Arch) -> tuple[CallFacts, list[Strategy]]:
    """The strategies that can serve the gradients of a call, the baseline first, and the call in chunks as they take it.

    Raises:
        UnsupportedError: there is none; the message gives each one's reason.
    """
    told: dict[str, list[str]] = {}
    for C in BACKWARD_CHUNK_SIZES:
        call = facts._replace(chunk_size=C)
        usable, reasons = _usable(BACKWARD_STRATEGIES, call, arch)
        if usable:
            return call, usable
        told.setdefault(reasons, []).append(str(C))
    by_size = "; ".join(f"in chunks of {' or '.join(sizes)}, {reasons}" for reasons, sizes in told.items())
    raise UnsupportedError(
        f"no kernels cover the gradients of this call on {arch.name}: {by_size}; "
        "where a call needs them, they come from the reference implementation"
    )


def _usable(strategies: Mapping[str, Strategy], facts: CallFacts, arch: Arch) -> tuple[list[Strategy], str]:
    """Those that can serve a call, and why the others cannot."""
    reasons = {name: strategy.rejection(facts, arch) for name, strategy in strategies.items()}
    usable = [strategy for name, strategy in strategies.items() if reasons[name] is None]
    return usable, "; ".join(f"{name}: {reason}" for name, reason in reasons.items() if reason is not None)


def covers_head_dims(facts: CallFacts, arch: Arch) -> Rejection | None:
    if facts.K not in KEY_DIMS or facts.V not in VALUE_DIMS:
        return Rejection(f"got K={facts.K}, V={facts.V}; K must be one of {KEY_DIMS} and V one of {VALUE_DIMS}")
    return None


def unit_row_steps(facts: CallFacts) -> dict[str, Step]:
    if not facts.use_qk_l2norm_in_kernel:
        return {}
    return {"l2norm": Step(l2norm.TEMPLATE, l2norm.Problem(K=facts.K, dtype=_NAMES[facts.dtype]))}


def chunked_steps(facts: CallFacts) -> dict[str, Step]:
    """Every intermediate in memory: gates -> solve -> state scan -> chunk output."""
    keys = key_side(facts)
    scan = state_scan.Problem(**keys, V=facts.V, **states(facts))
    return unit_row_steps(facts) | {
        "gate_cumsum": summed_gates(facts, beta_floor=None),
        "triangular_solve": Step(triangular_solve.TEMPLATE, triangular_solve.Problem(**keys)),
        "state_scan": Step(state_scan.TEMPLATE, scan),
        "chunk_output": Step(chunk_output.TEMPLATE, chunk_output.Problem(**keys, V=facts.V)),
    }


def fused_steps(facts: CallFacts, rows: int = ROWS) -> dict[str, Step]:
    """The inverse of each chunk, then everything else in one kernel that keeps so many rows of the state in registers."""
    keys = key_side(facts)
    rest = register_state_forward.Problem(**keys, V=facts.V, **states(facts), **gate_sources(facts), rows=rows)
    return unit_row_steps(facts) | {
        "chunk_inverse": ungated_inverses(facts),
        "register_state_forward": Step(register_state_forward.TEMPLATE, rest),
    }


def halves_steps(facts: CallFacts) -> dict[str, Step]:
    """As fused, with half as many rows: twice as many blocks, whose chains are shorter."""
    return fused_steps(facts, HALF)


def split_steps(facts: CallFacts) -> dict[str, Step]:
    """As fused, with long sequences cut into segments that are computed side by side."""
    rest = fused_steps(facts)["register_state_forward"]
    return unit_row_steps(facts) | segment_steps(facts) | {
        "register_state_forward": Step(rest.template, dataclasses.replace(rest.problem, initial_state_dtype=None, split=True)),
    }  # fmt: skip


def segment_steps(facts: CallFacts) -> dict[str, Step]:
    """The inverse of each chunk, and the state that enters every segment."""
    scan = segment_scan.Problem(**key_side(facts), V=facts.V, **gate_sources(facts))
    return {
        "segment_plan": forgetting(facts, backwards=False),
        "chunk_inverse": ungated_inverses(facts),
        "segment_scan": Step(segment_scan.TEMPLATE, scan),
        "segment_states": Step(segment_states.TEMPLATE, segment_states.Problem(**boundaries(facts), **initial_state(facts))),
    }


def forgetting(facts: CallFacts, *, backwards: bool) -> Step:
    problem = segment_plan.Problem(
        HV=facts.HV, C=facts.chunk_size, **packing(facts), **gate_sources(facts), backwards=backwards
    )
    return Step(segment_plan.TEMPLATE, problem)


def chunked_backward_steps(facts: CallFacts) -> dict[str, Step]:
    """The states again as in `chunked`, their gradients from chunk to chunk, then the gradients of each chunk for itself."""
    keys = key_side(facts)
    scan = state_scan.Problem(**keys, V=facts.V, **initial_state(facts), has_final_state=False)
    gradient_scan = state_gradient_scan.Problem(**keys, V=facts.V, **state_gradients(facts))
    return unit_row_steps(facts) | {
        "gate_cumsum": summed_gates(facts, beta_floor=BETA_FLOORS[facts.dtype]),
        "triangular_solve": Step(triangular_solve.TEMPLATE, triangular_solve.Problem(**keys)),
        "state_scan": Step(state_scan.TEMPLATE, scan),
        "state_gradient_scan": Step(state_gradient_scan.TEMPLATE, gradient_scan),
    } | chunk_gradient_steps(facts, states_v_first=False)  # fmt: skip


def register_backward_steps(facts: CallFacts) -> dict[str, Step]:
    """As chunked_backward_steps, with the state and then its gradient in registers from chunk to chunk."""
    states, gradients = register_scans(facts)
    return around_register_scans(
        facts,
        {
            "chunk_inverse": ungated_inverses(facts),
            "register_state_scan": Step(register_state_scan.TEMPLATE, states),
            "register_gradient_scan": Step(register_gradient_scan.TEMPLATE, gradients),
        },
    )


def split_register_backward_steps(facts: CallFacts) -> dict[str, Step]:
    """As register_backward_steps, with long sequences cut into segments that are computed side by side. What each adds to the
    gradient in front of it takes a scan of its own."""
    states, gradients = register_scans(facts)
    own = dataclasses.replace(gradients, has_initial_state=False, split=True, transfers_only=True)
    between = segment_state_gradients.Problem(
        **boundaries(facts), has_final_state_gradient=facts.output_final_state, state_v_first=facts.state_v_first
    )
    states = dataclasses.replace(states, initial_state_dtype=None, split=True)
    gradients = dataclasses.replace(gradients, has_final_state_gradient=False, split=True)
    return around_register_scans(
        facts,
        segment_steps(facts)
        | {
            "segment_plan_backwards": forgetting(facts, backwards=True),
            "segment_gradient_scan": Step(register_gradient_scan.TEMPLATE, own),
            "register_state_scan": Step(register_state_scan.TEMPLATE, states),
            "segment_state_gradients": Step(segment_state_gradients.TEMPLATE, between),
            "register_gradient_scan": Step(register_gradient_scan.TEMPLATE, gradients),
        },
    )


def register_scans(facts: CallFacts) -> tuple[register_state_scan.Problem, register_gradient_scan.Problem]:
    """Of whole sequences."""
    dims = dict(**key_side(facts), V=facts.V, **gate_sources(facts))
    return (
        register_state_scan.Problem(**dims, **initial_state(facts)),
        register_gradient_scan.Problem(**dims, **state_gradients(facts)),
    )


def around_register_scans(facts: CallFacts, scans: dict[str, Step]) -> dict[str, Step]:
    return unit_row_steps(facts) | {
        "gate_cumsum": summed_gates(facts, beta_floor=BETA_FLOORS[facts.dtype], clears_counts=True),
    } | scans | chunk_gradient_steps(facts, states_v_first=True)  # fmt: skip


def chunk_gradient_steps(facts: CallFacts, *, states_v_first: bool) -> dict[str, Step]:
    """What all end with. Transposed states of V = 128 have a faster kernel."""
    dims = key_side(facts) | dict(V=facts.V)
    if states_v_first and facts.V == warpgroup_gradients.DIM:
        steps = {"warpgroup_gradients": Step(warpgroup_gradients.TEMPLATE, warpgroup_gradients.Problem(**dims))}
    else:
        problem = chunk_gradients.Problem(**dims, states_v_first=states_v_first)
        steps = {"chunk_gradients": Step(chunk_gradients.TEMPLATE, problem)}
    if facts.use_qk_l2norm_in_kernel:
        steps["l2norm_backward"] = Step(l2norm_backward.TEMPLATE, l2norm_backward.Problem(K=facts.K, dtype=_NAMES[facts.dtype]))
    return steps


CostModel = Callable[[Sizes], int | None]        # chunks per segment

# Those that the tuner tries beside what a cost model takes, and can tell by a rule.
SEGMENTS = tuple(2**power for power in range(2, 12))


def segment_lengths(
    facts: CallFacts, extents: Extents, sm_count: int, *, model: CostModel = best_split
) -> tuple[int | None, ...]:
    best = model(sizes_of(facts, extents, sm_count))
    return tuple(dict.fromkeys((best, *(L for L in SEGMENTS if extents.longest > L), None)))


def split_pays(facts: CallFacts, extents: Extents, sm_count: int, *, model: CostModel = best_split) -> bool:
    L = model(sizes_of(facts, extents, sm_count))
    if not facts.auto_cp or L is None:
        return False
    places = place_count(extents.chunks, extents.sequences, L)
    return 4 * math.prod(transfers_shape(facts, places)) <= TRANSFER_BYTES


def halves_pay(facts: CallFacts, extents: Extents, sm_count: int) -> bool:
    return splits.halves_are_faster(sizes_of(facts, extents, sm_count))


def sizes_of(facts: CallFacts, extents: Extents, sm_count: int) -> Sizes:
    wide, halves = (facts.HV * parts_of(facts.V, rows) for rows in (ROWS, HALF))
    return Sizes(wide, halves, extents.longest, extents.chunks, extents.sequences, sm_count)


def templates_cover(steps: Callable[[CallFacts], dict[str, Step]]) -> Callable[[CallFacts, Arch], Rejection | None]:
    """A strategy serves a call if the baseline would, and each of its templates does with its default config."""

    def rejection(facts: CallFacts, arch: Arch) -> Rejection | None:
        if (reason := covers_head_dims(facts, arch)) is not None:
            return reason                # nothing to verify it against
        for step in steps(facts).values():
            config = step.template.default_config(step.problem, arch)
            reason = step.template.rejection(step.problem, config, arch)
            if reason is not None:
                return reason
        return None

    return rejection


def summed_gates(facts: CallFacts, *, beta_floor: int | None, clears_counts: bool = False) -> Step:
    problem = gate_cumsum.Problem(
        HV=facts.HV, C=facts.chunk_size, **packing(facts), **gate_sources(facts), **strength_sources(facts),
        beta_floor=beta_floor, clears_counts=clears_counts,
    )  # fmt: skip
    return Step(gate_cumsum.TEMPLATE, problem)


def ungated_inverses(facts: CallFacts) -> Step:
    """The same for both directions, so that the backward may take those of the forward."""
    problem = chunk_inverse.Problem(**key_side(facts), **strength_sources(facts), beta_floor=BETA_FLOORS[facts.dtype])
    return Step(chunk_inverse.TEMPLATE, problem)


def gate_sources(facts: CallFacts) -> dict[str, Any]:
    return dict(
        gate_dtype=_NAMES[facts.g_dtype],
        gate_in_kernel=facts.use_gate_in_kernel,
        has_dt_bias=facts.dt_bias_dtype is not None,
    )


def strength_sources(facts: CallFacts) -> dict[str, Any]:
    return dict(
        beta_dtype=_NAMES[facts.beta_dtype],
        beta_sigmoid=facts.use_beta_sigmoid_in_kernel,
        negative_eigenvalues=facts.allow_neg_eigval,
    )


def packing(facts: CallFacts) -> dict[str, Any]:
    return dict(packed=facts.varlen, index_dtype=_NAMES[facts.cu_seqlens_dtype] if facts.varlen else "int32")


def key_side(facts: CallFacts) -> dict[str, Any]:
    """What every kernel that reads keys is specialised on."""
    return dict(H=facts.H, HV=facts.HV, K=facts.K, C=facts.chunk_size, dtype=_NAMES[facts.dtype], **packing(facts))


def initial_state(facts: CallFacts) -> dict[str, Any]:
    dtype = None if facts.state_dtype is None else _NAMES[facts.state_dtype]
    return dict(initial_state_dtype=dtype, state_v_first=facts.state_v_first)


def boundaries(facts: CallFacts) -> dict[str, Any]:
    """What both kernels that go from segment to segment are specialised on, but for what they begin with."""
    return dict(HV=facts.HV, K=facts.K, V=facts.V, C=facts.chunk_size, **packing(facts))


def states(facts: CallFacts) -> dict[str, Any]:
    return initial_state(facts) | dict(has_final_state=facts.output_final_state)


def state_gradients(facts: CallFacts) -> dict[str, Any]:
    """The final state has a gradient if there is one, and so has the initial state."""
    return dict(
        has_final_state_gradient=facts.output_final_state,
        has_initial_state=facts.has_initial_state,
        state_v_first=facts.state_v_first,
    )


# In the order in which they are preferred when nothing was tuned: the last that serves the call and suits its sizes.
STRATEGIES = {
    strategy.name: strategy
    for strategy in (
        Strategy("chunked", covers_head_dims, chunked_steps),
        Strategy("fused", templates_cover(fused_steps), fused_steps),
        Strategy("fused_halves", templates_cover(halves_steps), halves_steps, suits=halves_pay),
        Strategy("split", templates_cover(split_steps), split_steps, segment_lengths, split_pays),
    )
}

# Gradients come from one of these whatever strategy computes the outputs; the same order.
BACKWARD_STRATEGIES = {
    strategy.name: strategy
    for strategy in (
        Strategy("chunked", templates_cover(chunked_backward_steps), chunked_backward_steps),
        Strategy("registers", templates_cover(register_backward_steps), register_backward_steps),
        Strategy(
            "registers_split",
            templates_cover(split_register_backward_steps),
            split_register_backward_steps,
            functools.partial(segment_lengths, model=best_backward_split),
            functools.partial(split_pays, model=best_backward_split),
        ),
    )
}
