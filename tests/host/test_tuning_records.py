"""Do records keep what they are given, refuse what does not fit, and merge as is said?"""

import json
import pickle

import pytest
import records
import torch
from pydantic import ValidationError

from qla_jit import tuning_records
from qla_jit.errors import RecordError
from qla_jit.ops.plan import Extents
from qla_jit.tuning_records import (
    Hardware,
    Identity,
    Problem,
    Provenance,
    Reason,
    Record,
    Rigor,
    SplitRule,
    Versions,
    diff,
    dumps,
    load,
    loads,
    merge,
    save,
    save_directory,
)

OTHER_PROBLEM = records.record(problem=records.problem(H=16, HV=48))


# Identity

OTHER_VALUES = {
    "op": "gdn_backward", "arch": "sm_80", "sm_count": 78, "l2_bytes": 50 << 20,
    "H": 4, "HV": 16, "K": 64, "V": 256, "dtype": "float16", "chunk_size": 32, "varlen": True,
}


def test_the_fields_of_an_identity_are_these():
    assert set(OTHER_VALUES) == {"op", *Hardware.model_fields, *Problem.model_fields}


@pytest.mark.parametrize("field", OTHER_VALUES)
def test_each_field_of_an_identity_makes_another_key(field):
    hardware, problem, op = records.H200.model_dump(), records.problem().model_dump(), "gdn_forward"
    for part in (hardware, problem):
        if field in part:
            part[field] = OTHER_VALUES[field]
    other = Identity(
        op=OTHER_VALUES["op"] if field == "op" else op, hardware=Hardware(**hardware), problem=Problem(**problem)
    )
    assert other != records.record().identity
    assert other.key() != records.record().identity.key()


@pytest.mark.parametrize(
    "changes",
    [
        {"device": torch.device("cuda", 3)}, {"g_dtype": torch.bfloat16}, {"state_dtype": torch.float32},
        {"output_final_state": False}, {"state_v_first": True}, {"use_qk_l2norm_in_kernel": True}, {"auto_cp": False},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_changes_no_main_loop_keeps_the_problem(changes):
    assert records.problem(**changes) == records.problem()


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
def test_packed_sequences_are_another_problem_whatever_the_dtype_of_their_starts(index_dtype):
    assert records.problem(cu_seqlens_dtype=index_dtype) == Problem(
        H=2, HV=8, K=128, V=128, dtype="bfloat16", chunk_size=64, varlen=True
    )


def test_provenance_is_no_part_of_the_identity():
    other = records.record(days=9, rigor=Rigor.CONFIRMED, wide=(70.0, 300.0))
    assert other != records.record()
    assert other.identity == records.record().identity


def test_a_change_of_software_is_named_and_the_unknown_is_not_a_change():
    then = {
        "versions": Versions(tilelang="0.1.14", driver="570.1", cuda=None),
        "templates": {"l2norm": "a" * 64, "gone": "b" * 64},
    }
    provenance = records.record().provenance.model_copy(update=then)
    here = Versions(tilelang="0.1.15", driver="570.1", cuda="13.0", torch="2.13")
    assert provenance.differences(here, {"l2norm": "c" * 64}) == ("tilelang 0.1.14 -> 0.1.15", "template l2norm")
    assert provenance.differences(Versions(), {}) == ()


# What is refused


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda data: data.update(surprise=1), "Extra inputs"),
        (lambda data: data.update(schema_version=2), "schema_version"),
        (lambda data: data.update(rigor="certain"), "rigor"),
        (lambda data: data["problem"].update(H="2"), "problem.H"),
        (lambda data: data["problem"].update(H=True), "problem.H"),
        (lambda data: data["hardware"].update(sm_count=0), "hardware.sm_count"),
        (lambda data: data["entries"][0]["curve"][0].update(median_us=-1.0), "median_us"),
        (lambda data: data["entries"][0]["curve"].pop(), "2 times in entry 0"),
        (lambda data: data["entries"][1]["curve"][0].pop("speedup"), "entry 1 differs"),
        (lambda data: data["entries"][1]["curve"][0]["speedup"].update(low=9.0), "low <= value"),
        (lambda data: data["entries"][0]["curve"].__setitem__(0, None), "timed at every point"),
        (lambda data: data.update(points=[data["points"][0]] * 2), "each point once"),
        (lambda data: data.update(entries=[]), "entries"),
        (lambda data: data["provenance"].update(recorded="2026-01-01T00:00:00"), "recorded"),
    ],
    ids=[
        "unknown-field", "other-schema", "rigor", "text-for-number", "bool-for-number", "no-SMs", "negative-time", "short-curve",
        "no-speedup", "interval", "untimed-default", "point-twice", "no-entries", "naive-date",
    ],
)
def test_a_record_that_does_not_fit_is_refused_with_the_place(spoil, why):
    data = json.loads(records.record().to_json())
    spoil(data)
    with pytest.raises(RecordError, match=why):
        Record.from_json(json.dumps(data))


