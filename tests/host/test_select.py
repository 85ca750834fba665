"""Does a call get what a record says, only where the record holds, and otherwise the default?"""

import dataclasses
import logging
import os
import tempfile

import pytest
import records
import torch
from records import ARCH, DEFAULT, H200, NARROW, WIDE, entry, facts, one_sequence

from qla_jit import once, record_store, select, tuning_db
from qla_jit.errors import InvalidConfigError
from qla_jit.kernel_templates import state_scan
from qla_jit.ops import plan
from qla_jit.ops.plan import BACKWARD, FORWARD, Extents
from qla_jit.record_store import save_user_records
from qla_jit.tuning_records import Hardware, Rigor, SplitRule, Versions, save_directory


@pytest.fixture(autouse=True)
def places(tmp_path, monkeypatch):
    """No records anywhere but under tmp_path, and nothing told yet."""
    # Records of these tests are about the baseline's kernels, which scan states in both directions: no other strategy is the
    # default here.
    for name in ("STRATEGIES", "BACKWARD_STRATEGIES"):
        monkeypatch.setattr(plan, name, {"chunked": getattr(plan, name)["chunked"]})
    monkeypatch.setenv("QLA_JIT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("QLA_JIT_DB_PATH", str(tmp_path / "directory"))
    monkeypatch.setattr(tuning_db, "__path__", [str(tmp_path / "shipped")])
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "directory").mkdir()
    once._said.clear()
    yield tmp_path
    record_store._open.cache_clear()


def sequence(chunks):
    return Extents(chunks=chunks, longest=chunks, sequences=1)


def choose(extents=None, hardware=H200, op=FORWARD, **changes):
    return select.choose(facts(**changes), ARCH, op=op, hardware=hardware, extents=extents)


both = pytest.mark.parametrize("op", [FORWARD, BACKWARD])


def scan(dispatch):
    return dataclasses.asdict(dispatch.requests["state_scan"].config)


@both
def test_without_records_the_template_defaults_answer(op):
    dispatch = choose(sequence(64), op=op)
    assert (dispatch.source, dispatch.match, dispatch.rigor) == ("default", "none", Rigor.HEURISTIC)
    assert (dispatch.expected_regret, dispatch.stale) == (None, ())
    for request in dispatch.requests.values():
        assert request.config == request.template.default_config(request.problem, ARCH)


@both
@pytest.mark.parametrize(
    ("chunks", "match"),
    [(32, "measured"), (64, "interpolated"), (29, "interpolated"), (16, "none"), (256, "none"), (None, "typical")],
    ids=str,
)
def test_a_record_answers_between_its_points_alone(chunks, match, op):
    save_user_records([records.record(op=op, rigor=Rigor.CONFIRMED)])
    dispatch = choose(None if chunks is None else sequence(chunks), op=op)
    assert dispatch.match == match
    tuned = match != "none"
    assert scan(dispatch) == (WIDE if tuned else DEFAULT)["state_scan"]
    assert dispatch.source == ("user" if tuned else "default")
    assert dispatch.rigor is (Rigor.CONFIRMED if tuned else Rigor.HEURISTIC)


@both
def test_steps_that_the_record_leaves_out_take_their_default(op):
    save_user_records([records.record(op=op)])
    request = choose(sequence(64), use_qk_l2norm_in_kernel=True, op=op).requests["l2norm"]
    assert request.config == request.template.default_config(request.problem, ARCH)


@both
def test_the_layers_are_asked_in_order_and_the_first_that_answers_wins(places, op):
    slower = (entry(DEFAULT, 100.0, 400.0), entry(NARROW, 80.0, 320.0, default=(100.0, 400.0)))
    save_directory(places / "shipped", [records.record(op=op)])
    assert (choose(sequence(64), op=op).source, scan(choose(sequence(64), op=op))) == ("shipped", WIDE["state_scan"])
    save_directory(places / "directory", [records.record(op=op, entries=slower)])
    assert (choose(sequence(64), op=op).source, scan(choose(sequence(64), op=op))) == ("directory", NARROW["state_scan"])
    # The user's record ends at 16 chunks, and has nothing to say of 64.
    save_user_records([records.record(op=op, points=one_sequence(8, 16))])
    assert [choose(sequence(chunks), op=op).source for chunks in (12, 64)] == ["user", "directory"]


