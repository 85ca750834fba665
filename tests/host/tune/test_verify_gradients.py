"""Does the judge let correct gradients pass, whatever the gates, and does it find an error in each of them? On the CPU, with
autograd of the reference in bfloat16 as the kernel."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math

import planted
import pytest
import torch

from qla_jit.ops import fallback
from qla_jit.ops.plan import BACKWARD
from qla_jit.ops.results import Gradients
from qla_jit.tune.inputs import call_bytes
from qla_jit.tune.operations import NEGLIGIBLE, OPERATIONS, Outputs, Sample
from qla_jit.tune.verify import Case, Judge, cases
from qla_jit.tune.worker import Failure

FACTS = planted.facts(H=1, HV=2)._replace(device=torch.device("cpu"), K=16, V=24, chunk_size=16)
IN_KERNEL = FACTS._replace(
    use_gate_in_kernel=True, A_log_dtype=torch.float32, dt_bias_dtype=torch.float32, use_beta_sigmoid_in_kernel=True
)
OF_TOKENS = ("q", "k", "v", "g", "beta")
ALWAYS = (*OF_TOKENS, "initial_state")


def quick(facts):
    return cases(facts, None, full=False, op=BACKWARD)


def kernel(sample: Sample) -> Outputs:
    """Gradients that PyTorch allocated and that a kernel wrote, in the dtypes of the inputs."""
    return {name: torch.empty_like(x).copy_(x) for name, x in gradients_of(sample)._asdict().items() if x is not None}


@functools.lru_cache(maxsize=16)             # autograd is slow, and the samples of a judge stay the same objects
def gradients_of(sample: Sample) -> Gradients:
    return fallback.backward(sample.inputs, sample.do, sample.dht)


@functools.cache
def judge(facts=FACTS, reference=kernel):
    return Judge(facts, reference, BACKWARD)


@pytest.mark.parametrize(
    ("facts", "gradients"),
    [
        (FACTS, ALWAYS),
        (IN_KERNEL, Gradients._fields),
        (IN_KERNEL._replace(dt_bias_dtype=None), (*ALWAYS, "A_log")),
        (FACTS._replace(state_dtype=None), OF_TOKENS),
        (FACTS._replace(output_final_state=False, cu_seqlens_dtype=None), ALWAYS),
    ],
    ids=["plain", "gates-in-kernel", "no-dt_bias", "no-initial-state", "no-final-state"],
)
def test_every_gradient_that_exists_is_judged(facts, gradients):
    verdict = judge(facts).verdict(kernel, quick(facts))
    assert not isinstance(verdict, Failure), verdict
    assert set(verdict.errors) == set(gradients)
    assert verdict.oracle == "autograd of the recurrence in float64, chunk by chunk"
    assert (verdict.repeats, verdict.guards_intact) == (8, True)
    assert max(error.over_reference for error in verdict.errors.values()) == pytest.approx(1)


def test_all_cases_can_be_passed():
    of = cases(FACTS, None, full=True, op=BACKWARD)
    verdict = judge().verdict(kernel, of)
    assert not isinstance(verdict, Failure), verdict
    assert len(verdict.cases) == 6


def test_gradients_that_round_in_another_order_pass():
    def by_smaller_chunks(sample):
        inputs = dataclasses.replace(sample.inputs, facts=sample.inputs.facts._replace(chunk_size=4))
        return kernel(dataclasses.replace(sample, inputs=inputs))

    verdict = judge(IN_KERNEL).verdict(by_smaller_chunks, quick(IN_KERNEL))
    assert not isinstance(verdict, Failure), verdict


def with_noise(share, name, seed=3):
    """The kernel with errors of a share of the gradient's norm, as rounding makes them."""
    def noisy(sample):
        outputs = kernel(sample)
        x, generator = outputs[name].double(), torch.Generator().manual_seed(seed)
        noise = torch.randn(x.shape, dtype=torch.float64, generator=generator)
        if sample.inputs.facts.varlen and name in OF_TOKENS:
            noise[:, int(sample.inputs.cu_seqlens[-1]):] = 0
        outputs[name].copy_(x + share * x.norm() / math.sqrt(x.numel()) * noise)
        return outputs

    return noisy


