"""Run qla-tune in the process of a test."""

import json
import sys

import pytest

from qla_jit import cli


@pytest.fixture
def run(capsys, monkeypatch):
    """Run qla-tune; its exit code and what it prints, decoded where it is asked for JSON."""

    def run(*words, code=0):
        monkeypatch.setattr(sys, "argv", ["qla-tune", *map(str, words)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        assert ended.value.code == code, err
        return json.loads(out) if "--json" in words and code not in (2, 5, 6, 8) else out + err

    return run
