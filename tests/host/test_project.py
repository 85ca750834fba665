"""Does the documentation agree with the code, and does the project install as it says?"""

import inspect
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

import qla_jit
from qla_jit.settings import VARIABLES

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])


def section(title):
    """The text of one "## title" of the README."""
    return README.split(f"\n## {title}\n")[1].split("\n## ")[0]


def table(text):
    """The rows of the first Markdown table, as cells, without its head."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def names(cell):
    return re.findall(r"`([\w.]+)`", cell)


def test_the_argument_table_lists_the_signature_in_order():
    documented = [name for row in table(section("Arguments")) for name in names(row[0])]
    assert documented == list(inspect.signature(qla_jit.chunk_gated_delta_rule).parameters)


def test_the_settings_table_is_what_the_settings_say_of_themselves():
    documented = [tuple(row) for row in table(section("Settings"))]
    assert documented == [(f"`{v.name}`", v.meaning, v.default) for v in VARIABLES]


def test_the_supported_head_dims_and_gpus_are_those_of_the_code():
    from qla_jit.kernel_templates.arch import ARCHES
    from qla_jit.ops.plan import KEY_DIMS, VALUE_DIMS

    documented = {row[0]: row[1] for row in table(section("Supported"))}
    assert documented["K"] == ", ".join(map(str, KEY_DIMS))
    assert documented["V"] == ", ".join(map(str, VALUE_DIMS))
    assert set(names(documented["GPUs"])) == set(ARCHES)


def test_the_quick_start_runs():
    code = re.search(r"```python\n(.*?)```", README, re.DOTALL)[1]
    shapes = "B, T, H, HV, K, V = 1, 4096, 16, 48, 128, 128"
    assert shapes in code
    if not torch.cuda.is_available():
        code = code.replace(shapes, "B, T, H, HV, K, V = 1, 96, 2, 6, 64, 64")      # the same lines, fewer numbers
    results = {}
    exec(code, results)
    assert results["o"].shape == results["v"].shape
    assert results["final_state"].isfinite().all()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page):
    targets = [target for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()) if "://" not in target]
    missing = [target for target in targets if not (page.parent / target).exists()]
    assert missing == []


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "docs/design.md"])
def test_files_named_in_code_style_exist(page):
    folders = "qla_jit|kernel_templates|tuning_db|tests|benchmarks|examples|docs"
    paths = re.findall(rf"`((?:{folders})/[\w./]*)`", (ROOT / page).read_text())
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_the_documented_numbers_are_the_measured_ones():
    check = subprocess.run(
        [sys.executable, "benchmarks/fill_numbers.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert check.returncode == 0, check.stdout + check.stderr


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize(
    ("target", "runs"),
    [("demo", "examples/demo.py"), ("test", "-m pytest"), ("check", "-m ruff"), ("bench", "forward.py"), ("wheel", "-m build")],
    ids=lambda value: value.split()[0],
)
def test_make_runs_what_the_readme_says_in_an_environment_that_it_makes_first(target, runs, tmp_path):
    plan = subprocess.run(
        ["make", "--dry-run", target, f"VENV={tmp_path}/venv"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert plan.index("-m venv") < plan.index("install") < plan.index(runs)


def test_the_ci_script_is_valid_and_executable():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", str(script)], check=True)


def test_the_wheel_holds_one_package_and_all_of_it(tmp_path):
    # Built as an installer without a network would: the environment's own setuptools, no isolation.
    pytest.importorskip("setuptools", minversion="77")
    pytest.importorskip("build")
    source = tmp_path / "source"
    for name in ("qla_jit", "kernel_templates", "tuning_db"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(source)],
        capture_output=True, check=True, timeout=300,
    )
    (wheel,) = tmp_path.glob("*.whl")
    packed = set(zipfile.ZipFile(wheel).namelist())
    metadata = {name for name in packed if ".dist-info/" in name}
    installs_in = {"qla_jit": "qla_jit", "kernel_templates": "qla_jit/kernel_templates", "tuning_db": "qla_jit/tuning_db"}
    expected = {
        f"{package}/{path.relative_to(source / folder).as_posix()}"
        for folder, package in installs_in.items()
        for path in (source / folder).rglob("*")
        if path.suffix in (".py", ".json") or path.name == "py.typed"
    }
    assert packed - metadata == expected
    assert any(name.endswith("LICENSE") for name in metadata)
