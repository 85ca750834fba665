"""chunk_inverse on a GPU against float64, launched directly: its error, its zeros, and what it must not look at."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from itertools import accumulate

import pytest
import torch
import torch.nn.functional as F
from cases import BETAS, KEYS, RAGGED_LENGTHS, relative_l2

from qla_jit import kernel_cache
from qla_jit.compiler import CompileRequest
from qla_jit.errors import QLAError
from qla_jit.kernel_templates.arch import SM90A
from qla_jit.kernel_templates.chunk_inverse import TEMPLATE, Config, Problem
from qla_jit.kernel_templates.macros.sequences import slot_count

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() != SM90A.compute_capability, reason="written for Hopper"
    ),
]

C = 64
LENGTHS = (200, 64, 1, 0, 447)

# Rounding Ab to bf16 alone costs 1.6e-3 with unit keys and 1.1e-3 with collinear ones.
BOUND = 2.5e-3
BOUND_LONG_KEYS = 5.0e-3

QWEN = Problem(
    H=2, HV=8, K=128, C=C, dtype="bfloat16", beta_dtype="float32", packed=True, index_dtype="int32", beta_sigmoid=False,
    negative_eigenvalues=False, beta_floor=-24,
)  # fmt: skip

PROBLEMS = [
    *(replace(QWEN, HV=2 * group) for group in (1, 2, 3, 4, 8)),
    *(replace(QWEN, K=K) for K in (64, 96, 192, 256)),
    *(replace(QWEN, H=1, HV=6, beta_dtype=dtype, beta_sigmoid=True) for dtype in ("float32", "bfloat16", "float16")),
    replace(QWEN, beta_dtype="bfloat16"),
    replace(QWEN, beta_dtype="bfloat16", beta_sigmoid=True, negative_eigenvalues=True),
    replace(QWEN, index_dtype="int64"),
    replace(QWEN, beta_floor=None),
]
EQUAL_LENGTHS = replace(QWEN, packed=False)
DEFAULT = TEMPLATE.default_config(QWEN, SM90A)
CONFIGS = [
    DEFAULT,
    replace(DEFAULT, blocks_per_sm=3),
    replace(DEFAULT, last_slot_first=True),
    replace(DEFAULT, early_next=False),
]


def name_of(problem: Problem) -> str:
    changed = [f"{name}{value}" for name, value in vars(problem).items() if value != getattr(QWEN, name)]
    return "-".join(changed) or "Qwen"


@pytest.fixture(scope="module", autouse=True)
def compiled_together() -> None:
    """Build all kernels in one parallel batch; one that fails is reported by the test that needs it."""
    requests = [CompileRequest(TEMPLATE, problem, DEFAULT, SM90A) for problem in (*PROBLEMS, EQUAL_LENGTHS)]
    requests += [CompileRequest(TEMPLATE, QWEN, config, SM90A) for config in CONFIGS]
    with contextlib.suppress(QLAError):
        kernel_cache.get(list(dict.fromkeys(requests)))


def inputs(problem: Problem, lengths: tuple[int, ...], *, keys: str = "unit", betas: str = "random", tail: int = 0):
    """k, beta and the lengths' cu_seqlens (None where they are equal and not packed), on the GPU."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    B, tokens = (1, sum(lengths) + tail) if problem.packed else (len(lengths), lengths[0])
    k = KEYS[keys](draw, B, tokens, problem.H, problem.K).bfloat16()
    beta = draw(B, tokens, problem.HV) if problem.beta_sigmoid else BETAS[betas](draw, B, tokens, problem.HV)
    bounds = torch.tensor([0, *accumulate(lengths)], dtype=getattr(torch, problem.index_dtype)).cuda() if problem.packed else None
    return k.cuda(), beta.to(getattr(torch, problem.beta_dtype)).cuda(), bounds


def launch(problem: Problem, k: torch.Tensor, beta: torch.Tensor, bounds: torch.Tensor | None, config: Config = DEFAULT):
    """Ab, filled with NaN before the launch."""
    N = k.shape[0] if bounds is None else len(bounds) - 1
    slots = slot_count(k.shape[0], k.shape[1], N, C, problem.packed)
    Ab = torch.full((slots, problem.HV, C, C), float("nan"), dtype=torch.bfloat16, device="cuda")
    (kernel,) = kernel_cache.get([CompileRequest(TEMPLATE, problem, config, SM90A)])
    kernel(k, beta, bounds, Ab, 0)
    return Ab


