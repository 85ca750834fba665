from __future__ import annotations

import gc
import subprocess
import sys
import textwrap

import pytest

from qla_jit import imports


@pytest.fixture(autouse=True)
def forgotten() -> None:
    imports.imported.cache_clear()


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_rests_during_an_import_and_is_as_it_was_behind_it(monkeypatch: pytest.MonkeyPatch, enabled: bool) -> None:
    seen = []
    monkeypatch.setattr(imports, "import_module", lambda name: seen.append((name, gc.isenabled())) or sys)
    was = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        assert imports.imported("errors") is sys
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if was else gc.disable)()
    assert seen == [("qla_jit.errors", False)]


def test_an_import_that_fails_leaves_the_collector_on() -> None:
    gc.enable()
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        imports.imported("no_such_module")
    assert gc.isenabled()


def test_names_of_the_package_are_imported_that_way() -> None:
    code = "import gc, sys, qla_jit; qla_jit.chunk_gated_delta_rule; print(gc.isenabled(), 'qla_jit.imports' in sys.modules)"
    assert fresh(code) == ["True", "True"]


def test_a_module_for_later_is_imported_with_its_first_attribute() -> None:
    code = """
        import sys, qla_jit
        from qla_jit.imports import Later
        errors = Later("errors")
        print("qla_jit.errors" in sys.modules)
        print(errors.QLAError.__name__, "qla_jit.errors" in sys.modules)
    """
    assert fresh(code) == ["False", "QLAError", "True"]


def test_a_forward_imports_no_template_of_the_backward() -> None:
    code = """
        import sys, torch
        from qla_jit.kernel_templates.arch import SM90A
        from qla_jit.ops import plan
        from qla_jit.tuning_records import Problem
        from qla_jit.workload import facts_of
        problem = Problem(H=2, HV=4, K=128, V=128, dtype="bfloat16", chunk_size=64, varlen=True)
        facts = facts_of(problem, torch.device("cuda", 0))
        templates = lambda: {name.removeprefix("qla_jit.kernel_templates.") for name in sys.modules if "kernel_templates" in name}
        late = {"register_gradient_scan", "warpgroup_gradients", "chunk_gradients", "state_gradient_scan"}
        plan.strategies_for(facts, SM90A)
        print(*sorted(late & templates()))
        plan.backward_strategies_for(facts, SM90A)
        print(*sorted(late & templates()))
    """
    found = fresh(code)
    assert found == sorted(["register_gradient_scan", "warpgroup_gradients", "chunk_gradients", "state_gradient_scan"])


def fresh(code: str) -> list[str]:
    """The words that a new process prints."""
    found = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    return found.stdout.split()
