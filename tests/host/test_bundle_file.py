"""Is a bundle file the same for the same bundle, and is nothing of one installed that was not checked?"""

import builtins
import errno
import gzip
import io
import json
import os
import random
import shutil
import stat
import subprocess
import tarfile

import pytest
import records
from entries import KEY, put

from qla_jit import bundle_file, cache_dir, kernel_cache, kernel_store, record_store, signatures
from qla_jit.bundle_file import BundleManifest, install, pack
from qla_jit.errors import BundleError, EnvironmentUnsuitable
from qla_jit.tuning_records import save_directory


@pytest.fixture
def bundle(tmp_path):
    """Two kernels and a record."""
    directory = tmp_path / "bundle"
    put(directory)
    put(directory, config={"threads": 128})
    save_directory(directory / "records", [records.record()])
    return directory


@pytest.fixture
def packed(bundle, tmp_path):
    pack(bundle, tmp_path / "packed.tar.gz")
    return tmp_path / "packed.tar.gz"


@pytest.fixture
def target(tmp_path):
    (tmp_path / "server").mkdir()
    return tmp_path / "server" / "bundle"


def files_of(directory):
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def assert_nothing_is_there(target):
    assert list(target.parent.iterdir()) == []


# Packing


def test_the_same_bundle_gives_the_same_bytes_wherever_and_whenever_it_is_packed(bundle, packed, tmp_path):
    other = tmp_path / "elsewhere" / "copy"
    for path in sorted(bundle.rglob("*"), reverse=True):                 # another order of the directories' entries
        if path.is_file():
            copy = other / path.relative_to(bundle)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
            copy.chmod(0o600)
            os.utime(copy, (1, 1))
    (other / "staging").mkdir()
    (other / "README").write_text("not of the bundle")
    pack(other, tmp_path / "again.tgz")
    assert (tmp_path / "again.tgz").read_bytes() == packed.read_bytes()


def test_a_bundle_file_is_a_tar_that_others_can_read(bundle, packed, tmp_path):
    names = subprocess.run(["tar", "-tzf", packed], capture_output=True, text=True, check=True).stdout.splitlines()
    assert names == ["manifest.json", *sorted(files_of(bundle))]
    (tmp_path / "plain").mkdir()
    subprocess.run(["tar", "-xzf", packed, "-C", tmp_path / "plain"], check=True)
    assert files_of(tmp_path / "plain").items() > files_of(bundle).items()


def test_the_manifest_says_what_the_bundle_was_made_with(bundle, packed, tmp_path):
    put(bundle, arch="sm_80", nvcc="12.8.93")
    manifest = pack(bundle, tmp_path / "two.tgz").manifest
    assert (manifest.arch, manifest.nvcc) == (["sm_80", "sm_90a"], ["12.8.93", "13.0.88"])
    assert (manifest.tilelang, manifest.machine) == ([KEY.tilelang], [KEY.machine])
    assert (manifest.kernels, manifest.record_files) == (3, 1)
    assert {name: stamp.size for name, stamp in manifest.files.items()} == {n: len(d) for n, d in files_of(bundle).items()}


def test_a_damaged_kernel_or_record_is_not_packed_and_the_old_file_stays(bundle, packed):
    before = packed.read_bytes()
    entry = put(bundle, arch="sm_80")
    (entry / "executable.so").write_bytes(b"something else")
    with pytest.raises(BundleError, match=r"a kernel is damaged: executable.so is not the file that was stored; it is in "):
        pack(bundle, packed)
    shutil.rmtree(entry)
    (bundle / "records" / "gdn_forward.sm_80.json").write_text("{")
    with pytest.raises(BundleError, match=r"a record is damaged: .*gdn_forward.sm_80.json"):
        pack(bundle, packed)
    assert packed.read_bytes() == before
    assert [path.name for path in packed.parent.glob(".*")] == []


def test_a_directory_without_kernels_is_no_bundle(tmp_path):
    with pytest.raises(BundleError, match=r"expected kernels in .*; there are none; qla-tune build makes them"):
        pack(tmp_path, tmp_path / "out.tgz")


# Installing


