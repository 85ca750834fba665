"""Tuned records to test with: one problem on an H200, on points and with times that each test gives."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import torch

from qla_jit.kernel_templates.arch import SM90A
from qla_jit.ops.inputs import CallFacts
from qla_jit.ops.plan import FORWARD
from qla_jit.tuning_records import (
    Candidate,
    Entry,
    Hardware,
    Measurement,
    Negative,
    Point,
    Problem,
    Provenance,
    Ratio,
    Reason,
    Record,
    Rigor,
    Versions,
)

ARCH = SM90A
H200 = Hardware(arch="sm_90a", sm_count=132, l2_bytes=60 << 20)
DAY = datetime(2026, 1, 1, tzinfo=timezone.utc)

DEFAULT = {"state_scan": {"block_v": 64, "threads": 128, "stages": 2}}
WIDE = {"state_scan": {"block_v": 128, "threads": 256, "stages": 2}}
NARROW = {"state_scan": {"block_v": 32, "threads": 128, "stages": 2}}


def facts(**changes) -> CallFacts:
    given = dict(
        device=torch.device("cuda", 0), dtype=torch.bfloat16, g_dtype=torch.float32, beta_dtype=torch.float32,
        state_dtype=None, A_log_dtype=None, dt_bias_dtype=None, cu_seqlens_dtype=None, H=2, HV=8, K=128, V=128, chunk_size=64,
        output_final_state=True, state_v_first=False, use_qk_l2norm_in_kernel=False, use_beta_sigmoid_in_kernel=False,
        allow_neg_eigval=False, use_gate_in_kernel=False, auto_cp=True,
    )
    return CallFacts(**given | changes)


def one_sequence(*chunks: int, gates: str = "mixed") -> tuple[Point, ...]:
    return tuple(Point(chunks=n, longest=n, sequences=1, gates=gates) for n in chunks)


def entry(configs, *times, default=None, spread=0.01, split_rule=None, strategy="chunked") -> Entry:
    """Times in us at each point; `default` are those of the default, without which the entry is the default."""
    curve = []
    for number, time in enumerate(times):
        if time is None:
            curve.append(None)
            continue
        ratio = None
        if default is not None:
            value = default[number] / time
            ratio = Ratio(value=value, low=value * (1 - spread), high=value * (1 + spread))
        curve.append(Measurement(protocol="p1", samples=30, median_us=time, mad_us=0.1, speedup=ratio))
    return Entry(candidate=Candidate(strategy=strategy, configs=configs), split_rule=split_rule, curve=tuple(curve))


def negative(configs=NARROW, reason=Reason.RACY, detail="launch 3 differed") -> Negative:
    return Negative(candidate=Candidate(strategy="chunked", configs=configs), reason=reason, detail=detail, versions=Versions())


def record(*, times=(100.0, 400.0), wide=(80.0, 320.0), points=None, days=0, **changes) -> Record:
    """By default: the default at 32 and 128 chunks, and a config that is 1.25 times as fast."""
    given = dict(
        op=FORWARD, hardware=H200, problem=Problem.of(facts()), rigor=Rigor.RACED,
        points=one_sequence(32, 128) if points is None else points,
        entries=(entry(DEFAULT, *times), entry(WIDE, *wide, default=times)),
        provenance=Provenance(
            versions=Versions(tilelang="0.1.15"), templates={}, gpu="NVIDIA H200", recorded=DAY + timedelta(days=days),
            command="qla-tune tune --heads 2:8 --dims 128:128",
        ),
    )
    return Record(**given | changes)


def problem(**changes) -> Problem:
    return Problem.of(facts(**changes))
