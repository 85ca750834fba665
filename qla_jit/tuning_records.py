"""What is a tuned record, what decides that it fits, and how are records written to and read from JSON files?

A record answers for one Identity: an operation, a GPU and a problem. It holds a short list of ways to compute the
operation, each with its times on the same points; the first is the template default, which the others had to beat.

    identity     op, hardware, problem          must be equal
    provenance   versions, clocks, date, ...    a difference makes the record stale: usable, and first to be raced again

A file holds the records of one operation on one arch, sorted, one a line. Nothing here is ever unpickled.
"""

from __future__ import annotations

import enum
import importlib.metadata
import json
import math
import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, AwareDatetime, BaseModel, ConfigDict, Field, PositiveInt, ValidationError, model_validator

from .compiler import nvcc_version, tilelang_version
from .device import GpuInfo
from .errors import RecordError
from .ops.inputs import CallFacts
from .ops.plan import Extents

SCHEMA_VERSION = 1                       # raise it when a reader of the old schema would misread the new one
MAX_FILE_BYTES = 64 << 20
MAX_RECORD_BYTES = 4 << 20

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.+-]{0,63}$")]
Microseconds = Annotated[float, Field(gt=0), AfterValidator(lambda value: round(value, 3))]      # nanoseconds are noise
Factor = Annotated[float, Field(gt=0), AfterValidator(lambda value: round(value, 4))]
Count = Annotated[int, Field(ge=0)]


class Model(BaseModel):
    """Strict: unknown fields, infinities, and "1" for 1 are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Hardware(Model):
    """What a GPU must be for a record to fit. Not its name: MIG slices and renamed boards make it useless as a key."""

    arch: Name
    sm_count: PositiveInt
    l2_bytes: PositiveInt

    @classmethod
    def of(cls, gpu: GpuInfo) -> Hardware:
        return cls(arch=gpu.arch.name, sm_count=gpu.sm_count, l2_bytes=gpu.l2_bytes)


class Problem(Model):
    """What a call must be for a record to fit: the facts that shape the main kernels' loops.

    Left out, because they change the ends of a kernel or a small kernel of its own, and not which config wins: whether there
    are states, their dtype and layout; dtypes of gates, betas and cu_seqlens; what is computed in the kernel from logits;
    l2norm. Records are made on a call with states at both ends (workload.facts_of), whose kernels hold the code of the others.
    Of a backward that means: with gradients of the final and of the initial state; `chunk_size` is then that of the backward,
    one of plan.BACKWARD_CHUNK_SIZES, whatever the forward's is.
    `auto_cp=False` is honoured when a record is read: nothing that splits is taken.
    """

    H: PositiveInt
    HV: PositiveInt
    K: PositiveInt
    V: PositiveInt
    dtype: Literal["bfloat16", "float16"]
    chunk_size: PositiveInt
    varlen: bool

    @classmethod
    def of(cls, facts: CallFacts) -> Problem:
        return cls(
            H=facts.H, HV=facts.HV, K=facts.K, V=facts.V, dtype=str(facts.dtype).removeprefix("torch."),
            chunk_size=facts.chunk_size, varlen=facts.varlen,
        )


class Identity(Model):
    """What must be equal for a record to answer."""

    op: Name                             # plan.FORWARD or plan.BACKWARD
    hardware: Hardware
    problem: Problem

    def key(self) -> str:
        """Canonical JSON: the key in the user's records."""
        return json.dumps(self.model_dump(), sort_keys=True, separators=(",", ":"))

    def sort_key(self) -> tuple[Any, ...]:
        return (self.op, *self.hardware.model_dump().values(), *self.problem.model_dump().values())

    def __str__(self) -> str:
        p, h = self.problem, self.hardware
        packed = " packed" if p.varlen else ""
        return f"{self.op} {p.H}:{p.HV} {p.K}:{p.V} {p.dtype} C{p.chunk_size}{packed} on {h.arch} with {h.sm_count} SMs"


class Point(Model):
    """Run-time sizes at which candidates were timed, in chunks (plan.chunk_of_sizes), and the kind of gates: times depend on
    both."""

    chunks: PositiveInt                  # of all sequences together
    longest: PositiveInt                 # of the longest sequence
    sequences: PositiveInt
    gates: Name                          # a profile of the tuner ("mixed"), or "captured"

    @property
    def extents(self) -> Extents:
        return Extents(chunks=self.chunks, longest=self.longest, sequences=self.sequences)