def test_what_was_packed_is_installed_and_can_be_used_by_everyone(bundle, packed, target, monkeypatch):
    before = os.umask(0o077)
    try:
        done = install(packed, target, allow_unsigned=True)
    finally:
        os.umask(before)
    assert (done.usable, done.signed, done.was_there) == (2, False, False)
    found = files_of(target)
    BundleManifest.model_validate_json(found.pop("manifest.json"))
    assert found == files_of(bundle)
    modes = {(path.is_dir(), stat.S_IMODE(path.stat().st_mode)) for path in (target, *target.rglob("*"))}
    assert modes == {(True, 0o755), (False, 0o644)}
    assert list(target.parent.iterdir()) == [target]
    monkeypatch.setenv("QLA_JIT_BUNDLE_PATH", str(target))
    assert cache_dir.bundle_dirs() == (target,)
    for entry in kernel_store.entries_in(target):
        kernel_store.verified(entry)


def test_the_records_of_a_bundle_answer_after_those_of_the_db_path(bundle, tmp_path, monkeypatch):
    bundle.chmod(0o755)
    other = records.record(days=1)
    save_directory(tmp_path / "db", [other])
    monkeypatch.setenv("QLA_JIT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("QLA_JIT_BUNDLE_PATH", str(bundle))
    monkeypatch.delenv("QLA_JIT_DB_PATH", raising=False)
    assert [s.record for s in record_store.find(other.identity)][:1] == [records.record()]
    monkeypatch.setenv("QLA_JIT_DB_PATH", str(tmp_path / "db"))
    assert [s.record for s in record_store.find(other.identity)][:2] == [other, records.record()]


def test_installing_again_changes_nothing_and_mends_nothing(packed, target):
    install(packed, target, allow_unsigned=True)
    inode = target.stat().st_ino
    assert install(packed, target, allow_unsigned=True).was_there
    assert target.stat().st_ino == inode
    planted = put(target, arch="sm_80")
    with pytest.raises(BundleError, match="is not empty, and this bundle is not what it holds; name a new directory"):
        install(packed, target, allow_unsigned=True)
    shutil.rmtree(planted.parents[1])
    assert install(packed, target, allow_unsigned=True).was_there
    (entry, _) = kernel_store.entries_in(target)
    (entry / "device.cu").write_text("something else")
    with pytest.raises(BundleError, match="is not empty"):
        install(packed, target, allow_unsigned=True)


def test_another_bundle_does_not_go_over_an_installed_one_but_over_an_empty_directory(bundle, packed, target, tmp_path):
    target.mkdir()
    install(packed, target, allow_unsigned=True)
    before = files_of(target)
    put(bundle, arch="sm_80")
    pack(bundle, tmp_path / "other.tgz")
    with pytest.raises(BundleError, match="is not empty"):
        install(tmp_path / "other.tgz", target, allow_unsigned=True)
    assert files_of(target) == before


def test_native_code_that_nobody_vouches_for_needs_the_flag(packed, target):
    with pytest.raises(BundleError, match=r"is not installed: it is native code, and it is not signed; .*--allow-unsigned"):
        install(packed, target)
    assert_nothing_is_there(target)


def test_a_bundle_that_this_version_would_not_use_is_refused(tmp_path, target):
    other = ({"tilelang": "0.0.1"}, {"machine": "riscv64"}, {"template_sha256": "0" * 64}, {"format": 0})
    for number, changes in enumerate(other):
        put(tmp_path / str(number), **changes)
        pack(tmp_path / str(number), tmp_path / "old.tgz")
        with pytest.raises(BundleError, match=r"none of its 1 kernels would be used here: they are of qla_jit .* and TileLang "):
            install(tmp_path / "old.tgz", target, allow_unsigned=True)
    put(tmp_path / "0")
    pack(tmp_path / "0", tmp_path / "half.tgz")
    assert install(tmp_path / "half.tgz", target, allow_unsigned=True).usable == 1


# Hostile files


def members_of(file):
    with tarfile.open(file) as tar:
        return [(member, tar.extractfile(member).read()) for member in tar]


def write(file, members, *, format=tarfile.USTAR_FORMAT):
    with tarfile.open(file, "w:gz", format=format) as tar:
        for member, data in members:
            member.size = len(data) if member.isreg() else 0
            tar.addfile(member, io.BytesIO(data))


def with_manifest(edit):
    """Members whose manifest was edited, as by somebody who knows what is checked."""

    def change(members):
        manifest = json.loads(members[0][1])
        edit(manifest, members)
        members[0] = (members[0][0], json.dumps(manifest).encode())

    return change


def renamed(name):
    def edit(manifest, members):
        member, _ = members[-1]
        manifest["files"][name] = manifest["files"].pop(member.name)
        member.name = name

    return with_manifest(edit)


def retyped(kind, link):
    def change(members):
        members[-1][0].type, members[-1][0].linkname = kind, link

    return change


def bit_flipped(members):
    member, data = members[3]
    members[3] = (member, bytes([data[0] ^ 1]) + data[1:])


def entry_of_another_key(manifest, members):
    for member, _ in members[1:]:
        name = member.name.replace("nvcc-13.0.88", "nvcc-13.0.99")
        if name != member.name:
            manifest["files"][name] = manifest["files"].pop(member.name)
            member.name = name


HOSTILE = {
    "escapes-by-dots": (renamed("records/../../../escaped.json"), "is no place for a kernel or a record"),
    "absolute": (renamed("/tmp/escaped.json"), "is no place for a kernel or a record"),
    "hidden-file": (renamed("records/.bashrc.json"), "is no place for a kernel or a record"),
    "other-folder": (renamed("bin/sh"), "is no place for a kernel or a record"),
    "symlink": (retyped(tarfile.SYMTYPE, "/etc/passwd"), "got 'records/gdn_forward.sm_90a.json', which is no plain file"),
    "hard-link": (retyped(tarfile.LNKTYPE, "manifest.json"), "which is no plain file"),
    "device": (retyped(tarfile.CHRTYPE, ""), "which is no plain file"),
    "bit-flipped": (bit_flipped, "is not the file that was packed"),
    "longer-than-said": (lambda m: m.__setitem__(3, (m[3][0], m[3][1] + b"x")), "of at most"),
    "shorter-than-said": (lambda m: m.__setitem__(3, (m[3][0], m[3][1][:-1])), "is not the file that was packed"),
    "one-missing": (lambda m: m.pop(4), "next; got 'kernels/"),
    "last-missing": (lambda m: m.pop(), "expected records/gdn_forward.sm_90a.json next; got nothing"),
    "one-too-many": (lambda m: m.append((tarfile.TarInfo("more"), b"x")), "it holds more than its manifest says"),
    "one-twice": (lambda m: m.insert(3, m[3]), "next; got"),
    "manifest-missing": (lambda m: m.pop(0), "expected manifest.json next"),
    "manifest-not-first": (lambda m: m.append(m.pop(0)), "expected manifest.json next"),
    "manifest-is-no-json": (lambda m: m.__setitem__(0, (m[0][0], b"{")), "does not match the schema"),
    "manifest-with-more-fields": (with_manifest(lambda m, _: m.update(run="rm")), "Extra inputs are not permitted at run"),
    "manifest-of-tomorrow": (with_manifest(lambda m, _: m.update(format=2)), "does not match the schema: Input should be 1"),
    "negative-size": (with_manifest(lambda m, _: next(iter(m["files"].values())).update(size=-1)), "is of -1 bytes"),
    "terabyte-file": (with_manifest(lambda m, _: next(iter(m["files"].values())).update(size=1 << 40)), "are allowed"),
    "entry-of-another-key": (with_manifest(entry_of_another_key), "is of another kernel than the directory's name"),
}


@pytest.mark.parametrize(("change", "message"), HOSTILE.values(), ids=HOSTILE)
def test_a_file_that_is_not_what_pack_makes_leaves_no_trace(packed, target, tmp_path, change, message):
    members = members_of(packed)
    change(members)
    write(tmp_path / "bad.tgz", members)
    with pytest.raises(BundleError, match=r"bad.tgz is not installed: ") as raised:
        install(tmp_path / "bad.tgz", target, allow_unsigned=True)
    assert message in str(raised.value)
    assert_nothing_is_there(target)
    assert not list(tmp_path.rglob("escaped*"))


@pytest.mark.parametrize("kept", [0.0, 0.1, 0.5, 0.99], ids="{:.0%}".format)
def test_a_truncated_file_leaves_no_trace(packed, target, tmp_path, kept):
    data = packed.read_bytes()
    (tmp_path / "short.tgz").write_bytes(data[: int(len(data) * kept)])
    with pytest.raises(BundleError, match="it is damaged, or no bundle"):
        install(tmp_path / "short.tgz", target, allow_unsigned=True)
    assert_nothing_is_there(target)


# Headers, padding, contents, and the ends of the archive: each flip is found, or changes nothing that is installed.
@pytest.mark.parametrize("seed", range(4))
def test_flipped_bits_are_found_or_without_effect(bundle, packed, target, tmp_path, monkeypatch, seed):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)            # a hundred installations in a second
    generator = random.Random(seed)
    tar = bytearray(gzip.decompress(packed.read_bytes()))
    for _ in range(25):
        flipped = bytearray(tar)
        flipped[generator.randrange(len(tar))] ^= 1 << generator.randrange(8)
        (tmp_path / "flipped.tgz").write_bytes(gzip.compress(bytes(flipped), compresslevel=1))
        try:
            install(tmp_path / "flipped.tgz", target, allow_unsigned=True)
        except BundleError:
            assert_nothing_is_there(target)
            continue
        found = files_of(target)
        found.pop("manifest.json")
        assert found == files_of(bundle)
        shutil.rmtree(target)


