"""Does a kernel come out right whatever the home directory, the clock, the neighbours and the cleaners of disks do?"""

import ctypes
import fcntl
import importlib.metadata
import itertools
import os
import platform
import pwd
import shutil
import stat
import sys
import threading
import time

import pytest
import torch
from faults import inject
from node import ask, assert_entries_are_whole, assert_nothing_is_in_staging, assert_served, right
from tiny_template import request

from qla_jit import cache_tools, kernel_cache, kernel_store
from qla_jit.node_locks import lock_file

# Who runs, and where at home is.


def nobody():
    """Let this process's user have no entry in the database of users, as in a container that runs under any number."""

    def unknown(*args):
        raise KeyError("getpwuid(): uid not found")

    pwd.getpwuid = pwd.getpwnam = unknown


def make_link(node):
    (node.root / "elsewhere").mkdir()
    (node.root / "home").symlink_to(node.root / "elsewhere")
    return str(node.root / "home")


def make_dangling_link(node):
    (node.root / "home").symlink_to(node.root / "gone")
    return str(node.root / "home")


# Where at home is, and whether a cache can be made there.
HOMES = {
    "directory": (lambda node: str(node.root / "new"), True),
    "link": (make_link, True),
    "dangling-link": (make_dangling_link, False),
    "not-a-directory": (lambda node: "/dev/null", False),
    "unwritable": (lambda node: "/proc/1", False),           # also for root
    "relative": (lambda node: "somewhere", False),
    "unset": (lambda node: None, False),
}


@pytest.mark.parametrize(("home", "is_used"), HOMES.values(), ids=HOMES)
@pytest.mark.parametrize("configured", [None, "~/cache"], ids=["", "in-home"])
def test_a_home_that_cannot_be_used_costs_a_warning(node, home, is_used, configured):
    node.environment |= {"HOME": home(node), "XDG_CACHE_HOME": None, "QLA_JIT_CACHE_DIR": configured}
    (node.root / "work").mkdir()

    def ask_as_nobody():
        nobody()
        os.chdir(node.root / "work")
        return ask()

    outcome = node.run(ask_as_nobody)
    if configured is not None and not os.path.isabs(node.environment["HOME"] or ""):
        assert outcome.error.startswith("EnvironmentUnsuitable: QLA_JIT_CACHE_DIR: expected an absolute path; got '~/cache'")
    else:
        assert_served(outcome, warnings=not is_used)
        assert len(outcome.warnings) == (not is_used)
        assert_served(node.run(ask_as_nobody), warnings=not is_used, compiles=0)
    assert list((node.root / "work").iterdir()) == []


STRANGER = 54_321                        # no user of any machine that runs the tests


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user, which only root can")
@pytest.mark.parametrize("umask", [0o022, 0o077], ids="{:03o}".format)
def test_a_user_without_a_name_a_home_or_a_place_to_write_is_served_from_roots_bundle(node, umask):
    """Permissions as the system checks them: nothing is replaced."""
    assert_served(node.run(lambda: ask(32, 64)), threads=(32, 64))
    bundle = node.root / "bundle"
    bundle.mkdir(mode=0o755)
    before = os.umask(umask)
    try:
        for entry in node.entries():
            kernel_store.ship(entry, bundle)
    finally:
        os.umask(before)
    shutil.rmtree(node.cache)
    for path in (bundle, *bundle.rglob("*")):
        path.chmod(path.stat().st_mode & ~0o222)
    for place in (node.root, *node.root.parents[:3]):        # pytest makes its directories for their owner alone
        place.chmod(0o755)
    node.environment |= {"QLA_JIT_BUNDLE_PATH": str(bundle), "QLA_JIT_MODE": "require", "HOME": None, "XDG_CACHE_HOME": None}

    def ask_as_a_stranger():
        os.setgroups([])
        os.setgid(STRANGER)
        os.setuid(STRANGER)
        return ask(32, 64)

    there = {path: path.stat().st_mtime_ns for path in node.root.rglob("*")}
    assert_served(node.run(ask_as_a_stranger), threads=(32, 64), compiles=0, warnings=1)
    assert {path: path.stat().st_mtime_ns for path in node.root.rglob("*")} == there


def make_read_only(*places):
    """For this process alone; False if it may not."""
    new_mounts, read_only, remount, bind, all_below, private = 0x20000, 1, 32, 4096, 16384, 1 << 18
    system, paths = ctypes.CDLL(None), [os.fsencode(place) for place in places]
    return (
        system.unshare(new_mounts) == 0
        and system.mount(None, b"/", None, private | all_below, None) == 0
        and all(
            system.mount(path, path, None, bind, None) == 0
            and system.mount(None, path, None, remount | bind | read_only, None) == 0
            for path in paths
        )
    )


