"""Do the macros that say where chunks and segments lie agree with the definitions? They are compiled for the CPU and run."""

import functools
import itertools
from collections.abc import Callable, Iterator

import pytest
import torch

from qla_jit.kernel_templates.language import T, macro
from qla_jit.kernel_templates.macros.segments import count_segments, locate_rank, locate_segment, place_count
from qla_jit.kernel_templates.macros.sequences import locate_chunk, slot_count

C = 64
LENGTHS = ((2500, 64, 1, 0, 447, 1100), (0, 0, 5), (1,), (0,), (4096, 4096), (64, 63, 65, 0, 129), (300,) * 7)
EQUAL = ((2500, 2500), (1,), (64,) * 3, (129,) * 5)
NOT_WRITTEN = -99


@macro
def write(target, row, found):
    for i in tuple(range(len(found))):
        target[row, i] = found[i]


@functools.cache
def compiled(packed: bool) -> Callable[..., None]:
    import tilelang

    bounds, slots, places, segments = (T.dynamic(name) for name in ("bounds", "slots", "places", "segments"))

    @T.prim_func
    def where(
        cu_seqlens: T.Tensor((bounds,), "int32"),
        of_slots: T.Tensor((slots, 3), "int32"),
        of_places: T.Tensor((places, 7), "int32"),
        segments_before: T.Tensor((bounds,), "int32"),
        of_ranks: T.Tensor((segments, 8), "int32"),
        tokens: T.int32,
        N: T.int32,
        L: T.int32,
    ):
        for slot in T.serial(slots):
            write(of_slots, slot, locate_chunk(packed, cu_seqlens, N, tokens, slot, C))
        for place in T.serial(places):
            write(of_places, place, locate_segment(packed, cu_seqlens, N, tokens, place, C, L))
        for n in T.serial(N + 1):
            segments_before[n] = count_segments(packed, cu_seqlens, tokens, n, C, L)
        for rank in T.serial(segments_before[N]):
            write(of_ranks, rank, locate_rank(packed, cu_seqlens, segments_before, N, tokens, rank, C, L))

    return tilelang.compile(where, target="c")


def run(packed: bool, lengths: tuple[int, ...], L: int, tail: int) -> tuple[list[list[int]], ...]:
    """What is found for each slot, for each place, and for each rank."""
    N = len(lengths)
    B, tokens = (1, sum(lengths) + tail) if packed else (N, lengths[0])
    starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    slots = slot_count(B, tokens, N, C, packed)
    of_slots = torch.full((slots, 3), NOT_WRITTEN, dtype=torch.int32)
    of_places = torch.full((place_count(slots, N, L), 7), NOT_WRITTEN, dtype=torch.int32)
    of_ranks = torch.full((len(of_places), 8), NOT_WRITTEN, dtype=torch.int32)
    before = torch.full((N + 1,), NOT_WRITTEN, dtype=torch.int32)
    compiled(packed)(starts, of_slots, of_places, before, of_ranks, tokens, N, L)
    return of_slots.tolist(), of_places.tolist(), of_ranks[: before[-1]].tolist()


def sequences(packed: bool, lengths: tuple[int, ...]) -> Iterator[tuple[int, int, int, int]]:
    """(number, row, first token, tokens) of each."""
    start = 0
    for n, length in enumerate(lengths):
        yield n, 0 if packed else n, start if packed else 0, length
        start += length


CALLS = [
    *((True, lengths, tail) for lengths in LENGTHS for tail in (0, 100)),
    *((False, lengths, 0) for lengths in EQUAL),
]


@pytest.mark.parametrize(("packed", "lengths", "tail"), CALLS, ids=str)
def test_every_chunk_has_one_slot(packed: bool, lengths: tuple[int, ...], tail: int) -> None:
    of_slots, _, _ = run(packed, lengths, 1, tail)
    found = [(n, start, valid) for n, start, valid in of_slots if valid > 0]
    expected = [
        (n, first + at, min(C, length - at)) for n, _, first, length in sequences(packed, lengths) for at in range(0, length, C)
    ]
    assert found == expected


@pytest.mark.parametrize("L", [1, 2, 16, 1000], ids=lambda L: f"L{L}")
@pytest.mark.parametrize(("packed", "lengths", "tail"), CALLS, ids=str)
def test_every_segment_has_one_place_and_an_empty_sequence_too(
    packed: bool, lengths: tuple[int, ...], tail: int, L: int
) -> None:
    of_slots, of_places, of_ranks = run(packed, lengths, L, tail)
    found = [place for place in of_places if place[3] >= 0]
    expected = []
    for n, row, first, length in sequences(packed, lengths):
        last = max(-(-length // (L * C)), 1) - 1
        expected += [(n, row, first + s * L * C, min(L * C, length - s * L * C), s, last) for s in range(last + 1)]
    assert [(n, row, first, tokens, s, last) for n, row, first, tokens, _, s, last in found] == expected
    assert of_ranks == [[place, *of_places[place]] for place in range(len(of_places)) if of_places[place][3] >= 0]
    for n, _, first, tokens, slot, _, _ in found:
        if tokens:
            assert of_slots[slot][:2] == [n, first], "the first slot of a segment is that of its first chunk"
