"""Which directory holds the cache, and is one that others could write to never trusted?"""

import os
import stat
import tempfile
from pathlib import Path

import pytest

from qla_jit.cache_dir import CacheDir, cache_dirs, refusal, temporary_dir, writable_cache_dir


@pytest.fixture(autouse=True)
def places(tmp_path, monkeypatch):
    """The three places, none of them made yet, each under tmp_path."""
    monkeypatch.setenv("QLA_JIT_CACHE_DIR", str(tmp_path / "configured"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    return {
        "configured": tmp_path / "configured",
        "user": tmp_path / "home" / "qla_jit",
        "temporary": tmp_path / "tmp" / f"qla_jit-{os.geteuid()}" / "cache",
    }


def spoil(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("not a directory")


@pytest.mark.parametrize(
    ("spoiled", "used"),
    [
        ((), "configured"),
        (("configured",), "user"),
        (("configured", "user"), "temporary"),
        (("configured", "user", "temporary"), None),
    ],
    ids=lambda value: "+".join(value) or "nothing" if isinstance(value, tuple) else str(value),
)
def test_the_next_place_is_taken_with_one_warning(places, caplog, spoiled, used):
    for name in spoiled:
        spoil(places[name])
    assert writable_cache_dir() == places.get(used)
    assert cache_dirs() == (() if used is None else (CacheDir(places[used], writable=True),))
    assert len(caplog.records) == min(len(spoiled), 1)
    assert all(str(places[name]) in caplog.text for name in spoiled)
    assert ("which may not last" in caplog.text) == (used == "temporary")
    assert ("nothing new is cached on disk" in caplog.text) == (used is None)


def test_a_cache_directory_is_made_for_its_owner_alone(places):
    assert stat.S_IMODE(writable_cache_dir().stat().st_mode) == 0o700


def test_without_the_variable_the_users_cache_directory_is_used_without_a_warning(places, caplog, monkeypatch):
    monkeypatch.delenv("QLA_JIT_CACHE_DIR")
    assert writable_cache_dir() == places["user"]
    assert caplog.text == ""


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777], ids="{:o}".format)
def test_a_directory_that_others_can_write_to_is_refused(tmp_path, mode):
    path = tmp_path / "shared"
    path.mkdir()
    path.chmod(mode)
    assert "can be written by others" in refusal(path)
    path.chmod(0o755)
    assert refusal(path) is None


def test_a_directory_of_another_user_is_refused(tmp_path, monkeypatch):
    (tmp_path / "foreign").mkdir(mode=0o700)
    owner = os.stat(tmp_path / "foreign").st_uid
    if os.geteuid() == 0:
        os.chown(tmp_path / "foreign", 12345, -1)
        owner = 12345
    else:
        monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    assert f"belongs to another user (uid {owner})" in refusal(tmp_path / "foreign")


def test_a_link_may_lead_to_the_cache_but_not_stand_for_the_temporary_directory(tmp_path):
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert refusal(tmp_path / "link") is None
    temporary_dir().symlink_to(tmp_path / "real")
    assert "is not a directory" in refusal(temporary_dir())


def test_a_user_without_a_home_gets_no_directory_called_tilde(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert "is not an absolute path" in refusal(Path("~/.cache/qla_jit"))
    assert not (tmp_path / "~").exists()


def test_a_read_only_directory_is_read_and_the_next_one_written(places, caplog, monkeypatch):
    places["configured"].mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: not (path == places["configured"] and mode & os.W_OK))
    assert cache_dirs() == (CacheDir(places["configured"], writable=False), CacheDir(places["user"], writable=True))
    assert writable_cache_dir() == places["user"]
    assert "configured is read only; new entries are cached in" in caplog.text
