"""Does the judge let a correct candidate pass, and does it catch each way of being wrong? On the CPU, with the reference in
bfloat16 as the kernel."""

import dataclasses
import itertools

import planted
import pytest
import torch

from qla_jit import reference
from qla_jit.ops import fallback
from qla_jit.tune import verify
from qla_jit.tune.inputs import GATE_PROFILES, call_bytes, checked, facts_from_json, facts_to_json, make_call
from qla_jit.tune.operations import Sample
from qla_jit.tune.verify import GuardedMemory, Judge, cases
from qla_jit.tune.worker import Failure

FACTS = planted.facts(H=1, HV=2)._replace(device=torch.device("cpu"), K=16, V=24, chunk_size=16)
QUICK = cases(FACTS, None, full=False)


def stored(result):
    """What a kernel does: outputs that PyTorch allocated and that it wrote, in its dtypes."""
    o = torch.empty(result.o.shape, dtype=torch.bfloat16)
    final_state = torch.empty(result.final_state.shape, dtype=torch.float32)
    return {"o": o.copy_(result.o), "final_state": final_state.copy_(result.final_state)}


def kernel(sample):
    return stored(fallback.forward(sample.inputs))


def judge():
    return Judge(FACTS, kernel)


def test_a_correct_candidate_passes_with_its_errors():
    verdict = judge().verdict(kernel, QUICK)
    assert verdict.cases == ("ragged-mixed",)
    assert verdict.repeats == 8
    assert verdict.guards_intact
    assert set(verdict.errors) == {"o", "final_state"}
    assert verdict.errors["o"].over_reference == pytest.approx(1)


def test_one_that_rounds_in_another_order_passes():
    def by_token(sample):
        return stored(fallback.forward(sample.inputs, by_chunk=False))

    assert not isinstance(judge().verdict(by_token, QUICK), Failure)


def changed(sample, **changes):
    return Sample(dataclasses.replace(sample.inputs, **changes))


def scaled(sample):
    outputs = kernel(sample)
    return outputs | {"o": outputs["o"] * 1.02}


def less_precise(sample):
    # Keys rounded to 4 bits of mantissa: within 5 % of the right answer, and several times its error.
    k = sample.inputs.k.float()
    scale = torch.exp2(torch.floor(torch.log2(k.abs().clamp_min(1e-30))) - 3)
    return kernel(changed(sample, k=((k / scale).round() * scale).to(sample.inputs.k.dtype)))


def leaves_rows_out(sample):
    outputs = kernel(sample)
    o = torch.empty_like(outputs["o"])
    o[:, :-40] = outputs["o"][:, :-40]   # the tail behind the last sequence, and a few tokens of the sequence
    return outputs | {"o": o}


def forgets_the_last_state(sample):
    outputs = kernel(sample)
    final_state = torch.empty_like(outputs["final_state"])
    final_state[:-1] = outputs["final_state"][:-1]
    return outputs | {"final_state": final_state}


def ignores_the_gates(sample):
    return kernel(changed(sample, g=torch.zeros_like(sample.inputs.g)))


@pytest.mark.parametrize(
    "candidate", [scaled, less_precise, leaves_rows_out, forgets_the_last_state, ignores_the_gates], ids=lambda f: f.__name__
)
def test_a_wrong_candidate_is_out_with_numbers(candidate):
    failure = judge().verdict(candidate, QUICK)
    assert isinstance(failure, Failure)
    assert failure.reason == "wrong"
    assert "ragged-mixed" in failure.detail
    assert "is allowed" in failure.detail


def test_a_racy_candidate_is_out():
    launches = itertools.count()

    def racy(sample):
        outputs = kernel(sample)
        if next(launches) == 5:
            outputs["o"].view(torch.int16)[0, 3, 0, 0] ^= 1              # one bit of one element, far below any tolerance
        return outputs

    failure = judge().verdict(racy, QUICK)
    assert (failure.reason, failure.detail) == ("racy", "ragged-mixed: launch 6 of 8 gives another o")


@pytest.mark.parametrize("where", ["before", "behind"])
def test_a_candidate_that_writes_beside_its_outputs_is_out(where):
    def writes_beside(sample):
        outputs = kernel(sample)
        o = outputs["o"]
        offset = o.storage_offset() - 1 if where == "before" else o.storage_offset() + o.numel()
        o.as_strided((1,), (1,), offset).fill_(0)
        return outputs

    failure = judge().verdict(writes_beside, QUICK)
    assert failure.reason == "wrong"
    assert f"2 bytes {where} allocation" in failure.detail


