"""Does the cold-start benchmark keep its books: what it runs, what it refuses to call a load, and what it writes down?"""

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import records
import torch
from entries import put
from scripts import ROOT, script
from tiny_template import built, needs_nvcc

from qla_jit import bundle_file, kernel_cache, kernel_store, record_store
from qla_jit.compiler import ARTEFACTS

cold_start, fill_numbers, results = map(script, ("cold_start", "fill_numbers", "results"))

STAGE = {
    "import_seconds": 0.5, "compiles": 0, "compile_seconds": 0.0, "disk_hits": 6, "load_seconds": 0.05,
    "first_call_seconds": None,
}
LOADED = {"import_seconds": 0.5, "seconds": 0.06, "files": 10}


@pytest.fixture
def stages(monkeypatch):
    """Stands for the fresh processes: what each was asked, with its environment, and what it answers."""
    asked = []

    def run_stage(given, stage, environment):
        asked.append((stage, dict(environment), list(given)))
        answer = LOADED if stage.startswith("load") else STAGE
        return dict(answer, **({"compiles": 4} if stage == "first_call" and len(asked) == 1 else {}))

    monkeypatch.setattr(cold_start, "run_stage", run_stage)
    return asked


@pytest.fixture
def packed(tmp_path):
    put(tmp_path / "built")
    bundle_file.pack(tmp_path / "built", tmp_path / "packed.tar.gz")
    return tmp_path / "packed.tar.gz"


def test_a_part_that_is_measured_leaves_the_others_in_the_file(stages, packed, tmp_path, capsys):
    out = tmp_path / "cold_start.json"
    cold_start.main(["--parts", "first_call", "--out", str(out), "--commit", "abc"])
    cold_start.main(["--parts", "warm_load", "shipped", "--out", str(out), "--commit", "def", "--bundle", str(packed)])
    document = results.load(out)
    assert (document["commit"], document["warm_load"]["commit"], document["shipped"]["commit"]) == ("abc", "def", "def")
    (row,) = document["rows"]
    assert (row["cold"]["compiles"], row["warm"]["compiles"]) == (4, 0)
    assert document["warm_load"]["tilelang"] == LOADED
    assert str(out) in capsys.readouterr().out


def test_a_second_process_that_compiles_is_no_warm_start(monkeypatch):
    monkeypatch.setattr(cold_start, "run_stage", lambda *_: dict(STAGE, compiles=4))
    with pytest.raises(AssertionError, match="the second process compiled again"):
        cold_start.measure_first_call([], cold_start.parse([]))


def test_a_load_that_writes_into_the_cache_is_none(stages, monkeypatch):
    def run_stage(given, stage, environment):
        if stage == "load":
            place = Path(environment["QLA_JIT_CACHE_DIR"])
            place.mkdir(exist_ok=True)
            (place / str(len(list(place.iterdir())))).touch()
        return LOADED

    monkeypatch.setattr(cold_start, "run_stage", run_stage)
    with pytest.raises(AssertionError, match="qla_jit compiled again"):
        cold_start.measure_warm_load([], cold_start.parse([]))


def test_every_kernel_of_the_list_is_compiled_by_one_of_the_processes_that_fill_tilelangs_cache(stages):
    cold_start.measure_warm_load([], cold_start.parse(["--kernels", "5"]))
    shares = [tuple(map(int, given[given.index("--share") + 1 :])) for stage, _, given in stages if "--share" in given]
    requests = list(range(5))
    assert sorted(request for share, of in shares for request in requests[share::of]) == requests
    others = [stage for stage, _, given in stages if "--share" not in given]
    assert others == ["load", "load", "load", "load_tilelang", "load_tilelang"]


def test_a_shipped_bundle_is_used_without_nvcc_and_without_a_cache(stages, packed):
    measured = cold_start.measure_shipped([], cold_start.parse(["--bundle", str(packed)]))
    assert [stage for stage, _, _ in stages] == ["shipped_forward", "shipped_training"]
    environment = stages[0][1]
    assert environment["QLA_JIT_MODE"] == "require"
    assert (measured["built"], measured["kernels"], measured["arch"]) == ("elsewhere", 1, ["sm_90a"])
    assert measured["packed_bytes"] == packed.stat().st_size
    assert measured["bytes"] > measured["packed_bytes"]
    found = subprocess.run(
        [sys.executable, "-c", "from qla_jit import compiler; print(compiler.find_nvcc())"],
        env={**os.environ, **environment}, capture_output=True, text=True, check=True,
    )
    assert found.stdout == "None\n"


