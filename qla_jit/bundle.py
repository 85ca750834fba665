"""Put the kernels of a deployment, and the records that choose among them, into a directory that others read through
QLA_JIT_BUNDLE_PATH.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import kernel_store, record_store
from .cache_dir import writable_cache_dir
from .compiler import CompileRequest
from .enumeration import Variants
from .errors import EnvironmentUnsuitable
from .models import ModelShape
from .ops.plan import BACKWARD, BACKWARD_CHUNK_SIZES, FORWARD
from .settings import settings
from .tune.build import compile_all
from .tune.worker import Failure
from .tuning_records import Hardware, Identity, Problem, Record, load, merge, save_directory


@dataclass(frozen=True)
class Built:
    """What was put into a bundle."""

    kernels: int
    bytes: int
    seconds: float                       # of wall time; kernels that were in the cache take next to none
    failures: tuple[str, ...]            # why the others are not there


def build(
    requests: Sequence[CompileRequest], directory: Path, *, on_kernel: Callable[[int, int], None] = lambda done, total: None
) -> Built:
    """Compile what no cache has, without a GPU, and copy all into the directory; what is there already and whole stays.

    Args:
        on_kernel: progress, as (kernels done, kernels in all).

    Raises:
        EnvironmentUnsuitable: there is no nvcc, no cache directory that can be written, the directory cannot be, or
            QLA_JIT_MODE is require.
    """
    started = time.monotonic()
    if settings().mode == "require":
        raise EnvironmentUnsuitable("a bundle is compiled, and QLA_JIT_MODE=require forbids it; unset it for this command")
    if writable_cache_dir() is None:
        raise EnvironmentUnsuitable(
            "kernels are compiled into the cache directory and copied from there, and none is writable; "
            "set QLA_JIT_CACHE_DIR to a directory of your own"
        )
    try:
        if not directory.is_dir():
            directory.mkdir(parents=True)
            directory.chmod(0o755)       # for those who read it, whatever the umask
    except OSError as error:
        raise EnvironmentUnsuitable(f"{directory} cannot be used for a bundle: {error.strerror}; name another one") from None
    failures: list[str] = []
    size = count = 0
    for outcome in compile_all(requests, on_kernel=on_kernel).values():
        if isinstance(outcome, Failure):
            failures.append(outcome.detail)
            continue
        try:
            entry = kernel_store.ship(outcome.directory, directory)
        except (OSError, ValueError) as error:
            raise EnvironmentUnsuitable(
                f"{outcome.name} cannot be copied from {outcome.directory} to {directory}: {error}"
            ) from error
        size += sum(file.stat().st_size for file in entry.iterdir())
        count += 1
    return Built(count, size, time.monotonic() - started, tuple(failures))


def records_of(shape: ModelShape, variants: Variants, gpus: Collection[Hardware]) -> list[Record]:
    """The tuned records that calls of a layer ask on these kinds of GPU; of each identity the one that is asked first.

    Raises:
        InputError: the value heads cannot share the key heads evenly.
    """
    asked = {(FORWARD, Problem.of(facts)) for facts in variants.calls(shape)}
    if variants.backward:
        asked |= {(BACKWARD, problem.model_copy(update={"chunk_size": C})) for _, problem in asked for C in BACKWARD_CHUNK_SIZES}
    found: dict[Identity, Record] = {}
    for stored in record_store.everything():
        if stored.record.hardware in gpus and (stored.record.op, stored.record.problem) in asked:
            found.setdefault(stored.record.identity, stored.record)
    return list(found.values())


def add_records(records: Sequence[Record], directory: Path) -> None:
    """Put records into a bundle, where those who read it ask them; they replace what is there of the same identity.

    Raises:
        RecordError: a record that is there is damaged.
        EnvironmentUnsuitable: the directory cannot be written.
    """
    if not records:
        return
    place = directory / "records"
    there = [record for path in sorted(place.glob("*.json")) for record in load(path)]
    try:
        files = save_directory(place, merge(records, there, prefer="ours"))
        for path, mode in ((place, 0o755), *((file, 0o644) for file in files)):
            path.chmod(mode)
    except OSError as error:
        raise EnvironmentUnsuitable(f"records cannot be written to {place}: {error.strerror}") from None
