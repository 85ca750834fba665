"""Keep compiled kernels on disk. A kernel is a directory of its artefacts with a manifest:

    <cache>/kernels/<2 hex>/<digest of the key without nvcc>/nvcc-<version>/     executable.so ... manifest.json
    <cache>/staging/       entries on their way in
    <cache>/quarantine/    entries that failed their manifest
    <cache>/logs/          logs of failed builds

The directories of QLA_JIT_BUNDLE_PATH have the same `kernels/`, are asked after the caches, and are only read.

nvcc belongs to the key, yet has a directory level of its own: a machine without nvcc looks for the rest of the key and
takes the newest nvcc that it finds. A machine with nvcc takes its own version only.

Trouble with the disk is never an error: it costs a warning and, at worst, a compilation in each process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import hashlib
import json
import logging
import os
import re
import shutil
import stat
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from .cache_dir import bundle_dirs, cache_dirs, refusal, twice, writable_cache_dir
from .compiler import ARTEFACTS
from .launch import LoadedKernel, load
from .once import first_time

MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 1 << 20

# What reading an entry raises if it is not what was stored. Another OSError is the disk's, and the entry may be whole.
DAMAGE = (FileNotFoundError, NotADirectoryError, IsADirectoryError, RuntimeError, ValueError)

logger = logging.getLogger("qla_jit")


class KernelKey(BaseModel):
    """Everything that decides a kernel's code, and nothing else: no paths, times, host names or environment."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: int
    template: str
    template_sha256: str
    problem: dict[str, bool | int | float | str | None]
    config: dict[str, bool | int | float | str | None]
    arch: str
    pass_configs: dict[str, Any]
    machine: str                         # "x86_64": the executable's host code; a home directory may be shared with aarch64
    tilelang: str
    nvcc: str | None                     # None: not installed here, any will do

    def digest(self) -> str:
        """SHA-256 over the key's canonical JSON."""
        return hashlib.sha256(json.dumps(self.model_dump(), sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    def without_nvcc(self) -> KernelKey:
        return self.model_copy(update={"nvcc": None})


class FileStamp(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    size: int
    sha256: str

    @classmethod
    def of(cls, data: bytes) -> FileStamp:
        return cls(size=len(data), sha256=hashlib.sha256(data).hexdigest())


class Manifest(BaseModel):
    """What an entry must contain."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    key: KernelKey
    files: dict[str, FileStamp]


def find(key: KernelKey) -> LoadedKernel | None:
    """Load the kernel from disk; None if no intact entry is there. A damaged one is moved to quarantine, or if it is in a
    bundle passed over. One that cannot be read stays where it is, for a day on which the disk answers."""
    for cache in cache_dirs():
        kernel = _first_intact(cache.path, key, damaged=functools.partial(_quarantine, cache.path))
        if kernel is not None:
            return kernel
    for bundle in bundle_dirs():
        kernel = _first_intact(bundle, key, damaged=_pass_over)
        if kernel is not None:
            return kernel
    return None


def store(build: Path, key: KernelKey) -> Path | None:
    """Copy a build into the cache, whole or not at all. The entry; None if it is not there or is not this build."""
    cache = writable_cache_dir()
    if cache is None:
        return None
    entry = _entry(cache, key)

    def publish() -> bool:
        if (why := refusal(cache)) is not None:              # since this process found it, it may be gone, or another one
            raise PermissionError(why)
        return _publish(contents, entry, cache)

    try:
        contents = {name: (build / name).read_bytes() for name in ARTEFACTS}
        manifest = Manifest(key=key, files={name: FileStamp.of(data) for name, data in contents.items()})
        contents[MANIFEST] = manifest.model_dump_json(indent=1).encode()
        return entry if twice(publish) else None
    except OSError as error:
        _warn_once(cache, f"compiled kernels cannot be kept in {cache}: {error}")
        return None


def ship(entry: Path, directory: Path) -> Path:
    """Copy an entry of a cache into a directory of the same layout, readable for everyone; the copy.

    Raises:
        OSError, ValueError: the entry is damaged, or the directory cannot be written.
    """
    key = manifest_of(entry).key
    _check(entry, key)
    copy = _entry(directory, key)
    if not _is_whole(copy, key):
        contents = {name: (entry / name).read_bytes() for name in (*ARTEFACTS, MANIFEST)}
        twice(lambda: _publish(contents, copy, directory))
        with contextlib.suppress(OSError):               # another process may still use it
            (directory / "staging").rmdir()
    # Also of a copy that was there: who made it may have been killed before it came to this.
    for file in copy.iterdir():
        _set_mode(file, 0o644)
    for place in (copy, *copy.parents[:3]):              # down to kernels/: nobody but the owner writes, whatever the umask
        _set_mode(place, 0o755)
    return copy


def entries_in(directory: Path) -> list[Path]:
    """Every entry of a cache or a bundle, whole or damaged.

    Raises:
        OSError: a part of it cannot be listed; Path.glob() would leave that out.
    """
    keys = (key for shard in _children(directory / "kernels") for key in _children(shard))
    return sorted(build for key in keys for build in _children(key) if build.name.startswith("nvcc-"))


def manifest_of(entry: Path) -> Manifest:
    """What an entry says that it is; its files are not looked at.

    Raises:
        OSError, ValueError: it has no manifest, or something else in its place.
    """
    return Manifest.model_validate_json(_read(entry / MANIFEST, at_most=MAX_MANIFEST_BYTES))


def verified(entry: Path) -> Manifest:
    """The manifest of an entry, once its files and its place have been found to be what it says.

    Raises:
        OSError, ValueError: the entry is damaged.
    """
    try:
        key = manifest_of(entry).key
    except ValidationError as error:
        raise ValueError(f"{MANIFEST} is none of an entry: {error.errors()[0]['msg']}") from None
    if entry != _entry(entry.parents[3], key):
        raise ValueError(f"{MANIFEST} is of another kernel than the directory's name")
    return _check(entry, key)


def keep_log(log: Path, key: KernelKey) -> Path | None:
    """Copy the log of a failed build to where the user can read it; None if there is no such place."""
    cache = writable_cache_dir()
    if cache is None:
        return None
    kept = cache / "logs" / f"{key.template}-{key.digest()[:16]}.log"
    try:
        kept.parent.mkdir(mode=0o700, exist_ok=True)
        shutil.copyfile(log, kept)
    except OSError:
        return None
    return kept


def nearest(key: KernelKey) -> tuple[Path, list[str]] | None:
    """The entry of the most similar kernel of the same template on disk, and in what it differs; None if there is none."""
    wanted = _flat(key.model_dump())
    candidates = []
    for entry, cached_key in _keys():
        if cached_key.template == key.template:
            cached = _flat((cached_key if key.nvcc is not None else cached_key.without_nvcc()).model_dump())
            differences = [
                f"{name} ({cached.get(name)!r} there, {wanted.get(name)!r} wanted)"
                for name in sorted(wanted.keys() | cached.keys())
                if wanted.get(name) != cached.get(name)
            ]
            candidates.append((entry, differences))
    return min(candidates, key=lambda candidate: len(candidate[1]), default=None)


def _publish(contents: dict[str, bytes], entry: Path, cache: Path) -> bool:
    """Make an entry of a cache, whole or not at all; False if another process made it first.

    Raises:
        OSError: it cannot be written.
    """
    (cache / "staging").mkdir(mode=0o700, exist_ok=True)
    staging = Path(tempfile.mkdtemp(dir=cache / "staging"))
    try:
        for name, data in contents.items():
            write_durably(staging / name, data)
        sync_directory(staging)
        entry.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            staging.rename(entry)
        except OSError as error:
            if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
                return False
            raise
        sync_directory(entry.parent)
        return True
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _entry(cache: Path, key: KernelKey) -> Path:
    return _builds(cache, key) / f"nvcc-{key.nvcc}"


def _entries(cache: Path, key: KernelKey) -> list[Path]:
    """Where the kernel may be, best first."""
    if key.nvcc is not None:
        return [_entry(cache, key)]
    builds = (build for build in _children(_builds(cache, key)) if build.name.startswith("nvcc-"))
    return sorted(builds, key=_version_numbers, reverse=True)


def _children(directory: Path) -> list[Path]:
    """None where something else stands in its place, or another process has removed it."""
    try:
        return [directory / name for name in twice(lambda: os.listdir(directory))]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _builds(cache: Path, key: KernelKey) -> Path:
    digest = key.without_nvcc().digest()
    return cache / "kernels" / digest[:2] / digest


def _version_numbers(entry: Path) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", entry.name)]


def _keys() -> Iterator[tuple[Path, KernelKey]]:
    for place in (*(cache.path for cache in cache_dirs()), *bundle_dirs()):
        with contextlib.suppress(OSError):               # a directory that cannot be listed
            for path in place.glob(f"kernels/*/*/*/{MANIFEST}"):
                with contextlib.suppress(OSError, ValueError):           # find() deals with damage
                    yield path.parent, manifest_of(path.parent).key


def _first_intact(place: Path, key: KernelKey, *, damaged: Callable[[Path, Exception], None]) -> LoadedKernel | None:
    """The kernel, from the best of its entries in a cache or bundle that is whole."""
    try:
        for entry in _entries(place, key):
            try:
                if (kernel := twice(lambda entry=entry: _load(entry, key))) is not None:
                    return kernel
            except DAMAGE as error:
                damaged(entry, error)
    except OSError as error:
        _warn_once(place, f"cached kernels cannot be read: {error}")
    return None


def _load(entry: Path, key: KernelKey) -> LoadedKernel | None:
    """The kernel of an entry; None if it is not there.

    Raises:
        DAMAGE: it is damaged, or made for another machine.
        OSError: it cannot be read.
    """
    try:
        entry.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    digest = _check(entry, key).key.digest()
    try:
        return load(entry, digest=digest)
    except RuntimeError:                 # a file system may forbid to run what is on it; another one may not
        with tempfile.TemporaryDirectory(prefix="qla_jit-load-", ignore_cleanup_errors=True) as copy:
            for name in ARTEFACTS:
                shutil.copyfile(entry / name, Path(copy, name))
            return dataclasses.replace(load(Path(copy), digest=digest), directory=entry)


def _check(entry: Path, key: KernelKey) -> Manifest:
    """The manifest of an entry, once every file has been found to be what it says.

    Raises:
        DAMAGE: the entry is damaged.
        OSError: it cannot be read.
    """
    manifest = manifest_of(entry)
    found = manifest.key if key.nvcc is not None else manifest.key.without_nvcc()
    if found != key:
        raise ValueError(f"{MANIFEST} is of another kernel")
    if set(manifest.files) != set(ARTEFACTS):
        raise ValueError(f"{MANIFEST} lists {sorted(manifest.files)}, expected {sorted(ARTEFACTS)}")
    for name, stamp in manifest.files.items():
        if FileStamp.of(_read(entry / name, at_most=stamp.size)) != stamp:
            raise ValueError(f"{name} is not the file that was stored")
    return manifest


def _is_whole(copy: Path, key: KernelKey) -> bool:
    """Whether a copy is there; a damaged one is removed."""
    if not copy.exists():
        return False
    try:
        _check(copy, key)
    except (OSError, ValueError):
        shutil.rmtree(copy)
        return False
    return True


def _set_mode(path: Path, mode: int) -> None:
    if stat.S_IMODE(path.stat().st_mode) != mode:        # so that what is right needs no right to change it
        path.chmod(mode)


def _read(path: Path, *, at_most: int) -> bytes:
    """The bytes of a file, cut off where it is larger than it may be. Does not wait for a pipe that stands in its place."""
    with open(path, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as file:
        return file.read(min(at_most, os.fstat(file.fileno()).st_size) + 1)


def _pass_over(entry: Path, error: Exception) -> None:
    _warn_once(entry, f"a prebuilt kernel is damaged and is passed over: {error}; it is in {entry}")


def _quarantine(cache: Path, entry: Path, error: Exception) -> None:
    place = cache / "quarantine" / f"{entry.parent.name[:16]}-{uuid.uuid4().hex[:8]}"
    try:
        place.parent.mkdir(mode=0o700, exist_ok=True)
        entry.rename(place)
    except FileNotFoundError:
        return                           # another process was faster
    except OSError:
        place = entry
    _warn_once(entry, f"a cached kernel is damaged and will be built again: {error}; it is now in {place}")


def write_durably(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Or not, where the file system cannot: the manifest shows what is missing after a crash."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _warn_once(about: Path, message: str) -> None:
    """One warning about an entry or a directory; what comes after it is for those who look closer."""
    logger.log(logging.WARNING if first_time("kernel_store", str(about)) else logging.INFO, message)


def _flat(fields: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in fields.items():
        flat.update(_flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value})
    return flat
