"""Do the tools that fill, carry and clean caches and bundles do all or nothing, whatever the disk does or who dies?"""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import signal
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from entries import put
from faults import inject
from node import Node

from qla_jit import bundle_file, cache_tools, kernel_store
from qla_jit.errors import BundleError, EnvironmentUnsuitable, QLAError

ERRORS = (errno.ENOSPC, errno.EXDEV, errno.EBUSY, errno.ESTALE, errno.EIO, errno.EROFS, errno.EACCES)


def whole(directory: Path) -> int:
    """How many kernels a directory has, all of which are whole and can be read by everybody."""
    for entry in kernel_store.entries_in(directory):
        kernel_store.verified(entry)
    return len(kernel_store.entries_in(directory))


def modes(directory: Path) -> set[tuple[bool, int]]:
    places = (directory, *(path for path in directory.rglob("*") if path.relative_to(directory).parts[0] != "staging"))
    return {(path.is_dir(), stat.S_IMODE(path.stat().st_mode)) for path in places}


@dataclass(frozen=True)
class Tool:
    """What a tool does on a node that prepare() made ready, and what must hold when it has done all or nothing."""

    name: str
    prepare: Callable[[Node], None]
    work: Callable[[Node], Any]
    check: Callable[[Node], None]        # however it ended
    done: Callable[[Node], None]         # once it came to its end
    under: str                           # the directory whose calls fail
    errors: tuple[type[Exception], ...] = (QLAError,)
    may_leave: bool = False              # what it could not remove, for the next time


def fill_two(node: Node) -> None:
    node.cache.mkdir(mode=0o700)
    put(node.cache)
    put(node.cache, arch="sm_80")


def ship(node: Node) -> None:
    (node.root / "bundle").mkdir(mode=0o755, exist_ok=True)
    for entry in kernel_store.entries_in(node.cache):
        kernel_store.ship(entry, node.root / "bundle")


def check_shipped(node: Node) -> None:
    assert whole(node.root / "bundle") <= whole(node.cache) == 2


def done_shipping(node: Node) -> None:
    assert whole(node.root / "bundle") == 2
    assert modes(node.root / "bundle") == {(True, 0o755), (False, 0o644)}


def pack(node: Node) -> None:
    bundle_file.pack(node.cache, node.root / "out" / "packed.tar.gz")


def prepare_packing(node: Node) -> None:
    fill_two(node)
    (node.root / "out").mkdir()
    (node.root / "out" / "packed.tar.gz").write_text("of yesterday")


def check_packed(node: Node) -> None:
    file = node.root / "out" / "packed.tar.gz"
    if file.read_bytes() != b"of yesterday":
        bundle_file.install(file, node.root / "tried", allow_unsigned=True)
        shutil.rmtree(node.root / "tried")


def done_packing(node: Node) -> None:
    assert (node.root / "out" / "packed.tar.gz").read_bytes() != b"of yesterday"


def prepare_installing(node: Node) -> None:
    fill_two(node)
    (node.root / "packed").mkdir()
    bundle_file.pack(node.cache, node.root / "packed" / "packed.tar.gz")


def install(node: Node) -> None:
    bundle_file.install(node.root / "packed" / "packed.tar.gz", node.root / "opt" / "bundle", allow_unsigned=True)


def check_installed(node: Node) -> None:
    if (node.root / "opt" / "bundle").exists():
        done_installing(node)


def done_installing(node: Node) -> None:
    assert whole(node.root / "opt" / "bundle") == 2
    assert modes(node.root / "opt" / "bundle") == {(True, 0o755), (False, 0o644)}


def prune(node: Node) -> None:
    kernels = cache_tools.cached_kernels(node.cache)
    assert all(kernel.usable for kernel in kernels), "prune --unused would remove it"
    cache_tools.remove([kernel for kernel in kernels if kernel.key.arch == "sm_80"], node.cache)


def check_pruned(node: Node) -> None:
    assert 1 <= whole(node.cache) <= 2


