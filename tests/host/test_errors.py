"""Is the error tree what its docstring draws, and is each error caught where users catch it?"""

import inspect
import re
from pathlib import Path

import pytest

from qla_jit import errors
from qla_jit.kernel_templates.contract import Rejection

CLASSES = {name: cls for name, cls in vars(errors).items() if inspect.isclass(cls) and cls.__module__ == errors.__name__}


def test_the_drawn_tree_is_the_class_tree():
    drawn, parents = {}, ["QLAError"]
    for line in errors.__doc__.splitlines():
        match = re.match(r"    ([│ ]*)[├└]── (\w+)(?: \((\w+)\))?", line)
        if match:
            depth = 1 + len(match[1]) // 4
            parents[depth:] = [match[2]]
            drawn[match[2]] = {parents[depth - 1], match[3]} - {None}
    assert drawn == {name: {base.__name__ for base in cls.__bases__} for name, cls in CLASSES.items() if name != "QLAError"}


@pytest.mark.parametrize(
    ("raised", "caught"),
    [
        (errors.ShapeError, ValueError),
        (errors.DtypeError, ValueError),
        (errors.DeviceError, ValueError),
        (errors.UnsupportedError, NotImplementedError),
    ],
    ids=lambda cls: cls.__name__,
)
def test_code_that_catches_the_builtin_error_catches_ours(raised, caught):
    with pytest.raises(caught, match="q has 3 dimensions"):
        raise raised("q has 3 dimensions")


def test_an_invalid_config_carries_the_rejection():
    rejection = Rejection("block_v=48 does not divide V=128")
    assert errors.InvalidConfigError("state_scan", rejection=rejection).rejection is rejection


def test_a_compile_error_shows_where_its_log_is_even_when_the_log_was_moved():
    error = errors.CompileError("tiny_scale did not compile", key="ab12", log_path=Path("/tmp/build/compile.log"))
    error.log_path = Path("/cache/logs/tiny.log")
    assert error.key == "ab12"
    assert str(error) == "tiny_scale did not compile\nThe whole log: /cache/logs/tiny.log"


def test_a_compile_error_without_a_log_is_its_message():
    assert str(errors.CompileError("killed")) == "killed"
