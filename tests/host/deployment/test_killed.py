"""Does the death of a process, or its fork, cost the others anything but the work that it had begun?"""

import atexit
import itertools
import os
import signal
import threading
import time
from pathlib import Path

import pytest
from faults import inject
from node import ask, ask_twice, assert_entries_are_whole, assert_nothing_is_in_staging, assert_served, right

from qla_jit import compiler, kernel_cache
from qla_jit.cache_tools import gc
from qla_jit.compiler import EXECUTABLE

PROCESSES = 32


def start_from_an_empty_cache(node):
    """32 processes ask for the same three kernels at once; each must get them, and each kernel be compiled once."""
    node.compiler_first("sleep 0.2")
    start = node.root / "start"

    def ask_at_once():
        while not start.exists():
            time.sleep(0.01)
        return ask(32, 64, 128)

    processes = [node.start(ask_at_once) for _ in range(PROCESSES)]
    start.touch()
    for process in processes:
        assert_served(process.outcome(), threads=(32, 64, 128))
    assert node.compilations == 3
    assert len(node.entries()) == 3
    assert_entries_are_whole(node)
    assert_nothing_is_in_staging(node)


def test_many_processes_that_start_from_an_empty_cache_share_one_compilation(node):
    start_from_an_empty_cache(node)


@pytest.mark.slow
def test_many_processes_share_one_compilation_in_50_rounds(new_node):
    for _ in range(50):
        start_from_an_empty_cache(new_node())


def wait_for(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def parent_of(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_when_the_process_that_compiles_is_killed_one_of_those_that_wait_takes_over(node):
    node.compiler_first("sleep 2")
    processes = [node.start(ask) for _ in range(8)]
    wait_for(lambda: node.compilations == 1)
    (compiling,) = (int(pid) for pid in (node.root / "compilations").read_text().split())
    leader = parent_of(compiling)
    node.compiler_first("")
    os.kill(leader, signal.SIGKILL)
    outcomes = {process.pid: process.outcome() for process in processes}
    assert outcomes.pop(leader).signal == signal.SIGKILL
    for outcome in outcomes.values():
        assert_served(outcome)
    assert sum(outcome.compiles for outcome in outcomes.values()) == 1
    assert_entries_are_whole(node)


@pytest.mark.parametrize("death", ["kill -9 $$", "kill -11 $$", "exit 1"])
def test_a_compiler_that_dies_is_an_error_for_all_who_asked_and_harms_no_later_call(node, death):
    node.compiler_first(f"echo internal compiler error; {death}")

    def ask_from_two_threads():
        errors = []
        threads = [threading.Thread(target=lambda: errors.append(error_of(ask))) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        node.compiler_first("")
        return errors, ask()

    outcome = node.run(ask_from_two_threads)
    errors, answer = outcome.answer
    assert len(errors) == 2
    for error in errors:
        assert error.startswith("CompileError")
        assert "internal compiler error" in error
    assert answer == right()
    assert outcome.warnings == []
    (log,) = (node.cache / "logs").iterdir()
    assert log.read_text() == "internal compiler error\n"


def error_of(function):
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


@pytest.mark.parametrize("damaged", [False, True], ids=["empty", "damaged"])
def test_a_kill_before_any_call_to_the_disk_leaves_no_half_entry(new_node, damaged):
    for n in itertools.count(1):
        node = new_node()
        if damaged:                      # then an entry is set aside before one is published
            node.fill()
            os.truncate(node.entry() / EXECUTABLE, 3)

        def be_killed(node=node, n=n):
            inject(signal.SIGKILL, under=node.cache, first=n)
            return ask()

        outcome = node.run(be_killed)
        if outcome.signal is None:
            assert n > 30, "publishing has more steps than that"
            return
        if not damaged:
            assert_entries_are_whole(node)
        outcome = node.run(ask_twice)
        assert_served(outcome, warnings=damaged)
        assert outcome.compiles <= 1
        assert_entries_are_whole(node)
        for left in node.cache.glob("staging/*"):
            os.utime(left, (0, 0))       # long ago
        gc(node.cache)
        assert_nothing_is_in_staging(node)
        assert len(node.entries()) == 1


# Forks: a server that compiles in a thread, and starts its workers meanwhile.


def while_a_thread_compiles(node, function):
    """Call a function in a forked process while a thread of its parent compiles; its answer and the parent's."""
    begun = node.compilations
    node.compiler_first("sleep 0.5")
    thread = threading.Thread(target=ask)
    thread.start()
    wait_for(lambda: node.compilations > begun)
    outcome = node.start(function)
    thread.join()
    return outcome.outcome(), ask()


def test_a_forked_worker_does_not_wait_for_a_thread_that_it_does_not_have(node):
    def serve():
        worker, answer = while_a_thread_compiles(node, ask)
        return worker.answer, worker.compiles, answer

    assert node.run(serve).answer == [right(), 0, right()]
    assert node.compilations == 1


def test_a_forked_worker_can_ask_although_its_parent_was_counting(node):
    def fork_in_the_middle():
        with kernel_cache._mutex:
            return node.run(ask).answer

    assert node.run(fork_in_the_middle).answer == right()


def test_a_worker_that_lives_on_does_not_keep_its_killed_parents_lock(node):
    def serve():
        node.compiler_first("sleep 60")
        threading.Thread(target=ask, daemon=True).start()
        wait_for(lambda: node.compilations == 1)
        node.start(lambda: time.sleep(30))
        os.kill(os.getpid(), signal.SIGKILL)

    started = time.monotonic()
    server = node.start(serve)
    os.waitpid(server.pid, 0)
    node.compiler_first("")
    assert_served(node.run(ask), compiles=1)
    assert time.monotonic() - started < 20


def test_a_worker_that_ends_leaves_its_parents_build_alone(node):
    def serve():
        worker, answer = while_a_thread_compiles(node, atexit._run_exitfuncs)          # as when an interpreter ends
        return worker.error, answer

    assert node.run(serve).answer == [None, right()]
    assert node.compilations == 1


def test_a_worker_does_not_stop_its_parents_compiler(node):
    def serve():
        worker, answer = while_a_thread_compiles(node, compiler.stop_all)
        return worker.error, answer

    assert node.run(serve).answer == [None, right()]