def test_the_command_for_a_bundle_builds_the_kernels_of_the_calls_that_are_timed(run, monkeypatch, tmp_path):
    from qla_jit import bundle

    built = []

    def build(requests, directory, *, on_kernel):
        built.extend(requests)
        return bundle.Built(len(requests), 0, 0.0, ())

    monkeypatch.setattr(bundle, "build", build)
    monkeypatch.setenv("QLA_JIT_CACHE_DIR", str(tmp_path))
    problem = records.problem(H=8, HV=24, cu_seqlens_dtype=torch.int32)
    record_store.save_user_records([records.record(problem=problem)])    # with a config that is no default
    command = re.search(r"qla-tune (build .*?) && qla-tune pack", cold_start.__doc__, re.DOTALL)[1]
    run(*command.replace("\\\n", "").replace("DIR", str(tmp_path / "out")).split())
    defaults = set(cold_start.kernels_of_calls(cold_start.parse([]), backward=True))
    monkeypatch.setattr(cold_start, "hardware", lambda: [records.H200])
    assert defaults < set(cold_start.kernels_of_calls(cold_start.parse([]), backward=True)) == set(built)


@pytest.mark.parametrize("place", ["QLA_JIT_BUNDLE_PATH", "QLA_JIT_CACHE_DIR"])
def test_a_process_that_writes_is_found_out(packed, monkeypatch, place):
    def run_stage(given, stage, environment):
        directory = Path(environment[place])
        directory.chmod(0o755)
        (directory / "written").touch()
        return STAGE

    monkeypatch.setattr(cold_start, "run_stage", run_stage)
    with pytest.raises(AssertionError, match="something was written"):
        cold_start.measure_shipped([], cold_start.parse(["--bundle", str(packed)]))


def test_files_are_counted_once_whoever_opens_them_and_only_below_the_directory(tmp_path):
    (tmp_path / "cache").mkdir()
    for name in ("a", "b", "c"):
        (tmp_path / "cache" / name).write_bytes(b"x" * 4096)
    (tmp_path / "other").write_text("")
    code = f"""
        import mmap, os, sys
        from pathlib import Path
        sys.path.insert(0, {str(ROOT / "benchmarks")!r})
        import cold_start
        place = Path({str(tmp_path)!r})
        early = open(place / "cache" / "b", "rb")                       # before counting began: counts if it is mapped
        files = cold_start.files_touched(place / "cache")
        (place / "cache" / "a").read_bytes()
        os.close(os.open(place / "cache" / "a", os.O_RDONLY))
        (place / "other").read_bytes()
        print(files())
        mapped = mmap.mmap(early.fileno(), 0, prot=mmap.PROT_READ)
        print(files())
    """
    ran = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["1", "2"]


def test_the_tables_of_the_documentation_show_what_was_measured_and_what_was_not():
    book = {"gpu": "NVIDIA H200", "versions": {"torch": "2.13.0"}, "commit": "abc", "date": "2026-12-01T10:00Z", "rows": []}
    assert fill_numbers.shipped_table(book) == fill_numbers.warm_load_table(book) == "Not measured yet.\n"
    book["warm_load"] = {
        "commit": "def", "date": "2026-12-02T10:00Z", "arch": "sm_90a", "kernels": 20, "qla_jit": LOADED, "tilelang": LOADED,
    }
    assert "| qla_jit | 0.060 | 10 | 0.50 |" in fill_numbers.warm_load_table(book)
    assert "20 kernels for sm_90a. NVIDIA H200, 2026-12-02, commit def;" in fill_numbers.warm_load_table(book)
    book["shipped"] = {
        "commit": "def", "date": "2026-12-02T10:00Z", "built": "elsewhere", "arch": ["sm_90a"], "kernels": 9, "bytes": 12_345_678,
        "packed_bytes": 2_000_000, "forward": dict(STAGE, first_call_seconds=0.123), "training": STAGE,
    }
    table = fill_numbers.shipped_table(book)
    assert "| forward | 6 | 0.050 | 0.12 | 0.50 |" in table
    assert "| training | 6 | 0.050 |  | 0.50 |" in table
    assert "built elsewhere: 9 kernels for sm_90a, 12.3 MB, packed 2.0 MB" in table


