"""Is a candidate correct, repeatable, and does it keep to its memory? Asked before it is timed: speed never excuses a "no".

    right        each output's error against the recurrence in float64 is at most 1.25 times the error of the reference
                 template on the same input as a root mean square, and at most twice as a maximum
    repeatable   eight launches are equal bit by bit, with other work between and beside them
    contained    every allocation is filled with NaN and has guard bytes around it, anew for each launch
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..ops.inputs import CallFacts
from ..ops.plan import BACKWARD, FORWARD
from ..tuning_records import OutputError, Verdict
from .operations import OPERATIONS, Expected, Outputs, Run, Sample
from .worker import Failure

# Times the error of the reference template. The largest of a few thousand rounding errors is a matter of luck: on an H200 it
# differs by up to 1.9 between kernels whose root mean squares agree within 1 %.
RMS_RATIO, MAX_RATIO = 1.25, 2.0
REPEATS = 8
# An error below what rounding to the inputs' dtype alone may cost is no error, however exact the reference template happens
# to be on an input: eps / 2 at the largest element, eps / 8 as a root mean square (0.1 % in bf16).
MAX_FLOOR, RMS_FLOOR = 1 / 2, 1 / 8
# Errors that are negligible as a root mean square may be so many times that at their largest.
MAX_OVER_RMS = 16
FEW_VALUES = 512                         # of fewer, the root mean square is a matter of luck too

CASES_HELD = 12                          # with their inputs and oracles, on the GPU
GUARD_BYTES = 4096                       # a multiple of every alignment that a kernel asks for
GUARD, NAN = 0xA5, 0xFF                  # the bytes: all ones are NaN in every float dtype


@dataclass(frozen=True)
class Case:
    """One input that candidates are checked on."""

    name: str
    lengths: tuple[int, ...]
    gates: str
    tail: int = 0                        # tokens of NaN behind the last packed sequence


def cases(facts: CallFacts, split: int | None, *, full: bool, op: str = FORWARD) -> list[Case]:
    """The inputs for an operation of a call; one for a first look, all of them before a record is written.

    Lengths lie around multiples of the chunk, where masks go wrong; some are 0 and 1; one is long enough for three segments, the
    last of them ragged, or for two where segments are so long that the oracle would take seconds. One case has over a thousand
    blocks, more than run at a time. Sequences of one token are several for a backward: gates and betas have one value a head.
    """
    C = facts.chunk_size
    whole_segments = 0 if split is None else 2 * split if split <= 32 else split
    long = (whole_segments + (split or 10) // 2) * C + C // 2 + 5
    many = -(-1024 // facts.HV)
    if facts.varlen:
        ragged, tail = (0, 1, C - 1, 0, C, C + 1, 3 * C + 5, long, 1), 37
    else:
        ragged, tail = (long, long), 0
    found = [Case("ragged-mixed", ragged, "mixed", tail)]
    if full:
        found += [Case(f"ragged-{gates}", ragged, gates, tail) for gates in ("open", "closed", "qwen")]
        found.append(Case("single-token", (1,) * (-(-FEW_VALUES // facts.HV) if op == BACKWARD else 1), "mixed"))
        found.append(Case("many-blocks", (C + 6,) * many, "mixed"))
    return found


@dataclass
class _Judged:
    """One case with what a candidate's outputs are compared with."""

    sample: Sample
    expected: dict[str, Expected]
    reference_errors: dict[str, tuple[float, float]]         # of the reference template: (rms, max)


