"""Skip GPU tests where no supported GPU is, put a watchdog on each of them, and keep runs alike on every machine."""

from __future__ import annotations

import functools

import hypothesis
import pytest
import torch

from qla_jit.kernel_templates.arch import ARCHES, arch_for_capability

# A hung kernel blocks the interpreter, so a signal would never be handled: a thread must end the process.
GPU_TEST_SECONDS = 300

# Derandomised, so that a commit passes or fails on every machine alike; no deadline, because machines are shared.
hypothesis.settings.register_profile("qla_jit", deadline=None, derandomize=True, max_examples=25)
hypothesis.settings.load_profile("qla_jit")

# The tensors are small: with two threads on a busy two-core machine, waiting for each other made the suite 5 times slower.
torch.set_num_threads(1)


@functools.cache
def why_no_gpu() -> str | None:
    """Why GPU tests cannot run here, or None."""
    if not torch.cuda.is_available():
        return "no CUDA GPU is visible to torch"
    capability = torch.cuda.get_device_capability()
    if arch_for_capability(*capability) is None:
        return f"{torch.cuda.get_device_name()} has compute capability {capability}; kernels exist for {', '.join(ARCHES)}"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu"):
            # Without fixtures: some compile the kernels of a whole module, and compiling has a watchdog of its own.
            item.add_marker(pytest.mark.timeout(GPU_TEST_SECONDS, method="thread", func_only=True))
            if reason := why_no_gpu():
                item.add_marker(pytest.mark.skip(reason=f"needs a GPU: {reason}"))
