"""Make one file of a bundle, its kernels and tuned records, and install such a file once everything in it has been checked.

A bundle file is a gzipped tar, which any tar can list:

    manifest.json     versions, and the size and SHA-256 of every file below
    manifest.sig      in a signed one: the 64 bytes of an ed25519 signature of manifest.json
    kernels/...       as in a cache (kernel_store.py)
    records/*.json    tuned records (tuning_records.py)

The same bundle gives the same bytes: members are in this order, each kind sorted, and have no time, owner or mode of their own.
Installing reads them in the same order, so that the signature is checked first and the manifest bounds what is read after it.
"""

from __future__ import annotations

import contextlib
import gzip
import importlib.metadata
import io
import os
import platform
import re
import shutil
import tarfile
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from . import kernel_cache, kernel_store
from .compiler import ARTEFACTS, tilelang_version
from .errors import BundleError, EnvironmentUnsuitable, RecordError
from .kernel_store import MANIFEST, FileStamp, KernelKey
from .signatures import SIGNATURE_BYTES, has_signed, public_key, sign
from .tuning_records import load

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

SIGNATURE = "manifest.sig"
MAX_MANIFEST_BYTES = 16 << 20            # some 30,000 kernels
MAX_FILE_BYTES = 256 << 20
MAX_BYTES = 8 << 30                      # of all files together
TAR_BYTES_PER_FILE = 2 * tarfile.BLOCKSIZE                   # a header, and the padding to a whole block
READ_AHEAD_BYTES = 4 * tarfile.RECORDSIZE

_FILES = "|".join(map(re.escape, (*ARTEFACTS, MANIFEST)))
KERNEL_FILE = re.compile(rf"kernels/[0-9a-f]{{2}}/[0-9a-f]{{64}}/nvcc-[0-9][0-9.]{{0,31}}/(?:{_FILES})", re.ASCII)
RECORD_FILE = re.compile(r"records/[A-Za-z0-9_][A-Za-z0-9_.]{0,126}\.json", re.ASCII)