@dataclass
class Judge:
    """Checks candidates for an operation of one call. Oracle and reference results are computed once for each case."""

    facts: CallFacts
    run_reference: Run
    op: str = FORWARD
    _judged: dict[Case, _Judged] = field(default_factory=dict)

    def verdict(self, run: Run, of: Sequence[Case]) -> Verdict | Failure:
        """What a candidate passed, or the first thing that it failed at."""
        worst: dict[str, OutputError] = {}
        for case in of:
            judged = self._judge(case)
            if isinstance(judged, Failure):
                return judged
            first: Outputs = {}
            for repeat in range(REPEATS):
                with GuardedMemory() as memory:
                    outputs = run(judged.sample)
                _other_work(self.facts.device, beside=repeat % 2 == 1)
                damage = memory.damage()
                if damage is not None:
                    return Failure("wrong", f"{case.name}: {damage}")
                if not first:
                    first = outputs
                    failure = self._compare(case, judged, outputs, worst)
                    if failure is not None:
                        return failure
                for name, output in outputs.items():
                    if not torch.equal(_bits(output), _bits(first[name])):
                        return Failure("racy", f"{case.name}: launch {repeat + 1} of {REPEATS} gives another {name}")
        return Verdict(
            oracle=OPERATIONS[self.op].oracle,
            errors=worst,
            repeats=REPEATS,
            guards_intact=True,
            cases=tuple(case.name for case in of),
        )

    def _judge(self, case: Case) -> _Judged | Failure:
        judged = self._judged.get(case)
        if judged is not None:
            return judged
        operation = OPERATIONS[self.op]
        sample = operation.sample(self.facts, case.lengths, case.gates, tail=case.tail)
        expected = operation.expected(sample)
        sample.forget_tail(case.tail)
        errors = {name: self._errors(output, expected[name]) for name, output in self.run_reference(sample).items()}
        for name, (rms, _) in errors.items():
            if not rms <= expected[name].slack * operation.baseline_error:
                return Failure("wrong", f"{case.name}: the reference template's own {name} has the error {rms:.1e}")
        if len(self._judged) >= CASES_HELD:
            del self._judged[next(iter(self._judged))]
        judged = self._judged[case] = _Judged(sample, expected, errors)
        return judged

    def _compare(
        self, case: Case, judged: _Judged, outputs: Outputs, worst: dict[str, OutputError]
    ) -> Failure | None:
        eps = torch.finfo(self.facts.dtype).eps
        if outputs.keys() != judged.expected.keys():
            return Failure("wrong", f"{case.name}: gives {', '.join(outputs)}; {', '.join(judged.expected)} were asked for")
        for name, output in outputs.items():
            rms, largest = self._errors(output, judged.expected[name])
            their_rms, their_largest = judged.reference_errors[name]
            slack = judged.expected[name].slack
            for kind, error, theirs, ratio, floor in (
                ("rms", rms, their_rms, slack * RMS_RATIO, RMS_FLOOR * eps),
                ("max", largest, their_largest, slack * MAX_RATIO, MAX_FLOOR * eps),
            ):
                limit = max(ratio * theirs, floor)
                if not error <= limit:                       # NaN is not at most anything
                    return Failure(
                        "wrong", f"{case.name}: {kind} error of {name} is {error:.1e}; {limit:.1e} is allowed, "
                        f"{ratio:g} times that of the reference template"
                    )
            if case.tail and name in OPERATIONS[self.op].of_tokens and output[:, -case.tail :].any():
                return Failure("wrong", f"{case.name}: {name} is not 0 for tokens that belong to no sequence")
            before = worst.get(name, OutputError(rms=0, max=0, over_reference=0))
            worst[name] = OutputError(
                rms=max(before.rms, rms), max=max(before.max, largest),
                over_reference=max(before.over_reference, rms / max(their_rms, RMS_FLOOR * eps)),
            )
        return None

    def _errors(self, actual: torch.Tensor, expected: Expected) -> tuple[float, float]:
        """Root mean square and maximum of the error, relative to those of what is expected."""
        eps = torch.finfo(self.facts.dtype).eps
        difference = actual.double() - expected.value
        # Of what is so small that a negligible error would count, this much is taken, of which the floors are negligible.
        norm = expected.negligible / (RMS_FLOOR * eps)
        largest = MAX_OVER_RMS * expected.negligible / math.sqrt(actual.numel()) / (MAX_FLOOR * eps)
        return (
            difference.norm().item() / (max(expected.norm, norm) or 1.0),
            difference.abs().max().item() / (max(expected.largest, largest) or 1.0),
        )


class GuardedMemory(TorchFunctionMode):
    """Within the block, what PyTorch is asked to leave uninitialised is filled with NaN and stands between guard bytes."""

    ALLOCATORS = (torch.empty, torch.empty_like, torch.Tensor.new_empty)

    def __init__(self) -> None:
        super().__init__()
        self._allocations: list[torch.Tensor] = []           # as bytes, guards included
        self._sizes: list[int] = []                          # without them

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function not in self.ALLOCATORS:
            return function(*args, **kwargs)
        described = function(*args, **kwargs | {"device": "meta"})
        device = kwargs.get("device") or (args[0].device if isinstance(args[0], torch.Tensor) else torch.get_default_device())
        if described.numel() == 0:
            return function(*args, **kwargs)
        size = described.numel() * described.itemsize
        padded = -(-size // GUARD_BYTES) * GUARD_BYTES       # whole guards, so that the next view stays aligned
        allocation = torch.full((GUARD_BYTES + padded + GUARD_BYTES,), GUARD, dtype=torch.uint8, device=device)
        inside = allocation[GUARD_BYTES : GUARD_BYTES + size]
        inside.fill_(NAN)
        self._allocations.append(allocation)
        self._sizes.append(size)
        return inside.view(described.dtype).view(described.shape)

    def damage(self) -> str | None:
        """Which guard bytes were written, or None; waits for the GPU."""
        for number, (allocation, size) in enumerate(zip(self._allocations, self._sizes, strict=True), start=1):
            for where, guard in (("before", allocation[:GUARD_BYTES]), ("behind", allocation[GUARD_BYTES + size :])):
                written = int((guard != GUARD).sum())
                if written:
                    return f"{written} bytes {where} allocation {number} of {len(self._allocations)} were written"
        return None


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


def _other_work(device: torch.device, *, beside: bool) -> None:
    """Something that moves the next launch in time, or runs beside it and takes some of the GPU."""
    if device.type != "cuda":
        return
    x = torch.ones(2048, 2048, device=device, dtype=torch.bfloat16)
    stream = torch.cuda.Stream(device) if beside else torch.cuda.current_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(8):
            y = x @ x
    x.record_stream(stream)
    y.record_stream(stream)
