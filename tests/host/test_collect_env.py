"""Does the report for bug reports come out of healthy and broken installations alike?"""

import os
import re
import subprocess
import sys

import pytest

from qla_jit import collect_env, device
from qla_jit.collect_env import PACKAGES, report
from qla_jit.settings import VARIABLES


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    for variable in VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)
    monkeypatch.setenv("QLA_JIT_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def facts():
    """The report as a dictionary, of the facts that take one line."""
    return dict(re.split("  +", line, maxsplit=1) for line in report().splitlines() if not line.startswith(" "))


def test_every_package_and_setting_has_a_line():
    names = facts()
    assert set(names) >= {*PACKAGES, *(variable.name for variable in VARIABLES), "python", "nvcc", "driver", "GPUs", "cache"}
    assert names["QLA_JIT_MODE"] == "default: lookup"


def test_the_cache_is_described(cache):
    (cache / "kernels" / "ab" / "abcd" / "nvcc-13.0.88").mkdir(parents=True)
    (cache / "kernels" / "ab" / "abcd" / "nvcc-13.0.88" / "manifest.json").touch()
    cache.chmod(0o700)
    assert facts()["cache"] == f"{cache}: writable, 1 kernels, 0 in quarantine"


def test_bundles_are_listed_with_why_they_are_not_used(tmp_path, monkeypatch):
    assert facts()["bundles"] == "none"
    (tmp_path / "bundle").mkdir(mode=0o755)
    monkeypatch.setenv("QLA_JIT_BUNDLE_PATH", f"{tmp_path / 'bundle'}:{tmp_path / 'missing'}")
    assert collect_env._bundles().splitlines() == [
        f"{tmp_path / 'bundle'}: 0 kernels", f"not used: {tmp_path / 'missing'} cannot be used: No such file or directory",
    ]


def test_a_bad_setting_is_reported_and_does_not_end_the_report(monkeypatch):
    monkeypatch.setenv("QLA_JIT_JOBS", "many")
    names = facts()
    assert "expected a whole number of at least 1; got 'many'" in names["QLA_JIT_JOBS"]
    assert names["QLA_JIT_MODE"] == "default: lookup"


def test_an_unsupported_gpu_is_listed_beside_the_others(monkeypatch):
    def gpu_info(which):
        if which.index == 1:
            raise device.UnsupportedError("no kernel is written for compute capability 7.0")
        return "an H200"

    monkeypatch.setattr(device, "gpu_count", lambda: 2)
    monkeypatch.setattr(device, "gpu_info", gpu_info)
    assert collect_env._gpus() == "0: an H200\n1: unknown: UnsupportedError: no kernel is written for compute capability 7.0"


def test_it_runs_as_a_program_where_there_are_no_tools(tmp_path):
    environment = {**os.environ, "PATH": "/nowhere", "CUDA_HOME": "/nowhere", "QLA_JIT_COMPILE_TIMEOUT": "5"}
    python = [sys.executable, "-m", "qla_jit.collect_env"]
    run = subprocess.run(python, env=environment, cwd=tmp_path, stdout=subprocess.PIPE, text=True, check=True)
    lines = run.stdout.splitlines()
    assert any(line.split() == ["nvcc", "not", "found"] for line in lines)
    assert any("there is no nvidia-smi" in line for line in lines)
    assert any(line.split() == ["QLA_JIT_COMPILE_TIMEOUT", "set:", "5.0"] for line in lines)
