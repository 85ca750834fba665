"""Are the QLA_JIT_* variables read when they are needed, and are bad values named?"""

import dataclasses
import os
import re
from pathlib import Path

import pytest

import qla_jit
from qla_jit.errors import EnvironmentUnsuitable
from qla_jit.settings import VARIABLES, Settings, available_cpus, settings

SOURCES = sorted(Path(qla_jit.__file__).parent.rglob("*.py"))


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch):
    for variable in VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)


def test_defaults():
    assert settings() == Settings(
        mode="lookup", cache_dir=None, bundle_path=(), bundle_keys=(), db_path=(), capture=None, jobs=available_cpus(),
        compile_timeout=600.0, backward_bands=None,
    )


def test_every_field_has_one_variable_and_every_variable_a_meaning_and_a_default():
    assert [variable.field for variable in VARIABLES] == [field.name for field in dataclasses.fields(Settings)]
    assert all(variable.meaning and variable.default for variable in VARIABLES)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("QLA_JIT_MODE", "require", "require"),
        ("QLA_JIT_MODE", " require ", "require"),
        ("QLA_JIT_MODE", "", "lookup"),
        ("QLA_JIT_CACHE_DIR", "/var/cache/qla", Path("/var/cache/qla")),
        ("QLA_JIT_CACHE_DIR", "~/kernels", Path.home() / "kernels"),
        ("QLA_JIT_BUNDLE_PATH", "/a:/b", (Path("/a"), Path("/b"))),
        ("QLA_JIT_DB_PATH", "/a:/b", (Path("/a"), Path("/b"))),
        ("QLA_JIT_CAPTURE", "/a", Path("/a")),
        ("QLA_JIT_JOBS", "3", 3),
        ("QLA_JIT_COMPILE_TIMEOUT", "2.5", 2.5),
        ("QLA_JIT_BACKWARD_BANDS", "3", 3),
    ],
    ids=lambda value: str(value),
)
def test_a_variable_sets_its_field_at_the_next_call(monkeypatch, name, text, value):
    settings()
    monkeypatch.setenv(name, text)
    field = next(variable.field for variable in VARIABLES if variable.name == name)
    assert getattr(settings(), field) == value


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("QLA_JIT_MODE", "fast", "one of lookup, require"),
        ("QLA_JIT_CACHE_DIR", "cache", "an absolute path"),
        ("QLA_JIT_BUNDLE_PATH", "kernels", "absolute paths separated by ':'"),
        ("QLA_JIT_DB_PATH", "/a:b", "absolute paths separated by ':'"),
        ("QLA_JIT_JOBS", "0", "a whole number of at least 1"),
        ("QLA_JIT_JOBS", "two", "a whole number of at least 1"),
        ("QLA_JIT_COMPILE_TIMEOUT", "-1", "a number of seconds above 0"),
        ("QLA_JIT_COMPILE_TIMEOUT", "nan", "a number of seconds above 0"),
        ("QLA_JIT_COMPILE_TIMEOUT", "1 min", "a number of seconds above 0"),
    ],
    ids=lambda value: str(value),
)
def test_a_bad_value_is_named_with_what_was_expected_and_got(monkeypatch, name, text, expected):
    monkeypatch.setenv(name, text)
    with pytest.raises(EnvironmentUnsuitable, match=re.escape(f"{name}: expected {expected}; got {text!r}")):
        settings()


def test_available_cpus_is_at_most_the_affinity_mask():
    assert 1 <= available_cpus() <= len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("files", "cpus"),
    [
        ({"cpu.max": "150000 100000\n"}, 2),
        ({"cpu.max": "max 100000\n"}, 8),
        ({"cpu/cpu.cfs_quota_us": "300000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 3),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 8),
        ({}, 8),
    ],
    ids=["v2-1.5-cpus", "v2-no-limit", "v1-3-cpus", "v1-no-limit", "no-cgroup"],
)
def test_the_cgroup_quota_limits_the_cpus(monkeypatch, files, cpus):
    def read_text(path):
        try:
            return files[str(path.relative_to("/sys/fs/cgroup"))]
        except KeyError:
            raise FileNotFoundError(path) from None

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(Path, "read_text", read_text)
    assert available_cpus.__wrapped__() == cpus


def test_no_other_module_reads_our_variables():
    # os.environ with a QLA_JIT_ name, in any spelling; naming a variable in a message is fine.
    reads = re.compile(r"(environ|getenv)[^\n]*QLA_JIT_")
    assert [path.name for path in SOURCES if path.name != "settings.py" and reads.search(path.read_text())] == []