@both
@pytest.mark.parametrize(
    "hardware",
    [Hardware(arch="sm_90a", sm_count=78, l2_bytes=60 << 20), Hardware(arch="sm_90a", sm_count=132, l2_bytes=50 << 20), None],
    ids=["78-SMs", "50-MiB-L2", "no-GPU"],
)
def test_another_gpu_gets_the_default(hardware, op):
    save_user_records([records.record(op=op)])
    assert choose(sequence(64), hardware=hardware, op=op).source == "default"


# What the times say


def test_the_fastest_at_the_size_of_the_call_wins():
    default = (100.0, 400.0, 1600.0)
    save_user_records([records.record(
        points=one_sequence(8, 32, 128),
        entries=(
            entry(DEFAULT, *default),
            entry(NARROW, 50.0, 380.0, 1580.0, default=default),
            entry(WIDE, 95.0, 300.0, 800.0, default=default),
        ),
    )])
    assert [scan(choose(sequence(chunks)))["block_v"] for chunks in (8, 32, 128)] == [32, 128, 128]


def test_entries_within_one_percent_of_each_other_take_the_order_of_the_record():
    default = (100.0, 400.0)
    first, second = entry(NARROW, 80.5, 322.0, default=default), entry(WIDE, 80.0, 320.0, default=default)
    for days, (order, block_v) in enumerate([((first, second), 32), ((second, first), 128)]):
        save_user_records([records.record(entries=(entry(DEFAULT, *default), *order), days=days)])
        assert scan(choose(sequence(64)))["block_v"] == block_v


@both
def test_an_entry_that_does_not_beat_the_default_with_its_interval_is_not_taken(op):
    default = (100.0, 400.0)
    unsure = entry(WIDE, 98.0, 392.0, default=default, spread=0.03)
    save_user_records([records.record(op=op, entries=(entry(DEFAULT, *default), unsure))])
    dispatch = choose(sequence(64), op=op)
    assert scan(dispatch) == DEFAULT["state_scan"]
    assert (dispatch.source, dispatch.match) == ("user", "interpolated")         # the record says so
    assert dispatch.expected_regret == pytest.approx(100 / 98 - 1, abs=1e-3)


def test_an_entry_that_was_not_timed_around_the_call_is_not_taken():
    default = (100.0, 400.0, 1600.0)
    partial = entry(WIDE, 50.0, 200.0, None, default=default)
    save_user_records([records.record(points=one_sequence(8, 32, 128), entries=(entry(DEFAULT, *default), partial))])
    assert [scan(choose(sequence(chunks)))["block_v"] for chunks in (16, 64)] == [128, 64]


def test_gate_profiles_count_alike():
    default = (100.0, 100.0)
    points = one_sequence(32, gates="open") + one_sequence(32, gates="closed")
    mixed = entry(NARROW, 50.0, 100.0, default=default)                          # 2.0 and 1.0: 1.41 on the whole
    even = entry(WIDE, 75.0, 75.0, default=default)                              # 1.33 twice
    save_user_records([records.record(points=points, entries=(entry(DEFAULT, *default), even, mixed))])
    dispatch = choose(sequence(32))
    assert scan(dispatch) == NARROW["state_scan"]
    assert dispatch.considered.chosen.speedup == pytest.approx(2**0.5, abs=1e-3)
    assert dispatch.expected_regret == pytest.approx((4 / 3) ** 0.5 - 1, abs=1e-3)


@both
def test_a_changed_version_is_told_and_changes_nothing(op):
    save_user_records([records.record(op=op)])
    stale = records.record(op=op).provenance.versions.model_copy(update={"tilelang": "0.0.1"})
    provenance = records.record(op=op, days=1).provenance.model_copy(update={"versions": stale})
    fresh = choose(sequence(64), op=op)
    save_user_records([records.record(op=op, provenance=provenance)])
    dispatch = choose(sequence(64), op=op)
    assert scan(dispatch) == scan(fresh)
    assert dispatch.stale == (f"tilelang 0.0.1 -> {Versions.here().tilelang}",)