def test_stages_are_processes_of_their_own_with_json_on_their_last_line(monkeypatch):
    child = "import os, sys; print('noise'); print('{\"place\": \"' + os.environ['QLA_JIT_CACHE_DIR'] + '\"}')"
    monkeypatch.setattr(cold_start, "__file__", "-c")
    monkeypatch.setattr(sys, "executable", sys.executable)
    run = subprocess.run

    def run_code(command, **options):
        assert command[1:] == ["-c", "--kernels", "3", "--stage", "load"]
        return run([command[0], "-c", child], **options)

    monkeypatch.setattr(cold_start.subprocess, "run", run_code)
    assert cold_start.run_stage(["--kernels", "3"], "load", {"QLA_JIT_CACHE_DIR": "/x"}) == json.loads('{"place": "/x"}')


def test_no_stage_takes_kernels_or_records_that_the_shell_points_to(monkeypatch):
    for name in ("QLA_JIT_MODE", "QLA_JIT_BUNDLE_PATH", "QLA_JIT_DB_PATH", "QLA_JIT_JOBS"):
        monkeypatch.setenv(name, "of the shell")
    environments = []

    def run(command, *, env, **options):
        environments.append({name: value for name, value in env.items() if name.startswith("QLA_JIT_")})
        return subprocess.CompletedProcess(command, 0, stdout="{}")

    monkeypatch.setattr(cold_start.subprocess, "run", run)
    cold_start.run_stage([], "load", {"QLA_JIT_CACHE_DIR": "/cache"})
    cold_start.run_stage([], "shipped_forward", {"QLA_JIT_CACHE_DIR": "/cache", "QLA_JIT_MODE": "require"})
    assert environments == [
        {"QLA_JIT_CACHE_DIR": "/cache", "QLA_JIT_JOBS": "of the shell"},
        {"QLA_JIT_CACHE_DIR": "/cache", "QLA_JIT_JOBS": "of the shell", "QLA_JIT_MODE": "require"},
    ]


@needs_nvcc
def test_a_bundle_from_elsewhere_is_loaded_and_written_down_by_the_whole_script(tmp_path):
    """Every kernel is the same small one under another key: enough to be loaded, not to be launched."""
    requests = cold_start.kernels_of_calls(cold_start.parse([]), backward=True)
    for request in requests:
        key = kernel_cache.key_of(request)
        contents = {name: (built() / name).read_bytes() for name in ARTEFACTS}
        stamps = {name: kernel_store.FileStamp.of(data) for name, data in contents.items()}
        entry = kernel_store._entry(tmp_path / "built", key)
        entry.mkdir(parents=True)
        contents[kernel_store.MANIFEST] = kernel_store.Manifest(key=key, files=stamps).model_dump_json().encode()
        for name, data in contents.items():
            (entry / name).write_bytes(data)
    bundle_file.pack(tmp_path / "built", tmp_path / "packed.tar.gz")
    results.save(tmp_path / "cold_start.json", {"rows": ["of another run"]})
    subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "cold_start.py", "--parts", "shipped", "--bundle", tmp_path / "packed.tar.gz",
         "--out", tmp_path / "cold_start.json", "--commit", "abc"],
        check=True, env=os.environ | {"TMPDIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}, cwd=tmp_path, timeout=500,
    )
    document = results.load(tmp_path / "cold_start.json")
    shipped = document["shipped"]
    assert document["rows"] == ["of another run"]
    assert (shipped["commit"], shipped["built"], shipped["kernels"]) == ("abc", "elsewhere", len(requests))
    assert shipped["training"]["disk_hits"] == len(requests) > shipped["forward"]["disk_hits"] > 0
    for stage in (shipped["forward"], shipped["training"]):
        assert (stage["compiles"], stage["nvcc"], stage["imported_tilelang"]) == (0, None, False)
    assert not list(tmp_path.glob("qla_jit*")), "a directory is left"
