"""Which strategy computes which call, and where sequences are split."""

from __future__ import annotations

import pytest
import torch
from cases import Case, arguments

from qla_jit import select
from qla_jit.errors import UnsupportedError
from qla_jit.kernel_templates.arch import ARCHES, SM90A
from qla_jit.ops.inputs import CallFacts, check_inputs
from qla_jit.ops.pipeline import LAUNCHERS
from qla_jit.ops.plan import STRATEGIES, Extents, segment_lengths, split_pays, strategies_for
from qla_jit.ops.splits import (
    MARGIN,
    MOST_TURNS,
    SHORTEST,
    Sizes,
    best_split,
    best_whole_us,
    busiest_block,
    halves_us,
    lengths_to_try,
    split_us,
    wide_us,
)
from qla_jit.tuning_records import Hardware

H200 = Hardware(arch="sm_90a", sm_count=132, l2_bytes=60 * 2**20)


def facts_of(**changes: object) -> CallFacts:
    flags = {name: changes.pop(name) for name in ("chunk_size", "auto_cp") if name in changes}
    case = Case(**{"H": 2, "HV": 8, "K": 128, "V": 128, "lengths": (70,), "dtype": torch.bfloat16} | changes)
    return check_inputs(**arguments(case), **flags).facts


def test_every_strategy_has_a_launcher() -> None:
    assert STRATEGIES.keys() == LAUNCHERS.keys()


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({}, ["chunked", "fused", "fused_halves", "split"]),
        ({"V": 256}, ["chunked", "fused", "fused_halves", "split"]),
        ({"K": 96, "V": 192}, ["chunked", "fused", "fused_halves", "split"]),
        ({"K": 64, "V": 64}, ["chunked", "fused", "fused_halves", "split"]),
        ({"V": 96}, ["chunked"]),
        ({"K": 192}, ["chunked"]),
        ({"dtype": torch.float16}, ["chunked"]),
        ({"chunk_size": 32}, ["chunked"]),
    ],
    ids=str,
)
def test_the_fast_strategies_serve_what_they_are_written_for(changes: dict[str, object], names: list[str]) -> None:
    assert [strategy.name for strategy in strategies_for(facts_of(**changes), SM90A)] == names


@pytest.mark.parametrize("arch", [arch for arch in ARCHES.values() if arch is not SM90A], ids=lambda arch: arch.name)
def test_other_archs_have_the_baseline(arch: object) -> None:
    assert [strategy.name for strategy in strategies_for(facts_of(), arch)] == ["chunked"]


@pytest.mark.parametrize(("K", "V"), [(80, 128), (128, 384)], ids=str)
def test_uncovered_head_dims_name_what_is_covered(K: int, V: int) -> None:
    with pytest.raises(UnsupportedError, match=rf"K={K}, V={V}.*\(64, 96, 128, 192, 256\).*\(64, 96, 128, 192, 256, 512\)"):
        strategies_for(facts_of(K=K, V=V), SM90A)


def chosen(HV: int, chunks: int, sequences: int = 1, **changes: object) -> tuple[str, int | None]:
    extents = Extents(chunks=chunks * sequences, longest=chunks, sequences=sequences)
    dispatch = select.choose(facts_of(H=2, HV=HV, **changes), SM90A, hardware=H200, extents=extents)
    return dispatch.strategy, dispatch.split


def test_a_long_sequence_of_few_heads_is_split() -> None:
    strategy, split = chosen(8, 512)
    assert strategy == "split"
    assert 8 <= split <= 64


def test_a_full_gpu_computes_whole_sequences() -> None:
    assert chosen(64, 64, sequences=8) == ("fused", None)


def test_items_are_halved_where_sms_would_be_idle() -> None:
    assert chosen(64, 128) == ("fused_halves", None)
    assert chosen(8, 64, sequences=8) == ("fused_halves", None)
    assert chosen(128, 128) == ("fused", None)


def test_a_call_may_forbid_splits() -> None:
    assert chosen(8, 512, auto_cp=False) == ("fused_halves", None)


def test_thousands_of_short_sequences_beside_a_long_one_are_not_split() -> None:
    facts = facts_of(H=8, HV=32)
    assert split_pays(facts, Extents(chunks=1024, longest=1024, sequences=1), 132)
    assert not split_pays(facts, Extents(chunks=3024, longest=1024, sequences=2000), 132)