def chunks(problem: Problem, lengths: tuple[int, ...]):
    """(sequence, batch row, first token, tokens, slot) of every chunk."""
    start = 0
    for n, length in enumerate(lengths):
        row, first, slot = (0, start, start // C + n) if problem.packed else (n, 0, n * -(-length // C))
        for j in range(-(-length // C)):
            yield n, row, first + j * C, min(C, length - j * C), slot + j
        start += length


def inverse(problem: Problem, k: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    """Ab of one chunk in float64, [HV, C, C], from k [tokens, H, K] and beta [tokens, HV]."""
    k, beta = k.double().transpose(0, 1), beta.double().T
    if problem.beta_sigmoid:
        beta = beta.sigmoid() * (2 if problem.negative_eigenvalues else 1)
    if problem.beta_floor is not None:
        floor = 2.0**problem.beta_floor
        beta = torch.where(beta.abs() < floor, torch.where(beta < 0, -floor, floor), beta)
    N = (k @ k.mT).tril(-1).repeat_interleave(problem.HV // problem.H, dim=0)
    L = torch.eye(k.shape[1], dtype=torch.float64, device=k.device) + beta[..., None] * N
    Ab = torch.linalg.solve_triangular(L, torch.diag_embed(beta), upper=False, unitriangular=True)
    behind_end = C - k.shape[1]
    return F.pad(Ab, (0, behind_end, 0, behind_end))


def check(
    problem: Problem, lengths: tuple[int, ...], Ab: torch.Tensor, k: torch.Tensor, beta: torch.Tensor, bound: float
) -> None:
    """The error over all chunks, and the zeros of each."""
    actual, expected = [], []
    for _, row, first, count, slot in chunks(problem, lengths):
        actual.append(Ab[slot])
        expected.append(inverse(problem, k[row, first : first + count], beta[row, first : first + count]))
        assert (Ab[slot].triu(1) == 0).all(), "above the diagonal"
        assert (Ab[slot, :, count:] == 0).all(), "rows behind the end"
        assert (Ab[slot, :, :, count:] == 0).all(), "columns behind the end"
    assert relative_l2(torch.stack(actual), torch.stack(expected)) <= bound


@pytest.mark.parametrize("problem", PROBLEMS, ids=name_of)
def test_inverse_matches_float64(problem: Problem) -> None:
    k, beta, bounds = inputs(problem, LENGTHS)
    check(problem, LENGTHS, launch(problem, k, beta, bounds), k, beta, BOUND)


@pytest.mark.parametrize("lengths", RAGGED_LENGTHS, ids=str)
def test_packed_lengths(lengths: tuple[int, ...]) -> None:
    k, beta, bounds = inputs(QWEN, lengths)
    check(QWEN, lengths, launch(QWEN, k, beta, bounds), k, beta, BOUND)


# Below one chunk, exactly two, and two and a bit: the tile of K reaches behind the batch row.
@pytest.mark.parametrize("T", [17, 128, 150], ids=lambda T: f"T{T}")
def test_equal_lengths(T: int) -> None:
    lengths = (T, T, T)
    k, beta, _ = inputs(EQUAL_LENGTHS, lengths)
    check(EQUAL_LENGTHS, lengths, launch(EQUAL_LENGTHS, k, beta, None), k, beta, BOUND)


def test_collinear_keys_with_beta_1() -> None:
    k, beta, bounds = inputs(QWEN, LENGTHS, keys="collinear", betas="beta1")
    check(QWEN, LENGTHS, launch(QWEN, k, beta, bounds), k, beta, BOUND)


def test_beta_2() -> None:
    k, beta, bounds = inputs(QWEN, LENGTHS, betas="beta2")
    check(QWEN, LENGTHS, launch(QWEN, k, beta, bounds), k, beta, BOUND)


def test_long_keys() -> None:
    k, beta, bounds = inputs(QWEN, LENGTHS)
    k = (1.6 * k.float()).bfloat16()
    check(QWEN, LENGTHS, launch(QWEN, k, beta, bounds), k, beta, BOUND_LONG_KEYS)


def test_long_collinear_keys_leave_the_range_of_float16() -> None:
    k, beta, bounds = inputs(QWEN, LENGTHS, keys="collinear", betas="beta1")
    k = (1.6 * k.float()).bfloat16()
    Ab = launch(QWEN, k, beta, bounds)
    assert Ab[: LENGTHS[0] // C].abs().max() > 65504
    check(QWEN, LENGTHS, Ab, k, beta, BOUND_LONG_KEYS)


# One head each: the warps of a block take different branches.
def test_beta_beyond_its_range_in_some_heads() -> None:
    k, beta, bounds = inputs(QWEN, LENGTHS)
    beta[:, 5::50, 1] = 4.0
    beta[:, 7::50, 6] = -1.0
    check(QWEN, LENGTHS, launch(QWEN, k, beta, bounds), k, beta, BOUND)


# Of the column of such a token, the floor itself is exact in bf16.
@pytest.mark.parametrize("betas", ["beta0", "random"])
def test_a_token_that_writes_nothing_has_the_column_of_the_floor(betas: str) -> None:
    k, beta, bounds = inputs(QWEN, LENGTHS, betas=betas)
    beta[:, 5::7] = 0.0
    beta[:, 6::7] = -0.0
    Ab = launch(QWEN, k, beta, bounds)
    check(QWEN, LENGTHS, Ab, k, beta, BOUND)
    for _, row, first, count, slot in chunks(QWEN, LENGTHS):
        written = Ab[slot, :, :count, :count].double()
        tokens = (beta[row, first : first + count] == 0).T               # [HV, count]
        assert (written.diagonal(dim1=1, dim2=2)[tokens] == 2.0**QWEN.beta_floor).all()
        expected = inverse(QWEN, k[row, first : first + count], beta[row, first : first + count])[:, :count, :count]
        of_floor = tokens[:, None].expand_as(written)
        if of_floor.any():
            assert relative_l2(written[of_floor], expected[of_floor]) <= BOUND_LONG_KEYS


def test_without_a_floor_a_token_that_writes_nothing_has_a_column_of_zeros() -> None:
    problem = replace(QWEN, beta_floor=None)
    k, beta, bounds = inputs(problem, LENGTHS)
    beta[:, 5::7] = 0.0
    Ab = launch(problem, k, beta, bounds)
    for _, row, first, count, slot in chunks(problem, LENGTHS):
        tokens = (beta[row, first : first + count] == 0).T
        assert (Ab[slot, :, :count, :count].mT[tokens] == 0).all()
        assert (Ab[slot, :, :count, :count][tokens] == 0).all()


def test_a_sequence_does_not_see_its_neighbours() -> None:
    lengths = (70, 130, 90)
    k, beta, bounds = inputs(QWEN, lengths, tail=50)
    clean = launch(QWEN, k, beta, bounds)
    for x in (k, beta):
        x[:, 70:200] = float("nan")      # the middle sequence
        x[:, 290:] = float("nan")        # behind the last one
    poisoned = launch(QWEN, k, beta, bounds)
    for n, _, _, _, slot in chunks(QWEN, lengths):
        if n == 1:
            assert poisoned[slot].isnan().any()          # a NaN stays visible where it belongs
        else:
            assert torch.equal(poisoned[slot], clean[slot])


def test_a_nan_does_not_reach_earlier_tokens() -> None:
    k, beta, bounds = inputs(QWEN, (64, 64))
    k[:, 20] = float("nan")
    beta[:, 64 + 20] = float("nan")
    Ab = launch(QWEN, k, beta, bounds)
    for slot in (0, 2):                  # slot(1, 0) = 64 // 64 + 1
        assert Ab[slot, :, :20].isfinite().all()
        assert Ab[slot, :, 20].isnan().any()


def test_slots_without_a_chunk_are_left_alone() -> None:
    k, beta, bounds = inputs(QWEN, LENGTHS)
    Ab = launch(QWEN, k, beta, bounds)
    used = {slot for *_, slot in chunks(QWEN, LENGTHS)}
    unused = sorted(set(range(len(Ab))) - used)
    assert unused
    assert Ab[unused].isnan().all()


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_a_config_changes_speed_only(config: Config) -> None:
    k, beta, bounds = inputs(QWEN, LENGTHS)
    used = [slot for *_, slot in chunks(QWEN, LENGTHS)]
    assert torch.equal(launch(QWEN, k, beta, bounds, config)[used], launch(QWEN, k, beta, bounds)[used])


# Group 8: a warp's second head overwrites the tile that its first one is stored from.
@pytest.mark.parametrize("problem", [QWEN, replace(QWEN, HV=16)], ids=name_of)
def test_repeated_launches_agree_to_the_bit(problem: Problem) -> None:
    lengths = (3000, 64, 7, 5000)
    k, beta, bounds = inputs(problem, lengths)
    used = [slot for *_, slot in chunks(problem, lengths)]
    other = torch.randn(2048, 2048, device="cuda")
    runs = []
    for _ in range(8):
        runs.append(launch(problem, k, beta, bounds)[used])
        other = torch.tanh(other @ other)              # other work between the launches
    for run in runs[1:]:
        assert torch.equal(run, runs[0])
