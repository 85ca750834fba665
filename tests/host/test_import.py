"""Importing qla_jit costs nothing and touches nothing; running it on the CPU needs no kernel machinery."""

import os
import subprocess
import sys
import textwrap

import pytest


def run(code: str) -> str:
    """What a fresh interpreter prints that runs the code, with no GPU in sight of it and no .pyc files written."""
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], env=environment, capture_output=True, text=True, timeout=120
    )
    assert process.returncode == 0, process.stderr
    return process.stdout.strip()


@pytest.mark.parametrize("package", ["torch", "tilelang", "tvm", "triton", "diskcache", "pydantic", "typer", "rich"])
def test_import_loads_no_dependency(package):
    assert run(f"import sys, qla_jit; print({package!r} in sys.modules)") == "False"


def test_import_writes_no_file_and_runs_no_process():
    # Events of the audit hook: https://docs.python.org/3/library/audit_events.html
    code = """
        import os, sys

        WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_TRUNC
        CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.utime",
                   "os.chmod", "os.chown", "tempfile.mkstemp", "tempfile.mkdtemp", "subprocess.Popen", "os.system",
                   "os.exec", "os.fork", "os.posix_spawn", "socket.connect", "sqlite3.connect", "ctypes.dlopen"}

        def watch(event, arguments):
            if event in CHANGES or (event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITES):
                print(event, arguments)

        sys.addaudithook(watch)
        import qla_jit
        qla_jit.QLAError
    """
    assert run(code) == ""


def test_the_audit_hook_would_have_noticed(tmp_path):
    code = f"""
        import os, sys
        sys.addaudithook(lambda event, arguments: event == "open" and arguments[2] & os.O_WRONLY and print(event))
        open({str(tmp_path / "file")!r}, "w").close()
    """
    assert run(code) == "open"


def test_a_result_on_the_cpu_needs_neither_tilelang_nor_a_gpu():
    code = """
        import sys, torch, qla_jit
        q = k = torch.ones(1, 3, 1, 4)
        o, _ = qla_jit.chunk_gated_delta_rule(q, k, torch.ones(1, 3, 2, 4), torch.zeros(1, 3, 2), torch.ones(1, 3, 2))
        print(tuple(o.shape), "tilelang" in sys.modules, torch.cuda.is_initialized())
    """
    assert run(code) == "(1, 3, 2, 4) False False"
