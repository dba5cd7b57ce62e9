# make quickstart      makes a trained, exported BERT from raw text, in ./quickstart
# make test            runs the quick tests
# make test-long       runs the tests marked long
# make test-slurm      runs launch/slurm.sbatch under a real Slurm of one node; requires root, slurm-wlm and munge
# make test-sky        validates launch/sky.yaml by SkyPilot, in an environment of its own (460 MB)
# make test-versions   runs the tests with the lowest and the newest supported packages, on Python 3.11 and 3.13
# make test-docs       runs the commands and code of every page of docs/ in small
# make docs            builds the site into docs/_build/html, and checks its internal links
# make docs-links      checks the links to other sites, with a network
# make test-package    builds the wheel and the source distribution, and tests them outside of the clone
# make benchmarks-status   lists the benchmarks whose results are older than the code
# make lint            runs ruff, mypy, shellcheck and hadolint
# make clean           deletes ./quickstart and build outputs
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# One more than there are cores: a test that waits for another process leaves its core to a third worker.
WORKERS ?= $$(($$(getconf _NPROCESSORS_ONLN) + 1))

.PHONY: quickstart test test-long test-slurm test-sky test-versions test-docs test-package docs docs-links \
  benchmarks-status lint clean

quickstart: $(VENV)/.installed
	PATH="$(CURDIR)/$(BIN):$$PATH" bash launch/quickstart.sh quickstart

test: $(VENV)/.installed-dev
	JAX_PLATFORMS=cpu $(BIN)/python -m pytest -n $(WORKERS) --dist loadscope --no-loadscope-reorder

test-long: $(VENV)/.installed-dev
	JAX_PLATFORMS=cpu $(BIN)/python -m pytest -n auto --dist loadscope -m long --timeout=1800

test-slurm: $(VENV)/.installed-dev
	JAX_PLATFORMS=cpu $(BIN)/python -m pytest -m slurm tests/launch/test_slurm.py

# SkyPilot requires an older click than the newest packages that the tests run with.
test-sky: $(BIN)/python
	[ -e $(VENV)/sky/bin/python ] || $(BIN)/python -m venv $(VENV)/sky
	$(VENV)/sky/bin/python -m pip install --quiet 'skypilot>=0.14,<0.15' pytest pytest-timeout
	SKYPILOT_DISABLE_USAGE_COLLECTION=1 $(VENV)/sky/bin/python -m pytest --noconftest tests/launch/test_sky.py

test-versions:
	.ci/test_versions.sh

test-docs: $(VENV)/.installed-docs $(VENV)/.installed-dev
	JAX_PLATFORMS=cpu $(BIN)/python -m pytest -n auto --dist loadscope -m 'long or not long' --timeout=3600 tests/docs

# BERT_JAX_DOCS_EXECUTE=0 shows the notebooks without running them.
docs: $(VENV)/.installed-docs
	JAX_PLATFORMS=cpu $(BIN)/python -m sphinx -W --keep-going -b html docs docs/_build/html

docs-links: $(VENV)/.installed-docs
	JAX_PLATFORMS=cpu BERT_JAX_DOCS_EXECUTE=0 $(BIN)/python -m sphinx -b linkcheck docs docs/_build/links

test-package: $(VENV)/.installed-dev
	JAX_PLATFORMS=cpu $(BIN)/python -m pytest -m 'long or not long' tests/test_packaging.py

benchmarks-status:
	@$(PYTHON) benchmarks/record.py

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/shellcheck launch/*.sh launch/slurm.sbatch benchmarks/*.sh .ci/test_versions.sh
	$(BIN)/hadolint docker/*.Dockerfile

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "PYTHON=$(PYTHON): expected Python 3.11 or later; use make PYTHON=python3.12 ..."; exit 2; }
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

$(VENV)/.installed: $(BIN)/python setup.py requirements.txt bert_jax/version.py
	@echo "installing bert_jax and its dependencies into $(VENV) ..."
	$(BIN)/python -m pip install --editable .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install --editable '.[dev]'
	@touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	$(BIN)/python -m pip install --editable '.[docs]'
	@touch $@

clean:
	rm -rf quickstart build dist docs/_build docs/_generated *.egg-info
