"""The reference agrees with the written recurrence, with itself in both forms, and with finite differences."""

import math
from itertools import pairwise

import pytest
import torch
from cases import BETAS, GATES, RAGGED_LENGTHS, Case, arguments, oracle, relative_l2
from hypothesis import given
from hypothesis import strategies as st

from qla_jit import reference

FORMS = {"recurrent": reference.recurrent_gated_delta_rule, "chunk": reference.chunk_gated_delta_rule}

# Every gate family with and without GVA and at every risk of the solve; the lengths cross one and two chunks.
CASES = [
    *(Case(gates=gates, H=H, HV=HV, lengths=(129, 70)) for gates in GATES for H, HV in ((1, 1), (2, 6))),
    *(Case(betas=betas, keys=keys, lengths=(129,)) for betas in BETAS for keys in ("unit", "collinear")),
    *(Case(lengths=lengths, gates="reset", tail=3) for lengths in RAGGED_LENGTHS),
    Case(lengths=(70, 70, 70), packed=False),
    Case(lengths=(70, 70, 70), packed=False, initial_state=False, state_v_first=True),
    Case(lengths=(129, 0, 1), state_v_first=True, K=24, V=16),
    Case(keys="zero_rows", l2norm=True, gates="open", betas="beta1"),
    Case(in_kernel=True, betas="random", H=1),
    Case(in_kernel=True, betas="beta2", keys="zero_rows", l2norm=True),
]


def run(form, call, **changes):
    return FORMS[form](**{name: x for name, x in (call | changes).items() if name != "output_final_state"})


@pytest.mark.parametrize("form", FORMS)
def test_equals_the_written_recurrence(form):
    call = arguments(Case(H=2, HV=6, K=5, V=7, lengths=(70,), gates="mixed"))
    o, final_state = run(form, call)
    for head in range(6):
        S = call["initial_state"][0, head].double()
        for t in range(70):
            q, k, v = call["q"][0, t, head // 3], call["k"][0, t, head // 3], call["v"][0, t, head]
            S = math.exp(call["g"][0, t, head]) * S
            S = S + torch.outer(k, float(call["beta"][0, t, head]) * (v - S.T @ k))
            torch.testing.assert_close(o[0, t, head], 5**-0.5 * S.T @ q, rtol=0, atol=1e-13)
        torch.testing.assert_close(final_state[0, head], S, rtol=0, atol=1e-13)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_chunk_form_equals_recurrent_form(case):
    call = arguments(case)
    o, final_state = run("recurrent", call)
    o_chunk, final_state_chunk = run("chunk", call)
    assert torch.isfinite(o).all()
    assert torch.isfinite(final_state).all()
    assert relative_l2(o_chunk, o) < 1e-10
    assert relative_l2(final_state_chunk, final_state) < 1e-10


@pytest.mark.parametrize("chunk_size", [1, 16, 32, 100], ids=lambda size: f"C{size}")
def test_chunk_size_changes_rounding_only(chunk_size):
    call = arguments(Case(lengths=(129, 64)))
    o, final_state = run("recurrent", call)
    o_chunk, final_state_chunk = run("chunk", call, chunk_size=chunk_size)
    assert relative_l2(o_chunk, o) < 1e-12
    assert relative_l2(final_state_chunk, final_state) < 1e-12


@given(lengths=st.lists(st.integers(0, 140), min_size=1, max_size=4), tail=st.integers(0, 70))
def test_packed_sequences_are_independent(lengths, tail):
    call = arguments(Case(H=1, HV=2, K=4, V=4, lengths=tuple(lengths), tail=tail))
    o, final_state = run("chunk", call)
    starts = call["cu_seqlens"].tolist()
    for n, (first, end) in enumerate(pairwise(starts)):
        alone = {name: call[name][:, first:end] for name in ("q", "k", "v", "g", "beta")}
        o_n, state_n = run("recurrent", call | alone, cu_seqlens=None, initial_state=call["initial_state"][n : n + 1])
        torch.testing.assert_close(o[:, first:end], o_n, rtol=0, atol=1e-12)
        torch.testing.assert_close(final_state[n : n + 1], state_n, rtol=0, atol=1e-12)
    assert not o[:, starts[-1] :].any()


@pytest.mark.parametrize("form", FORMS)
def test_what_lies_behind_the_last_sequence_is_not_used(form):
    call = arguments(Case(lengths=(70,), tail=20))
    o, final_state = run(form, call)
    for name in ("q", "k", "v", "g", "beta"):
        call[name][:, 70:] = float("nan")
    o_nan, final_state_nan = run(form, call)
    assert torch.equal(o_nan, o)
    assert torch.equal(final_state_nan, final_state)


@pytest.mark.parametrize("form", FORMS)
def test_empty_sequence_ends_as_it_began(form):
    call = arguments(Case(lengths=(0, 5, 0), state_dtype=torch.float64))
    _, final_state = run(form, call)
    assert torch.equal(final_state[::2], call["initial_state"][::2])
    assert not torch.equal(final_state[1], call["initial_state"][1])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "batch"])