@pytest.mark.parametrize("mode", ["require", "lookup"])
def test_a_file_system_that_is_mounted_read_only_serves_its_bundle(node, mode):
    """As a container with --read-only and nothing mounted into it: the system refuses, also root."""
    assert_served(node.run(lambda: ask(32, 64)), threads=(32, 64))
    (node.root / "bundle").mkdir(mode=0o755)
    (node.cache / "kernels").rename(node.root / "bundle" / "kernels")
    shutil.rmtree(node.cache)
    node.environment |= {"QLA_JIT_BUNDLE_PATH": str(node.root / "bundle"), "QLA_JIT_MODE": mode}

    def ask_read_only():
        if not make_read_only(node.root, "/tmp"):
            return None
        with pytest.raises(OSError, match="Read-only file system"):
            (node.root / "file").touch()
        return ask(32, 64)

    outcome = node.run(ask_read_only)
    if outcome.answer is None and outcome.error is None:
        pytest.skip("mounts a file system, which this user may not")
    assert_served(outcome, threads=(32, 64), compiles=0, warnings=1)
    assert "nothing new is cached on disk" in outcome.warnings[0]


# Directories that vanish.


def test_a_cache_that_is_removed_is_made_anew_by_the_next_kernel(node):
    def ask_around_a_removal():
        first = ask(32)
        shutil.rmtree(node.cache)
        return first + ask(32, 64)

    outcome = node.run(ask_around_a_removal)
    assert outcome.answer == right(32, 32, 64)
    assert outcome.warnings == []
    assert stat.S_IMODE(node.cache.stat().st_mode) == 0o700
    assert_served(node.run(ask), compiles=0)


def test_a_cache_that_others_can_write_to_by_now_gets_no_kernel(node):
    def ask_around_a_change():
        first = ask(32)
        node.cache.chmod(0o777)
        return first + ask(64)

    outcome = node.run(ask_around_a_change)
    assert_served(outcome, threads=(32, 64), warnings=1)
    assert "can be written by others" in outcome.warnings[0]
    assert not node.entry(64).exists()


def test_a_cache_may_be_removed_before_any_call_to_the_disk(new_node):
    for n in itertools.count(1):
        node = new_node()

        def ask_while_it_goes(node=node, n=n):
            faults = inject(lambda: shutil.rmtree(node.cache, ignore_errors=True), under=node.cache, first=n, last=n)
            return ask(), faults.hits

        outcome = node.run(ask_while_it_goes)
        assert outcome.error is None, outcome.error
        answer, hits = outcome.answer
        assert answer == right()
        assert len(outcome.warnings) <= 1, outcome.warnings
        assert_entries_are_whole(node)
        assert_nothing_is_in_staging(node)
        if not hits:
            assert n > 30, "publishing has more steps than that"
            return


def test_a_temporary_directory_that_is_removed_is_made_anew(node):
    def ask_around_a_removal():
        first = ask(32)
        shutil.rmtree(node.tmp)
        return first + ask(64)

    assert_served(node.run(ask_around_a_removal), threads=(32, 64), compiles=2)


def test_a_current_directory_that_is_removed_does_not_matter(node):
    (node.root / "work").mkdir()

    def ask_from_nowhere():
        os.chdir(node.root / "work")
        sys.path.insert(0, "")           # as in an interactive session
        (node.root / "work").rmdir()
        return ask()

    assert_served(node.run(ask_from_nowhere), compiles=1)


def test_a_lock_file_that_is_swept_away_costs_at_most_a_compilation(node):
    node.compiler_first("sleep 0.3")
    processes = [node.start(ask) for _ in range(4)]
    while node.compilations == 0:
        time.sleep(0.01)
    shutil.rmtree(node.tmp / f"qla_jit-{os.geteuid()}")
    for process in processes:
        assert_served(process.outcome())
    assert_entries_are_whole(node)


# Neighbours.


def ask_repeatedly(seconds):
    """The number of answers, all of which were right."""
    end, count = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        kernel_cache.clear_memory()
        assert ask(32, 64) == right(32, 64)
        count += 1
    return count


def remove_all(node):
    cache_tools.remove(cache_tools.cached_kernels(node.cache), node.cache)


def remove_roughly(node):
    for entry in node.entries():
        shutil.rmtree(entry, ignore_errors=True)


# A reader may find what `rm -r` has not removed yet, and warns of each of the two kernels once.
@pytest.mark.parametrize(("remove", "warnings"), [(remove_all, 0), (remove_roughly, 2)], ids=["qla-tune", "rm-r"])
def test_entries_may_be_removed_while_others_read_and_publish(node, remove, warnings):
    readers = [node.start(lambda: ask_repeatedly(2)) for _ in range(3)]
    end = time.monotonic() + 2
    while time.monotonic() < end:
        remove(node)
        time.sleep(0.02)
    outcomes = [reader.outcome() for reader in readers]
    for outcome in outcomes:
        assert outcome.error is None, outcome.error
        assert outcome.answer > 1
        assert len(outcome.warnings) <= warnings, outcome.warnings
    assert_served(node.run(lambda: ask(32, 64)), threads=(32, 64))
    assert_entries_are_whole(node)


