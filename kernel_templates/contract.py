"""What a kernel template must say of itself, the budget checks that follow from it, and constraints that several declare."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .arch import Arch

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int32": 4, "int64": 8}


@dataclass(frozen=True)
class Rejection:
    """Why a config cannot serve a problem on an arch; the text carries the numbers."""

    reason: str

    def __str__(self) -> str:
        return self.reason


@dataclass(frozen=True)
class Buffer:
    """A shared-memory tile. The kernel allocates from this entry and the budget check sums it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    stages: int = 1                      # copies that the software pipeline keeps in flight

    @property
    def bytes(self) -> int:
        elements = self.stages
        for extent in self.shape:
            elements *= extent
        return elements * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class Role:
    """A group of threads that does one job."""

    name: str
    threads: int
    registers: int                       # registers per thread that the accumulators and operands need at least


def knob(*values: Any, why: str) -> Any:
    """A Config field with the values that the tuner may try and the reason why it matters. It has no default value:
    a template's default_config decides with the problem in hand."""
    return field(metadata={"values": values, "why": why})


@dataclass(frozen=True, eq=False)
class Template:
    """One kernel: its static problem, its knobs, what it needs of the chip, and how to build it.

    problem and config are frozen dataclasses of plain values (str, int, bool): together with the arch they are the
    compile key. build(problem, config) returns a TileLang prim_func and is the only part that imports TileLang.
    arguments(problem) names the kernel's parameters in launch order; one that the problem switches off is launched as None.
    """

    name: str
    problem: type
    config: type
    arches: tuple[str, ...]
    arguments: Callable[[Any], tuple[str, ...]]
    buffers: Callable[[Any, Any], tuple[Buffer, ...]]
    roles: Callable[[Any, Any], tuple[Role, ...]]
    default_config: Callable[[Any, Arch], Any]
    build: Callable[[Any, Any], Any]
    constraints: tuple[Callable[[Any, Any, Arch], Rejection | None], ...] = ()
    pass_configs: Mapping[str, Any] = field(default_factory=dict)

    def rejection(self, problem: Any, config: Any, arch: Arch) -> Rejection | None:
        """The first reason why this config cannot serve this problem on this arch, or None."""
        if arch.name not in self.arches:
            return Rejection(f"{self.name} is not written for {arch.name}; it is for {', '.join(self.arches)}")
        for constraint in (*self.constraints, self._fits_shared_memory, self._fits_registers, self._fits_threads):
            rejection = constraint(problem, config, arch)
            if rejection is not None:
                return rejection
        return None

    def configs(self, problem: Any, arch: Arch) -> Iterator[Any]:
        """Every config of the knob grid that the constraints allow."""
        fields = dataclasses.fields(self.config)
        for values in itertools.product(*(f.metadata["values"] for f in fields)):
            config = self.config(*values)
            if self.rejection(problem, config, arch) is None:
                yield config

    def first_allowed(self, problem: Any, arch: Arch, configs: Iterable[Any]) -> Any:
        """The first of some configs that the constraints allow; if they allow none, the last, whose rejection says why."""
        for config in configs:
            if self.rejection(problem, config, arch) is None:
                break
        return config

    def source_sha256(self) -> str:
        """Hash of the text that decides the generated code: the template's file and all that it imports from this package."""
        digest = hashlib.sha256()
        for path, text in sorted(_sources(Path(inspect.getfile(self.build))).items()):
            digest.update(path.name.encode() + b"\0" + text.encode() + b"\0")
        return digest.hexdigest()

    def _fits_shared_memory(self, problem: Any, config: Any, arch: Arch) -> Rejection | None:
        needed = sum(buffer.bytes for buffer in self.buffers(problem, config))
        if needed > arch.shared_bytes_per_block:
            return Rejection(f"needs {needed:,} B of shared memory; {arch.name} allows {arch.shared_bytes_per_block:,} B a block")
        return None

    def _fits_registers(self, problem: Any, config: Any, arch: Arch) -> Rejection | None:
        roles = self.roles(problem, config)
        for role in roles:
            if role.registers > arch.registers_per_thread:
                return Rejection(
                    f"role {role.name} needs {role.registers} registers a thread; {arch.name} allows {arch.registers_per_thread}"
                )
        needed = sum(role.threads * role.registers for role in roles)
        if needed > arch.registers_per_sm:
            return Rejection(f"needs {needed:,} registers a block; {arch.name} has {arch.registers_per_sm:,}")
        return None

    def _fits_threads(self, problem: Any, config: Any, arch: Arch) -> Rejection | None:
        threads = sum(role.threads for role in self.roles(problem, config))
        if threads > arch.threads_per_block:
            return Rejection(f"needs {threads} threads a block; {arch.name} allows {arch.threads_per_block}")
        return None


def block_divides_values(problem: Any, config: Any, arch: Arch) -> Rejection | None:
    if problem.V % config.block_v:
        return Rejection(f"block_v={config.block_v} does not divide V={problem.V}")
    return None


def warps_have_work(problem: Any, config: Any, arch: Arch) -> Rejection | None:
    tiles = problem.C * problem.C // 128                 # a warp multiplies 16 x 8 at least
    if config.threads // 32 > tiles:
        return Rejection(f"{config.threads // 32} warps share the {tiles} tiles of 16 x 8 of Q K^T")
    return None


def pipeline_has_bulk_copies(problem: Any, config: Any, arch: Arch) -> Rejection | None:
    if config.stages and not arch.has_bulk_copy:
        return Rejection(f"stages={config.stages} needs bulk copies, which {arch.name} lacks: its wait counts are not constants")
    return None


def stages_are_aligned(problem: Any, config: Any, arch: Arch) -> Rejection | None:
    if config.stages > 1 and problem.C * 4 % 128:
        return Rejection(f"stage 1 of the gates would begin at byte {problem.C * 4}; a bulk copy begins at multiples of 128")
    return None


_RELATIVE_IMPORT = re.compile(r"^from (\.{1,2})([\w.]+) import", re.MULTILINE)
_SAYS_BUT_DOES_NOT_GENERATE = ("arch.py", "contract.py")


def _sources(path: Path) -> dict[Path, str]:
    """The text of a template's file and of the modules beside it that it imports, directly or through one another."""
    found: dict[Path, str] = {}
    waiting = [path]
    while waiting:
        path = waiting.pop()
        if path in found or path.name in _SAYS_BUT_DOES_NOT_GENERATE:
            continue
        found[path] = path.read_text(encoding="utf-8")
        for dots, module in _RELATIVE_IMPORT.findall(found[path]):
            waiting.append(path.parents[len(dots) - 1].joinpath(*module.split(".")).with_suffix(".py"))
    return found
