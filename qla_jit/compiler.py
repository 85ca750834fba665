"""Turn (template, problem, config, arch) into files that can be loaded: TileLang and nvcc, in a process of their own.

A compiler may hang, abort, or be killed for its memory; here that is a CompileError with a log, and the calling process
never imports TileLang. No GPU is needed, nor looked at: the target is explicit.

The child runs `python -m qla_jit.compiler REQUEST.json`, which is written by compile_to().
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import importlib
import importlib.metadata
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import CompileError, EnvironmentUnsuitable, InvalidConfigError
from .kernel_templates.arch import ARCHES, Arch
from .kernel_templates.contract import Template
from .settings import settings

EXECUTABLE = "executable.so"             # host entry point with the GPU binary inside
DEVICE_SOURCE = "device.cu"
HOST_SOURCE = "host.c"
BUILD_REPORT = "build.json"              # {"function": name in the executable, "arguments": names, "ptxas": see parse_ptxas}
ARTEFACTS = (EXECUTABLE, DEVICE_SOURCE, HOST_SOURCE, BUILD_REPORT)

LOG = "compile.log"
LOG_LINES_SHOWN = 12                     # in the error's text

_running: set[subprocess.Popen[bytes]] = set()
os.register_at_fork(after_in_child=_running.clear)           # the parent's, and not for a forked process to stop


@dataclass(frozen=True)
class CompileRequest:
    """One kernel to build. problem and config are instances of template.problem and template.config."""

    template: Template
    problem: Any
    config: Any
    arch: Arch

    def __str__(self) -> str:
        return f"{self.template.name} for {self.arch.name} with {self.problem} {self.config}"


def compile_to(directory: Path, request: CompileRequest) -> None:
    """Build the ARTEFACTS of a request in an existing, empty directory; the compiler's output is beside them in LOG.

    Raises:
        InvalidConfigError: the template rejects the config; nothing was started.
        EnvironmentUnsuitable: there is no nvcc.
        CompileError: the child failed, crashed, ran longer than QLA_JIT_COMPILE_TIMEOUT, or could not be started.
    """
    rejection = request.template.rejection(request.problem, request.config, request.arch)
    if rejection is not None:
        raise InvalidConfigError(f"{request} cannot be built: {rejection}", rejection=rejection)
    nvcc = find_nvcc()
    if nvcc is None or nvcc_version() is None:
        found = "there is none under CUDA_HOME, on PATH, in the package nvidia-cuda-nvcc or in /usr/local/cuda"
        if nvcc is not None:
            found = f"`{nvcc} --version` does not answer with one"
        raise EnvironmentUnsuitable(
            f"compiling a kernel needs a CUDA compiler, and {found}. Install the CUDA toolkit, "
            "or set QLA_JIT_BUNDLE_PATH to what qla-tune build made on a machine with nvcc."
        )
    scratch = directory / "scratch"
    try:
        scratch.mkdir()
        request_path = scratch / "request.json"
        request_path.write_text(json.dumps(_describe(request, directory)))
        with (directory / LOG).open("wb") as log:
            child = subprocess.Popen(
                [sys.executable, "-m", "qla_jit.compiler", str(request_path)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=scratch, env=_child_environment(nvcc, scratch),
                start_new_session=True,  # one process group, so that nvcc can be stopped with the child
            )
            failure = _wait(child)
        if failure is not None:
            shown = "\n".join((directory / LOG).read_text(errors="replace").splitlines()[-LOG_LINES_SHOWN:])
            raise CompileError(f"{request} did not compile: {failure}. Its log ends:\n{shown}", log_path=directory / LOG)
    except OSError as error:             # of this side: no memory to fork, no space for the request
        raise CompileError(f"{request} could not be compiled in {directory}: {error}") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def stop_all() -> None:
    """Kill every compilation of this process, for a caller that is interrupted; their compile_to() raises CompileError."""
    for child in list(_running):
        _kill(child)


def tilelang_version() -> str:
    """The installed TileLang, without importing it."""
    return importlib.metadata.version("tilelang")


def find_nvcc() -> Path | None:
    """The nvcc that TileLang would run (tilelang/env.py: _find_cuda_home), or None."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    on_path = shutil.which("nvcc")
    if home is not None:
        nvcc = Path(home, "bin", "nvcc")
    elif on_path is not None:
        # A symbolic link is followed only if its own prefix is not a toolkit.
        nvcc = Path(on_path) if Path(on_path).parents[1].joinpath("include/cuda_runtime.h").exists() else Path(on_path).resolve()
    else:
        nvcc = _packaged_nvcc() or Path("/usr/local/cuda/bin/nvcc")
    return nvcc if os.path.isfile(nvcc) else None


def nvcc_version() -> str | None:
    """The version of find_nvcc(), "13.0.88"; None where there is no nvcc or it does not run."""
    nvcc = find_nvcc()
    return None if nvcc is None else _version_of(nvcc)


@functools.cache
def _version_of(nvcc: Path) -> str | None:
    try:
        text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    match = re.search(r"\bV(\d+(?:\.\d+)+)", text)
    return None if match is None else match[1]


def _packaged_nvcc() -> Path | None:
    try:
        files = importlib.metadata.files("nvidia-cuda-nvcc") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    return next((Path(str(file.locate())) for file in files if file.name == "nvcc"), None)


def _describe(request: CompileRequest, directory: Path) -> dict[str, Any]:
    template = request.template
    module = template.build.__module__
    assert getattr(sys.modules.get(module), "TEMPLATE", None) is template, (
        f"the child looks for the template {template.name} under the name TEMPLATE in {module}, the home of its build function"
    )
    return {
        "module": module,
        "source_sha256": template.source_sha256(),
        "problem": dataclasses.asdict(request.problem),
        "config": dataclasses.asdict(request.config),
        "arch": request.arch.name,
        "directory": str(directory.resolve()),
    }


