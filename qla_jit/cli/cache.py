"""The verbs of qla-tune cache, which look after the kernels on disk: ls, du, verify, prune, gc."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from .. import cache_tools
from ..cache_dir import bundle_dirs, cache_dirs, writable_cache_dir
from ..cache_tools import CachedKernel, Removed
from ..errors import EnvironmentUnsuitable, InputError
from .command import ExitCode, app, verb
from .options import AsJson, parse_seconds
from .output import print_json, print_table

group = typer.Typer(no_args_is_help=True)
app.add_typer(group, name="cache", help="Look after the kernels on disk, while others use them.")
cache_verb = functools.partial(verb, group=group)

Read = Annotated[
    list[Path] | None, typer.Option("--dir", help="A cache or a bundle, instead of all that are in use; repeatable.")
]
Changed = Annotated[Path | None, typer.Option("--dir", help="A cache or a bundle, instead of the cache that is written to.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what would be removed.")]


@cache_verb
def ls(directories: Read = None, as_json: AsJson = False) -> ExitCode:
    """List the kernels in the caches and bundles."""
    rows = [
        {"directory": str(directory), **describe(kernel)}
        for directory in _read(directories)
        for kernel in cache_tools.cached_kernels(directory)
    ]
    if as_json:
        print_json(rows)
    else:
        columns = ("template", "arch", "nvcc", "problem", "config", "bytes", "age", "usable", "directory")
        print_table(columns, [tuple(row[column] for column in columns) for row in rows])
    return ExitCode.OK


@cache_verb
def du(directories: Read = None, as_json: AsJson = False) -> ExitCode:
    """Say what the caches and bundles take on disk."""
    rows = [
        {"directory": str(directory), "part": used.section, "files": used.files, "bytes": used.bytes}
        for directory in _read(directories)
        for used in cache_tools.usage(directory)
    ]
    if as_json:
        print_json(rows)
    else:
        print_table(("directory", "part", "files", "bytes"), [tuple(row.values()) for row in rows])
    return ExitCode.OK


@cache_verb
def verify(directories: Read = None, as_json: AsJson = False) -> ExitCode:
    """Compare every kernel in the caches and bundles with its sums; exits with 4 if one is damaged."""
    entries = [kernel.path for directory in _read(directories) for kernel in cache_tools.cached_kernels(directory)]
    damaged = [(entry, why) for entry in entries if (why := cache_tools.damage(entry)) is not None]
    if as_json:
        print_json({"kernels": len(entries), "damaged": [{"path": str(entry), "why": why} for entry, why in damaged]})
    else:
        for entry, why in damaged:
            typer.echo(f"damaged: {entry}: {why}")
        typer.echo(f"{len(entries) - len(damaged)} of {len(entries)} kernels are whole")
    return ExitCode.VERIFICATION if damaged else ExitCode.OK


@cache_verb
def prune(
    directory: Changed = None,
    older_than: Annotated[str | None, typer.Option("--older-than", help="Stored longer ago: 30d, 12h.")] = None,
    arch: Annotated[str | None, typer.Option("--arch", help="For this arch, as sm_90a.")] = None,
    template: Annotated[str | None, typer.Option("--template", help="Of this template, as state_scan.")] = None,
    unused: Annotated[
        bool, typer.Option("--unused", help="Which this version of qla_jit and TileLang will not ask for, or nobody can read.")
    ] = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> ExitCode:
    """Remove the kernels for which all of the options hold; processes that have loaded them keep them."""
    if older_than is arch is template is None and not unused:
        raise InputError("what to remove must be given, by --older-than, --arch, --template or --unused")
    seconds = 0.0 if older_than is None else parse_seconds(older_than)
    place = _changed(directory)
    doomed = [
        kernel
        for kernel in cache_tools.cached_kernels(place)
        if (older_than is None or kernel.age_seconds > seconds)
        and (arch is None or (kernel.key is not None and kernel.key.arch == arch))
        and (template is None or (kernel.key is not None and kernel.key.template == template))
        and not (unused and kernel.usable)
    ]
    would_go = [Removed(kernel.path, kernel.bytes) for kernel in doomed]
    return _told(would_go if dry_run else cache_tools.remove(doomed, place), dry_run, as_json)


@cache_verb
def gc(directory: Changed = None, dry_run: DryRun = False, as_json: AsJson = False) -> ExitCode:
    """Remove damaged kernels that were set aside, and what killed processes left."""
    place = _changed(directory)
    return _told(cache_tools.leftovers(place) if dry_run else cache_tools.gc(place), dry_run, as_json)


def describe(kernel: CachedKernel) -> dict[str, Any]:
    key = kernel.key
    return {
        "template": "unreadable" if key is None else key.template,
        "arch": "" if key is None else key.arch,
        "nvcc": "" if key is None else key.nvcc,
        "problem": "" if key is None else _fields(key.problem),
        "config": "" if key is None else _fields(key.config),
        "bytes": kernel.bytes,
        "age": _age(kernel.age_seconds),
        "age_seconds": round(kernel.age_seconds),
        "usable": "yes" if kernel.usable else "no",
        "path": str(kernel.path),
    }


def _fields(values: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in values.items())


def _age(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f}{unit}"
    return f"{max(seconds, 0):.0f}s"     # a clock may have been set back


def _told(removed: Sequence[Removed], dry_run: bool, as_json: bool) -> ExitCode:
    size = sum(one.bytes for one in removed)
    if as_json:
        print_json({"removed": [str(one.path) for one in removed], "bytes": size, "dry_run": dry_run})
    else:
        for one in removed:
            typer.echo(one.path)
        typer.echo(f"{len(removed)} {'would be removed' if dry_run else 'removed'}, {size:,} bytes")
    return ExitCode.OK


def _read(directories: Sequence[Path] | None) -> list[Path]:
    if directories:
        return [_existing(directory) for directory in directories]
    return [*(cache.path for cache in cache_dirs()), *bundle_dirs()]


def _changed(directory: Path | None) -> Path:
    if directory is not None:
        return _existing(directory)
    cache = writable_cache_dir()
    if cache is None:
        raise EnvironmentUnsuitable("there is no cache directory that can be written; name one with --dir")
    return cache


def _existing(directory: Path) -> Path:
    if not directory.is_dir():
        raise InputError(f"--dir must be a cache or a bundle; got {directory}, which is no directory")
    return directory.absolute()
