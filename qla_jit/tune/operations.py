"""What must the tuner know of an operation beside its strategies? What a run takes and gives, what is right, and the bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from .. import select
from ..ops import backward, fallback, pipeline
from ..ops.inputs import CallFacts, CallInputs, state_shape
from ..ops.plan import BACKWARD, FORWARD
from ..ops.results import Gradients
from .inputs import call_bytes, checked, make_call
from .search_space import Candidate

# Of do's norm: an error of a gradient that is below this is none. Where heads forget within a token, gradients of their gates are
# 1e-9 of terms near 1 that cancel, and what fp32 sums hold is all that can be asked for.
NEGLIGIBLE = 1e-7

# How much farther from the baseline's an error may be. dg is a small difference of sums over the tokens of a chunk, so its errors
# are as few as there are chunks in heads that do not forget. With each rounding simulated in float64, for 400 draws of one such
# head of 640 tokens, that by the roundings of `registers` was 0.95 times that by those of `chunked` as a root mean square, and
# above 1.5 times in 13 % of the draws, 2.3 in 1 %. Those of A_log and dt_bias are as few as there are heads.
SLACK = {"g": 2.0, "A_log": 2.0, "dt_bias": 2.0}


@dataclass(frozen=True)
class Sample:
    """What one run takes."""

    inputs: CallInputs
    do: torch.Tensor | None = None               # [B, T, HV, V], gradient of o, of a backward
    dht: torch.Tensor | None = None              # of the final state, where it has one

    def forget_tail(self, tail: int) -> None:
        """NaN in the last tokens, which belong to no sequence."""
        for x in (self.inputs.q, self.inputs.k, self.inputs.v, self.do):
            if x is not None:
                x[:, x.shape[1] - tail :] = float("nan")


Outputs = dict[str, torch.Tensor]
Run = Callable[[Sample], Outputs]


@dataclass(frozen=True)
class Expected:
    """An output as it should be, and what errors in it are told over."""

    value: torch.Tensor                          # from float64; float32 is exact enough to compare with
    norm: float                                  # of the value, or of what it is the sum of
    largest: float                               # likewise
    negligible: float = 0.0                      # the norm of errors that are none
    slack: float = 1.0                           # how much farther off than usual it may be

    @classmethod
    def of(cls, exact: torch.Tensor, *, negligible: float = 0.0, slack: float = 1.0) -> Expected:
        return cls(exact.float(), exact.norm().item(), exact.abs().max().item(), negligible, slack)


@dataclass(frozen=True)
class Operation:
    """One operation. Its strategies and their steps are in ops/plan.py."""

    oracle: str                                  # as it goes into verdicts
    baseline_error: float                        # a baseline that is farther off, as a root mean square, cannot judge others
    add_cotangents: Callable[[CallInputs, int], Sample]                  # random ones from a seed, where the operation takes any
    run: Run                                     # by what is in force
    in_force: Callable[[Candidate], AbstractContextManager[None]]
    expected: Callable[[Sample], dict[str, Expected]]
    bytes: Callable[[CallFacts, tuple[int, ...]], tuple[int, int]]       # that a run must read and write, at least
    of_tokens: tuple[str, ...]                   # outputs [B, T, ...]; exactly 0 where a token belongs to no sequence

    def sample(self, facts: CallFacts, lengths: tuple[int, ...], gates: str, *, seed: int = 0, tail: int = 0) -> Sample:
        """As inputs.make_call()."""
        return self.add_cotangents(checked(facts, make_call(facts, lengths, gates, seed=seed, tail=tail)), seed)

    def runner(self, candidate: Candidate) -> Run:
        def run(sample: Sample) -> Outputs:
            with self.in_force(candidate):
                return self.run(sample)

        return run


def _run_forward(sample: Sample) -> Outputs:
    result = pipeline.forward(sample.inputs)
    return _present(o=result.o, final_state=result.final_state)


def _run_backward(sample: Sample) -> Outputs:
    return _present(**backward.backward(sample.inputs, sample.do, sample.dht)._asdict())


def _random_cotangents(inputs: CallInputs, seed: int) -> Sample:
    facts = inputs.facts
    generator = torch.Generator(device=facts.device).manual_seed(-1 - seed)          # of no call's numbers

    def draw(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, device=facts.device, generator=generator)

    do = draw(tuple(inputs.v.shape)).to(facts.dtype)
    if not facts.output_final_state:
        return Sample(inputs, do)
    shape, _ = state_shape(inputs.N, facts.HV, facts.K, facts.V, facts.state_v_first)
    # As large as do, it would make up 92 % and more of all gradients but dq, and hide errors in the rest; so it makes up half.
    return Sample(inputs, do, facts.K**-0.5 * draw(shape))


def _expected_outputs(sample: Sample) -> dict[str, Expected]:
    result = fallback.forward(_in_float64(sample.inputs))
    return {name: Expected.of(exact) for name, exact in _present(o=result.o, final_state=result.final_state).items()}


def _expected_gradients(sample: Sample) -> dict[str, Expected]:
    do, dht = (None if x is None else x.double() for x in (sample.do, sample.dht))
    exact = _present(**fallback.backward(_in_float64(sample.inputs), do, dht)._asdict())
    negligible = NEGLIGIBLE * do.norm().item()
    expected = {name: Expected.of(x, negligible=negligible, slack=SLACK.get(name, 1.0)) for name, x in exact.items()}
    for name in ("A_log", "dt_bias"):            # sums over all tokens, which may cancel
        if name in expected:
            summed = expected["g"].norm
            expected[name] = dataclasses.replace(expected[name], norm=summed, largest=summed)
    return expected


def _in_float64(inputs: CallInputs) -> CallInputs:
    tensors = _present(**{name: getattr(inputs, name) for name in Gradients._fields})
    facts = inputs.facts._replace(dtype=torch.float64)
    return dataclasses.replace(inputs, facts=facts, **{name: x.double() for name, x in tensors.items()})


def _present(**tensors: torch.Tensor | None) -> Outputs:
    return {name: x for name, x in tensors.items() if x is not None}


def _bytes_of_gradients(facts: CallFacts, lengths: tuple[int, ...]) -> tuple[int, int]:
    """It reads the inputs and a gradient of each output, and writes one of each input."""
    inputs, outputs = call_bytes(facts, lengths)
    return inputs + outputs, inputs


OPERATIONS = {
    FORWARD: Operation(
        oracle="recurrence in float64, chunk by chunk",
        baseline_error=1e-2,
        add_cotangents=lambda inputs, seed: Sample(inputs),
        run=_run_forward,
        in_force=lambda candidate: select.override(candidate.strategy, split=candidate.split, **dict(candidate.configs)),
        expected=_expected_outputs,
        bytes=call_bytes,
        of_tokens=("o",),
    ),
    BACKWARD: Operation(
        oracle="autograd of the recurrence in float64, chunk by chunk",
        baseline_error=2e-2,             # dg of heads that never forget, through o alone, is up to 1.5e-2 off
        add_cotangents=_random_cotangents,
        run=_run_backward,
        in_force=lambda candidate: select.override(
            backward_strategy=candidate.strategy, backward_split=candidate.split, **dict(candidate.configs)
        ),
        expected=_expected_gradients,
        bytes=_bytes_of_gradients,
        of_tokens=("q", "k", "v", "g", "beta"),
    ),
}
