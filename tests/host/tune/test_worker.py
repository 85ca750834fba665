"""Does the tuner outlive what candidates do to their process, and is one tuner alone on a GPU?"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import PLANTED_WORKER

from qla_jit.errors import EnvironmentUnsuitable
from qla_jit.tune.worker import Failure, Worker, only_tuner

PATIENT = 60.0                           # seconds; PyTorch's import is in the first answer


@pytest.fixture(scope="module")
def worker():
    with Worker(PLANTED_WORKER) as worker:
        yield worker


def pid_of(worker):
    return worker.ask({"how": "well"}, seconds=PATIENT)["pid"]


def test_answers_come_from_one_other_process(worker):
    assert pid_of(worker) == pid_of(worker) != os.getpid()


def test_what_libraries_print_does_not_come_between(worker):
    assert worker.ask({"how": "chatter"}, seconds=PATIENT)["pid"] == pid_of(worker)


@pytest.mark.parametrize(
    ("how", "reason", "told"),
    [
        ("segfault", "crash", "SIGSEGV"),
        ("exit", "crash", "exit status 7\nthe driver gave up"),
        ("cuda error", "crash", "illegal memory access"),
        ("out of memory", "oom", "300 GiB"),
    ],
)
def test_a_death_is_a_failure_and_the_next_question_is_answered(worker, how, reason, told):
    before = pid_of(worker)
    failure = worker.ask({"how": how}, seconds=PATIENT)
    assert isinstance(failure, Failure)
    assert failure.reason == reason
    assert told in failure.detail
    assert (pid_of(worker) == before) is (how == "out of memory")        # after a CUDA error no answer can be trusted


def test_a_hang_is_killed(worker):
    before = pid_of(worker)
    started = time.monotonic()
    failure = worker.ask({"how": "hang"}, seconds=0.5)
    assert (failure.reason, time.monotonic() - started < 10) == ("hang", True)
    with pytest.raises(ProcessLookupError):
        os.kill(before, 0)
    assert pid_of(worker) != before


def test_a_mistake_of_ours_travels_with_its_traceback(worker):
    with pytest.raises(RuntimeError, match=r"(?s)misbehave.*TypeError: a mistake of ours"):
        worker.ask({"how": "bug"}, seconds=PATIENT)


def test_a_process_that_cannot_start_is_a_crash():
    with Worker((sys.executable, "-c", "raise SystemExit('no torch here')")) as worker:
        failure = worker.ask({"how": "well"}, seconds=PATIENT)
    assert failure.reason == "crash"
    assert "no torch here" in failure.detail


def test_the_worker_ends_with_its_tuner():
    tuner = subprocess.Popen(
        [sys.executable, "-c", f"""
import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
from conftest import PLANTED_WORKER
from qla_jit.tune.worker import Worker
worker = Worker(PLANTED_WORKER)
print(worker.ask({{"how": "well"}}, seconds=60)["pid"], flush=True)
worker.ask({{"how": "hang"}}, seconds=600)
"""],
        stdout=subprocess.PIPE, text=True,
    )
    pid = int(tuner.stdout.readline())
    tuner.send_signal(signal.SIGKILL)
    tuner.wait()
    tuner.stdout.close()
    deadline = time.monotonic() + 20
    while Path(f"/proc/{pid}/stat").exists() and Path(f"/proc/{pid}/stat").read_text().rsplit(")")[-1].split()[0] != "Z":
        assert time.monotonic() < deadline, "the worker outlived its tuner"
        time.sleep(0.05)


def test_a_second_tuner_on_the_same_gpu_is_refused_and_on_another_is_not():
    with only_tuner("GPU-one"):
        with pytest.raises(EnvironmentUnsuitable, match="another process tunes on the GPU GPU-one"), only_tuner("GPU-one"):
            pass
        with only_tuner("GPU-two"):
            pass
    with only_tuner("GPU-one"):
        pass
