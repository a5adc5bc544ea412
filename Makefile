# `make` alone lists the targets.
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
BENCH ?= serve
WORKERS ?= 2
# Files stay whole, so that their tests share servers, and in order: the long ones of e2e first, not last. Plugins are
# named: pytest reads those that it finds by itself, large libraries some of them, anew in each process.
TESTS = PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 $(BIN)/python -m pytest -q -p xdist.plugin -p pytest_asyncio.plugin \
	-n $(WORKERS) --dist loadfile --no-loadscope-reorder
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false

# The first Python of a supported version; `make setup PYTHON=/path/to/python` picks another.
SUPPORTED := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))
PYTHON ?= $(shell for p in python3.11 python3.12 python3; do \
	$$p -c '$(SUPPORTED)' >/dev/null 2>&1 && echo $$p && break; done)

.PHONY: help setup demo test test-ray check format reference bench clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP)  ## make .venv and install everything (once; again after pyproject.toml or constraints.txt change)

$(STAMP): pyproject.toml constraints.txt
	@$(or $(PYTHON),false) -c '$(SUPPORTED)' || { \
		echo "thinkfold needs Python 3.11 or 3.12 (make setup PYTHON=...), found: $(or $(PYTHON),none)" >&2; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --group dev --editable '.[eval]'
	@touch $@

# One thread is as fast as two for a few rows, and does not stall beside a busy process.
demo test test-ray check: export OMP_NUM_THREADS ?= 1

demo: setup  ## start a server, ask the embedded reasoner one question, watch it think
	@$(BIN)/python scripts/demo.py

test: setup  ## all tests
	$(TESTS)

test-ray: setup  ## replicas on Ray Serve; installs ray
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[ray]'
	THINKFOLD_TEST_RAY=1 $(BIN)/python -m pytest -q tests/ray

check: setup  ## format, lint, types, tests: what CI runs
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(TESTS)

format: setup  ## rewrite the code as `make check` wants it
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

reference: setup  ## rewrite docs/reference from the code
	@$(BIN)/python scripts/reference.py

bench: setup  ## one benchmark, `make bench BENCH=serve`; rows go to benchmarks/results
	$(BIN)/thinkfold bench $(BENCH) --json

clean:  ## remove .venv and caches
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis build dist
