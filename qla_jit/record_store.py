"""Where are tuned records kept, and in which order are they asked?

    user        diskcache in the cache directory, one entry an identity; written by qla-tune
    directory   the JSON files in the directories of QLA_JIT_DB_PATH, then those in `records/` of the bundles; only read
    shipped     the JSON files in qla_jit.tuning_db; only read

Trouble with a layer is never an error for a lookup: one warning, and the next layer answers.

diskcache unpickles what it finds in its database (CVE-2025-69872, unfixed, and JSONDisk does not close it), so it is given
a Disk of ours that knows text keys and JSON values only.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import diskcache
from diskcache.core import DBNAME, MODE_RAW

from . import tuning_db
from .cache_dir import bundle_dirs, refusal, writable_cache_dir
from .errors import RecordError
from .once import warn_once
from .settings import settings
from .tuning_records import Identity, Preference, Record, file_name, load, merge

Layer = Literal["user", "directory", "shipped"]
Result = TypeVar("Result")

BUSY_SECONDS = 10.0                      # how long another process may hold the database


@dataclass(frozen=True)
class Stored:
    """A record and the place that it was read from."""

    record: Record
    layer: Layer
    place: Path


def find(identity: Identity) -> Iterator[Stored]:
    """The records that answer for the identity, the layer that is asked first first."""
    record = _user_record(identity)
    if record is not None:
        yield Stored(record, "user", _user_directory())
    for layer, directory in _json_directories():
        path = directory / file_name(identity.op, identity.hardware.arch)
        for record in _records_of(path):
            if record.identity == identity:
                yield Stored(record, layer, path)


def everything() -> Iterator[Stored]:
    """All records of all layers, also those that a record in an earlier layer hides."""
    for record in user_records():
        yield Stored(record, "user", _user_directory())
    for layer, directory in _json_directories():
        for path in sorted(directory.glob("*.json")):
            for record in _records_of(path):
                yield Stored(record, layer, path)


# The user's records


class JsonDisk(diskcache.Disk):
    """Text keys and JSON bytes, inside the database. Everything else is refused, on the way in and on the way out."""

    def put(self, key: Any) -> tuple[str, bool]:
        if type(key) is not str:
            raise TypeError(f"a key must be text; got {type(key).__name__}")
        return key, True

    def get(self, key: Any, raw: Any) -> str | None:
        return key if raw and type(key) is str else None         # None and no error: the other keys are still wanted

    def store(self, value: Any, read: bool, key: Any = None) -> tuple[int, int, None, sqlite3.Binary]:
        if type(value) is not bytes:
            raise TypeError(f"a value must be bytes of JSON; got {type(value).__name__}")
        return len(value), MODE_RAW, None, sqlite3.Binary(value)

    def fetch(self, mode: int, filename: str | None, value: Any, read: bool) -> bytes:
        # Also no file: its name is in the database, and could lead anywhere.
        if mode != MODE_RAW or filename is not None or type(value) is not bytes:
            raise RecordError(f"expected JSON bytes in the database of records; got storage mode {mode}")
        return value

    def remove(self, file_path: str) -> None:
        """Nothing: no value is in a file of its own, and a planted name could be that of any file."""


def user_records() -> list[Record]:
    """Every record of the user's that can be read."""

    def read(cache: diskcache.Cache) -> list[Record]:
        return [record for key in cache if key is not None and (record := _read(cache, key)) is not None]

    return _with_user_cache(read, [])


def save_user_records(records: Iterable[Record], *, prefer: Preference = "rigor") -> list[Record]:
    """Keep records, all or none; what is kept then for their identities: what was there wins if it is preferred.

    Raises:
        RecordError: they cannot be kept.
    """
    _open.cache_clear()                  # what this process has open may have been removed since
    cache = _user_cache(create=True)
    if cache is None:
        raise RecordError("there is no directory to keep records in; set QLA_JIT_CACHE_DIR to a directory of your own")
    kept = []
    try:
        with cache.transact():
            for record in records:
                key = record.identity.key()
                there = _read(cache, key)
                kept += merge([] if there is None else [there], [record], prefer=prefer)
                cache.set(key, kept[-1].to_json().encode())
    except (OSError, sqlite3.Error, diskcache.Timeout) as error:
        raise RecordError(f"records cannot be kept in {_user_directory()}: {error}") from error
    return kept


