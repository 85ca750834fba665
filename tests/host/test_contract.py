"""Do the budget checks of kernel_templates/contract.py count right, and does a template's hash follow its text?"""

import importlib
import shutil
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from tiny_template import TEMPLATE, Config, Problem

from qla_jit import kernel_templates
from qla_jit.kernel_templates.arch import ARCHES, SM89, SM90A, arch_for_capability
from qla_jit.kernel_templates.contract import (
    Buffer,
    Role,
    Template,
    block_divides_values,
    knob,
    pipeline_has_bulk_copies,
    stages_are_aligned,
    warps_have_work,
)


@dataclass(frozen=True)
class Tiles:
    rows: int = knob(64, 128, why="work per block")
    stages: int = knob(1, 2, 3, why="copies in flight")


def template_of(*, buffers=(), roles=(), arches=("sm_90a", "sm_89"), constraints=()):
    return Template(
        name="tiles", problem=Problem, config=Tiles, arches=arches, arguments=lambda p: (), buffers=lambda p, c: buffers,
        roles=lambda p, c: roles, default_config=lambda p, arch: Tiles(64, 1), build=lambda p, c: None, constraints=constraints,
    )


def reason(template, arch=SM90A, config=None):
    rejection = template.rejection(Problem(), Tiles(64, 1) if config is None else config, arch)
    return None if rejection is None else str(rejection)


@pytest.mark.parametrize(
    ("buffer", "expected"),
    [
        (Buffer("k", (64, 128), "bfloat16"), 64 * 128 * 2),
        (Buffer("state", (128, 64), "float32"), 128 * 64 * 4),
        (Buffer("v", (64, 128), "float16", stages=3), 3 * 64 * 128 * 2),
        (Buffer("starts", (65,), "int64"), 65 * 8),
        (Buffer("flag", (), "int32"), 4),
    ],
    ids=lambda value: value.name if isinstance(value, Buffer) else f"{value}B",
)
def test_buffer_bytes(buffer, expected):
    assert buffer.bytes == expected


