# What a visitor and a contributor do, from a bare clone: python3 >= 3.11 and make are enough.
# The first target that needs it makes $(VENV); later runs start at once, until pyproject.toml changes.

PYTHON ?= python3
VENV := .venv
ARGS :=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet --quiet
INSTALLED := $(VENV)/.installed
FRAMEWORKS := $(VENV)/.frameworks
DOCS := $(VENV)/.docs

.PHONY: help demo test test-frameworks bench docs lint format clean
.DEFAULT_GOAL := help

help:
	@echo 'make demo    train on handwritten digits over two replicas'
	@echo 'make test    the tests, without the slow ones'
	@echo 'make test-frameworks  those with PyTorch, JAX and autograd, which it installs: 2 GB'
	@echo 'make bench   the benchmarks'
	@echo 'make docs    the guide and the reference, as HTML in docs/_build'
	@echo 'make lint    format, style, types and layers, as CI checks them'
	@echo 'make format  put the format and the simple lint findings right'
	@echo 'make clean   remove .venv, caches and build results'
	@echo
	@echo 'ARGS goes on to the program:  make demo ARGS="--replicas 4 --epochs 5"'
	@echo 'PYTHON chooses the Python that the virtual environment is made from, VENV its folder:'
	@echo '                              make test PYTHON=python3.13 VENV=.venv-3.13'

demo: $(INSTALLED)
	@$(BIN)/python -m examples.digits $(ARGS)

test: $(INSTALLED)
	@$(BIN)/python -m pytest -m 'not slow' $(ARGS)

# PyTorch for Linux comes with CUDA, some GB of it; PIP_INDEX_URL or PIP_FIND_LINKS can lead to a build for CPUs.
test-frameworks: $(FRAMEWORKS)
	@$(BIN)/python -m pytest -rs tests/collectives/test_frameworks.py tests/strategies/test_torch_modules.py \
	  tests/examples/test_framework_examples.py tests/examples/test_examples.py tests/docs $(ARGS)

bench: $(INSTALLED)
	@$(BIN)/python -m benchmarks $(ARGS)

# A warning, such as a link to nowhere, is an error.
docs: $(DOCS)
	@$(BIN)/python -m sphinx --builder html --fail-on-warning --keep-going --quiet docs docs/_build $(ARGS)
	@echo 'docs/_build/index.html'

lint: $(INSTALLED)
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(INSTALLED)
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

clean:
	rm -rf .venv .ci/venv .ci/wheel build dist docs/_build htmlcov .coverage .coverage.*
	rm -rf .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# venv puts pip in last, so that a virtual environment with pip is a whole one.
$(BIN)/pip:
	@command -v $(PYTHON) > /dev/null || { \
	  echo "make: $(PYTHON) was not found; Python 3.11 or newer is needed — install it, or name yours: make PYTHON=python3.13 $(MAKECMDGOALS)" >&2; \
	  exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "make: $(PYTHON) is $$($(PYTHON) --version 2>&1); Python 3.11 or newer is needed — install it, or name yours: make PYTHON=python3.13 $(MAKECMDGOALS)" >&2; \
	  exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2> /dev/null || { \
	  echo "make: $(PYTHON) came without its module venv or ensurepip; both are needed — on Debian and Ubuntu: apt install python3-venv" >&2; \
	  exit 1; }
	@$(PYTHON) -m venv $(VENV)

# The dev group needs pip 25.1; older Pythons bring an older pip.
$(INSTALLED): pyproject.toml | $(BIN)/pip
	@echo "Installing xpdistribute and what its demo, tests and benchmarks need into $(VENV) (once; a minute or two) ..."
	@$(PIP) install 'pip>=25.1'
	@$(PIP) install --editable '.[demo,bench,checkpoint,mpi]' --group dev
	@touch $@

$(FRAMEWORKS): pyproject.toml | $(INSTALLED)
	@echo "Installing PyTorch, JAX and autograd into $(VENV) (once; some minutes) ..."
	@$(PIP) install --group frameworks
	@touch $@

$(DOCS): pyproject.toml | $(INSTALLED)
	@echo "Installing Sphinx into $(VENV) (once) ..."
	@$(PIP) install --group docs
	@touch $@
