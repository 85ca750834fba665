"""Do all processes of a user together keep to QLA_JIT_JOBS compilations, and does nobody wait for ever?"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time

import pytest

from qla_jit import build_slots
from qla_jit.build_slots import build_slot


@pytest.fixture(autouse=True)
def own_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("QLA_JIT_JOBS", "2")
    monkeypatch.delenv("QLA_JIT_COMPILE_TIMEOUT", raising=False)
    return tmp_path


# Holds a slot four times, in two threads, and prints when each began and ended.
HOLD = textwrap.dedent("""
    import sys, threading, time
    from qla_jit.build_slots import build_slot

    def hold():
        for _ in range(2):
            with build_slot():
                began = time.monotonic()
                time.sleep(float(sys.argv[1]))
                print(began, time.monotonic(), flush=True)

    threads = [threading.Thread(target=hold) for _ in range(2)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
""")


def start_holding(seconds):
    return subprocess.Popen([sys.executable, "-c", HOLD, str(seconds)], stdout=subprocess.PIPE, text=True)


def most_at_once(times):
    ends = sorted([(began, 1) for began, _ in times] + [(ended, -1) for _, ended in times])
    return max(sum(step for _, step in ends[: n + 1]) for n in range(len(ends)))


def test_processes_and_their_threads_share_the_slots():
    processes = [start_holding(0.2) for _ in range(3)]
    times = []
    for process in processes:
        out, _ = process.communicate(timeout=120)
        assert process.returncode == 0
        times += [tuple(map(float, line.split())) for line in out.splitlines()]
    assert len(times) == 12
    assert most_at_once(times) == 2


def test_a_killed_owner_leaves_its_slots_to_others():
    owner = start_holding(60)
    deadline = time.monotonic() + 60
    while not _all_are_held() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert _all_are_held()
    owner.send_signal(signal.SIGKILL)
    owner.communicate()
    started = time.monotonic()
    with build_slot(), build_slot():
        assert time.monotonic() - started < 5


def _all_are_held():
    directory = build_slots._directory()
    taken = [build_slots._taken(directory / f"{number}.lock") for number in range(2)]
    for descriptor in taken:
        if descriptor is not None:
            build_slots._held.discard(descriptor)
            os.close(descriptor)
    return taken == [None, None]


def test_who_has_waited_as_long_as_a_compilation_may_take_goes_on(monkeypatch):
    monkeypatch.setenv("QLA_JIT_COMPILE_TIMEOUT", "0.3")
    started = time.monotonic()
    with build_slot(), build_slot(), build_slot():
        assert 0.3 <= time.monotonic() - started < 5


def test_without_a_place_for_locks_everybody_goes_on(own_directory, monkeypatch):
    monkeypatch.setattr(build_slots, "refusal", lambda path: f"{path} belongs to another user")
    with contextlib.ExitStack() as slots:
        for _ in range(5):
            slots.enter_context(build_slot())
    assert list(own_directory.iterdir()) == []


def test_a_slot_is_free_again_after_an_error_and_holds_no_descriptor():
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with contextlib.suppress(RuntimeError), build_slot():
            raise RuntimeError("the compiler failed")
    assert len(os.listdir("/proc/self/fd")) == before
    assert build_slots._held == set()


def test_a_forked_process_does_not_keep_the_slot_of_its_parent(monkeypatch):
    monkeypatch.setenv("QLA_JIT_JOBS", "1")
    ready, end = threading.Event(), threading.Event()

    def hold():
        with build_slot():
            ready.set()
            end.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    ready.wait(60)
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    try:
        end.set()
        holder.join()
        started = time.monotonic()
        with build_slot():
            assert time.monotonic() - started < 5
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