def test_a_reference_that_is_wrong_itself_judges_nobody():
    failure = Judge(FACTS, scaled).verdict(kernel, QUICK)
    assert "the reference template's own o has the error 2." in failure.detail


def test_full_cases_cover_gates_lengths_and_many_blocks():
    full = cases(FACTS, 4, full=True)
    lengths = {length for case in full for length in case.lengths}
    assert {0, 1, 15, 16, 17} <= lengths
    assert max(lengths) > 2 * 4 * 16     # three segments
    assert {"open", "closed", "mixed"} <= {case.gates for case in full}
    assert any(len(case.lengths) * FACTS.HV >= 1024 for case in full)
    assert any(case.tail for case in full)


@pytest.mark.parametrize(("split", "segments"), [(4, 3), (32, 3), (64, 2), (256, 2)], ids=str)
def test_the_longest_sequence_has_several_segments_and_a_ragged_end(split, segments):
    (case,) = cases(FACTS, split, full=False)
    longest = max(case.lengths)
    assert -(-longest // (16 * split)) == segments
    assert longest % 16


def test_equal_lengths_where_the_call_is_not_packed():
    facts = FACTS._replace(cu_seqlens_dtype=None)
    assert all(len(set(case.lengths)) == 1 for case in cases(facts, 4, full=True))
    assert not isinstance(Judge(facts, kernel).verdict(kernel, cases(facts, None, full=False)), Failure)


def test_all_cases_can_be_passed():
    verdict = judge().verdict(kernel, cases(FACTS, None, full=True))
    assert len(verdict.cases) == 6


def test_only_so_many_cases_are_held(monkeypatch):
    monkeypatch.setattr(verify, "CASES_HELD", 2)
    held = judge()
    held.verdict(kernel, cases(FACTS, None, full=True)[:4])
    assert len(held._judged) == 2


@pytest.mark.parametrize("allocate", [
    lambda: torch.empty(3, 5, dtype=torch.bfloat16),
    lambda: torch.empty_like(torch.ones(3, 5)),
    lambda: torch.ones(2, dtype=torch.float16).new_empty(3, 5),
], ids=["empty", "empty_like", "new_empty"])
def test_guarded_memory_begins_as_nan(allocate):
    with GuardedMemory() as memory:
        x = allocate()
    assert x.shape == (3, 5)
    assert x.isnan().all()
    assert memory.damage() is None


def test_guarded_memory_is_usual_again_outside():
    with GuardedMemory():
        pass
    assert torch.empty(3).storage_offset() == 0


@pytest.mark.parametrize("gates", GATE_PROFILES)
def test_gates_of_a_profile_are_decays(gates):
    call = make_call(FACTS, (50, 30), gates)
    assert call["g"].max() <= 0
    assert checked(FACTS, call).facts == FACTS


@pytest.mark.parametrize("change", [
    dict(use_gate_in_kernel=True, A_log_dtype=torch.float32, dt_bias_dtype=torch.float32),
    dict(use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True),
    dict(use_qk_l2norm_in_kernel=True),
    dict(state_dtype=None, state_v_first=True),
    dict(cu_seqlens_dtype=torch.int64, g_dtype=torch.bfloat16),
    dict(cu_seqlens_dtype=None),
], ids=lambda change: "-".join(change))
def test_calls_have_the_facts_that_they_were_made_for(change):
    facts = FACTS._replace(**change)
    inputs = checked(facts, make_call(facts, (40, 40), "mixed"))
    assert inputs.q.shape[1] == (80 if facts.varlen else 40)
    assert facts_from_json(facts_to_json(facts)) == facts


def test_bytes_of_a_call_are_those_of_its_tensors():
    call = make_call(FACTS, (40, 23), "mixed")
    names = ("q", "k", "v", "g", "beta", "initial_state")
    o, final_state = reference.chunk_gated_delta_rule(
        **{name: call[name] for name in (*names, "cu_seqlens")}
    )
    reads, writes = call_bytes(FACTS, (40, 23))
    assert reads == sum(call[name].nbytes for name in names)
    assert writes == o.nbytes // 2 + final_state.nbytes      # o in bfloat16
