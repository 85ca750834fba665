"""Do the warp-specialised kernels compute what they should? Their roles run on the CPU, beside the formulas in float64."""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import emulation
import protocol
import pytest
import torch
from backward_kernels import TILE, Kernels
from cases import GATES, Case, arguments, oracle, relative_l2
from emulated_helpers import HELPERS, LANE_HELPERS
from emulated_memory import Pointer

from qla_jit.kernel_templates.arch import SM90A
from qla_jit.kernel_templates.macros.bands import row_count
from qla_jit.kernel_templates.macros.chunk_lists import COLUMNS, SLOT
from qla_jit.kernel_templates.macros.segments import place_count
from qla_jit.kernel_templates.macros.sequences import slot_count

H, HV, K, C = 1, 2, 128, 64
SCALE = K**-0.5
BLOCKS = 3                               # fewer than items: each goes on to the next ones
GATE_WARP, LAST_WARP = 1, 3              # of those that load: their lanes go different ways; of the scans the first's alone

# Ragged before a sequence of NaN, which what is loaded with it must not reach; empty, one token, exactly a chunk, and ragged in
# front of the tail, which is NaN too.
LENGTHS, TAIL = (70, 0, 40, 64, 1, 200), 10
NAN_SEQUENCE = 2

# decaying: 2^-24 a chunk, so that the state is rescaled at every second one.
DECAYS = GATES | {"decaying": lambda draw, *shape: -0.1 - 0.2 * draw(*shape).abs()}


@dataclass(frozen=True)
class Run:
    """Of a scan. str(run) is a test id made from the values that are not the default."""

    gates: str = "mixed"
    L: int = 0                           # chunks per segment; 0 for whole sequences
    K: int = K
    V: int = 128
    ends: bool = True                    # there is an initial state, and a gradient of the final one
    v_first: bool = False
    lengths: tuple[int, ...] = LENGTHS
    packed: bool = True
    in_kernel: bool = False              # gates are made from logits
    bands: int = 1                       # that chunks of the backward go in
    midway: bool = False                 # the forward keeps the state that the first of two bands begins with
    rows: int = 128                      # of the state in an item
    config: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        parts = [self.gates]
        for name, value in vars(self).items():
            if value == getattr(Run, name) or name == "gates":
                continue
            elif isinstance(value, bool):
                parts.append(name if value else f"no_{name}")
            elif name == "lengths":
                parts.append("+".join(map(str, value)))
            else:
                parts += [f"{x}{y}" for x, y in (value if name == "config" else [(name, value)])]
        return "-".join(parts)


