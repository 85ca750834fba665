"""Are the kernels of calls known before the calls, for every kind of call and every tuned record?"""

import tempfile

import pytest
import records
import torch
from records import DEFAULT, H200, NARROW, WIDE, entry

from qla_jit import enumeration, record_store, select, tuning_db
from qla_jit.enumeration import Variants
from qla_jit.errors import DtypeError, InputError, UnsupportedError
from qla_jit.models import ModelShape
from qla_jit.ops.plan import BACKWARD, Extents
from qla_jit.tuning_records import Hardware

SHAPE = ModelShape(H=2, HV=8, K=128, V=128)


@pytest.fixture(autouse=True)
def _no_records(tmp_path, monkeypatch):
    monkeypatch.setenv("QLA_JIT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("QLA_JIT_DB_PATH", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(tuning_db, "__path__", [str(tmp_path / "shipped")])
    yield
    record_store._open.cache_clear()


@pytest.mark.parametrize(
    ("variants", "count"),
    [
        (Variants(), 3 * 2 * 2),
        (Variants(packed=True), 2 * 2 * 2),
        (Variants(packed=False), 2 * 2),
        (Variants(packed=True, index_dtypes=(torch.int32,)), 2 * 2),
        (Variants(initial_state=True, output_final_state=True), 3),
        (Variants(packed=False, initial_state=False, output_final_state=True), 1),
    ],
    ids=["all", "packed", "not-packed", "packed-int32", "both-states", "one"],
)
def test_there_is_one_call_of_each_kind(variants, count):
    calls = variants.calls(SHAPE)
    assert len(set(calls)) == len(calls) == count


def test_the_fields_of_the_calls_are_those_of_the_variants():
    variants = Variants(
        dtype=torch.float16, chunk_size=32, packed=True, index_dtypes=(torch.int64,), initial_state=True,
        output_final_state=False, state_dtype=torch.bfloat16, g_dtype=torch.float16, beta_dtype=torch.bfloat16,
        state_v_first=True, use_qk_l2norm_in_kernel=False, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
        allow_neg_eigval=True,
    )
    assert variants.calls(SHAPE) == [records.facts(
        device=torch.device("cuda"), dtype=torch.float16, chunk_size=32, cu_seqlens_dtype=torch.int64, state_dtype=torch.bfloat16,
        output_final_state=False, g_dtype=torch.float16, beta_dtype=torch.bfloat16, state_v_first=True, use_gate_in_kernel=True,
        A_log_dtype=torch.float32, dt_bias_dtype=torch.float32, use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True,
    )]


def test_kernels_with_l2norm_include_those_without():
    with_l2norm, without = (
        set(enumeration.kernels(SHAPE, Variants(use_qk_l2norm_in_kernel=flag), records.ARCH, [])) for flag in (True, False)
    )
    assert without < with_l2norm
    assert {request.template.name for request in with_l2norm - without} == {"l2norm"}


def test_kernels_with_gradients_include_those_without():
    both, forward = (set(enumeration.kernels(SHAPE, Variants(backward=flag), records.ARCH, [])) for flag in (True, False))
    assert forward < both
    new = {request.template.name for request in both - forward}
    assert new == {
        "gate_cumsum", "register_state_scan", "register_gradient_scan", "segment_plan", "segment_state_gradients",
        "warpgroup_gradients", "l2norm_backward",
    }                                            # the others are those of the forward, which plans in its own direction


def test_gradients_of_every_size_have_their_kernels():
    variants = Variants(backward=True)
    kernels = set(enumeration.kernels(SHAPE, variants, records.ARCH, []))
    for facts in variants.calls(SHAPE):
        assert set(select.choose_backward(facts, records.ARCH).requests.values()) < kernels


@pytest.mark.parametrize("heads", [(3, 8), (0, 8), (2, 0)], ids=str)
def test_heads_that_cannot_be_shared_are_refused(heads):
    with pytest.raises(InputError, match=f"got {heads[0]}:{heads[1]}"):
        Variants().calls(ModelShape(*heads, K=128, V=128))


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"dtype": torch.float32}, DtypeError),
        ({"state_dtype": torch.float64}, DtypeError),
        ({"index_dtypes": (torch.int16,)}, DtypeError),
        ({"index_dtypes": ()}, DtypeError),
        ({"chunk_size": 128}, InputError),
        ({"allow_neg_eigval": True}, InputError),
    ],
    ids=str,
)
def test_calls_that_cannot_be_are_refused(fields, error):
    with pytest.raises(error, match=next(iter(fields))):
        Variants(**fields)


def test_head_dims_without_kernels_are_refused_as_in_a_call():
    with pytest.raises(UnsupportedError, match="K=100"):
        enumeration.kernels(ModelShape(H=2, HV=8, K=100, V=128), Variants(), records.ARCH, [])


# Records


def scans(gpus, **kinds):
    """The configs of the state scans, without states and without packing."""
    one = Variants(packed=False, initial_state=False, output_final_state=True, **kinds)
    requests = enumeration.kernels(SHAPE, one, records.ARCH, gpus)
    return [request.config.block_v for request in requests if request.template.name == "state_scan"]


def test_every_entry_of_a_record_for_the_gpu_is_built_also_where_it_was_not_timed_everywhere():
    # At 32 chunks the wide config wins, at 128 the narrow one, which was timed there alone.
    default = (100.0, 400.0)
    entries = (entry(DEFAULT, *default), entry(WIDE, 80.0, 500.0, default=default), entry(NARROW, None, 200.0, default=default))
    record_store.save_user_records([records.record(entries=entries)])
    chosen = {
        select.choose(records.facts(), records.ARCH, hardware=H200, extents=Extents(n, n, 1)).requests.get("state_scan")
        for n in (32, 128)
    }
    assert {request.config.block_v for request in chosen} == {128, 32}
    assert sorted(scans([H200])) == [32, 128]
    assert scans([Hardware(arch="sm_90a", sm_count=114, l2_bytes=50 << 20)]) == []
    assert scans([]) == []


def test_records_of_gradients_are_built_where_there_are_gradients():
    default = (100.0, 400.0)
    entries = (entry(DEFAULT, *default), entry(WIDE, 80.0, 320.0, default=default))
    record_store.save_user_records([records.record(op=BACKWARD, entries=entries)])
    assert scans([H200]) == []
    assert scans([H200], backward=True) == [WIDE["state_scan"]["block_v"]]
    assert scans([], backward=True) == []


def test_entries_that_the_templates_of_today_refuse_are_not_built():
    impossible = {"state_scan": {"block_v": 96, "threads": 128, "stages": 2}}
    entries = (entry(DEFAULT, 100.0, 400.0), entry(impossible, 80.0, 300.0, default=(100.0, 400.0)))
    record_store.save_user_records([records.record(entries=entries)])
    assert scans([H200]) == []