def test_a_few_bytes_that_unpack_to_gigabytes_are_not_unpacked(packed, target, tmp_path, monkeypatch):
    monkeypatch.setattr(bundle_file, "MAX_MANIFEST_BYTES", 1 << 20)
    long_name = tarfile.TarInfo("manifest.json")
    long_name.pax_headers = {"comment": "x" * (8 << 20)}
    write(tmp_path / "pax.tgz", [(long_name, b"{}")], format=tarfile.PAX_FORMAT)
    with gzip.open(tmp_path / "zeros.tgz", "wb") as file:
        header = tarfile.TarInfo("manifest.json")
        header.size = 8 << 20
        file.write(header.tobuf(tarfile.USTAR_FORMAT) + bytes(8 << 20))
    for name, message in (("pax.tgz", "more than its manifest says"), ("zeros.tgz", "at most 1,048,576 bytes; got 8,388,608")):
        with pytest.raises(BundleError, match=message):
            install(tmp_path / name, target, allow_unsigned=True)
    assert_nothing_is_there(target)


def test_an_installation_that_is_interrupted_or_meets_a_full_disk_leaves_no_trace(packed, target, monkeypatch):
    write_durably = kernel_store.write_durably
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    for error, expected in ((KeyboardInterrupt(), KeyboardInterrupt), (full, EnvironmentUnsuitable)):
        left = [3]

        def fail_later(path, data, left=left, error=error):
            left[0] -= 1
            if left[0] == 0:
                raise error
            write_durably(path, data)

        monkeypatch.setattr(kernel_store, "write_durably", fail_later)
        with pytest.raises(expected):
            install(packed, target, allow_unsigned=True)
        assert_nothing_is_there(target)


