"""Is a kernel compiled once, found again by its key alone, and never taken from a damaged entry?

Most tests put a copy of one real build in the place of the compiler, which takes seconds; the last ones compile.
"""

import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pydantic
import pytest
import tiny_template
from fake_compiler import assert_launches, entry_of
from tiny_template import TEMPLATE, built, needs_nvcc, request

from qla_jit import cache_dir, compiler, kernel_cache, kernel_store
from qla_jit.errors import CompileError, EnvironmentUnsuitable, InvalidConfigError, KernelNotCachedError
from qla_jit.kernel_cache import KernelKey, get, key_of, stats
from qla_jit.kernel_templates.arch import SM80

TESTS = Path(__file__).parent

pytestmark = pytest.mark.usefixtures("cache")


def delta(before):
    return {name: value - getattr(before, name) for name, value in vars(stats()).items() if not name.endswith("seconds")}


# The key.

KEY = KernelKey(
    format=1, template="tiny_scale", template_sha256="ab" * 32, problem={"K": 128, "varlen": True, "state_dtype": None},
    config={"threads": 64}, arch="sm_90a", pass_configs={"tl.disable_tma_lower": True}, machine="x86_64",
    tilelang="0.1.15", nvcc="13.0.88",
)


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2},
        {"template": "state_scan"},
        {"template_sha256": "ba" * 32},
        {"problem": {"K": 64, "varlen": True, "state_dtype": None}},
        {"problem": {"K": 128, "varlen": 1, "state_dtype": None}},
        {"problem": {"K": 128, "varlen": True, "state_dtype": "float32"}},
        {"problem": {"K": 128, "varlen": True}},
        {"config": {"threads": 128}},
        {"arch": "sm_100a"},
        {"pass_configs": {}},
        {"pass_configs": {"tl.disable_tma_lower": False}},
        {"machine": "aarch64"},
        {"tilelang": "0.1.14"},
        {"nvcc": "12.8.93"},
        {"nvcc": None},
    ],
    ids=lambda change: "-".join(f"{k}={v}" for k, v in change.items()).replace(" ", "")[:60],
)
def test_each_field_decides_the_digest(change):
    assert KernelKey(**{**KEY.model_dump(), **change}).digest() != KEY.digest()


def test_the_test_above_changes_every_field():
    marks = test_each_field_decides_the_digest.pytestmark[0].args[1]
    assert {name for change in marks for name in change} == set(KernelKey.model_fields)


def test_a_key_takes_nothing_else_and_nothing_that_is_not_plain():
    with pytest.raises(pydantic.ValidationError, match="hostname"):
        KernelKey(**KEY.model_dump(), hostname="node7")
    with pytest.raises(pydantic.ValidationError, match="problem"):
        KernelKey(**{**KEY.model_dump(), "problem": {"shape": (1, 2)}})


def test_the_order_of_fields_does_not_decide_the_digest():
    fields = KEY.model_dump()
    fields["problem"] = dict(reversed(fields["problem"].items()))
    assert KernelKey(**fields).digest() == KEY.digest()


def test_a_request_determines_its_key():
    key = key_of(request())
    assert (key.template, key.arch, key.template_sha256) == ("tiny_scale", "sm_90a", TEMPLATE.source_sha256())
    assert key.problem == {"dtype": "float32", "behaviour": "works"}
    assert key.config == {"threads": 64, "per_thread": 1}
    assert key.tilelang == compiler.tilelang_version()
    digests = {key_of(r).digest() for r in (request(), request(threads=128), request(dtype="float16"), request(arch=SM80))}
    assert len(digests) == 4


