# Everything works from a fresh clone: each target makes the environment that it needs.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip --quiet --disable-pip-version-check install --constraint constraints.txt
MODEL ?= examples/configs/gpt-oss-120b
SHELL := /bin/bash

.DEFAULT_GOAL := help
.PHONY: help demo test lint types unit docs bench fix clean

help:  ## show the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: .venv/core  ## install, and explain a real model on AMD and on Hopper
	@$(BIN)/attnreg explain --platform rocm --arch gfx942 --model $(MODEL)
	@$(BIN)/attnreg explain --platform cuda --arch sm90 --model $(MODEL)

test: lint types unit  ## lint, types, tests: what CI runs

lint: .venv/dev  ## ruff, lint and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/dev  ## mypy, strict
	$(BIN)/mypy

unit: .venv/dev  ## the test suite
	$(BIN)/pytest --numprocesses 2

docs: .venv/dev  ## write the generated docs, schemas and picture
	$(BIN)/python tools/gen_docs.py

bench: .venv/dev  ## measure import, cold explain and select; write benchmarks/results
	$(BIN)/python benchmarks/selection.py --record

fix: .venv/dev  ## format, and mend what the linter can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:  ## remove the environment and caches
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist

.venv/core: pyproject.toml constraints.txt
	test -x $(BIN)/pip || $(PYTHON) -m venv .venv
	$(PIP) --editable .
	touch $@

# torch first: what follows finds it installed and pulls no other build
.venv/dev: .venv/core
	$(PIP) torch==2.13.0
	$(PIP) --no-deps triton==3.7.1
	$(PIP) --editable '.[dev]'
	touch $@
