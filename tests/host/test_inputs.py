"""Arguments that do not fit are refused, by the right error and in FLA's order; the rest is held as later stages need it."""

import dataclasses
from itertools import pairwise

import pytest
import torch
from cases import Case, arguments
from torch._subclasses.fake_tensor import FakeTensorMode

from qla_jit import DeviceError, DtypeError, InputError, QLAError, ShapeError, UnsupportedError
from qla_jit.ops.inputs import check_inputs


def call(**changes):
    """A call that fits: H = 2, HV = 4, K = 16, V = 24, sequences of 3, 0 and 5 tokens in T = 9."""
    return arguments(Case(lengths=(3, 0, 5), tail=1, dtype=torch.bfloat16)) | changes


def zeros(*shape, dtype=torch.bfloat16, device="cpu"):
    return torch.zeros(shape, dtype=dtype, device=device)


def starts(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype)


# What is wrong, the error, and what its message must say: the argument, what was expected, what came.
ERRORS = {
    "q_is_a_list": (dict(q=[1.0]), InputError, ["q must be a torch.Tensor", "list"]),
    "g_is_none": (dict(g=None), InputError, ["g must be a torch.Tensor", "NoneType"]),
    "q_has_3_axes": (dict(q=zeros(1, 9, 32)), ShapeError, ["q must be [B, T, H, K]", "(1, 9, 32)"]),
    "v_has_3_axes": (dict(v=zeros(1, 9, 96)), ShapeError, ["v must be [B, T, HV, V]", "(1, 9, 96)"]),
    "k_has_other_heads": (dict(k=zeros(1, 9, 4, 16)), ShapeError, ["q and k", "(1, 9, 2, 16)", "(1, 9, 4, 16)"]),
    "k_has_other_dim": (dict(k=zeros(1, 9, 2, 8)), ShapeError, ["q and k", "(1, 9, 2, 8)"]),
    "no_heads": (dict(q=zeros(1, 9, 0, 16), k=zeros(1, 9, 0, 16)), ShapeError, ["at least 1", "(1, 9, 0, 16)"]),
    "HV_is_no_multiple": (dict(v=zeros(1, 9, 3, 24)), ShapeError, ["multiple of the 2 heads", "HV = 3"]),
    "head_first": (dict(head_first=True), InputError, ["head_first", "[B, T, H, ...]", "transpose(1, 2)"]),
    "chunk_size_48": (dict(chunk_size=48), InputError, ["chunk_size", "(16, 32, 64)", "48"]),
    "cp_context": (dict(cp_context=object()), InputError, ["cp_context must be None", "object"]),
    "scale_is_a_tensor": (dict(scale=torch.tensor(1.0)), InputError, ["scale must be a Python number", "tensor"]),
    "device_meta": (dict(q=zeros(1, 9, 2, 16, device="meta")), DeviceError, ["q must be on a CUDA GPU or on the CPU", "meta"]),
    "q_is_int": (dict(q=zeros(1, 9, 2, 16, dtype=torch.int32)), DtypeError, ["q must be", "torch.bfloat16", "torch.int32"]),
    "k_has_other_dtype": (
        dict(k=zeros(1, 9, 2, 16, dtype=torch.float16)), DtypeError, ["k must be torch.bfloat16", "torch.float16"],
    ),
    "v_has_other_dtype": (
        dict(v=zeros(1, 9, 4, 24, dtype=torch.float32)), DtypeError, ["v must be torch.bfloat16", "torch.float32"],
    ),
    "v_has_other_T": (dict(v=zeros(1, 8, 4, 24)), ShapeError, ["v must be [B, T, HV, V] = (1, 9, 4, 24)", "(1, 8, 4, 24)"]),
    "g_has_H_heads": (dict(g=zeros(1, 9, 2)), ShapeError, ["g must be [B, T, HV] = (1, 9, 4)", "(1, 9, 2)"]),
    "g_is_int": (dict(g=zeros(1, 9, 4, dtype=torch.int64)), DtypeError, ["g must be", "torch.float32", "torch.int64"]),
    "g_on_other_device": (dict(g=zeros(1, 9, 4, device="meta")), DeviceError, ["g must be on cpu", "meta"]),
    "beta_per_value_dim": (dict(beta=zeros(1, 9, 4, 24)), ShapeError, ["beta must be [B, T, HV] = (1, 9, 4)", "(1, 9, 4, 24)"]),
    "beta_is_bool": (dict(beta=zeros(1, 9, 4, dtype=torch.bool)), DtypeError, ["beta must be", "torch.bool"]),
    "cu_seqlens_is_a_list": (dict(cu_seqlens=[0, 9]), InputError, ["cu_seqlens must be a torch.Tensor", "list"]),
    "cu_seqlens_is_float": (dict(cu_seqlens=torch.tensor([0.0, 9.0])), DtypeError, ["torch.int32 or torch.int64"]),
    "cu_seqlens_has_2_axes": (dict(cu_seqlens=starts([0, 9])), ShapeError, ["cu_seqlens must be [N + 1]", "(1, 2)"]),
    "cu_seqlens_of_no_sequence": (dict(cu_seqlens=starts(0)), ShapeError, ["cu_seqlens must be [N + 1]", "(1,)"]),
    "cu_seqlens_begins_late": (dict(cu_seqlens=starts(1, 3, 5, 8)), InputError, ["cu_seqlens must begin with 0", "got 1"]),
    "cu_seqlens_ends_late": (dict(cu_seqlens=starts(0, 3, 5, 10)), InputError, ["T = 9", "got 10"]),
    "cu_seqlens_falls": (dict(cu_seqlens=starts(0, 5, 3, 8)), InputError, ["cu_seqlens must not fall", "got 3 at 2 after 5"]),
    "cu_seqlens_cpu_alone": (dict(cu_seqlens=None, cu_seqlens_cpu=starts(0, 9)), InputError, ["cu_seqlens=None"]),
    "cu_seqlens_cpu_is_shorter": (dict(cu_seqlens_cpu=starts(0, 3, 8)), ShapeError, ["cu_seqlens_cpu must be", "(4,)", "(3,)"]),
    "cu_seqlens_cpu_differs": (dict(cu_seqlens_cpu=starts(0, 3, 4, 8)), InputError, ["cu_seqlens_cpu", "values of cu_seqlens"]),
    "two_states_for_3_sequences": (
        dict(initial_state=zeros(2, 4, 16, 24)), ShapeError,
        ["initial_state must be [N, HV, K, V] = (3, 4, 16, 24)", "one state per sequence", "(2, 4, 16, 24)"],
    ),
    "state_is_v_first": (dict(initial_state=zeros(3, 4, 24, 16)), ShapeError, ["(3, 4, 16, 24)", "if state_v_first"]),
    "state_is_k_first": (
        dict(initial_state=zeros(3, 4, 16, 24), state_v_first=True), ShapeError,
        ["initial_state must be [N, HV, V, K] = (3, 4, 24, 16)", "(3, 4, 16, 24)"],
    ),
    "state_is_int8": (dict(initial_state=zeros(3, 4, 16, 24, dtype=torch.int8)), DtypeError, ["initial_state must be", "int8"]),
    "gate_without_A_log": (dict(use_gate_in_kernel=True), InputError, ["use_gate_in_kernel=True needs A_log [HV]", "A_log=None"]),
    "A_log_per_key_head": (dict(use_gate_in_kernel=True, A_log=zeros(2)), ShapeError, ["A_log must be [HV] = (4,)", "(2,)"]),
    "dt_bias_per_key_head": (
        dict(use_gate_in_kernel=True, A_log=zeros(4), dt_bias=zeros(2)), ShapeError, ["dt_bias must be [HV] = (4,)", "(2,)"],
    ),
    "neg_eigval_without_sigmoid": (
        dict(allow_neg_eigval=True), InputError, ["allow_neg_eigval=True", "use_beta_sigmoid_in_kernel=True"],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "says"), ERRORS.values(), ids=ERRORS)