@pytest.mark.parametrize("name", ALWAYS)
def test_an_error_in_a_single_gradient_is_found(name):
    """Against a reference with errors of 0.5 %, as kernels have them."""
    reference = with_noise(0.005, name)
    assert not isinstance(judge(reference=reference).verdict(with_noise(0.005, name, seed=4), quick(FACTS)), Failure)
    failure = judge(reference=reference).verdict(with_noise(0.015, name, seed=4), quick(FACTS))
    assert failure.reason == "wrong"
    assert f"error of {name} is" in failure.detail
    assert "is allowed" in failure.detail


@pytest.mark.parametrize("output", ["do", "dht"])
def test_an_error_in_what_comes_through_one_of_the_outputs_is_found(output):
    def wrong(sample):
        return kernel(dataclasses.replace(sample, **{output: 1.02 * getattr(sample, output)}))

    failure = judge(reference=with_noise(0.005, "v")).verdict(wrong, quick(FACTS))
    assert failure.reason == "wrong"


@pytest.mark.parametrize("gates", ["mixed", "qwen", "open"])
def test_gradients_come_through_both_outputs_alike(gates):
    sample = OPERATIONS[BACKWARD].sample(planted.facts()._replace(device=torch.device("cpu")), (300,), gates)
    through_o = fallback.backward(sample.inputs, sample.do, torch.zeros_like(sample.dht))
    through_state = fallback.backward(sample.inputs, torch.zeros_like(sample.do), sample.dht)
    for name in ("k", "v", "beta", "g", "initial_state"):
        share = getattr(through_o, name).float().norm() / getattr(through_state, name).float().norm()
        assert 1 / 3 < share < 3, name


@pytest.mark.parametrize("name", ["A_log", "dt_bias"])
@pytest.mark.parametrize("factor", [0.0, -1.0, 1.5], ids=lambda factor: f"times{factor:g}")
def test_a_sum_of_gradients_that_is_wrong_is_found(name, factor):
    def wrong(sample):
        outputs = kernel(sample)
        return outputs | {name: outputs[name] * factor}

    failure = judge(IN_KERNEL).verdict(wrong, quick(IN_KERNEL))
    assert failure.reason == "wrong"
    assert f"error of {name} is" in failure.detail


@pytest.mark.parametrize("name", Gradients._fields)
def test_a_gradient_that_is_not_written_is_found(name):
    def partly(sample):
        outputs = kernel(sample)
        outputs[name] = torch.empty_like(outputs[name])
        return outputs

    failure = judge(IN_KERNEL).verdict(partly, quick(IN_KERNEL))
    assert (failure.reason, "error of " + name in failure.detail) == ("wrong", True)


def test_a_gradient_that_is_left_out_is_found():
    def without(sample):
        outputs = kernel(sample)
        del outputs["initial_state"]
        return outputs

    failure = judge().verdict(without, quick(FACTS))
    assert failure.detail == "ragged-mixed: gives q, k, v, beta, g; q, k, v, beta, g, initial_state were asked for"


@pytest.mark.parametrize("name", OF_TOKENS)
def test_gradients_of_tokens_of_no_sequence_must_be_zero(name):
    def leaks(sample):
        outputs = kernel(sample)
        outputs[name][0, -1] += 1e-9 * outputs[name].abs().max()         # far below any tolerance
        return outputs

    failure = judge().verdict(leaks, quick(FACTS))
    assert failure == Failure("wrong", f"ragged-mixed: {name} is not 0 for tokens that belong to no sequence")


def test_tokens_of_no_sequence_are_nan_in_the_gradient_of_the_outputs_too():
    (case,) = quick(FACTS)
    seen = []
    judge().verdict(lambda sample: seen.append(sample) or kernel(sample), [case])
    for x in (seen[0].inputs.q, seen[0].inputs.k, seen[0].inputs.v, seen[0].do):
        assert x[:, -case.tail :].isnan().all()
        assert not x[:, : -case.tail].isnan().any()


