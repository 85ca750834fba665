"""Does the comparison of ranks work over NCCL, whose tensors are on the GPU?"""

import pytest
import torch
import torch.distributed as dist

import qla_jit

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (dist.is_available() and dist.is_nccl_available()), reason="this PyTorch has no NCCL"),
]


@pytest.fixture
def group(tmp_path):
    """A group of this process alone: one GPU is enough."""
    dist.init_process_group("nccl", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_a_rank_agrees_with_itself_before_and_after_a_call(group):
    before = qla_jit.dispatch_digest()
    assert qla_jit.dispatch_differences() == ()
    q, v, g = (torch.randn(1, 100, *tail, device="cuda") for tail in ((2, 128), (8, 128), (8,)))
    qla_jit.chunk_gated_delta_rule(q.bfloat16(), q.bfloat16(), v.bfloat16(), -g.abs(), g.sigmoid())
    assert qla_jit.dispatch_digest() != before
    assert qla_jit.dispatch_differences(group) == ()
