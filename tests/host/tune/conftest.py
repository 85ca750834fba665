"""Put the planted strategies in the place of the real ones, and every file in a directory of the test's own."""

import sys
import tempfile
from pathlib import Path

import planted
import pytest

from qla_jit import cache_dir
from qla_jit.ops import plan

PLANTED_WORKER = (sys.executable, str(Path(__file__).with_name("planted.py")))


@pytest.fixture
def strategies(monkeypatch):
    """Those of both operations."""
    for name in ("STRATEGIES", "BACKWARD_STRATEGIES"):
        monkeypatch.setattr(plan, name, planted.STRATEGIES)
    return planted.STRATEGIES


@pytest.fixture(autouse=True)
def own_directories(tmp_path, monkeypatch):
    (tmp_path / "cache").mkdir(mode=0o700)
    (tmp_path / "tmp").mkdir(mode=0o700)
    monkeypatch.setenv("QLA_JIT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    assert cache_dir.refusal(cache_dir.temporary_dir()) is None