def test_builders_may_fill_one_bundle_at_the_same_time(node):
    assert_served(node.run(lambda: ask(32, 64)), threads=(32, 64))
    entries = node.entries()

    def ship():
        for entry in entries:
            kernel_store.ship(entry, node.root / "bundle")

    (node.root / "bundle").mkdir(mode=0o755)
    for process in [node.start(ship) for _ in range(8)]:
        outcome = process.outcome()
        assert outcome.error is None, outcome.error
    shutil.rmtree(node.cache)
    node.environment |= {"QLA_JIT_BUNDLE_PATH": str(node.root / "bundle"), "QLA_JIT_MODE": "require"}
    assert_served(node.run(lambda: ask(32, 64)), threads=(32, 64), compiles=0)


def test_a_gc_that_takes_what_is_still_being_written_costs_at_most_a_warning(node, monkeypatch):
    monkeypatch.setattr(cache_tools, "STAGING_SECONDS", -3600.0)         # the clock was set forward in between
    writers = [node.start(lambda: [ask(n) for n in (32, 64, 128)]) for _ in range(2)]
    done = threading.Event()

    def sweep():
        while not done.is_set():
            cache_tools.gc(node.cache)

    sweeper = threading.Thread(target=sweep)
    sweeper.start()
    outcomes = [writer.outcome() for writer in writers]
    done.set()
    sweeper.join()
    for outcome in outcomes:
        assert outcome.error is None, outcome.error
        assert outcome.answer == [right(n) for n in (32, 64, 128)]
        assert len(outcome.warnings) <= 1
    assert_entries_are_whole(node)


def test_two_versions_share_a_directory_and_leave_each_others_kernels_alone(node):
    def ask_another_version():
        kernel_cache.ARTEFACT_FORMAT += 1
        return ask()

    for version, compiles in ((ask, 1), (ask_another_version, 1), (ask, 0), (ask_another_version, 0)):
        assert_served(node.run(version), compiles=compiles)
    assert len(node.entries()) == 2
    assert not (node.cache / "quarantine").exists()
    assert_entries_are_whole(node)


def test_neither_python_nor_torch_nor_the_gpu_that_is_here_decides_where_a_kernel_is(node):
    """The builder has another Python, another PyTorch and no GPU; another TileLang would be a miss."""
    assert_served(node.run(ask), compiles=1)
    installed = importlib.metadata.version

    def ask_with(**versions):
        importlib.metadata.version = lambda name: versions.get(name) or installed(name)
        platform.python_version, sys.version_info = (lambda: "3.99.0"), (3, 99, 0, "final", 0)
        torch.__version__, torch.version.cuda = "9.9.9+cu999", "99.9"
        torch.cuda.is_available, torch.cuda.device_count = (lambda: True), (lambda: 8)
        return ask()

    assert_served(node.run(lambda: ask_with(torch="9.9.9", pydantic="9.9.9")), compiles=0)
    assert_served(node.run(lambda: ask_with(tilelang="9.9.9")), compiles=1)


def test_a_kernel_whose_key_has_a_field_of_a_later_version_is_not_looked_at(node):
    assert_served(node.run(lambda: ask(32)), threads=(32,))
    later = node.entry(32).parents[1] / ("f" * 64) / "nvcc-13.0.88"
    shutil.copytree(node.entry(32), later)
    manifest = later / kernel_store.MANIFEST
    manifest.write_text(manifest.read_text().replace('"format":', '"cluster": 2, "format":'))
    node.environment["QLA_JIT_MODE"] = "require"
    assert_served(node.run(lambda: ask(32)), threads=(32,), compiles=0)
    outcome = node.run(lambda: ask(64))
    assert outcome.error.startswith("KernelNotCachedError")
    assert "config.threads (32 there, 64 wanted)" in outcome.error
    assert outcome.warnings == []
    assert later.exists()


# Time.


def run_backwards():
    """From now on the clock goes back by a day each time it is read."""
    days = itertools.count()
    time.time = lambda: 2e9 - 86_400 * next(days)
    time.time_ns = lambda: int(time.time() * 1e9)


def test_a_clock_that_goes_backwards_does_not_matter(node):
    node.environment["QLA_JIT_COMPILE_TIMEOUT"] = "1"

    def ask_backwards():
        run_backwards()
        with lock_file(kernel_cache.key_of(request(threads=64)).digest()).open("w") as other:
            fcntl.flock(other, fcntl.LOCK_EX)                # of a process that hangs
            return ask(32) + ask(64)

    started = time.monotonic()
    assert_served(node.run(ask_backwards), threads=(32, 64), compiles=2)
    assert time.monotonic() - started < 20


def test_entries_of_the_future_are_read_and_not_collected(node):
    node.fill()
    (node.cache / "staging" / "at-work").mkdir()
    for path in node.cache.rglob("*"):
        os.utime(path, (4e9, 4e9))
    assert cache_tools.gc(node.cache) == []
    assert_served(node.run(ask), compiles=0)