def test_a_racy_gradient_is_out():
    launches = itertools.count()

    def racy(sample):
        outputs = kernel(sample)
        if next(launches) == 5:
            outputs["beta"].view(torch.int32)[0, 3, 0] ^= 1
        return outputs

    assert judge().verdict(racy, quick(FACTS)) == Failure("racy", "ragged-mixed: launch 6 of 8 gives another beta")


def test_a_gradient_that_is_written_beside_its_place_is_out():
    def writes_beside(sample):
        outputs = kernel(sample)
        dg = outputs["g"]
        dg.as_strided((1,), (1,), dg.storage_offset() + dg.numel()).fill_(0)
        return outputs

    failure = judge().verdict(writes_beside, quick(FACTS))
    assert "4 bytes behind allocation" in failure.detail


# Gates so closed that dg is what is left of terms that cancel


CLOSED = [Case("closed", (70, 20), "closed")]


def with_errors_in_dg(share_of_do):
    def kernel_with_errors(sample):
        outputs = kernel(sample)
        generator = torch.Generator().manual_seed(5)
        noise = torch.randn(outputs["g"].shape, generator=generator)
        outputs["g"] += share_of_do * sample.do.double().norm() * noise / noise.norm()
        return outputs

    return kernel_with_errors


def test_what_fp32_sums_leave_of_a_tiny_gradient_is_no_error():
    sample = OPERATIONS[BACKWARD].sample(FACTS, (70, 20), "closed")
    assert 0 < kernel(sample)["g"].norm() < 1e-8 * sample.do.float().norm()          # far less than the error
    verdict = judge().verdict(with_errors_in_dg(0.5 * NEGLIGIBLE), CLOSED)
    assert not isinstance(verdict, Failure), verdict
    assert verdict.errors["g"].rms < 1e-2                                # told so that it can be compared
    assert not isinstance(judge(reference=with_errors_in_dg(0.5 * NEGLIGIBLE)).verdict(kernel, CLOSED), Failure)


def test_what_is_more_than_that_is_an_error():
    failure = judge().verdict(with_errors_in_dg(3 * NEGLIGIBLE), CLOSED)
    assert (failure.reason, "rms error of g" in failure.detail) == ("wrong", True)


def test_a_reference_with_wrong_gradients_judges_nobody():
    failure = judge(reference=with_noise(0.05, "k")).verdict(kernel, quick(FACTS))
    assert "the reference template's own k has the error 4." in failure.detail       # a part of the noise is for the tail


# Cases and bytes


@pytest.mark.parametrize("HV", [2, 8, 64])
def test_single_tokens_are_enough_values_of_gates_to_judge(HV):
    facts = FACTS._replace(HV=HV)
    (single,) = [case for case in cases(facts, None, full=True, op=BACKWARD) if case.name == "single-token"]
    assert set(single.lengths) == {1}
    assert len(single.lengths) * HV >= 512


def test_a_backward_reads_what_the_forward_reads_and_writes_and_writes_what_it_read():
    reads, writes = call_bytes(FACTS, (40, 23))
    sample = OPERATIONS[BACKWARD].sample(FACTS, (40, 23), "mixed")
    found = kernel(sample)
    assert OPERATIONS[BACKWARD].bytes(FACTS, (40, 23)) == (
        reads + sample.do.nbytes + sample.dht.nbytes, sum(x.nbytes for x in found.values())
    )
    assert sample.do.nbytes + sample.dht.nbytes == writes


def test_samples_of_two_seeds_differ_in_everything():
    one, two = (OPERATIONS[BACKWARD].sample(FACTS, (40,), "mixed", seed=seed) for seed in (0, 1))
    assert not torch.equal(one.do, two.do)
    assert not torch.equal(one.dht, two.dht)
    assert not torch.equal(one.inputs.v, two.inputs.v)
    assert not torch.equal(one.inputs.v, one.do)
