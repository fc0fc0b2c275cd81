# `make test` and `make demo` set up everything they need in .venv.

PYTHON ?= python3
BIN := .venv/bin

.PHONY: test lint demo docs clean

test: .venv/ready
	$(BIN)/python -m pytest

lint: .venv/ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

demo: .venv/ready
	$(BIN)/python benchmarks/demo.py

# The pages are made from text alone: what builds them has an environment of its own, without torch.
docs: .venv-docs/ready
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict

.venv-docs/ready: pyproject.toml
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet $$($(PYTHON) -c 'import tomllib; \
		print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])')
	touch $@

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,demo,mpi]'
	touch $@

clean:
	rm -rf .venv .venv-docs demo site