# SM90A allows 232,448 B of shared memory a block, SM89 101,376 B: at the limit, and one byte-sized row above it.
@pytest.mark.parametrize(
    ("elements", "arch", "fits"),
    [(232_448 // 4, SM90A, True), (232_448 // 4 + 1, SM90A, False), (101_376 // 4, SM89, True), (101_376 // 4 + 1, SM89, False)],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_shared_memory_budget_is_the_sum_of_the_buffers(elements, arch, fits):
    halves = (Buffer("a", (elements // 2,), "float32"), Buffer("b", (elements - elements // 2,), "float32"))
    expected = None if fits else (
        f"needs {elements * 4:,} B of shared memory; {arch.name} allows {arch.shared_bytes_per_block:,} B a block"
    )
    assert reason(template_of(buffers=halves), arch) == expected


@pytest.mark.parametrize(
    ("roles", "expected"),
    [
        ((Role("load", 128, 24), Role("math", 384, 160)), None),                                    # 64,512 of 65,536
        ((Role("load", 128, 32), Role("math", 384, 160)), None),                                    # exactly 65,536
        ((Role("load", 128, 40), Role("math", 384, 160)), "needs 66,560 registers a block; sm_90a has 65,536"),
        ((Role("math", 128, 256),), "role math needs 256 registers a thread; sm_90a allows 255"),
        ((Role("a", 512, 32), Role("b", 512, 32)), None),                                           # exactly 1,024 threads
        ((Role("a", 512, 32), Role("b", 544, 32)), "needs 1056 threads a block; sm_90a allows 1024"),
    ],
    ids=["64512-regs", "65536-regs", "66560-regs", "256-regs-a-thread", "1024-threads", "1056-threads"],
)
def test_register_and_thread_budgets_are_summed_over_the_roles(roles, expected):
    assert reason(template_of(roles=roles)) == expected


def test_another_arch_is_rejected_before_any_constraint_is_asked():
    def never(problem, config, arch):
        raise AssertionError("asked")

    assert reason(template_of(arches=("sm_90a", "sm_100a"), constraints=(never,)), SM89) == (
        "tiles is not written for sm_89; it is for sm_90a, sm_100a"
    )


def test_the_first_failing_constraint_gives_the_reason_and_comes_before_the_budgets():
    template = replace(TEMPLATE, roles=lambda p, c: (Role("scale", 2048, 1),))
    assert str(template.rejection(Problem(), Config(threads=128, per_thread=4), SM90A)) == (
        "threads=128 x per_thread=4 is more than 256 elements a block"
    )


def test_configs_are_the_knob_grid_without_what_is_rejected():
    grid = {(threads, per_thread) for threads in (32, 64, 128) for per_thread in (1, 2, 4)} - {(128, 4)}
    found = [(config.threads, config.per_thread) for config in TEMPLATE.configs(Problem(), SM90A)]
    assert set(found) == grid
    assert len(found) == len(grid)


def test_the_first_allowed_config_is_taken_and_else_the_last_whose_rejection_says_why():
    too_wide, fits, also_fits = (Config(threads, 4) for threads in (128, 64, 32))
    assert TEMPLATE.first_allowed(Problem(), SM90A, iter([too_wide, fits, also_fits])) is fits
    assert TEMPLATE.first_allowed(Problem(), SM90A, iter([too_wide])) is too_wide


@dataclass(frozen=True)
class Sizes:
    C: int = 64
    V: int = 128


@dataclass(frozen=True)
class Blocks:
    block_v: int = 64
    threads: int = 128
    stages: int = 2


@pytest.mark.parametrize(
    ("constraint", "problem", "config", "arch", "expected"),
    [
        (block_divides_values, Sizes(V=192), Blocks(block_v=96), SM90A, None),
        (block_divides_values, Sizes(V=192), Blocks(block_v=128), SM90A, "block_v=128 does not divide V=192"),
        (warps_have_work, Sizes(C=16), Blocks(threads=64), SM90A, None),                            # two tiles for two warps
        (warps_have_work, Sizes(C=16), Blocks(threads=128), SM90A, "4 warps share the 2 tiles of 16 x 8 of Q K^T"),
        (pipeline_has_bulk_copies, Sizes(), Blocks(stages=1), SM90A, None),
        (pipeline_has_bulk_copies, Sizes(), Blocks(stages=0), SM89, None),
        (
            pipeline_has_bulk_copies, Sizes(), Blocks(stages=1), SM89,
            "stages=1 needs bulk copies, which sm_89 lacks: its wait counts are not constants",
        ),
        (stages_are_aligned, Sizes(C=32), Blocks(stages=2), SM90A, None),
        (stages_are_aligned, Sizes(C=16), Blocks(stages=1), SM90A, None),
        (
            stages_are_aligned, Sizes(C=16), Blocks(stages=2), SM90A,
            "stage 1 of the gates would begin at byte 64; a bulk copy begins at multiples of 128",
        ),
    ],
    ids=lambda value: getattr(value, "__name__", None) or getattr(value, "name", None) or str(value),
)  # fmt: skip
def test_constraints_that_several_templates_declare(constraint, problem, config, arch, expected):
    rejection = constraint(problem, config, arch)
    assert (None if rejection is None else str(rejection)) == expected


def test_a_knob_has_no_default_because_the_default_depends_on_the_problem():
    with pytest.raises(TypeError, match="stages"):
        Tiles(rows=64)


@pytest.mark.parametrize("arch", ARCHES.values(), ids=lambda arch: arch.name)
def test_an_arch_is_found_by_its_capability_and_names_its_target(arch):
    assert arch_for_capability(*arch.compute_capability) is arch
    assert arch.target == {"kind": "cuda", "arch": arch.name}


@pytest.mark.parametrize("capability", [(7, 0), (8, 6), (9, 1)], ids=str)
def test_a_capability_without_templates_has_no_arch(capability):
    assert arch_for_capability(*capability) is None


@pytest.fixture
def copied_templates(tmp_path, monkeypatch):
    """A copy of kernel_templates under another name, free to be edited."""
    shutil.copytree(Path(kernel_templates.__file__).parent, tmp_path / "templates_copy")
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path / "templates_copy"
    for name in [name for name in sys.modules if name.startswith("templates_copy")]:
        del sys.modules[name]


def test_the_source_hash_reaches_what_a_macro_imports(copied_templates):
    template = importlib.import_module("templates_copy.register_state_forward").TEMPLATE
    original = template.source_sha256()
    segments = copied_templates / "macros" / "segments.py"  # imported by macros/register_roles.py, not by the template
    segments.write_text(segments.read_text() + "\n# edited\n")
    assert template.source_sha256() != original


def test_the_source_hash_follows_the_template_and_what_it_shares_and_nothing_else(copied_templates):
    template = importlib.import_module("templates_copy.gate_cumsum").TEMPLATE
    original = template.source_sha256()
    assert importlib.import_module("qla_jit.kernel_templates.gate_cumsum").TEMPLATE.source_sha256() == original
    decides_the_code = {
        "gate_cumsum.py": True, "language.py": True, "macros/gates.py": True, "macros/sequences.py": True,
        "macros/register_tiles.py": False, "triangular_solve.py": False, "arch.py": False,
    }
    for name, decides in decides_the_code.items():
        path = copied_templates / name
        text = path.read_text()
        path.write_text(text + "\n# edited\n")
        assert (template.source_sha256() != original) == decides, name
        path.write_text(text)
    assert template.source_sha256() == original
