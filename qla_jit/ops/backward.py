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
from ..kernel_templates.macros.register_roles import parts_of
from ..reference import L2NORM_EPS
from ..settings import settings
from ..tuning_records import Hardware
from . import plan
from .gate_gradients import beta_gradient, gate_gradients
from .inputs import CallFacts, CallInputs
from .kept import FromForward
from .operands import (
    aligned,
    chunk_inverses,
    prepared_keys,
    scanned_chunks,
    segment_length,
    segment_states,
    slots_of,
    states_of_segments,
    summed_gates,
    warm_chunks_of,
    with_float_parameters,
)
from .plan import Extents
from .results import ForwardResult, Gradients, Segments, SegmentStates

WHOLE_SEQUENCES = 0                      # chunks per segment, to kernels that are built without segments

Launch = dict[str, Callable[..., None]]  # the entry points of the kernels by step


@dataclass(frozen=True, slots=True)
class Kernels:
    """How the gradients of a call are computed, and the entry points of the kernels by step, once they are loaded."""

    dispatch: select.Dispatch
    launch: Launch = dataclasses.field(default_factory=dict)


_Key = tuple[CallFacts, select.Override, Extents]

_ready: dict[_Key, Kernels | None] = {}


def kernels_for(inputs: CallInputs, together_with: Callable[[], Sequence[CompileRequest]] = list) -> Kernels | None:
    """The kernels of the gradients, compiled if need be, in one go with others; None where they do not cover the call here.

    A dictionary hit from the second call of about the same size on. With facts.output_final_state the final state has a gradient.
    """
    key, chosen = _choice_for(inputs)
    if chosen is None or chosen.launch:
        return chosen
    facts, dispatch = inputs.facts, chosen.dispatch
    gpu = gpu_info(facts.device)
    needed = list(dispatch.requests.values())
    if dispatch.source == "default" and settings().mode != "require":        # as in pipeline.choice_for()
        needed += select.requests_for_any_size(facts, gpu.arch, op=plan.BACKWARD)
    needed = list(dict.fromkeys([*needed, *together_with()]))
    with told_on_a_miss(lambda: build_command_of_call(facts, gpu, backward=True)):
        loaded = dict(zip(needed, kernel_cache.get(needed), strict=True))
    launch = {step: loaded[request].launch for step, request in dispatch.requests.items()}
    _ready[key] = dataclasses.replace(chosen, launch=launch)
    return _ready[key]


def split_to_share(inputs: CallInputs) -> int | None:
    """Chunks per segment with which a forward, if it splits, finds out about segments what the gradients of the call need to
    know too; None: nothing to share, or an override has said how the forward splits. Compiles nothing."""
    if inputs.B * inputs.T == 0 or select.override_in_force().split is not ...:
        return None
    _, chosen = _choice_for(inputs)
    return None if chosen is None else chosen.dispatch.split


def of_use(inputs: CallInputs, result: ForwardResult) -> FromForward:
    """What the gradients of a call will take of its forward. They may have to go another way than the outputs, as those of
    narrow heads do, and what nobody takes would stay in memory until the backward."""
    if result.Ab is None:                # nor segments
        return FromForward()
    _, chosen = _choice_for(inputs)
    steps = () if chosen is None else chosen.dispatch.requests
    return FromForward(
        result.Ab if "chunk_inverse" in steps else None, result.segments if "segment_plan" in steps else None
    )


def _choice_for(inputs: CallInputs) -> tuple[_Key, Kernels | None]:
    """How the gradients of a call are computed, its kernels not loaded at its first time."""
    facts, extents = inputs.facts, select.bucket(select.extents_of(inputs, plan.chunk_of_sizes(plan.BACKWARD, inputs.facts)))
    key = (facts, select.override_in_force(), extents)
    if key not in _ready:
        gpu = gpu_info(facts.device)
        try:
            dispatch = select.choose(facts, gpu.arch, op=plan.BACKWARD, hardware=Hardware.of(gpu), extents=extents)
        except UnsupportedError:
            _ready[key] = None
        else:
            _ready[key] = Kernels(dispatch)
    return key, _ready[key]


def resolved() -> dict[_Key, Kernels | None]:
    """What gradients have been given so far, by the calls and their rounded sizes; None where they come from the reference."""
    return {key: kernels for key, kernels in _ready.items() if kernels is None or kernels.launch}