class Scan:
    """The inputs of one run, and the formulas."""

    def __init__(self, run: Run) -> None:
        self.run, self.K, self.V = run, run.K, run.V
        case = Case(
            H=H, HV=HV, K=run.K, V=run.V, lengths=run.lengths, packed=run.packed, tail=TAIL * run.packed, gates="open",
            initial_state=run.ends, state_v_first=run.v_first, dtype=torch.bfloat16,
        )  # fmt: skip
        self.call = call = arguments(case)
        generator = torch.Generator().manual_seed(1)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        self.A_log = self.dt_bias = None
        if run.in_kernel:
            self.A_log, self.dt_bias = torch.tensor([-math.inf, 0.5]), torch.ones(HV)
            call |= dict(use_gate_in_kernel=True, A_log=self.A_log, dt_bias=self.dt_bias, g=draw(*call["g"].shape) - 3)
        else:
            call["g"] = DECAYS[run.gates](draw, *call["g"].shape)
        self.q, self.k, self.v, self.g, self.beta = (call[name] for name in ("q", "k", "v", "g", "beta"))
        self.do = draw(*self.v.shape).bfloat16()
        self.h0 = call["initial_state"]
        self.dht = draw(*self.h0.shape) if run.ends else None
        self.cu_seqlens = call["cu_seqlens"]
        self.N, (self.B, self.T) = len(case.lengths), self.k.shape[:2]
        self.slots = slot_count(self.B, self.T, self.N, C, run.packed)
        self.places = place_count(self.slots, self.N, run.L) if run.L else self.N
        self.rows = row_count(self.slots, self.places, run.bands)
        if run.packed:
            starts = [0, *accumulate(run.lengths)]
            for x in (self.q, self.k, self.v, self.do, self.g, self.beta):
                x[:, starts[NAN_SEQUENCE] : starts[NAN_SEQUENCE + 1]] = math.nan
                x[:, starts[-1] :] = math.nan
        facts = SimpleNamespace(
            chunk_size=C, varlen=run.packed, H=H, HV=HV, K=run.K, V=run.V, state_v_first=run.v_first,
            use_gate_in_kernel=run.in_kernel, use_beta_sigmoid_in_kernel=False,
        )  # fmt: skip
        self.kernels = Kernels(SimpleNamespace(facts=facts, cu_seqlens=self.cu_seqlens, B=self.B, T=self.T), "registers")
        Ab = torch.zeros(self.slots, HV, C, C, dtype=torch.float64)
        self.kernels.chunk_inverse(self.k.double(), self.beta, self.cu_seqlens, Ab)
        self.Ab = Ab.bfloat16()

    def launch(self, template: str, *arguments: Any, **problem: Any) -> None:
        module = importlib.import_module(f"qla_jit.kernel_templates.{template}")
        known = dict(
            H=H, HV=HV, K=self.K, V=self.V, C=C, dtype="bfloat16", packed=self.run.packed, index_dtype="int32",
            gate_dtype="float32", gate_in_kernel=self.run.in_kernel, has_dt_bias=self.run.in_kernel, rows=self.run.rows,
            state_v_first=self.run.v_first, split=self.run.L > 0,
            initial_state_dtype="float32" if self.run.ends and not self.run.L else None, **problem,
        )  # fmt: skip
        names = {field.name for field in dataclasses.fields(module.Problem)}
        problem = {name: value for name, value in known.items() if name in names}
        config = dataclasses.asdict(module.default_config(module.Problem(**problem), SM90A)) | dict(self.run.config)
        emulation.launch(
            template,
            problem,
            config,
            *arguments,
            sizes=dict(
                B=self.B, tokens=self.T, slots=self.slots, bounds=self.N + 1, places=self.places, rows=self.rows,
                carried_places=self.places, midway_places=self.places * self.run.midway, bands=self.run.bands,
                bands_counted=self.run.bands,
            ),
            by_lane=[GATE_WARP, LAST_WARP] if template == "warpgroup_gradients" else [GATE_WARP],
        )

    def initial_states(self) -> torch.Tensor | None:
        return self.ends_of_segments(self.states[0], self.h0, 0)

    def midway_states(self) -> torch.Tensor:
        """In float64, as the forward has them: of items of one chunk or none there is none."""
        rows = -(-self.V // self.run.rows) * self.run.rows
        found = self.nan(self.places * self.run.midway, HV, rows, TILE, dtype=torch.float64)
        for segment in self.kernels.segments(self.run.L):
            if len(segment.chunks) > 1 and self.run.midway:
                slot, _, _ = segment.chunks[len(segment.chunks) // 2]
                for head in range(HV):
                    found[segment.place, head] = self.kernels.in_tiles(self.states[0][slot, head])[:rows]
        return found

    def final_gradients(self) -> torch.Tensor | None:
        return self.ends_of_segments(self.gradients[0], self.dht, -1)

    @property
    def gates(self) -> tuple[torch.Tensor | None, ...]:
        """With what comes behind them in the arguments of the scans."""
        return self.g, self.A_log, self.dt_bias, self.cu_seqlens, self.segments_before

    @cached_property
    def segments_before(self) -> torch.Tensor | None:
        if not self.run.L:
            return None
        counts = [max(-(-len(chunks) // self.run.L), 1) for chunks in self.kernels.sequences]
        return torch.tensor([0, *accumulate(counts)], dtype=torch.int32)

    def nan(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.full(shape, math.nan, dtype=dtype)

    def nan_states(self) -> torch.Tensor:
        """Of sequences."""
        return self.nan(self.N, HV, *((self.V, self.K) if self.run.v_first else (self.K, self.V)), dtype=torch.float32)

    @cached_property
    def gated(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Sums of gates, and Gamma o Ab, in float64."""
        return self.kernels.gated(self.Ab.double(), self.g, self.A_log, self.dt_bias)

    @cached_property
    def states(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The state in front of each chunk, transposed, and V_new, in float64."""
        states, v_new = self.nan(self.slots, HV, self.V, self.K).double(), self.nan(self.slots, HV, C, self.V).double()
        g_sum, A = self.gated
        self.kernels.state_scan(self.k.double(), self.v.double(), A, g_sum, None, self.h0, states.mT, v_new, None)
        return states, v_new

    @cached_property
    def gradients(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The gradient of the state behind each chunk, transposed, of V, and of the initial state, in float64."""
        states, dv = self.nan(self.slots, HV, self.V, K).double(), self.nan(*self.v.shape).double()
        dh0 = None if self.h0 is None else torch.empty_like(self.h0).double()
        g_sum, A = self.gated
        q, k, do = (x.double() for x in (self.q, self.k, self.do))
        self.kernels.state_gradient_scan(q, k, do, A, g_sum, None, self.dht, states.mT, dv, dh0, SCALE)
        return states, dv, dh0

    def ends_of_segments(self, of_chunks: torch.Tensor, of_sequences: torch.Tensor | None, chunk: int) -> torch.Tensor | None:
        """What a scan begins with: that of sequences, or of segments that of their first or last chunk, in whole tiles."""
        if not self.run.L:
            return of_sequences
        found = self.nan(self.places, HV, -(-self.V // TILE) * TILE, TILE, dtype=torch.float32)
        for segment in self.kernels.segments(self.run.L):
            for head in range(HV):
                if segment.chunks:
                    state = of_chunks[segment.chunks[chunk][0], head]
                elif of_sequences is None:
                    state = torch.zeros(self.V, self.K)
                else:
                    state = self.kernels.k_first(of_sequences[segment.sequence, head]).mT
                found[segment.place, head] = self.kernels.in_tiles(state)
        return found

    def warm_chunks(self, of_second_head: int) -> torch.Tensor:
        """For segments that are gone through; of the others anything may be there."""
        warm_chunks = torch.full((self.places, HV), 99, dtype=torch.int32)
        for segment in self.kernels.segments(self.run.L):
            warm_chunks[segment.place] = torch.tensor([-1, of_second_head])
        return warm_chunks

    @cached_property
    def told(self) -> dict[str, torch.Tensor]:
        """Tokens, slots and sequences for which there is a right answer."""
        tokens, slots, sequences = (torch.zeros(*shape, dtype=torch.bool) for shape in ([self.B, self.T], [self.slots], [self.N]))
        for n, chunks in enumerate(self.kernels.sequences):
            if not (self.run.packed and n == NAN_SEQUENCE):
                sequences[n] = True
                for slot, row, at in chunks:
                    slots[slot] = tokens[row, at] = True
        return dict(tokens=tokens, slots=slots, sequences=sequences)

    def check(self, kind: str, bound: float, actual: torch.Tensor, expected: torch.Tensor) -> None:
        """Head by head."""
        told, head_axis = self.told[kind], 2 if kind == "tokens" else 1
        for head in range(actual.shape[head_axis]):
            a, b = (x.select(head_axis, head)[told] for x in (actual, expected))
            assert relative_l2(a, b) <= bound, f"head {head}"

    def rows_of(self, band: int) -> dict[int, int]:
        """Those of the chunks of a band, by slot."""
        by_segment = [segment.rows(self.run.bands, band) for segment in self.kernels.segments(self.run.L)]
        found = {slot: row for rows in by_segment for slot, row in rows.items()}
        assert len(set(found.values())) == sum(map(len, by_segment)), "two chunks share a row"
        return found

    def to_slots(self, band: int, of_rows: torch.Tensor, of_slots: torch.Tensor) -> None:
        """Put away what a scan wrote for the chunks of a band; other rows are as they were, and all are again then."""
        rows = self.rows_of(band)
        of_slots[list(rows)] = of_rows[list(rows.values())].to(of_slots.dtype)
        of_rows[list(rows.values())] = math.nan
        assert of_rows.isnan().all()

    def check_tail(self, of_tokens: torch.Tensor) -> None:
        """Tokens behind the last sequence are zero."""
        assert not of_tokens[:, self.T - TAIL * self.run.packed :].any()


FEW_STAGES = (("key_stages", 2), ("product_stages", 1))
# Both kinds of state layout, gates, and all that makes a scan another one: each once.
SCANS = [
    Run(),
    Run(gates="open", v_first=True),
    Run(gates="reset"),
    Run(gates="decaying", ends=False),
    Run(V=256, lengths=(65, 65), packed=False, in_kernel=True),
    Run(gates="reset", L=1),
    Run(L=2, config=FEW_STAGES),
]
# Heads that do not fill tiles: half a part of the state's rows, two columns in three, half of both.
NARROW = [Run(K=96, V=192), Run("open", K=64, V=64, L=1, v_first=True)]


# One state warpgroup.
ONE_STATE = [
    Run(rows=64),
    Run("reset", K=64, V=64, v_first=True, rows=64, config=(("product_stages", 1),)),
    Run("decaying", K=96, V=192, packed=False, lengths=(65, 65), rows=64, ends=False, config=(("key_stages", 3),)),
]


# Of these the state in the middle is kept.
MIDWAY = [
    Run(midway=True),
    Run("decaying", midway=True, ends=False),
    Run("reset", L=2, midway=True, v_first=True),
    Run("open", rows=64, midway=True),
]


@pytest.mark.parametrize("run", SCANS + NARROW + ONE_STATE + MIDWAY, ids=str)
def test_register_state_forward(run: Run) -> None:
    scan, scale = Scan(run), run.K**-0.5
    midway = torch.full_like(scan.midway_states(), math.nan).float()
    o, final_state = torch.full_like(scan.v, math.nan), scan.nan_states()
    scan.launch(
        "register_state_forward", scan.q, scan.k, scan.v, scan.Ab, *scan.gates, scan.initial_states(), o, final_state, midway,
        scale, math.log2(scale), run.L, BLOCKS, has_final_state=True,
    )  # fmt: skip
    expected_o, expected_state = oracle(scan.call, by_chunk=True)
    scan.check("tokens", 4.5e-3, o, expected_o)
    scan.check("sequences", 4e-3, final_state, expected_state)
    scan.check_tail(o)
    if run.midway:
        check_places(midway, scan.midway_states(), 3e-3)


# Their chunks go in bands.
BANDED = [Run(bands=2), Run("decaying", bands=3, ends=False), Run("reset", L=2, bands=2, v_first=True)]
FROM_MIDWAY = [replace(run, bands=2) for run in MIDWAY if run.rows == 128]


@pytest.mark.parametrize("run", SCANS + BANDED + FROM_MIDWAY, ids=str)
def test_register_state_scan(run: Run) -> None:
    scan = Scan(run)
    midway = scan.midway_states()
    at_first = scan.initial_states()
    if run.midway and at_first is not None:          # is not looked at where a band begins midway
        known = [segment.place for segment in scan.kernels.segments(run.L) if len(segment.chunks) > 1]
        at_first = at_first.clone().index_fill_(0, torch.tensor(known), math.nan)
    of_rows = scan.nan(scan.rows, HV, run.V, K), scan.nan(scan.rows, HV, C, run.V)
    found, where = [torch.full_like(x, math.nan) for x in scan.states], {}
    listed, counts = torch.empty(scan.rows, COLUMNS, dtype=torch.int32), torch.zeros(run.bands, dtype=torch.int32)
    for band in range(run.bands):
        scan.launch(
            "register_state_scan", scan.k, scan.v, scan.Ab, *scan.gates, scan.initial_states() if band else at_first,
            midway.float(), *of_rows, listed, counts, run.L, run.bands, band, 0, BLOCKS,
        )  # fmt: skip
        rows = scan.rows_of(band)
        of_band = {entry[SLOT]: entry for entry in listed[: counts[band]].tolist()}
        assert {slot: at for slot, (at, *_) in of_band.items()} == rows
        assert len(of_band) == counts[band]
        where |= {slot: entry for slot, (_, *entry) in of_band.items()}
        for given, actual in zip(of_rows, found, strict=True):
            scan.to_slots(band, given, actual)
    chunks = [chunk for chunks in scan.kernels.sequences for chunk in chunks]
    assert where == {slot: [slot, row, at.start, at.stop - at.start] for slot, row, at in chunks}
    for actual, expected in zip(found, scan.states, strict=True):
        scan.check("slots", 3.5e-3, actual, expected)


@pytest.mark.parametrize("run", SCANS + BANDED, ids=str)
def test_register_gradient_scan(run: Run) -> None:
    scan = Scan(run)
    of_rows, dv = scan.nan(scan.rows, HV, run.V, K), torch.full_like(scan.v, math.nan)
    dh0 = scan.nan_states() if run.ends else None
    carried = scan.nan(scan.places, HV, run.V, K, dtype=torch.float32)
    expected_states, expected_dv, expected_dh0 = scan.gradients
    states = torch.full_like(expected_states, math.nan)
    for band in range(run.bands):
        scan.launch(
            "register_gradient_scan", scan.q, scan.k, scan.do, scan.Ab, *scan.gates, scan.final_gradients(), of_rows, dv, dh0,
            None, carried, SCALE, math.log2(SCALE), run.L, run.bands, band, 0, BLOCKS,
            has_final_state_gradient=run.ends and not run.L, has_initial_state=run.ends,
        )  # fmt: skip
        scan.to_slots(band, of_rows, states)
    scan.check("slots", 3e-3, states, expected_states)
    scan.check("tokens", 4e-3, dv, expected_dv)
    scan.check_tail(dv)
    if run.ends:
        scan.check("sequences", 3e-3, dh0, expected_dh0)


SPLIT = [Run(L=1), Run("reset", L=2, ends=False), Run("open", L=1, v_first=True, config=FEW_STAGES)]


@pytest.mark.parametrize("warm", [-1, 1], ids=lambda warm: f"warm{warm}")
@pytest.mark.parametrize("run", SPLIT, ids=str)
def test_gradients_that_segments_add(run: Run, warm: int) -> None:
    """Of register_gradient_scan with transfers_only; the second head forgets, if warm chunks are given."""
    scan = Scan(run)
    warm_chunks, own = scan.warm_chunks(warm), scan.nan(scan.places, HV, run.V, K, dtype=torch.float32)
    expected = torch.full_like(own, math.nan).double()
    q, k, do = (x.double() for x in (scan.q, scan.k, scan.do))
    for segment in scan.kernels.segments(run.L):
        for head in range(HV) if not segment.is_first else ():
            warm = warm_chunks[segment.place, head]
            forgets = warm >= 0
            begins = segment.is_last and run.ends and not forgets
            dS = scan.kernels.k_first(scan.dht[segment.sequence, head]) if begins else torch.zeros(K, run.V).double()
            chunks = segment.chunks[:warm] if forgets else segment.chunks
            g_sum, A = scan.gated
            expected[segment.place, head] = scan.kernels.gradient_in_front(dS, chunks, head, 0, q, k, do, A, g_sum, SCALE).mT
    scan.launch(
        "register_gradient_scan", scan.q, scan.k, scan.do, scan.Ab, *scan.gates, scan.dht, None, None, own, warm_chunks,
        None, SCALE, math.log2(SCALE), run.L, 1, 0, 0, BLOCKS,
        has_final_state_gradient=run.ends, has_initial_state=False, transfers_only=True,
    )  # fmt: skip
    check_places(own, expected, 2.5e-3)


@pytest.mark.parametrize("warm", [-1, 1], ids=lambda warm: f"warm{warm}")
@pytest.mark.parametrize("run", [*SPLIT, Run(K=96, V=192, L=1)], ids=str)
def test_segment_scan(run: Run, warm: int) -> None:
    """The second head forgets, if warm chunks are given."""
    scan, rows = Scan(run), -(-run.V // TILE) * TILE
    warm_chunks, transfers = scan.warm_chunks(warm), scan.nan(scan.places, HV, rows + TILE, TILE, dtype=torch.float32)
    expected = torch.full_like(transfers, math.nan).double()
    k, v, (g_sum, A) = scan.k.double(), scan.v.double(), scan.gated
    for segment in scan.kernels.segments(run.L):
        for head in range(HV) if not segment.is_last else ():
            warm = warm_chunks[segment.place, head]
            chunks = segment.chunks[-warm:] if warm >= 0 else segment.chunks
            added = scan.kernels.state_behind(torch.zeros(run.K, run.V).double(), chunks, head, 0, k, v, A, g_sum)
            expected[segment.place, head, :rows] = scan.kernels.in_tiles(added.mT)
            if warm < 0:
                no_values = torch.zeros(*v.shape[:3], run.K).double()
                kept = scan.kernels.state_behind(torch.eye(run.K).double(), chunks, head, 0, k, no_values, A, g_sum)
                expected[segment.place, head, rows:] = scan.kernels.in_tiles(kept.mT)
    scan.launch("segment_scan", scan.k, scan.v, scan.Ab, *scan.gates, warm_chunks, transfers, run.L, BLOCKS)
    # What M does to columns of keys that are not there does not matter: they are zero in every state.
    for part, columns in ((slice(0, rows), TILE), (slice(rows, rows + run.K), run.K)):
        check_places(transfers[:, :, part, :columns], expected[:, :, part, :columns], 3e-3)


def check_places(actual: torch.Tensor, expected: torch.Tensor, bound: float) -> None:
    """By value head; what is NaN in `expected` is not to be written."""
    assert torch.equal(actual.isnan(), expected.isnan())
    for head in range(HV):
        assert relative_l2(actual[:, head].nan_to_num(), expected[:, head].nan_to_num()) <= bound, f"head {head}"


@pytest.mark.parametrize(
    "run",
    [
        Run(),
        Run("open"),
        Run("reset"),
        Run("decaying", lengths=(130, 130), packed=False),
        Run(config=(("key_stages", 1), ("value_stages", 2))),
    ],
    ids=str,
)
def test_warpgroup_gradients(run: Run) -> None:
    scan = Scan(run)
    g_sum, beta_chunks = (scan.nan(scan.slots, HV, C, dtype=torch.float32) for _ in range(2))
    scan.kernels.gate_cumsum(scan.g, scan.beta, None, None, None, g_sum, beta_chunks)
    (states, v_new), (state_gradients, dv, _) = scan.states, scan.gradients
    inputs = [scan.q, scan.k, *(x.bfloat16() for x in (v_new, dv)), scan.do, *(x.bfloat16() for x in (states, state_gradients))]
    found = [torch.full_like(x, math.nan) for x in (scan.q, scan.k, scan.g, scan.beta)]
    expected = [torch.zeros_like(x).double() for x in found]
    scan.kernels.chunk_gradients(*(x.double() for x in inputs), g_sum, beta_chunks, None, *expected, SCALE)
    listed, counts = torch.empty(scan.slots, COLUMNS, dtype=torch.int32), torch.zeros(run.bands, dtype=torch.int32)
    for slot, row, at in (chunk for chunks in scan.kernels.sequences for chunk in chunks):
        listed[counts[0]] = torch.tensor([slot, slot, row, at.start, at.stop - at.start])
        counts += 1
    scan.launch(
        "warpgroup_gradients", *inputs, g_sum, beta_chunks, scan.cu_seqlens, listed, counts, *found, SCALE, 0, BLOCKS
    )
    # Nothing is rounded for dg, but after a reset sums of gates are 2e-4 off. dbeta is divided by beta in bf16.
    for actual, exact, bound in zip(found, expected, (3e-3, 3e-3, 5e-4, 4.5e-3), strict=True):
        scan.check("tokens", bound, actual, exact)
        scan.check_tail(actual)


FEW_CHUNKS = Run(lengths=(70, 0, 3))
KERNELS = {
    "forward": lambda: test_register_state_forward(FEW_CHUNKS),
    "states": lambda: test_register_state_scan(FEW_CHUNKS),
    "gradients": lambda: test_register_gradient_scan(FEW_CHUNKS),
    "transfers": lambda: test_segment_scan(replace(FEW_CHUNKS, L=1), -1),
    "chunk_gradients": lambda: test_warpgroup_gradients(FEW_CHUNKS),
}
ROW_BYTES, PIECE_BYTES = 128, 16         # of a swizzled tile

# (kernel, helper, one of its arguments, what becomes of that)
FAULTS = [
    ("forward", "qla_load_rows", 2, lambda distance: 0),
    ("forward", "qla_load_first_columns", 1, lambda source: moved(source, 1)),
    ("forward", "qla_lower_triangle", 3, lambda diagonal: 0 * diagonal),
    ("forward", "qla_decay_and_store", 5, lambda log2_scale: log2_scale + 0.05),
    ("forward", "qla_zero_rows", 1, lambda first: first + 1),
    ("forward", "qla_store_first_rows", 3, lambda rows: rows - 1),
    ("states", "qla_store_transposed", 2, lambda offset: offset ^ PIECE_BYTES),
    ("states", "qla_load_tile", 2, lambda offset: offset ^ ROW_BYTES),
    ("gradients", "qla_decay_and_store", 6, lambda warp: warp + 1),
    ("gradients", "qla_scale_columns", 2, lambda source: moved(source, 1)),
    ("gradients", "qla_load_transposed", 2, lambda offset: offset ^ PIECE_BYTES),
    ("transfers", "qla_scale_rows_and_store", 1, lambda tile: moved(tile, 64)),
    ("chunk_gradients", "qla_score_gradient", 6, lambda strict: 0),
    ("chunk_gradients", "qla_gate_gradient", 3, lambda valid: valid - 1),
]


def moved(pointer: Pointer, columns: int) -> Pointer:
    *rows, column = pointer.index
    pointer.index = (*rows, (column + columns) % pointer.array.shape[-1])
    return pointer


@pytest.mark.parametrize(("kernel", "helper", "argument", "change"), FAULTS, ids=["-".join(map(str, x[:3])) for x in FAULTS])
def test_a_fault_is_seen(
    kernel: str, helper: str, argument: int, change: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    table = HELPERS if helper in HELPERS else LANE_HELPERS
    right = table[helper]

    def wrong(*args: Any) -> None:
        at = argument + (table is LANE_HELPERS)
        right(*args[:at], change(args[at]), *args[at + 1 :])

    monkeypatch.setitem(table, helper, wrong)
    with pytest.raises(AssertionError):
        KERNELS[kernel]()


@pytest.mark.parametrize("kernel", KERNELS)
def test_an_accumulator_that_is_not_waited_for_is_seen(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = emulation.Block.wait_products
    monkeypatch.setattr(emulation.Block, "wait_products", lambda block, running: right(block, running + 1))
    with pytest.raises(AssertionError, match="in flight"):
        KERNELS[kernel]()


def test_every_helper_has_a_twin() -> None:
    assert {*HELPERS, *LANE_HELPERS} == {*protocol.HELPERS}