# A record from another time


@both
@pytest.mark.parametrize(("then", "source"), [("chunked", "user"), ("retired", "default"), (None, "user")], ids=str)
def test_a_record_that_compares_with_another_default_says_nothing(then, source, op):
    """Of the second of its points: a call near the first gets what was found there."""
    default = entry(DEFAULT, 100.0, 400.0, 900.0)
    first, second, third = default.curve
    curve = first, second, third.model_copy(update={"strategy": then})
    wide = entry(WIDE, 80.0, 320.0, 800.0, default=(100.0, 400.0, 900.0))
    entries = (default.model_copy(update={"curve": curve}), wide)
    save_user_records([records.record(op=op, points=one_sequence(32, 128, 512), entries=entries)])
    assert [choose(sequence(chunks), op=op).source for chunks in (32, 64, 128, 256, 512)] == ["user"] * 3 + [source] * 2
    assert choose(op=op).source == source                # typical: of all of its points


@both
@pytest.mark.parametrize(
    ("configs", "why"),
    [
        ({"state_scan": {"block_v": 96, "threads": 128, "stages": 2}}, "96"),
        ({"state_scan": {"block_v": 128, "threads": 256}}, "other knobs"),
        ({"state_scan": {"block_v": 128, "threads": 256, "stages": 2, "depth": 1}}, "other knobs"),
        ({"state_scan": {"block_v": "128", "threads": 256, "stages": 2}}, "other knobs"),
        ({"state_scan": {"block_v": True, "threads": 256, "stages": 2}}, "other knobs"),
    ],
    ids=["constraint", "knob-missing", "knob-too-many", "text", "bool"],
)
def test_a_config_that_its_template_refuses_today_is_passed_over(configs, why, op):
    default = (100.0, 400.0)
    entries = (entry(DEFAULT, *default), entry(configs, 40.0, 160.0, default=default), entry(WIDE, 80.0, 320.0, default=default))
    save_user_records([records.record(op=op, entries=entries)])
    dispatch = choose(sequence(64), op=op)
    assert scan(dispatch) == WIDE["state_scan"]
    assert why in str(dispatch.considered.ways[1].rejection)


@both
def test_a_strategy_that_is_gone_is_passed_over(op):
    default = (100.0, 400.0)
    entries = (entry(DEFAULT, *default), entry(WIDE, 40.0, 160.0, default=default, strategy="retired"))
    save_user_records([records.record(op=op, entries=entries)])
    dispatch = choose(sequence(64), op=op)
    assert scan(dispatch) == DEFAULT["state_scan"]
    assert "strategy retired" in str(dispatch.considered.ways[1].rejection)


def test_a_step_that_is_gone_is_passed_over():
    default = (100.0, 400.0)
    renamed = {"old_scan": {"block_v": 32}}
    save_user_records([records.record(entries=(entry(DEFAULT, *default), entry(renamed, 40.0, 160.0, default=default)))])
    dispatch = choose(sequence(64))
    assert scan(dispatch) == DEFAULT["state_scan"]
    assert str(dispatch.considered.ways[1].rejection) == "chunked has no step old_scan today"


# Operations


def test_records_of_one_operation_say_nothing_of_the_other():
    save_user_records([records.record(op=BACKWARD)])
    assert [choose(sequence(64), op=op).source for op in (FORWARD, BACKWARD)] == ["default", "user"]


@pytest.mark.parametrize("changes", [{"chunk_size": 16}, {"output_final_state": False}, {"state_dtype": torch.bfloat16}], ids=str)
def test_gradients_of_calls_in_any_chunks_have_the_same_record(changes):
    save_user_records([records.record(op=BACKWARD)])
    dispatch = choose(sequence(64), op=BACKWARD, **changes)
    assert (dispatch.source, scan(dispatch)) == ("user", WIDE["state_scan"])
    assert dispatch.facts == facts(**changes)._replace(chunk_size=64)