def test_the_digest_is_the_same_wherever_and_as_whomever_it_is_made(tmp_path):
    code = f"import sys; sys.path.insert(0, {str(TESTS)!r}); from tiny_template import request; " \
           "from qla_jit.kernel_cache import key_of; print(key_of(request()).digest())"
    digests = set()
    for name, seed in (("one", "1"), ("two", "2")):
        (tmp_path / name).mkdir()
        environment = {**os.environ, "HOME": str(tmp_path / name), "USER": name, "TZ": name, "PYTHONHASHSEED": seed, "LANG": "C"}
        python = [sys.executable, "-c", code]
        run = subprocess.run(python, cwd=tmp_path / name, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        digests.add(run.stdout)
    assert digests == {key_of(request()).digest() + "\n"}


# Memory, disk, compiler: in this order.


@needs_nvcc
def test_a_kernel_comes_from_the_compiler_then_from_memory_then_from_disk(compiled, cache):
    before = stats()
    (kernel,) = get([request()])
    assert_launches(kernel)
    assert kernel.directory == entry_of(cache, request())
    assert kernel.digest == key_of(request()).digest()
    assert get([request()]) == [kernel]
    kernel_cache.clear_memory()
    (again,) = get([request()])
    assert again is not kernel
    assert_launches(again)
    assert delta(before) == {"memory_hits": 1, "disk_hits": 1, "compiles": 1}
    assert list((cache / "staging").iterdir()) == []


@needs_nvcc
def test_a_batch_keeps_its_order_and_compiles_a_repeated_request_once(compiled, monkeypatch):
    monkeypatch.setenv("QLA_JIT_JOBS", "2")
    requests = [request(threads=n) for n in (128, 64, 32, 64, 128)]
    kernels = get(requests)
    assert [kernel.digest for kernel in kernels] == [key_of(r).digest() for r in requests]
    assert kernels[1] is kernels[3]
    assert len(compiled) == 3


@needs_nvcc
def test_a_batch_of_known_and_unknown_kernels_compiles_the_unknown(compiled):
    get([request(threads=32)])
    before = stats()
    get([request(threads=32), request(threads=64)])
    assert delta(before) == {"memory_hits": 1, "disk_hits": 0, "compiles": 1}


@needs_nvcc
def test_one_line_announces_a_batch_and_none_a_hit(compiled, cache, caplog):
    caplog.set_level(logging.INFO, "qla_jit")
    get([request(threads=32), request(threads=64)])
    (record,) = caplog.records
    assert str(cache) in record.getMessage()
    assert "threads=32" in record.getMessage()
    assert "threads=64" in record.getMessage()
    get([request(threads=32)])
    assert len(caplog.records) == 1


@needs_nvcc
def test_another_template_text_tilelang_or_nvcc_is_another_kernel(compiled, monkeypatch):
    get([request()])
    for change in (
        lambda: monkeypatch.setattr(tiny_template._LocalTemplate, "source_sha256", lambda self: "another text"),
        lambda: monkeypatch.setattr(compiler, "tilelang_version", lambda: "0.1.99"),
        lambda: monkeypatch.setattr(compiler, "nvcc_version", lambda: "99.0.1"),
    ):
        change()
        kernel_cache.clear_memory()
        before = len(compiled)
        get([request()])
        assert len(compiled) == before + 1


# Without nvcc.


@needs_nvcc
def test_without_nvcc_the_entry_of_the_newest_nvcc_serves(compiled, monkeypatch):
    for version in ("9.2.1", "13.0.88", "12.10.3"):
        monkeypatch.setattr(compiler, "nvcc_version", lambda version=version: version)
        kernel_cache.clear_memory()
        get([request()])
    assert len(compiled) == 3
    monkeypatch.setattr(compiler, "nvcc_version", lambda: None)
    kernel_cache.clear_memory()
    (kernel,) = get([request()])
    assert kernel.directory.name == "nvcc-13.0.88"
    assert kernel.digest == key_of(request()).model_copy(update={"nvcc": "13.0.88"}).digest()
    assert len(compiled) == 3


def test_without_nvcc_a_miss_says_what_is_needed(monkeypatch):
    monkeypatch.setattr(compiler, "find_nvcc", lambda: None)
    with pytest.raises(EnvironmentUnsuitable, match="needs a CUDA compiler"):
        get([request()])


# Damage.


def remove(name):
    return lambda entry: (entry / name).unlink()


def rewrite(path, data):
    path.unlink()                        # a file that is mapped into this process must not change
    path.write_bytes(data)


def truncate(name):
    return lambda entry: rewrite(entry / name, (entry / name).read_bytes()[:-1])


def flip_a_bit(name):
    def damage(entry):
        data = bytearray((entry / name).read_bytes())
        data[len(data) // 2] ^= 1
        rewrite(entry / name, data)

    return damage


def edit_manifest(edit):
    def damage(entry):
        manifest = json.loads((entry / "manifest.json").read_text())
        edit(manifest)
        rewrite(entry / "manifest.json", json.dumps(manifest).encode())

    return damage


DAMAGES = {
    "executable-missing": remove("executable.so"),
    "executable-truncated": truncate("executable.so"),
    "executable-bit-flipped": flip_a_bit("executable.so"),
    "source-bit-flipped": flip_a_bit("device.cu"),
    "report-truncated": truncate("build.json"),
    "manifest-missing": remove("manifest.json"),
    "manifest-truncated": truncate("manifest.json"),
    "manifest-of-another-config": edit_manifest(lambda m: m["key"]["config"].update(threads=32)),
    "manifest-of-another-nvcc": edit_manifest(lambda m: m["key"].update(nvcc="1.0")),
    "manifest-with-unknown-field": edit_manifest(lambda m: m.update(command="rm")),
    "manifest-that-leaves-out-a-file": edit_manifest(lambda m: m["files"].pop("executable.so")),
}


@pytest.fixture
def entry(cache):
    """An entry that nobody has loaded: a library that is in the process already would be taken in place of a damaged file."""
    return kernel_store.store(built(), key_of(request()))


@needs_nvcc
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_entry_is_set_aside_with_one_warning_and_built_again(compiled, cache, entry, caplog, damage):
    damage(entry)
    (kernel,) = get([request()])
    assert_launches(kernel)
    assert len(compiled) == 1
    (warning,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "a cached kernel is damaged" in warning.getMessage()
    assert len(list((cache / "quarantine").iterdir())) == 1
    kernel_cache.clear_memory()
    get([request()])
    assert len(compiled) == 1, "the rebuilt entry is intact"


@needs_nvcc
def test_an_executable_that_cannot_be_loaded_here_is_damage_too(compiled, cache, entry):
    data = bytearray((entry / "executable.so").read_bytes())
    data[18:20] = (183).to_bytes(2, "little")                            # the ELF header says aarch64, and the manifest agrees
    rewrite(entry / "executable.so", data)
    edit_manifest(lambda m: m["files"]["executable.so"].update(kernel_store.FileStamp.of(bytes(data)).model_dump()))(entry)
    assert_launches(*get([request()]))
    assert len(compiled) == 1


# Bundles: directories of prebuilt kernels, which are only read.


@pytest.fixture
def bundle(entry, cache, tmp_path, monkeypatch):
    """A bundle that holds the entry, which is in no cache any more."""
    path = tmp_path / "bundle"
    path.mkdir(mode=0o755)
    (cache / "kernels").rename(path / "kernels")
    monkeypatch.setenv("QLA_JIT_BUNDLE_PATH", f"{tmp_path / 'missing'}{os.pathsep}{path}")
    cache_dir._trusted.cache_clear()
    return path


def contents(directory):
    return {str(path.relative_to(directory)): path.stat().st_mtime_ns for path in sorted(directory.rglob("*"))}


@needs_nvcc
@pytest.mark.parametrize("nvcc", ["there", "absent"])
@pytest.mark.parametrize("mode", ["lookup", "require"])
def test_a_bundle_serves_what_the_cache_lacks_and_nothing_is_written(bundle, cache, tmp_path, monkeypatch, mode, nvcc):
    monkeypatch.setenv("QLA_JIT_MODE", mode)
    if nvcc == "absent":
        monkeypatch.setattr(compiler, "find_nvcc", lambda: None)
    before, there = stats(), contents(bundle)
    (kernel,) = get([request()])
    assert_launches(kernel)
    assert kernel.directory.is_relative_to(bundle)
    assert delta(before) == {"memory_hits": 0, "disk_hits": 1, "compiles": 0}
    assert contents(bundle) == there
    assert not (tmp_path / "missing").exists()
    assert not (cache / "kernels").exists()


@needs_nvcc
def test_the_cache_is_asked_before_a_bundle(bundle, cache):
    shutil.copytree(bundle / "kernels", cache / "kernels")
    (kernel,) = get([request()])
    assert kernel.directory == entry_of(cache, request())


@needs_nvcc
def test_a_damaged_entry_of_a_bundle_is_a_miss_with_one_warning_and_stays(compiled, bundle, cache, caplog):
    flip_a_bit("executable.so")(entry_of(bundle, request()))
    there = contents(bundle)
    (kernel,) = get([request()])
    assert kernel.directory == entry_of(cache, request())
    assert len(compiled) == 1
    assert contents(bundle) == there
    assert not (cache / "quarantine").exists()
    (warning,) = [record.getMessage() for record in caplog.records if "kernel is damaged" in record.getMessage()]
    assert str(entry_of(bundle, request())) in warning


@needs_nvcc
def test_a_bundle_that_others_can_write_to_is_not_used(compiled, bundle, caplog):
    bundle.chmod(0o777)
    get([request()])
    assert len(compiled) == 1
    (warning,) = [record.getMessage() for record in caplog.records if "QLA_JIT_BUNDLE_PATH" in record.getMessage()]
    assert f"{bundle} can be written by others" in warning
    assert "missing cannot be used: No such file or directory" in warning


@needs_nvcc
def test_a_miss_in_require_mode_names_the_bundle_and_its_nearest_kernel(bundle, monkeypatch):
    monkeypatch.setenv("QLA_JIT_MODE", "require")
    with pytest.raises(KernelNotCachedError, match=r"config\.threads \(64 there, 128 wanted\)") as raised:
        get([request(threads=128)])
    assert str(bundle) in str(raised.value)


# A cache that cannot be used.


@needs_nvcc
def test_a_cache_that_cannot_be_written_costs_a_warning_and_no_more(compiled, cache, caplog):
    (cache / "staging").write_text("in the way")
    for threads in (32, 64):
        assert_launches(*get([request(threads=threads)]))
    assert [record.levelname for record in caplog.records].count("WARNING") == 1
    assert "compiled kernels cannot be kept" in caplog.text
    assert not (cache / "kernels").exists()


@needs_nvcc
def test_without_any_directory_kernels_live_in_memory(compiled, monkeypatch, tmp_path):
    monkeypatch.setattr(kernel_store, "cache_dirs", lambda: ())
    monkeypatch.setattr(kernel_store, "writable_cache_dir", lambda: None)
    (kernel,) = get([request()])
    assert_launches(kernel)
    assert get([request()]) == [kernel]
    assert not kernel.directory.exists()
    assert list((tmp_path / "tmp").glob("qla_jit-build-*")) == []


@needs_nvcc
def test_a_read_only_cache_is_read_and_never_written(compiled, cache, tmp_path, monkeypatch):
    get([request()])
    monkeypatch.setattr(os, "access", lambda path, mode: not (path == cache and mode & os.W_OK))
    cache_dir._open.cache_clear()
    kernel_cache.clear_memory()
    files = sorted(cache.rglob("*"))
    kernels = get([request(), request(threads=32)])
    assert kernels[0].directory == entry_of(cache, request())
    assert kernels[1].directory == entry_of(tmp_path / "home" / "qla_jit", request(threads=32))
    assert sorted(cache.rglob("*")) == files
    cache_dir._open.cache_clear()


# Failures.


@needs_nvcc
def test_a_failed_kernel_does_not_take_the_batch_with_it(compiled, cache, monkeypatch):
    fake = compiler.compile_to

    def compile_to(directory, request):
        if request.config.threads == 32:
            (directory / compiler.LOG).write_text("ptxas fatal")
            raise CompileError("32 is unlucky", log_path=directory / compiler.LOG)
        fake(directory, request)

    monkeypatch.setattr(compiler, "compile_to", compile_to)
    bad, good = request(threads=32), request(threads=64)
    with pytest.raises(CompileError, match="32 is unlucky") as caught:
        get([bad, good])
    assert caught.value.key == key_of(bad).digest()
    assert caught.value.log_path.parent == cache / "logs"
    assert caught.value.log_path.read_text() == "ptxas fatal"
    assert_launches(*get([good]))
    assert compiled == [good]
    with pytest.raises(CompileError, match="32 is unlucky"):
        get([bad])


def test_an_invalid_config_is_rejected_with_its_reason():
    with pytest.raises(InvalidConfigError, match="more than 256 elements a block"):
        get([request(threads=128, per_thread=4)])


@needs_nvcc
def test_require_serves_hits_and_explains_misses(compiled, cache, monkeypatch):
    get([request(threads=32), request(dtype="float16", threads=128)])
    monkeypatch.setenv("QLA_JIT_MODE", "require")
    kernel_cache.clear_memory()
    assert_launches(*get([request(threads=32)]))
    with pytest.raises(KernelNotCachedError) as caught:
        get([request(threads=64)])
    message = str(caught.value)
    assert str(cache) in message
    there = entry_of(cache, request(threads=32))
    assert f"the nearest one differs in config.threads (32 there, 64 wanted), and is {there}" in message
    assert "QLA_JIT_MODE=lookup" in message
    assert len(compiled) == 2


def test_require_with_an_empty_cache_says_that_nothing_is_there(monkeypatch):
    monkeypatch.setenv("QLA_JIT_MODE", "require")
    with pytest.raises(KernelNotCachedError, match="no kernel of the template tiny_scale is there"):
        get([request()])


# The real compiler.


@needs_nvcc
def test_a_second_process_with_a_warm_cache_compiles_nothing_and_neither_imports_tilelang(tmp_path):
    code = f"""
import sys; sys.path.insert(0, {str(TESTS)!r})
from tiny_template import request
from qla_jit import kernel_cache
(kernel,) = kernel_cache.get([request(threads=32)])
assert not {{"tilelang", "tvm"}} & set(sys.modules)
print(kernel_cache.stats().compiles, kernel_cache.stats().disk_hits, kernel.digest)
"""
    with_nvcc = {**os.environ, "CUDA_HOME": str(compiler.find_nvcc().parents[1])}
    without_nvcc = {**os.environ, "CUDA_HOME": "/nowhere"}
    outputs = []
    for name, environment in (("one", with_nvcc), ("two", without_nvcc)):
        (tmp_path / name).mkdir()
        python = [sys.executable, "-c", code]
        run = subprocess.run(python, cwd=tmp_path / name, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        outputs.append(run.stdout.split())
    digest = key_of(request(threads=32)).digest()
    assert outputs == [["1", "0", digest], ["0", "1", digest]]


def test_importing_touches_no_disk_and_no_gpu_and_not_tilelang():
    code = """
import sys
import torch, tvm_ffi, pydantic, platformdirs            # what they do is theirs

WRITES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.chmod", "subprocess.Popen"}

def watch(event, args):
    if event in WRITES or (event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+")):
        raise AssertionError((event, args))

sys.addaudithook(watch)
import qla_jit.errors, qla_jit.settings, qla_jit.device, qla_jit.compiler, qla_jit.launch
import qla_jit.cache_dir, qla_jit.kernel_store, qla_jit.kernel_cache, qla_jit.collect_env
assert not {"tilelang", "tvm"} & set(sys.modules)
assert not torch.cuda.is_initialized()
"""
    subprocess.run([sys.executable, "-B", "-c", code], check=True, timeout=120)
