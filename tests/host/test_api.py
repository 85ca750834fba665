"""The public names, their signatures, and their results on the CPU."""

import ast
import functools
import inspect
import re
import warnings
from pathlib import Path

import pytest
import torch
from cases import GATES, Case, arguments, oracle, relative_l2

import qla_jit
from qla_jit import once
from qla_jit.ops import chunk

# Rounding o alone costs about this much; what is computed before is float32 or better.
ROUNDING = {torch.bfloat16: 2.0e-3, torch.float16: 2.5e-4, torch.float32: 1e-6, torch.float64: 1e-12}

SIGNATURES = {
    "chunk_gated_delta_rule": (
        "(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False, "
        "use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None, "
        "chunk_indices=None, cp_context=None, use_gate_in_kernel=False, A_log=None, dt_bias=None, chunk_size=64, auto_cp=True, "
        "head_first=False)"
    ),
    "chunk_gated_delta_rule_fwd": (
        "(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, *, use_qk_l2norm_in_kernel=False, "
        "use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None, "
        "use_gate_in_kernel=False, A_log=None, dt_bias=None, chunk_size=64, auto_cp=True)"
    ),
    "chunk_gated_delta_rule_bwd": (
        "(q, k, v, g, beta, A, do, dht=None, scale=None, initial_state=None, *, g_sum=None, Ab=None, segments=None, midway=None, "
        "use_qk_l2norm_in_kernel=False, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, state_v_first=False, "
        "cu_seqlens=None, cu_seqlens_cpu=None, use_gate_in_kernel=False, A_log=None, dt_bias=None, chunk_size=64, auto_cp=True)"
    ),
    "fused_recurrent_gated_delta_rule": (
        "(q, k, v, g=None, beta=None, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False, "
        "use_gate_in_kernel=False, A_log=None, dt_bias=None, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, "
        "state_v_first=False, cu_seqlens=None)"
    ),
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature_is_kept_keyword_for_keyword(name):
    signature = inspect.signature(getattr(qla_jit, name))
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
    assert str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty)) == SIGNATURES[name]


@pytest.mark.parametrize("name", SIGNATURES)
def test_unknown_keyword_is_named(name):
    call = {argument: x for argument, x in arguments(Case()).items() if argument in ("q", "k", "v", "g", "beta")}
    with pytest.raises(TypeError, match="transpose_state_layout"):
        getattr(qla_jit, name)(**call, transpose_state_layout=True)


def test_every_parameter_is_documented():
    documented = set(re.findall(r"\w+", qla_jit.chunk_gated_delta_rule.__doc__))
    assert set(inspect.signature(qla_jit.chunk_gated_delta_rule).parameters) <= documented


def test_all_names_exist_and_are_listed():
    for name in qla_jit.__all__:
        assert getattr(qla_jit, name).__name__ == name
    assert sorted(set(qla_jit.__all__)) == qla_jit.__all__
    assert set(qla_jit.__all__) <= set(dir(qla_jit))


