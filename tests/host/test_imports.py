from __future__ import annotations

import gc
import subprocess
import sys

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
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["True", "True"]
