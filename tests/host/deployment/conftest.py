"""A machine for each test, whose compiler is a stand-in."""

import itertools

import pytest
from node import Node, install_compiler

from qla_jit import kernel_cache


@pytest.fixture
def new_node(tmp_path, monkeypatch):
    """A function that makes machines."""
    for name in ("QLA_JIT_MODE", "QLA_JIT_JOBS", "QLA_JIT_COMPILE_TIMEOUT", "QLA_JIT_BUNDLE_PATH", "QLA_JIT_DB_PATH"):
        monkeypatch.delenv(name, raising=False)
    install_compiler(tmp_path / "toolchain", monkeypatch)
    kernel_cache.clear_memory()          # so that the processes, which are forked, begin with an empty one
    count = itertools.count()
    return lambda: Node(tmp_path / f"node{next(count)}")


@pytest.fixture
def node(new_node):
    return new_node()
