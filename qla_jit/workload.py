"""Which calls are to be tuned, on which batches? From head counts, from a model, or from captured counts."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from .capture import SampledGates, Workload
from .errors import InputError
from .kernel_templates.arch import ARCHES
from .ops.inputs import CallFacts
from .ops.plan import FORWARD, Extents, chunk_of_sizes
from .select import choose
from .tune.search_space import extents_of
from .tuning_records import Hardware, Problem, Rigor

DEFAULT_LENGTHS = "2048:32768"
MOST_BATCHES = 8                         # of one problem; the calls that take most of the time are taken

Batch = tuple[int, ...]                  # the tokens of each sequence


@dataclass(frozen=True)
class Target:
    """One problem, and the batches to tune it on, the most important first."""

    problem: Problem
    batches: tuple[Batch, ...]
    gates: str = "mixed"


def facts_of(problem: Problem, device: torch.device) -> CallFacts:
    """The call that stands for a problem. It has states at both ends: what is verified holds the code of calls without."""
    return CallFacts(
        device=device,
        dtype=getattr(torch, problem.dtype),
        g_dtype=torch.float32,
        beta_dtype=torch.float32,
        state_dtype=torch.float32,
        A_log_dtype=None,
        dt_bias_dtype=None,
        cu_seqlens_dtype=torch.int32 if problem.varlen else None,
        H=problem.H,
        HV=problem.HV,
        K=problem.K,
        V=problem.V,
        chunk_size=problem.chunk_size,
        output_final_state=True,
        state_v_first=False,
        use_qk_l2norm_in_kernel=False,
        use_beta_sigmoid_in_kernel=False,
        allow_neg_eigval=False,
        use_gate_in_kernel=False,
        auto_cp=True,
    )


def parse_pairs(texts: Iterable[str], what: str) -> list[tuple[int, int]]:
    """("2:8,4:16",) -> [(2, 8), (4, 16)].

    Raises:
        InputError: a part is not two whole numbers of at least 1.
    """
    pairs = []
    for part in ",".join(texts).split(","):
        match = re.fullmatch(r"([1-9]\d{0,5}):([1-9]\d{0,5})", part.strip(), re.ASCII)
        if match is None:
            raise InputError(f"{what} must be pairs as in 2:8 or 2:8,4:16; got {part!r}")
        pairs.append((int(match[1]), int(match[2])))
    return pairs


def parse_batches(text: str, *, packed: bool) -> tuple[Batch, ...]:
    """Batches, separated by commas: "2048:32768" is one sequence of 2048, 4096, ... 32768 tokens; "4x8192" four of 8192;
    "8192+300+1" three of these, which only packed sequences can be.

    Raises:
        InputError: the text is none of these.
    """
    batches: dict[Batch, None] = {}
    for part in text.split(","):
        if ends := re.fullmatch(r"([1-9]\d{0,8}):([1-9]\d{0,8})", part.strip(), re.ASCII):
            length, last = int(ends[1]), int(ends[2])
            while length <= last:
                batches[(length,)] = None
                length *= 2
            continue
        batch: list[int] = []
        for term in part.split("+"):
            match = re.fullmatch(r"(?:([1-9]\d{0,4})x)?(\d{1,9})", term.strip(), re.ASCII)
            if match is None:
                raise InputError(f"lengths must be as in 2048:32768, 4x8192 or 8192+300+1; got {part!r}")
            batch += [int(match[2])] * int(match[1] or 1)
        if not packed and len(set(batch)) > 1:
            raise InputError(f"sequences of different lengths must be packed; got {part!r}; add --packed")
        if sum(batch) == 0:
            raise InputError(f"a batch must have tokens; got {part!r}")
        batches[tuple(batch)] = None
    if not batches:
        raise InputError(f"lengths must name a batch at least; got {text!r}")
    return tuple(batches)


def targets_of(workload: Workload) -> list[Target]:
    """The problems of captured counts, the one that takes most first."""
    gates = {sampled.problem: sampled for sampled in workload.gates}
    by_problem: dict[Problem, list[tuple[Batch, int]]] = {}
    for calls in workload.calls:
        by_problem.setdefault(calls.problem, []).append((typical_batch(calls.problem, calls.extents), calls.count))
    targets: list[tuple[int, Target]] = []
    for problem, counted in by_problem.items():
        heaviest = sorted(counted, key=lambda item: -sum(item[0]) * item[1])[:MOST_BATCHES]
        batches = tuple(dict.fromkeys(batch for batch, _ in heaviest))
        work = problem.HV * sum(sum(batch) * count for batch, count in counted)
        targets.append((work, Target(problem, batches, gate_profile(gates.get(problem)))))
    return [target for _, target in sorted(targets, key=lambda item: -item[0])]


def typical_batch(problem: Problem, extents: Extents) -> Batch:
    """A batch of these sizes: one sequence is the longest, and the others share the rest."""
    C, longest, sequences = problem.chunk_size, extents.longest, extents.sequences
    if not problem.varlen:
        return (longest * C,) * sequences
    rest = max(extents.chunks - longest, 0)
    others = [min(rest // (sequences - 1) + (n < rest % (sequences - 1)), longest) for n in range(sequences - 1)]
    return (longest * C, *(chunks * C for chunks in others))


def gate_profile(sampled: SampledGates | None) -> str:
    """The tuner's gate profile that is most like what was sampled."""
    if sampled is None:
        return "mixed"
    strongest, median = sampled.quantiles[1], sampled.median
    if median > -1e-3:
        return "open"
    if median < -5:
        return "closed"
    return "qwen" if strongest < -5 else "mixed"                     # qwen: heads from 0 to -21 a token


def coverage(workload: Workload, hardware: Hardware, *, op: str = FORWARD) -> float:
    """The share of the calls for which there is a confirmed record of the operation."""
    covered = total = 0
    for calls in workload.calls:
        facts = facts_of(calls.problem, torch.device("cuda"))
        extents = extents_of(typical_batch(calls.problem, calls.extents), chunk_of_sizes(op, facts))
        dispatch = choose(facts, ARCHES[hardware.arch], op=op, hardware=hardware, extents=extents)
        total += calls.count
        covered += calls.count * (dispatch.match != "none" and dispatch.rigor is Rigor.CONFIRMED)
    return covered / total if total else 0.0
