"""Do the verbs that ship kernels and look after them do what they say, and leave the rest alone?"""

import json
import os
import shutil
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait

import pytest
import records
import torch
from entries import KEY, put
from tiny_template import built, needs_nvcc, request

from qla_jit import bundle, cache_dir, cache_tools, compiler, doctor, kernel_store, record_store, tuning_db
from qla_jit.bundle import Built
from qla_jit.doctor import Finding
from qla_jit.kernel_cache import key_of
from qla_jit.tuning_records import load, save_directory

DAY = 86400


@pytest.fixture(autouse=True)
def places(tmp_path, monkeypatch):
    """An empty cache under tmp_path; no bundles, no records."""
    (tmp_path / "cache").mkdir(mode=0o700)
    monkeypatch.setenv("QLA_JIT_CACHE_DIR", str(tmp_path / "cache"))
    for name in ("QLA_JIT_DB_PATH", "QLA_JIT_BUNDLE_PATH", "QLA_JIT_BUNDLE_KEYS", "QLA_JIT_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(tuning_db, "__path__", [str(tmp_path / "shipped")])
    yield tmp_path
    record_store._open.cache_clear()


@pytest.fixture
def cache(places):
    return places / "cache"


def age(entry, days):
    os.utime(entry, (time.time() - days * DAY,) * 2)
    return entry


# build, pack, install


def test_the_records_that_calls_will_ask_go_into_the_bundle_and_no_others(run, places, monkeypatch):
    def build(requests, directory, *, on_kernel):
        put(directory)
        return Built(len(requests), 1000, 2.5, ())

    monkeypatch.setattr(bundle, "build", build)
    mine, packed = records.record(), records.record(problem=records.problem().model_copy(update={"varlen": True}))
    save_directory(places / "shipped", [records.record(days=1)])         # hidden by mine
    record_store.save_user_records([mine, packed, records.record(problem=records.problem(H=16, HV=48))])
    options = ("--arch", "sm_90a", "--sm-count", 132, "--heads", "2:8", "--out", places / "out", "--json")
    assert run("build", *options, "--not-packed")["records"] == 1
    (file,) = (places / "out" / "records").iterdir()
    assert load(file) == [mine]
    assert file.stat().st_mode & 0o777 == 0o644
    shutil.rmtree(places / "out" / "kernels")
    run("build", *options, "--packed")
    assert load(file) == [mine, packed]          # a second build into the same directory adds


def test_a_bundle_goes_from_one_machine_to_another_as_one_file(run, places, monkeypatch):
    put(places / "built")
    told = run("pack", places / "built", "--out", places / "b.tgz", "--json")
    assert (told["kernels"], told["record_files"], told["arch"], told["signed"]) == (1, 0, ["sm_90a"], False)
    assert told["bytes"] == (places / "b.tgz").stat().st_size
    run("install", places / "b.tgz", "--into", places / "server", code=4)
    told = run("install", places / "b.tgz", "--into", places / "server", "--allow-unsigned", "--json")
    assert (told["usable"], told["was_there"], told["directory"]) == (1, False, str(places / "server"))
    assert "arch: sm_90a\n" in run("install", places / "b.tgz", "--into", places / "server", "--allow-unsigned")
    monkeypatch.setenv("QLA_JIT_BUNDLE_PATH", str(places / "server"))
    assert [row["directory"] for row in run("cache", "ls", "--json")] == [str(places / "server")]


def test_keys_of_the_environment_hold_unless_others_are_given(run, places, monkeypatch):
    pytest.importorskip("cryptography", reason="signatures need the optional package cryptography")
    from test_bundle_file import key_pair

    (private, public), (_, other) = key_pair(places, "ours"), key_pair(places, "theirs")
    put(places / "built")
    run("pack", places / "built", "--out", places / "b.tgz", "--sign", private)
    monkeypatch.setenv("QLA_JIT_BUNDLE_KEYS", str(other))
    assert "of none of the public keys" in run("install", places / "b.tgz", "--into", places / "server", code=4)
    run("install", places / "b.tgz", "--into", places / "server", "--public-key", public)
    monkeypatch.setenv("QLA_JIT_BUNDLE_KEYS", f"{other}:{public}")
    run("install", places / "b.tgz", "--into", places / "server")


def test_a_file_that_cannot_be_packed_or_found_exits_with_its_reason(run, places):
    assert "there are none; qla-tune build makes them" in run("pack", places, "--out", places / "b.tgz", code=4)
    assert "No such file" in run("install", places / "b.tgz", "--into", places / "x", "--allow-unsigned", code=5)


# doctor


def test_doctor_fails_on_a_bundle_that_is_empty_not_trusted_or_of_other_versions(places, monkeypatch):
    bundle = places / "bundle"
    assert doctor._bundles("bundles") == Finding("bundles", "ok", "QLA_JIT_BUNDLE_PATH is not set")
    monkeypatch.setenv("QLA_JIT_BUNDLE_PATH", str(bundle))
    assert "No such file or directory" in doctor._bundles("bundles").found
    bundle.mkdir()
    for changes, status, told in (
        (None, "failed", "0 of 0"), ({"tilelang": "0.0.1"}, "failed", "0 of 1"), ({}, "ok", "1 of 2"),
    ):
        if changes is not None:
            put(bundle, **changes)
        cache_dir._trusted.cache_clear()
        found = doctor._bundles("bundles")
        assert (found.status, found.found) == (status, f"{told} kernels in {bundle} are for these versions")


def test_doctor_needs_no_place_to_write_where_nothing_is_compiled(monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    monkeypatch.setenv("TMPDIR", "/nowhere")
    monkeypatch.setenv("QLA_JIT_MODE", "require")
    version = compiler.tilelang_version()
    assert doctor._tilelang("tilelang") == Finding("tilelang", "ok", f"the run-time library of {version} loads")
    monkeypatch.setattr(doctor.sys, "executable", "/bin/false")
    assert doctor._tilelang("tilelang").status == "failed"


# cache


def test_ls_has_a_row_for_each_kernel_of_caches_and_bundles(run, places, cache, monkeypatch):
    age(put(cache), 3)
    put(cache, tilelang="0.0.1", arch="sm_80")
    broken = put(cache, nvcc="12.8.93")
    (broken / "manifest.json").write_text("{")
    bundle = put(places / "bundle").parents[3]
    monkeypatch.setenv("QLA_JIT_BUNDLE_PATH", str(bundle))
    rows = {row["path"]: row for row in run("cache", "ls", "--json")}
    row = rows[str(kernel_store._entry(cache, KEY))]
    assert {name: row[name] for name in ("template", "arch", "nvcc", "problem", "config", "age", "usable")} == {
        "template": "l2norm", "arch": "sm_90a", "nvcc": "13.0.88", "problem": "K=128 dtype=bfloat16", "config": "threads=64",
        "age": "3d", "usable": "yes",
    }
    assert 2.9 * DAY < row["age_seconds"] < 3.1 * DAY
    assert row["bytes"] == sum(file.stat().st_size for file in kernel_store._entry(cache, KEY).iterdir())
    assert sorted((row["template"], row["usable"]) for row in rows.values()) == [
        ("l2norm", "no"), ("l2norm", "yes"), ("l2norm", "yes"), ("unreadable", "no"),
    ]
    assert "K=128 dtype=bfloat16" in run("cache", "ls")
    assert [row["directory"] for row in run("cache", "ls", "--json", "--dir", bundle)] == [str(bundle)]
    run("cache", "ls", "--dir", places / "missing", code=2)


def test_du_counts_every_part(run, cache):
    put(cache)
    (cache / "logs").mkdir()
    (cache / "logs" / "a.log").write_text("12345")
    used = {row["part"]: (row["files"], row["bytes"]) for row in run("cache", "du", "--json")}
    assert used["logs"] == (1, 5)
    assert used["kernels"] == (5, cache_tools.cached_kernels(cache)[0].bytes)
    assert used["quarantine"] == (0, 0)


@pytest.mark.parametrize("name", ["executable.so", "device.cu", "manifest.json", "the-entry's-place"])
def test_verify_exits_with_4_and_names_what_is_damaged(run, cache, name):
    put(cache)
    entry = put(cache, arch="sm_80")
    assert run("cache", "verify", "--json") == {"kernels": 2, "damaged": []}
    if name in ("executable.so", "device.cu", "manifest.json"):
        (entry / name).write_bytes((entry / name).read_bytes()[:-1])
    else:
        entry = entry.rename(entry.with_name("nvcc-99.0"))
    (damaged,) = run("cache", "verify", "--json", code=4)["damaged"]
    assert damaged["path"] == str(entry)
    text = run("cache", "verify", code=4)
    assert f"damaged: {entry}" in text
    assert "1 of 2 kernels are whole" in text


@pytest.mark.parametrize(
    ("options", "left"),
    [
        (("--older-than", "30d"), ["new", "other-arch", "unusable"]),
        (("--arch", "sm_80"), ["new", "old", "unusable"]),
        (("--template", "l2norm"), []),
        (("--template", "state_scan"), ["new", "old", "other-arch", "unusable"]),
        (("--unused",), ["new", "old", "other-arch"]),
        (("--older-than", "30d", "--unused"), ["new", "old", "other-arch", "unusable"]),
        (("--older-than", "30d", "--arch", "sm_90a"), ["new", "other-arch", "unusable"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_prune_removes_what_all_of_its_options_name(run, cache, options, left):
    entries = {
        "new": put(cache), "old": age(put(cache, config={"threads": 32}), 40), "other-arch": put(cache, arch="sm_80"),
        "unusable": put(cache, template_sha256="0" * 64),
    }
    would = run("cache", "prune", *options, "--dry-run", "--json")
    assert all(entry.exists() for entry in entries.values())
    done = run("cache", "prune", *options, "--json")
    assert done["removed"] == would["removed"]
    assert sorted(name for name, entry in entries.items() if entry.exists()) == left
    assert sorted(done["removed"]) == sorted(str(entry) for name, entry in entries.items() if name not in left)
    assert list((cache / "staging").glob("*")) == []


def test_prune_of_everything_must_be_said(run, cache):
    entry = put(cache)
    assert "what to remove must be given" in run("cache", "prune", code=2)
    run("cache", "prune", "--older-than", "soon", code=2)
    assert entry.exists()


def test_prune_leaves_bundles_alone_unless_they_are_named(run, places, monkeypatch):
    entry = put(places / "bundle")
    monkeypatch.setenv("QLA_JIT_BUNDLE_PATH", str(places / "bundle"))
    run("cache", "prune", "--template", "l2norm")
    assert entry.exists()
    run("cache", "prune", "--template", "l2norm", "--dir", places / "bundle")
    assert not entry.exists()
    assert [path.name for path in (places / "bundle").iterdir()] == ["kernels"]


def test_two_that_prune_at_the_same_time_remove_each_kernel_once(cache):
    put(cache)
    put(cache, arch="sm_80")
    kernels = cache_tools.cached_kernels(cache)
    assert len(cache_tools.remove(kernels[:1], cache)) == 1
    assert [removed.path for removed in cache_tools.remove(kernels, cache)] == [kernels[1].path]


def test_a_reader_that_was_overtaken_by_prune_sees_no_damage(cache):
    put(cache)
    (kernel,) = cache_tools.cached_kernels(cache)
    cache_tools.remove([kernel], cache)
    assert cache_tools.damage(kernel.path) is None


def test_prune_leaves_a_staging_directory_that_others_began_to_use(cache, monkeypatch):
    put(cache)
    kernels = cache_tools.cached_kernels(cache)
    assert cache_tools.remove([], cache) == []
    assert not (cache / "staging").exists()
    take_out = cache_tools._take_out

    def take_out_beside_a_builder(entry, staging):
        (staging / "in-flight").mkdir()
        return take_out(entry, staging)

    monkeypatch.setattr(cache_tools, "_take_out", take_out_beside_a_builder)
    assert len(cache_tools.remove(kernels, cache)) == 1
    assert os.listdir(cache / "staging") == ["in-flight"]


@needs_nvcc
def test_a_kernel_that_was_pruned_is_still_loaded_and_who_comes_later_misses_it(cache):
    key = key_of(request())
    kernel_store.store(built(), key)
    kernel = kernel_store.find(key)
    cache_tools.remove(cache_tools.cached_kernels(cache), cache)
    with pytest.raises(RuntimeError, match="device_type mismatch, expected cuda"):           # it was entered
        kernel(torch.ones(3), torch.ones(3), 2.0)
    assert kernel_store.find(key) is None


@needs_nvcc
def test_readers_and_builders_meet_no_damage_while_a_prune_never_stops(cache, caplog):
    key, found, ended = key_of(request()), [], threading.Event()

    def prune():
        while not ended.is_set():
            cache_tools.remove(cache_tools.cached_kernels(cache), cache)
            cache_tools.gc(cache)

    def read_or_build():
        for _ in range(40):
            found.append(kernel_store.find(key))
            if found[-1] is None:
                kernel_store.store(built(), key)

    with ThreadPoolExecutor(max_workers=4) as threads:
        pruner, *readers = [threads.submit(what) for what in (prune, *[read_or_build] * 3)]
        wait(readers)
        assert not pruner.done()
        ended.set()
    for future in (pruner, *readers):
        future.result()
    assert len(found) == 120
    assert caplog.text == ""
    # Who found an entry that was on its way out may have made the directory before it saw that the entry was gone.
    assert list((cache / "quarantine").glob("*")) == []


def test_gc_takes_what_nobody_will_come_back_for(run, cache):
    (cache / "quarantine" / "ab-1").mkdir(parents=True)
    (cache / "quarantine" / "ab-1" / "executable.so").write_text("damaged")
    (cache / "staging" / "in-flight").mkdir(parents=True)
    age(put(cache), 400)
    abandoned = cache / "staging" / "abandoned"
    abandoned.mkdir()
    age(abandoned, 1)
    future = cache / "staging" / "of-a-clock-that-was-set-back"
    future.mkdir()
    age(future, -1)
    assert len(run("cache", "gc", "--dry-run", "--json")["removed"]) == 2
    told = run("cache", "gc", "--json")
    assert told["removed"] == [str(cache / "quarantine" / "ab-1"), str(abandoned)]
    assert told["bytes"] == len("damaged")
    assert sorted(path.name for path in (cache / "staging").iterdir()) == ["in-flight", "of-a-clock-that-was-set-back"]
    assert len(cache_tools.cached_kernels(cache)) == 1


def test_without_a_cache_that_can_be_written_prune_and_gc_say_so(run, monkeypatch):
    monkeypatch.setattr("qla_jit.cli.cache.writable_cache_dir", lambda: None)
    for words in (("prune", "--unused"), ("gc",)):
        assert "name one with --dir" in run("cache", *words, code=5)


def test_a_cache_that_is_full_of_garbage_is_listed_all_the_same(run, cache):
    entry = put(cache)
    (entry / "manifest.json").write_bytes(b"\xff\x00" * 100)
    (cache / "kernels" / "ab" / "not-a-digest").mkdir(parents=True)
    (cache / "kernels" / "file").write_text("")
    (row,) = run("cache", "ls", "--json")
    assert (row["template"], row["usable"]) == ("unreadable", "no")
    assert json.dumps(row)
    assert cache_dir.kernels_in(cache) == 1
    assert run("cache", "prune", "--unused", "--json")["removed"] == [str(entry)]
