"""What the session asks of a machine: describe yourself, build, verify, time. Each answer is written down as it comes.

A question and its answer are JSON, so a journal of them is the whole memory of a session: to resume is to ask the same
questions and to find the answers there, and to test the tuner without a GPU is to play back a journal that was recorded on one.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from ..errors import EnvironmentUnsuitable
from ..kernel_templates.arch import ARCHES
from ..tuning_records import Verdict
from .build import build
from .gpu_state import GpuState
from .inputs import facts_from_json, facts_to_json
from .measure import MIN_BLOCKS, Block, Clock, sound
from .search_space import Candidate, SearchSpace
from .worker import Failure, Worker

# Seconds that an answer may take; the start of a process with PyTorch and a CUDA context comes on top.
PATIENCE, START = 60.0, 120.0


class Ask(Protocol):
    """A machine: the answer to a question, or a Failure."""

    def __call__(self, question: dict[str, Any], *, on_kernel: Callable[[int, int], None]) -> Any: ...


@dataclass(frozen=True)
class Machine:
    """The GPU that was asked."""

    name: str
    arch: str
    sm_count: int
    l2_bytes: int
    uuid: str
    memory_bytes: int
    state: GpuState


@dataclass(frozen=True)
class Timing:
    """The sound blocks of one question, and what else was seen while they were taken."""

    blocks: list[Block]
    dropped: int
    throttled: bool
    contended: bool
    floor_us: float | None               # no call can be faster; None: not known

    @property
    def sm_mhz(self) -> tuple[int, int] | None:
        clocks = [block.clock.sm_mhz for block in self.blocks if block.clock.sm_mhz is not None]
        return (min(clocks), max(clocks)) if clocks else None


@dataclass
class Bench:
    """A machine and a journal, with types."""

    ask: Ask
    journal: Path | None = None
    on_kernel: Callable[[int, int], None] = lambda done, total: None
    _answers: dict[str, Any] = field(default_factory=dict)

    def recall(self) -> None:
        """Take the answers that the journal has; a line that was cut off ends it."""
        if self.journal is None or not self.journal.exists():
            return
        for line in self.journal.read_text().splitlines():
            with contextlib.suppress(ValueError):
                entry = json.loads(line)
                self._answers[_key(entry["question"])] = entry["answer"]

    def build(self, space: SearchSpace, candidates: Sequence[Candidate]) -> list[str | Failure]:
        """For each candidate a hash of its generated code, or why it is out."""
        answers = self._answer({"do": "build", **_described(space, candidates)})
        return [answer["source"] if "source" in answer else Failure(**answer["failure"]) for answer in answers]

    def verify(self, space: SearchSpace, candidate: Candidate, *, reference: Candidate, full: bool) -> Verdict | Failure:
        question = {"do": "verify", "op": space.op, "facts": facts_to_json(space.facts), "candidate": candidate.to_json(),
                    "reference": reference.to_json(), "full": full}
        answer = self._answer(question)
        return Failure(**answer["failure"]) if "failure" in answer else Verdict.model_validate_json(json.dumps(answer["verdict"]))

    def time(
        self, space: SearchSpace, lengths: tuple[int, ...], gates: str, candidates: Sequence[Candidate], *, blocks: int,
        again: int = 0,
    ) -> Timing | Failure:
        """Time candidates side by side. again: a number of one's own asks anew what the journal has.

        Raises:
            EnvironmentUnsuitable: too many blocks were disturbed.
        """
        question = {"do": "time", **_described(space, candidates), "lengths": list(lengths), "gates": gates, "blocks": blocks,
                    "again": again}
        answer = self._answer(question, keep=lambda answer: "failure" in answer or _is_sound(answer))
        if "failure" in answer:
            return Failure(**answer["failure"])
        taken = _blocks(answer)
        kept = sound(taken)
        throttled = any(block.clock.throttled for block in taken)
        if not _is_sound(answer):
            raise EnvironmentUnsuitable(
                f"{len(taken) - len(kept)} of {len(taken)} blocks of times were disturbed by "
                f"{'throttling' if throttled else 'times that drift'}; {MIN_BLOCKS} and half of them must remain. "
                "Let the GPU cool down, or lock its clock, and go on with --resume"
            )
        return Timing(kept, len(taken) - len(kept), throttled, bool(answer["other_processes"]), answer["floor_us"])

    def _answer(self, question: dict[str, Any], *, keep: Callable[[Any], bool] = lambda answer: True) -> Any:
        key = _key(question)
        if key in self._answers:
            return self._answers[key]
        answer = self.ask(question, on_kernel=self.on_kernel)
        answer = {"failure": answer.to_json()} if isinstance(answer, Failure) else answer
        answer = json.loads(json.dumps(answer))                          # a session that resumes sees what this one sees
        if keep(answer):
            self._write({"question": question, "answer": answer})
            self._answers[key] = answer
        return answer

    def _write(self, entry: dict[str, Any]) -> None:
        if self.journal is None:
            return
        with self.journal.open("a") as file:
            file.write(json.dumps(entry) + "\n")
            file.flush()
            os.fsync(file.fileno())


def machine_of(ask: Ask, device: int) -> Machine:
    """What the GPU of this index is; asked anew each time, because its state changes.

    Raises:
        EnvironmentUnsuitable: it cannot be asked.
    """
    answer = ask({"do": "describe", "device": device}, on_kernel=lambda done, total: None)
    if isinstance(answer, Failure):
        raise EnvironmentUnsuitable(f"cuda:{device} cannot be used: {answer.detail}")
    state = GpuState(**answer["state"] | {"other_processes": _tuple(answer["state"]["other_processes"])})
    return Machine(**answer | {"state": state})


@contextlib.contextmanager
def gpu() -> Iterator[Ask]:
    """The machine at hand: what needs no GPU is done here, the rest in a worker."""
    with Worker() as worker:

        def ask(question: dict[str, Any], *, on_kernel: Callable[[int, int], None]) -> Any:
            if question["do"] == "build":
                return answer_build(question, on_kernel=on_kernel)
            return worker.ask(question, seconds=PATIENCE if worker.is_running else START + PATIENCE)

        yield ask


def answer_build(question: dict[str, Any], *, on_kernel: Callable[[int, int], None]) -> list[dict[str, Any]]:
    """Build the candidates of a question."""
    space = SearchSpace(facts_from_json(question["facts"]), ARCHES[question["arch"]], question["sm_count"], question["op"])
    built = build(space, [space.from_json(candidate) for candidate in question["candidates"]], on_kernel=on_kernel)
    return [{"failure": outcome.to_json()} if isinstance(outcome, Failure) else {"source": outcome} for outcome in built]


def _described(space: SearchSpace, candidates: Sequence[Candidate]) -> dict[str, Any]:
    return {
        "op": space.op, "facts": facts_to_json(space.facts), "arch": space.arch.name, "sm_count": space.sm_count,
        "candidates": [candidate.to_json() for candidate in candidates],
    }


def _blocks(answer: dict[str, Any]) -> list[Block]:
    return [Block(tuple(block["us"]), Clock(**block["clock"]), block["elapsed_us"]) for block in answer["blocks"]]


def _is_sound(answer: dict[str, Any]) -> bool:
    return len(sound(_blocks(answer))) >= max(MIN_BLOCKS, len(answer["blocks"]) // 2)


def _key(question: dict[str, Any]) -> str:
    return json.dumps(question, sort_keys=True)


def _tuple(values: list[int] | None) -> tuple[int, ...] | None:
    return None if values is None else tuple(values)
