"""Which options do several verbs of qla-tune have, and what do they mean?"""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer

from .. import record_store
from ..device import gpu_count, gpu_info
from ..errors import EnvironmentUnsuitable, InputError, RecordError
from ..kernel_templates.arch import ARCHES
from ..models import model, models
from ..ops.plan import BACKWARD, FORWARD
from ..record_store import Stored
from ..tuning_records import Hardware, Preference, Problem, Record, load
from ..workload import parse_pairs


class PreferOption(str, enum.Enum):
    RIGOR = "rigor"
    NEWEST = "newest"
    FASTEST = "fastest"
    OURS = "ours"

    @property
    def preference(self) -> Preference:
        return self.value


class LayerOption(str, enum.Enum):
    USER = "user"
    DIRECTORY = "directory"
    SHIPPED = "shipped"


Heads = Annotated[list[str] | None, typer.Option("--heads", help="H:HV, as in 2:8; several with commas or by repetition.")]
Dims = Annotated[list[str] | None, typer.Option("--dims", help="K:V, as in 128:128.")]
Dtype = Annotated[str, typer.Option("--dtype", help="bfloat16 or float16.")]
ChunkSize = Annotated[int, typer.Option("--chunk-size", help="Tokens per chunk: 16, 32 or 64.")]
Packed = Annotated[bool, typer.Option("--packed", help="Sequences are packed (cu_seqlens).")]
LayerFilter = Annotated[LayerOption | None, typer.Option("--layer", help="Only records of this layer.")]
Prefer = Annotated[PreferOption, typer.Option("--prefer", help="Which record is kept where there are two.")]
Models = Annotated[list[str] | None, typer.Option("--model", help=f"One of {', '.join(models())}.")]
Tp = Annotated[list[int] | None, typer.Option("--tp", help="GPUs that share the heads of the model.")]
Backward = Annotated[bool, typer.Option("--backward", help="The gradients of such calls instead of their outputs.")]
Device = Annotated[int, typer.Option("--device", help="Index of the GPU.")]
Gpu = Annotated[str | None, typer.Option("--gpu", help="ARCH:SMS:L2_MIB, as in sm_90a:132:60, instead of the GPU that is here.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


def parse_seconds(text: str) -> float:
    """"90s", "10m", "1h30m", "30d", "600".

    Raises:
        InputError: it is none of these, or nothing.
    """
    match = re.fullmatch(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s?)?", text.strip(), re.ASCII)
    parts = () if match is None else zip(match.groups(), (86400, 3600, 60, 1), strict=True)
    seconds = sum(int(part or 0) * unit for part, unit in parts)
    if seconds <= 0:
        raise InputError(f"a time must be as in 90s, 10m, 1h30m or 30d; got {text!r}")
    return float(seconds)


def hardware_of(text: str | None, device: int) -> Hardware:
    """The kind of GPU that --gpu names, or the one that is here.

    Raises:
        InputError: --gpu is not ARCH:SMS:L2_MIB.
        EnvironmentUnsuitable: there is no GPU.
    """
    if text is not None:
        match = re.fullmatch(r"(sm_\w+):([1-9]\d{0,3}):([1-9]\d{0,3})", text, re.ASCII)
        if match is None or match[1] not in ARCHES:
            known = ", ".join(ARCHES)
            raise InputError(f"--gpu must be ARCH:SMS:L2_MIB with an arch of {known}, as in sm_90a:132:60; got {text!r}")
        return Hardware(arch=match[1], sm_count=int(match[2]), l2_bytes=int(match[3]) << 20)
    if device >= gpu_count():
        raise EnvironmentUnsuitable(f"there is no GPU {device}; name one, as in --gpu sm_90a:132:60, or see qla-tune doctor")
    return Hardware.of(gpu_info(torch.device("cuda", device)))


def op_of(backward: bool) -> str:
    return BACKWARD if backward else FORWARD


def stored_records(heads: Sequence[str] | None, dims: Sequence[str] | None, layer: LayerOption | None) -> list[Stored]:
    """The records that the options name."""
    head_counts = None if not heads else parse_pairs(heads, "--heads")
    head_dims = None if not dims else parse_pairs(dims, "--dims")
    return [
        s for s in record_store.everything()
        if (layer is None or s.layer == layer.value)
        and (head_counts is None or (s.record.problem.H, s.record.problem.HV) in head_counts)
        and (head_dims is None or (s.record.problem.K, s.record.problem.V) in head_dims)
    ]


def load_records(path: Path) -> list[Record]:
    """The records of a file, or of all files of a directory.

    Raises:
        RecordError: as load(); or a directory without files.
    """
    if not path.is_dir():
        return load(path)
    files = sorted(path.glob("*.json"))
    if not files:
        raise RecordError(f"expected JSON files in {path}; there are none")
    return [record for file in files for record in load(file)]


def shapes_of(
    heads: Sequence[str] | None, dims: Sequence[str] | None, names: Sequence[str] | None, tp: Sequence[int] | None
) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Pairs of (H, HV) and (K, V)."""
    if names:
        shapes = [model(name).on(size) for name in names for size in tp or [1]]
        return list(dict.fromkeys(((shape.H, shape.HV), (shape.K, shape.V)) for shape in shapes))
    if tp:
        raise InputError("--tp shares the heads of a --model; got none")
    if not heads:
        raise InputError("the heads must be given, as in --heads 2:8")
    return [(pair, of_dims) for pair in parse_pairs(heads, "--heads") for of_dims in parse_pairs(dims or ["128:128"], "--dims")]


def dtype_of(text: str, option: str, allowed: Sequence[torch.dtype]) -> torch.dtype:
    names = {str(dtype).removeprefix("torch."): dtype for dtype in allowed}
    if text not in names:
        raise InputError(f"{option} must be one of {', '.join(names)}; got {text!r}")
    return names[text]


def problem_of(H: int, HV: int, K: int, V: int, dtype: str, chunk_size: int, packed: bool) -> Problem:
    if dtype not in ("bfloat16", "float16") or chunk_size not in (16, 32, 64) or HV % H:
        raise InputError(
            "expected --dtype bfloat16 or float16, --chunk-size 16, 32 or 64, and a multiple of H as HV; "
            f"got {dtype}, {chunk_size}, {H}:{HV}"
        )
    return Problem(H=H, HV=HV, K=K, V=V, dtype=dtype, chunk_size=chunk_size, varlen=packed)
