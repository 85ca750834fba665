"""A cache of a test's own, and copies of one real build in the place of the compiler, which takes seconds."""

import shutil
import tempfile

import pytest
import torch
from tiny_template import built

from qla_jit import compiler, kernel_cache, kernel_store
from qla_jit.compiler import ARTEFACTS
from qla_jit.kernel_cache import key_of


def fresh_cache(tmp_path, monkeypatch):
    """An empty cache directory, an own temporary directory, an empty memory: the body of a fixture."""
    path = tmp_path / "cache"
    path.mkdir(mode=0o700)
    monkeypatch.setenv("QLA_JIT_CACHE_DIR", str(path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", None)
    for name in ("QLA_JIT_MODE", "QLA_JIT_JOBS", "QLA_JIT_COMPILE_TIMEOUT", "QLA_JIT_BUNDLE_PATH"):
        monkeypatch.delenv(name, raising=False)
    kernel_cache.clear_memory()
    yield path
    kernel_cache.clear_memory()


def copied_not_compiled(monkeypatch):
    """Put a copy of the real build in the place of the compiler; the list of requests that it was asked for."""
    requests = []
    built()

    def compile_to(directory, request):
        requests.append(request)
        for name in ARTEFACTS:
            shutil.copy(built() / name, directory)

    monkeypatch.setattr(compiler, "compile_to", compile_to)
    return requests


def entry_of(cache, request):
    return kernel_store._entry(cache, key_of(request))


def assert_launches(kernel):
    with pytest.raises(RuntimeError, match="tiny_scale input x device_type mismatch, expected cuda"):
        kernel(torch.ones(3), torch.ones(3), 2.0)
