"""Train a small Gated Delta Network language model twice, with qla_jit and with its PyTorch reference, from the same seed.

    python examples/train_tiny.py [--steps N] [--batch N] [--out train_tiny.png]

The data is associative recall, made here: pairs of a key and a value, then the keys again in other orders, each to be followed
by its value. The pairs are new in every sequence, so that only the state can know them. Prints the largest difference of the two
losses and draws both curves. On a GPU one curve comes from the kernels and the other from the reference; on the CPU, where
there are no kernels, both come from the reference.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import qla_jit
from qla_jit import reference

PAIRS, ROUNDS = 8, 16                    # a sequence is 256 tokens, four chunks
DIM, LAYERS, H, HV, K, V = 128, 2, 2, 4, 64, 64
LEARNING_RATE = 3e-3

Operation = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, help="default: 300, on the CPU 30")
    parser.add_argument("--batch", type=int, help="sequences a step; default: 32, on the CPU 4")
    parser.add_argument("--out", type=Path, default=Path("train_tiny.png"))
    options = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    steps, batch = (300, 32) if device == "cuda" else (30, 4)
    steps, batch = options.steps or steps, options.batch or batch
    ours = f"qla_jit, {'kernels' if device == 'cuda' else 'which is the reference on the CPU'}"

    curves = {ours: train(qla_jit.chunk_gated_delta_rule, steps, batch, device)}
    curves["reference"] = train(reference_operation, steps, batch, device)
    for name, losses in curves.items():
        print(f"{name}: loss {losses[0]:.3f} at first, {losses[-1]:.3f} after {len(losses)} steps")
    difference = max(abs(a - b) for a, b in zip(*curves.values(), strict=True))
    print(f"largest difference of the losses: {difference:.2e}")
    if device == "cpu":
        print("There is no GPU here: both curves come from the reference, and tell nothing of the kernels.")
    draw(curves, options.out)
    print(f"both curves: {options.out}")


def reference_operation(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, **options):
    o, final_state = reference.chunk_gated_delta_rule(q, k, v, g, beta, **options)
    return o.to(q.dtype), final_state


def train(operation: Operation, steps: int, batch: int, device: str) -> list[float]:
    """The loss of each step. Everything but the operation is decided by the seed."""
    torch.manual_seed(0)
    model = Model(operation).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    data = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        tokens = recall_batch(batch, data).to(device)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            logits = model(tokens[:, :-1])
        answers = slice(2 * PAIRS, None, 2)                        # what follows a key, from the second round on
        loss = F.cross_entropy(logits[:, answers].float().flatten(0, 1), tokens[:, 1:][:, answers].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def recall_batch(batch: int, generator: torch.Generator) -> torch.Tensor:
    """[batch, 2 * PAIRS * ROUNDS] tokens. Keys are 0 to PAIRS - 1, values PAIRS to 2 * PAIRS - 1."""
    keys = torch.arange(PAIRS)
    rows = []
    for _ in range(batch):
        values = PAIRS + torch.randint(PAIRS, (PAIRS,), generator=generator)
        for _ in range(ROUNDS):
            order = torch.randperm(PAIRS, generator=generator)
            rows.append(torch.stack([keys[order], values[order]], dim=1).flatten())
    return torch.stack(rows).view(batch, 2 * PAIRS * ROUNDS)


class Model(nn.Module):
    def __init__(self, operation: Operation) -> None:
        super().__init__()
        self.embedding = nn.Embedding(2 * PAIRS, DIM)
        self.layers = nn.ModuleList(nn.Sequential(nn.RMSNorm(DIM), Mixer(operation)) for _ in range(LAYERS))
        self.head = nn.Sequential(nn.RMSNorm(DIM), nn.Linear(DIM, 2 * PAIRS))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


class Mixer(nn.Module):
    """A Gated Delta Network layer: short convolution, gated delta rule with gate, beta and l2norm inside, gated output."""

    def __init__(self, operation: Operation) -> None:
        super().__init__()
        self.operation = operation
        width = 2 * H * K + HV * V
        self.qkv = nn.Linear(DIM, width, bias=False)
        self.convolution = nn.Conv1d(width, width, kernel_size=4, padding=3, groups=width)
        self.gate_and_beta = nn.Linear(DIM, 2 * HV, bias=False)
        self.A_log = nn.Parameter(torch.empty(HV).uniform_(1, 16).log())
        # softplus of it is from 1e-3 to 0.1, the decay of a token, in units of A
        dt = torch.empty(HV).uniform_(math.log(1e-3), math.log(0.1)).exp()
        self.dt_bias = nn.Parameter(dt + torch.log(-torch.expm1(-dt)))
        self.norm = nn.RMSNorm(V)
        self.output_gate = nn.Linear(DIM, HV * V, bias=False)
        self.output = nn.Linear(HV * V, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        T = x.shape[1]
        qkv = F.silu(self.convolution(self.qkv(x).mT)[..., :T]).mT
        if x.is_cuda:
            qkv = qkv.to(torch.bfloat16)                           # what kernels take
        q, k, v = qkv.split([H * K, H * K, HV * V], dim=-1)
        g, beta = self.gate_and_beta(x).float().chunk(2, dim=-1)
        o, _ = self.operation(
            q.unflatten(-1, (H, K)), k.unflatten(-1, (H, K)), v.unflatten(-1, (HV, V)), g, beta,
            use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
            A_log=self.A_log, dt_bias=self.dt_bias,
        )  # fmt: skip
        return self.output(self.norm(o.float()).flatten(-2) * F.silu(self.output_gate(x)))


def draw(curves: dict[str, list[float]], out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for (name, losses), style in zip(curves.items(), ("-", "--"), strict=True):
        axes.plot(range(1, len(losses) + 1), losses, style, label=name)
    axes.set(xlabel="step", ylabel="loss", title=f"Associative recall of {PAIRS} pairs")
    axes.legend()
    figure.savefig(out)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
