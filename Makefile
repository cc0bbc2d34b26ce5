# Every target does its own set-up: a virtual environment in .venv, made once (see tools/setup.sh).
# PYTHON=/path/to/python3 chooses the Python; ARGS="..." is passed on, as in: make train ARGS="zero=3 steps=50"

VENV ?= .venv
CONFIG ?= configs/tiny_shakespeare.yaml
RUN := "$(VENV)/bin/python"
# Tests on all cores (ARGS="-n 0" for one process). Neighbours share compiled programs and baselines, so each process
# takes a part of the list as it is, and helps others when it is through.
PYTEST := $(RUN) -m pytest -n auto --dist worksteal

# Containers often set it. Tests start hundreds of processes, each of which would compile all of zerojax's sources.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup setup-test train test test-all test-programs test-gpu lint format types upgrade bench docs wheel clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' Makefile | \
	  while IFS='|' read -r target text; do printf '%-18s %s\n' "$$target" "$$text"; done

setup: ## make .venv and install zerojax into it
	@sh tools/setup.sh "$(VENV)"

setup-test: setup
	@sh tools/setup.sh "$(VENV)" test

train: setup ## train a small model on Shakespeare under ZeRO on 8 virtual CPU devices
	@$(RUN) -m zerojax train "$(CONFIG)" $(ARGS)

test: setup-test ## the quick tests, on all cores
	@$(PYTEST) $(ARGS)

test-all: ## all tests on the newest and the oldest Python, in hours; ARGS=--continue goes on after an interruption
	@python3 tools/test_all.py $(ARGS)

test-programs: ## compile for GPUs that this machine does not have (installs about 700 MB of compiler)
	@sh tools/setup.sh "$(VENV)" test,plan
	@$(PYTEST) -m gpu_programs $(ARGS)

test-gpu: setup-test ## what needs a GPU
	@$(RUN) -m pytest -m gpu $(ARGS)

lint: setup-test ## ruff: rules and format
	@$(RUN) -m ruff check .
	@$(RUN) -m ruff format --check .

format: setup-test ## let ruff fix what it can
	@$(RUN) -m ruff check --fix .
	@$(RUN) -m ruff format .

upgrade: ## write constraints.txt anew from the newest releases
	@sh tools/upgrade.sh

types: setup-test ## pyrefly
	@$(RUN) -m pyrefly check --python-interpreter-path $(RUN)

bench: setup-test ## the benchmarks of this machine (benchmarks/README.md)
	@$(RUN) -m benchmarks $(ARGS)

# The theme's makers announce the end of its life in May 2027, at every build unless this is set.
docs: export NO_MKDOCS_2_WARNING = 1
docs: ## the site of docs/ and the reference, in build/site/; a broken link or a missing docstring fails
	@sh tools/setup.sh "$(VENV)" docs
	@$(RUN) -m mkdocs build --strict $(ARGS)

wheel: setup-test ## dist/: wheel and sdist
	@$(RUN) -m build --no-isolation

clean: ## remove .venv, caches and build results; runs/ stays
	rm -rf "$(VENV)" .venv-* .venv*.lock build dist .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
