# `make test` and `make demo` set up everything they need in .venv.

PYTHON ?= python3
BIN := .venv/bin

.PHONY: test lint demo clean

test: .venv/ready
	$(BIN)/python -m pytest

lint: .venv/ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

demo: .venv/ready
	$(BIN)/python benchmarks/demo.py

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,demo,mpi]'
	touch $@

clean:
	rm -rf .venv demo
