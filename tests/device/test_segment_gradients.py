"""The scans of the backward on segments against those on whole sequences, launched directly, for forced lengths of segments."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from cases import Case, arguments, relative_l2

from qla_jit import kernel_cache
from qla_jit.compiler import CompileRequest
from qla_jit.errors import QLAError
from qla_jit.kernel_templates import (
    chunk_inverse,
    register_gradient_scan,
    register_state_scan,
    segment_plan,
    segment_scan,
    segment_state_gradients,
    segment_states,
)
from qla_jit.kernel_templates.arch import SM90A
from qla_jit.kernel_templates.contract import Template
from qla_jit.kernel_templates.macros.chunk_lists import COLUMNS
from qla_jit.kernel_templates.macros.register_roles import ROWS
from qla_jit.kernel_templates.macros.segments import place_count
from qla_jit.kernel_templates.macros.sequences import slot_count

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() != SM90A.compute_capability, reason="written for Hopper"
    ),
]

C, K = 64, 128
SCALE = K**-0.5
ALL_CHUNKS = (1, 0, 0)                   # in one band, which waits for the kernel before

# Both round at the same places, but the states at another scale; each differs from float64 by up to 4e-3.
BOUND = 6e-3

PACKED = Case(H=2, HV=8, K=K, V=128, lengths=(2500, 64, 1, 0, 447, 1100), tail=100, dtype=torch.bfloat16)
EQUAL = Case(
    H=2, HV=8, K=K, V=256, lengths=(1500, 1500), packed=False, initial_state=False, state_v_first=True, dtype=torch.bfloat16
)
CASES = [
    PACKED,
    replace(PACKED, gates="qwen"),       # heads that forget within a chunk beside one that never does
    replace(PACKED, gates="reset"),
    EQUAL,
]
# Chunks per segment: every chunk for itself, ragged segments at the end, few segments, one for each sequence.
SEGMENTS = [1, 2, 16, None]


def kernels_of(case: Case) -> dict[str, tuple[Template, Any]]:
    """The kernels by name: those of whole sequences, then what segments need."""
    packing = dict(packed=case.packed, index_dtype="int32")
    gates = dict(gate_dtype="float32", gate_in_kernel=False, has_dt_bias=False)
    keys = dict(H=case.H, HV=case.HV, K=K, C=C, dtype="bfloat16", **packing)
    strengths = dict(beta_dtype="float32", beta_sigmoid=False, negative_eigenvalues=False, beta_floor=-24)
    states = dict(HV=case.HV, K=K, V=case.V, C=C, **packing, state_v_first=case.state_v_first)
    initial = dict(initial_state_dtype="float32" if case.initial_state else None)
    final = dict(has_final_state_gradient=case.initial_state)
    scan = dict(**keys, V=case.V, **gates, state_v_first=case.state_v_first)

    def gradients(**changes: Any) -> register_gradient_scan.Problem:
        return register_gradient_scan.Problem(**scan | final | dict(has_initial_state=case.initial_state) | changes)

    return {
        "chunk_inverse": (chunk_inverse.TEMPLATE, chunk_inverse.Problem(**keys, **strengths)),
        "state_scan": (register_state_scan.TEMPLATE, register_state_scan.Problem(**scan, **initial)),
        "gradient_scan": (register_gradient_scan.TEMPLATE, gradients()),
        "segment_plan": (segment_plan.TEMPLATE, segment_plan.Problem(HV=case.HV, C=C, **packing, **gates)),
        "segment_scan": (segment_scan.TEMPLATE, segment_scan.Problem(**keys, V=case.V, **gates)),
        "segment_states": (segment_states.TEMPLATE, segment_states.Problem(**states, **initial)),
        "split_state_scan": (
            register_state_scan.TEMPLATE, register_state_scan.Problem(**scan, initial_state_dtype=None, split=True)
        ),
        "segment_plan_backwards": (
            segment_plan.TEMPLATE, segment_plan.Problem(HV=case.HV, C=C, **packing, **gates, backwards=True)
        ),
        "transfers": (
            register_gradient_scan.TEMPLATE, gradients(has_initial_state=False, split=True, transfers_only=True)
        ),
        "segment_state_gradients": (segment_state_gradients.TEMPLATE, segment_state_gradients.Problem(**states, **final)),
        "split_gradient_scan": (register_gradient_scan.TEMPLATE, gradients(has_final_state_gradient=False, split=True)),
    }  # fmt: skip


def requests_of(case: Case) -> list[CompileRequest]:
    return [CompileRequest(t, p, t.default_config(p, SM90A), SM90A) for t, p in kernels_of(case).values()]


@pytest.fixture(scope="module", autouse=True)
def compiled_together() -> None:
    """Build all kernels in one parallel batch; one that fails is reported by the test that needs it."""
    requests = [request for case in CASES for request in requests_of(case)]
    with contextlib.suppress(QLAError):
        kernel_cache.get(list(dict.fromkeys(requests)))


@dataclass(frozen=True)
class Scanned:
    """What both scans write; slots without a chunk hold NaN."""

    states: torch.Tensor                 # [slots, HV, V, K]
    v_new: torch.Tensor                  # [slots, HV, C, V]
    state_gradients: torch.Tensor        # [slots, HV, V, K]
    dv: torch.Tensor                     # [B, T, HV, V]
    dh0: torch.Tensor | None             # as the initial state


class Scans:
    """Both scans of one case."""

    def __init__(self, case: Case) -> None:
        self.case = case
        loaded = kernel_cache.get(requests_of(case))
        self.launch: dict[str, Callable[..., None]] = dict(zip(kernels_of(case), loaded, strict=True))
        call = arguments(case, device="cuda")
        self.q, self.k, self.v, self.g, self.beta = (call[name] for name in ("q", "k", "v", "g", "beta"))
        self.cu_seqlens, self.initial_state = call["cu_seqlens"], call["initial_state"]
        generator = torch.Generator(device="cuda").manual_seed(1)
        self.do = torch.randn(self.v.shape, device="cuda", generator=generator).bfloat16()
        self.dht = None
        if case.initial_state:
            self.dht = torch.randn(self.initial_state.shape, device="cuda", generator=generator)
        self.N = len(case.lengths)
        B, self.T = self.k.shape[:2]
        self.slots = slot_count(B, self.T, self.N, C, case.packed)
        self.Ab = self.nan(self.slots, C, C, dtype=torch.bfloat16)
        self.launch["chunk_inverse"](self.k, self.beta, self.cu_seqlens, self.Ab, 0)

    def nan(self, places: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full((places, self.case.HV, *shape), math.nan, dtype=dtype, device="cuda")

    def outputs(self) -> Scanned:
        V = self.case.V
        return Scanned(
            states=self.nan(self.slots, V, K, dtype=torch.bfloat16),
            v_new=self.nan(self.slots, C, V, dtype=torch.bfloat16),
            state_gradients=self.nan(self.slots, V, K, dtype=torch.bfloat16),
            dv=torch.full_like(self.v, math.nan),
            dh0=None if self.initial_state is None else torch.full_like(self.initial_state, math.nan),
        )

    def whole(self) -> Scanned:
        out = self.outputs()
        self.scan_states("state_scan", self.initial_state, out, self.N, 0)
        self.scan_gradients("gradient_scan", self.dht, out.state_gradients, out.dv, out.dh0, self.N, 0)
        return out

    def split(self, L: int) -> Scanned:
        case, out, launch = self.case, self.outputs(), self.launch
        HV, V, places = case.HV, case.V, place_count(self.slots, self.N, L)
        gates = (self.g, None, None)
        warm_chunks, warm_backwards = (torch.full((places, HV), 99, dtype=torch.int32, device="cuda") for _ in range(2))
        before = torch.full((self.N + 1,), -1, dtype=torch.int32, device="cuda")
        launch["segment_plan"](*gates, self.cu_seqlens, warm_chunks, before, L)
        launch["segment_plan_backwards"](*gates, self.cu_seqlens, warm_backwards, None, L)
        transfers = self.nan(places, V + K, K)
        items = places * HV * (V // ROWS + 1)
        launch["segment_scan"](self.k, self.v, self.Ab, *gates, self.cu_seqlens, before, warm_chunks, transfers, L, items)
        states, own, gradients = (self.nan(places, V, K) for _ in range(3))
        launch["segment_states"](transfers, warm_chunks, self.cu_seqlens, self.initial_state, states, L, self.T, self.N)
        self.scan_states("split_state_scan", states, out, places, L, before)
        self.scan_gradients("transfers", self.dht, None, None, own, places, L, before, warm_backwards)
        launch["segment_state_gradients"](
            transfers, warm_chunks, self.cu_seqlens, self.dht, own, gradients, L, self.T, self.N
        )
        self.scan_gradients("split_gradient_scan", gradients, out.state_gradients, out.dv, out.dh0, places, L, before)
        return out

    def scan_states(
        self, kernel: str, initial: torch.Tensor | None, out: Scanned, places: int, L: int, before: torch.Tensor | None = None
    ) -> None:
        listed = torch.empty(self.slots, COLUMNS, dtype=torch.int32, device="cuda")
        counts = torch.zeros(1, dtype=torch.int32, device="cuda")
        midway = torch.empty(0, self.case.HV, self.case.V, K, device="cuda")
        self.launch[kernel](
            self.k, self.v, self.Ab, self.g, None, None, self.cu_seqlens, before, initial, midway, out.states, out.v_new,
            listed, counts, L, *ALL_CHUNKS, self.blocks(places),
        )  # fmt: skip

    def scan_gradients(
        self,
        kernel: str,
        behind: torch.Tensor | None,
        state_gradients: torch.Tensor | None,
        dv: torch.Tensor | None,
        in_front: torch.Tensor | None,
        places: int,
        L: int,
        before: torch.Tensor | None = None,
        warm_chunks: torch.Tensor | None = None,
    ) -> None:
        carried = None if state_gradients is None else torch.empty(0, self.case.HV, self.case.V, K, device="cuda")
        self.launch[kernel](
            self.q, self.k, self.do, self.Ab, self.g, None, None, self.cu_seqlens, before, behind, state_gradients, dv,
            in_front, warm_chunks, carried, SCALE, math.log2(SCALE), L, *ALL_CHUNKS, self.blocks(places),
        )  # fmt: skip

    def blocks(self, places: int) -> int:
        return min(places * self.case.HV * (self.case.V // ROWS), torch.cuda.get_device_properties(0).multi_processor_count)


@pytest.mark.parametrize("L", SEGMENTS, ids=lambda L: f"L{L}" if L else "whole")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_segments_give_what_whole_sequences_give(case: Case, L: int | None) -> None:
    scans = Scans(case)
    expected, actual = scans.whole(), scans.split(L or scans.slots)
    for name, exact in vars(expected).items():
        found = getattr(actual, name)
        if exact is None:
            continue
        assert torch.equal(found.isnan(), exact.isnan()), f"{name}: other slots are written"
        head_axis = 2 if name == "dv" else 1
        for head, (a, b) in enumerate(zip(found.unbind(head_axis), exact.unbind(head_axis), strict=True)):
            assert relative_l2(a.nan_to_num(), b.nan_to_num()) <= BOUND, f"{name} of head {head}"
    assert not actual.dv.isnan().any()
    assert not actual.dv[:, sum(case.lengths) if case.packed else case.lengths[0] :].any()


def test_segments_give_the_same_bits_each_time() -> None:
    scans = Scans(PACKED)
    first = scans.split(2)
    for _ in range(5):
        for name, value in vars(scans.split(2)).items():
            assert torch.equal(value.view(torch.uint8), getattr(first, name).view(torch.uint8)), name