def test_what_does_not_fit_is_refused(changes, error, says):
    with pytest.raises(error) as caught:
        check_inputs(**call(**changes))
    assert isinstance(caught.value, QLAError)
    assert isinstance(caught.value, ValueError)
    for text in says:
        assert text in str(caught.value)


def test_packed_sequences_need_batch_1():
    with pytest.raises(ShapeError, match=r"cu_seqlens needs B = 1.*got B = 2.*reshape"):
        check_inputs(**arguments(Case(lengths=(4, 4), packed=False)) | dict(cu_seqlens=starts(0, 4, 8)))


# FLA raises these classes; code that catches them must go on working.
@pytest.mark.parametrize(
    ("changes", "fla_error"),
    [
        (dict(head_first=True), DeprecationWarning),
        (dict(cp_context=object()), AssertionError),
        (dict(use_gate_in_kernel=True), AssertionError),
    ],
    ids=["head_first", "cp_context", "gate_without_A_log"],
)
def test_errors_keep_the_type_that_fla_raises(changes, fla_error):
    with pytest.raises(fla_error):
        check_inputs(**call(**changes))


FLA_ORDER = [
    "k_has_other_heads", "HV_is_no_multiple", "head_first", "chunk_size_48", "cp_context", "two_states_for_3_sequences",
    "gate_without_A_log", "neg_eigval_without_sigmoid",
]  # fmt: skip


@pytest.mark.parametrize(("first", "second"), list(pairwise(FLA_ORDER)))
def test_of_two_errors_the_one_that_fla_checks_first_is_raised(first, second):
    with pytest.raises(ERRORS[first][1]) as caught:
        check_inputs(**call(**ERRORS[first][0], **ERRORS[second][0]))
    for text in ERRORS[first][2]:
        assert text in str(caught.value)