class Ratio(Model):
    """Paired ratio of times, default / candidate, so above 1 is faster than the default; with its 95 % interval."""

    value: Factor
    low: Factor
    high: Factor

    @model_validator(mode="after")
    def _is_ordered(self) -> Ratio:
        if not self.low <= self.value <= self.high:
            raise ValueError(f"expected low <= value <= high; got {self.low}, {self.value}, {self.high}")
        return self


class Measurement(Model):
    """Times of one candidate at one point."""

    protocol: Name                       # how it was timed: an id that docs/tuning.md explains
    samples: PositiveInt
    median_us: Microseconds
    mad_us: Annotated[float, Field(ge=0), AfterValidator(lambda value: round(value, 3))]
    speedup: Ratio | None = None         # over the default; None for the default itself
    split: PositiveInt | None = None     # chunks per segment that were in force; None: whole sequences
    strategy: Name | None = None         # of the default alone: which it was there; None: not known
    sm_mhz: tuple[PositiveInt, PositiveInt] | None = None            # lowest and highest clock while it was timed
    dropped: Count = 0                   # samples left out because of throttling or times that drift
    throttled: bool = False
    contended: bool = False              # other processes were on the GPU


class OutputError(Model):
    """How far one output was from the oracle, and in relation to the reference template's own error."""

    rms: Annotated[float, Field(ge=0)]
    max: Annotated[float, Field(ge=0)]
    over_reference: Annotated[float, Field(ge=0)]                    # of the root mean squares


class Verdict(Model):
    """What a candidate passed before it was timed."""

    oracle: str = Field(max_length=200)  # "float64 recurrence"
    errors: dict[Name, OutputError]      # by output, the worst over all cases
    repeats: PositiveInt                 # launches on the same inputs that were equal bit by bit
    guards_intact: bool                  # bytes around the outputs, and no NaN left of the fill
    cases: tuple[Name, ...]              # inputs that it was checked on


class Rigor(str, enum.Enum):
    """How a record came about; a better one replaces a worse one and never the reverse."""

    HEURISTIC = "heuristic"
    SCREENED = "screened"
    RACED = "raced"
    CONFIRMED = "confirmed"

    @property
    def rank(self) -> int:
        return list(Rigor).index(self)


class Reason(str, enum.Enum):
    """Why a candidate was thrown out."""

    COMPILE = "compile"
    HANG = "hang"
    CRASH = "crash"
    WRONG = "wrong"
    RACY = "racy"
    OOM = "oom"
    TOO_FAST = "too_fast"                # beyond the roofline: work was skipped


class Candidate(Model):
    """A strategy of the record's operation with the knobs of each of its kernels, by step. Steps left out take their template's
    default."""

    strategy: Name
    configs: dict[Name, dict[Name, bool | int | float | str | None]]


class SplitRule(Model):
    """AutoCP: segments of 2**round(log2(constant * sqrt(HV * chunks / SMs))) chunks; any constant in between does the same.

    Where that is not less than the longest sequence, sequences stay whole.
    """

    low: Annotated[float, Field(gt=0)]
    high: Annotated[float, Field(gt=0)]
    regret: Annotated[float, Field(ge=0)]                            # worst time over the best split's time, less 1

    @model_validator(mode="after")
    def _is_ordered(self) -> SplitRule:
        if self.low > self.high:
            raise ValueError(f"expected low <= high; got {self.low}, {self.high}")
        return self

    def split(self, *, HV: int, extents: Extents, sm_count: int) -> int | None:
        """Chunks per segment; None: whole sequences."""
        constant = math.sqrt(self.low * self.high)
        chunks = 2 ** max(round(math.log2(constant * math.sqrt(HV * extents.chunks / sm_count))), 0)
        return chunks if chunks < extents.longest else None


class Entry(Model):
    """A candidate of the short list, with its times at the record's points, in their order; None: not timed there.

    The times are those with the split that the rule gives; the default's, entry 0, with the split that it takes by itself.
    """

    candidate: Candidate
    split_rule: SplitRule | None = None  # None: sequences stay whole
    verdict: Verdict | None = None
    curve: tuple[Measurement | None, ...]


class Versions(Model):
    """The software around a measurement; None: not known."""

    qla_jit: str | None = None
    tilelang: str | None = None
    cuda: str | None = None              # nvcc
    torch: str | None = None
    driver: str | None = None

    @classmethod
    def here(cls) -> Versions:
        """Of this process and machine. No GPU is asked."""
        return cls(
            qla_jit=importlib.metadata.version("qla_jit"),
            tilelang=tilelang_version(),
            cuda=nvcc_version(),
            torch=importlib.metadata.version("torch"),
            driver=_driver_version(),
        )