def done_pruning(node: Node) -> None:
    (entry,) = kernel_store.entries_in(node.cache)
    assert kernel_store.verified(entry).key.arch == "sm_90a"


def prepare_collecting(node: Node) -> None:
    fill_two(node)
    for place in ("quarantine", "staging"):
        left = node.cache / place / "left"
        left.mkdir(parents=True)
        (left / "executable.so").write_text("damaged")
        os.utime(left, (0, 0))


def collect(node: Node) -> None:
    cache_tools.gc(node.cache)


def check_collected(node: Node) -> None:
    assert whole(node.cache) == 2


def done_collecting(node: Node) -> None:
    assert cache_tools.leftovers(node.cache) == []


TOOLS = (
    Tool("build", fill_two, ship, check_shipped, done_shipping, under="bundle", errors=(OSError, ValueError)),
    Tool("pack", prepare_packing, pack, check_packed, done_packing, under="out"),
    Tool("install", prepare_installing, install, check_installed, done_installing, under="opt"),
    Tool("prune", fill_two, prune, check_pruned, done_pruning, under="cache"),
    Tool("gc", prepare_collecting, collect, check_collected, done_collecting, under="cache", may_leave=True),
)
tools = pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: tool.name)


@tools
def test_a_kill_before_any_call_to_the_disk_is_mended_by_doing_it_again(new_node, tool):
    for n in itertools.count(1):
        node = new_node()
        tool.prepare(node)

        def be_killed(node=node, n=n):
            inject(signal.SIGKILL, under=node.root / tool.under, first=n)
            tool.work(node)

        outcome = node.run(be_killed)
        assert outcome.error is None, outcome.error
        tool.check(node)
        tool.work(node)
        tool.done(node)
        if outcome.signal is None:
            assert n > 5, "it takes more steps than that"
            return


@tools
def test_a_call_to_the_disk_that_fails_is_an_error_that_says_so_or_costs_nothing(new_node, tool):
    for n in itertools.count(1):
        node = new_node()
        tool.prepare(node)

        def work_with_fault(node=node, n=n):
            faults = inject(ERRORS[n % len(ERRORS)], under=node.root / tool.under, first=n, last=n)
            try:
                tool.work(node)
            except tool.errors as raised:
                return faults.hits, str(raised)
            return faults.hits, None

        outcome = node.run(work_with_fault)
        assert outcome.error is None, outcome.error
        hits, error = outcome.answer
        tool.check(node)
        if error is None and not tool.may_leave:
            tool.done(node)
        tool.work(node)
        tool.done(node)
        if not hits:
            assert n > 5, "it takes more steps than that"
            return


def test_what_cannot_be_listed_is_an_error_and_not_left_out_of_a_bundle_file(node):
    prepare_packing(node)

    def pack_blindly():
        (shard, *_) = sorted((node.cache / "kernels").iterdir())
        inject(errno.EACCES, under=shard, functions=("listdir", "scandir"))
        with pytest.raises(EnvironmentUnsuitable, match=f"{shard} cannot be listed: Permission denied"):
            pack(node)
        with pytest.raises(EnvironmentUnsuitable, match=f"cannot be read: Permission denied at {shard}"):
            cache_tools.cached_kernels(node.cache)

    assert node.run(pack_blindly).error is None
    assert (node.root / "out" / "packed.tar.gz").read_text() == "of yesterday"


def test_a_pipe_in_the_place_of_a_manifest_keeps_no_tool_waiting(node):
    fill_two(node)
    entry, _ = kernel_store.entries_in(node.cache)
    (entry / kernel_store.MANIFEST).unlink()
    os.mkfifo(entry / kernel_store.MANIFEST)

    def use_tools():
        usable = sorted(kernel.usable for kernel in cache_tools.cached_kernels(node.cache))
        with pytest.raises(BundleError, match="a kernel is damaged"):
            pack(node)
        return usable, cache_tools.damage(entry)

    usable, why = node.run(use_tools).answer
    assert usable == [False, True]
    assert why.startswith("manifest.json is none of an entry")
