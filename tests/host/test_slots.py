"""Chunk slots and segment places: no two share one, and the host's counts hold them all."""

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qla_jit.kernel_templates.macros.segments import place_count
from qla_jit.kernel_templates.macros.sequences import slot_count

lengths_of_sequences = st.lists(st.integers(0, 700), min_size=1, max_size=20)


def slots_of(lengths: list[int], C: int) -> list[tuple[int, int]]:
    """First slot and number of chunks of each packed sequence, by the formula of macros/sequences.py."""
    starts = [0, *accumulate(lengths)][:-1]
    return [(start // C + n, -(-length // C)) for n, (start, length) in enumerate(zip(starts, lengths, strict=True))]


@given(lengths=lengths_of_sequences, C=st.sampled_from([16, 32, 64]), tail=st.integers(0, 300))
def test_chunks_of_packed_sequences_have_slots_of_their_own(lengths: list[int], C: int, tail: int) -> None:
    slots = [first + j for first, chunks in slots_of(lengths, C) for j in range(chunks)]
    assert len(set(slots)) == len(slots)
    assert all(slot < slot_count(1, sum(lengths) + tail, len(lengths), C, packed=True) for slot in slots)


@given(lengths=lengths_of_sequences, C=st.sampled_from([16, 64]), tail=st.integers(0, 300))
def test_the_last_slot_reaches_the_end_of_the_row(lengths: list[int], C: int, tail: int) -> None:
    # chunk_output zeroes the tokens behind the last sequence from the slots behind its chunks.
    tokens = sum(lengths) + tail
    start, (first, _chunks) = sum(lengths[:-1]), slots_of(lengths, C)[-1]
    slots = slot_count(1, tokens, len(lengths), C, packed=True)
    assert start + (slots - first) * C >= tokens


@given(lengths=lengths_of_sequences, L=st.integers(1, 12))
def test_segments_of_packed_sequences_have_places_of_their_own(lengths: list[int], L: int) -> None:
    C = 64
    places = []
    for n, (first_slot, chunks) in enumerate(slots_of(lengths, C)):
        places += [first_slot // L + n + s for s in range(max(-(-chunks // L), 1))]      # an empty sequence has one too
    assert len(set(places)) == len(places)
    slots = slot_count(1, sum(lengths), len(lengths), C, packed=True)
    assert all(place < place_count(slots, len(lengths), L) for place in places)


@pytest.mark.parametrize(("B", "T", "C", "slots"), [(1, 64, 64, 1), (3, 65, 64, 6), (2, 1, 16, 2)], ids=str)
def test_equal_lengths_need_no_spare_slots(B: int, T: int, C: int, slots: int) -> None:
    assert slot_count(B, T, B, C, packed=False) == slots
