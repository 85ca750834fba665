"""What does a first call cost: compiling, or loading what was compiled before or shipped; what does the host add to later calls?

    python benchmarks/cold_start.py                                   every part
    python benchmarks/cold_start.py --parts shipped --bundle FILE     a file that qla-tune pack made on another machine
    python benchmarks/cold_start.py --arch sm_90a --out FILE          on a machine without a GPU: build and load, launch nothing

Parts: `first_call`: two fresh processes share a new, empty kernel cache, the first compiles, the second finds its kernels there.
`warm_load`: fresh processes load the same kernels from qla_jit's cache and from TileLang's. `shipped`: a bundle file is installed
and used where there is no nvcc and nothing to write to. What a run does not measure stays in the output file.

A FILE has the kernels of the calls that are timed, and comes from the same commit, because the templates are part of their keys:

    qla-tune build --arch sm_90a --sm-count 132 --heads 8:24 --packed --index-dtype int32 --initial-state --final-state \\
        --no-l2norm --backward --out DIR && qla-tune pack DIR --out FILE
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import results
import torch
from systems import checked, qla_jit_call
from timing import host_us
from training import make_cotangents, qla_jit_calls
from workload import K, Row, V, make_inputs

from qla_jit.device import gpu_info

TOKENS = 2048                            # the host's time does not depend on it; short, so that the GPU keeps up with the host
PARTS = ("first_call", "warm_load", "shipped")
ELSEWHERE = ("QLA_JIT_MODE", "QLA_JIT_BUNDLE_PATH", "QLA_JIT_DB_PATH")  # kernels and records other than those of the part

PROTOCOL = (
    "Seconds of fresh processes on an empty and then a warm kernel cache. compile_seconds and load_seconds are those of "
    "qla_jit.kernel_cache.stats(), summed over the kernels, which compile side by side; first_call_seconds is the wall time "
    "from the first call to its result, torch imported, CUDA initialised and, for a training step, autograd used once; "
    "host_us is the host time of one call with all "
    f"checks on, T = {TOKENS}: median of 20 batches of 50 calls, the GPU waited for between batches only."
)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    if options.stage:
        print(json.dumps(STAGES[options.stage](options)))
        return
    given = sys.argv[1:] if arguments is None else list(arguments)
    has_gpu = torch.cuda.is_available()
    out = options.out or (results.default_path("cold_start.json") if has_gpu else None)
    document = {"rows": []} if out is None else results.load(out)
    document |= {"gpu": results.gpu_name(), "cpus": os.cpu_count(), "versions": results.versions(["qla_jit"])}
    for part in options.parts:
        measured = MEASURE[part](given, options)
        print(json.dumps({part: measured}, indent=1))
        merge(document, part, measured, commit=options.commit, date=results.now())
        if out is not None:
            results.save(out, document)
    if out is not None:
        print(out)


def merge(document: dict[str, Any], part: str, measured: dict[str, Any], *, commit: str, date: str) -> None:
    """Put a part into the document. The document's own commit, date and protocol are those of first_call."""
    if part == "first_call":
        document |= {"commit": commit, "date": date, "protocol": PROTOCOL, "rows": [measured]}
    else:
        document[part] = {"commit": commit, "date": date, **measured}


# The parts, in this process


def measure_first_call(given: Sequence[str], options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="qla_jit_cold_") as cache:
        environment = {"QLA_JIT_CACHE_DIR": cache}
        cold, warm = (run_stage(given, "first_call", environment) for _ in range(2))
    assert warm["compiles"] == 0, f"the second process compiled again: {warm}"
    H, HV = options.heads
    return {"op": "forward", "H": H, "HV": HV, "K": K, "V": V, "arch": arch_name(options), "cold": cold, "warm": warm}