def test_a_strategy_of_the_other_operation_serves_nothing():
    default = (100.0, 400.0)
    entries = (entry(DEFAULT, *default), entry({}, 40.0, 160.0, default=default, strategy="fused"))
    save_user_records([records.record(op=BACKWARD, entries=entries)])
    dispatch = choose(sequence(64), op=BACKWARD)
    assert scan(dispatch) == DEFAULT["state_scan"]
    assert str(dispatch.considered.ways[1].rejection) == "strategy fused does not serve this call; chunked would"


def test_forcing_one_operation_leaves_the_other_to_the_records():
    save_user_records([records.record(op=op) for op in (FORWARD, BACKWARD)])
    with select.override("chunked", split=4):
        assert scan(choose(sequence(64))) == DEFAULT["state_scan"]
        assert (scan(choose(sequence(64), op=BACKWARD)), choose(sequence(64), op=BACKWARD).split) == (WIDE["state_scan"], None)


# Splits


@pytest.fixture
def splitting(monkeypatch):
    """The strategy "chunked" as if it could split sequences into 16 or 32 chunks, 32 by default."""
    strategy = dataclasses.replace(plan.STRATEGIES["chunked"], splits=lambda facts, extents, sm_count: (32, 16, None))
    monkeypatch.setitem(plan.STRATEGIES, "chunked", strategy)
    default, rule = (100.0, 400.0), SplitRule(low=2.9, high=3.1, regret=0.0)
    split = entry(WIDE, 80.0, 320.0, default=default, split_rule=rule)
    return records.record(points=one_sequence(64, 1024), entries=(entry(DEFAULT, *default), split))


@pytest.mark.parametrize(
    ("chunks", "split"), [(96, 32), (512, 16), (1024, 32), (4096, 32), (None, None)], ids=str
)
def test_the_rule_of_the_record_splits_if_the_strategy_still_can(splitting, chunks, split):
    # sqrt(8 * chunks / 132) * 3 is 7.2, 16.7, 23.6; splits of 8 are not on offer, 4096 are outside: the strategy's default.
    save_user_records([splitting])
    assert choose(None if chunks is None else sequence(chunks)).split == split


@pytest.mark.parametrize(("timed", "split"), [((32, 32), 64), ((32, 16), 16)], ids=str)
def test_between_points_that_were_timed_with_its_own_splits_a_strategy_splits_by_itself(splitting, monkeypatch, timed, split):
    def splits(facts, extents, sm_count):
        return (64 if extents.chunks == 512 else 32, 16, None)

    monkeypatch.setitem(plan.STRATEGIES, "chunked", dataclasses.replace(plan.STRATEGIES["chunked"], splits=splits))
    default, wide = splitting.entries
    curve = tuple(of_point.model_copy(update={"split": L}) for of_point, L in zip(wide.curve, timed, strict=True))
    save_user_records([splitting.model_copy(update={"entries": (default, wide.model_copy(update={"curve": curve}))})])
    dispatch = choose(sequence(512))
    assert (scan(dispatch), dispatch.split) == (WIDE["state_scan"], split)           # the rule says 16


def test_a_call_that_forbids_splits_gets_neither_a_split_nor_what_was_timed_with_one(splitting):
    save_user_records([splitting])
    dispatch = choose(sequence(512), auto_cp=False)
    assert dispatch.split is None
    assert scan(dispatch) == DEFAULT["state_scan"]


# Overrides


def test_an_override_comes_before_every_record(splitting):
    save_user_records([splitting])
    config = state_scan.Config(**NARROW["state_scan"])
    with select.override(state_scan=config, split=None):
        dispatch = choose(sequence(512))
    assert (dispatch.source, dispatch.requests["state_scan"].config, dispatch.split) == ("override", config, None)
    assert choose(sequence(512)).source == "user"


def test_an_override_of_the_strategy_alone_takes_its_defaults():
    save_user_records([records.record()])
    with select.override("chunked"):
        dispatch = choose(sequence(64))
    assert (dispatch.source, scan(dispatch)) == ("override", DEFAULT["state_scan"])


