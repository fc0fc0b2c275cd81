# `make test` and `make demo` set up everything they need in .venv.

PYTHON ?= python3
BIN := .venv/bin

# Tests at once: one more than CI has cores, since many wait for what ranks do.
WORKERS ?= 3

# Tests start hundreds of processes, each of which would compile again what it imports.
unexport PYTHONDONTWRITEBYTECODE

# What is pure: decisions and geometry. Of these files the tests that start ranks, over Gloo or MPI, are left out.
WITHOUT_TORCH := tests/optimizer tests/test_imports.py tests/test_documentation.py
QUICK := $(WITHOUT_TORCH) $(addprefix tests/mucudnn/test_,geometry.py problem.py report.py settings.py) \
	$(addprefix tests/distconv/,$(addsuffix .py,settings/test_channels settings/test_partition settings/test_settings rules/test_edges \
	transfer/test_exchange transfer/test_redistribution))

.PHONY: test test-slow quick test-torch newest test-newest test-null test-frameworks test-scripts lint demo gpu docs dist clean

test: .venv/ready
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal -m "not slow"

# What `make test` leaves out (tests/slow_tests.py).
test-slow: .venv/ready
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal -m slow

quick: .venv/ready
	$(BIN)/python -m pytest -k 'not gloo and not mpi' $(QUICK)

# The tests under another torch, and maybe another Python, in an environment of its own:
#     make test-torch TORCH=2.12.1 PYTHON=python3.12 TESTS=tests/mucudnn
NEWEST := 2.14.1
TORCH ?= $(NEWEST)
TESTS ?=
OTHER := .venv-torch-$(TORCH)$(if $(filter-out python3,$(PYTHON)),-$(notdir $(PYTHON)))

test-torch: $(OTHER)/ready
	$(OTHER)/bin/python -m pytest --numprocesses $(WORKERS) --dist worksteal $(TESTS)

newest: .venv-torch-$(NEWEST)/ready

# What CI passes under the newest torch beside the pinned one: what is pure but uses torch, and files of each package.
test-newest:
	$(MAKE) test-torch TORCH=$(NEWEST) TESTS="-k 'test_training or not gloo and not mpi' \
		tests/test_private_names.py tests/mucudnn/test_shim.py \
		tests/distconv/model/test_training.py $(filter-out $(WITHOUT_TORCH),$(QUICK))"

.venv-torch-%/ready: pyproject.toml
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --no-compile --editable '.[dev,demo,mpi]' torch==$(firstword $(subst -, ,$*))
	touch $@

# The CUDA code where there is no GPU: torch's build for CUDA, 5.6 GB, on a card that gcc makes; not part of `make test`.
NULL_TESTS ?= tests/null tests/gpu

test-null: newest
	NULL_CARD_ORDER=1 $(PYTHON) tests/null_card/build.py .venv-torch-$(NEWEST)/bin/python -m pytest --timeout 1200 $(NULL_TESTS)

# Scripts of Lightning, accelerate and MONAI on many ranks; not part of `make test`.
test-frameworks: .venv-frameworks/ready
	.venv-frameworks/bin/python -m pytest tests/frameworks

# Scripts that hold the edges of public ones; `make test` runs some of them.
test-scripts: .venv-frameworks/ready
	ALL_SCRIPTS=1 .venv-frameworks/bin/python -m pytest tests/scripts

.venv-frameworks/ready: pyproject.toml tests/frameworks/constraints.txt
	$(PYTHON) -m venv .venv-frameworks
	.venv-frameworks/bin/python -m pip install --quiet --constraint tests/frameworks/constraints.txt --editable . \
		lightning accelerate monai pytorch-ignite hypothesis pytest pytest-timeout \
		fvcore joblib matplotlib opt-einsum scikit-learn setuptools tensorboard thop torchinfo
	touch $@

lint: .venv/ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

demo: .venv/ready
	$(BIN)/python benchmarks/demo/demo.py

# On a machine with a GPU, with its own Python and torch: one run takes 10 minutes, and the next one goes on from there.
# `make gpu GPU_OPTIONS='--device cpu --small'` only tries it.
GPU_RESULTS ?= build/gpu-results
GPU_OPTIONS ?=

gpu:
	$(PYTHON) benchmarks/gpu/fifteen.py --out $(GPU_RESULTS) $(GPU_OPTIONS) || [ $$? -eq 3 ] # 3: some is left

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
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[dev,demo,mpi]'
	touch $@

# What a release uploads: a wheel and a sdist, whose description the index can show.
dist: .venv/ready
	rm -rf dist
	$(BIN)/python -m pip install --quiet build
	$(BIN)/python -m build --outdir dist .
	$(BIN)/python -m twine check --strict dist/*

clean:
	rm -rf dist .venv .venv-docs .venv-frameworks .venv-torch-* demo site
