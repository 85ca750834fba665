"""Run candidates in a process that may be killed: the tuner's own process never touches CUDA.

The worker answers one JSON line for each JSON line that it is asked. Its other end here kills it when an answer takes too long,
notices when it dies, and starts a new one for the next question, because after a hang or a CUDA error nothing that the same
process says can be trusted. All of that comes back as a Failure, which is a value: the tuner goes on.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..cache_dir import refusal, temporary_dir
from ..errors import EnvironmentUnsuitable, QLAError

# A worker's calls are no part of a workload, and it compiles what its questions need.
NOT_FOR_WORKERS = ("QLA_JIT_CAPTURE", "QLA_JIT_MODE")

STDERR_SHOWN = 1_000                     # characters, in the detail of a crash
GPU_COMMAND = (sys.executable, "-m", "qla_jit.tune.gpu")


@dataclass(frozen=True)
class Failure:
    """Why a candidate is out. reason: of tuning_records.Reason, or "static" (ruled out before anything ran)."""

    reason: str
    detail: str

    def to_json(self) -> dict[str, Any]:
        return {"reason": self.reason, "detail": self.detail}


class Worker:
    """The tuner's end. A context manager: the process ends with the block."""

    def __init__(self, command: Sequence[str] = GPU_COMMAND) -> None:
        self._command = list(command)
        self._process: subprocess.Popen[bytes] | None = None
        self._log: Any = None
        self._unread = b""

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def ask(self, question: dict[str, Any], *, seconds: float) -> Any:
        """The worker's answer, or a Failure: it failed at it, died, or did not answer within so many seconds.

        Raises:
            RuntimeError: there is an error in the worker's own code; carries its traceback.
        """
        self._start()
        try:
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
            self._process.stdin.flush()
            line = self._read_line(time.monotonic() + seconds)
        except TimeoutError:
            self.stop()
            return Failure("hang", f"no answer within {seconds:g} s; the process was killed")
        except (BrokenPipeError, EOFError):
            return self._obituary()
        except BaseException:            # Ctrl-C: an answer that comes later must not be taken for that of the next question
            self.stop()
            raise
        answer = json.loads(line)
        if "error" in answer:
            self.stop()
            raise RuntimeError(f"the tuner's worker failed:\n{answer['error']}")
        if "failure" in answer:
            if answer["fatal"]:
                self.stop()
            return Failure(**answer["failure"])
        return answer["answer"]

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def stop(self) -> None:
        """Kill the process, if there is one."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()
        self._log.close()
        self._process = None

    def _start(self) -> None:
        if self.is_running:
            return
        self.stop()
        self._unread = b""
        self._log = tempfile.TemporaryFile()         # noqa: SIM115
        environment = {name: value for name, value in os.environ.items() if name not in NOT_FOR_WORKERS}
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, env=environment,
            start_new_session=True,      # Ctrl-C is for the tuner, which then decides
        )

    def _read_line(self, deadline: float) -> bytes:
        while b"\n" not in self._unread:
            ready, _, _ = select.select([self._process.stdout], [], [], max(deadline - time.monotonic(), 0))
            if not ready:
                raise TimeoutError
            data = os.read(self._process.stdout.fileno(), 1 << 16)
            if not data:
                raise EOFError
            self._unread += data
        line, self._unread = self._unread.split(b"\n", 1)
        return line

    def _obituary(self) -> Failure:
        status = self._process.wait()
        self._log.seek(0)
        said = self._log.read().decode(errors="replace").strip()[-STDERR_SHOWN:]
        self.stop()
        how = f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
        return Failure("oom" if status == -signal.SIGKILL else "crash", f"the process ended: {how}\n{said}")


def serve(handle: Callable[[dict[str, Any]], Any]) -> None:
    """The worker's end: answer questions until the tuner is gone. handle takes a question and returns what JSON can hold.

    What handle raises is told apart: out of memory and our own errors are failures of the candidate; so is any other
    RuntimeError, after which the process is not used again, because a CUDA error stays; the rest is an error in our code.
    """
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)                           # 1: PR_SET_PDEATHSIG; a hang must not outlive the tuner
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)                        # what libraries print must not come between the answers
    for line in sys.stdin:
        answers.write(json.dumps(_answer(handle, json.loads(line))) + "\n")
        answers.flush()


def _answer(handle: Callable[[dict[str, Any]], Any], question: dict[str, Any]) -> dict[str, Any]:
    import torch

    try:
        return {"answer": handle(question)}
    except (torch.OutOfMemoryError, MemoryError) as error:
        return _failed("oom", error, fatal=False)
    except QLAError as error:
        return _failed("compile", error, fatal=False)
    except NotImplementedError:          # a RuntimeError, of code that is not there
        return {"error": traceback.format_exc()}
    except RuntimeError as error:
        return _failed("crash", error, fatal=True)
    except Exception:
        return {"error": traceback.format_exc()}


def _failed(reason: str, error: BaseException, *, fatal: bool) -> dict[str, Any]:
    return {"failure": {"reason": reason, "detail": f"{type(error).__name__}: {error}"[:STDERR_SHOWN]}, "fatal": fatal}


@contextlib.contextmanager
def only_tuner(gpu: str) -> Iterator[None]:
    """Hold the lock of a GPU, which the system releases when its owner dies.

    Raises:
        EnvironmentUnsuitable: another process of this node tunes on it.
    """
    why = refusal(temporary_dir())
    if why is not None:
        raise EnvironmentUnsuitable(f"the lock that keeps two tuners off one GPU cannot be made: {why}")
    descriptor = os.open(temporary_dir() / f"tuning-{gpu}.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise EnvironmentUnsuitable(
                f"another process tunes on the GPU {gpu}, and each would time the other; wait for it, or take another device"
            ) from None
        yield
    finally:
        os.close(descriptor)
