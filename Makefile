# make demo   a prompt cache that survives a restart, from a bare checkout
# make demo-disagg   prefill and decode servers behind a router
# make test   lint and all tests but the long forms and other projects' connectors
#
# They need nothing but Python 3.11+ with pip: .venv is made here, with the pinned versions of
# constraints.txt, and made again when pyproject.toml or constraints.txt change.

SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt

# The two cores of a small machine serve one test process each; torch must not use both in each.
TEST_ENV := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1
PYTEST_ARGS ?= -n 2 --dist loadscope

.PHONY: help demo demo-disagg test test-all lint format clean

help:
	@echo 'make demo [MODEL=dir] [PROMPT=file] [STORE=url]   a prompt cache that survives a restart'
	@echo 'make demo-disagg [MODEL=dir]                     prefill and decode servers behind a router'
	@echo 'make test       lint and all tests but the long forms and connectors of others'
	@echo 'make test-all   all tests'
	@echo 'make lint       ruff and mypy'
	@echo 'make format     let ruff lay the code out'
	@echo 'make clean      remove .venv and .demo'
	@echo 'PYTHON=python3.12 chooses the Python that .venv is made with'

demo: $(VENV)/runtime.stamp
	@HF_HUB_DISABLE_PROGRESS_BARS=1 $(BIN)/python examples/persistent_prompt_cache.py $(if $(MODEL),--model '$(MODEL)') \
	  $(if $(PROMPT),--prompt '$(PROMPT)') $(if $(STORE),--store '$(STORE)')

demo-disagg: $(VENV)/serve.stamp
	@HF_HUB_DISABLE_PROGRESS_BARS=1 $(BIN)/python examples/disaggregated_serving.py $(if $(MODEL),--model '$(MODEL)')

test: lint
	$(TEST_ENV) $(BIN)/pytest -m 'not slow and not clients' $(PYTEST_ARGS)

test-all: lint
	$(TEST_ENV) $(BIN)/pytest

lint: $(VENV)/dev.stamp
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy

format: $(VENV)/dev.stamp
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

clean:
	rm -rf $(VENV) .demo

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "kvconnect needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1)." \
	    "Name another one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# Without build isolation: the build tools are pinned as well, and downloaded once.
$(VENV)/runtime.stamp: pyproject.toml constraints.txt | $(BIN)/python
	@echo 'Installing into $(VENV) (a minute or two the first time) ...'
	$(PIP_INSTALL) setuptools wheel
	$(PIP_INSTALL) --no-build-isolation -e '.[hf]'
	@touch $@

$(VENV)/serve.stamp: $(VENV)/runtime.stamp
	$(PIP_INSTALL) --no-build-isolation -e '.[serve]' openai
	@touch $@

$(VENV)/dev.stamp: $(VENV)/runtime.stamp
	$(PIP_INSTALL) --no-build-isolation -e '.[hf,dev]'
	@touch $@
