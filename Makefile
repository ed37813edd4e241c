# make demo         one quantised base and three adapters, served from this machine
#                   RANKS=2 processes, Q="your question", PORT=8000, ONCE=1 (stop after one batch)
# make demo-model   only make the demo's base; prints its directories, the 4-bit one last
# make test         lint, types, layers and the test-suite (what CI runs)
# make lint         only the static checks
# make venv         .venv with everything that these need
# make clean        remove what builds, tests and tools have left, but not .venv

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help demo demo-model test lint venv clean

PYTHON ?= $(shell for name in python3.13 python3.12 python3.11 python3; do \
	  "$$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	    && echo "$$name" && break; done)
BIN := .venv/bin
DEMO_STAMP := .venv/.installed-demo
TEST_STAMP := .venv/.installed-test
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt

RANKS ?=
Q ?=
PORT ?=
ONCE ?=
export RANKS Q PORT

help:
	@sed -n 's/^# \{0,1\}//p' Makefile | head -7

demo: $(DEMO_STAMP)
	@$(BIN)/python -m launch.demo $${RANKS:+--ranks "$$RANKS"} $${Q:+--question "$$Q"} \
	  $${PORT:+--port "$$PORT"} $(if $(filter 1,$(ONCE)),--once)

demo-model: $(DEMO_STAMP)
	@$(BIN)/python -m launch.demo.model

lint: $(TEST_STAMP)
	@echo "== ruff"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@echo "== mypy"
	@$(BIN)/mypy
	@echo "== import-linter"
	@$(BIN)/lint-imports

test: lint
	@echo "== pytest"
	@OMP_NUM_THREADS=1 GOMP_SPINCOUNT=0 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 \
	  $(BIN)/python -m pytest -m "not gpu and not multigpu"

venv: $(TEST_STAMP)

.venv/bin/python:
	@[ -n "$(PYTHON)" ] || { echo "error: no Python 3.11 or newer found (tried python3.13," \
	  "python3.12, python3.11, python3); set PYTHON=/path/to/python" >&2; exit 1; }
	@echo "== creating .venv with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv .venv

$(DEMO_STAMP): pyproject.toml constraints.txt | .venv/bin/python
	@echo "== installing the engine and what the demo needs (torch is large)"
	@$(PIP_INSTALL) -e '.[demo]'
	@touch $@

$(TEST_STAMP): pyproject.toml constraints.txt | .venv/bin/python
	@echo "== installing the engine, the demo and the test tools (torch is large)"
	@$(PIP_INSTALL) -e '.[demo,test]'
	@touch $(DEMO_STAMP) $@

clean:
	rm -rf build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis \
	  .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