def measure_warm_load(given: Sequence[str], options: argparse.Namespace) -> dict[str, Any]:
    """Both caches are filled first, and each is loaded by a process that has read the files once before."""
    from qla_jit.settings import available_cpus

    shares = min(available_cpus(), options.kernels)
    with tempfile.TemporaryDirectory(prefix="qla_jit_load_") as place:
        caches = {"QLA_JIT_CACHE_DIR": f"{place}/qla_jit", "TILELANG_CACHE_DIR": f"{place}/tilelang"}
        run_stage(given, "load", caches)
        options_of_shares = [[*given, "--share", str(share), str(shares)] for share in range(shares)]
        with ThreadPoolExecutor(shares) as pool:
            list(pool.map(lambda of_share: run_stage(of_share, "load_tilelang", caches), options_of_shares))
        loaded = {}
        for library, stage in (("qla_jit", "load"), ("tilelang", "load_tilelang")):
            before = names_in(Path(place))
            _, loaded[library] = (run_stage(given, stage, caches) for _ in range(2))
            assert names_in(Path(place)) == before, f"{library} compiled again"
    return {"arch": arch_name(options), "kernels": options.kernels, **loaded}


def measure_shipped(given: Sequence[str], options: argparse.Namespace) -> dict[str, Any]:
    """Install a bundle file, and use it in a process that can neither compile nor write."""
    from qla_jit import bundle_file

    with tempfile.TemporaryDirectory(prefix="qla_jit_shipped_") as place:
        file = options.bundle
        if file is None:
            file = build_bundle(Path(place), options)
        installed = bundle_file.install(file, Path(place, "bundle"), allow_unsigned=True)
        before = read_only(Path(place, "bundle"))
        Path(place, "cache").mkdir(mode=0o700)
        environment = without_nvcc(os.environ) | {
            "QLA_JIT_BUNDLE_PATH": f"{place}/bundle",
            "QLA_JIT_CACHE_DIR": f"{place}/cache",
            "QLA_JIT_MODE": "require",
        }
        used = {stage: run_stage(given, stage, environment) for stage in ("shipped_forward", "shipped_training")}
        assert read_only(Path(place, "bundle")) == before, "something was written into the bundle"
        assert not any(Path(place, "cache").iterdir()), "something was written into the cache"
        manifest = installed.manifest
        return {
            "built": "elsewhere" if options.bundle is not None else "here",
            **{name: getattr(manifest, name) for name in ("qla_jit", "tilelang", "nvcc", "arch", "machine", "kernels")},
            "bytes": sum(stamp.size for stamp in manifest.files.values()),
            "packed_bytes": file.stat().st_size,
            "forward": used["shipped_forward"],
            "training": used["shipped_training"],
        }


MEASURE: dict[str, Callable[[Sequence[str], argparse.Namespace], dict[str, Any]]] = {
    "first_call": measure_first_call, "warm_load": measure_warm_load, "shipped": measure_shipped,
}


