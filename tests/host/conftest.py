"""Run qla-tune in the process of a test; a cache of its own, and copies of one real build in the place of the compiler."""

import json
import shutil
import sys
import tempfile

import pytest
from tiny_template import built

from qla_jit import cli, compiler, kernel_cache
from qla_jit.compiler import ARTEFACTS


@pytest.fixture
def run(capsys, monkeypatch):
    """Run qla-tune; its exit code and what it prints, decoded where it is asked for JSON."""

    def run(*words, code=0):
        monkeypatch.setattr(sys, "argv", ["qla-tune", *map(str, words)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        assert ended.value.code == code, err
        return json.loads(out) if "--json" in words and code not in (2, 5, 6, 8) else out + err

    return run


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache directory, an own temporary directory, an empty memory."""
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


@pytest.fixture
def compiled(monkeypatch):
    """Put a copy of the real build in the place of the compiler; the list of requests that it was asked for."""
    requests = []
    built()

    def compile_to(directory, request):
        requests.append(request)
        for name in ARTEFACTS:
            shutil.copy(built() / name, directory)

    monkeypatch.setattr(compiler, "compile_to", compile_to)
    return requests
