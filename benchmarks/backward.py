"""How fast and how exact is the backward pass, and how much memory does a training step take, beside FlashQLA and FLA?

    python benchmarks/backward.py                         every row, every library that is installed
    python benchmarks/backward.py --only-qla-jit          keep the others' numbers of the file, measure ours again
    python benchmarks/backward.py --rows '16,64:*' --budget-seconds 500

Results are merged into the output file after every row, those that matter most first. docs/performance.md says how the timing
works.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence

import torch
from forward import Measured, make_parser, measure_table, parse
from systems import System, strategy_of
from timing import Budget, alternating_ms, graph_of, interleaved_ms, peak_bytes
from training import NAMES, TRAINING_SYSTEMS, Cotangents, Gradients, make_cotangents
from workload import BACKWARD_ROWS, Inputs, Row, make_inputs, rotated_inputs

from qla_jit.device import gpu_info

EXPLAINED = (
    " ms: the library's low-level backward, random gradients of o and of the final state in, those of all six inputs out. "
    "What the forward saved is given to it: for FlashQLA and FLA the sums of the gates and the inverses, for qla_jit the "
    "inverses, what it found out about segments and the states midway. "
    "step_ms: a forward and a backward through autograd, without a graph, ten at a time, so that host time counts where the "
    "GPU waits for it. "
    "peak_bytes: allocated at the highest during such a step, above its inputs. rel_l2: ||x - x64|| / ||x64|| of each gradient, "
    "over as many input sets as make a million tokens times value heads, at most 16; x64 from autograd of the chunked reference "
    "in float64."
)

# Tokens times value heads over which errors are told. In a head that does not decay, dg is a small difference of large sums, and
# which of their roundings cancel is chance: of one head alone the error of a library varies by a factor of two from draw to draw.
ERROR_TOKENS, ERROR_SETS = 2**20, 16


# What autograd of the float64 reference keeps for a chunk of a value head of 128 (measured), and may keep in all.
ORACLE_BYTES_PER_CHUNK, ORACLE_BYTES = 1_200_000, 40 * 10**9


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(make_parser("backward", TRAINING_SYSTEMS), arguments, lambda options: BACKWARD_ROWS)
    return measure_table("backward", options, TRAINING_SYSTEMS, measure_row, EXPLAINED)


def measure_row(row: Row, systems: Sequence[System], budget: Budget) -> Measured:
    """Times, errors and memory of each system on one row. A library that cannot do the row is a result too."""
    cache_bytes = torch.cuda.get_device_properties().L2_cache_size
    inputs = rotated_inputs(row, device="cuda", bytes_at_least=2 * cache_bytes)
    cotangents = [make_cotangents(x, seed=seed) for seed, x in enumerate(inputs)]
    sets = error_sets(row, inputs, cotangents)
    exact = [float64_gradients(x, y) for x, y in sets]
    graphs, prepared, measured = {}, {}, {}
    for system in systems:
        budget.require()
        try:
            calls = [system.prepare(x, y) for x, y in zip(inputs, cotangents, strict=True)]
            measured[system.name] = {
                "rel_l2": errors(
                    ((calls[i] if i < len(calls) else system.prepare(*given)).gradients for i, given in enumerate(sets)), exact
                ),
                "peak_bytes": peak_bytes(calls[0].step),
            }
            if system.name == "qla_jit":
                measured[system.name]["strategy"] = strategy_of(inputs[0], gpu_info(inputs[0].q.device), backward=True)
            graphs[system.name] = graph_of([call.gradients for call in calls])
            prepared[system.name] = calls        # a graph knows addresses: what its calls were given must stay
        except Exception as error:       # a benchmark reports what a library answers and goes on with the next one
            measured[system.name] = {"failed": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
            torch.cuda.synchronize()     # raises where the GPU itself is in an error state: nothing after it would be true
    del exact
    steps = {name: calls[0].step for name, calls in prepared.items()}
    for key, times in (("ms", interleaved_ms(graphs)), ("step_ms", alternating_ms(steps))) if graphs else ():
        for name, ms in times.items():
            measured[name][key] = round(ms, 5)
    return measured


def error_sets(row: Row, inputs: Sequence[Inputs], cotangents: Sequence[Cotangents]) -> list[tuple[Inputs, Cotangents]]:
    """Input sets over which errors are told, those that are timed before others."""
    count = min(max(ERROR_TOKENS // (sum(row.seqlens) * row.HV), 1), ERROR_SETS)
    sets = list(zip(inputs, cotangents, strict=True))[:count]
    for seed in range(len(sets), count):
        x = make_inputs(row, device=str(inputs[0].q.device), seed=seed, like=inputs[0])
        sets.append((x, make_cotangents(x, seed=seed)))
    return sets


def errors(calls: Iterator[Callable[[], Gradients]], exact: Sequence[Sequence[torch.Tensor]]) -> dict[str, float]:
    """Of each gradient, over all input sets together."""
    squares = {name: [0.0, 0.0] for name in NAMES}       # of the error, of what is exact
    for gradients, of_set in zip(calls, exact, strict=True):
        for name, found, x64 in zip(NAMES, gradients(), of_set, strict=True):
            for which, x in enumerate((found.double() - x64, x64)):
                squares[name][which] += x.square().sum().item()
    return {name: float(f"{math.sqrt(error / norm):.4g}") for name, (error, norm) in squares.items()}


def float64_gradients(x: Inputs, y: Cotangents) -> list[torch.Tensor]:
    """In the order of NAMES. Some key heads at a time: what autograd keeps of all of them may exceed the memory of a GPU."""
    from qla_jit.reference import chunk_gated_delta_rule

    H, group = x.q.shape[2], x.v.shape[2] // x.q.shape[2]
    chunks = sum(-(-length // 64) for length in x.seqlens)
    together = max(1, ORACLE_BYTES // (ORACLE_BYTES_PER_CHUNK * chunks * group))
    by_head = []
    for head in range(0, H, together):
        keys, values = slice(head, head + together), slice(head * group, (head + together) * group)
        parts = [tensor[:, :, keys] for tensor in (x.q, x.k)] + [tensor[:, :, values] for tensor in (x.v, x.g, x.beta)]
        leaves = [part.double().requires_grad_() for part in (*parts, x.initial_state[:, values])]
        q, k, v, g, beta, initial_state = leaves
        outputs = chunk_gated_delta_rule(q, k, v, g, beta, initial_state=initial_state, cu_seqlens=x.cu_seqlens_cpu)
        by_head.append(torch.autograd.grad(outputs, leaves, (y.do[:, :, values].double(), y.dht[:, values].double())))
    *of_tokens, dh0 = (list(parts) for parts in zip(*by_head, strict=True))
    return [*(torch.cat(parts, dim=2) for parts in of_tokens), torch.cat(dh0, dim=1)]


if __name__ == "__main__":
    sys.exit(main())
