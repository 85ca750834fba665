"""One Gated Delta Network layer of Qwen3.5-27B on two GPUs (8 key heads, 24 value heads, head dims 128), from an empty cache.

With a supported GPU: compile, run, check against float64, and say where the time went. Without one: the same call on the
CPU and, where nvcc is found, the same kernels built ahead of time for an H100 or H200.
"""

from __future__ import annotations

import itertools
import statistics
import time

import torch
import torch.nn.functional as F

import qla_jit
from qla_jit import kernel_cache, reference, select
from qla_jit.compiler import CompileRequest, find_nvcc
from qla_jit.device import gpu_info
from qla_jit.kernel_templates.arch import SM90A, Arch
from qla_jit.ops.inputs import check_inputs

H, HV, K, V = 8, 24, 128, 128
GPU_LENGTHS = (5000, 1, 2111, 1080)      # ragged, packed; 8,192 tokens together
CPU_LENGTHS = (200, 1, 55)


def main() -> None:
    print(f"qla_jit {qla_jit.__version__}: H={H} HV={HV} K={K} V={V}, bf16, packed sequences, states in and out\n")
    if torch.cuda.is_available():
        on_gpu()
        return
    on_cpu()
    if find_nvcc() is None:
        print("\nNo nvcc here, so no kernel is built. With a CUDA toolkit, this demo builds them for sm_90a without a GPU.")
    else:
        ahead_of_time(SM90A)


def on_gpu() -> None:
    info = gpu_info(torch.device("cuda"))
    layer = make_layer(GPU_LENGTHS, "cuda")
    print(f"{info.name}, {info.arch.name}, {info.sm_count} SMs; sequences of {GPU_LENGTHS} tokens")

    o, final_state = timed("first call", lambda: run(layer), on_gpu=True)
    describe_kernels(kernel_requests(layer, info.arch))
    timed("second call", lambda: run(layer), on_gpu=True)
    print(f"{'host time of a warm call':34s} {host_us(layer):8.1f} us")
    print(f"{'GPU time of a warm call':34s} {gpu_ms(layer):8.3f} ms")
    check(o, final_state, layer, reference.chunk_gated_delta_rule)


def on_cpu() -> None:
    layer = make_layer(CPU_LENGTHS, "cpu")
    print(f"No GPU here: the PyTorch reference serves CPU tensors; sequences of {CPU_LENGTHS} tokens")
    o, final_state = timed("call", lambda: run(layer))
    check(o, final_state, layer, reference.recurrent_gated_delta_rule)


def ahead_of_time(arch: Arch) -> None:
    print(f"\nThe kernels of the same call for {arch.name}, which needs nvcc and no GPU:")
    requests = kernel_requests(make_layer(CPU_LENGTHS, "cpu"), arch)
    timed("build", lambda: kernel_cache.get(requests))
    describe_kernels(requests)
    kernel_cache.clear_memory()
    timed("load what was built", lambda: kernel_cache.get(requests))


def make_layer(lengths: tuple[int, ...], device: str) -> dict[str, torch.Tensor]:
    """Random inputs as a layer sees them: unit keys, decays of a trained model's order, a state carried in."""
    torch.manual_seed(0)
    T = sum(lengths)
    starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    layer = dict(
        q=F.normalize(torch.randn(1, T, H, K), dim=-1).bfloat16(),
        k=F.normalize(torch.randn(1, T, H, K), dim=-1).bfloat16(),
        v=torch.randn(1, T, HV, V).bfloat16(),
        g=F.logsigmoid(torch.randn(1, T, HV)) / 16,
        beta=torch.rand(1, T, HV),
        initial_state=torch.randn(len(lengths), HV, K, V),
        cu_seqlens=starts,
    )
    return {name: x.to(device) for name, x in layer.items()} | {"cu_seqlens_cpu": starts}


def run(layer: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return qla_jit.chunk_gated_delta_rule(**layer, output_final_state=True)


def kernel_requests(layer: dict[str, torch.Tensor], arch: Arch) -> list[CompileRequest]:
    """The kernels that run() needs on a GPU of this arch."""
    return select.requests_for_any_size(check_inputs(**layer, output_final_state=True).facts, arch)


def timed(what: str, call, *, on_gpu: bool = False):
    """The call's result; prints its wall time and what of it was spent on kernels."""
    before = kernel_cache.stats()
    started = time.perf_counter()
    result = call()
    if on_gpu:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    after = kernel_cache.stats()
    compiles, loads = after.compiles - before.compiles, after.disk_hits - before.disk_hits
    parts = []
    if compiles:
        parts.append(f"{compiles} kernels compiled, {after.compile_seconds - before.compile_seconds:.1f} s of compiler time")
    if loads:
        parts.append(f"{loads} kernels loaded from the cache in {after.load_seconds - before.load_seconds:.3f} s")
    print(f"{what:34s} {seconds:8.3f} s   {', '.join(parts)}".rstrip())
    return result


def describe_kernels(requests: list[CompileRequest]) -> None:
    for request, kernel in zip(requests, kernel_cache.get(requests), strict=True):
        print(f"    {request.template.name:18s} {request.config}\n    {'':18s} {kernel.directory}")


def check(o: torch.Tensor, final_state: torch.Tensor, layer: dict[str, torch.Tensor], oracle) -> None:
    """Compare with the oracle in float64."""
    exact = oracle(**{name: x for name, x in layer.items() if name != "cu_seqlens_cpu"}, dtype=torch.float64)
    errors = [((x.double() - y).norm() / y.norm()).item() for x, y in zip((o, final_state), exact, strict=True)]
    print(f"{'relative L2 error against float64':34s} o {errors[0]:.2e}, final state {errors[1]:.2e}")
    if not max(errors) < 8e-3:           # rounding to bf16 between the steps costs about 4e-3
        raise SystemExit("The result is wrong. Please report it with the output of python -m qla_jit.collect_env.")


def host_us(layer: dict[str, torch.Tensor]) -> float:
    samples = []
    for _ in range(10):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(20):
            run(layer)
        samples.append((time.perf_counter() - started) / 20 * 1e6)
    torch.cuda.synchronize()
    return statistics.median(samples)


def gpu_ms(layer: dict[str, torch.Tensor]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(20):
        run(layer)
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 20


if __name__ == "__main__":
    main()