def delete_user_records(identities: Iterable[Identity]) -> int:
    """Forget records; how many there were."""
    keys = [identity.key() for identity in identities]
    return _with_user_cache(lambda cache: sum(cache.delete(key) for key in keys), 0)


def drop_unreadable() -> None:
    """Remove what is in the user's database and is not a record."""

    def rewrite(cache: diskcache.Cache) -> None:
        with cache.transact():
            records = user_records()
            cache.clear()
            for record in records:
                cache.set(record.identity.key(), record.to_json().encode())

    _with_user_cache(rewrite, None)


def _user_record(identity: Identity) -> Record | None:
    return _with_user_cache(lambda cache: _read(cache, identity.key()), None)


def _read(cache: diskcache.Cache, key: str) -> Record | None:
    try:
        data = cache.get(key)
        if data is None:
            return None
        record = Record.from_json(data)
        if record.identity.key() != key:
            raise RecordError(f"the record is of {record.identity}, not of what it is filed under")
    except RecordError as error:
        warn_once(f"a tuned record in {_user_directory()} is left out: {error}. `qla-tune prune` removes it.")
        return None
    return record


def _with_user_cache(use: Callable[[diskcache.Cache], Result], otherwise: Result) -> Result:
    cache = _user_cache()
    if cache is None:
        return otherwise
    try:
        return use(cache)
    except (OSError, sqlite3.Error, diskcache.Timeout) as error:
        warn_once(f"the tuned records in {_user_directory()} cannot be used: {error}")
        return otherwise


def _user_directory() -> Path:
    cache = writable_cache_dir()
    assert cache is not None, "asked only when there is a cache of the user's"
    return cache / "records"


def _user_cache(*, create: bool = False) -> diskcache.Cache | None:
    if writable_cache_dir() is None:
        return None
    directory = _user_directory()
    return _open(directory) if create or os.path.exists(directory / DBNAME) else None


@functools.cache
def _open(directory: Path) -> diskcache.Cache | None:
    why = refusal(directory)
    if why is None:
        try:
            _wait_until_free(directory / DBNAME)
            return diskcache.Cache(
                str(directory),
                timeout=BUSY_SECONDS,
                disk=JsonDisk,
                eviction_policy="none",              # records are never thrown away to make room
                cull_limit=0,
                sqlite_journal_mode="delete",        # the write-ahead log needs shared memory, which network file systems lack
                sqlite_mmap_size=0,
            )
        except Exception as error:       # diskcache trusts what it finds in a damaged database, and stumbles in many ways
            why = str(error)
    warn_once(f"the tuned records in {directory} cannot be used: {why}")
    return None


def _wait_until_free(database: Path) -> None:
    """diskcache itself would wait for a minute, and that for each of the statements with which it opens a database.

    Raises:
        sqlite3.Error: another process holds it for longer, or it cannot be used.
    """
    with contextlib.closing(sqlite3.connect(database, timeout=BUSY_SECONDS, isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")


# JSON files


def _json_directories() -> list[tuple[Layer, Path]]:
    configured: list[tuple[Layer, Path]] = [("directory", path) for path in settings().db_path]
    for _, path in configured:
        if not os.path.isdir(path):
            warn_once(f"QLA_JIT_DB_PATH names {path}, which is not a directory that can be read")
    bundled: list[tuple[Layer, Path]] = [("directory", bundle / "records") for bundle in bundle_dirs()]
    return [*configured, *bundled, ("shipped", Path(tuning_db.__path__[0]))]


def _records_of(path: Path) -> tuple[Record, ...]:
    try:
        status = path.stat()
    except OSError:
        return ()
    return _load(path, status.st_mtime_ns, status.st_size)


@functools.lru_cache(maxsize=64)
def _load(path: Path, mtime_ns: int, size: int) -> tuple[Record, ...]:
    try:
        return tuple(load(path))
    except RecordError as error:
        warn_once(f"tuned records are left out: {error}")
        return ()
