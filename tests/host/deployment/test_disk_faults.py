"""Does a disk that fails cost more than a warning? Every call that touches it is made to fail, in every way.

A fault passes (one call fails, the next is served) or lasts (every call of one function fails).
"""

from __future__ import annotations

import errno
import itertools
import os
import resource
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from faults import inject
from node import Node, Outcome, ask, ask_twice, assert_entries_are_whole, assert_nothing_is_in_staging, assert_served, right

from qla_jit import compiler, kernel_store
from qla_jit.errors import CompileError

ERRORS = (errno.ENOSPC, errno.EXDEV, errno.EBUSY, errno.ESTALE, errno.ENOLCK, errno.EIO, errno.EROFS, errno.EACCES)
REMOVAL = {"lstat", "open", "rmdir", "scandir", "unlink"}        # what shutil.rmtree needs
NEVER = 1 << 30                          # the number of a call that is not made


@dataclass(frozen=True)
class Scenario:
    """What is on the disk when a process asks."""

    name: str
    prepare: Callable[[Node], None]
    under: str = "cache"                 # the directory whose calls fail
    compiles: int = 0                    # of the process that asks, also while a fault passes
    damaged: int = 0                     # entries, each of which costs a warning without any fault
    may_compile: bool = True             # otherwise a fault that lasts may be an error


def damaged(node: Node) -> None:
    node.fill()
    os.truncate(node.entry() / compiler.EXECUTABLE, 3)


def require(node: Node) -> None:
    node.fill()
    node.environment["QLA_JIT_MODE"] = "require"


def no_nvcc(node: Node) -> None:
    node.fill()
    node.environment["CUDA_HOME"] = "/nowhere"


def bundle(node: Node) -> None:
    node.fill()
    (node.root / "bundle").mkdir(mode=0o755)
    (node.cache / "kernels").rename(node.root / "bundle" / "kernels")
    node.environment["QLA_JIT_BUNDLE_PATH"] = str(node.root / "bundle")


SCENARIOS = (
    Scenario("empty", lambda node: None, compiles=1),
    Scenario("warm", Node.fill),
    Scenario("damaged", damaged, compiles=1, damaged=1),
    Scenario("require", require, may_compile=False),
    Scenario("no-nvcc", no_nvcc, may_compile=False),
    Scenario("bundle", bundle, under="bundle"),
    Scenario("locks", lambda node: None, under=f"tmp/qla_jit-{os.geteuid()}", compiles=1),
)
scenarios = pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
errors = pytest.mark.parametrize("error", ERRORS, ids=errno.errorcode.get)


def ask_with_fault(node: Node, scenario: Scenario, error: int, **which: Any) -> tuple[Outcome, list[str], int]:
    """How it ended, which calls touched the disk, and how many of them failed."""
    scenario.prepare(node)
    seen = node.root / "seen"

    def asking() -> list[str]:
        faults = inject(error, under=node.root / scenario.under, **which)
        try:
            return ask()
        finally:
            seen.write_text("\n".join([str(faults.hits), *faults.calls]))

    outcome = node.run(asking)
    hits, *calls = seen.read_text().splitlines()
    return outcome, calls, int(hits)


def assert_nothing_is_lost(node: Node, scenario: Scenario) -> None:
    """What was there before the fault is still there, and once the disk is well everything is as if nothing had been."""
    node.environment.pop("QLA_JIT_MODE", None)
    assert_entries_are_whole(node)
    outcome = node.run(ask_twice)
    assert_served(outcome)
    assert outcome.compiles <= scenario.compiles


def survive_a_fault_that_passes(new_node: Callable[[], Node], scenario: Scenario, error_of: Callable[[int], int]) -> None:
    """Let the first call fail, then in another world the second, and so on."""
    for n in itertools.count(1):
        node = new_node()
        outcome, calls, hits = ask_with_fault(node, scenario, error_of(n), first=n, last=n)
        if not hits:
            assert n > 5, f"only {calls} touched the disk"
            return
        try:
            assert_served(outcome, warnings=1, compiles=scenario.compiles)
            assert_nothing_is_in_staging(node)
            assert_nothing_is_lost(node, scenario)
        except AssertionError as failure:
            raise AssertionError(f"{errno.errorcode[error_of(n)]} came from {calls[n - 1]}: {failure}") from failure


def survive_a_fault_that_lasts(node: Node, scenario: Scenario, function: str, error: int) -> None:
    """Let every call of a function fail."""
    outcome, _, hits = ask_with_fault(node, scenario, error, functions=(function,))
    assert hits > 0
    try:
        if outcome.error is not None and not scenario.may_compile:
            assert outcome.error.startswith(("KernelNotCachedError", "EnvironmentUnsuitable"))
        else:
            assert_served(outcome, warnings=1 + scenario.damaged)
        if function not in REMOVAL:
            assert_nothing_is_in_staging(node)
        if scenario.damaged and (node.entry() / kernel_store.MANIFEST).exists():
            assert_served(node.run(ask), warnings=1)         # it could not be set aside before
        assert_nothing_is_lost(node, scenario)
    except AssertionError as failure:
        raise AssertionError(f"{errno.errorcode[error]} always came from {function}: {failure}") from failure


def functions_called(node: Node, scenario: Scenario) -> list[str]:
    _, calls, _ = ask_with_fault(node, scenario, errno.EIO, first=NEVER)
    return sorted({call.split()[0] for call in calls})


def in_turn(n: int) -> int:
    return ERRORS[n % len(ERRORS)]


@scenarios
def test_a_fault_that_passes_changes_nothing(new_node, scenario):
    survive_a_fault_that_passes(new_node, scenario, in_turn)


