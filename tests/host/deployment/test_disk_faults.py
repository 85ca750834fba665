"""Does a disk that fails cost more than a warning? Every call that touches it is made to fail, in every way.

A fault passes (one call fails, the next is served) or lasts (every call of one function fails).
"""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from faults import inject
from node import Node, Outcome, ask, assert_entries_are_whole, assert_nothing_is_in_staging, assert_served

from qla_jit import compiler, kernel_store

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


def warm(node: Node) -> None:
    assert_served(node.run(ask), compiles=1)


def damaged(node: Node) -> None:
    warm(node)
    os.truncate(node.entry() / compiler.EXECUTABLE, 3)


def require(node: Node) -> None:
    warm(node)
    node.environment["QLA_JIT_MODE"] = "require"


def no_nvcc(node: Node) -> None:
    warm(node)
    node.environment["CUDA_HOME"] = "/nowhere"


def bundle(node: Node) -> None:
    warm(node)
    (node.root / "bundle").mkdir(mode=0o755)
    (node.cache / "kernels").rename(node.root / "bundle" / "kernels")
    node.environment["QLA_JIT_BUNDLE_PATH"] = str(node.root / "bundle")


SCENARIOS = (
    Scenario("empty", lambda node: None, compiles=1),
    Scenario("warm", warm),
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
    assert_served(node.run(ask), compiles=None if scenario.compiles else 0)
    assert_served(node.run(ask), compiles=0)


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


def survive_a_fault_that_lasts(new_node: Callable[[], Node], scenario: Scenario, error_of: Callable[[int], int]) -> None:
    """Let every call of one function fail, then in another world of the next."""
    _, calls, _ = ask_with_fault(new_node(), scenario, errno.EIO, first=NEVER)
    for n, function in enumerate(sorted({call.split()[0] for call in calls})):
        node = new_node()
        outcome, _, hits = ask_with_fault(node, scenario, error_of(n), functions=(function,))
        assert hits > 0
        try:
            if outcome.error is not None and not scenario.may_compile:
                assert outcome.error.startswith(("KernelNotCachedError", "EnvironmentUnsuitable"))
            else:
                assert_served(outcome, warnings=1 + scenario.damaged)
            if function not in REMOVAL:
                assert_nothing_is_in_staging(node)
            if scenario.damaged and (node.entry() / kernel_store.MANIFEST).exists():
                assert_served(node.run(ask), warnings=1)     # it could not be set aside before
            assert_nothing_is_lost(node, scenario)
        except AssertionError as failure:
            raise AssertionError(f"{errno.errorcode[error_of(n)]} always came from {function}: {failure}") from failure


def in_turn(n: int) -> int:
    return ERRORS[n % len(ERRORS)]


@scenarios
def test_a_fault_that_passes_changes_nothing(new_node, scenario):
    survive_a_fault_that_passes(new_node, scenario, in_turn)


@scenarios
def test_a_fault_that_lasts_costs_a_warning_and_a_compilation(new_node, scenario):
    survive_a_fault_that_lasts(new_node, scenario, in_turn)


@pytest.mark.slow
@errors
@scenarios
def test_every_fault_that_passes_or_lasts(new_node, scenario, error):
    survive_a_fault_that_passes(new_node, scenario, lambda n: error)
    survive_a_fault_that_lasts(new_node, scenario, lambda n: error)
