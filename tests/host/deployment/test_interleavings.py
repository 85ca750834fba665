"""Can two processes bring a damaged kernel out of the store, or an entry into it that is not whole?

One process goes through some steps, and before a call to the disk of its choice another goes through steps of its own.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import hypothesis
from faults import inject
from hypothesis import strategies as st
from node import Node, ask_twice, assert_entries_are_whole, assert_served, right
from tiny_template import request

from qla_jit import cache_tools, kernel_cache, kernel_store
from qla_jit.compiler import ARTEFACTS, EXECUTABLE
from qla_jit.errors import EnvironmentUnsuitable


def find(node: Node, build: Path) -> None:
    kernel = kernel_store.find(kernel_cache.key_of(request()))
    assert kernel is None or [kernel.launch()] == right()


def store(node: Node, build: Path) -> None:
    kernel_store.store(build, kernel_cache.key_of(request()))


def remove(node: Node, build: Path) -> None:
    with contextlib.suppress(EnvironmentUnsuitable):         # the cache is gone, and that is what the user is told
        cache_tools.remove(cache_tools.cached_kernels(node.cache), node.cache)


def collect(node: Node, build: Path) -> None:
    cache_tools.STAGING_SECONDS = -3600.0                    # as if the other had been suspended for long
    cache_tools.gc(node.cache)


def damage(node: Node, build: Path) -> None:
    for entry in node.entries():
        if (entry / EXECUTABLE).exists():
            os.truncate(entry / EXECUTABLE, 5)


def remove_roughly(node: Node, build: Path) -> None:
    for entry in node.entries():
        shutil.rmtree(entry, ignore_errors=True)


def remove_everything(node: Node, build: Path) -> None:
    shutil.rmtree(node.cache, ignore_errors=True)


CAREFUL = (find, store, remove, collect)
ROUGH = (damage, remove_roughly, remove_everything)
Steps = list[Callable[[Node, Path], None]]


def interleave(node: Node, ours: Steps, theirs: Steps, call: int) -> None:
    """Go through our steps, and through theirs before one of the calls that ours make to the disk."""
    node.fill()
    build = node.root / "build"
    build.mkdir()
    for name in ARTEFACTS:
        shutil.copyfile(node.entry() / name, build / name)

    def go() -> None:
        def interrupt() -> None:
            for step in theirs:
                step(node, build)

        inject(interrupt, under=node.cache, first=call, last=call)
        for step in ours:
            step(node, build)

    outcome = node.run(go)
    assert outcome.error is None, outcome.error


def steps(*choices: Callable[[Node, Path], None]) -> st.SearchStrategy[Steps]:
    return st.lists(st.sampled_from(choices), min_size=1, max_size=4)


many = hypothesis.settings(max_examples=40, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
calls = st.integers(1, 60)


@many
@hypothesis.given(ours=steps(*CAREFUL), theirs=steps(*CAREFUL), call=calls)
def test_whatever_our_tools_do_at_the_same_time_every_entry_is_whole(new_node, ours, theirs, call):
    node = new_node()
    interleave(node, ours, theirs, call)
    assert_entries_are_whole(node)
    assert not list(node.cache.glob("quarantine/*"))
    assert_served(node.run(ask_twice))


@many
@hypothesis.given(ours=steps(*CAREFUL), theirs=steps(*CAREFUL, *ROUGH), call=calls)
def test_whatever_happens_to_the_directory_no_damaged_kernel_is_used(new_node, ours, theirs, call):
    node = new_node()
    interleave(node, ours, theirs, call)
    assert_served(node.run(ask_twice), warnings=1)
    assert_entries_are_whole(node)
