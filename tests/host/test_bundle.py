"""Does a bundle hold what was asked for, whole and readable, and does another machine load it without a compiler?"""

import os
import shutil
import stat
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest
from tiny_template import TEMPLATE, built, needs_nvcc, request

from qla_jit import bundle, bundle_file, cache_dir, compiler, kernel_cache, kernel_store
from qla_jit.compiler import ARTEFACTS, CompileRequest
from qla_jit.errors import CompileError, EnvironmentUnsuitable
from qla_jit.kernel_cache import get, key_of, stats

pytestmark = needs_nvcc


@pytest.fixture(autouse=True)
def places(tmp_path, monkeypatch):
    """An empty cache, and a copy of one real build in the place of the compiler."""
    monkeypatch.setenv("QLA_JIT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in ("QLA_JIT_BUNDLE_PATH", "QLA_JIT_MODE"):
        monkeypatch.delenv(name, raising=False)
    built()

    def compile_to(directory, request):
        if request.problem.behaviour != "works":
            raise CompileError(f"{request} did not compile: exit status 1")
        for name in ARTEFACTS:
            shutil.copy(built() / name, directory)

    monkeypatch.setattr(compiler, "compile_to", compile_to)
    kernel_cache.clear_memory()
    yield tmp_path
    kernel_cache.clear_memory()


def compiles():
    return stats().compiles


def test_what_was_built_is_loaded_elsewhere_without_a_compiler_or_a_cache(places, monkeypatch):
    requests = [request(threads=32), request(threads=64)]
    done = []
    result = bundle.build(requests, places / "out" / "kernels-1", on_kernel=lambda *progress: done.append(progress))
    assert (result.kernels, result.failures, done) == (2, (), [(1, 2), (2, 2)])
    files = [path for path in (places / "out").rglob("*") if path.is_file()]
    assert result.bytes == sum(path.stat().st_size for path in files)

    kernel_cache.clear_memory()
    monkeypatch.setenv("QLA_JIT_CACHE_DIR", str(places / "server"))
    monkeypatch.setenv("QLA_JIT_BUNDLE_PATH", str(places / "out" / "kernels-1"))
    monkeypatch.setenv("QLA_JIT_MODE", "require")
    monkeypatch.setattr(compiler, "find_nvcc", lambda: None)
    assert all(kernel.directory.is_relative_to(places / "out") for kernel in get(requests))


def test_a_process_without_nvcc_and_without_a_place_to_write_loads_it_and_writes_nothing(places):
    bundle.build([request()], places / "out")
    nowhere = places / "file" / "below"
    (places / "file").write_text("no directory")
    code = f"""
        import os, sys, tempfile
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from tiny_template import request
        from qla_jit import compiler, kernel_cache

        tempfile.tempdir = {str(nowhere)!r}
        CHANGES = {{"os.rename", "os.remove", "os.link", "os.symlink", "os.chmod", "subprocess.Popen"}}
        sys.addaudithook(lambda event, arguments: event in CHANGES and print(event, arguments))
        assert compiler.find_nvcc() is None
        (kernel,) = kernel_cache.get([request()])
        print(kernel.directory)
    """
    environment = os.environ | {
        "PATH": "/nowhere", "CUDA_HOME": "/nowhere", "PYTHONDONTWRITEBYTECODE": "1", "XDG_CACHE_HOME": str(nowhere),
        "QLA_JIT_CACHE_DIR": str(nowhere), "QLA_JIT_BUNDLE_PATH": str(places / "out"), "QLA_JIT_MODE": "require",
    }
    before = {path: path.stat().st_mtime_ns for path in (places / "out").rglob("*")}
    child = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert child.returncode == 0, child.stderr
    assert child.stdout == f"{kernel_store._entry(places / 'out', key_of(request()))}\n"
    assert child.stderr.count("nothing new is cached on disk") == 1
    assert {path: path.stat().st_mtime_ns for path in (places / "out").rglob("*")} == before


def test_a_bundle_that_was_carried_as_one_file_is_loaded_where_nothing_may_be_compiled(places, monkeypatch):
    monkeypatch.setattr(kernel_cache, "template_sources", lambda: {TEMPLATE.name: TEMPLATE.source_sha256()})
    bundle.build([request(threads=32), request(threads=64)], places / "out")
    bundle_file.pack(places / "out", places / "packed.tar.gz")
    assert bundle_file.install(places / "packed.tar.gz", places / "installed", allow_unsigned=True).usable == 2
    kernel_cache.clear_memory()
    monkeypatch.setenv("QLA_JIT_CACHE_DIR", str(places / "server"))
    monkeypatch.setenv("QLA_JIT_BUNDLE_PATH", str(places / "installed"))
    monkeypatch.setenv("QLA_JIT_MODE", "require")
    monkeypatch.setattr(compiler, "find_nvcc", lambda: None)
    (kernel,) = get([request(threads=64)])
    assert kernel.directory.is_relative_to(places / "installed")


@pytest.mark.parametrize("umask", [0o077, 0o022, 0o000], ids="{:03o}".format)
def test_everyone_can_read_a_bundle_and_nobody_else_can_write_whatever_the_umask(places, umask):
    before = os.umask(umask)
    try:
        bundle.build([request()], places / "out")
    finally:
        os.umask(before)
    modes = {path.is_dir(): set() for path in (places / "out").rglob("*")}
    for path in (places / "out", *(places / "out").rglob("*")):
        modes[path.is_dir()].add(stat.S_IMODE(path.stat().st_mode))
    assert modes == {True: {0o755}, False: {0o644}}
    assert cache_dir.distrust(places / "out") is None


def test_nothing_but_kernels_is_left_in_a_bundle(places):
    bundle.build([request()], places / "out")
    assert [path.name for path in (places / "out").iterdir()] == ["kernels"]


def test_building_again_compiles_nothing_keeps_what_is_whole_and_mends_what_is_not(places):
    bundle.build([request(threads=32), request(threads=64)], places / "out")
    whole, damaged = (kernel_store._entry(places / "out", key_of(request(threads=n))) for n in (32, 64))
    (damaged / "device.cu").write_text("something else")
    inode, before = (whole / "manifest.json").stat().st_ino, compiles()
    result = bundle.build([request(threads=32), request(threads=64), request(threads=32)], places / "out")
    assert (result.kernels, compiles()) == (2, before)
    assert (whole / "manifest.json").stat().st_ino == inode
    assert kernel_store._check(damaged, key_of(request(threads=64)))


def test_a_kernel_that_fails_does_not_hide_the_others(places):
    result = bundle.build([request(behaviour="raises"), request()], places / "out")
    assert result.kernels == 1
    (failure,) = result.failures
    assert "behaviour='raises'" in failure


def test_a_directory_that_cannot_be_made_is_named_before_anything_compiles(places):
    (places / "file").write_text("in the way")
    before = compiles()
    with pytest.raises(EnvironmentUnsuitable, match="cannot be used for a bundle: Not a directory"):
        bundle.build([request()], places / "file" / "out")
    assert compiles() == before


def test_without_a_cache_to_compile_into_there_is_no_bundle(places, monkeypatch):
    monkeypatch.setattr(bundle, "writable_cache_dir", lambda: None)
    with pytest.raises(EnvironmentUnsuitable, match="QLA_JIT_CACHE_DIR"):
        bundle.build([request()], places / "out")


def test_require_mode_and_building_contradict_each_other(places, monkeypatch):
    monkeypatch.setenv("QLA_JIT_MODE", "require")
    with pytest.raises(EnvironmentUnsuitable, match="unset it"):
        bundle.build([request()], places / "out")


def test_a_build_without_nvcc_takes_what_the_cache_has_under_its_own_nvcc(places, monkeypatch):
    get([request()])
    version = key_of(request()).nvcc
    kernel_cache.clear_memory()
    monkeypatch.setattr(compiler, "nvcc_version", lambda: None)
    bundle.build([CompileRequest(TEMPLATE, request().problem, request().config, request().arch)], places / "out")
    assert [path.name for path in (places / "out").glob("kernels/*/*/*")] == [f"nvcc-{version}"]
