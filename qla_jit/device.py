"""Ask the GPU what it is. No other module asks torch.cuda, and nothing is asked before a device is in hand."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from .errors import UnsupportedError
from .kernel_templates.arch import ARCHES, Arch, arch_for_capability


@dataclass(frozen=True)
class GpuInfo:
    """What selection needs to know of one GPU."""

    name: str                            # for people: MIG slices and renamed boards make it useless as a key
    arch: Arch
    sm_count: int
    l2_bytes: int


def gpu_info(device: torch.device) -> GpuInfo:
    """What the CUDA device is; asked once per device index.

    Raises:
        UnsupportedError: no template is written for its compute capability.
    """
    return _gpu_info(torch.cuda.current_device() if device.index is None else device.index)


def gpu_count() -> int:
    """How many GPUs PyTorch sees; 0 without a driver."""
    return torch.cuda.device_count()


@functools.cache
def _gpu_info(index: int) -> GpuInfo:
    properties = torch.cuda.get_device_properties(index)
    arch = arch_for_capability(properties.major, properties.minor)
    if arch is None:
        supported = ", ".join(f"{major}.{minor}" for major, minor in sorted(arch.compute_capability for arch in ARCHES.values()))
        raise UnsupportedError(
            f"no kernel is written for compute capability {properties.major}.{properties.minor} "
            f"({properties.name}, cuda:{index}); supported are {supported}. "
            f"Tensors on the CPU are served by the reference implementation."
        )
    return GpuInfo(properties.name, arch, properties.multi_processor_count, properties.L2_cache_size)