def test_no_tokens_give_an_empty_output_and_a_copy_of_the_state(form, packed):
    call = arguments(Case(lengths=(0, 0), packed=packed, state_dtype=torch.float64))
    o, final_state = run(form, call)
    assert o.shape == call["v"].shape
    assert torch.equal(final_state, call["initial_state"])
    assert final_state.data_ptr() != call["initial_state"].data_ptr()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("reset", [-1e4, -1e30, float("-inf")], ids=str)
def test_reset_forgets_the_past_exactly(form, reset):
    call = arguments(Case(lengths=(100,), gates="mixed", gate_dtype=torch.float64))
    call["g"][:, 70] = reset
    o, final_state = run(form, call)
    o_other, final_state_other = run(form, call, initial_state=call["initial_state"] + 5)
    assert not torch.equal(o[:, :70], o_other[:, :70])
    assert torch.equal(o[:, 70:], o_other[:, 70:])
    assert torch.equal(final_state, final_state_other)


@pytest.mark.parametrize("gates", ["reset", "minus_inf", "closed"])
def test_float32_keeps_its_precision_around_resets(gates):
    call = arguments(Case(lengths=(129,), gates=gates, dtype=torch.float32))
    o, final_state = run("chunk", call)
    expected_o, expected_state = oracle(call)
    assert o.dtype == final_state.dtype == torch.float32
    assert relative_l2(o, expected_o) < 1e-6
    assert relative_l2(final_state, expected_state) < 1e-6


@pytest.mark.parametrize("form", FORMS)
def test_state_v_first_transposes_states_and_nothing_else(form):
    call = arguments(Case(lengths=(70, 1)))
    o, final_state = run(form, call)
    o_v_first, final_state_v_first = run(form, call, state_v_first=True, initial_state=call["initial_state"].mT)
    assert torch.equal(o_v_first, o)
    assert torch.equal(final_state_v_first, final_state.mT)


@pytest.mark.parametrize("form", FORMS)
def test_explicit_zero_scale_stays_zero(form):
    assert not run(form, arguments(Case(lengths=(3,))), scale=0.0)[0].any()


@pytest.mark.parametrize("form", FORMS)
def test_autocast_does_not_round(form):
    call = arguments(Case(lengths=(70,), dtype=torch.float32))
    expected, _ = run(form, call)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o, _ = run(form, call)
    assert torch.equal(o, expected)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("in_kernel", [False, True], ids=["plain", "in_kernel"])
def test_gradients_match_finite_differences(form, in_kernel):
    # Two chunks of 3 and a rest; a GVA group of 2; an empty sequence.
    flags = dict(in_kernel=True, betas="beta2", l2norm=True, state_v_first=True) if in_kernel else {}
    call = arguments(Case(H=1, HV=2, K=3, V=2, lengths=(4, 0, 2), **flags))
    names = ["q", "k", "v", "g", "beta", "initial_state"] + ["A_log", "dt_bias"] * in_kernel
    if in_kernel:
        call["A_log"] = torch.tensor([0.1, 0.7])
    leaves = [call[name].double().requires_grad_() for name in names]
    changes = {"chunk_size": 3} if form == "chunk" else {}

    def function(*tensors):
        return run(form, call, **dict(zip(names, tensors, strict=True)), **changes)

    assert torch.autograd.gradcheck(function, leaves)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("gates", GATES)
def test_gradients_are_finite(form, gates):
    call = arguments(Case(lengths=(80,), gates=gates))
    leaves = {name: call[name].requires_grad_() for name in ("q", "k", "v", "g", "beta", "initial_state")}
    o, final_state = run(form, call)
    for gradient in torch.autograd.grad(o.sum() + final_state.sum(), list(leaves.values())):
        assert torch.isfinite(gradient).all()


def test_l2norm_is_x_over_the_root_of_its_square_sum_plus_eps():
    x = torch.tensor([[3.0, 4.0], [0.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(reference.l2norm(x, eps=11.0), torch.tensor([[0.5, 4 / 6], [0.0, 0.0]], dtype=torch.float64))


def test_gate_of_a_dead_head_is_minus_zero():
    g = reference.gate(torch.tensor([[-3.0, 0.0, 30.0]]).mT, torch.tensor([float("-inf")]), torch.ones(1))
    assert torch.equal(g, torch.zeros(3, 1))
    assert torch.signbit(g).all()


def test_gate_is_minus_A_softplus():
    g = reference.gate(torch.tensor([0.5, -2.0]).double(), torch.tensor([0.0, 1.0]).double(), torch.tensor([1.0, 0.25]).double())
    expected = [-math.log1p(math.exp(1.5)), -math.e * math.log1p(math.exp(-1.75))]
    torch.testing.assert_close(g, torch.tensor(expected).double())


@pytest.mark.parametrize("allow_neg_eigval", [False, True], ids=["beta_below_1", "beta_below_2"])
def test_beta_from_logits(allow_neg_eigval):
    beta = reference.beta_from_logits(torch.tensor([-200.0, 0.0, 200.0]), allow_neg_eigval=allow_neg_eigval)
    assert beta.tolist() == [0.0, 1.0, 2.0] if allow_neg_eigval else [0.0, 0.5, 1.0]