def _driver_version() -> str | None:
    try:
        return Path("/sys/module/nvidia/version").read_text().strip()
    except OSError:
        return None


class Negative(Model):
    """A candidate that must not be tried again with the same software."""

    candidate: Candidate
    split: PositiveInt | None = None
    reason: Reason
    detail: str = Field(max_length=2_000)
    versions: Versions


class Provenance(Model):
    """Where a record comes from. It never decides whether the record fits, only whether it is stale."""

    versions: Versions
    templates: dict[Name, Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]]      # source hash by template name
    gpu: str = Field(max_length=200)     # its marketing name, for people
    sm_mhz: PositiveInt | None = None    # highest clocks that the board allows
    memory_mhz: PositiveInt | None = None
    recorded: AwareDatetime
    command: str = Field(max_length=2_000)

    def differences(self, versions: Versions, templates: Mapping[str, str]) -> tuple[str, ...]:
        """In what the software here is not that of the record: "tilelang 0.1.14 -> 0.1.15"; empty: the record is fresh."""
        changed = [
            f"{name} {then} -> {now}"
            for name, now in versions.model_dump().items()
            if now is not None and (then := getattr(self.versions, name)) is not None and then != now
        ]
        changed += [f"template {name}" for name, sha in self.templates.items() if templates.get(name, sha) != sha]
        return tuple(changed)


class Record(Model):
    """What was found for one identity. entries[0] is the template default as it was then."""

    schema_version: Literal[1] = SCHEMA_VERSION
    op: Name
    hardware: Hardware
    problem: Problem
    rigor: Rigor
    points: tuple[Point, ...] = Field(min_length=1)
    entries: tuple[Entry, ...] = Field(min_length=1)
    negatives: tuple[Negative, ...] = ()
    provenance: Provenance

    @property
    def identity(self) -> Identity:
        return Identity(op=self.op, hardware=self.hardware, problem=self.problem)

    @model_validator(mode="after")
    def _fits_together(self) -> Record:
        if len(set(self.points)) < len(self.points):
            raise ValueError("expected each point once")
        for number, entry in enumerate(self.entries):
            if len(entry.curve) != len(self.points):
                raise ValueError(f"expected {len(self.points)} times in entry {number}, one a point; got {len(entry.curve)}")
            for measurement in entry.curve:
                if measurement is not None and (measurement.speedup is None) != (number == 0):
                    raise ValueError(f"expected a speedup in every entry but entry 0, the default; entry {number} differs")
        if None in self.entries[0].curve:
            raise ValueError("expected the default, entry 0, to be timed at every point")
        return self

    def to_json(self) -> str:
        """One line with sorted keys."""
        return json.dumps(self.model_dump(mode="json", exclude_none=True), sort_keys=True)

    @classmethod
    def from_json(cls, text: str | bytes) -> Record:
        """Read one record.

        Raises:
            RecordError: it is too large, not JSON, of another schema version, or does not match the schema.
        """
        if len(text) > MAX_RECORD_BYTES:
            raise RecordError(f"expected a record of at most {MAX_RECORD_BYTES:,} B; got {len(text):,} B")
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise RecordError(_told(error)) from None


# Files


def file_name(op: str, arch: str) -> str:
    return f"{op}.{arch}.json"


def dumps(records: Iterable[Record]) -> str:
    """The text of a file: valid JSON, sorted by identity, one record a line, so that a diff shows records."""
    lines = [record.to_json() for record in sorted(records, key=lambda record: record.identity.sort_key())]
    return f'{{"schema_version": {SCHEMA_VERSION}, "records": [\n' + ",\n".join(lines) + "\n]}\n"


class _File(Model):
    schema_version: Literal[1]
    records: tuple[Record, ...]


def loads(text: str | bytes) -> list[Record]:
    """The records of a file's text.

    Raises:
        RecordError: as from_json(), or two records answer for the same identity.
    """
    if len(text) > MAX_FILE_BYTES:
        raise RecordError(f"expected at most {MAX_FILE_BYTES:,} B; got {len(text):,} B")
    try:
        records = _File.model_validate_json(text).records
    except ValidationError as error:
        raise RecordError(_told(error)) from None
    seen: set[Identity] = set()
    for record in records:
        if record.identity in seen:
            raise RecordError(f"expected one record for {record.identity}; got two; merge them with qla-tune merge")
        seen.add(record.identity)
    return list(records)