def test_the_first_call_asks_for_the_kernels_of_all_sizes() -> None:
    facts = facts_of()
    requests = select.requests_for_any_size(facts, SM90A)
    assert len(set(requests)) == len(requests)
    for extents in (Extents(512, 512, 1), Extents(512, 64, 8), Extents(1, 1, 1)):
        dispatch = select.choose(facts, SM90A, hardware=H200, extents=extents)
        assert set(dispatch.requests.values()) <= set(requests)


@pytest.mark.parametrize("longest", [1, 4, 5, 64, 4096])
def test_segment_lengths_begin_with_the_default_and_hold_none_once(longest: int) -> None:
    facts, extents = facts_of(), Extents(longest, longest, 1)
    lengths = segment_lengths(facts, extents, 132)
    assert lengths.count(None) == 1
    assert len(set(lengths)) == len(lengths)
    assert all(length is None or length < longest for length in lengths)
    assert split_pays(facts, extents, 132) == (lengths[0] is not None)          # a small workspace, whatever the length


@pytest.mark.parametrize("rows", [1, 8, 64])
@pytest.mark.parametrize("chunks", [16, 512])
def test_the_best_split_is_expected_to_pay(rows: int, chunks: int) -> None:
    sizes = Sizes(rows, 2 * rows, chunks, chunks, 1, 132)
    L = best_split(sizes)
    if L is not None:
        assert split_us(sizes, L) < MARGIN * best_whole_us(sizes)


@pytest.mark.parametrize(
    ("HV", "longest", "chunks", "sequences", "wide", "halves", "split"),
    [                                    # microseconds; docs/performance.md
        (8, 512, 512, 1, 951, 705, (32, 169)),
        (16, 313, 313, 1, 602, None, (40, 196)),
        (24, 128, 128, 1, 255, 192, (26, 134)),
        (32, 313, 313, 1, 656, None, (40, 349)),
        (48, 64, 64, 1, 144, 109, None),
        (64, 64, 512, 8, 736, None, None),
    ],
)
def test_measured_forwards_are_expected_as_they_are(
    HV: int, longest: int, chunks: int, sequences: int, wide: float, halves: float | None, split: tuple[int, float] | None
) -> None:
    sizes = Sizes(HV, 2 * HV, longest, chunks, sequences, 132)
    assert wide_us(sizes) == pytest.approx(wide, rel=0.06)
    if halves is not None:
        assert halves_us(sizes) == pytest.approx(halves, rel=0.06)
    if split is not None:
        L, us = split
        assert split_us(sizes, L) == pytest.approx(us, rel=0.06)


@pytest.mark.parametrize("sequences", [1, 3])
@pytest.mark.parametrize("rows", [2, 24, 64])
@pytest.mark.parametrize("longest", [1, 7, 8, 100, 313, 16384])
def test_lengths_to_try_are_the_shortest_for_their_number_of_segments(longest: int, rows: int, sequences: int) -> None:
    sizes = Sizes(rows, 2 * rows, longest, longest * sequences, sequences, 132)
    lengths = list(lengths_to_try(sizes))
    assert lengths == sorted(set(lengths), reverse=True)
    for L in lengths:
        segments = -(-longest // L)
        assert -(-longest // segments) == L
        assert SHORTEST <= L < longest
        assert busiest_block(sizes, L) <= MOST_TURNS
    enough = [k for k in range(2, longest // SHORTEST + 1) if busiest_block(sizes, -(-longest // k)) <= MOST_TURNS]
    assert {-(-longest // k) for k in enough} == set(lengths)


def test_a_split_fills_the_gpu_with_any_number_of_heads_and_tokens() -> None:
    """In segments of a power of two chunks 24 heads of 512 chunks were 96 or 192 items for 132 SMs."""
    for HV, chunks in ((24, 512), (16, 313), (8, 625)):
        strategy, L = chosen(HV, select.bucket(Extents(chunks, chunks, 1)).longest)
        assert strategy == "split"
        turns = HV * -(-chunks // L) / 132
        assert turns / -(-HV * -(-chunks // L) // 132) > 0.85


def test_calls_that_are_looked_up_together_have_as_many_segments() -> None:
    facts = facts_of(HV=16)
    sizes = [Extents(chunks, chunks, 1) for chunks in range(287, 351)]          # next to 320
    (bucket,) = set(map(select.bucket, sizes))
    dispatch = select.choose(facts, SM90A, hardware=H200, extents=bucket)
    segments = {-(-extents.longest // dispatch.segment_length(extents)) for extents in sizes}
    assert segments == {-(-bucket.longest // dispatch.split)}
    with select.override(split=32):
        given = select.choose(facts, SM90A, hardware=H200, extents=bucket)
    assert {given.segment_length(extents) for extents in sizes} == {32}