@pytest.mark.parametrize("value", ["NaN", "Infinity", "1e999"])
def test_a_time_must_be_a_number(value):
    text = records.record().to_json().replace("100.0", value)
    with pytest.raises(RecordError, match=r"median_us|Invalid JSON"):
        Record.from_json(text)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "\x00", '{"schema_version": 1}'], ids=repr)
def test_a_file_of_anything_else_is_refused(text):
    with pytest.raises(RecordError):
        loads(text)


def test_a_pickle_in_a_file_is_never_opened(tmp_path):
    path = tmp_path / "gdn_forward.sm_90a.json"
    path.write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(RecordError, match=r"gdn_forward\.sm_90a\.json"):
        load(path)


class Bomb:
    def __reduce__(self):
        return pytest.fail, ("a pickle was opened",)


def test_a_file_and_a_record_may_not_be_too_large(tmp_path, monkeypatch):
    path = tmp_path / "records.json"
    save(path, [records.record()])
    monkeypatch.setattr(tuning_records, "MAX_FILE_BYTES", path.stat().st_size - 1)
    with pytest.raises(RecordError, match="at most"):
        load(path)
    monkeypatch.setattr(tuning_records, "MAX_RECORD_BYTES", 10)
    with pytest.raises(RecordError, match="at most 10 B"):
        Record.from_json(records.record().to_json())


def test_two_records_of_one_identity_in_a_file_are_refused():
    with pytest.raises(RecordError, match="expected one record for gdn_forward 2:8"):
        loads(dumps([records.record(), records.record(days=1)]))


def test_a_record_cannot_be_changed():
    with pytest.raises(ValidationError, match="frozen"):
        records.record().rigor = Rigor.CONFIRMED


# Files