def load(path: Path) -> list[Record]:
    """The records of a file.

    Raises:
        RecordError: the file cannot be read, or as loads(); the message names it.
    """
    try:
        with path.open("rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)                         # never more in memory than is allowed
        return loads(text)
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {error.strerror}") from None
    except RecordError as error:
        raise RecordError(f"{path}: {error}") from None


def save(path: Path, records: Iterable[Record]) -> None:
    """Write a file, whole or not at all."""
    text = dumps(records)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        try:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
            umask = os.umask(0)
            os.umask(umask)
            os.chmod(file.name, 0o666 & ~umask)                          # as open() would have made it
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def save_directory(directory: Path, records: Iterable[Record]) -> list[Path]:
    """Write one file for each (op, arch) into a directory; the files."""
    files: dict[str, list[Record]] = {}
    for record in records:
        files.setdefault(file_name(record.op, record.hardware.arch), []).append(record)
    directory.mkdir(parents=True, exist_ok=True)
    for name, of_file in sorted(files.items()):
        save(directory / name, of_file)
    return [directory / name for name in sorted(files)]


# Comparing and merging

Preference = Literal["rigor", "newest", "fastest", "ours"]


@dataclass(frozen=True)
class Difference:
    """One identity on which two sets of records do not agree."""

    identity: Identity
    kind: Literal["added", "removed", "changed"]
    fields: tuple[str, ...] = ()         # of a changed record: "rigor: raced -> confirmed"


def diff(ours: Iterable[Record], theirs: Iterable[Record]) -> list[Difference]:
    """What theirs has, lacks, or has otherwise."""
    old, new = _by_identity(ours), _by_identity(theirs)
    differences = []
    for identity in sorted(old.keys() | new.keys(), key=Identity.sort_key):
        if identity not in old:
            differences.append(Difference(identity, "added"))
        elif identity not in new:
            differences.append(Difference(identity, "removed"))
        elif old[identity] != new[identity]:
            differences.append(Difference(identity, "changed", _changes(old[identity], new[identity])))
    return differences


def merge(ours: Iterable[Record], theirs: Iterable[Record], *, prefer: Preference = "rigor") -> list[Record]:
    """One record for each identity of either; where both have one, the preferred, and ours when they are equal in that.

    rigor    the more rigorous, then the newer
    newest   the one recorded last
    fastest  the one whose best entry has the lower geometric mean of times at the points that both have; equal without any
    ours     ours

    Candidates that the other record threw out stay thrown out, unless the preferred record has timed them.
    """
    merged = _by_identity(ours)
    for identity, their in _by_identity(theirs).items():
        our = merged.get(identity)
        merged[identity] = their if our is None else _preferred(our, their, prefer)
    return sorted(merged.values(), key=lambda record: record.identity.sort_key())


def _preferred(our: Record, their: Record, prefer: Preference) -> Record:
    better = {
        "rigor": lambda: (their.rigor.rank, their.provenance.recorded) > (our.rigor.rank, our.provenance.recorded),
        "newest": lambda: their.provenance.recorded > our.provenance.recorded,
        "fastest": lambda: _is_faster(their, our),
        "ours": lambda: False,
    }[prefer]()
    chosen, other = (their, our) if better else (our, their)
    timed = [entry.candidate for entry in chosen.entries]
    kept = tuple(n for n in other.negatives if n not in chosen.negatives and n.candidate not in timed)
    return chosen.model_copy(update={"negatives": chosen.negatives + kept}) if kept else chosen


def _is_faster(a: Record, b: Record) -> bool:
    shared = set(a.points) & set(b.points)
    return bool(shared) and _best_time(a, shared) < _best_time(b, shared)


def _best_time(record: Record, points: set[Point]) -> float:
    """Sum of the logarithms of the best entry's times at some of the record's points."""
    times = []
    for entry in record.entries:
        curve = [m.median_us if m else math.inf for p, m in zip(record.points, entry.curve, strict=True) if p in points]
        times.append(sum(map(math.log, curve)))
    return min(times)


def _changes(old: Record, new: Record) -> tuple[str, ...]:
    before, after = old.model_dump(mode="json"), new.model_dump(mode="json")
    told = []
    for name in before:
        if before[name] != after[name]:
            small = isinstance(before[name], str | int)
            told.append(f"{name}: {before[name]} -> {after[name]}" if small else name)
    return tuple(told)


def _by_identity(records: Iterable[Record]) -> dict[Identity, Record]:
    return {record.identity: record for record in records}


def _told(error: ValidationError) -> str:
    """The first thing that is wrong, in one line. Inputs are not quoted: they may be megabytes."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    place = ".".join(map(str, first["loc"])) or "the record"
    others = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    return f"expected schema version {SCHEMA_VERSION}; got {first['msg']!r} at {place}{others}"