def test_an_override_that_cannot_be_is_an_error_with_the_reason():
    config = state_scan.Config(block_v=96, threads=128, stages=2)
    with select.override(state_scan=config), pytest.raises(InvalidConfigError, match="96"):
        choose()
    with select.override("retired"), pytest.raises(InvalidConfigError, match="chunked would"):
        choose()


def test_each_part_of_an_override_makes_another_key():
    def in_force(*args, **kwargs):
        with select.override(*args, **kwargs):
            return select.override_in_force()

    config = state_scan.Config(**NARROW["state_scan"])
    made = {in_force(), in_force("chunked"), in_force(split=None), in_force(split=16), in_force(state_scan=config)}
    assert len(made) == 5


# What is told, and what is not


def test_one_line_a_process_and_operation_says_what_to_run(caplog):
    caplog.set_level(logging.INFO, logger="qla_jit")
    for chunks, op in ((64, FORWARD), (64, BACKWARD), (512, FORWARD), (512, BACKWARD)):
        choose(sequence(chunks), op=op)
    choose(sequence(64), HV=16)
    forward, backward = caplog.records
    assert forward.levelno == backward.levelno == logging.INFO
    assert forward.getMessage().endswith("qla-tune tune --heads 2:8 --dims 128:128 --lengths 4096")
    assert backward.getMessage().startswith("gdn_backward runs with default configs")
    assert backward.getMessage().endswith("qla-tune tune --heads 2:8 --dims 128:128 --backward --lengths 4096")


@pytest.mark.parametrize("hardware", [H200, None], ids=["tuned", "ahead-of-time"])
def test_nothing_is_told_where_nothing_is_missing(caplog, hardware):
    caplog.set_level(logging.INFO, logger="qla_jit")
    if hardware is not None:
        save_user_records([records.record()])
    choose(sequence(64), hardware=hardware)
    assert caplog.records == []


def test_the_command_names_what_is_not_usual():
    assert select.tune_command(facts(dtype=torch.float16, chunk_size=32, cu_seqlens_dtype=torch.int32)) == (
        "qla-tune tune --heads 2:8 --dims 128:128 --dtype float16 --chunk-size 32 --packed"
    )


def test_the_command_of_a_backward_has_lengths_and_no_chunks_of_the_forward():
    assert select.tune_command(facts(chunk_size=16), sequence(64), op=BACKWARD) == (
        "qla-tune tune --heads 2:8 --dims 128:128 --backward --lengths 4096"
    )


def test_a_corrupt_file_costs_a_warning_and_no_call(places, caplog):
    (places / "directory" / "gdn_forward.sm_90a.json").write_text("{")
    save_directory(places / "shipped", [records.record()])
    assert [choose(sequence(64)).source for _ in range(2)] == ["shipped"] * 2
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


# Buckets


def test_a_bucket_stands_for_sizes_within_an_eighth_of_it():
    for chunks in [*range(1, 300), 1000, 12345]:
        there = select.bucket(Extents(chunks=chunks, longest=chunks, sequences=1))
        assert abs(there.chunks - chunks) / chunks <= 1 / 8
        assert select.bucket(there) == there
        assert there.sequences == 1
    assert len({select.bucket(sequence(chunks)) for chunks in range(256, 512)}) == 5


@pytest.mark.parametrize("tokens", [1024 * count for count in (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 64)])
def test_lengths_that_people_choose_are_their_own_buckets(tokens):
    there = Extents(chunks=2 * tokens // 64, longest=tokens // 64, sequences=2)
    assert select.bucket(there) == there


def test_a_bucket_of_a_size_inside_is_not_outside():
    save_user_records([records.record(points=one_sequence(33, 471))])
    assert {choose(select.bucket(sequence(chunks))).source for chunks in range(33, 472)} == {"user"}


@pytest.mark.skipif(os.geteuid() == 0, reason="root can read everything")
def test_a_directory_that_cannot_be_read_is_passed_over(places):
    save_directory(places / "shipped", [records.record()])
    (places / "directory").chmod(0)
    assert choose(sequence(64)).source == "shipped"
