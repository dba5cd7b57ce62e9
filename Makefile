# make quickstart   from raw text to a trained, exported BERT, in ./quickstart
# make test         the tests; make lint, linter and type checker; make test-long, checks that take longer
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: quickstart test test-long lint clean

quickstart: $(VENV)/.installed
	PATH="$(CURDIR)/$(BIN):$$PATH" bash launch/quickstart.sh quickstart

test: $(VENV)/.installed-dev
	JAX_PLATFORMS=cpu $(BIN)/python -m pytest -n auto

test-long: $(VENV)/.installed-dev
	JAX_PLATFORMS=cpu $(BIN)/python -m pytest -n auto -m long --timeout=1800

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or later is needed: make PYTHON=python3.12 ..."; exit 2; }
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

$(VENV)/.installed: $(BIN)/python setup.py
	@echo "installing bert_jax and its dependencies into $(VENV) ..."
	$(BIN)/python -m pip install --editable .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install --editable '.[dev]'
	@touch $@

clean:
	rm -rf quickstart build *.egg-info
