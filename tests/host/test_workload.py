"""Do options and captured counts become the calls that they mean?"""

import pytest
import records
import torch
from records import H200, problem

from qla_jit import tuning_db
from qla_jit.capture import CountedCalls, SampledGates, Workload
from qla_jit.errors import InputError
from qla_jit.ops.plan import Extents
from qla_jit.tune.inputs import GATE_PROFILES
from qla_jit.tune.search_space import extents_of
from qla_jit.tuning_records import Problem, Rigor, save_directory
from qla_jit.workload import (
    MOST_BATCHES,
    coverage,
    facts_of,
    gate_profile,
    parse_batches,
    parse_pairs,
    targets_of,
    typical_batch,
)

PACKED = problem(cu_seqlens_dtype=torch.int32)


def counted(of=None, chunks=64, longest=None, sequences=1, count=1):
    return CountedCalls(
        problem=of or problem(), chunks=chunks, longest=longest or chunks, sequences=sequences, count=count
    )


def sampled(*quantiles, of=None):
    return SampledGates(problem=of or problem(), samples=1, quantiles=quantiles)


@pytest.mark.parametrize("of", [problem(), PACKED, problem(dtype=torch.float16, chunk_size=32, HV=16)], ids=str)
def test_the_facts_that_stand_for_a_problem_have_that_problem(of):
    assert Problem.of(facts_of(of, torch.device("cuda", 1))) == of


@pytest.mark.parametrize(
    ("text", "packed", "batches"),
    [
        ("2048:32768", False, ((2048,), (4096,), (8192,), (16384,), (32768,))),
        ("3000:8000", False, ((3000,), (6000,))),
        ("4096", False, ((4096,),)),
        ("4x512", False, ((512,) * 4,)),
        ("512,2x512,512", False, ((512,), (512, 512))),
        ("8192+300+1", True, ((8192, 300, 1),)),
        ("2x64+0", True, ((64, 64, 0),)),
    ],
)
def test_lengths(text, packed, batches):
    assert parse_batches(text, packed=packed) == batches


@pytest.mark.parametrize("text", ["", "a", "1:", "-4", "2048:4096:8", "4x", "0", "4096:2048", "300+1", "2x", "1e3", "９"])
def test_lengths_that_are_none_are_refused(text):
    with pytest.raises(InputError):
        parse_batches(text, packed=False)


def test_pairs():
    assert parse_pairs(["2:8,4:16", "16:48"], "--heads") == [(2, 8), (4, 16), (16, 48)]


@pytest.mark.parametrize("text", ["", "2", "2:", "0:8", "2:8:4", "2:8,", "two:eight"])
def test_pairs_that_are_none_are_refused_by_the_name_of_their_option(text):
    with pytest.raises(InputError, match="--heads must be pairs"):
        parse_pairs([text], "--heads")


# Captured counts


@pytest.mark.parametrize(
    ("of", "extents", "batch"),
    [
        (problem(), Extents(64, 64, 1), (4096,)),
        (problem(), Extents(64, 16, 4), (1024,) * 4),
        (PACKED, Extents(64, 64, 1), (4096,)),
        (PACKED, Extents(10, 5, 4), (320, 128, 128, 64)),
        (PACKED, Extents(5, 5, 3), (320, 0, 0)),
    ],
    ids=str,
)
def test_a_typical_batch_has_the_sizes_that_were_counted(of, extents, batch):
    assert typical_batch(of, extents) == batch
    assert extents_of(batch, of.chunk_size) == extents


def test_the_problem_and_the_batches_that_take_most_come_first():
    small, large = problem(HV=2), problem(HV=8)
    workload = Workload(calls=(
        counted(small, chunks=512, count=3), counted(large, chunks=8, count=10), counted(large, chunks=512, count=1),
    ))
    targets = targets_of(workload)
    assert [target.problem for target in targets] == [large, small]
    assert targets[0].batches == ((512 * 64,), (8 * 64,))


def test_only_the_heaviest_batches_are_tuned():
    workload = Workload(calls=tuple(counted(chunks=chunks) for chunks in range(1, 30)))
    (target,) = targets_of(workload)
    assert target.batches == tuple((chunks * 64,) for chunks in range(29, 29 - MOST_BATCHES, -1))


@pytest.mark.parametrize(
    ("quantiles", "profile"),
    [
        ((0.0,) * 7, "open"),
        ((-0.3, -0.2, -0.1, -0.05, -0.01, 0.0, 0.0), "mixed"),
        ((-20.0, -18.0, -8.0, -2.0, -0.5, -0.1, 0.0), "qwen"),
        ((-1e4, -21.0, -21.0, -21.0, -20.0, -19.0, -1.0), "closed"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_gates_are_timed_with_the_profile_that_is_most_like_them(quantiles, profile):
    assert gate_profile(sampled(*quantiles)) == profile
    assert profile in GATE_PROFILES
    (target,) = targets_of(Workload(calls=(counted(),), gates=(sampled(*quantiles),)))
    assert target.gates == profile


def test_gates_that_were_not_sampled_are_taken_as_mixed():
    assert gate_profile(None) == "mixed"


def test_the_share_of_calls_with_confirmed_records(monkeypatch, tmp_path):
    monkeypatch.setattr(tuning_db, "__path__", [str(tmp_path)])
    monkeypatch.setenv("QLA_JIT_CACHE_DIR", str(tmp_path / "cache"))
    workload = Workload(calls=(
        counted(chunks=64, count=6), counted(chunks=4096, count=3), counted(problem(HV=16), count=1),
    ))
    save_directory(tmp_path, [records.record(rigor=Rigor.CONFIRMED), records.record(problem=problem(HV=16))])
    assert coverage(workload, H200) == pytest.approx(0.6)        # 4096 chunks are outside, and HV=16 was only raced
    assert coverage(Workload(calls=()), H200) == 0.0
