"""What the kernels of the backward compute, as plain loops in float64: they stand in for the compiled ones."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F

from qla_jit.device import GpuInfo
from qla_jit.kernel_templates.arch import SM90A
from qla_jit.ops.inputs import CallInputs
from qla_jit.reference import RESET_GATE, beta_from_logits, gate, l2norm

H200 = GpuInfo("NVIDIA H200", SM90A, 132, 60 * 2**20)
TILE = 128                               # rows and columns of a state between segments
BETA_FLOOR = -40                         # float64 has room for a floor below what the bounds see

# Of each strategy, in launch order: the scans, what comes behind them, and all.
SCANS = {
    "chunked": ("gate_cumsum", "triangular_solve", "state_scan", "state_gradient_scan"),
    "registers": ("gate_cumsum", "chunk_inverse", "register_state_scan", "register_gradient_scan"),
    "registers_split": (
        "gate_cumsum", "segment_plan", "chunk_inverse", "segment_scan", "segment_states",
        "segment_plan_backwards", "segment_gradient_scan", "register_state_scan", "segment_state_gradients",
        "register_gradient_scan",
    ),
}  # fmt: skip
GRADIENTS = {                            # where V = 128
    "chunked": "chunk_gradients", "registers": "warpgroup_gradients", "registers_split": "warpgroup_gradients"
}  # fmt: skip
STEPS = {strategy: ("l2norm", *scans, GRADIENTS[strategy], "l2norm_backward") for strategy, scans in SCANS.items()}
OF_SEGMENTS = ("segment_plan", "segment_scan", "segment_states")


def first_slots(inputs: CallInputs) -> list[int]:
    """For each sequence the slot of its first chunk."""
    C = inputs.facts.chunk_size
    if not inputs.facts.varlen:
        return [n * -(-inputs.T // C) for n in range(inputs.B)]
    return [start // C + n for n, start in enumerate(inputs.cu_seqlens[:-1].tolist())]


def chunks_of(inputs: CallInputs) -> list[list[tuple[int, int, slice]]]:
    """For each sequence its chunks: (slot, row, tokens)."""
    C = inputs.facts.chunk_size
    if inputs.facts.varlen:
        bounds = [(0, start, end) for start, end in pairwise(inputs.cu_seqlens.tolist())]
    else:
        bounds = [(row, 0, inputs.T) for row in range(inputs.B)]
    return [
        [(first_slot + j, row, slice(at, min(at + C, end))) for j, at in enumerate(range(start, end, C))]
        for first_slot, (row, start, end) in zip(first_slots(inputs), bounds, strict=True)
    ]


class Segment(NamedTuple):
    sequence: int
    place: int
    is_first: bool
    is_last: bool
    chunks: list[tuple[int, int, slice]]

    def bounds(self, bands: int, band: int) -> tuple[int, int]:
        """Of the chunks of a band."""
        n = len(self.chunks)
        return n * (bands - 1 - band) // bands, n * (bands - band) // bands

    def rows(self, bands: int, band: int) -> dict[int, int]:
        """Those of the chunks of a band in its workspaces, by slot."""
        low, high = self.bounds(bands, band)
        slots = [slot for slot, _, _ in self.chunks]
        return {slots[j]: slots[j] if bands == 1 else slots[0] // bands + self.place + j - low for j in range(low, high)}


class Kernels:
    """Each kernel of the backward as a plain loop over its chunks and value heads; docs/maths.md has the formulas."""

    def __init__(self, inputs: CallInputs, strategy: str) -> None:
        facts = self.facts = inputs.facts
        self.registers = strategy != "chunked"
        self.sequences, self.first_slots = chunks_of(inputs), first_slots(inputs)
        self.heads = [(h, h // (facts.HV // facts.H)) for h in range(facts.HV)]

    def chunks(self) -> Iterator[tuple[int, int, slice, int, int]]:
        for chunks in self.sequences:
            for slot, row, tokens in chunks:
                for h, key_head in self.heads:
                    yield slot, row, tokens, h, key_head

    def segments(self, L: int) -> Iterator[Segment]:
        """All of them, and sequences as such for L = 0."""
        for n, (first_slot, chunks) in enumerate(zip(self.first_slots, self.sequences, strict=True)):
            last = max(-(-len(chunks) // L), 1) - 1 if L else 0
            for s in range(last + 1):
                place = first_slot // L + n + s if L else n
                yield Segment(n, place, s == 0, s == last, chunks[s * L : (s + 1) * L] if L else chunks)

    def l2norm(self, q, k, eps, q_unit, k_unit):
        q_unit.copy_(l2norm(q, eps))
        k_unit.copy_(l2norm(k, eps))

    def gate_cumsum(self, g, beta, A_log, dt_bias, cu_seqlens, g_sum, beta_chunks, counts=None):
        if counts is not None:
            counts.zero_()
        if self.facts.use_gate_in_kernel:
            g = gate(g.float(), A_log, dt_bias)
        strengths = self.strengths(beta)
        beta_chunks.zero_()
        self.g = g
        for slot, row, tokens, h, _ in self.chunks():
            sums = g[row, tokens, h].float().clamp(min=RESET_GATE).cumsum(0)
            g_sum[slot, h] = sums[-1]
            g_sum[slot, h, : len(sums)] = sums
            beta_chunks[slot, h, : len(sums)] = strengths[row, tokens, h]

    def strengths(self, beta):
        beta = beta.float()
        if self.facts.use_beta_sigmoid_in_kernel:
            beta = beta_from_logits(beta, allow_neg_eigval=self.facts.allow_neg_eigval)
        return torch.where(beta.abs() < 2.0**BETA_FLOOR, torch.where(beta < 0, -1.0, 1.0) * 2.0**BETA_FLOOR, beta)

    def triangular_solve(self, k, g_sum, beta_chunks, cu_seqlens, A):
        A.zero_()
        for slot, row, tokens, h, key_head in self.chunks():
            n, K = length(tokens), k[row, tokens, key_head]
            beta = beta_chunks[slot, h, :n].double()
            L = (beta[:, None] * self.Gamma(g_sum, slot, tokens, h) * (K @ K.T)).tril(-1)
            A[slot, h, :n, :n] = torch.linalg.inv(torch.eye(n).double() + L) * beta

    def chunk_inverse(self, k, beta, cu_seqlens, Ab, early=0):
        strengths = self.strengths(beta).double()
        Ab.zero_()
        for slot, row, tokens, h, key_head in self.chunks():
            n, K, strength = length(tokens), k[row, tokens, key_head], strengths[row, tokens, h]
            L = (strength[:, None] * (K @ K.T)).tril(-1)
            Ab[slot, h, :n, :n] = torch.linalg.inv(torch.eye(n).double() + L) * strength

    def segment_plan(self, g, A_log, dt_bias, cu_seqlens, warm_chunks, segments_before, chunks_per_segment):
        warm_chunks.fill_(-1)            # "nothing is forgotten" is always right, and exact

    def segment_plan_backwards(self, g, A_log, dt_bias, cu_seqlens, warm_chunks, segments_before, chunks_per_segment):
        assert segments_before is None
        warm_chunks.fill_(-2)            # another one, to be told from the first

    def segment_scan(
        self, k, v, Ab, g, A_log, dt_bias, cu_seqlens, segments_before, warm_chunks, transfers, chunks_per_segment, items
    ):
        assert items == len(transfers) * self.facts.HV * 2
        g_sum, A = self.gated(Ab, g, A_log, dt_bias)
        K, V = k.shape[-1], v.shape[-1]
        no_values = torch.zeros(*v.shape[:3], K).double()
        for segment in self.segments(chunks_per_segment):
            for h, key_head in self.heads:
                if not segment.is_last:
                    added, kept = torch.zeros(K, V).double(), torch.eye(K).double()
                    added = self.state_behind(added, segment.chunks, h, key_head, k, v, A, g_sum)
                    kept = self.state_behind(kept, segment.chunks, h, key_head, k, no_values, A, g_sum)
                    transfers[segment.place, h] = torch.cat([self.in_tiles(added.T), self.in_tiles(kept.T)])

    def segment_states(self, transfers, warm_chunks, cu_seqlens, initial_state, states, chunks_per_segment, tokens, sequences):
        assert (warm_chunks == -1).all()
        for segment in self.segments(chunks_per_segment):
            for h, _ in self.heads:
                if segment.is_first:
                    states[segment.place, h] = 0
                    if initial_state is not None:
                        states[segment.place, h] = self.in_tiles(self.k_first(initial_state[segment.sequence, h]).T)
                if not segment.is_last:
                    added, kept = transfers[segment.place, h].split(TILE)
                    states[segment.place + 1, h] = states[segment.place, h] @ kept + added

    def register_state_scan(
        self, k, v, Ab, g, A_log, dt_bias, cu_seqlens, segments_before, initial_state, midway, states, v_new, listed, counts,
        chunks_per_segment, bands, band, early, blocks,
    ):  # fmt: skip
        assert blocks == self.blocks(chunks_per_segment, initial_state)
        assert len(midway) == 0 or (bands, band) == (2, 0)
        assert early == (band == 0 < chunks_per_segment)
        assert counts.shape == (bands,)
        assert counts[band] == 0
        for segment in self.segments(chunks_per_segment):
            rows = segment.rows(bands, band)
            for slot, row, tokens in segment.chunks:
                if slot in rows:
                    listed[counts[band]] = torch.tensor([rows[slot], slot, row, tokens.start, length(tokens)])
                    counts[band] += 1
        g_sum, A = self.gated(Ab, g, A_log, dt_bias)
        self.state_scan(
            k, v, A, g_sum, cu_seqlens, initial_state, states.mT, v_new, None, L=chunks_per_segment, bands=bands, band=band,
            midway=midway if len(midway) else None,
        )  # fmt: skip

    def segment_gradient_scan(
        self, q, k, do, Ab, g, A_log, dt_bias, cu_seqlens, segments_before, final_state_gradient, state_gradients, dv,
        own_gradients, warm_chunks, carried, scale, log2_scale, chunks_per_segment, bands, band, early, blocks,
    ):  # fmt: skip
        assert blocks == len(own_gradients) * self.facts.HV
        assert (warm_chunks == -2).all()
        assert state_gradients is dv is carried is None
        assert (bands, band, early) == (1, 0, 0)
        g_sum, A = self.gated(Ab, g, A_log, dt_bias)
        for segment in self.segments(chunks_per_segment):
            for h, key_head in self.heads:
                if not segment.is_first:
                    dS = torch.zeros(self.facts.K, self.facts.V).double()
                    if segment.is_last and final_state_gradient is not None:
                        dS = self.k_first(final_state_gradient[segment.sequence, h])
                    dS = self.gradient_in_front(dS, segment.chunks, h, key_head, q, k, do, A, g_sum, scale)
                    own_gradients[segment.place, h] = self.in_tiles(dS.T)

    def segment_state_gradients(
        self, transfers, warm_chunks, cu_seqlens, final_state_gradient, own_gradients, gradients, chunks_per_segment, tokens,
        sequences,
    ):  # fmt: skip
        assert (warm_chunks == -1).all()
        for segment in reversed(list(self.segments(chunks_per_segment))):
            for h, _ in self.heads:
                if segment.is_last:
                    gradients[segment.place, h] = 0
                    if final_state_gradient is not None:
                        gradients[segment.place, h] = self.in_tiles(self.k_first(final_state_gradient[segment.sequence, h]).T)
                if not segment.is_first:
                    own = own_gradients[segment.place, h]
                    kept = 0 if segment.is_last else gradients[segment.place, h] @ transfers[segment.place, h, TILE:].T
                    gradients[segment.place - 1, h] = own + kept

    def register_gradient_scan(
        self, q, k, do, Ab, g, A_log, dt_bias, cu_seqlens, segments_before, final_state_gradient, state_gradients, dv,
        initial_state_gradient,
        warm_chunks, carried, scale, log2_scale, chunks_per_segment, bands, band, early, blocks,
    ):  # fmt: skip
        assert warm_chunks is None
        assert early == (band > 0 or chunks_per_segment == 0)
        assert blocks == self.blocks(chunks_per_segment, final_state_gradient)
        assert 2**log2_scale == pytest.approx(scale)
        g_sum, A = self.gated(Ab, g, A_log, dt_bias)
        self.state_gradient_scan(
            q, k, do, A, g_sum, cu_seqlens, final_state_gradient, state_gradients.mT, dv, initial_state_gradient, scale,
            L=chunks_per_segment, bands=bands, band=band, carried=carried,
        )  # fmt: skip

    def blocks(self, L, by_place):
        return min((len(by_place) if L else len(self.sequences)) * self.facts.HV, H200.sm_count)

    def gated(self, Ab, g, A_log, dt_bias):
        """Sums of gates, and A = Gamma o Ab."""
        g_sum, A = torch.zeros(Ab.shape[:3]), torch.zeros_like(Ab)
        self.gate_cumsum(g, torch.zeros_like(g), A_log, dt_bias, None, g_sum, torch.zeros_like(g_sum))
        for slot, _, tokens, h, _ in self.chunks():
            n = length(tokens)
            A[slot, h, :n, :n] = self.Gamma(g_sum, slot, tokens, h) * Ab[slot, h, :n, :n]
        return g_sum, A

    def state_scan(
        self, k, v, A, g_sum, cu_seqlens, initial_state, states, v_new, final_state, L=0, bands=1, band=0, midway=None
    ):
        assert final_state is None
        v_new.zero_()
        for segment in self.segments(L):
            for h, key_head in self.heads:
                S = torch.zeros(states.shape[2:]).double()
                if initial_state is not None:
                    S = self.of_place(initial_state[segment.place, h]) if L else self.k_first(initial_state[segment.place, h])
                low, high = segment.bounds(bands, band)
                begin, rows = 0, segment.rows(bands, band)
                if midway is not None and low > 0:
                    begin, S = low, midway[segment.place, h].T.double()
                self.state_behind(S, segment.chunks[begin:high], h, key_head, k, v, A, g_sum, rows, states, v_new)

    def state_behind(self, S, chunks, h, key_head, k, v, A, g_sum, rows=None, states=None, v_new=None):
        rows = rows or {}
        for slot, row, tokens in chunks:
            K, V, n = k[row, tokens, key_head], v[row, tokens, h], length(tokens)
            gamma, to_end = decays(g_sum, slot, tokens, h)
            new = A[slot, h, :n, :n] @ (V - gamma * (K @ S))
            if slot in rows:
                states[rows[slot], h], v_new[rows[slot], h, :n] = S, new
            S = gamma[-1] * S + K.T @ (to_end * new)
        return S

    def state_gradient_scan(
        self, q, k, do, A, g_sum, cu_seqlens, final_state_gradient, state_gradients, dv, initial_state_gradient, scale, L=0,
        bands=1, band=0, carried=None,
    ):  # fmt: skip
        if band == 0:
            dv.zero_()
        for segment in self.segments(L):
            for h, key_head in self.heads:
                dS = torch.zeros(state_gradients.shape[2:]).double()
                if band > 0:
                    dS = carried[segment.place, h].T.double()
                elif final_state_gradient is not None:
                    dS = final_state_gradient[segment.place, h]
                    dS = self.of_place(dS) if L else self.k_first(dS)
                chunks, rows = segment.chunks[slice(*segment.bounds(bands, band))], segment.rows(bands, band)
                dS = self.gradient_in_front(dS, chunks, h, key_head, q, k, do, A, g_sum, scale, rows, state_gradients, dv)
                if band < bands - 1:
                    carried[segment.place, h] = dS.T
                elif initial_state_gradient is not None and segment.is_first:
                    initial_state_gradient[segment.sequence, h] = dS.T if self.facts.state_v_first else dS

    def gradient_in_front(self, dS, chunks, h, key_head, q, k, do, A, g_sum, scale, rows=None, state_gradients=None, dv=None):
        for slot, row, tokens in reversed(chunks):
            Q, K, dO, n = q[row, tokens, key_head], k[row, tokens, key_head], do[row, tokens, h], length(tokens)
            gamma, to_end = decays(g_sum, slot, tokens, h)
            P = scale * self.Gamma(g_sum, slot, tokens, h) * (Q @ K.T)
            dW = A[slot, h, :n, :n].T @ (to_end * (K @ dS) + P.T @ dO)
            if dv is not None:
                state_gradients[rows[slot], h], dv[row, tokens, h] = dS, dW
            dS = gamma[-1] * dS - K.T @ (gamma * dW) + scale * Q.T @ (gamma * dO)
        return dS

    def chunk_gradients(
        self, q, k, v_new, dv, do, states, state_gradients, g_sum, beta_chunks, cu_seqlens, dq, dk, dg, dbeta, scale
    ):
        for gradient in (dq, dk, dg, dbeta):
            gradient.zero_()
        listed = [(slot, slot, row, tokens) for chunks in self.sequences for slot, row, tokens in chunks]
        self.gradients_of(listed, q, k, v_new, dv, do, states, state_gradients, g_sum, beta_chunks, dq, dk, dg, dbeta, scale)

    def gradients_of(
        self, chunks, q, k, v_new, dv, do, states, state_gradients, g_sum, beta_chunks, dq, dk, dg, dbeta, scale
    ):
        """chunks: row in the workspaces, slot, batch row and tokens of each."""
        if self.registers:
            states, state_gradients = states.mT, state_gradients.mT
        for (at, slot, row, tokens), (h, key_head) in itertools.product(chunks, self.heads):
            n = length(tokens)
            Q, K = q[row, tokens, key_head], k[row, tokens, key_head]
            V_new, dW, dO = v_new[at, h, :n], dv[row, tokens, h], do[row, tokens, h]
            S, dS = states[at, h], state_gradients[at, h]
            gamma, to_end = decays(g_sum, slot, tokens, h)
            Gamma = self.Gamma(g_sum, slot, tokens, h)

            dP = Gamma * (scale * dO @ V_new.T)
            dM = Gamma * -(dW @ V_new.T).tril(-1)
            dQ_state, dK_write, dK_read = scale * gamma * (dO @ S.T), to_end * (V_new @ dS.T), -gamma * (dW @ S.T)
            dq[row, tokens, key_head] += dQ_state + dP @ K
            dk[row, tokens, key_head] += dK_write + dK_read + dP.T @ Q + (dM + dM.T) @ K
            dbeta[row, tokens, h] = (dW * V_new).sum(1) / beta_chunks[slot, h, :n].double() ** 2

            Z = dP * (Q @ K.T) + dM * (K @ K.T)
            dg_sum = (Q * dQ_state + K * dK_read - K * dK_write).sum(1) + Z.sum(1) - Z.sum(0)
            dg_sum[-1] += (K * dK_write).sum() + gamma[-1, 0] * (dS * S).sum()
            dg[row, tokens, h] = dg_sum.flip(0).cumsum(0).flip(0).float()

    def warpgroup_gradients(self, *arguments):
        *sources, cu_seqlens, listed, counts, dq, dk, dg, dbeta, scale, band, blocks = arguments
        assert blocks == min(len(listed) * self.facts.H, H200.sm_count)
        chunks = [
            (at, slot, row, slice(start, start + valid)) for at, slot, row, start, valid in listed[: counts[band]].tolist()
        ]
        for gradient in (dq, dk, dg, dbeta):
            for _, _, row, tokens in chunks:
                gradient[row, tokens] = 0
            if self.facts.varlen:
                gradient[:, cu_seqlens[-1] :] = 0
        self.gradients_of(chunks, *sources, dq, dk, dg, dbeta, scale)
        if not self.facts.use_gate_in_kernel:
            dg[self.g < RESET_GATE] = 0

    def l2norm_backward(self, q, k, eps, dq_unit, dk_unit, dq, dk):
        for x, dx_unit, dx in ((q, dq_unit, dq), (k, dk_unit, dk)):
            inverse = torch.rsqrt((x * x).sum(1, keepdim=True) + eps)
            dx.copy_(inverse * (dx_unit - x * inverse**2 * (x * dx_unit).sum(1, keepdim=True)))

    def Gamma(self, g_sum, slot, tokens, h):
        g = g_sum[slot, h, : length(tokens)].double()
        return (g[:, None] - g).tril().exp().tril()

    def k_first(self, state):
        return (state.T if self.facts.state_v_first else state).double()

    def in_tiles(self, state):
        """A transposed state as segments have it: filled up to whole tiles."""
        rows, columns = state.shape
        return F.pad(state, (0, -columns % TILE, 0, -rows % TILE))

    def of_place(self, state):
        return state[: self.facts.V, : self.facts.K].T.double()


def listed_chunks(starts: Sequence[int], C: int) -> list[tuple[int, int, int, int, int]]:
    """Row, slot, batch row, first token and tokens of the chunks of packed sequences, which go in one band."""
    found = []
    for n, (start, end) in enumerate(pairwise(starts)):
        for j, first in enumerate(range(start, end, C)):
            slot = start // C + n + j
            found.append((slot, slot, 0, first, min(end - first, C)))
    return found


def length(tokens: slice) -> int:
    return tokens.stop - tokens.start


def decays(g_sum, slot, tokens, h):
    """gamma and gamma_L / gamma, [n, 1]."""
    g = g_sum[slot, h, : length(tokens)].double()[:, None]
    return g.exp(), (g[-1] - g).exp()


def cotangents(inputs: CallInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of o and of the final state, float64."""
    generator = torch.Generator().manual_seed(1)
    do = torch.randn(inputs.v.shape, dtype=torch.float64, generator=generator)
    facts = inputs.facts
    dims = (facts.V, facts.K) if facts.state_v_first else (facts.K, facts.V)
    return do, torch.randn(inputs.N, facts.HV, *dims, dtype=torch.float64, generator=generator)
