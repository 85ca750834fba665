"""Are records found in the right order, kept safely, and is nothing ever unpickled?"""

import logging
import os
import pickle
import sqlite3
import stat
import tempfile

import pytest
import records
from diskcache.core import MODE_BINARY, MODE_PICKLE, MODE_RAW, MODE_TEXT

from qla_jit import once, record_store, tuning_db, tuning_records
from qla_jit.errors import RecordError
from qla_jit.record_store import delete_user_records, drop_unreadable, everything, find, save_user_records, user_records
from qla_jit.tuning_records import Rigor

IDENTITY = records.record().identity
OTHER = records.record(problem=records.problem(H=16, HV=48))


@pytest.fixture(autouse=True)
def places(tmp_path, monkeypatch):
    """Each layer in a directory of its own; the user's is not made yet."""
    monkeypatch.setenv("QLA_JIT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("QLA_JIT_DB_PATH", f"{tmp_path / 'first'}{os.pathsep}{tmp_path / 'second'}")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(tuning_db, "__path__", [str(tmp_path / "shipped")])
    for name in ("first", "second", "shipped"):
        (tmp_path / name).mkdir()
    once._said.clear()
    yield tmp_path
    record_store._open.cache_clear()


def database(places):
    return sqlite3.connect(places / "cache" / "records" / "cache.db", isolation_level=None)


def file_of(places, layer):
    return places / layer / "gdn_forward.sm_90a.json"


class Bomb:
    """Ends the test when it is unpickled."""

    def __reduce__(self):
        return pytest.fail, ("a pickle was opened",)


def test_the_layers_answer_in_order(places):
    for days, layer in enumerate(("first", "second", "shipped")):
        tuning_records.save(file_of(places, layer), [records.record(days=days), OTHER])
    save_user_records([records.record(days=9)])
    found = list(find(IDENTITY))
    assert [(s.layer, s.place.name, s.place.parent.name) for s in found] == [
        ("user", "records", "cache"),
        ("directory", "gdn_forward.sm_90a.json", "first"),
        ("directory", "gdn_forward.sm_90a.json", "second"),
        ("shipped", "gdn_forward.sm_90a.json", "shipped"),
    ]
    assert [(s.record.provenance.recorded - records.DAY).days for s in found] == [9, 0, 1, 2]
    assert len(list(everything())) == 7


def test_a_file_that_changes_is_read_again(places):
    assert list(find(IDENTITY)) == []
    tuning_records.save(file_of(places, "first"), [records.record()])
    assert len(list(find(IDENTITY))) == 1


def test_looking_makes_no_database(places):
    assert list(find(IDENTITY)) == []
    assert not (places / "cache" / "records").exists()


# The user's records


def test_what_is_kept_is_there_in_another_process(places):
    save_user_records([records.record(), OTHER])
    record_store._open.cache_clear()             # as a new process has it
    assert sorted(user_records(), key=lambda r: r.problem.H) == [records.record(), OTHER]
    assert [s.record for s in find(OTHER.identity)] == [OTHER]
    assert stat.S_IMODE((places / "cache" / "records").stat().st_mode) == 0o700


def test_a_better_record_is_not_replaced_by_a_worse_one():
    save_user_records([records.record(rigor=Rigor.CONFIRMED)])
    (kept,) = save_user_records([records.record(rigor=Rigor.SCREENED, days=9)])
    assert kept.rigor is Rigor.CONFIRMED
    assert user_records() == [kept]
    (kept,) = save_user_records([records.record(rigor=Rigor.SCREENED, days=9)], prefer="newest")
    assert kept.rigor is Rigor.SCREENED
    assert user_records() == [kept]


def test_records_are_deleted_by_identity():
    save_user_records([records.record(), OTHER])
    assert delete_user_records([IDENTITY, IDENTITY]) == 1
    assert user_records() == [OTHER]


def test_all_or_none_are_kept(monkeypatch):
    class Unwritable(type(OTHER)):
        def to_json(self):
            raise OSError("disk full")

    with pytest.raises(RecordError, match="disk full"):
        save_user_records([records.record(), Unwritable(**dict(OTHER))])
    assert user_records() == []


def test_no_record_is_evicted():
    save_user_records([records.record()])
    cache = record_store._open(record_store._user_directory())
    assert (cache.eviction_policy, cache.cull_limit) == ("none", 0)


# Nothing is unpickled


@pytest.mark.parametrize(
    "mode", [MODE_RAW, MODE_BINARY, MODE_TEXT, MODE_PICKLE], ids=["raw", "binary", "text", "pickle"]
)
@pytest.mark.parametrize("in_file", [False, True], ids=["row", "file"])
def test_a_planted_value_is_not_opened_and_the_others_are_found(places, caplog, mode, in_file):
    save_user_records([records.record(), OTHER])
    (places / "cache" / "records" / "planted.val").write_bytes(pickle.dumps(Bomb()))
    with database(places) as connection:
        value, name = (None, "planted.val") if in_file else (pickle.dumps(Bomb()), None)
        connection.execute(
            "UPDATE Cache SET mode = ?, filename = ?, value = ? WHERE key = ?", (mode, name, value, IDENTITY.key())
        )
    assert list(find(IDENTITY)) == []
    assert user_records() == [OTHER]
    assert list(find(IDENTITY)) == []
    assert len(caplog.records) == 1
    assert "is left out" in caplog.text
    save_user_records([records.record()])
    assert [s.record for s in find(IDENTITY)] == [records.record()]


def test_a_planted_key_is_not_opened_and_the_others_are_found(places):
    save_user_records([records.record()])
    with database(places) as connection:
        for key in (pickle.dumps(Bomb()), b"bytes", 7):
            for raw in (0, 1):
                connection.execute(
                    "INSERT INTO Cache (key, raw, store_time, mode, value) VALUES (?, ?, 0, ?, ?)",
                    (key, raw, MODE_PICKLE, pickle.dumps(Bomb())),
                )
    assert user_records() == [records.record()]
    drop_unreadable()
    assert user_records() == [records.record()]
    with database(places) as connection:
        assert connection.execute("SELECT count(*) FROM Cache").fetchone() == (1,)


def test_a_planted_file_name_is_neither_read_nor_removed(places):
    precious = places / "precious"
    precious.write_text(records.record().to_json())
    save_user_records([records.record()])
    with database(places) as connection:
        connection.execute("UPDATE Cache SET mode = ?, filename = ?, value = NULL", (MODE_BINARY, str(precious)))
    assert list(find(IDENTITY)) == []
    save_user_records([records.record(days=1)])
    delete_user_records([IDENTITY])
    assert precious.exists()


def test_a_record_filed_under_another_key_is_left_out(places):
    save_user_records([OTHER])
    with database(places) as connection:
        connection.execute("UPDATE Cache SET key = ?", (IDENTITY.key(),))
    assert list(find(IDENTITY)) == []


def test_only_text_keys_and_json_bytes_go_in():
    save_user_records([OTHER])
    cache = record_store._open(record_store._user_directory())
    with pytest.raises(TypeError, match="tuple"):
        cache.set(("a", 1), b"{}")
    with pytest.raises(TypeError, match="dict"):
        cache.set("key", {})


# Trouble is a warning


def test_a_pickle_as_a_file_is_one_warning_and_the_next_layer_answers(places, caplog):
    file_of(places, "first").write_bytes(pickle.dumps(Bomb()))
    tuning_records.save(file_of(places, "shipped"), [records.record()])
    for _ in range(3):
        assert [s.layer for s in find(IDENTITY)] == ["shipped"]
    assert len(caplog.records) == 1
    assert str(file_of(places, "first")) in caplog.text


@pytest.mark.parametrize("damage", [b"not a database", b""], ids=["text", "empty"])
def test_a_damaged_database_is_one_warning_at_most(places, caplog, damage):
    save_user_records([records.record()])
    record_store._open.cache_clear()
    path = places / "cache" / "records" / "cache.db"
    path.write_bytes(damage)
    tuning_records.save(file_of(places, "shipped"), [records.record()])
    for _ in range(3):
        assert [s.layer for s in find(IDENTITY)] == ["shipped"]
    assert len(caplog.records) == (1 if damage else 0)           # an empty file is an empty database


def test_a_missing_directory_is_one_warning(places, caplog):
    (places / "second").rmdir()
    for _ in range(2):
        assert list(find(IDENTITY)) == []
    assert [r.levelno for r in caplog.records] == [logging.WARNING]
    assert str(places / "second") in caplog.text


def test_without_a_directory_of_the_users_the_files_answer(places, caplog):
    for name in ("cache", "home", f"qla_jit-{os.geteuid()}"):
        (places / name).write_text("in the way")
    tuning_records.save(file_of(places, "shipped"), [records.record()])
    assert [s.layer for s in find(IDENTITY)] == ["shipped"]
    with pytest.raises(RecordError, match="QLA_JIT_CACHE_DIR"):
        save_user_records([records.record()])


def test_a_database_that_others_can_write_to_is_not_opened(places, caplog):
    save_user_records([records.record()])
    record_store._open.cache_clear()
    (places / "cache" / "records").chmod(0o777)
    assert list(find(IDENTITY)) == []
    assert "can be written by others" in caplog.text