def test_a_file_gives_back_its_records_one_a_line_in_a_fixed_order(tmp_path):
    many = [OTHER_PROBLEM, records.record(negatives=(records.negative(),))]
    save(tmp_path / "a.json", many)
    save(tmp_path / "b.json", many[::-1])
    assert load(tmp_path / "a.json") == many[::-1]
    assert (tmp_path / "a.json").read_text() == (tmp_path / "b.json").read_text()
    lines = (tmp_path / "a.json").read_text().splitlines()
    assert [json.loads(line.rstrip(","))["problem"]["HV"] for line in lines[1:-1]] == [8, 48]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_knob_may_be_null():
    configs = {"state_scan": {"block_v": None}}
    made = records.record(entries=(records.entry(configs, 1.0, 2.0),))
    assert loads(dumps([made])) == [made]


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "records.json"
    save(path, [records.record()])
    monkeypatch.setattr(tuning_records.os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        save(path, [OTHER_PROBLEM])
    assert load(path) == [records.record()]
    assert [file.name for file in tmp_path.iterdir()] == ["records.json"]


def test_records_are_filed_by_operation_and_arch(tmp_path):
    other_arch = records.record(hardware=Hardware(arch="sm_80", sm_count=108, l2_bytes=40 << 20))
    save_directory(tmp_path / "db", [records.record(), other_arch, OTHER_PROBLEM])
    assert load(tmp_path / "db" / "gdn_forward.sm_90a.json") == [records.record(), OTHER_PROBLEM]
    assert load(tmp_path / "db" / "gdn_forward.sm_80.json") == [other_arch]


# Merge and diff


@pytest.mark.parametrize(
    ("prefer", "ours", "theirs", "winner"),
    [
        ("rigor", dict(rigor=Rigor.RACED, days=9), dict(rigor=Rigor.CONFIRMED), "theirs"),
        ("rigor", dict(rigor=Rigor.CONFIRMED), dict(rigor=Rigor.RACED, days=9), "ours"),
        ("rigor", dict(days=1), dict(days=2), "theirs"),
        ("newest", dict(rigor=Rigor.CONFIRMED), dict(rigor=Rigor.HEURISTIC, days=1), "theirs"),
        ("newest", dict(days=1), dict(days=1), "ours"),
        ("fastest", dict(wide=(80.0, 320.0)), dict(wide=(70.0, 320.0)), "theirs"),
        ("fastest", dict(wide=(80.0, 320.0)), dict(wide=(90.0, 320.0), days=1), "ours"),
        ("fastest", dict(), dict(wide=(1.0, 1.0), points=records.one_sequence(16, 64)), "ours"),
        ("ours", dict(), dict(rigor=Rigor.CONFIRMED, days=9, wide=(1.0, 1.0)), "ours"),
    ],
    ids=[
        "rigor-theirs", "rigor-ours", "rigor-equal-newer", "newest-theirs", "newest-equal", "fastest-theirs", "fastest-ours",
        "fastest-no-shared-point", "ours",
    ],
)
def test_the_preferred_record_wins(prefer, ours, theirs, winner):
    given = {"ours": records.record(**ours), "theirs": records.record(**theirs)}
    assert merge([given["ours"]], [given["theirs"]], prefer=prefer) == [given[winner]]


def test_a_merge_has_every_identity_of_both():
    assert merge([OTHER_PROBLEM], [records.record()]) == [records.record(), OTHER_PROBLEM]


def test_what_the_other_threw_out_stays_out_unless_it_was_timed():
    ours = records.record(negatives=(records.negative(records.NARROW), records.negative(records.WIDE, Reason.HANG)))
    (merged,) = merge([ours], [records.record(rigor=Rigor.CONFIRMED)])
    assert merged.rigor is Rigor.CONFIRMED
    assert merged.negatives == (records.negative(records.NARROW),)


def test_a_diff_names_what_is_new_gone_and_changed():
    new, gone = records.record(problem=records.problem(H=4, HV=16)), OTHER_PROBLEM
    found = diff([records.record(), gone], [records.record(rigor=Rigor.CONFIRMED, wide=(70.0, 320.0)), new])
    assert [(d.identity, d.kind, d.fields) for d in found] == [
        (records.record().identity, "changed", ("rigor: raced -> confirmed", "entries")),
        (new.identity, "added", ()),
        (gone.identity, "removed", ()),
    ]
    assert diff([gone], [gone]) == []


# AutoCP


@pytest.mark.parametrize(
    ("chunks", "sequences", "split"),
    [(512, 1, 16), (2048, 1, 32), (4, 1, 2), (512, 64, None), (1, 1, None)],
    ids=str,
)
def test_a_split_rule_gives_powers_of_two_and_leaves_short_sequences_whole(chunks, sequences, split):
    # 3 * sqrt(8 * 512 / 132) = 16.7, and with 2048 chunks twice that.
    rule = SplitRule(low=2.9, high=3.1, regret=0.02)
    extents = Extents(chunks=chunks, longest=chunks // sequences, sequences=sequences)
    assert rule.split(HV=8, extents=extents, sm_count=132) == split


def test_the_rank_of_rigor_is_as_drawn():
    assert sorted(Rigor, key=lambda rigor: rigor.rank) == [Rigor.HEURISTIC, Rigor.SCREENED, Rigor.RACED, Rigor.CONFIRMED]


def test_a_provenance_needs_a_date_with_a_time_zone():
    data = records.record().provenance.model_dump() | {"recorded": records.DAY.replace(tzinfo=None)}
    with pytest.raises(ValidationError, match="timezone"):
        Provenance(**data)