class BundleManifest(BaseModel):
    """What a bundle file holds, and what it was made with."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    format: Literal[1]
    qla_jit: str
    torch: str
    tilelang: list[str]                  # this and the next three: of the kernels, usually one each
    nvcc: list[str]
    arch: list[str]
    machine: list[str]
    files: dict[str, FileStamp]

    @field_validator("files")
    @classmethod
    def _are_of_a_bundle(cls, files: dict[str, FileStamp]) -> dict[str, FileStamp]:
        for name, stamp in files.items():
            if KERNEL_FILE.fullmatch(name) is None and RECORD_FILE.fullmatch(name) is None:
                raise ValueError(f"{name!r} is no place for a kernel or a record")
            if not 0 <= stamp.size <= MAX_FILE_BYTES:
                raise ValueError(f"{name} is of {stamp.size:,} bytes, and {MAX_FILE_BYTES:,} are allowed")
        if sum(stamp.size for stamp in files.values()) > MAX_BYTES:
            raise ValueError(f"the files have more than {MAX_BYTES:,} bytes together")
        return files

    @property
    def kernels(self) -> int:
        return sum(name.endswith(f"/{MANIFEST}") for name in self.files)

    @property
    def record_files(self) -> int:
        return sum(name.startswith("records/") for name in self.files)


@dataclass(frozen=True)
class Packed:
    """A bundle file that was made."""

    manifest: BundleManifest
    stamp: FileStamp
    signed: bool


@dataclass(frozen=True)
class Installed:
    """What a bundle file put in place."""

    manifest: BundleManifest
    usable: int                          # kernels that this version of qla_jit may ask for
    signed: bool                         # by one of the keys
    was_there: bool                      # whole, so that nothing was written


# Packing


def pack(directory: Path, out: Path, *, signing_key: Path | None = None) -> Packed:
    """Make a file of the kernels and records in a directory that bundle.build() made; other files are left out.

    Args:
        signing_key: a PEM file with an ed25519 private key that has no passphrase.

    Raises:
        BundleError: a kernel or a record is damaged, or there is no kernel.
        EnvironmentUnsuitable: the key or the package cryptography cannot be used, the directory cannot be read, or the file
            cannot be written.
    """
    contents, keys = _contents(directory)
    manifest = BundleManifest(
        format=1,
        qla_jit=importlib.metadata.version("qla_jit"),
        torch=importlib.metadata.version("torch"),
        tilelang=sorted({key.tilelang for key in keys}),
        nvcc=sorted({str(key.nvcc) for key in keys}),
        arch=sorted({key.arch for key in keys}),
        machine=sorted({key.machine for key in keys}),
        files={name: FileStamp.of(path.read_bytes()) for name, path in contents.items()},
    )
    text = manifest.model_dump_json(indent=1).encode()
    signature = None if signing_key is None else sign(text, signing_key)
    try:
        with tempfile.NamedTemporaryFile(dir=out.parent, prefix=f".{out.name}.", delete=False) as file:
            try:
                _write(file, text, signature, contents)
                file.flush()
                os.fsync(file.fileno())
                os.chmod(file.name, 0o644)
                os.replace(file.name, out)
            except BaseException:
                os.unlink(file.name)
                raise
        return Packed(manifest, FileStamp.of(out.read_bytes()), signature is not None)
    except OSError as error:
        raise EnvironmentUnsuitable(f"{out} cannot be written: {error.strerror}; name another file") from None


def _contents(directory: Path) -> tuple[dict[str, Path], list[KernelKey]]:
    """The files of a bundle by their names in the tar, sorted, and the keys of its kernels."""
    keys, files = [], []
    try:
        entries = kernel_store.entries_in(directory)
    except OSError as error:
        raise EnvironmentUnsuitable(
            f"{error.filename} cannot be listed: {error.strerror}; pack the bundle as the user who built it"
        ) from None
    for entry in entries:
        try:
            keys.append(kernel_store.verified(entry).key)
        except (OSError, ValueError) as error:
            raise BundleError(f"a kernel is damaged: {error}; it is in {entry}; build the bundle again") from None
        files += [entry / name for name in (*ARTEFACTS, MANIFEST)]
    if not keys:
        raise BundleError(f"expected kernels in {directory / 'kernels'}; there are none; qla-tune build makes them")
    for path in directory.glob("records/*.json"):
        try:
            load(path)
        except RecordError as error:
            raise BundleError(f"a record is damaged: {error}; build the bundle again") from None
        files.append(path)
    names = {path.relative_to(directory).as_posix(): path for path in files}
    return dict(sorted(names.items())), keys


def _write(file: IO[bytes], manifest: bytes, signature: bytes | None, contents: dict[str, Path]) -> None:
    with (
        gzip.GzipFile(filename="", mode="wb", compresslevel=9, fileobj=file, mtime=0) as compressed,
        tarfile.open(fileobj=compressed, mode="w", format=tarfile.USTAR_FORMAT) as tar,
    ):
        _add(tar, MANIFEST, manifest)
        if signature is not None:
            _add(tar, SIGNATURE, signature)
        for name, path in contents.items():
            _add(tar, name, path.read_bytes())


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)       # mode 0644, time 0, uid and gid 0
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))


# Installing


def install(file: Path, directory: Path, *, public_keys: Sequence[Path] = (), allow_unsigned: bool = False) -> Installed:
    """Put the content of a bundle file into a new directory, all of it or nothing, to be named by QLA_JIT_BUNDLE_PATH.

    Args:
        directory: is made. If it is there it must be empty, or hold this very bundle, whole.
        public_keys: PEM files of ed25519 public keys; where there are any, one of them must have signed the bundle.
        allow_unsigned: take a bundle that no key vouches for. It is native code, which servers will run.

    Raises:
        BundleError: the bundle is damaged, not trusted or for another system, or something else is in the directory.
        EnvironmentUnsuitable: a key or the package cryptography cannot be used, or a file cannot be read or written.
    """
    keys = [public_key(path) for path in public_keys]
    directory = directory.absolute()
    try:
        with file.open("rb") as opened:
            return _install(_Members(opened), directory, keys, allow_unsigned=allow_unsigned)
    except BundleError as error:
        raise BundleError(f"{file} is not installed: {error}") from None
    except (tarfile.TarError, zlib.error, EOFError, gzip.BadGzipFile) as error:
        raise BundleError(f"{file} is not installed: it is damaged, or no bundle: {error}") from None
    except OSError as error:
        place = error.filename or directory
        raise EnvironmentUnsuitable(f"{file} cannot be installed: {place}: {error.strerror}") from None


class _Members:
    """Reads a bundle's tar from front to end; no more of it than was promised."""

    def __init__(self, file: IO[bytes]) -> None:
        self._bytes = _Bounded(gzip.GzipFile(fileobj=file), MAX_MANIFEST_BYTES + READ_AHEAD_BYTES)
        self._tar = tarfile.open(fileobj=self._bytes, mode="r|")         # noqa: SIM115  holds nothing that install() does not close
        self._next = self._tar.next()

    def expect(self, files: int, size: int) -> None:
        """Allow so many files, of so many bytes together, to be read."""
        self._bytes.left += size + files * TAR_BYTES_PER_FILE

    def has(self, name: str) -> bool:
        return self._next is not None and self._next.name == name

    def at_end(self) -> bool:
        return self._next is None

    def read(self, name: str, most: int) -> bytes:
        """The next member, which must be a plain file of this name."""
        member = self._next
        if member is None or member.name != name or not member.isreg():
            found = "nothing" if member is None else f"{member.name!r}" + ("" if member.isreg() else ", which is no plain file")
            raise BundleError(f"expected {name} next; got {found}")
        if member.size > most:
            raise BundleError(f"expected {name} of at most {most:,} bytes; got {member.size:,}")
        content = self._tar.extractfile(member)
        assert content is not None, "a plain file has content"
        data = content.read()
        self._next = self._tar.next()
        return data


