"""Launch the kernels of the gradients of a call, one line a kernel."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from .. import kernel_cache, select
from ..build_command import build_command_of_call, told_on_a_miss
from ..compiler import CompileRequest
from ..device import gpu_info
from ..errors import UnsupportedError
from ..kernel_templates.macros.bands import row_count
from ..kernel_templates.macros.chunk_lists import COLUMNS
from ..kernel_templates.macros.register_roles import parts_of
from ..kernel_templates.macros.segments import place_count
from ..reference import L2NORM_EPS
from ..settings import settings
from ..tuning_records import Hardware
from . import plan
from .gate_gradients import beta_gradient, gate_gradients
from .inputs import CallFacts, CallInputs
from .kept import FromForward, Wanted
from .operands import (
    aligned,
    chunk_inverses,
    no_states,
    planned_segments,
    prepared_keys,
    scanned_chunks,
    segment_states,
    slots_of,
    states_of_segments,
    summed_gates,
    warm_chunks_of,
    with_float_parameters,
)
from .plan import Extents
from .results import WHOLE_SEQUENCES, ForwardResult, Gradients, SegmentStates

# Of states, their gradients and V_new of all chunks, from which on they are in memory for half of the chunks at a time, if that
# takes so much of them less. Where the forward kept the states midway it costs three launches; else the states of the first half
# are computed twice, and a long backward is 12 % slower.
BANDED_BYTES = 64 * 2**20
BANDED_BYTES_WITHOUT_MIDWAY = 4 * 2**30
SAVED_BY_BANDS = 0.25

Launch = dict[str, Callable[..., None]]  # the entry points of the kernels by step


@dataclass(frozen=True, slots=True)
class Kernels:
    """How the gradients of a call are computed, and the entry points of the kernels by step, once they are loaded."""

    dispatch: select.Dispatch
    launch: Launch = dataclasses.field(default_factory=dict)
    bands: int | None = None             # that were asked for


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


def wanted_of_forward(inputs: CallInputs) -> Wanted:
    """What a forward should find out that the gradients of the call need to know too: about segments, unless an override has said
    how the forward splits; and the states midway, where chunks go in two bands. Compiles nothing."""
    chosen = _choice_for(inputs)[1] if inputs.B * inputs.T else None
    if chosen is None:
        return Wanted()
    if inputs.facts.chunk_size != chosen.dispatch.facts.chunk_size:
        return Wanted()                  # chunks have other segments and states
    slots = slots_of(inputs)
    L, places = _segments_of(chosen, inputs, slots)
    return Wanted(
        split=L if L != WHOLE_SEQUENCES and select.override_in_force().split is ... else None,
        midway=L if bands_of(chosen, slots, places, from_midway=True) == 2 else None,
    )


def of_use(inputs: CallInputs, result: ForwardResult) -> FromForward:
    """What the gradients of a call will take of its forward. They may have to go another way than the outputs, as those of
    narrow heads do, and what nobody takes would stay in memory until the backward."""
    if result.Ab is None:                # nor segments
        return FromForward()
    _, chosen = _choice_for(inputs)
    steps = () if chosen is None else chosen.dispatch.requests
    return FromForward(
        result.Ab if "chunk_inverse" in steps else None,
        result.segments if "segment_plan" in steps else None,
        result.midway,                   # made where it was asked for
    )


def _choice_for(inputs: CallInputs) -> tuple[_Key, Kernels | None]:
    """How the gradients of a call are computed, its kernels not loaded at its first time."""
    facts, extents = inputs.facts, select.bucket(_extents_of(inputs))
    key = (facts, select.override_in_force(), extents)
    if key not in _ready:
        gpu = gpu_info(facts.device)
        try:
            dispatch = select.choose(facts, gpu.arch, op=plan.BACKWARD, hardware=Hardware.of(gpu), extents=extents)
        except UnsupportedError:
            _ready[key] = None
        else:
            bands = select.override_in_force().backward_bands or settings().backward_bands
            _ready[key] = Kernels(dispatch, bands=bands)
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
    found: tuple[torch.Tensor, ...] = ()
    bands = SCANS[kernels.dispatch.strategy](kernels, with_float_parameters(inputs), q, k, aligned(inputs.v), do, dht, kept)
    for band, chunks in enumerate(bands):
        if not found:
            dg, dbeta = torch.empty(2, *inputs.g.shape, dtype=torch.float32, device=facts.device).unbind()
            found = (torch.empty_like(q), torch.empty_like(k), dg, dbeta)
        sources = (
            q, k, chunks.v_new, chunks.dv, do, chunks.states, chunks.state_gradients, chunks.g_sum, chunks.beta,
            inputs.cu_seqlens,
        )  # fmt: skip
        if "warpgroup_gradients" in launch:
            blocks = min(len(chunks.states) * facts.H, gpu_info(facts.device).sm_count)
            launch["warpgroup_gradients"](*sources, chunks.listed, chunks.counts, *found, inputs.scale, band, blocks)
        else:
            launch["chunk_gradients"](*sources, *found, inputs.scale)
    dq, dk, dg, dbeta = found
    return GradientsSeen(dq, dk, chunks.dv, dg, dbeta, chunks.dh0)


class ScannedGradients(NamedTuple):
    """What is known of the chunks of a band, once states have gone forwards and their gradients backwards; docs/maths.md has the
    symbols. Rows are chunk slots where a single band has all chunks. dv and dh0 are not whole before the last band.

    The inverses of the chunks are not here: behind the last scan they are gone, and dq and dk may take their place in memory.
    """

    g_sum: torch.Tensor                          # [slots, HV, C], fp32
    beta: torch.Tensor                           # [slots, HV, C], fp32
    v_new: torch.Tensor                          # [rows, HV, C, V]
    states: torch.Tensor                         # [rows, HV, K, V], or [rows, HV, V, K] as chunk_gradients was built
    state_gradients: torch.Tensor                # as states
    dv: torch.Tensor                             # [B, T, HV, V]
    dh0: torch.Tensor | None                     # as the initial state, fp32
    listed: torch.Tensor | None = None           # [rows, 5], int32: where the chunks lie
    counts: torch.Tensor | None = None           # [bands], int32: how many there are


def _chunked(
    kernels: Kernels,
    inputs: CallInputs,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    do: torch.Tensor,
    dht: torch.Tensor | None,
    kept: FromForward,
) -> Iterator[ScannedGradients]:
    kept.Ab.take()                       # inverses without gates: of no use here
    kept.segments.take()
    kept.midway.take()
    initial_state, dh0 = _initial_state(inputs)
    launch = kernels.launch
    g_sum, beta, A, states, v_new = scanned_chunks(launch, inputs, k, v, initial_state, None)
    state_gradients, dv = torch.empty_like(states), torch.empty_like(v)
    launch["state_gradient_scan"](q, k, do, A, g_sum, inputs.cu_seqlens, dht, state_gradients, dv, dh0, inputs.scale)
    del A
    yield ScannedGradients(g_sum, beta, v_new, states, state_gradients, dv, dh0)


def _registers(
    kernels: Kernels,
    inputs: CallInputs,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    do: torch.Tensor,
    dht: torch.Tensor | None,
    kept: FromForward,
) -> Iterator[ScannedGradients]:
    launch, slots = kernels.launch, slots_of(inputs)
    L, places = _segments_of(kernels, inputs, slots)
    is_split = L != WHOLE_SEQUENCES
    known = _kept_midway(kept, L, places)
    bands = bands_of(kernels, slots, places, from_midway=known is not None)
    initial_state, dh0 = _initial_state(inputs)
    rows = row_count(slots, places, bands)
    listed = torch.empty(rows, COLUMNS, dtype=torch.int32, device=inputs.facts.device)
    counts = torch.empty(bands, dtype=torch.int32, device=inputs.facts.device)
    g_sum, beta = summed_gates(launch, inputs, slots, counts)
    Ab, found = _inverses_and_segments(kernels, inputs, k, v, initial_state, kept, L)
    segments = None if found is None else found.segments
    scans = RegisterScans(
        launch, inputs, q, k, v, do, Ab, None if segments is None else segments.segments_before, places=places, L=L
    )
    del Ab
    states, v_new = scans.room(rows)
    midway = known if known is not None and bands == 2 else scans.no_states
    del known
    if found is None:
        entering, behind = initial_state, dht
    else:                                # what each adds to the gradient in front of it, and beside that the states of chunks
        entering, behind = found.states, states_of_segments(inputs, segments)
        own = states_of_segments(inputs, segments)
        warm_chunks = warm_chunks_of(launch["segment_plan_backwards"], inputs, None, places=places, L=L)
        scans.own_gradients(dht, warm_chunks, own)
        scans.states(entering, midway, states, v_new, listed, counts, bands, 0, early=True)
        launch["segment_state_gradients"](
            found.transfers, segments.warm_chunks, inputs.cu_seqlens, dht, own, behind, L, inputs.T, inputs.N
        )
        del own, warm_chunks, found
        entering = entering if bands > 1 else None
    state_gradients, dv = torch.empty_like(states), torch.empty_like(v)
    carried = scans.room_between_bands(bands)
    for band in range(bands):
        follows_states = band > 0 or not is_split
        if follows_states:
            scans.states(entering, midway, states, v_new, listed, counts, bands, band, early=False)
        scans.gradients(behind, state_gradients, dv, dh0, carried, bands, band, early=follows_states)
        midway = scans.no_states
        if band == bands - 1:
            del scans, entering, behind, carried     # memory is at its highest behind this
        yield ScannedGradients(g_sum, beta, v_new, states, state_gradients, dv, dh0, listed, counts)


def _inverses_and_segments(
    kernels: Kernels,
    inputs: CallInputs,
    k: torch.Tensor,
    v: torch.Tensor,
    initial_state: torch.Tensor | None,
    kept: FromForward,
    L: int,
) -> tuple[torch.Tensor, SegmentStates | None]:
    """Those of the forward where it kept them, else made here; no segments where sequences are whole."""
    launch, segments = kernels.launch, None
    Ab, found = _kept_inverses(inputs, kept), _kept_segments(kernels, kept, L)
    if "segment_plan" in launch and found is None:
        segments = planned_segments(launch, inputs, L)
    if Ab is None:
        Ab = chunk_inverses(launch, inputs, k, slots_of(inputs), early=segments is not None)
    if segments is not None:
        found = segment_states(launch, inputs, k, v, Ab, initial_state, segments)
    return Ab, found


def _kept_segments(kernels: Kernels, kept: FromForward, L: int) -> SegmentStates | None:
    """Those of the forward, if they are as long as those of the backward. Both have chunks of 64, as all kernels of segments."""
    found = kept.segments.take()
    if found is None or "segment_plan" not in kernels.launch:
        return None
    return found if found.segments.L == L else None


def _kept_midway(kept: FromForward, L: int, places: int) -> torch.Tensor | None:
    """The states midway, if the forward kept those of segments of this length."""
    found = kept.midway.take()
    return None if found is None or (found.L, len(found.states)) != (L, places) else found.states


def _segments_of(kernels: Kernels, inputs: CallInputs, slots: int) -> tuple[int, int]:
    """Chunks per segment and places of them; those of sequences where they are whole. slots: of the chunks of the backward."""
    if "segment_plan" not in kernels.dispatch.requests:
        return WHOLE_SEQUENCES, inputs.N
    L = kernels.dispatch.segment_length(_extents_of(inputs))
    return L, place_count(slots, inputs.N, L)


def _extents_of(inputs: CallInputs) -> Extents:
    """In chunks of the backward."""
    return select.extents_of(inputs, plan.chunk_of_sizes(plan.BACKWARD, inputs.facts))


def _kept_inverses(inputs: CallInputs, kept: FromForward) -> torch.Tensor | None:
    """Those of the forward, if it had the chunks of the backward."""
    Ab = kept.Ab.take()
    return None if Ab is None or Ab.shape[-1] != inputs.facts.chunk_size else aligned(Ab.contiguous())


def bands_of(kernels: Kernels, slots: int, places: int, *, from_midway: bool) -> int:
    """In how many bands of chunks the scans and what is behind them go, one after the other.

    from_midway: of two bands the first can begin with the states that the forward kept there."""
    facts = kernels.dispatch.facts
    if "warpgroup_gradients" not in kernels.dispatch.requests:
        return 1
    if kernels.bands is not None:
        return kernels.bands
    row = facts.HV * facts.V * (2 * facts.K + facts.chunk_size) * facts.dtype.itemsize
    between = 2 * places * facts.HV * facts.V * facts.K * 4          # states midway, and their gradients
    saved = (slots - row_count(slots, places, 2)) * row - between
    enough = BANDED_BYTES if from_midway else BANDED_BYTES_WITHOUT_MIDWAY
    return 2 if slots * row >= enough and saved >= SAVED_BY_BANDS * slots * row else 1


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

    def room(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """For the state that enters each chunk of a band, transposed, and its V_new: [rows, HV, V, K] and [rows, HV, C, V]."""
        _, HV, C, _ = self.Ab.shape
        facts = self.inputs.facts
        states = torch.empty(rows, HV, facts.V, facts.K, dtype=facts.dtype, device=facts.device)
        return states, torch.empty(rows, HV, C, facts.V, dtype=facts.dtype, device=facts.device)

    def room_between_bands(self, bands: int) -> torch.Tensor:
        """For the gradient of the state that goes from one band to the next, [places, HV, V, K]; no places without a next."""
        facts = self.inputs.facts
        if bands == 1:
            return self.no_states
        return torch.empty(self.places, facts.HV, facts.V, facts.K, dtype=torch.float32, device=facts.device)

    @property
    def no_states(self) -> torch.Tensor:
        facts = self.inputs.facts
        return no_states(facts.device, facts.HV, facts.V, facts.K)

    def states(
        self,
        entering: torch.Tensor | None,
        midway: torch.Tensor,
        states: torch.Tensor,
        v_new: torch.Tensor,
        listed: torch.Tensor,
        counts: torch.Tensor,
        bands: int,
        band: int,
        *,
        early: bool,
    ) -> None:
        """What room() is for, from the state that enters each place, or that midway. early: beside own_gradients()."""
        self.launch["register_state_scan"](
            self.k, self.v, self.Ab, *self._gates, self.inputs.cu_seqlens, self.segments_before, entering, midway, states,
            v_new, listed, counts, self.L, bands, band, int(early), self._blocks,
        )  # fmt: skip

    def gradients(
        self,
        behind: torch.Tensor | None,
        state_gradients: torch.Tensor,
        dv: torch.Tensor,
        in_front: torch.Tensor | None,
        carried: torch.Tensor,
        bands: int,
        band: int,
        *,
        early: bool,
    ) -> None:
        """From the gradient of the state behind each place to that in front of it, by the chunks of a band. early: beside
        states(), of which it needs nothing."""
        outputs = (state_gradients, dv, in_front, None, carried)
        self._scan_gradients("register_gradient_scan", behind, outputs, (bands, band, int(early), self._blocks))

    def own_gradients(self, dht: torch.Tensor | None, warm_chunks: torch.Tensor, in_front: torch.Tensor) -> None:
        """What each segment adds to the gradient in front of it."""
        # How long an item takes is decided by the gates, so a block for each: as in segment_scan.
        outputs = (None, None, in_front, warm_chunks, None)
        self._scan_gradients("segment_gradient_scan", dht, outputs, (1, 0, 0, self._items))

    def _scan_gradients(
        self, step: str, behind: torch.Tensor | None, outputs: tuple[torch.Tensor | None, ...], how: tuple[int, ...]
    ) -> None:
        scale = self.inputs.scale
        self.launch[step](
            self.q, self.k, self.do, self.Ab, *self._gates, self.inputs.cu_seqlens, self.segments_before, behind, *outputs,
            scale, math.log2(scale) if scale else -math.inf, self.L, *how,
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
