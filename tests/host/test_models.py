"""Do the presets give the heads that the models have?"""

import pytest

from qla_jit.errors import InputError
from qla_jit.models import ModelShape, model, models
from qla_jit.ops.plan import KEY_DIMS, VALUE_DIMS


@pytest.mark.parametrize(
    ("name", "tp", "heads"),
    [
        ("qwen3.5-0.8b", 8, (2, 2)), ("qwen3.5-4b", 2, (8, 16)), ("qwen3.5-27b", 1, (16, 48)), ("qwen3.5-27b", 2, (8, 24)),
        ("qwen3.5-27b", 8, (2, 6)), ("qwen3.5-397b-a17b", 4, (4, 16)), ("qwen3-next-80b-a3b", 4, (4, 8)),
        ("lara-mini", 8, (1, 2)), ("olmo-hybrid", 2, (15, 15)), ("fla-gated-deltanet", 2, (3, 3)),
    ],
)
def test_heads_on_each_gpu(name, tp, heads):
    shape = model(name).on(tp)
    assert shape == ModelShape(*heads, K=model(name).K, V=model(name).V)


@pytest.mark.parametrize("name", models())
def test_every_model_is_one_that_kernels_serve(name):
    shape = model(name)
    assert shape.HV % shape.H == 0
    assert shape.K in KEY_DIMS
    assert shape.V in VALUE_DIMS


def test_names_are_taken_as_people_write_them():
    assert model("Qwen/Qwen3.5-27B") == ModelShape(H=16, HV=48, K=128, V=128)


def test_a_model_that_is_not_there_is_an_error_with_near_names():
    with pytest.raises(InputError, match=r"qwen3\.5-27b.*--heads"):
        model("qwen3.5-27")


@pytest.mark.parametrize(("name", "tp"), [("olmo-hybrid", 4), ("qwen3.5-27b", 32), ("lara-mini", 0)])
def test_heads_that_cannot_be_shared_are_an_error_with_the_sizes_that_can(name, tp):
    with pytest.raises(InputError, match=rf"shared by 1, 2.*got a tensor parallel size of {tp}"):
        model(name).on(tp)
