"""A cache of a test's own, and copies of one real build in the place of the compiler, which takes seconds.

The fixtures of conftest.py make them; here is what tests ask of them.
"""

import pytest
import torch

from qla_jit import kernel_store
from qla_jit.kernel_cache import key_of


def entry_of(cache, request):
    return kernel_store._entry(cache, key_of(request))


def assert_launches(kernel):
    with pytest.raises(RuntimeError, match="tiny_scale input x device_type mismatch, expected cuda"):
        kernel(torch.ones(3), torch.ones(3), 2.0)
