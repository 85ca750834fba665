"""Launch the kernels of the gradients of a call, one line a kernel."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from .. import kernel_cache, select
from ..build_command import build_command_of_call, told_on_a_miss
from ..compiler import CompileRequest
from ..device import gpu_info
from ..errors import UnsupportedError
from ..kernel_templates.macros.register_roles import ROWS
from ..reference import L2NORM_EPS
from .gate_gradients import beta_gradient, gate_gradients
from .inputs import CallFacts, CallInputs
from .operands import (
    aligned,
    chunk_inverses,
    floored_strengths,
    prepared_keys,
    scanned_chunks,
    slots_of,
    summed_gates,
    with_float_parameters,
)
from .results import Gradients

WHOLE_SEQUENCES = 0                      # chunks per segment, to kernels that are built without segments

Launch = dict[str, Callable[..., None]]  # the entry points of the kernels by step


@dataclass(frozen=True, slots=True)
class Kernels:
    """How the gradients of a call are computed, and the entry points of the kernels by step."""

    dispatch: select.BackwardDispatch
    launch: Launch


_ready: dict[tuple[CallFacts, select.Override], Kernels | None] = {}


def kernels_for(facts: CallFacts, together_with: Callable[[], Sequence[CompileRequest]] = list) -> Kernels | None:
    """The kernels of the gradients, compiled if need be, in one go with others; None where they do not cover the call here.

    A dictionary hit from the second call on, whatever the sizes. With facts.output_final_state the final state has a gradient.
    """
    key = (facts, select.override_in_force())
    if key not in _ready:
        try:
            dispatch = select.choose_backward(facts, gpu_info(facts.device).arch)
        except UnsupportedError:
            _ready[key] = None
        else:
            with told_on_a_miss(lambda: build_command_of_call(facts, gpu_info(facts.device), backward=True)):
                loaded = kernel_cache.get(list(dict.fromkeys([*dispatch.requests.values(), *together_with()])))
            launch = {step: kernel.launch for step, kernel in zip(dispatch.requests, loaded, strict=False)}
            _ready[key] = Kernels(dispatch, launch)
    return _ready[key]


def resolved() -> dict[tuple[CallFacts, select.Override], Kernels | None]:
    """What gradients have been given so far; None where they come from the reference."""
    return dict(_ready)


def backward(inputs: CallInputs, do: torch.Tensor, dht: torch.Tensor | None) -> Gradients:
    """The gradients of a call that kernels_for() covers. Launches on the current stream, no sync.

    do: [B, T, HV, V]. dht: gradient of the final state, given exactly if facts.output_final_state.
    """
    facts = inputs.facts
    if facts.device.index != torch.cuda.current_device():
        with torch.cuda.device(facts.device):
            return backward(inputs, do, dht)
    if inputs.B * inputs.T == 0:
        return _no_tokens(inputs, dht)
    kernels = kernels_for(facts)
    assert kernels is not None, "who asks for gradients has asked whether kernels cover them"
    launch = kernels.launch
    inputs = dataclasses.replace(inputs, facts=kernels.dispatch.facts)
    do = aligned(do.to(facts.dtype).contiguous())
    if inputs.scale < 0:                 # `registers` works with its logarithm
        do, inputs = -do, dataclasses.replace(inputs, scale=-inputs.scale)
    dht = None if dht is None else aligned(dht.float().contiguous())

    q, k = prepared_keys(launch, inputs)
    chunks = SCANS[kernels.dispatch.strategy](launch, with_float_parameters(inputs), q, k, aligned(inputs.v), do, dht)
    dq, dk = torch.empty_like(q), torch.empty_like(k)
    dg, dbeta = torch.empty(2, *inputs.g.shape, dtype=torch.float32, device=facts.device).unbind()
    arguments = (
        q, k, chunks.v_new, chunks.dv, do, chunks.states, chunks.state_gradients, chunks.g_sum, chunks.beta, inputs.cu_seqlens,
        dq, dk, dg, dbeta, inputs.scale,
    )  # fmt: skip
    if "warpgroup_gradients" in launch:
        blocks = min(slots_of(inputs) * facts.H, gpu_info(facts.device).sm_count)
        launch["warpgroup_gradients"](*arguments, blocks)
    else:
        launch["chunk_gradients"](*arguments)
    if facts.use_qk_l2norm_in_kernel:
        dq, dk = _through_l2norm(launch, inputs, dq, dk)
    gate = gate_gradients(inputs, dg)
    return Gradients(
        q=dq,
        k=dk,
        v=chunks.dv,
        beta=beta_gradient(inputs, dbeta),
        g=gate.g,
        initial_state=None if chunks.dh0 is None else chunks.dh0.to(facts.state_dtype),
        A_log=gate.A_log,
        dt_bias=gate.dt_bias,
    )


class ScannedGradients(NamedTuple):
    """What is known once states have gone forwards and their gradients backwards; docs/maths.md has the symbols.

    By chunk slot, but for dv and dh0. The inverses of the chunks are not here: dq and dk may take their place in memory, which is
    at its highest then.
    """

    g_sum: torch.Tensor                          # [slots, HV, C], fp32
    beta: torch.Tensor                           # [slots, HV, C], fp32
    v_new: torch.Tensor                          # [slots, HV, C, V]
    states: torch.Tensor                         # [slots, HV, K, V], or [slots, HV, V, K] as chunk_gradients was built
    state_gradients: torch.Tensor                # as states
    dv: torch.Tensor                             # [B, T, HV, V]
    dh0: torch.Tensor | None                     # as the initial state, fp32


def _chunked(
    launch: Launch,
    inputs: CallInputs,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    do: torch.Tensor,
    dht: torch.Tensor | None,
) -> ScannedGradients:
    initial_state, dh0 = _initial_state(inputs)
    g_sum, beta, A, states, v_new = scanned_chunks(launch, inputs, k, v, initial_state, None)
    state_gradients, dv = torch.empty_like(states), torch.empty_like(v)
    launch["state_gradient_scan"](q, k, do, A, g_sum, inputs.cu_seqlens, dht, state_gradients, dv, dh0, inputs.scale)
    return ScannedGradients(g_sum, beta, v_new, states, state_gradients, dv, dh0)


def _registers(
    launch: Launch,
    inputs: CallInputs,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    do: torch.Tensor,
    dht: torch.Tensor | None,
) -> ScannedGradients:
    facts, cu_seqlens, scale, slots = inputs.facts, inputs.cu_seqlens, inputs.scale, slots_of(inputs)
    HV, K, V, C = facts.HV, facts.K, facts.V, facts.chunk_size
    inputs = dataclasses.replace(inputs, beta=floored_strengths(inputs))
    gates = (inputs.g, inputs.A_log, inputs.dt_bias)
    initial_state, dh0 = _initial_state(inputs)
    blocks = min(inputs.N * HV * (V // ROWS), gpu_info(facts.device).sm_count)

    g_sum, beta = summed_gates(launch, inputs, slots)
    Ab = chunk_inverses(launch, inputs, k, slots)
    states = torch.empty(slots, HV, V, K, dtype=facts.dtype, device=facts.device)
    v_new = torch.empty(slots, HV, C, V, dtype=facts.dtype, device=facts.device)
    launch["register_state_scan"](k, v, Ab, *gates, cu_seqlens, initial_state, states, v_new, WHOLE_SEQUENCES, blocks)
    state_gradients, dv = torch.empty_like(states), torch.empty_like(v)
    launch["register_gradient_scan"](
        q, k, do, Ab, *gates, cu_seqlens, dht, state_gradients, dv, dh0,
        scale, math.log2(scale) if scale else -math.inf, WHOLE_SEQUENCES, blocks,
    )  # fmt: skip
    return ScannedGradients(g_sum, beta, v_new, states, state_gradients, dv, dh0)


SCANS = {"chunked": _chunked, "registers": _registers}


def _initial_state(inputs: CallInputs) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The initial state as the kernels read it, and room for its gradient."""
    if inputs.initial_state is None:
        return None, None
    return aligned(inputs.initial_state), torch.empty_like(inputs.initial_state, dtype=torch.float32)


def _through_l2norm(
    launch: Launch, inputs: CallInputs, dq_unit: torch.Tensor, dk_unit: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of q and k from those of their unit rows."""
    rows = (-1, inputs.facts.K)
    dq, dk = torch.empty_like(dq_unit), torch.empty_like(dk_unit)
    q, k, *others = (x.view(rows) for x in (aligned(inputs.q), aligned(inputs.k), dq_unit, dk_unit, dq, dk))
    launch["l2norm_backward"](q, k, L2NORM_EPS, *others)
    return dq, dk


def _no_tokens(inputs: CallInputs, dht: torch.Tensor | None) -> Gradients:
    """Nothing but the state passes through."""
    tensors = {name: getattr(inputs, name) for name in Gradients._fields}
    gradients = {name: None if x is None else torch.zeros_like(x) for name, x in tensors.items()}
    if dht is not None and inputs.initial_state is not None:
        gradients["initial_state"] = dht.to(inputs.initial_state.dtype)
    return Gradients(**gradients)
