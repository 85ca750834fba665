"""Do the processes of a job compute alike? What each has decided so far, as a digest, and in what ranks differ.

Ranks that choose for themselves, from records or caches of their own, may compute the same call by different kernels. Then
results differ in their last bits between ranks that must agree, and one rank compiles while the others wait in a collective.
"""

from __future__ import annotations

import ctypes
import datetime
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from . import kernel_cache
from .errors import EnvironmentUnsuitable
from .ops import backward, pipeline

if TYPE_CHECKING:
    from .ops.inputs import CallFacts
    from .ops.plan import Extents
    from .select import Dispatch, Override


@dataclass(frozen=True)
class DispatchDifference:
    """A decision in which ranks differ."""

    key: str                             # what was decided: a kind of call at a size, or a kernel
    decisions: Mapping[str | None, tuple[int, ...]]      # the ranks by what they decided; None: nothing yet

    def __str__(self) -> str:
        told = (
            f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}: {'nothing' if decision is None else decision}"
            for decision, ranks in self.decisions.items()
        )
        return f"{self.key}\n  " + "\n  ".join(told)


def dispatch_table() -> dict[str, str]:
    """What this process has decided so far: how it computes each kind of call at each size, and which kernels it has loaded.

    The index of the GPU is not in it, so that ranks can be compared.
    """
    table = {f"kernel {request}": kernel.digest for request, kernel in kernel_cache.loaded().items()}
    for (facts, override, extents, to_split), kernels in pipeline.resolved().items():
        table[f"forward {_told(facts, override, extents)}{' to be split' * to_split}"] = _decision(kernels.dispatch)
    for (facts, override, extents), gradients in backward.resolved().items():
        decision = "the reference" if gradients is None else _decision(gradients.dispatch)
        table[f"backward {_told(facts, override, extents)}"] = decision
    return dict(sorted(table.items()))


def dispatch_digest() -> bytes:
    """SHA-256 over what this process has decided so far, 32 bytes; ranks that are to agree bit by bit have the same.

    After qla_jit.warmup() it covers the kernels that calls will use; after the first calls, also how each is computed.
    """
    return hashlib.sha256(_canonical(dispatch_table())).digest()


def dispatch_differences(
    group: dist.ProcessGroup | None = None, *, timeout_seconds: float = 60.0
) -> tuple[DispatchDifference, ...]:
    """In what the ranks of a group have decided differently; the same answer on each of them, empty if they agree.

    All ranks of the group must call it. It takes one small collective if they agree, and three if they differ.

    Args:
        group: None is the default one. Its backend may be gloo or nccl, which uses the current GPU.
        timeout_seconds: how long to wait for the others.

    Raises:
        EnvironmentUnsuitable: torch.distributed is not initialised, or a rank does not take part in time.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise EnvironmentUnsuitable("ranks are compared through torch.distributed, which is not initialised in this process")
    gather = _Gather(group, timeout_seconds)
    table = dispatch_table()
    text = _canonical(table)
    digests = gather.equal_sizes(hashlib.sha256(text).digest())
    if len(set(digests)) == 1:
        return ()
    tables = [json.loads(text) for text in gather.any_sizes(text)]
    differences = []
    for key in sorted(set().union(*tables)):
        decisions: dict[str | None, tuple[int, ...]] = {}
        for rank, of_rank in zip(gather.ranks, tables, strict=True):
            decisions[of_rank.get(key)] = (*decisions.get(of_rank.get(key), ()), rank)
        if len(decisions) > 1:
            differences.append(DispatchDifference(key, decisions))
    return tuple(differences)


class _Gather:
    """Brings bytes of every rank to every rank, as tensors: torch's own way for objects unpickles what it receives."""

    def __init__(self, group: dist.ProcessGroup | None, timeout_seconds: float) -> None:
        self._group = group
        self._timeout = datetime.timedelta(seconds=timeout_seconds)
        on_gpu = dist.get_backend(group) == dist.Backend.NCCL
        self._device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        self.ranks = dist.get_process_group_ranks(group)

    def equal_sizes(self, data: bytes) -> list[bytes]:
        mine = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self._device)
        theirs = [torch.empty_like(mine) for _ in self.ranks]
        work = dist.all_gather(theirs, mine, group=self._group, async_op=True)
        try:
            work.wait(self._timeout)
        except RuntimeError as error:
            _never_free(work)
            raise EnvironmentUnsuitable(
                f"rank {dist.get_rank()} waited {self._timeout.total_seconds():g} s for the dispatch tables of ranks "
                f"{', '.join(map(str, self.ranks))}, and not all came: {str(error).splitlines()[0]}; each of them must call "
                "dispatch_differences"
            ) from error
        return [bytes(tensor.cpu().tolist()) for tensor in theirs]

    def any_sizes(self, data: bytes) -> list[bytes]:
        sizes = [int.from_bytes(size, "little") for size in self.equal_sizes(len(data).to_bytes(8, "little"))]
        padded = self.equal_sizes(data.ljust(max(sizes), b"\0"))
        return [text[:size] for text, size in zip(padded, sizes, strict=True)]


def _never_free(work: dist.Work) -> None:
    """Leak a collective that was given up.

    gloo's thread would free it with its tensors once the others' connections close, for which it needs the interpreter: in a
    process that was ending by then it aborted, as 1 in 10 did.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(work))


def _canonical(table: Mapping[str, str]) -> bytes:
    return json.dumps(table, sort_keys=True, separators=(",", ":")).encode()


def _decision(dispatch: Dispatch) -> str:
    split = "whole sequences" if dispatch.split is None else f"segments of {dispatch.split} chunks"
    configs = "; ".join(f"{step} {request.config}" for step, request in dispatch.requests.items())
    return f"{dispatch.strategy}, {split}: {configs}"


def _told(facts: CallFacts, override: Override, extents: Extents) -> str:
    words = [f"{name}={_plain(value)}" for name, value in facts._asdict().items() if name != "device"]
    words += [] if override.is_empty else [str(override)]
    return " ".join([*words, f"chunks={extents.chunks} longest={extents.longest} sequences={extents.sequences}"])


def _plain(value: Any) -> str:
    return str(value).removeprefix("torch.")
