# make demo   a prompt cache that survives a restart, from a bare checkout
# make demo-disagg   prefill and decode servers behind a router
# make test   lint and all tests but the long forms, other projects' connectors and other engines
# make test-engines   the tests that run other engines, in environments of their own
# make vllm-cpu   one of these: vLLM for a CPU, with kvconnect
#
# They need nothing but Python 3.11+ with pip: .venv is made here, with the pinned versions of
# constraints.txt, and made again when pyproject.toml or constraints.txt change.

SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt

# Tests wait a third of their time, so that three processes keep two cores busy. torch must not use both
# in each.
TEST_ENV := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1
PYTEST_ARGS ?= -n 3 --dist loadscope

# Environments of other engines, one each: they want other versions of the same packages.
ENGINES := .venv-engines
ENGINE_PIP = $(ENGINES)/$*/bin/python -m pip install -qq --disable-pip-version-check
ENGINE_LOCK = tests/engines/$*/requirements.txt
ENGINE_TESTS ?= engines and not slow
ENGINE_REPORTS := $(ENGINES)/reports
ENGINE_PYTEST = -m pytest -W default -m '$(ENGINE_TESTS)' -p no:cacheprovider --junitxml=$(ENGINE_REPORTS)/$(1).xml
VLLM_ENV := VLLM_TARGET_DEVICE=cpu VLLM_CPU_KVCACHE_SPACE=1 VLLM_NO_USAGE_STATS=1

# Other projects' clients of a server.
CLIENTS := .venv-clients

.PHONY: help demo demo-disagg test test-all test-engines test-clients vllm-cpu lint format clean

help:
	@echo 'make demo [MODEL=dir] [PROMPT=file] [STORE=url]   a prompt cache that survives a restart'
	@echo 'make demo-disagg [MODEL=dir]                     prefill and decode servers behind a router'
	@echo 'make test       lint and all tests but the long forms and what runs other projects'
	@echo 'make test-all   all tests but those of other engines'
	@echo 'make test-engines   vLLM and SGLang with kvconnect, in environments of their own'
	@echo '     ENGINE_TESTS=engines   with the long forms'
	@echo 'make vllm-cpu   vLLM for a CPU with kvconnect, in an environment of its own'
	@echo 'make test-clients   litellm, lm-eval, guidellm and others against a server'
	@echo 'make lint       ruff and mypy'
	@echo 'make format     let ruff lay the code out'
	@echo 'make clean      remove .venv and .demo'
	@echo 'PYTHON=python3.12 chooses the Python that .venv is made with'

demo: $(VENV)/runtime.stamp
	@HF_HUB_DISABLE_PROGRESS_BARS=1 $(BIN)/python examples/persistent_prompt_cache.py $(if $(MODEL),--model '$(MODEL)') \
	  $(if $(PROMPT),--prompt '$(PROMPT)') $(if $(STORE),--store '$(STORE)')
	@echo 'The command kvconnect is in $(VENV). To have it on the path:  . $(BIN)/activate'

demo-disagg: $(VENV)/serve.stamp
	@HF_HUB_DISABLE_PROGRESS_BARS=1 $(BIN)/python examples/disaggregated_serving.py $(if $(MODEL),--model '$(MODEL)')

test: lint
	$(TEST_ENV) $(BIN)/pytest -m 'not slow and not clients' --ignore=tests/engines $(PYTEST_ARGS)

test-all: lint $(CLIENTS)/api.stamp $(CLIENTS)/guidellm.stamp $(CLIENTS)/lm_eval.stamp
	$(TEST_ENV) $(BIN)/pytest

test-clients: $(VENV)/dev.stamp $(CLIENTS)/api.stamp $(CLIENTS)/guidellm.stamp $(CLIENTS)/lm_eval.stamp
	$(TEST_ENV) $(BIN)/pytest -m clients tests/server/test_other_clients.py

