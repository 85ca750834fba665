"""Entries of a cache or a bundle to test with, whose files are no kernels: for everything that does not load them."""

from __future__ import annotations

import hashlib
import platform
from pathlib import Path

from qla_jit import compiler, kernel_store
from qla_jit.compiler import ARTEFACTS
from qla_jit.kernel_cache import ARTEFACT_FORMAT
from qla_jit.kernel_store import MANIFEST, FileStamp, KernelKey, Manifest
from qla_jit.templates import template_sources

KEY = KernelKey(
    format=ARTEFACT_FORMAT, template="l2norm", template_sha256=template_sources()["l2norm"],
    problem={"K": 128, "dtype": "bfloat16"}, config={"threads": 64}, arch="sm_90a", pass_configs={},
    machine=platform.machine(), tilelang=compiler.tilelang_version(), nvcc="13.0.88",
)


def put(directory: Path, **changes) -> Path:
    """Make an entry whose key is KEY with these changes."""
    key = KEY.model_copy(update=changes)
    entry = kernel_store._entry(directory, key)
    entry.mkdir(parents=True)
    contents = {name: f"{name} of {key.digest()}\n".encode() * 20 for name in ARTEFACTS}
    stamps = {name: FileStamp(size=len(data), sha256=hashlib.sha256(data).hexdigest()) for name, data in contents.items()}
    contents[MANIFEST] = Manifest(key=key, files=stamps).model_dump_json(indent=1).encode()
    for name, data in contents.items():
        (entry / name).write_bytes(data)
    return entry
