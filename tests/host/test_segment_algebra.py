"""Gradients from segment to segment in float64, in the layouts of the kernels, against autograd through whole sequences.

What segment_plan in both directions, segment_scan, register_gradient_scan and segment_state_gradients compute, transcribed. What
a kernel does not write holds NaN.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate

import pytest
import torch
import torch.nn.functional as F

from qla_jit.kernel_templates.macros.segments import place_count
from qla_jit.kernel_templates.macros.sequences import slot_count
from qla_jit.kernel_templates.segment_plan import THRESHOLD

C, K, V = 8, 4, 6
DECAYS = (0.0, -0.2, -2.0)               # of the heads, per token: never forgets, forgets within long segments, within a chunk
HV = len(DECAYS)
SCALE = 0.5
LENGTHS = (0, 1, 7, 8, 9, 64, 0, 133, 200)


@dataclass(frozen=True)
class Chunk:
    """Tokens of one chunk, heads first; the maths of docs/maths.md."""

    q: torch.Tensor                      # [HV, c, K]
    k: torch.Tensor
    v: torch.Tensor                      # [HV, c, V]
    g: torch.Tensor                      # [HV, c]
    beta: torch.Tensor
    do: torch.Tensor                     # [HV, c, V]

    @property
    def factors(self) -> tuple[torch.Tensor, ...]:
        """gamma, gamma_L / gamma and gamma_L as columns, Ag, and P = scale Gamma o lower(Q K^T)."""
        g_sum = self.g.cumsum(-1)
        Gamma = (g_sum[..., :, None] - g_sum[..., None, :]).tril().exp().tril()
        identity = torch.eye(g_sum.shape[-1], dtype=torch.float64)
        keys = self.k @ self.k.mT
        Ab = torch.linalg.solve(identity + (self.beta[..., None] * keys).tril(-1), torch.diag_embed(self.beta))
        gamma, to_end = g_sum.exp(), (g_sum[..., -1:] - g_sum).exp()
        return gamma[..., None], to_end[..., None], gamma[..., -1:, None], Gamma * Ab, SCALE * Gamma * (self.q @ self.k.mT)

    def forward(self, S: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The state behind the chunk and its outputs, for the state [HV, K, columns] in front of it."""
        gamma, to_end, gamma_L, Ag, P = self.factors
        v_new = Ag @ (v - gamma * (self.k @ S))
        return gamma_L * S + self.k.mT @ (to_end * v_new), SCALE * gamma * (self.q @ S) + P @ v_new

    def backward(self, dS: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The gradient of the state in front of the chunk and that of v, for the gradient of the state behind it."""
        gamma, to_end, gamma_L, Ag, P = self.factors
        dw = Ag.mT @ (to_end * (self.k @ dS) + P.mT @ self.do)
        return gamma_L * dS - self.k.mT @ (gamma * dw) + SCALE * self.q.mT @ (gamma * self.do), dw


@dataclass(frozen=True)
class Batch:
    chunks: list[list[Chunk]]            # of each sequence
    h0: torch.Tensor                     # [N, HV, K, V]
    dht: torch.Tensor


def batch() -> Batch:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    chunks = []
    for length in LENGTHS:
        sizes = [min(C, length - at) for at in range(0, length, C)]
        chunks.append([
            Chunk(
                q=draw(HV, c, K), k=F.normalize(draw(HV, c, K), dim=-1), v=draw(HV, c, V).requires_grad_(),
                g=torch.tensor(DECAYS, dtype=torch.float64)[:, None] * draw(HV, c).abs().clamp(0.5, 1.5),
                beta=0.1 * draw(HV, c).sigmoid(), do=draw(HV, c, V),          # small: decays alone forget
            )
            for c in sizes
        ])  # fmt: skip
    return Batch(chunks, draw(len(LENGTHS), HV, K, V).requires_grad_(), draw(len(LENGTHS), HV, K, V))


@dataclass(frozen=True)
class Found:
    """By sequence and chunk."""

    states: list[list[torch.Tensor]]     # gradients of the state behind each chunk
    dv: list[list[torch.Tensor]]
    dh0: list[torch.Tensor]


def by_autograd(batch: Batch) -> Found:
    found = Found([], [], [])
    for n, chunks in enumerate(batch.chunks):
        S, behind, loss = batch.h0[n], [], torch.zeros((), dtype=torch.float64)
        for chunk in chunks:
            S, o = chunk.forward(S, chunk.v)
            behind.append(S)
            loss = loss + (o * chunk.do).sum()
        loss = loss + (S * batch.dht[n]).sum()
        wanted = [*behind, *(chunk.v for chunk in chunks), batch.h0]
        gradients = torch.autograd.grad(loss, wanted)
        found.states.append(list(gradients[: len(chunks)]))
        found.dv.append(list(gradients[len(chunks) : -1]))
        found.dh0.append(gradients[-1][n])
    return found


@torch.no_grad()
def by_segments(batch: Batch, L: int) -> Found:
    starts = [0, *accumulate(LENGTHS)]
    N = len(LENGTHS)
    places = place_count(slot_count(1, starts[-1], N, C, packed=True), N, L)
    first_place = [(start // C + n) // L + n for n, start in enumerate(starts[:-1])]
    last = [max(-(-len(chunks) // L), 1) - 1 for chunks in batch.chunks]

    def nan(*shape: int) -> torch.Tensor:
        return torch.full((places, HV, *shape), math.nan, dtype=torch.float64)

    def segment(n: int, s: int) -> list[Chunk]:
        return batch.chunks[n][s * L : (s + 1) * L]

    # segment_plan and segment_scan: the forward direction, of all segments but the last.
    warm_chunks = torch.full((places, HV), -1)
    transfers = nan(V + K, K)
    for n in range(N):
        for s in range(last[n]):
            place, chunks = first_place[n] + s, segment(n, s)
            added, kept = torch.zeros(HV, K, V, dtype=torch.float64), torch.eye(K, dtype=torch.float64).expand(HV, K, K)
            for chunk in chunks:
                added = chunk.forward(added, chunk.v)[0]
                kept = chunk.forward(kept, torch.zeros_like(chunk.k))[0]
            forgets = sum(chunk.g.sum(-1) for chunk in chunks) < THRESHOLD
            warm_chunks[place] = torch.where(forgets, L, -1)
            transfers[place, :, :V] = added.mT
            transfers[place, ~forgets, V:] = kept[~forgets].mT

    # segment_plan backwards, and register_gradient_scan with transfers_only: all segments but the first, the last from the
    # gradient of the final state. Heads that forget begin with zero behind their warm chunks.
    own_gradients = nan(V, K)
    for n in range(N):
        for s in range(1, last[n] + 1):
            chunks = segment(n, s)
            warm = warm_chunks_at_start(chunks)
            dS = batch.dht[n] if s == last[n] else torch.zeros(HV, K, V, dtype=torch.float64)
            dS = torch.where((warm <= len(chunks))[:, None, None], 0.0, dS)
            for j, chunk in reversed(list(enumerate(chunks))):
                needed = (j < warm)[:, None, None]
                dS = torch.where(needed, chunk.backward(dS)[0], dS)
            own_gradients[first_place[n] + s] = dS.mT

    # segment_state_gradients: from the last segment to the first.
    gradients = nan(V, K)
    for n in range(N):
        gradient = batch.dht[n].mT
        gradients[first_place[n] + last[n]] = gradient
        for s in range(last[n], 0, -1):
            place = first_place[n] + s
            wanted = (warm_chunks[place] < 0)[:, None, None] & torch.tensor(s < last[n])
            through = gradient @ transfers[place, :, V:].mT
            gradient = own_gradients[place] + torch.where(wanted, through, 0.0)
            gradients[place - 1] = gradient

    # register_gradient_scan with split: every segment from the gradient behind it.
    found = Found([[] for _ in range(N)], [[] for _ in range(N)], [])
    for n in range(N):
        for s in range(last[n], -1, -1):
            dS = gradients[first_place[n] + s].mT
            for chunk in reversed(segment(n, s)):
                found.states[n].insert(0, dS)
                dS, dv = chunk.backward(dS)
                found.dv[n].insert(0, dv)
            if s == 0:
                found.dh0.append(dS)
    return found


def warm_chunks_at_start(chunks: list[Chunk]) -> torch.Tensor:
    """Of a segment, [HV]; more than it has for a head that does not forget. A ragged chunk is taken not to decay."""
    warm = torch.full((HV,), len(chunks) + 1)
    total = torch.zeros(HV, dtype=torch.float64)
    for j, chunk in enumerate(chunks):
        total = total + (chunk.g.sum(-1) if chunk.g.shape[-1] == C else 0.0)
        warm = torch.where(total < THRESHOLD, warm.clamp(max=j + 1), warm)
    return warm


# L: one chunk; segments that the second head forgets, and too short ones; whole sequences.
@pytest.mark.parametrize("L", [1, 3, 10, 16, 25], ids=lambda L: f"L{L}")
def test_gradients_of_segments_are_those_of_whole_sequences(L: int) -> None:
    inputs = batch()
    expected, actual = by_autograd(inputs), by_segments(inputs, L)
    for name in ("states", "dv"):
        for exact, found in zip(getattr(expected, name), getattr(actual, name), strict=True):
            for a, b in zip(exact, found, strict=True):
                assert_close(b, a)
    for a, b in zip(expected.dh0, actual.dh0, strict=True):
        assert_close(b, a)


def test_few_chunks_at_the_start_suffice_where_a_head_forgets() -> None:
    chunks = batch().chunks[-1]
    never, slowly, at_once = warm_chunks_at_start(chunks).tolist()
    assert never > len(chunks)
    assert 1 < slowly < len(chunks)
    assert at_once == 1
    assert (warm_chunks_at_start(batch().chunks[2]) > 1).all()           # ragged


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Head by head. One that forgets neglects what is at most exp(THRESHOLD) of the gradient behind a segment."""
    for head, decay in enumerate(DECAYS):
        bound = 1e-12 if decay == 0 else 10 * math.exp(THRESHOLD)
        assert (actual[head] - expected[head]).norm() <= bound * (1 + expected[head].norm()), f"decay {decay}"
