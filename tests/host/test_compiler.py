"""Does the compiler build what was asked, without a GPU, and is every way to fail a CompileError of the caller?"""

import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import tiny_template
from tiny_template import TEMPLATE, Config, Problem, built, needs_nvcc, request

from qla_jit import compiler
from qla_jit.compiler import ARTEFACTS, CompileRequest, compile_to
from qla_jit.errors import CompileError, EnvironmentUnsuitable, InvalidConfigError
from qla_jit.kernel_templates.arch import SM90A


@pytest.fixture
def toolkit(tmp_path, monkeypatch):
    """A function that makes a CUDA toolkit whose nvcc prints a text; nothing else of CUDA is found."""
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(compiler, "_packaged_nvcc", lambda: None)

    def make(name, prints="Cuda compilation tools, release 13.0, V13.0.88"):
        nvcc = tmp_path / name / "bin" / "nvcc"
        nvcc.parent.mkdir(parents=True)
        nvcc.write_text(f"#!/bin/sh\necho '{prints}'\n")
        nvcc.chmod(stat.S_IRWXU)
        return nvcc

    return make


# What is built.


@needs_nvcc
def test_the_artefacts_are_built_and_describe_themselves():
    assert {path.name for path in built().iterdir()} == {*ARTEFACTS, compiler.LOG}
    report = json.loads((built() / "build.json").read_text())
    assert report["function"] == "tiny_scale"
    assert report["arguments"] == ["x", "y", "factor"]
    assert "__global__ void __launch_bounds__(64" in (built() / "device.cu").read_text()
    assert "TVMFFI" in (built() / "host.c").read_text()
    (resources,) = report["ptxas"]["functions"].values()
    assert 0 < resources["registers"] < 64
    assert resources["spill_store_bytes"] == resources["spill_load_bytes"] == 0


@needs_nvcc
def test_variables_that_steer_compilers_do_not_reach_the_build(tmp_path, monkeypatch):
    for name, value in {
        "NVCC_APPEND_FLAGS": "--no-such-flag", "NVCC_PREPEND_FLAGS": "--no-such-flag", "TL_TEMPLATE_PATH": "/nowhere",
        "TILELANG_DEFAULT_TARGET": "hip", "TILELANG_EXECUTION_BACKEND": "torch", "TILELANG_VERBOSE": "0", "PYTHONHASHSEED": "7",
    }.items():
        monkeypatch.setenv(name, value)
    compile_to(tmp_path, request())
    assert (tmp_path / "device.cu").read_text() == (built() / "device.cu").read_text()
    assert (tmp_path / "host.c").read_text() == (built() / "host.c").read_text()
    assert json.loads((tmp_path / "build.json").read_text()) == json.loads((built() / "build.json").read_text())


def test_ptxas_output_becomes_numbers_and_remarks():
    text = """
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to x in the function 'b'
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'a' for 'sm_90a'
ptxas info    : Function properties for a
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 10 registers, used 0 barriers
ptxas info    : Compiling entry function 'b' for 'sm_90a'
ptxas info    : Function properties for b
    24 bytes stack frame, 16 bytes spill stores, 32 bytes spill loads
ptxas info    : Used 255 registers, used 3 barriers, 512 bytes smem
"""
    assert compiler.parse_ptxas(text) == {
        "functions": {
            "a": {"registers": 10, "stack_bytes": 0, "spill_store_bytes": 0, "spill_load_bytes": 0},
            "b": {"registers": 255, "stack_bytes": 24, "spill_store_bytes": 16, "spill_load_bytes": 32},
        },
        "remarks": [
            "(C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to x in the function 'b'"
        ],
    }


def test_a_number_that_ptxas_leaves_out_is_none():
    report = compiler.parse_ptxas("ptxas info    : Compiling entry function 'a' for 'sm_200'\nptxas info    : Used 9 registers\n")
    assert report["functions"]["a"] == {"registers": 9, "stack_bytes": None, "spill_store_bytes": None, "spill_load_bytes": None}


# What fails.


