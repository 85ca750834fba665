"""chunk_inverse lowers for every problem that it claims, keeps five blocks on an SM of Hopper, and says what it cannot do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builds import lowered, ptxas_reports, refusal, serialised

from qla_jit.kernel_templates.arch import ARCHES, SM80, SM90A
from qla_jit.kernel_templates.chunk_inverse import TEMPLATE, Config, Problem
from qla_jit.ops.plan import KEY_DIMS

QWEN = Problem(
    H=2, HV=8, K=128, C=64, dtype="bfloat16", beta_dtype="bfloat16", packed=True, index_dtype="int32", beta_sigmoid=False,
    negative_eigenvalues=False, beta_floor=-24,
)  # fmt: skip

PROBLEMS = [
    *({"K": K} for K in KEY_DIMS),
    *({"HV": 2 * group} for group in (1, 2, 3, 6, 8)),           # idle warps, a part of a second round, two full rounds
    {"packed": False, "index_dtype": "int64"},
    {"beta_dtype": "float32", "beta_sigmoid": True},
    {"beta_dtype": "float16", "beta_sigmoid": True, "negative_eigenvalues": True},
    {"beta_floor": None},
]


def name_of(changes: Any) -> str:
    return "-".join(f"{name}{value}" for name, value in changes.items())


@pytest.mark.parametrize("changes", PROBLEMS, ids=name_of)
def test_every_problem_lowers_to_bulk_copies_and_warpgroup_products(changes: dict[str, Any]) -> None:
    source = lowered(TEMPLATE, replace(QWEN, **changes), SM90A)
    for instruction in ("tma_load", "wgmma", "tma_store"):
        assert instruction in source


@pytest.mark.parametrize("group", [2, 4, 6], ids=lambda group: f"group{group}")
def test_every_warp_with_a_head_stores_its_own_tile(group: int) -> None:
    source = lowered(TEMPLATE, replace(QWEN, HV=2 * group), SM90A)
    # A store that elects one thread of all 128, not one of its warp, would leave the other warps' tiles unwritten.
    assert source.count("tma_store(") == source.count("tl_shuffle_elect<32>") == min(4, group)


@pytest.mark.parametrize(
    ("changes", "arch", "reason"),
    [
        ({"C": 32}, SM90A, "C=32"),
        ({"dtype": "float16"}, SM90A, "dtype=float16"),
        ({"K": 100}, SM90A, "200 bytes"),
        ({}, SM80, "sm_80"),
    ],
    ids=str,
)
def test_what_it_cannot_do_is_rejected_with_the_reason(changes: dict[str, Any], arch: Any, reason: str) -> None:
    assert reason in refusal(TEMPLATE, replace(QWEN, **changes), arch)


def test_only_a_chip_with_warpgroup_products_is_claimed() -> None:
    assert all(ARCHES[name].has_wgmma for name in TEMPLATE.arches)


@pytest.mark.timeout(600)
def test_five_blocks_fit_an_sm_without_spills(tmp_path: Path) -> None:
    config = Config(blocks_per_sm=5, last_slot_first=True, early_next=True)
    (ptxas,) = ptxas_reports([(TEMPLATE, QWEN, config)], tmp_path)
    for function in ptxas["functions"].values():
        assert function["spill_store_bytes"] == 0
        assert function["registers"] * 128 * 5 <= SM90A.registers_per_sm
    assert not serialised(ptxas)
    # An SM of Hopper has 228 KiB for its blocks, each of which takes 1 KiB more than it asks for; the barrier takes another.
    assert 5 * (sum(buffer.bytes for buffer in TEMPLATE.buffers(QWEN, config)) + 2048) <= 228 * 1024
