# `make serve` and `make test` are all a newcomer needs; `make help` lists the rest.
PYTHON ?= python3
PORT ?= 8000
MODEL ?= smollm2-135m
VENV := .venv
BIN := $(VENV)/bin
NATIVE := CMakeLists.txt $(wildcard native/*) $(wildcard native/isa/*)
CXX_FILES := $(wildcard native/*.[ch]pp) $(wildcard native/isa/*.[ch]pp)
PIP := $(BIN)/python -m pip --disable-pip-version-check install -q

.PHONY: help demo serve test test-slow test-parity check format bench figures clean
.DEFAULT_GOAL := help

help: ## list the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "legato needs Python 3.11 or newer; try: make PYTHON=python3.12 serve")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.tools: pyproject.toml | $(BIN)/python
	$(PIP) "scikit-build-core>=0.11" "nanobind>=2.4" "cmake>=3.26" ninja
	@touch $@

$(VENV)/.installed: $(NATIVE) $(VENV)/.tools
	@echo "building the kernels and installing legato (about a minute) ..."
	$(PIP) --no-build-isolation -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.installed
	$(PIP) --no-build-isolation -e ".[dev]"
	@touch $@

demo: $(VENV)/.installed ## build, fetch the default model, show what chunks of a prompt are for (a minute)
	@exec $(BIN)/legato demo $(MODEL)

serve: $(VENV)/.installed ## build, fetch the default model, serve it on 127.0.0.1:8000 (PORT=, MODEL=)
	@exec $(BIN)/legato serve $(MODEL) --port $(PORT)

test: $(VENV)/.dev ## the whole test suite, on up to four cores
	@exec $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile

test-slow: $(VENV)/.dev ## the tests that take minutes
	@exec $(BIN)/python -m pytest -m slow --timeout 3600

test-parity: $(VENV)/.dev ## live comparison with transformers, in an environment of its own
	@exec tests/parity/run.sh

check: $(VENV)/.dev ## lint, format, types, layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/clang-format --dry-run --Werror $(CXX_FILES)

format: $(VENV)/.dev ## format everything
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_FILES)

bench: $(VENV)/.dev ## kernels and engine on this machine; with peers: benchmarks/README.md
	$(BIN)/python benchmarks/run.py

figures: $(VENV)/.dev ## draw the figures of the documents from docs/data
	$(BIN)/python docs/figures.py

clean: ## remove the environment and the build
	rm -rf $(VENV) build