def test_a_file_that_is_not_there_is_named(target, tmp_path):
    with pytest.raises(EnvironmentUnsuitable, match=r"missing.tgz: No such file or directory"):
        install(tmp_path / "missing.tgz", target, allow_unsigned=True)


# Signatures


def key_pair(directory, name):
    """The PEM files of a new private key and its public key, as openssl makes them."""
    from cryptography.hazmat.primitives import serialization as to
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    private, public = directory / f"{name}.pem", directory / f"{name}.pub.pem"
    private.write_bytes(key.private_bytes(to.Encoding.PEM, to.PrivateFormat.PKCS8, to.NoEncryption()))
    public.write_bytes(key.public_key().public_bytes(to.Encoding.PEM, to.PublicFormat.SubjectPublicKeyInfo))
    return private, public


@pytest.fixture
def keys(tmp_path):
    """Two of them."""
    pytest.importorskip("cryptography", reason="signatures need the optional package cryptography")
    return {name: key_pair(tmp_path, name) for name in ("ours", "theirs")}


@pytest.fixture
def signed(bundle, tmp_path, keys):
    assert pack(bundle, tmp_path / "signed.tgz", signing_key=keys["ours"][0]).signed
    return tmp_path / "signed.tgz"


def test_a_signature_of_any_of_the_keys_is_enough_and_no_flag_is_needed(bundle, signed, keys, target, tmp_path):
    assert install(signed, target, public_keys=[keys["theirs"][1], keys["ours"][1]]).signed
    assert BundleManifest.model_validate_json((target / "manifest.json").read_bytes())
    pack(bundle, tmp_path / "again.tgz", signing_key=keys["ours"][0])
    assert (tmp_path / "again.tgz").read_bytes() == signed.read_bytes()