@scenarios
def test_a_fault_that_lasts_costs_a_warning_and_a_compilation(new_node, scenario):
    for n, function in enumerate(functions_called(new_node(), scenario)):
        survive_a_fault_that_lasts(new_node(), scenario, function, in_turn(n))


@errors
@pytest.mark.parametrize(("name", "function"), [("locks", "flock"), ("empty", "mkdir"), ("empty", "fsync"), ("empty", "rename")])
def test_publishing_survives_every_error(node, name, function, error):
    (scenario,) = (scenario for scenario in SCENARIOS if scenario.name == name)
    survive_a_fault_that_lasts(node, scenario, function, error)


@pytest.mark.slow
@errors
@scenarios
def test_every_fault_that_passes_or_lasts(new_node, scenario, error):
    survive_a_fault_that_passes(new_node, scenario, lambda n: error)
    for function in functions_called(new_node(), scenario):
        survive_a_fault_that_lasts(new_node(), scenario, function, error)


# Faults that are not one call's.


@pytest.mark.parametrize("room", [0, 10, 500], ids=lambda room: f"{room}-bytes")
def test_a_disk_that_fills_up_while_an_entry_is_written_keeps_none(node, room):
    def ask_with_room():
        store, no_limit = kernel_store.store, resource.getrlimit(resource.RLIMIT_FSIZE)

        def store_with_room(*args):
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, no_limit[1]))           # a write beyond it is cut short, then fails
            try:
                return store(*args)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, no_limit)

        kernel_store.store = store_with_room
        return ask(32) + ask(64)

    outcome = node.run(ask_with_room)
    assert_served(outcome, threads=(32, 64), warnings=1, compiles=2)
    assert "compiled kernels cannot be kept" in outcome.warnings[0]
    assert node.entries() == []
    assert_nothing_is_in_staging(node)
    assert_served(node.run(ask), compiles=1)


def test_a_temporary_directory_that_fails_is_an_error_of_the_call_and_harms_no_other(new_node):
    for n in itertools.count(1):
        node = new_node()

        def ask_twice(node=node, n=n):
            faults = inject(in_turn(n), under=node.tmp, first=n, last=n)
            try:
                first = ask()
            except CompileError as error:
                first = str(error)
            return first, ask(), faults.hits

        outcome = node.run(ask_twice)
        assert outcome.error is None, outcome.error
        first, second, hits = outcome.answer
        assert first == right() or "could not be compiled" in first or "cannot be loaded" in first
        assert second == right()
        assert len(outcome.warnings) <= 1
        assert_entries_are_whole(node)
        if not hits:
            assert n > 20, "a build takes more calls than that"
            return


@pytest.mark.parametrize("error", [errno.EROFS, errno.ENOSPC], ids=errno.errorcode.get)
def test_without_a_temporary_directory_kernels_are_built_in_the_cache(node, error):
    def ask_without_temporary():
        inject(error, under=node.tmp)
        return ask()

    assert_served(node.run(ask_without_temporary), compiles=1)
    assert list(node.cache.glob("qla_jit-build-*")) == []
    assert_served(node.run(ask), compiles=0)


def read_only(node):
    inject(errno.EROFS, under=node.root, functions=("mkdir", "rename", "rmdir", "unlink"))
    inject(errno.EROFS, under=node.tmp)
    inject(errno.EROFS, under=Path(f"/tmp/qla_jit-{os.geteuid()}"))


def test_a_bundle_serves_where_nothing_can_be_written(node):
    bundle(node)
    shutil.rmtree(node.cache)
    node.environment |= {"QLA_JIT_MODE": "require", "CUDA_HOME": "/nowhere"}

    def ask_read_only():
        read_only(node)
        return ask()

    outcome = node.run(ask_read_only)
    assert_served(outcome, warnings=1, compiles=0)
    assert "nothing new is cached on disk" in outcome.warnings[0]


def test_where_nothing_can_be_written_and_nothing_is_built_the_error_says_what_to_do(node):
    def ask_read_only():
        read_only(node)
        return ask()

    outcome = node.run(ask_read_only)
    assert outcome.error.startswith("EnvironmentUnsuitable: compiling a kernel needs a directory to work in")
    assert len(outcome.warnings) == 1


@pytest.mark.parametrize("prepare", [lambda node: None, Node.fill], ids=["its-own", "a-winner's"])
def test_an_entry_that_was_published_and_stays_invisible_costs_no_warning(node, prepare):
    prepare(node)

    def ask_blindly():
        inject(errno.ENOENT, under=node.entry())
        return ask()

    assert_served(node.run(ask_blindly), compiles=1)
    assert_nothing_is_in_staging(node)
    assert_served(node.run(ask), compiles=0)


def test_a_rename_that_happened_and_is_reported_as_failed_costs_no_warning(node):
    """As on NFS, when the answer of the server is lost and the client asks again."""

    def ask_with_a_lost_answer():
        rename = os.rename

        def rename_and_fail(source, target):
            rename(source, target)
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), source)

        os.rename = rename_and_fail
        return ask()

    assert_served(node.run(ask_with_a_lost_answer), compiles=1)
    assert_nothing_is_in_staging(node)
    assert_served(node.run(ask), compiles=0)


def test_too_many_open_files_are_an_error_of_the_call_and_harm_no_other(node):
    def ask_with_few_descriptors():
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        os.close(free := os.open(os.devnull, os.O_RDONLY))
        resource.setrlimit(resource.RLIMIT_NOFILE, (free + 1, hard))         # enough to look for an entry, not to compile
        with pytest.raises(CompileError, match="Too many open files"):
            ask()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        return ask()

    assert_served(node.run(ask_with_few_descriptors), compiles=1)
    assert_nothing_is_in_staging(node)