def run_stage(given: Sequence[str], stage: str, environment: dict[str, str]) -> dict[str, Any]:
    """The measurements of one fresh process."""
    command = [sys.executable, __file__, *given, "--stage", stage]
    ours = {name: value for name, value in os.environ.items() if name not in ELSEWHERE}
    child = subprocess.run(command, env=ours | environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(child.stdout.splitlines()[-1])


def build_bundle(place: Path, options: argparse.Namespace) -> Path:
    from qla_jit import bundle, bundle_file

    built = bundle.build(kernels_of_calls(options, backward=True), place / "built")
    assert not built.failures, built.failures
    bundle_file.pack(place / "built", place / "packed.tar.gz")
    return place / "packed.tar.gz"


def without_nvcc(environment: os._Environ[str] | dict[str, str]) -> dict[str, str]:
    """The variables by which nvcc is looked for, such that none is found."""
    path = [place for place in environment.get("PATH", "").split(os.pathsep) if not Path(place, "nvcc").exists()]
    return {"PATH": os.pathsep.join(path), "CUDA_HOME": "/nowhere", "CUDA_PATH": "/nowhere"}


def read_only(directory: Path) -> dict[str, int]:
    """Take the right to write from a directory and all in it; when each was changed last."""
    paths = [directory, *sorted(directory.rglob("*"))]
    for path in paths:
        path.chmod(path.stat().st_mode & ~0o222)
    return {str(path): path.stat().st_mtime_ns for path in paths}


def names_in(directory: Path) -> list[str]:
    return sorted(str(path) for path in directory.rglob("*") if path.is_file())


# The stages, each in a fresh process


def first_call(options: argparse.Namespace) -> dict[str, Any]:
    """The first call, or without a GPU the kernels alone; then the host's time."""
    x, import_seconds = prepared(options)
    from qla_jit import kernel_cache, select
    from qla_jit.kernel_templates.arch import ARCHES

    first_call_seconds = host = None
    if torch.cuda.is_available():
        call = qla_jit_call(x)
        first_call_seconds = seconds_on_gpu(call)
        host = host_us(call)
    else:
        kernel_cache.get(select.requests_for_any_size(checked(x).facts, ARCHES[options.arch]))
    return {
        "import_seconds": round(import_seconds, 4),
        **counts(),
        "first_call_seconds": rounded(first_call_seconds, 3),
        "host_us": rounded(host, 1),
        "imported_tilelang": "tilelang" in sys.modules,
    }


def shipped(options: argparse.Namespace, *, training: bool) -> dict[str, Any]:
    """The first call, or training step, of a process that is shipped its kernels; without a GPU the kernels alone."""
    x, import_seconds = prepared(options)
    from qla_jit import compiler, kernel_cache

    nvcc = compiler.nvcc_version()
    assert nvcc is None, f"expected no nvcc; got {nvcc}"
    first_call_seconds = None
    if torch.cuda.is_available():
        if training:
            use_autograd(x.q)
        first_call_seconds = seconds_on_gpu(qla_jit_calls(x, make_cotangents(x)).step if training else qla_jit_call(x))
    else:
        kernel_cache.get(kernels_of_calls(options, backward=training))
    found = counts()
    assert found["compiles"] == 0
    return {
        "import_seconds": round(import_seconds, 4),
        **found,
        "first_call_seconds": rounded(first_call_seconds, 3),
        "nvcc": nvcc,
        "imported_tilelang": "tilelang" in sys.modules,
    }


def load(options: argparse.Namespace) -> dict[str, Any]:
    """Kernels from qla_jit's cache."""
    _, import_seconds = prepared(options)
    from qla_jit import kernel_cache

    requests = kernels_to_load(options)
    files = files_touched(Path(os.environ["QLA_JIT_CACHE_DIR"]))
    started = time.perf_counter()
    kernel_cache.get(requests)
    seconds = time.perf_counter() - started
    return {"import_seconds": round(import_seconds, 4), "seconds": round(seconds, 4), "files": files()}


def load_tilelang(options: argparse.Namespace) -> dict[str, Any]:
    """The same kernels from TileLang's own cache: templates are traced again, because the trace is the key."""
    requests = kernels_to_load(options)
    if options.share is not None:
        share, shares = options.share
        requests = requests[share::shares]
    started = time.perf_counter()
    tilelang = importlib.import_module("tilelang")
    import_seconds = time.perf_counter() - started
    files = files_touched(Path(os.environ["TILELANG_CACHE_DIR"]))
    started = time.perf_counter()
    for request in requests:
        tilelang.compile(
            request.template.build(request.problem, request.config), execution_backend="tvm_ffi", target=request.arch.target,
            pass_configs=dict(request.template.pass_configs),
        )
    seconds = time.perf_counter() - started
    return {"import_seconds": round(import_seconds, 4), "seconds": round(seconds, 4), "files": files()}


STAGES: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "first_call": first_call,
    "load": load,
    "load_tilelang": load_tilelang,
    "shipped_forward": lambda options: shipped(options, training=False),
    "shipped_training": lambda options: shipped(options, training=True),
}


def prepared(options: argparse.Namespace) -> tuple[Any, float]:
    """Inputs, and the seconds that importing takes that a call or a training step on a GPU imports."""
    x = make_inputs(Row(*options.heads, (TOKENS,)), device="cuda" if torch.cuda.is_available() else "cpu")
    started = time.perf_counter()
    for module in ("chunk", "pipeline", "autograd"):
        importlib.import_module(f"qla_jit.ops.{module}")
    return x, time.perf_counter() - started


