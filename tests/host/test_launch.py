"""Does a loaded kernel launch what was built? Without a GPU, the check of its own arguments proves that it is loaded."""

import gc
import shutil
import subprocess
import sys

import pytest
import torch
from tiny_template import built, needs_nvcc

from qla_jit.launch import load

pytestmark = needs_nvcc
x = torch.ones(5)


@pytest.fixture
def build(tmp_path):
    return shutil.copytree(built(), tmp_path / "build")


def test_a_kernel_knows_its_name_arguments_and_origin(build):
    kernel = load(build, digest="ab12")
    assert (kernel.name, kernel.arguments, kernel.digest, kernel.directory) == ("tiny_scale", ("x", "y", "factor"), "ab12", build)


@pytest.mark.parametrize("call", [lambda kernel: kernel, lambda kernel: kernel.launch], ids=["kernel()", "kernel.launch()"])
def test_both_ways_to_launch_reach_the_compiled_argument_checks(build, call):
    kernel = load(build, digest="ab12")
    with pytest.raises(RuntimeError, match="tiny_scale input x device_type mismatch, expected cuda"):
        call(kernel)(x, x, 2.0)
    with pytest.raises(RuntimeError, match="num_args should be 3"):
        call(kernel)(x, x)
    with pytest.raises(RuntimeError, match=r"tiny_scale\.x is expected to have non-NULL pointer"):
        call(kernel)(None, x, 2.0)


def test_a_kernel_outlives_its_files(build):
    kernel = load(build, digest="ab12")
    shutil.rmtree(build)
    gc.collect()
    with pytest.raises(RuntimeError, match="device_type mismatch"):
        kernel(x, x, 2.0)


@pytest.mark.parametrize("name", ["build.json", "executable.so"])
def test_a_missing_file_is_an_error_that_the_cache_can_handle(build, name):
    (build / name).unlink()
    with pytest.raises((OSError, RuntimeError), match=name):
        load(build, digest="ab12")


def test_an_executable_of_another_machine_is_an_error_that_the_cache_can_handle(build):
    executable = bytearray((build / "executable.so").read_bytes())
    executable[18:20] = (183).to_bytes(2, "little")                      # e_machine of the ELF header: aarch64
    (build / "executable.so").write_bytes(executable)
    with pytest.raises(RuntimeError, match=r"executable\.so"):
        load(build, digest="ab12")


def test_loading_imports_neither_tilelang_nor_tvm(build):
    code = f"""
import sys
from pathlib import Path
from qla_jit.launch import load
load(Path({str(build)!r}), digest="ab12")
assert not {{"tilelang", "tvm"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