def test_a_rejected_config_starts_no_process(tmp_path, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", None)
    with pytest.raises(InvalidConfigError, match="cannot be built: threads=128 x per_thread=4") as caught:
        compile_to(tmp_path, request(threads=128, per_thread=4))
    assert caught.value.rejection.reason.endswith("is more than 256 elements a block")
    assert list(tmp_path.iterdir()) == []


@needs_nvcc
def test_an_exception_in_the_template_is_shown_and_logged(tmp_path):
    with pytest.raises(CompileError, match="exit status 1") as caught:
        compile_to(tmp_path, request(behaviour="raises"))
    assert "RuntimeError: a layout that TileLang cannot infer" in str(caught.value)
    assert caught.value.log_path == tmp_path / "compile.log"
    assert "Traceback" in caught.value.log_path.read_text()


@needs_nvcc
def test_a_child_that_ends_without_a_word_is_a_compile_error(tmp_path):
    with pytest.raises(CompileError, match="did not compile: exit status 3"):
        compile_to(tmp_path, request(behaviour="exits"))


@needs_nvcc
def test_a_build_with_other_arguments_than_the_template_names_is_a_compile_error(tmp_path, monkeypatch):
    source = Path(tiny_template.__file__).read_text().replace('return ("x", "y", "factor")', 'return ("x", "y")')
    (tmp_path / "two_arguments.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    import two_arguments

    build = tmp_path / "build"
    build.mkdir()
    other = CompileRequest(two_arguments.TEMPLATE, two_arguments.Problem(), two_arguments.Config(64, 1), SM90A)
    with pytest.raises(CompileError, match=r"names the arguments \('x', 'y'\) and builds a kernel with 3"):
        compile_to(build, other)


@needs_nvcc
def test_a_template_that_was_edited_after_its_key_was_made_is_not_built(tmp_path, monkeypatch):
    monkeypatch.setattr(tiny_template._LocalTemplate, "source_sha256", lambda self: "of the text before")
    with pytest.raises(CompileError, match="tiny_template was edited after its kernel key was made"):
        compile_to(tmp_path, request())


lists_children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").exists()
needs_list_of_children = pytest.mark.skipif(not lists_children, reason="the system does not list children in /proc")


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def assert_end_soon(pids):
    deadline = time.monotonic() + 10
    while any(is_running(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [pid for pid in pids if is_running(pid)] == []


@needs_nvcc
def test_a_child_that_hangs_is_stopped_in_time(tmp_path, monkeypatch):
    pids = []
    monkeypatch.setattr(compiler, "_running", type("Recorder", (set,), {"add": lambda self, child: pids.append(child.pid)})())
    monkeypatch.setenv("QLA_JIT_COMPILE_TIMEOUT", "3")
    started = time.monotonic()
    with pytest.raises(CompileError, match=r"stopped after 3 s \(QLA_JIT_COMPILE_TIMEOUT\)"):
        compile_to(tmp_path, request(behaviour="sleeps"))
    assert time.monotonic() - started < 20
    assert len(pids) == 1
    assert_end_soon(pids)


@needs_nvcc
def test_stop_all_ends_a_compilation_in_another_thread(tmp_path):
    errors = []

    def compile_in_thread():
        try:
            compile_to(tmp_path, request(behaviour="sleeps"))
        except CompileError as error:
            errors.append(error)

    thread = threading.Thread(target=compile_in_thread)
    thread.start()
    while not compiler._running:
        time.sleep(0.01)
    compiler.stop_all()
    thread.join(20)
    assert len(errors) == 1
    assert "killed by SIGKILL" in str(errors[0])


# Sends a signal to a process that compiles three kernels which hang, once its compilers run.
ASK_FOR_WHAT_HANGS = f"""
import signal; signal.signal(signal.SIGINT, signal.default_int_handler)          # a shell's background jobs ignore it
import sys; sys.path.insert(0, {str(Path(tiny_template.__file__).parent)!r})
from tiny_template import request
from qla_jit import kernel_cache
kernel_cache.get([request(behaviour="sleeps", threads=threads) for threads in (32, 64, 128)])
"""


@needs_nvcc
@needs_list_of_children
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL], ids=lambda sent: sent.name)
def test_compilers_that_hang_end_with_their_caller(tmp_path, sent):
    environment = {**os.environ, "QLA_JIT_CACHE_DIR": str(tmp_path), "QLA_JIT_JOBS": "2", "TMPDIR": str(tmp_path)}
    caller = subprocess.Popen([sys.executable, "-c", ASK_FOR_WHAT_HANGS], env=environment, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while len(pids := pids_of_compilers(caller.pid)) < 2:
        assert time.monotonic() < deadline, "the compilers did not start"
        time.sleep(0.05)
    time.sleep(2)                        # for the compilers to reach what hangs
    caller.send_signal(sent)
    output = caller.communicate(timeout=20)[1]
    assert ("KeyboardInterrupt" in output) == (sent == signal.SIGINT)
    assert_end_soon(pids)


def pids_of_compilers(caller):
    """The children of all threads of a process that are compilers by now."""
    pids = [pid for file in Path(f"/proc/{caller}/task").glob("*/children") for pid in file.read_text().split()]
    return [pid for pid in pids if b"qla_jit.compiler" in Path(f"/proc/{pid}/cmdline").read_bytes()]


# Which nvcc.


def test_without_nvcc_the_error_says_what_to_install(tmp_path, toolkit, monkeypatch):
    monkeypatch.setattr(compiler, "find_nvcc", lambda: None)
    assert compiler.nvcc_version() is None
    with pytest.raises(EnvironmentUnsuitable, match=r"there is none under CUDA_HOME.*Install the CUDA toolkit"):
        compile_to(tmp_path, request())


def test_an_nvcc_that_does_not_answer_has_no_version_and_is_named(tmp_path, toolkit, monkeypatch):
    nvcc = toolkit("broken", prints="Segmentation fault")
    monkeypatch.setenv("CUDA_HOME", str(nvcc.parents[1]))
    assert compiler.nvcc_version() is None
    with pytest.raises(EnvironmentUnsuitable, match="broken/bin/nvcc --version` does not answer"):
        compile_to(tmp_path, request())


def test_cuda_home_comes_before_path(toolkit, monkeypatch):
    home, on_path = toolkit("home", prints="release 12.8, V12.8.93"), toolkit("on_path")
    monkeypatch.setenv("PATH", str(on_path.parent))
    assert compiler.find_nvcc() == on_path
    assert compiler.nvcc_version() == "13.0.88"
    monkeypatch.setenv("CUDA_HOME", str(home.parents[1]))
    assert compiler.find_nvcc() == home
    assert compiler.nvcc_version() == "12.8.93"


def test_a_link_on_path_is_followed_to_its_toolkit_unless_it_stands_in_one(toolkit, tmp_path, monkeypatch):
    nvcc = toolkit("cuda-13")
    link = tmp_path / "links" / "bin" / "nvcc"
    link.parent.mkdir(parents=True)
    link.symlink_to(nvcc)
    monkeypatch.setenv("PATH", str(link.parent))
    assert compiler.find_nvcc() == nvcc
    (tmp_path / "links" / "include").mkdir()
    (tmp_path / "links" / "include" / "cuda_runtime.h").touch()
    assert compiler.find_nvcc() == link


def test_the_pip_package_is_used_when_there_is_no_other(toolkit, monkeypatch):
    nvcc = toolkit("site-packages/nvidia/cu13")
    monkeypatch.setattr(compiler, "_packaged_nvcc", lambda: nvcc)
    assert compiler.find_nvcc() == nvcc


def test_requests_are_equal_by_value_so_that_they_can_be_looked_up():
    assert request() == request()
    assert hash(request()) == hash(request())
    assert request() != request(threads=128)
    assert str(request()) == f"tiny_scale for sm_90a with {Problem()} {Config(64, 1)}"
    assert request().template is TEMPLATE