class _Bounded:
    """A file that is read up to a limit, so that no header of a tar or gzip can ask for more memory or disk."""

    def __init__(self, file: IO[bytes], left: int) -> None:
        self.file, self.left = file, left

    def read(self, size: int) -> bytes:
        data = self.file.read(size)
        self.left -= len(data)
        if self.left < 0:
            raise BundleError("it holds more than its manifest says")
        return data


def _install(tar: _Members, directory: Path, keys: Sequence[Ed25519PublicKey], *, allow_unsigned: bool) -> Installed:
    text = tar.read(MANIFEST, MAX_MANIFEST_BYTES)
    signature = tar.read(SIGNATURE, SIGNATURE_BYTES) if tar.has(SIGNATURE) else None
    _check_trust(text, signature, keys, allow_unsigned=allow_unsigned)
    manifest = _parsed(text)
    if directory.is_dir() and any(directory.iterdir()):
        if not _holds(directory, text, manifest):
            raise BundleError(f"{directory} is not empty, and this bundle is not what it holds; name a new directory")
        return Installed(manifest, _usable(directory, manifest), signed=bool(keys), was_there=True)
    tar.expect(len(manifest.files), sum(stamp.size for stamp in manifest.files.values()))
    with _staging(directory) as staging:
        for name, stamp in sorted(manifest.files.items()):
            data = tar.read(name, stamp.size)
            if FileStamp.of(data) != stamp:
                raise BundleError(f"{name} is not the file that was packed")
            (staging / name).parent.mkdir(parents=True, exist_ok=True)
            kernel_store.write_durably(staging / name, data)
        if not tar.at_end():
            raise BundleError("it holds more than its manifest says")
        kernel_store.write_durably(staging / MANIFEST, text)
        usable = _usable(staging, manifest)
        _open_to_readers(staging, [*manifest.files, MANIFEST])
        staging.rename(directory)        # also over a directory that is there and empty
        kernel_store.sync_directory(directory.parent)
    return Installed(manifest, usable, signed=bool(keys), was_there=False)


def _check_trust(
    manifest: bytes, signature: bytes | None, keys: Sequence[Ed25519PublicKey], *, allow_unsigned: bool
) -> None:
    if not keys:
        if not allow_unsigned:
            why = "it is not signed" if signature is None else "there is no public key to check its signature with"
            raise BundleError(
                f"it is native code, and {why}; name a key (--public-key, QLA_JIT_BUNDLE_KEYS), or take it with --allow-unsigned"
            )
        return
    if signature is None:
        raise BundleError("it is not signed, and where public keys are given one of them must have signed it")
    if not any(has_signed(key, signature, manifest) for key in keys):
        raise BundleError("its signature is of none of the public keys")


def _parsed(manifest: bytes) -> BundleManifest:
    try:
        return BundleManifest.model_validate_json(manifest)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"])) or "the whole"
        raise BundleError(f"its {MANIFEST} does not match the schema: {first['msg']} at {place}") from None


def _holds(directory: Path, text: bytes, manifest: BundleManifest) -> bool:
    """Whether this very bundle is installed in a directory, whole, and nothing else."""
    try:
        there = {path.relative_to(directory).as_posix(): path.read_bytes() for path in directory.rglob("*") if not path.is_dir()}
    except OSError:
        return False
    return there.pop(MANIFEST, None) == text and {name: FileStamp.of(data) for name, data in there.items()} == manifest.files


def _usable(directory: Path, manifest: BundleManifest) -> int:
    """How many kernels this version of qla_jit may ask for.

    Raises:
        BundleError: none, or a kernel or a record is not what its place says.
    """
    try:
        keys = [kernel_store.verified(entry).key for entry in kernel_store.entries_in(directory)]
        for path in directory.glob("records/*.json"):
            load(path)
    except (OSError, ValueError, RecordError) as error:
        raise BundleError(f"what it holds does not fit together: {str(error).replace(f'{directory}/', '')}") from None
    usable = sum(map(kernel_cache.may_be_asked_for, keys))
    if not usable:
        made, here = ", ".join(manifest.tilelang), tilelang_version()
        raise BundleError(
            f"none of its {len(keys)} kernels would be used here: they are of qla_jit {manifest.qla_jit} and TileLang {made} on "
            f"{', '.join(manifest.machine)}, and here is qla_jit {importlib.metadata.version('qla_jit')} with its own templates "
            f"and TileLang {here} on {platform.machine()}; build it again with what will run it"
        )
    return usable


@contextlib.contextmanager
def _staging(directory: Path) -> Iterator[Path]:
    """A private directory beside one that is to be made; removed unless it was renamed."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _open_to_readers(staging: Path, names: Iterable[str]) -> None:
    """Nobody but the owner writes, and everybody reads, whatever the umask."""
    files = [staging / name for name in names]
    for file in files:
        file.chmod(0o644)
    for folder in {folder for file in files for folder in file.parents if folder.is_relative_to(staging)}:
        folder.chmod(0o755)
        kernel_store.sync_directory(folder)