# What they need beyond Python: several GB of disk and, the first time, of downloads. When all have
# passed, they write the table of tested versions in docs/engines.md.
test-engines: $(ENGINES)/vllm.stamp $(ENGINES)/vllm_scheduler.stamp $(ENGINES)/sglang.stamp
	rm -rf $(ENGINE_REPORTS)
	$(TEST_ENV) $(VLLM_ENV) $(ENGINES)/vllm/bin/python $(call ENGINE_PYTEST,vllm) tests/engines/vllm
	$(TEST_ENV) $(VLLM_ENV) $(ENGINES)/vllm/bin/python $(call ENGINE_PYTEST,vllm_around_a_stand_in) tests/engines/vllm_scheduler
	$(TEST_ENV) $(VLLM_ENV) $(ENGINES)/vllm_scheduler/bin/python $(call ENGINE_PYTEST,vllm_scheduler) tests/engines/vllm_scheduler tests/engines/vllm/tier
	$(TEST_ENV) $(ENGINES)/sglang/bin/python $(call ENGINE_PYTEST,sglang) tests/engines/sglang
	@$(ENGINES)/vllm/bin/python tests/engines/tested_versions.py $(ENGINE_REPORTS)/*.xml

vllm-cpu: $(ENGINES)/vllm.stamp
	@echo 'vLLM and kvconnect are in $(ENGINES)/vllm. To use them:  . $(ENGINES)/vllm/bin/activate'

lint: $(VENV)/dev.stamp
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy

format: $(VENV)/dev.stamp
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

clean:
	rm -rf $(VENV) $(ENGINES) $(CLIENTS) .demo

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "kvconnect needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1)." \
	    "Name another one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# Without build isolation: the build tools are pinned as well, and downloaded once.
$(VENV)/runtime.stamp: pyproject.toml constraints.txt | $(BIN)/python
	@echo 'Installing kvconnect[hf] and what it needs into $(VENV), in the versions of constraints.txt'
	@echo '(a minute or two the first time; torch and transformers are most of it) ...'
	$(PIP_INSTALL) setuptools wheel
	$(PIP_INSTALL) --no-build-isolation -e '.[hf]'
	@$(BIN)/python -m pip list --disable-pip-version-check 2>/dev/null \
	  | awk 'tolower($$1) ~ /^(kvconnect|numpy|pydantic|torch|transformers)$$/ {print "  " $$1, $$2}'
	@touch $@

$(VENV)/serve.stamp: $(VENV)/runtime.stamp
	$(PIP_INSTALL) --no-build-isolation -e '.[serve]' openai
	@touch $@

$(VENV)/dev.stamp: $(VENV)/runtime.stamp
	$(PIP_INSTALL) --no-build-isolation -e '.[hf,dev]'
	@touch $@

$(CLIENTS)/%.stamp: tests/server/clients/%.txt
	@echo 'Installing into $(CLIENTS)/$* (a minute or two the first time) ...'
	rm -rf $(CLIENTS)/$*
	$(PYTHON) -m venv $(CLIENTS)/$*
	$(CLIENTS)/$*/bin/python -m pip install -qq --disable-pip-version-check --no-deps -r $<
	@touch $@

# Every package by its exact version, and without asking what it depends on: engines want torch for
# their devices, and libraries that nothing here uses. Only torch brings its own, in its own versions:
# the engine's follow, also where they differ (triton).
$(ENGINES)/%.stamp: tests/engines/%/requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "kvconnect needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1)." >&2; exit 1; }
	@echo 'Installing into $(ENGINES)/$* (some minutes the first time) ...'
	rm -rf $(ENGINES)/$*
	$(PYTHON) -m venv $(ENGINES)/$*
	$(ENGINE_PIP) $$(grep -E '^(torch|setuptools|wheel)==' $(ENGINE_LOCK))
	$(ENGINE_PIP) --no-deps -r $(ENGINE_LOCK)
	$(ENGINE_PIP) --no-deps --no-build-isolation -e .
	@touch $@