def edited(members):
    manifest = json.loads(members[0][1])
    manifest["qla_jit"] = "9.9"
    members[0] = (members[0][0], json.dumps(manifest).encode())


@pytest.mark.parametrize(
    ("change", "trusted", "message"),
    [
        (None, "theirs", "its signature is of none of the public keys"),
        (None, None, "there is no public key to check its signature with"),
        (edited, "ours", "its signature is of none of the public keys"),
        (lambda m: m.__setitem__(1, (m[1][0], bytes(64))), "ours", "its signature is of none of the public keys"),
        (lambda m: m.__setitem__(1, (m[1][0], bytes(65))), "ours", "of at most 64 bytes; got 65"),
        (lambda members: members.pop(1), "ours", "it is not signed, and where public keys are given one of them must have"),
    ],
    ids=["other-key", "no-key", "edited-manifest", "zero-signature", "long-signature", "signature-removed"],
)
def test_a_signature_that_does_not_hold_is_refused_before_anything_else(signed, keys, target, tmp_path, change, trusted, message):
    members = members_of(signed)
    if change is not None:
        change(members)
    write(tmp_path / "bad.tgz", members)
    with pytest.raises(BundleError) as raised:
        install(tmp_path / "bad.tgz", target, public_keys=[] if trusted is None else [keys[trusted][1]])
    assert message in str(raised.value)
    assert_nothing_is_there(target)


def test_the_flag_does_not_overrule_the_keys(packed, signed, keys, target):
    for file in (packed, signed):
        with pytest.raises(BundleError):
            install(file, target, public_keys=[keys["theirs"][1]], allow_unsigned=True)


def test_files_that_are_no_such_keys_are_named(bundle, packed, keys, target, tmp_path):
    private, public = keys["ours"]
    (tmp_path / "text.pem").write_text("no key")
    with pytest.raises(EnvironmentUnsuitable, match=r"text.pem cannot be used to sign"):
        pack(bundle, tmp_path / "out.tgz", signing_key=tmp_path / "text.pem")
    with pytest.raises(EnvironmentUnsuitable, match=r"ours.pub.pem cannot be used to sign"):
        pack(bundle, tmp_path / "out.tgz", signing_key=public)
    with pytest.raises(EnvironmentUnsuitable, match=r"ours.pem cannot be used to check signatures"):
        install(packed, target, public_keys=[private])
    assert not (tmp_path / "out.tgz").exists()


def test_without_the_package_cryptography_the_message_says_how_to_get_it(bundle, packed, target, tmp_path, monkeypatch):
    monkeypatch.setattr(signatures.importlib.util, "find_spec", lambda name: None)
    imported = builtins.__import__
    monkeypatch.setattr(
        builtins, "__import__",
        lambda name, *rest: pytest.fail("it was imported") if name.startswith("cryptography") else imported(name, *rest),
    )
    for use in (
        lambda: pack(bundle, tmp_path / "out.tgz", signing_key=tmp_path / "key.pem"),
        lambda: install(packed, target, public_keys=[tmp_path / "key.pem"]),
    ):
        with pytest.raises(EnvironmentUnsuitable, match=r"pip install 'qla_jit\[sign\]'"):
            use()
    install(packed, target, allow_unsigned=True)


def test_kernels_of_this_version_are_recognised_by_their_keys_alone():
    assert kernel_cache.may_be_asked_for(KEY)
    assert kernel_cache.may_be_asked_for(KEY.model_copy(update={"nvcc": "99.1", "arch": "sm_80", "config": {}}))
    for changes in ({"format": 0}, {"template": "?"}, {"template_sha256": "0" * 64}, {"machine": "riscv64"}, {"tilelang": "0"}):
        assert not kernel_cache.may_be_asked_for(KEY.model_copy(update=changes)), changes
