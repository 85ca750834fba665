"""Do all processes of a user share their locks, and does nobody wait for ever?"""

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

from qla_jit import node_locks
from qla_jit.node_locks import one_of

NAMES = ("slot-0", "slot-1")


@pytest.fixture(autouse=True)
def own_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


# Holds a lock four times, in two threads, and prints when each began and ended.
HOLD = textwrap.dedent("""
    import sys, threading, time
    from qla_jit.node_locks import one_of

    def hold():
        for _ in range(2):
            with one_of(["slot-0", "slot-1"], seconds=60):
                began = time.monotonic()
                time.sleep(float(sys.argv[1]))
                sys.stdout.write(f"{began} {time.monotonic()}\\n")           # print() would let the threads share a line
                sys.stdout.flush()

    threads = [threading.Thread(target=hold) for _ in range(2)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
""")


def start_holding(seconds):
    return subprocess.Popen([sys.executable, "-c", HOLD, str(seconds)], stdout=subprocess.PIPE, text=True)


def most_at_once(times):
    ends = sorted([(began, 1) for began, _ in times] + [(ended, -1) for _, ended in times])
    return max(sum(step for _, step in ends[: n + 1]) for n in range(len(ends)))


def test_processes_and_their_threads_share_the_locks():
    processes = [start_holding(0.2) for _ in range(3)]
    times = []
    for process in processes:
        out, _ = process.communicate(timeout=120)
        assert process.returncode == 0
        times += [tuple(map(float, line.split())) for line in out.splitlines()]
    assert len(times) == 12
    assert most_at_once(times) == 2


def test_a_killed_owner_leaves_its_locks_to_others():
    owner = start_holding(60)
    deadline = time.monotonic() + 60
    while not _all_are_held() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert _all_are_held()
    owner.send_signal(signal.SIGKILL)
    owner.communicate()
    started = time.monotonic()
    with one_of(NAMES, seconds=60), one_of(NAMES, seconds=60):
        assert time.monotonic() - started < 5


def _all_are_held():
    taken = [node_locks._taken(node_locks.lock_file(name)) for name in NAMES]
    for descriptor in taken:
        if descriptor is not None:
            node_locks._held.discard(descriptor)
            os.close(descriptor)
    return taken == [None, None]


def test_who_has_waited_for_long_goes_on_without_and_has_told_of_it():
    told = []
    started = time.monotonic()
    with one_of(NAMES, seconds=60), one_of(NAMES, seconds=60, on_wait=lambda: told.append("early")):
        assert told == []
        with one_of(NAMES, seconds=0.3, on_wait=lambda: told.append("waiting")):
            assert 0.3 <= time.monotonic() - started < 5
    assert set(told) == {"waiting"}


def test_without_a_place_for_locks_everybody_goes_on(own_directory, monkeypatch):
    monkeypatch.setattr(node_locks, "refusal", lambda path: f"{path} belongs to another user")
    with contextlib.ExitStack() as locks:
        for _ in range(5):
            locks.enter_context(one_of(["one"], seconds=60))
    assert list(own_directory.iterdir()) == []


def test_a_lock_is_free_again_after_an_error_and_holds_no_descriptor():
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with contextlib.suppress(RuntimeError), one_of(["one"], seconds=60):
            raise RuntimeError("the compiler failed")
    assert len(os.listdir("/proc/self/fd")) == before
    assert node_locks._held == set()


def test_a_forked_process_does_not_keep_the_lock_of_its_parent():
    ready, end = threading.Event(), threading.Event()

    def hold():
        with one_of(["one"], seconds=60):
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
        with one_of(["one"], seconds=60):
            assert time.monotonic() - started < 5
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
