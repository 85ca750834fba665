"""The chain rules around the kernels against autograd of the reference in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases import GATES, Case, arguments, relative_l2

from qla_jit import reference
from qla_jit.ops.gate_gradients import beta_gradient, gate_gradients
from qla_jit.ops.inputs import CallInputs, check_inputs

CASE = Case(H=2, HV=6, K=4, V=4, lengths=(130,), tail=3, initial_state=False)
# Rounding in float32; the sums over 133 tokens cancel to about a hundredth of their terms.
BOUND, BOUND_SUMS = 1e-6, 1e-4


def random_like(x: torch.Tensor) -> torch.Tensor:
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(1))


def inputs_of(case: Case, **changes: torch.Tensor | None) -> CallInputs:
    return check_inputs(**arguments(case) | changes)


def gradients_of(function, cotangent, *tensors):
    leaves = [x.double().requires_grad_() for x in tensors]
    return torch.autograd.grad(function(*leaves), leaves, cotangent.double())


def log_decay(g, A_log=None, dt_bias=None):
    if A_log is not None:
        g = reference.gate(g, A_log, dt_bias)
    return torch.where(g < reference.RESET_GATE, reference.RESET_GATE, g)


@pytest.mark.parametrize("gates", GATES)
def test_a_gate_that_is_given_keeps_its_gradient_unless_it_is_below_reset(gates: str) -> None:
    inputs = inputs_of(replace(CASE, gates=gates))
    dg = random_like(inputs.g)
    actual = gate_gradients(inputs, dg, resets_have_none=False)
    (expected,) = gradients_of(log_decay, dg, inputs.g)
    assert torch.equal(actual.g, expected.float())
    assert (actual.A_log, actual.dt_bias) == (None, None)


@pytest.mark.parametrize("bias", [True, False], ids=["dt_bias", "no_dt_bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_gate_of_a_logit_has_the_gradients_of_autograd(bias: bool, dtype: torch.dtype) -> None:
    # A_log from -inf, a head without decay, to 12, where gates below RESET come and go.
    A_log = torch.tensor([float("-inf"), -3.0, 0.0, 2.0, 12.0, 12.0])
    inputs = inputs_of(replace(CASE, in_kernel=True, gate_dtype=dtype), A_log=A_log, **({} if bias else {"dt_bias": None}))
    inputs.g[:, :, 1] = torch.linspace(-60, 60, 133)              # softplus from 0 to its straight part
    inputs.g[:, :, 4:] = torch.linspace(-12, 12, 133)[:, None]
    dg = random_like(inputs.g)
    actual = gate_gradients(inputs, dg, resets_have_none=False)
    leaves = [inputs.g, A_log] + ([inputs.dt_bias] if bias else [])
    expected = gradients_of(log_decay, dg, *leaves)
    assert actual.g.dtype == dtype
    assert relative_l2(actual.g, expected[0].to(dtype)) < BOUND
    for head in range(6):
        assert relative_l2(actual.A_log[head], expected[1][head]) < BOUND_SUMS, head
        if bias:
            assert relative_l2(actual.dt_bias[head], expected[2][head]) < BOUND_SUMS, head
    assert actual.A_log[0] == 0
    assert bias or actual.dt_bias is None


def test_gradients_of_the_parameters_come_in_their_dtypes_and_do_not_see_what_lies_behind_the_last_sequence() -> None:
    call = arguments(replace(CASE, in_kernel=True))
    changed = {"A_log": torch.zeros(6).bfloat16(), "dt_bias": call["dt_bias"].half()}
    inputs = inputs_of(replace(CASE, in_kernel=True), **changed)
    dg = random_like(inputs.g)
    dg[:, 130:] = 0                                                # as the kernel leaves it
    expected = gate_gradients(inputs, dg, resets_have_none=False)
    inputs.g[:, 130:] = float("nan")
    actual = gate_gradients(inputs, dg, resets_have_none=False)
    assert (actual.A_log.dtype, actual.dt_bias.dtype) == (torch.bfloat16, torch.float16)
    assert torch.equal(actual.A_log, expected.A_log)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("betas", ["random", "beta2"], ids={"random": "sigmoid", "beta2": "twice_the_sigmoid"}.get)
def test_a_beta_logit_has_the_gradient_of_autograd(betas: str, dtype: torch.dtype) -> None:
    inputs = inputs_of(replace(CASE, in_kernel=True, betas=betas, gate_dtype=dtype))
    inputs.beta[0, :, 0] = torch.linspace(-90, 90, 133)
    dbeta = random_like(inputs.beta)
    actual = beta_gradient(inputs, dbeta)
    (expected,) = gradients_of(
        lambda beta: reference.beta_from_logits(beta, allow_neg_eigval=betas == "beta2"), dbeta, inputs.beta
    )
    assert actual.dtype == dtype
    assert relative_l2(actual, expected.to(dtype)) < BOUND


def test_a_beta_that_is_given_keeps_its_gradient() -> None:
    inputs = inputs_of(replace(CASE, gate_dtype=torch.bfloat16))
    dbeta = random_like(inputs.beta)
    assert torch.equal(beta_gradient(inputs, dbeta), dbeta.bfloat16())
