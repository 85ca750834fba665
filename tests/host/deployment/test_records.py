"""Do tuned records survive what happens to disks and processes, and does a lookup always get an answer?"""

import errno
import itertools
import os
import random
import resource
import shutil
import signal
import sqlite3
import time
from pathlib import Path

import pytest
import records
from faults import inject

from qla_jit import record_store, tuning_db, tuning_records
from qla_jit.record_store import find, save_user_records, user_records

RECORD = records.record()
OTHER = records.record(problem=records.problem(H=16, HV=48))
ERRORS = (errno.ESTALE, errno.EIO, errno.EACCES, errno.ENOLCK)


@pytest.fixture
def node(node, monkeypatch):
    """A machine on which records of the user's, of a directory and of the package answer, in this order."""
    for name in ("directory", "shipped"):
        (node.root / name).mkdir()
        tuning_records.save(node.root / name / "gdn_forward.sm_90a.json", [RECORD])
    monkeypatch.setattr(tuning_db, "__path__", [str(node.root / "shipped")])
    node.environment["QLA_JIT_DB_PATH"] = str(node.root / "directory")
    return node


def look():
    """Which layers answer."""
    found = list(find(RECORD.identity))
    assert all(stored.record.identity == RECORD.identity for stored in found)
    return [stored.layer for stored in found]


def keep(*kept):
    return len(save_user_records(kept))


def test_a_lookup_is_answered_whichever_call_to_the_disk_fails(node):
    assert node.run(lambda: keep(RECORD)).answer == 1
    directories, functions = ("cache", "directory"), ("listdir", "lstat", "mkdir", "open", "scandir", "stat")
    for (directory, function), error in zip(itertools.product(directories, functions), itertools.cycle(ERRORS), strict=False):

        def look_with_fault(directory=directory, function=function, error=error):
            inject(error, under=node.root / directory, functions=(function,))
            return look()

        outcome = node.run(look_with_fault)
        assert outcome.error is None, (function, error, outcome.error)
        assert outcome.answer[-1] == "shipped"
        assert len(outcome.warnings) <= 1, outcome.warnings
    assert node.run(look).answer == ["user", "directory", "shipped"]


def damaged_copies(database):
    """A database with a bit flipped, a page lost or its end cut off, at a hundred places."""
    whole = database.read_bytes()
    chance = random.Random(7)
    for number in range(100):
        data, place = bytearray(whole), chance.randrange(len(whole))
        if number % 3 == 0:
            data[place] ^= 1 << chance.randrange(8)
        elif number % 3 == 1:
            data[place : place + 512] = bytes(len(data[place : place + 512]))
        else:
            del data[place:]
        yield bytes(data)


def test_a_damaged_database_costs_at_most_a_warning(node):
    assert node.run(lambda: keep(RECORD, OTHER)).answer == 2
    database = node.cache / "records" / "cache.db"

    def look_at_each():
        for data in damaged_copies(database):
            record_store._open.cache_clear()                 # as a new process has it
            database.write_bytes(data)
            yield look()

    outcome = node.run(lambda: list(look_at_each()))
    assert outcome.error is None, outcome.error
    assert len(outcome.answer) == 100
    assert all(layers[-2:] == ["directory", "shipped"] for layers in outcome.answer)
    assert ["user", "directory", "shipped"] in outcome.answer
    assert len(outcome.warnings) <= outcome.answer.count(["directory", "shipped"])


def test_a_database_that_vanishes_under_a_running_process_is_made_anew(node):
    def keep_around_a_removal():
        keep(RECORD)
        shutil.rmtree(node.cache)
        layers = look()
        return layers, keep(OTHER), len(user_records())

    assert node.run(keep_around_a_removal).answer == [["directory", "shipped"], 1, 1]
    assert node.run(lambda: len(user_records())).answer == 1


def test_records_that_many_processes_keep_at_once_are_all_kept(node):
    kept = [records.record(problem=records.problem(H=2 * n, HV=2 * n)) for n in range(1, 9)]
    for process in [node.start(lambda record=record: keep(record)) for record in kept]:
        assert process.outcome().answer == 1
    assert node.run(lambda: len(user_records())).answer == len(kept)


def test_a_record_that_was_kept_outlives_a_kill(node):
    acknowledged = node.root / "acknowledged"

    def keep_newer_and_newer():
        with acknowledged.open("wb", buffering=0) as told:
            for days in range(1, 1_000):
                save_user_records([records.record(days=days)], prefer="newest")
                told.write(b".")                 # one a record: whenever the kill comes, they can be counted

    for milliseconds in (40, 55, 80, 120):
        acknowledged.write_bytes(b"")
        process = node.start(keep_newer_and_newer)
        time.sleep(milliseconds / 1000)
        os.kill(process.pid, signal.SIGKILL)
        assert process.outcome().signal == signal.SIGKILL
        days = node.run(lambda: [(r.provenance.recorded - records.DAY).days for r in user_records()])
        assert days.warnings == []
        assert max(days.answer, default=0) >= acknowledged.stat().st_size
        shutil.rmtree(node.cache, ignore_errors=True)


def test_a_full_disk_is_an_error_for_who_keeps_and_loses_nothing(node):
    assert node.run(lambda: keep(RECORD)).answer == 1

    def keep_without_room():
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, resource.RLIM_INFINITY))
        return keep(OTHER)

    assert node.run(keep_without_room).error.startswith("RecordError")
    assert node.run(lambda: len(user_records())).answer == 1
    assert node.run(lambda: keep(OTHER)).answer == 1


def test_a_database_that_another_process_holds_costs_a_warning(node, monkeypatch):
    assert node.run(lambda: keep(RECORD)).answer == 1
    monkeypatch.setattr(record_store, "BUSY_SECONDS", 0.1)
    with sqlite3.connect(node.cache / "records" / "cache.db", isolation_level=None) as other:
        other.execute("BEGIN EXCLUSIVE")
        outcome = node.run(look)
    assert outcome.answer == ["directory", "shipped"]
    assert len(outcome.warnings) == 1
    assert node.run(look).answer == ["user", "directory", "shipped"]


def test_a_forked_worker_and_its_parent_both_read_and_keep(node):
    def serve():
        keep(RECORD)
        worker = node.start(lambda: [look(), keep(OTHER)])
        return worker.outcome().answer, look(), len(user_records())

    layers = ["user", "directory", "shipped"]
    assert node.run(serve).answer == [[layers, 1], layers, 2]


def test_a_file_that_is_replaced_by_an_older_one_is_read_again(node):
    path: Path = node.root / "directory" / "gdn_forward.sm_90a.json"

    def look_around_a_change():
        before = look()
        tuning_records.save(path, [OTHER])
        os.utime(path, (1, 1))           # the clock went back
        return before, look()

    assert node.run(look_around_a_change).answer == [["directory", "shipped"], ["shipped"]]
