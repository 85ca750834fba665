"""Which calls the benchmarks time: head pairs, packed sequence sets, and their random inputs."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
import torch.nn.functional as F

K = V = 128                              # the head dims that every library in the table supports

# (H, HV) of one rank: Qwen3.5-122B/397B at tensor parallel 8, 4, 2, 1 and, before the last, Qwen3.5-27B.
HEAD_PAIRS = ((2, 8), (4, 16), (8, 32), (16, 48), (16, 64))

# One long sequence, few uneven ones, many equal ones: they differ in how many (sequence, head) pairs can run side by side.
SEQUENCE_SETS = ((32768,), (8192,), (2048,), (16384,) * 2, (1024, 7168), (4096,) * 8, (1024,) * 8)


# What a protocol says of the gates. Libraries that skip what has decayed away are timed with and without that chance.
GATES = {
    "mixed": " Natural-log gates logsigmoid(randn)/16, every fourth head 0.",
    "open": " Natural-log gates 0: no head decays.",
    "decaying": " Natural-log gates logsigmoid(randn)/16 on every head.",
}


@dataclass(frozen=True)
class Row:
    """One line of a table."""

    H: int
    HV: int
    seqlens: tuple[int, ...]
    gates: str = "mixed"                 # of GATES; a table has one kind of them
    K: int = K
    V: int = V

    @property
    def shape(self) -> str:
        """H,HV, and K,V where those are other than in the main table."""
        return f"{self.H},{self.HV}" if (self.K, self.V) == (K, V) else f"{self.H},{self.HV},{self.K},{self.V}"

    @property
    def name(self) -> str:
        """What --rows matches, "16,64:4096x8"."""
        return f"{self.shape}:{lengths_name(self.seqlens)}"


ROWS = tuple(Row(H, HV, seqlens) for H, HV in HEAD_PAIRS for seqlens in SEQUENCE_SETS)

# FlashQLA's published table: all ranks of the Qwen3.5 family, and more ways to divide the same tokens.
ALL_HEAD_PAIRS = (*HEAD_PAIRS, (8, 24), (16, 16), (16, 32), (32, 32))
ALL_SEQUENCE_SETS = (
    *((tokens,) for tokens in (32768, 16384, 8192, 4096, 2048)),
    *((first, 32768 - first) for first in (28672, 24576, 16384, 8192, 4096)),
    (12288, 4096),
    *((first, 8192 - first) for first in (6144, 4096, 2048, 1024)),
    (8192,) * 4, (4096,) * 8, (2048,) * 4, (1024,) * 8,
)  # fmt: skip
ALL_ROWS = tuple(Row(H, HV, seqlens) for H, HV in ALL_HEAD_PAIRS for seqlens in ALL_SEQUENCE_SETS)


# Other head dims: OLMo-Hybrid, and the default of flash-linear-attention's layer.
OTHER_SHAPES = ((30, 30, 96, 192), (6, 6, 256, 512))
OTHER_DIMS_ROWS = tuple(Row(H, HV, seqlens, K=K, V=V) for H, HV, K, V in OTHER_SHAPES for seqlens in SEQUENCE_SETS)


# The backward: also heads of two value heads each, and 8k and 32k tokens in 1, 2, 4 and 8 sequences, as FlashQLA publishes.
# What matters most comes first, because a run may have a budget.
BACKWARD_HEAD_PAIRS = ((16, 64), (16, 32), (2, 8), (8, 16), (4, 16), (4, 8), (2, 4))
BACKWARD_SEQUENCE_SETS = (
    (32768,), (4096,) * 8, (8192,), (1024,) * 8, (16384,) * 2, (8192,) * 4, (4096,) * 2, (2048,) * 4,
)  # fmt: skip
BACKWARD_ROWS = tuple(Row(H, HV, seqlens) for seqlens in BACKWARD_SEQUENCE_SETS for H, HV in BACKWARD_HEAD_PAIRS)


def lengths_name(seqlens: tuple[int, ...]) -> str:
    """(4096,) * 8 -> "4096x8"; (1024, 7168) -> "1024+7168"."""
    runs = [(length, len(list(group))) for length, group in itertools.groupby(seqlens)]
    return "+".join(f"{length}x{count}" if count > 1 else str(length) for length, count in runs)


@dataclass(frozen=True)
class Inputs:
    """One packed call."""

    seqlens: tuple[int, ...]
    q: torch.Tensor                      # [1, T, H, K], bf16, unit norm along K
    k: torch.Tensor                      # [1, T, H, K], bf16, unit norm along K
    v: torch.Tensor                      # [1, T, HV, V], bf16
    g: torch.Tensor                      # [1, T, HV], fp32, natural log of the decay
    beta: torch.Tensor                   # [1, T, HV], fp32, in (0, 1)
    initial_state: torch.Tensor          # [N, HV, K, V], fp32
    cu_seqlens: torch.Tensor             # [N + 1], int32, on the device of q
    cu_seqlens_cpu: torch.Tensor         # the same on the host

    @property
    def bytes(self) -> int:
        tensors = (self.q, self.k, self.v, self.g, self.beta, self.initial_state)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def make_inputs(row: Row, *, device: str, seed: int = 0, like: Inputs | None = None) -> Inputs:
    """Random inputs of one row.

    logsigmoid(randn) / 16 is about -0.05 a token. `like` shares its cu_seqlens tensors: some libraries
    cache what they derive from them by the identity of the tensor.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    T, N = sum(row.seqlens), len(row.seqlens)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, generator=generator)

    g = F.logsigmoid(randn(1, T, row.HV)) / 16
    if row.gates == "mixed":
        g[:, :, 3::4] = 0.0
    elif row.gates == "open":
        g.zero_()
    if like is not None:
        cu_seqlens, cu_seqlens_cpu = like.cu_seqlens, like.cu_seqlens_cpu
    else:
        cu_seqlens_cpu = torch.tensor([0, *itertools.accumulate(row.seqlens)], dtype=torch.int32)
        cu_seqlens = cu_seqlens_cpu.to(device)
    return Inputs(
        seqlens=row.seqlens,
        q=F.normalize(randn(1, T, row.H, row.K), dim=-1).to(torch.bfloat16),
        k=F.normalize(randn(1, T, row.H, row.K), dim=-1).to(torch.bfloat16),
        v=randn(1, T, row.HV, row.V).to(torch.bfloat16),
        g=g,
        beta=randn(1, T, row.HV).sigmoid(),
        initial_state=randn(N, row.HV, row.K, row.V),
        cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=cu_seqlens_cpu,
    )


def rotated_inputs(row: Row, *, device: str, bytes_at_least: int) -> list[Inputs]:
    """Input sets of one row, as many as it takes to hold `bytes_at_least` together, so that no call finds its inputs in L2."""
    sets = [make_inputs(row, device=device)]
    for seed in range(1, -(-bytes_at_least // sets[0].bytes)):
        sets.append(make_inputs(row, device=device, seed=seed, like=sets[0]))
    return sets