@pytest.fixture
def on_gpu():
    """The tensors of call(), as fake CUDA tensors: they need no GPU, and raise when somebody asks for their values."""
    shapes = {name: (x.shape, x.dtype) for name, x in call().items() if torch.is_tensor(x)}
    with FakeTensorMode():
        return {name: torch.empty(shape, dtype=dtype, device="cuda") for name, (shape, dtype) in shapes.items()}


def test_no_value_is_read_from_a_gpu(on_gpu):
    inputs = check_inputs(**call(**on_gpu))
    assert inputs.starts is None
    assert inputs.facts.device == torch.device("cuda", 0)


def test_lengths_on_the_host_are_checked_for_a_gpu(on_gpu):
    assert check_inputs(**call(**on_gpu, cu_seqlens_cpu=starts(0, 3, 3, 8))).starts == (0, 3, 3, 8)
    with pytest.raises(InputError, match=r"T = 9 or before; got 10"):
        check_inputs(**call(**on_gpu, cu_seqlens_cpu=starts(0, 3, 3, 10)))


def test_lengths_must_be_on_the_gpu_of_q(on_gpu):
    with pytest.raises(DeviceError, match=r"cu_seqlens must be on cuda:0; got cpu; move it with .to\('cuda:0'\)"):
        check_inputs(**call(**on_gpu | dict(cu_seqlens=starts(0, 3, 3, 8))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_gpu_takes_16_bit_queries_only(on_gpu, dtype):
    qkv = {name: on_gpu[name].to(dtype) for name in ("q", "k", "v")}
    with pytest.raises(UnsupportedError, match=rf"torch.bfloat16 or torch.float16 on a GPU; got {dtype}"):
        check_inputs(**call(**on_gpu | qkv))


@pytest.mark.parametrize("name", ["g", "beta", "initial_state"])
def test_gpu_takes_no_float64(on_gpu, name):
    with pytest.raises(DtypeError, match=rf"{name} must be .*; got torch.float64"):
        check_inputs(**call(**on_gpu | {name: on_gpu[name].double()}))


def test_facts_are_those_of_the_call():
    inputs = check_inputs(**call(auto_cp=False, chunk_size=32))
    facts = inputs.facts
    assert (facts.H, facts.HV, facts.K, facts.V) == (2, 4, 16, 24)
    assert (facts.dtype, facts.g_dtype, facts.state_dtype) == (torch.bfloat16, torch.float32, torch.float32)
    assert (facts.varlen, facts.has_initial_state, facts.output_final_state) == (True, True, True)
    assert (facts.auto_cp, facts.chunk_size) == (False, 32)
    assert (inputs.B, inputs.T, inputs.N, inputs.starts) == (1, 9, 3, (0, 3, 3, 8))
    assert inputs.scale == 16**-0.5


def test_facts_do_not_change_with_the_batch():
    one = check_inputs(**arguments(Case(lengths=(3, 5), tail=1)))
    other = check_inputs(**arguments(Case(lengths=(70, 0, 9))), scale=3)
    assert one.facts == other.facts
    assert hash(one.facts) == hash(other.facts)


@pytest.mark.parametrize("scale", [0.0, 0, 2, -1.5], ids=lambda scale: f"scale{scale}")
def test_scale_is_taken_as_given(scale):
    assert check_inputs(**call(scale=scale)).scale == scale


def test_strided_inputs_are_made_contiguous():
    q = torch.randn(1, 2, 9, 16).bfloat16().transpose(1, 2)
    state = torch.randn(3, 4, 24, 16).mT
    inputs = check_inputs(**call(q=q, initial_state=state))
    assert torch.equal(inputs.q, q)
    for field in dataclasses.fields(inputs):
        if torch.is_tensor(x := getattr(inputs, field.name)):
            assert x.is_contiguous(), field.name


def test_contiguous_inputs_are_not_copied():
    arguments_ = call()
    inputs = check_inputs(**arguments_)
    assert all(getattr(inputs, name).data_ptr() == x.data_ptr() for name, x in arguments_.items() if torch.is_tensor(x))


def test_gate_parameters_are_ignored_unless_the_gate_is_in_the_kernel():
    inputs = check_inputs(**call(A_log=torch.zeros(4), dt_bias=torch.zeros(99)))
    assert inputs.A_log is inputs.dt_bias is inputs.facts.A_log_dtype is None


def test_requires_grad_only_where_autograd_is_on():
    arguments_ = call()
    assert not check_inputs(**arguments_).requires_grad
    arguments_["initial_state"].requires_grad_()
    assert check_inputs(**arguments_).requires_grad
    with torch.no_grad():
        assert not check_inputs(**arguments_).requires_grad