def test_type_checkers_see_the_names_that_exist():
    tree = ast.parse(Path(qla_jit.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    imported = [alias.name for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert sorted(imported) == qla_jit.__all__


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_name"):
        qla_jit.no_such_name  # noqa: B018


def test_version_is_that_of_the_installed_distribution():
    from importlib.metadata import version

    assert qla_jit.__version__ == version("qla_jit")


@pytest.mark.parametrize("operation", ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"])
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("gates", GATES)
def test_cpu_result_matches_float64_recurrence(operation, dtype, gates):
    call = arguments(Case(lengths=(70, 0, 1), gates=gates, dtype=dtype, K=32, tail=2))
    o, final_state = getattr(qla_jit, operation)(**call)
    expected_o, expected_state = oracle(call)
    assert o.dtype == dtype
    assert final_state.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert relative_l2(o, expected_o) < ROUNDING[dtype]
    assert relative_l2(final_state, expected_state) < ROUNDING[final_state.dtype]


FLAG_CASES = [
    Case(dtype=torch.bfloat16, l2norm=True, keys="zero_rows"),
    Case(dtype=torch.bfloat16, in_kernel=True, gate_dtype=torch.bfloat16),
    Case(dtype=torch.bfloat16, in_kernel=True, betas="beta2", l2norm=True, keys="zero_rows", state_v_first=True),
    Case(dtype=torch.bfloat16, state_dtype=torch.bfloat16, state_v_first=True),
    Case(dtype=torch.bfloat16, initial_state=False, packed=False, lengths=(70, 70)),
]


@pytest.mark.parametrize("operation", ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"])
@pytest.mark.parametrize("case", FLAG_CASES, ids=str)
def test_flags_reach_the_computation(operation, case):
    call = arguments(case)
    o, final_state = getattr(qla_jit, operation)(**call)
    expected_o, expected_state = oracle(call)
    assert relative_l2(o, expected_o) < ROUNDING[torch.bfloat16]
    assert relative_l2(final_state, expected_state) < 1e-6


@pytest.mark.parametrize("operation", ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"])
def test_final_state_is_returned_on_request_only(operation):
    o, final_state = getattr(qla_jit, operation)(**arguments(Case()) | dict(output_final_state=False))
    assert final_state is None
    assert o.shape == (1, 129, 4, 24)


@pytest.mark.parametrize("operation", ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"])
@pytest.mark.parametrize(
    "case",
    [
        Case(lengths=(0, 0)),
        Case(lengths=(0, 0), packed=False),
        Case(lengths=(0,), tail=3),
        Case(lengths=(0,), initial_state=False),
    ],
    ids=str,
)
def test_without_tokens_o_is_zero_and_the_state_passes(operation, case):
    call = arguments(case)
    o, final_state = getattr(qla_jit, operation)(**call)
    assert torch.equal(o, torch.zeros_like(call["v"]))
    expected = call["initial_state"] if case.initial_state else torch.zeros(1, 4, 16, 24)
    assert torch.equal(final_state, expected.to(final_state.dtype))


def test_recurrent_defaults_are_no_decay_and_beta_1():
    call = arguments(Case(gates="open", betas="beta1"))
    o, final_state = qla_jit.fused_recurrent_gated_delta_rule(**call)
    o_default, final_state_default = qla_jit.fused_recurrent_gated_delta_rule(**call | dict(g=None, beta=None))
    assert torch.equal(o, o_default)
    assert torch.equal(final_state, final_state_default)


@pytest.mark.parametrize("name", ["g", "beta"])
def test_recurrent_flags_need_their_logits(name):
    with pytest.raises(qla_jit.InputError, match=rf"_in_kernel=True needs logits {name} .*got {name}=None"):
        qla_jit.fused_recurrent_gated_delta_rule(**arguments(Case(in_kernel=True)) | {name: None})


def test_forward_half_returns_the_outputs_without_autograd():
    call = arguments(Case(dtype=torch.bfloat16))
    call["q"].requires_grad_()
    result = qla_jit.chunk_gated_delta_rule_fwd(**call)
    o, final_state = qla_jit.chunk_gated_delta_rule(**call)
    assert o.requires_grad
    assert not result.o.requires_grad
    assert torch.equal(result.o, o)
    assert torch.equal(result.final_state, final_state)
    assert result.g_sum is result.A is None


GRADIENTS = ("q", "k", "v", "beta", "g", "initial_state", "A_log", "dt_bias")      # FLA's order


@pytest.mark.parametrize("with_dht", [True, False], ids=["dht", "no_dht"])
@pytest.mark.parametrize(
    "case",
    [
        Case(lengths=(70, 0, 3), tail=2),
        Case(lengths=(70,), dtype=torch.bfloat16, in_kernel=True, betas="beta2", l2norm=True, state_v_first=True),
        Case(lengths=(70,), dtype=torch.bfloat16, gate_dtype=torch.bfloat16, initial_state=False),
        Case(lengths=(0,)),
    ],
    ids=str,
)
def test_backward_half_gives_the_gradients_of_the_operation(case, with_dht):
    call = arguments(case)
    call = call if not case.in_kernel else call | dict(A_log=torch.linspace(-1, 1, case.HV))
    leaves = {name: call[name].clone().requires_grad_() for name in GRADIENTS if call.get(name) is not None}
    o, final_state = qla_jit.chunk_gated_delta_rule(**call | leaves)
    do, dht = torch.randn_like(o), torch.randn_like(final_state) if with_dht else None
    torch.autograd.backward([o, final_state] if with_dht else [o], [do, dht] if with_dht else [do])

    del call["output_final_state"]
    gradients = qla_jit.chunk_gated_delta_rule_bwd(**call, A=None, do=do, dht=dht)
    assert gradients._fields == GRADIENTS
    for name, gradient in zip(GRADIENTS, gradients, strict=True):
        if name not in leaves:
            assert gradient is None
            continue
        assert gradient.dtype == call[name].dtype
        expected = leaves[name].grad if leaves[name].grad is not None else torch.zeros_like(leaves[name])
        assert relative_l2(gradient, expected) < 1e-6, name
    assert not any(x.requires_grad for x in call.values() if torch.is_tensor(x))


@pytest.mark.parametrize(
    ("name", "shape", "expected"), [("do", (1, 129, 4, 16), (1, 129, 4, 24)), ("dht", (1, 4, 24, 16), (1, 4, 16, 24))]
)
def test_gradient_of_another_shape_is_refused(name, shape, expected):
    call = {key: x for key, x in arguments(Case()).items() if key != "output_final_state"}
    outputs = dict(do=torch.zeros(1, 129, 4, 24), dht=torch.zeros(1, 4, 16, 24))
    with pytest.raises(qla_jit.ShapeError, match=re.escape(f"{name} must be")) as caught:
        qla_jit.chunk_gated_delta_rule_bwd(**call, A=None, **outputs | {name: torch.zeros(shape)})
    assert str(expected) in str(caught.value)
    assert str(shape) in str(caught.value)


def test_what_is_not_of_the_forward_of_the_call_is_refused():
    call = {key: x for key, x in arguments(Case()).items() if key != "output_final_state"}
    gradients = functools.partial(qla_jit.chunk_gated_delta_rule_bwd, **call, A=None, do=torch.zeros(1, 129, 4, 24))
    Ab = torch.zeros(3, 4, 64, 64, dtype=torch.float64)
    gradients(Ab=Ab)
    for refused in (Ab[:2], Ab[:, :2], Ab[..., :32, :32]):
        with pytest.raises(qla_jit.ShapeError, match=r"Ab must be \[slots, HV, C, C\] = \(3, 4, 64, 64\)"):
            gradients(Ab=refused)
    gradients(Ab=torch.zeros(5, 4, 32, 32, dtype=torch.float64), chunk_size=32)
    with pytest.raises(qla_jit.DtypeError, match="Ab must be"):
        gradients(Ab=Ab.bfloat16())
    with pytest.raises(qla_jit.InputError, match="Ab must be"):
        gradients(Ab=[])
    with pytest.raises(qla_jit.InputError, match=r"segments must be ForwardResult.segments or None; got Tensor"):
        gradients(segments=Ab)
    with pytest.raises(qla_jit.InputError, match=r"midway must be ForwardResult.midway or None; got Tensor"):
        gradients(midway=Ab)


def test_slow_gradients_warn_once_per_process():
    once._said.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        chunk._warn_slow_gradients()
        chunk._warn_slow_gradients()
    assert [str(warning.message) for warning in caught] == [str(caught[0].message)]
    assert "torch.no_grad()" in str(caught[0].message)


def test_a_compiled_caller_breaks_its_graph_around_the_call() -> None:
    call = arguments(Case(lengths=(70,), packed=False))
    expected, _ = qla_jit.chunk_gated_delta_rule(**call)
    compiled = torch.compile(lambda q, rest: 2 * qla_jit.chunk_gated_delta_rule(q + 0, **rest)[0], backend="eager")
    actual = compiled(call["q"], {name: x for name, x in call.items() if name != "q"})
    assert torch.equal(actual, 2 * expected)