def backward(
    inputs: CallInputs, do: torch.Tensor, dht: torch.Tensor | None, kept: FromForward | None = None
) -> Gradients:
    """The gradients of a call that kernels_for() covers. Launches on the current stream, no sync.

    do: [B, T, HV, V]. dht: gradient of the final state, given exactly if facts.output_final_state. kept: of the forward of the
    same call; it is taken and let go of as soon as it is not needed any more. What there is not is computed here.
    """
    kept = FromForward() if kept is None else kept
    facts = inputs.facts
    if facts.device.index != torch.cuda.current_device():
        with torch.cuda.device(facts.device):
            return backward(inputs, do, dht, kept)
    if inputs.B * inputs.T == 0:
        return _no_tokens(inputs, dht)
    kernels = kernels_for(inputs)
    assert kernels is not None, "who asks for gradients has asked whether kernels cover them"
    launch = kernels.launch
    inputs = dataclasses.replace(inputs, facts=kernels.dispatch.facts)
    do = aligned(do.to(facts.dtype).contiguous())
    if inputs.scale < 0:                 # `registers` works with its logarithm
        do, inputs = -do, dataclasses.replace(inputs, scale=-inputs.scale)
    dht = None if dht is None else aligned(dht.float().contiguous())

    seen = _of_what_kernels_see(kernels, inputs, do, dht, kept)
    dq, dk = _through_l2norm(launch, inputs, seen.dq, seen.dk) if facts.use_qk_l2norm_in_kernel else (seen.dq, seen.dk)
    gate = gate_gradients(inputs, seen.dg, resets_have_none="warpgroup_gradients" in launch)
    return Gradients(
        q=dq,
        k=dk,
        v=seen.dv,
        beta=beta_gradient(inputs, seen.dbeta),
        g=gate.g,
        initial_state=None if seen.dh0 is None else seen.dh0.to(facts.state_dtype),
        A_log=gate.A_log,
        dt_bias=gate.dt_bias,
    )


class GradientsSeen(NamedTuple):
    """The gradients of what the kernels see: q and k with unit rows if asked for, gates and betas that are not logits."""

    dq: torch.Tensor                             # [B, T, H, K]
    dk: torch.Tensor                             # [B, T, H, K]
    dv: torch.Tensor                             # [B, T, HV, V]
    dg: torch.Tensor                             # [B, T, HV], fp32
    dbeta: torch.Tensor                          # [B, T, HV], fp32
    dh0: torch.Tensor | None                     # as the initial state, fp32


def _of_what_kernels_see(
    kernels: Kernels, inputs: CallInputs, do: torch.Tensor, dht: torch.Tensor | None, kept: FromForward
) -> GradientsSeen:
    """All that is made on the way is gone when this returns."""
    launch, facts = kernels.launch, inputs.facts
    q, k = prepared_keys(launch, inputs)
    chunks = SCANS[kernels.dispatch.strategy](kernels, with_float_parameters(inputs), q, k, aligned(inputs.v), do, dht, kept)
    dq, dk = torch.empty_like(q), torch.empty_like(k)
    dg, dbeta = torch.empty(2, *inputs.g.shape, dtype=torch.float32, device=facts.device).unbind()
    sources = (
        q, k, chunks.v_new, chunks.dv, do, chunks.states, chunks.state_gradients, chunks.g_sum, chunks.beta, inputs.cu_seqlens,
    )  # fmt: skip
    found = (dq, dk, dg, dbeta)
    if "warpgroup_gradients" in launch:
        blocks = min(slots_of(inputs) * facts.H, gpu_info(facts.device).sm_count)
        launch["warpgroup_gradients"](*sources, chunks.chunk_tokens, *found, inputs.scale, blocks)
    else:
        launch["chunk_gradients"](*sources, *found, inputs.scale)
    return GradientsSeen(dq, dk, chunks.dv, dg, dbeta, chunks.dh0)


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
    chunk_tokens: torch.Tensor | None = None     # [slots, 2], int32: first token and tokens, if gate_cumsum lists them


def _chunked(
    kernels: Kernels,
    inputs: CallInputs,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    do: torch.Tensor,
    dht: torch.Tensor | None,
    kept: FromForward,
) -> ScannedGradients:
    kept.Ab.take()                       # inverses without gates: of no use here
    kept.segments.take()
    initial_state, dh0 = _initial_state(inputs)
    launch = kernels.launch
    g_sum, beta, A, states, v_new = scanned_chunks(launch, inputs, k, v, initial_state, None)
    state_gradients, dv = torch.empty_like(states), torch.empty_like(v)
    launch["state_gradient_scan"](q, k, do, A, g_sum, inputs.cu_seqlens, dht, state_gradients, dv, dh0, inputs.scale)
    return ScannedGradients(g_sum, beta, v_new, states, state_gradients, dv, dh0)


