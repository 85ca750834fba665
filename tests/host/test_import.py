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


def test_the_operations_need_no_compiler_of_graphs_and_no_place_to_write():
    code = """
        import sys, tempfile, torch, qla_jit

        tempfile._candidate_tempdir_list = lambda: ["/nowhere"]
        tempfile.tempdir = None
        q = k = torch.ones(1, 3, 1, 4)
        for operation in (qla_jit.chunk_gated_delta_rule, qla_jit.fused_recurrent_gated_delta_rule):
            operation(q, k, torch.ones(1, 3, 2, 4), torch.zeros(1, 3, 2), torch.ones(1, 3, 2))
        print("torch._dynamo" in sys.modules)
    """
    assert run(code) == "False"


def test_a_compiled_model_breaks_its_graph_at_an_operation():
    code = """
        import torch, qla_jit
        from qla_jit.ops import fallback

        eager, graphs, forward = [], [], fallback.forward

        def watched(inputs, **options):
            eager.append(not torch.compiler.is_compiling())
            return forward(inputs, **options)

        def backend(module, inputs):
            graphs.append([node.target.__name__ for node in module.graph.nodes if node.op == "call_function"])
            return module

        def model(q):
            o, _ = qla_jit.chunk_gated_delta_rule(q * 2, q, q, torch.zeros(1, 3, 2), torch.ones(1, 3, 2))
            return o + 1

        fallback.forward = watched
        q = torch.rand(1, 3, 2, 4)
        expected = [model(q), model(2 * q)]
        compiled = torch.compile(model, backend=backend)
        assert all(torch.equal(compiled(n * q), o) for n, o in enumerate(expected, start=1))
        print(eager == [True] * 4, graphs)
    """
    assert run(code) == "True [['mul', 'zeros', 'ones'], ['add']]"
