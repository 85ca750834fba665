"""Is every access to a shared tile of the warp-specialised kernels ordered by their barriers, whatever the schedule?"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from backward_kernels import listed_chunks
from protocol import Agent, Event, Trace, check, trace

from qla_jit.kernel_templates.arch import SM90A
from qla_jit.kernel_templates.macros.bands import row_count

C, L_WHOLE = 64, 0
BLOCK, BLOCKS = 1, 2                     # the one that is traced, of those
WARPGROUPS = ["state 0", "state 1", "aux"]

DIMS = dict(H=1, HV=2, K=128, C=C, dtype="bfloat16", packed=True, index_dtype="int32")
GATES = dict(gate_dtype="float32", gate_in_kernel=False, has_dt_bias=False)
FORWARD = dict(**DIMS, V=128, **GATES, initial_state_dtype="float32", has_final_state=True, state_v_first=False)
STATES = dict(**DIMS, V=128, **GATES, initial_state_dtype="float32", state_v_first=False)
GRADIENTS = dict(**DIMS, V=128, **GATES, has_final_state_gradient=True, has_initial_state=True, state_v_first=False)

# name of the case: (template, problem, whether it goes by segments)
KERNELS = {
    "forward": ("register_state_forward", FORWARD, False),
    "forward-narrow": ("register_state_forward", FORWARD | dict(K=96, V=192), False),
    "forward-64": ("register_state_forward", FORWARD | dict(rows=64), False),
    "forward-split": ("register_state_forward", FORWARD | dict(split=True, initial_state_dtype=None), True),
    "states": ("register_state_scan", STATES, False),
    "states-split": ("register_state_scan", STATES | dict(split=True, initial_state_dtype=None), True),
    "gradients": ("register_gradient_scan", GRADIENTS, False),
    "gradients-split": ("register_gradient_scan", GRADIENTS | dict(split=True, has_final_state_gradient=False), True),
    "gradient-transfers": (
        "register_gradient_scan", GRADIENTS | dict(split=True, transfers_only=True, has_initial_state=False), True
    ),
    "transfers": ("segment_scan", DIMS | dict(V=128) | GATES, True),
    "chunk-gradients": ("warpgroup_gradients", DIMS | dict(V=128), False),
}  # fmt: skip
LENGTHS = [(640,), (70, 0, 64, 1, 450)]


# What another wait implies, or somebody else's fence on the way: nothing is lost without it.
IMPLIED = {
    "forward": {("state 0", "fence", None), ("state 1", "fence", None), ("loader 3", "fence", None)},
    "forward-64": {("state 0", "fence", None), ("loader 3", "fence", None), ("loader 3", "wait", "q_free")},
    "states": {
        ("state 0", "fence", None), ("state 1", "fence", None), ("state 0", "wait", "s_free"), ("state 1", "wait", "s_free"),
        ("loader 0", "wait", "Ab_free"),
    },
    "gradients": {
        ("state 0", "wait", "q_full"), ("state 1", "wait", "q_full"), ("state 0", "wait", "s_free"),
        ("state 1", "wait", "s_free"), ("loader 0", "wait", "q_free"),
    },
    "gradient-transfers": {("state 0", "wait", "q_full"), ("state 1", "wait", "q_full"), ("loader 0", "wait", "q_free")},
    "chunk-gradients": {
        ("queries", "wait", "k_full"), ("keys", "wait", "q_full"), ("loader 0", "wait", "k_free"), ("loader 0", "wait", "q_free"),
        ("loader 0", "fence", None), ("loader 1", "wait", "gates_free"),
    },
}  # fmt: skip
ALIKE = ("forward-narrow", "forward-split", "states-split", "gradients-split")
IMPLIED |= {name: IMPLIED[name.partition("-")[0]] for name in ALIKE}


def configs(kernel: str) -> Iterator[dict[str, Any]]:
    """All that the template allows, the default first."""
    name, problem, _ = KERNELS[kernel]
    template = importlib.import_module(f"qla_jit.kernel_templates.{name}").TEMPLATE
    described = template.problem(**problem)
    default = template.default_config(described, SM90A)
    others = (config for config in template.configs(described, SM90A) if config != default)
    return map(dataclasses.asdict, (default, *others))


def traced(
    kernel: str, config: dict[str, Any], lengths: tuple[int, ...], L: int, bands: int = 1, band: int = 0, early: int = 0,
    midway: bool = False,
) -> Trace:  # fmt: skip
    template, problem, by_segments = KERNELS[kernel]
    starts = [0, *itertools.accumulate(lengths)]
    N, tokens = len(lengths), starts[-1] + 10
    slots = tokens // C + N
    places = slots // L + N if by_segments else N
    segments = [max(-(-length // (C * L)), 1) for length in lengths] if by_segments else []
    before = [0, *itertools.accumulate(segments)]
    listed = listed_chunks(starts, C)
    warpgroups, by_chunk = WARPGROUPS, {}
    if "rows" in problem:
        warpgroups = ["state 0", "aux"]
    if template == "warpgroup_gradients":
        warpgroups = ["scores", "queries", "keys"]
        read = [listed[item // problem["H"]][2:] for item in range(BLOCK, len(listed) * problem["H"], BLOCKS)]
        by_chunk = dict(rows_apart=["sums"], numbers=dict(place=lambda: itertools.chain(*read)))
    return trace(
        template,
        problem,
        config,
        agents_of(warpgroups),
        sizes=dict(
            B=1, tokens=tokens, slots=slots, bounds=N + 1, places=places, rows=row_count(slots, places, bands),
            carried_places=places, midway_places=places * midway, bands=bands, bands_counted=bands,
        ),
        tensors=dict(
            cu_seqlens=starts.__getitem__, listed=lambda number, which: listed[number][which], counts=lambda band: len(listed),
            segments_before=before.__getitem__, warm_chunks=lambda place, head: -1 if head else 1,
        ),
        scalars=dict(scale=0.5, log2_scale=-1.0, chunks_per_segment=L, bands=bands, band=band, early=early, blocks=BLOCKS),
        block=BLOCK,
        **by_chunk,
    )


def agents_of(warpgroups: list[str]) -> list[Agent]:
    """Warpgroups, and behind them the four warps that load and store."""
    first = 128 * len(warpgroups)
    warps = [Agent(f"loader {number}", first + 32 * number, 32) for number in range(4)]
    return [Agent(name, number * 128, 128) for number, name in enumerate(warpgroups)] + warps


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
def test_shared_tiles_are_never_in_use_twice(kernel: str, lengths: tuple[int, ...]) -> None:
    for config, L in itertools.product(configs(kernel), (1, 2, 4) if KERNELS[kernel][2] else (L_WHOLE,)):
        assert check(traced(kernel, config, lengths, L)) == [], f"{config}, {L} chunks a segment"


BANDED = ("states", "states-split", "gradients", "gradients-split")


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("kernel", BANDED)
def test_shared_tiles_are_never_in_use_twice_where_chunks_go_in_bands(kernel: str, lengths: tuple[int, ...]) -> None:
    L, config = 4 if KERNELS[kernel][2] else L_WHOLE, next(configs(kernel))
    for bands in (2, 3):
        for band in range(bands):
            assert check(traced(kernel, config, lengths, L, bands, band)) == [], f"band {band} of {bands}"


WITH_MIDWAY = ("forward", "forward-narrow", "forward-64", "forward-split", "states", "states-split")


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("kernel", WITH_MIDWAY)
def test_shared_tiles_are_never_in_use_twice_where_a_state_is_kept_midway(kernel: str, lengths: tuple[int, ...]) -> None:
    L, config = 4 if KERNELS[kernel][2] else L_WHOLE, next(configs(kernel))
    assert check(traced(kernel, config, lengths, L, bands=2, midway=True)) == []


# Who waits for the kernel before, where not all do: the others need nothing of it.
WHO_WAITS = {
    "forward": {"loader 0"}, "forward-narrow": {"loader 0"}, "forward-64": {"loader 0"}, "forward-split": {"state 0", "state 1"},
    "gradients": {"state 0", "state 1", "loader 2"}, "gradients-split": {"state 0", "state 1", "loader 2"},
}  # fmt: skip


@pytest.mark.parametrize("lengths", [*LENGTHS, (0, 0)], ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
def test_whoever_needs_the_kernel_before_waits_for_it_first(kernel: str, lengths: tuple[int, ...]) -> None:
    """Also a block without chunks waits: it would else end before the kernel before."""
    found = traced(kernel, next(configs(kernel)), lengths, 2 if KERNELS[kernel][2] else L_WHOLE)
    waiting = {agent for agent, waits in found.waits.items() if waits}
    assert waiting == WHO_WAITS.get(kernel, {*found.waits})
    for agent in waiting:
        needed = {"Ab"} if WHO_WAITS.get(kernel) == {"loader 0"} else None        # of what it touches; None: all
        events = found.events[agent][: found.waits[agent][0]]
        assert not [region for event in events for region in event.regions if needed is None or region.tile in needed]


@pytest.mark.parametrize("kernel", ["states", "states-split", "gradients", "gradients-split"])
def test_a_kernel_beside_the_one_before_waits_for_it_last(kernel: str) -> None:
    found = traced(kernel, next(configs(kernel)), LENGTHS[1], 2 if KERNELS[kernel][2] else L_WHOLE, early=1)
    assert found.waits == {agent: [len(events)] for agent, events in found.events.items()}


def test_a_tile_that_is_full_at_once_behind_its_stores_is_found() -> None:
    found = traced("forward", next(configs("forward")), (450,), L_WHOLE)
    events = found.events["state 1"]
    arrival = next(number for number, event in enumerate(events) if synchronisation(event) == ("arrive", "o_full"))
    events[arrival] = dataclasses.replace(events[arrival], fresh=("o",))
    assert check(found) == ["state 1 arrive: o is full at once behind its stores"]


def test_a_tile_that_is_free_before_what_was_loaded_is_used_is_found() -> None:
    found = traced("transfers", next(configs("transfers")), (450,), 2)
    events = found.events["state 0"]
    arrival = next(number for number, event in enumerate(events) if synchronisation(event) == ("arrive", "v_free"))
    loads = [number for number, event in enumerate(events[:arrival]) if "v" in [region.tile for region in event.regions]]
    assert [event.kind for event in events[loads[-1] + 1 : arrival]].count("read") >= 2      # of gates, which the values meet
    events[arrival] = dataclasses.replace(events[arrival], unused=("v",))
    assert check(found) == ["state 0 arrive: v is free before what was loaded from it has been used"]


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_synchronisation_that_is_left_out_is_found(kernel: str) -> None:
    """Each kind of it, of each role: else the check would say nothing of it."""
    found = traced(kernel, next(configs(kernel)), (200, 70, 450), 2 if KERNELS[kernel][2] else L_WHOLE)
    unnoticed = set()
    for agent, events in found.events.items():
        for left_out in {synchronisation(event) for event in events} - {None}:
            kept = [event for event in events if synchronisation(event) != left_out]
            if check(Trace(found.agents, found.events | {agent: kept}, found.arrivals)) == []:
                unnoticed.add((agent, *left_out))
    assert unnoticed == IMPLIED.get(kernel, set())


def synchronisation(event: Event) -> tuple[str, str | None] | None:
    if event.kind in ("read", "write", "product", "load", "store"):
        return None
    return event.kind, event.barrier and event.barrier[0]
