"""Is a GPU described without asking twice, and refused by name when no kernel is written for it? With a fake torch.cuda."""

from types import SimpleNamespace

import pytest
import torch

from qla_jit import device
from qla_jit.errors import UnsupportedError
from qla_jit.kernel_templates.arch import SM90A


@pytest.fixture
def fake_gpus(monkeypatch):
    """Two GPUs, an H200 and a V100; the list of questions asked."""
    asked = []
    gpus = [
        SimpleNamespace(name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, L2_cache_size=60 << 20),
        SimpleNamespace(name="Tesla V100", major=7, minor=0, multi_processor_count=80, L2_cache_size=6 << 20),
    ]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: asked.append(index) or gpus[index])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    device._gpu_info.cache_clear()
    yield asked
    device._gpu_info.cache_clear()


def test_a_gpu_is_asked_once_and_a_device_without_index_is_the_current_one(fake_gpus):
    info = device.gpu_info(torch.device("cuda", 0))
    assert info == device.GpuInfo("NVIDIA H200", SM90A, sm_count=132, l2_bytes=60 << 20)
    assert device.gpu_info(torch.device("cuda")) is info
    assert fake_gpus == [0]


def test_an_unsupported_capability_is_named_beside_the_supported_ones(fake_gpus):
    with pytest.raises(UnsupportedError, match=r"7\.0 \(Tesla V100, cuda:1\); supported are 8\.0, 8\.9, 9\.0, 10\.0, 12\.0"):
        device.gpu_info(torch.device("cuda", 1))
