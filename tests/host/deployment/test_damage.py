"""Is whatever stands in the place of an entry either the kernel that was stored, or set aside with one warning?"""

import json
import os
import shutil
from pathlib import Path

import pytest
from node import ask, assert_entries_are_whole, assert_nothing_is_in_staging, assert_served, right

from qla_jit import kernel_cache, kernel_store
from qla_jit.cache_tools import gc
from qla_jit.compiler import ARTEFACTS, EXECUTABLE
from qla_jit.kernel_store import MANIFEST


@pytest.fixture
def entry(node):
    node.fill()
    return node.entry()


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def replace(path, by):
    path.unlink()
    by(path)


DAMAGES = {
    "missing": lambda path: path.unlink(),
    "empty": lambda path: os.truncate(path, 0),
    "truncated": lambda path: os.truncate(path, path.stat().st_size - 1),
    "lengthened": lambda path: path.write_bytes(path.read_bytes() + b"}"),
    "bit-flipped": flip_a_bit,
    "hole": lambda path: os.truncate(path, 1 << 40),                     # a terabyte that nobody should try to read
    "pipe": lambda path: replace(path, os.mkfifo),                       # nobody will ever write to it
    "directory": lambda path: replace(path, os.mkdir),
    "dangling-link": lambda path: replace(path, lambda path: path.symlink_to("/nowhere")),
    "device": lambda path: replace(path, lambda path: path.symlink_to("/dev/zero")),
}


def assert_healed(node):
    """The damage costs a warning and a compilation, nobody else notices, and nothing is thrown away."""
    outcome = node.run(ask)
    assert_served(outcome, warnings=1, compiles=1)
    assert "a cached kernel is damaged" in outcome.warnings[0]
    assert len(list(node.cache.glob("quarantine/*"))) == 1
    assert_served(node.run(ask), compiles=0)
    assert_entries_are_whole(node)
    assert_nothing_is_in_staging(node)


@pytest.mark.parametrize("file", [EXECUTABLE, MANIFEST])
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_file_that_is_not_what_was_stored_is_found(node, entry, file, damage):
    damage(entry / file)
    assert_healed(node)


@pytest.mark.parametrize("file", [EXECUTABLE, MANIFEST])
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damage_in_a_bundle_is_passed_over_and_where_nothing_may_be_compiled_is_a_miss(node, entry, file, damage):
    bundle = node.root / "bundle"
    bundle.mkdir(mode=0o755)
    (node.cache / "kernels").rename(bundle / "kernels")
    damage(bundle / entry.relative_to(node.cache) / file)
    node.environment |= {"QLA_JIT_BUNDLE_PATH": str(bundle), "QLA_JIT_MODE": "require"}
    outcome = node.run(ask)
    assert outcome.error.startswith("KernelNotCachedError")
    assert len(outcome.warnings) == 1
    assert "a prebuilt kernel is damaged and is passed over" in outcome.warnings[0]
    node.environment["QLA_JIT_MODE"] = "lookup"
    assert_served(node.run(ask), warnings=1, compiles=1)
    assert_served(node.run(ask), compiles=0)


@pytest.mark.parametrize("file", [name for name in ARTEFACTS if name != EXECUTABLE])
def test_every_file_of_an_entry_is_checked(node, entry, file):
    flip_a_bit(entry / file)
    assert_healed(node)


GARBAGE = (
    b"", b"null", b"[]", b"{}", b"\x00" * 100, b"\xff\xfe{}", b"[" * 100_000, b"9" * 5_000, b'{"key": ' * 10_000,
    b'{"key": {}, "files": {}}',
)


@pytest.mark.parametrize("text", GARBAGE, ids=lambda text: f"{len(text)}-bytes-{text[:8]!r}")
def test_a_manifest_that_is_garbage_is_damage(node, entry, text):
    (entry / MANIFEST).write_bytes(text)
    assert_healed(node)


STAMPS = {name: {"size": 0, "sha256": "0" * 64} for name in ARTEFACTS}
PROMISES = {
    "no-files": {"files": {}},
    "one-file": {"files": {EXECUTABLE: STAMPS[EXECUTABLE]}},
    "file-outside": {"files": {**STAMPS, "../../../../secret": {"size": 0, "sha256": ""}}},
    "negative-size": {"files": {**STAMPS, EXECUTABLE: {"size": -1, "sha256": "0" * 64}}},
    "exabytes": {"files": {name: {"size": 1 << 62, "sha256": "0" * 64} for name in ARTEFACTS}},
    "no-key": {"key": None},
    "unknown-field": {"command": "rm"},
}


@pytest.mark.parametrize("promise", PROMISES.values(), ids=PROMISES)
def test_a_manifest_that_promises_something_else_is_damage(node, entry, promise):
    manifest = json.loads((entry / MANIFEST).read_text())
    (entry / MANIFEST).write_text(json.dumps({**manifest, **promise}))
    assert_healed(node)


def test_an_entry_of_another_kernel_is_damage(node):
    assert_served(node.run(lambda: ask(32, 64)), threads=(32, 64))
    shutil.rmtree(node.entry(64))
    shutil.copytree(node.entry(32), node.entry(64))
    assert_healed(node)


FOREIGN = {
    "file": Path.touch,
    "pipe": os.mkfifo,
    "empty-directory": os.mkdir,
    "dangling-link": lambda path: path.symlink_to("/nowhere"),
}


@pytest.mark.parametrize("make", FOREIGN.values(), ids=FOREIGN)
def test_what_stands_in_the_place_of_an_entry_is_set_aside_and_then_removed(node, entry, make):
    shutil.rmtree(entry)
    make(entry)
    assert_healed(node)
    assert len(gc(node.cache)) == 1
    assert list(node.cache.glob("quarantine/*")) == []


def test_files_that_do_not_belong_to_an_entry_are_ignored(node, entry):
    (entry / ".nfs0000000000a1").write_text("a file that is open elsewhere")
    (entry / "notes").mkdir()
    assert_served(node.run(ask), compiles=0)


@pytest.mark.parametrize("place", ["kernels", "staging", "quarantine", "logs"])
def test_a_file_in_the_place_of_a_part_of_the_cache_costs_a_warning(node, place):
    node.cache.mkdir(mode=0o700)
    (node.cache / place).write_text("in the way")
    outcome = node.run(lambda: ask(32, 64))
    assert_served(outcome, threads=(32, 64), warnings=1)
    assert (node.cache / place).read_text() == "in the way"


def test_a_damaged_entry_that_cannot_be_set_aside_warns_once_and_is_not_used(node, entry):
    (entry / MANIFEST).write_text("{}")
    (node.cache / "quarantine").write_text("in the way")
    outcome = node.run(ask)
    assert_served(outcome, warnings=1, compiles=1)
    assert (entry / MANIFEST).read_text() == "{}"


def test_a_cache_whose_files_may_not_be_run_is_used_through_a_copy(node, entry, monkeypatch):
    real = kernel_store.load

    def load(directory, *, digest):
        if directory.is_relative_to(node.cache):
            raise RuntimeError("failed to map segment from shared object: Operation not permitted")
        return real(directory, digest=digest)

    monkeypatch.setattr(kernel_store, "load", load)
    monkeypatch.setattr(kernel_cache, "load", load)
    assert_served(node.run(ask), compiles=0)
    new = node.run(lambda: ask(32))
    assert_served(new, threads=(32,), compiles=1)
    assert new.answer == right(32)
    assert_served(node.run(lambda: ask(32, 64)), threads=(32, 64), compiles=0)
    assert not (node.cache / "quarantine").exists()
    assert list(node.tmp.glob("qla_jit-load-*")) == []
