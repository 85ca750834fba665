# The project's commands. `make demo` and `make test` do everything on a fresh machine: environment, installation, run.
VENV   ?= .venv
PYTHON ?= python3
PY     := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed

.PHONY: help venv demo test check bench plot wheel clean

help:
	@echo 'make demo    one Qwen3.5 layer: compile, run, check against float64'
	@echo 'make test    the tests; those that need a GPU are skipped without one'
	@echo 'make check   lint, and whether the documentation agrees with the code and the measured numbers'
	@echo 'make bench   time a cold start, and on a GPU both passes beside other libraries'
	@echo 'make plot    draw the forward numbers and write them into the documentation'
	@echo 'make wheel   build dist/qla_jit-*.whl'

venv: $(INSTALLED)

# A torch of 2.8 or later that the environment holds already is kept: install a CPU build first to avoid the CUDA one.
$(INSTALLED): pyproject.toml
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check 'setuptools>=77' wheel
	$(PY) -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $@

demo: venv
	$(PY) examples/demo.py

test: venv
	$(PY) -m pytest

check: venv
	$(PY) -m ruff check .
	$(PY) benchmarks/fill_numbers.py --check
	$(PY) -m pytest -q tests/host/test_project.py

bench: venv
	$(PY) benchmarks/cold_start.py
	$(PY) benchmarks/forward.py
	$(PY) benchmarks/backward.py

plot: venv
	$(PY) -m pip install --quiet --disable-pip-version-check 'matplotlib>=3.8'
	$(PY) benchmarks/plot_forward.py
	$(PY) benchmarks/fill_numbers.py

wheel: venv
	$(PY) -m build --wheel --no-isolation

clean:
	rm -rf build dist *.egg-info .pytest_cache .hypothesis .ruff_cache
