"""Launch the kernels of the gradients of a call, one line a kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from .. import kernel_cache, select
from ..build_command import build_command_of_call, told_on_a_miss
from ..compiler import CompileRequest
from ..device import gpu_info
from ..errors import UnsupportedError
from ..reference import L2NORM_EPS
from .gate_gradients import beta_gradient, gate_gradients
from .inputs import CallFacts, CallInputs
from .operands import aligned, prepared_keys, scanned_chunks, with_float_parameters
from .results import Gradients

Launch = dict[str, Callable[..., None]]  # the entry points of the kernels by step

_ready: dict[tuple[CallFacts, select.Override], Launch | None] = {}


def kernels_for(facts: CallFacts, together_with: Callable[[], Sequence[CompileRequest]] = list) -> Launch | None:
    """The kernels of the gradients, compiled if need be, in one go with others; None where they do not cover the call here.

    A dictionary hit from the second call on, whatever the sizes. With facts.output_final_state the final state has a gradient.
    """
    key = (facts, select.override_in_force())
    if key not in _ready:
        try:
            requests = select.backward_requests(facts, gpu_info(facts.device).arch)
        except UnsupportedError:
            _ready[key] = None
        else:
            with told_on_a_miss(lambda: build_command_of_call(facts, gpu_info(facts.device), backward=True)):
                loaded = kernel_cache.get(list(dict.fromkeys([*requests.values(), *together_with()])))
            _ready[key] = {step: kernel.launch for step, kernel in zip(requests, loaded, strict=False)}
    return _ready[key]


def resolved() -> dict[tuple[CallFacts, select.Override], Launch | None]:
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
    launch = kernels_for(facts)
    assert launch is not None, "who asks for gradients has asked whether kernels cover them"
    do = aligned(do.to(facts.dtype).contiguous())
    dht = None if dht is None else aligned(dht.float().contiguous())

    cu_seqlens, scale = inputs.cu_seqlens, inputs.scale
    q, k = prepared_keys(launch, inputs)
    v = aligned(inputs.v)
    initial_state = None if inputs.initial_state is None else aligned(inputs.initial_state)
    g_sum, beta, A, states, v_new = scanned_chunks(launch, with_float_parameters(inputs), k, v, initial_state, None)
    state_gradients, dv = torch.empty_like(states), torch.empty_like(v)
    dh0 = None if initial_state is None else torch.empty_like(initial_state, dtype=torch.float32)
    launch["state_gradient_scan"](q, k, do, A, g_sum, cu_seqlens, dht, state_gradients, dv, dh0, scale)
    del A                                # dq and dk may take its place: here memory is at its highest
    dq, dk = torch.empty_like(q), torch.empty_like(k)
    dg, dbeta = torch.empty(2, *inputs.g.shape, dtype=torch.float32, device=facts.device).unbind()
    launch["chunk_gradients"](
        q, k, v_new, dv, do, states, state_gradients, g_sum, beta, cu_seqlens, dq, dk, dg, dbeta, scale
    )
    if facts.use_qk_l2norm_in_kernel:
        dq, dk = _through_l2norm(launch, inputs, dq, dk)
    gate = gate_gradients(inputs, dg)
    return Gradients(
        q=dq,
        k=dk,
        v=dv,
        beta=beta_gradient(inputs, dbeta),
        g=gate.g,
        initial_state=None if dh0 is None else dh0.to(facts.state_dtype),
        A_log=gate.A_log,
        dt_bias=gate.dt_bias,
    )


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
