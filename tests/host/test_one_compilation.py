"""Do threads and processes that ask for a kernel at the same time share one compilation, whoever of them dies?"""

import contextlib
import fcntl
import logging
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from fake_compiler import assert_launches, entry_of
from tiny_template import built, needs_nvcc, request

from qla_jit import compiler, kernel_cache, kernel_store, node_locks, once
from qla_jit.errors import CompileError
from qla_jit.kernel_cache import get, key_of

TESTS = Path(__file__).parent

pytestmark = pytest.mark.usefixtures("cache")


@needs_nvcc
def test_threads_that_ask_together_share_one_compilation(compiled, monkeypatch):
    fake = compiler.compile_to
    monkeypatch.setattr(compiler, "compile_to", lambda *args: (time.sleep(0.3), fake(*args)))
    kernels = []
    threads = [threading.Thread(target=lambda: kernels.extend(get([request()]))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(compiled) == 1
    assert len(kernels) == 8
    assert len({id(kernel) for kernel in kernels}) == 1


@needs_nvcc
def test_threads_that_wait_get_the_error_of_the_one_that_compiles(monkeypatch):
    started = threading.Event()

    def compile_to(directory, request):
        started.set()
        time.sleep(0.3)
        (directory / compiler.LOG).touch()
        raise CompileError("no", log_path=directory / compiler.LOG)

    monkeypatch.setattr(compiler, "compile_to", compile_to)
    outcomes = []

    def ask():
        try:
            get([request()])
        except CompileError as error:
            outcomes.append(error)

    first = threading.Thread(target=ask)
    first.start()
    started.wait()
    ask()
    first.join()
    assert len(outcomes) == 2
    assert kernel_cache._in_flight == {}


@needs_nvcc
def test_the_loser_of_a_race_uses_its_own_build_and_leaves_the_winners(compiled, cache, monkeypatch, caplog):
    fake = compiler.compile_to
    entry = entry_of(cache, request())

    def compile_to(directory, asked):
        fake(directory, asked)
        kernel_store.store(directory, key_of(asked))                     # the other process, just before
        (entry / "mark").touch()

    monkeypatch.setattr(compiler, "compile_to", compile_to)
    (kernel,) = get([request()])
    assert_launches(kernel)
    assert kernel.directory != entry
    assert (entry / "mark").exists()
    assert list((cache / "staging").iterdir()) == []
    assert caplog.text == ""


# A process that asks for a kernel, with the compiler replaced by a slow copy that leaves a mark for each run.
ASK = f"""
import shutil, sys, threading, time, uuid
from pathlib import Path
sys.path.insert(0, {str(TESTS)!r})
from tiny_template import request
from qla_jit import compiler, kernel_cache

build, marks, seconds = Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])

def compile_to(directory, request):
    (marks / uuid.uuid4().hex).touch()
    time.sleep(seconds)
    for name in compiler.ARTEFACTS:
        shutil.copy(build / name, directory)

compiler.compile_to = compile_to
threads = [threading.Thread(target=kernel_cache.get, args=([request()],)) for _ in range(2)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(kernel_cache.stats().compiles)
"""


def start_asking(marks, seconds):
    command = [sys.executable, "-c", ASK, str(built()), str(marks), str(seconds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.fixture
def marks(tmp_path):
    (tmp_path / "marks").mkdir()
    return tmp_path / "marks"


@needs_nvcc
def test_processes_that_ask_together_share_one_compilation(marks):
    processes = [start_asking(marks, 3) for _ in range(3)]
    compiles = sorted(int(process.communicate(timeout=120)[0]) for process in processes)
    assert compiles == [0, 0, 1]
    assert len(list(marks.iterdir())) == 1


@needs_nvcc
def test_processes_compile_no_more_kernels_at_once_than_jobs_allows(compiled, monkeypatch):
    monkeypatch.setenv("QLA_JIT_JOBS", "2")
    fake, at_once, most = compiler.compile_to, [], []

    def compile_to(directory, asked):
        at_once.append(asked)
        most.append(len(at_once))
        time.sleep(0.1)
        fake(directory, asked)
        at_once.remove(asked)

    monkeypatch.setattr(compiler, "compile_to", compile_to)
    with node_locks.lock_file("slot-1").open("w") as other:             # another process compiles as well
        fcntl.flock(other, fcntl.LOCK_EX)
        get([request(threads=n) for n in (32, 64, 128)])
    assert set(most) == {1}


@needs_nvcc
def test_a_killed_owner_leaves_no_lock_behind(compiled, marks):
    owner = start_asking(marks, 60)
    while not list(marks.iterdir()):
        time.sleep(0.05)
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    started = time.monotonic()
    assert_launches(*get([request()]))
    assert time.monotonic() - started < 5
    assert len(compiled) == 1


@needs_nvcc
def test_a_lock_that_is_never_released_is_waited_for_no_longer_than_a_compilation_may_take(compiled, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "qla_jit")
    monkeypatch.setenv("QLA_JIT_COMPILE_TIMEOUT", "0.4")
    once._said.clear()
    requests = [request(threads=32), request(threads=64)]
    with contextlib.ExitStack() as others:
        for asked in requests:
            other = others.enter_context(node_locks.lock_file(key_of(asked).digest()).open("w"))
            fcntl.flock(other, fcntl.LOCK_EX)
        get(requests)
    assert len(compiled) == 2
    assert caplog.text.count("another process is compiling kernels") == 1, "once, however many kernels there are"


@needs_nvcc
def test_without_a_place_for_locks_kernels_are_built_all_the_same(compiled, monkeypatch):
    monkeypatch.setattr(node_locks, "refusal", lambda path: f"{path} belongs to another user")
    assert_launches(*get([request()]))