def seconds_on_gpu(call: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def use_autograd(x: torch.Tensor) -> None:
    """What is PyTorch's own of the first gradients with given gradients of outputs: it imports sympy, whatever they are of."""
    leaf = x.detach().requires_grad_()
    torch.autograd.grad(leaf * 2, leaf, torch.ones_like(leaf))
    torch.cuda.synchronize()


def counts() -> dict[str, Any]:
    from qla_jit import kernel_cache

    stats = kernel_cache.stats()
    return {
        "compiles": stats.compiles,
        "compile_seconds": round(stats.compile_seconds, 3),
        "disk_hits": stats.disk_hits,
        "load_seconds": round(stats.load_seconds, 4),
    }


def kernels_of_calls(options: argparse.Namespace, *, backward: bool) -> list[Any]:
    """Those of make_inputs(): packed by int32, with states at both ends."""
    from qla_jit.enumeration import Variants, kernels
    from qla_jit.kernel_templates.arch import ARCHES
    from qla_jit.models import ModelShape

    variants = Variants(
        packed=True, index_dtypes=(torch.int32,), initial_state=True, output_final_state=True, use_qk_l2norm_in_kernel=False,
        backward=backward,
    )
    return kernels(ModelShape(*options.heads, K, V), variants, ARCHES[arch_name(options)], hardware())


def kernels_to_load(options: argparse.Namespace) -> list[Any]:
    """So many of the kernels that calls of any kind may need."""
    from qla_jit.enumeration import Variants, kernels
    from qla_jit.kernel_templates.arch import ARCHES
    from qla_jit.models import ModelShape

    found = kernels(ModelShape(*options.heads, K, V), Variants(), ARCHES[arch_name(options)], [])
    assert len(found) >= options.kernels, f"there are {len(found)} kernels; got --kernels {options.kernels}"
    return found[: options.kernels]


def files_touched(directory: Path) -> Callable[[], int]:
    """Count, from now on, the files below a directory that this process opens or maps."""
    opened: set[str] = set()
    place = f"{directory.resolve()}{os.sep}"

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[0], str | os.PathLike):
            path = os.path.realpath(arguments[0])
            if path.startswith(place):
                opened.add(path)

    sys.addaudithook(hook)
    return lambda: len(opened.union(path for path in mapped_files() if path.startswith(place)))


def mapped_files() -> Iterator[str]:
    """Libraries are opened by the loader, of which Python hears nothing."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        _, _, path = line.partition(os.sep)
        if path:
            yield os.sep + path


def rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


def arch_name(options: argparse.Namespace) -> str:
    return gpu_info(torch.device("cuda")).arch.name if torch.cuda.is_available() else options.arch


def hardware() -> list[Any]:
    """The GPU that is here, if any, whose tuned records a call asks."""
    from qla_jit.tuning_records import Hardware

    return [Hardware.of(gpu_info(torch.device("cuda")))] if torch.cuda.is_available() else []


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    def heads(text: str) -> tuple[int, int]:
        H, HV = text.split(",")
        return int(H), int(HV)

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", type=heads, default=(8, 24), metavar="H,HV", help="default 8,24: Qwen3.5-27B on two GPUs")
    parser.add_argument("--arch", default="sm_90a", help="what to build for where there is no GPU")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--kernels", type=int, default=20, help="how many warm_load loads")
    parser.add_argument("--bundle", type=Path, help="a file of qla-tune pack for shipped; by default one is built here")
    parser.add_argument("--out", type=Path, help="default with a GPU: benchmarks/results/<GPU>/cold_start.json; without: none")
    parser.add_argument("--commit", default=results.current_commit(), help="where there is no git: which commit this is")
    parser.add_argument("--stage", choices=STAGES, help=argparse.SUPPRESS)
    parser.add_argument("--share", type=int, nargs=2, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