def _registers(
    kernels: Kernels,
    inputs: CallInputs,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    do: torch.Tensor,
    dht: torch.Tensor | None,
    kept: FromForward,
) -> ScannedGradients:
    launch, slots = kernels.launch, slots_of(inputs)
    initial_state, dh0 = _initial_state(inputs)
    chunk_tokens = None
    if plan.lists_chunks(inputs.facts):
        chunk_tokens = torch.empty(slots, 2, dtype=torch.int32, device=inputs.facts.device)
    g_sum, beta = summed_gates(launch, inputs, slots, chunk_tokens)
    Ab = _kept_inverses(inputs, kept)
    if Ab is None:
        Ab = chunk_inverses(launch, inputs, k, slots)
    found = _kept_segments(kernels, inputs, kept)
    if "segment_plan" in launch:
        if found is None:
            found = segment_states(launch, inputs, k, v, Ab, initial_state, L=segment_length(kernels.dispatch.split, slots))
        segments, transfers, entering = found
        del found
        scans = RegisterScans(
            launch, inputs, q, k, v, do, Ab, segments.segments_before, places=segments.places, L=segments.L
        )
        states, v_new = scans.states(entering)
        del entering                     # before there is room for gradients, and the transfers after
        behind = _gradients_behind(scans, segments, transfers, dht)
        del transfers
    else:
        scans = RegisterScans(launch, inputs, q, k, v, do, Ab, None, places=inputs.N, L=WHOLE_SEQUENCES)
        states, v_new = scans.states(initial_state)
        behind = dht
    state_gradients, dv = torch.empty_like(states), torch.empty_like(v)
    scans.gradients("register_gradient_scan", behind, state_gradients, dv, dh0)
    return ScannedGradients(g_sum, beta, v_new, states, state_gradients, dv, dh0, chunk_tokens)


def _kept_segments(kernels: Kernels, inputs: CallInputs, kept: FromForward) -> SegmentStates | None:
    """Those of the forward, if they are as long as those of the backward. Both have chunks of 64, as all kernels of segments."""
    found = kept.segments.take()
    if found is None or "segment_plan" not in kernels.launch:
        return None
    return found if segment_length(kernels.dispatch.split, slots_of(inputs)) == found.segments.L else None


def _kept_inverses(inputs: CallInputs, kept: FromForward) -> torch.Tensor | None:
    """Those of the forward, if it had the chunks of the backward."""
    Ab = kept.Ab.take()
    return None if Ab is None or Ab.shape[-1] != inputs.facts.chunk_size else aligned(Ab.contiguous())


SCANS = {"chunked": _chunked, "registers": _registers, "registers_split": _registers}


@dataclass(frozen=True)
class RegisterScans:
    """The scans that carry the state or its gradient in registers, of whole sequences or of all segments at once."""

    launch: Launch
    inputs: CallInputs
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    do: torch.Tensor
    Ab: torch.Tensor                             # [slots, HV, C, C]
    segments_before: torch.Tensor | None         # [N + 1]; None where sequences are whole
    _: dataclasses.KW_ONLY
    places: int                                  # of segments; as many as there are sequences where those are whole
    L: int                                       # chunks per segment, or WHOLE_SEQUENCES

    def states(self, initial: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """The state that enters each chunk, transposed, and v_new, from the state that enters each place."""
        slots, HV, C, _ = self.Ab.shape
        facts = self.inputs.facts
        states = torch.empty(slots, HV, facts.V, facts.K, dtype=facts.dtype, device=facts.device)
        v_new = torch.empty(slots, HV, C, facts.V, dtype=facts.dtype, device=facts.device)
        self.launch["register_state_scan"](
            self.k, self.v, self.Ab, *self._gates, self.inputs.cu_seqlens, self.segments_before, initial, states, v_new,
            self.L, self._blocks,
        )  # fmt: skip
        return states, v_new

    def gradients(
        self,
        step: str,
        behind: torch.Tensor | None,
        state_gradients: torch.Tensor | None,
        dv: torch.Tensor | None,
        in_front: torch.Tensor | None,
        warm_chunks: torch.Tensor | None = None,
    ) -> None:
        """From the gradient of the state behind each place to that in front of it."""
        scale = self.inputs.scale
        # Where the gates decide how long an item takes, a block for each: as in segment_scan.
        blocks = self._blocks if warm_chunks is None else self._items
        self.launch[step](
            self.q, self.k, self.do, self.Ab, *self._gates, self.inputs.cu_seqlens, self.segments_before, behind,
            state_gradients, dv, in_front, warm_chunks, scale, math.log2(scale) if scale else -math.inf, self.L, blocks,
        )  # fmt: skip

    @property
    def _gates(self) -> tuple[torch.Tensor | None, ...]:
        return self.inputs.g, self.inputs.A_log, self.inputs.dt_bias

    @property
    def _items(self) -> int:
        return self.places * self.inputs.facts.HV * parts_of(self.inputs.facts.V)

    @property
    def _blocks(self) -> int:
        """Each takes every blocks-th item."""
        return min(self._items, gpu_info(self.inputs.facts.device).sm_count)


def _gradients_behind(
    scans: RegisterScans, segments: Segments, transfers: torch.Tensor, dht: torch.Tensor | None
) -> torch.Tensor:
    """The gradient of the state behind each segment, [places, HV, V, K]."""
    launch, inputs = scans.launch, scans.inputs
    own, behind = states_of_segments(inputs, segments), states_of_segments(inputs, segments)
    warm_chunks = warm_chunks_of(launch["segment_plan_backwards"], inputs, None, places=segments.places, L=segments.L)
    scans.gradients("segment_gradient_scan", dht, None, None, own, warm_chunks)
    launch["segment_state_gradients"](
        transfers, segments.warm_chunks, inputs.cu_seqlens, dht, own, behind, segments.L, inputs.T, inputs.N
    )
    return behind


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