def _child_environment(nvcc: Path, scratch: Path) -> dict[str, str]:
    """The caller's environment, less everything that could change the kernel without changing its key."""
    steers_a_compiler = re.compile(r"TILELANG_|TL_|NVCC_(APPEND|PREPEND)_FLAGS|CUDA_PATH")
    return {
        **{name: value for name, value in os.environ.items() if not steers_a_compiler.match(name)},
        "CUDA_HOME": str(nvcc.parents[1]),
        "CUDA_VISIBLE_DEVICES": "",      # a build must not depend on the GPUs of the machine that runs it
        "PYTHONPATH": os.pathsep.join(_existing(sys.path)),
        "TMPDIR": str(scratch),          # what a killed compiler leaves is removed with it
        "TILELANG_CACHE_DIR": str(scratch / "tilelang"),
        "TILELANG_DISABLE_CACHE": "1",
        "TILELANG_PRINT_ON_COMPILATION": "0",
        "TILELANG_VERBOSE": "1",         # logs what ptxas says of registers and spills
    }


def _existing(paths: list[str]) -> Iterator[str]:
    """Those that exist, as absolute paths."""
    for path in paths:
        with contextlib.suppress(FileNotFoundError):         # a relative path, and the current directory was removed
            if os.path.exists(absolute := os.path.abspath(path)):
                yield absolute


def _wait(child: subprocess.Popen[bytes]) -> str | None:
    """Wait for the child; what went wrong, in words, or None."""
    seconds = settings().compile_timeout
    _running.add(child)
    try:
        status = child.wait(seconds)
    except subprocess.TimeoutExpired:
        return f"stopped after {seconds:g} s (QLA_JIT_COMPILE_TIMEOUT)"
    finally:
        _running.discard(child)
        _kill(child)                     # if it still runs: too slow, or the caller was interrupted
    if status < 0:
        return f"killed by {signal.Signals(-status).name}" + (", perhaps for lack of memory" if -status == signal.SIGKILL else "")
    return None if status == 0 else f"exit status {status}"


def _kill(child: subprocess.Popen[bytes]) -> None:
    if child.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def parse_ptxas(text: str) -> dict[str, Any]:
    """What ptxas --verbose says, as data.

    Returns:
        {"functions": {name: {"registers", "stack_bytes", "spill_store_bytes", "spill_load_bytes"}}, "remarks": [line]}.
        A number that ptxas did not print is None. A remark is a line with a code of its own, such as
        "(C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to ...".
    """
    patterns = {
        "registers": r"Used (\d+) registers",
        "stack_bytes": r"(\d+) bytes stack frame",
        "spill_store_bytes": r"(\d+) bytes spill stores",
        "spill_load_bytes": r"(\d+) bytes spill loads",
    }
    functions = {}
    for name, report in re.findall(r"Compiling entry function '(\w+)'(.*?)(?=Compiling entry function|\Z)", text, re.DOTALL):
        found = {field: re.search(pattern, report) for field, pattern in patterns.items()}
        functions[name] = {field: None if match is None else int(match[1]) for field, match in found.items()}
    return {"functions": functions, "remarks": re.findall(r"\(C\d+\) .*", text)}


# The child.

# TileLang's checks change nothing in the kernel, which is why they are in no key, and take 3 s of the 12 of the largest. They are
# on in tests/compile.
UNCHECKED = {"tl.disable_data_race_check": True, "tl.disable_buffer_init_check": True}


def main(request_path: str) -> None:
    """Build the kernel that the request file describes."""
    # A compiler that hangs must not outlive its caller.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)                           # 1: PR_SET_PDEATHSIG
    request = json.loads(Path(request_path).read_text())
    template: Template = importlib.import_module(request["module"]).TEMPLATE
    if template.source_sha256() != request["source_sha256"]:
        raise RuntimeError(f"{request['module']} was edited after its kernel key was made; call again")
    problem, config = template.problem(**request["problem"]), template.config(**request["config"])
    _build(Path(request["directory"]), template, problem, config, ARCHES[request["arch"]])


def _build(directory: Path, template: Template, problem: Any, config: Any, arch: Arch) -> None:
    ptxas_output = _record_ptxas_output()
    function = template.build(problem, config)
    arguments = template.arguments(problem)
    if len(arguments) != len(function.params):
        built = [parameter.name for parameter in function.params]
        raise RuntimeError(f"{template.name} names the arguments {arguments} and builds a kernel with {len(built)}: {built}")

    import tilelang  # seconds; a template that cannot be built has failed before

    pass_configs = UNCHECKED | dict(template.pass_configs)
    kernel = tilelang.compile(function, execution_backend="tvm_ffi", target=arch.target, pass_configs=pass_configs)
    kernel.adapter.get_exportable_executable().export_library(str(directory / EXECUTABLE))
    (directory / DEVICE_SOURCE).write_text(kernel.adapter.get_device_source())
    (directory / HOST_SOURCE).write_text(kernel.adapter.get_host_source())
    report = {
        "function": str(function.attrs["global_symbol"]),
        "arguments": arguments,
        "ptxas": parse_ptxas("\n".join(ptxas_output)),
    }
    (directory / BUILD_REPORT).write_text(json.dumps(report, indent=1))


def _record_ptxas_output() -> list[str]:
    """A list that receives what ptxas prints from now on, as TileLang logs it."""
    texts: list[str] = []

    class Recorder(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            _, found, text = record.getMessage().partition("PTXAS verbose output:\n")
            if found:
                texts.append(text)

    logging.getLogger("tilelang").addHandler(Recorder())
    return texts


if __name__ == "__main__":
    main(sys.argv[1])
