# `make test` and `make demo` work on a fresh clone: they need Python 3.11 or later with pip, and make.
# Everything is installed into .venv; nothing outside this directory is touched.

PYTHON ?= python3
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
TYPES := types-linux types-darwin types-win32
CHECKS := $(TYPES) collection layers lint format-check # the longest first

# Many tests wait more than they compute, so four processes share two cores. In a proof the tests of one file stay
# together: some sum up what was tried.
SIDE_BY_SIDE := --numprocesses 5 --dist worksteal

# Names the interpreter and this directory: when either changes, the environment is created again.
IDENTITY := $(shell $(PYTHON) -c 'import os, sys, zlib; \
    where = zlib.crc32(os.fsencode(sys.base_prefix + os.pathsep + os.getcwd())); \
    print("%s.%s.%s-%08x" % (*sys.version_info[:3], where))' 2>/dev/null)
MADE := $(VENV)/.made-$(IDENTITY)
PLAIN := $(VENV)/.plain-$(IDENTITY)
DEV := $(VENV)/.dev-$(IDENTITY)
BENCH := $(VENV)/.bench-$(IDENTITY)
COLLECTED := $(VENV)/.collected-$(IDENTITY)

# The tests start hundreds of interpreters: without bytecode each of them compiles everything again.
unexport PYTHONDONTWRITEBYTECODE

# One target at a time, even under `make -j`: two pips in one environment interfere with each other.
.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: help test proof check format-check lint $(TYPES) layers collection unit format demo bench metrics docs browser screenshots clean

help: ## list the targets (this is the default)
	@echo 'Usage: make [target] [PYTHON=python3.12] [ARGS="-k name"]'
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' $(firstword $(MAKEFILE_LIST)) \
	    | while IFS='|' read -r target text; do printf '  %-14s %s\n' "$$target" "$$text"; done

test: check unit ## what a contributor runs: check, then every kind of test at few rounds

check: $(DEV) ## formatting, lint, types for three platforms, layers, collection of the tests; side by side
	@printf '%s\n' $(CHECKS) | xargs -P 4 -I{} $(MAKE) --no-print-directory {}

format-check: $(DEV)
	@echo '== formatting'
	@$(BIN)/ruff format --quiet --check .

lint: $(DEV)
	@echo '== lint'
	@$(BIN)/ruff check --quiet .

# Only Linux runs the tests, so their types are checked only there.
$(TYPES): types-%: $(DEV)
	@echo '== types on $*'
	@$(BIN)/mypy --platform $* --cache-dir .mypy_cache/$* --no-error-summary $(if $(filter linux,$*),,src)

layers: $(DEV)
	@echo '== layers'
	@output=$$($(BIN)/lint-imports 2>&1) || { echo "$$output"; exit 1; }

# Compiles the tests once, instead of once in each of the processes that run them; again only when one has changed.
collection: $(COLLECTED)

$(COLLECTED): $(DEV) $(shell find proof tests -name '*.py')
	@echo '== collection'
	@output=$$($(BIN)/python -m pytest --collect-only --quiet 2>&1) || { echo "$$output"; exit 1; }
	@touch $@

unit: $(DEV) ## run the tests alone; choose with ARGS="-k name" or ARGS=tests/locks
	@echo '== tests'
	@$(BIN)/python -m pytest $(if $(ARGS),$(ARGS),$(SIDE_BY_SIDE))

proof: check ## everything at full rounds: sweeps, storms, mounts, explorers, requirements; slow, and some tests need root
	@echo '== proof'
	@HOLDFAST_ROUNDS=1 HOLDFAST_FAULTS=600 $(BIN)/python -m pytest --numprocesses 2 --dist loadfile --timeout 7200 $(ARGS)

format: $(DEV) ## format the code and fix what the linter can fix
	@$(BIN)/ruff check --quiet --fix-only .
	@$(BIN)/ruff format .

demo: $(if $(wildcard $(DEV)),$(DEV),$(PLAIN)) ## run the fault-injection demo
	@$(BIN)/holdfast demo
	@$(BIN)/holdfast demo --landing --workers 4 --issues 8

bench: $(BENCH) ## compare with other tools; choose suites with ARGS
	@$(BIN)/python -m bench $(ARGS)

metrics: $(DEV) ## measure the source: lines, modules, importers, files and hops per command
	@$(BIN)/python -m tools.metrics $(ARGS)

docs: $(DEV) ## regenerate the reference pages
	@$(BIN)/python -m tools.generate_reference

browser: ## install the browser of the tests, where there is root and apt
	@if command -v chromium >/dev/null && command -v chromedriver >/dev/null; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    echo '== installing chromium'; \
	    export DEBIAN_FRONTEND=noninteractive; \
	    { apt-get update -qq && apt-get install -qq -y chromium chromium-driver; } >/dev/null 2>&1 \
	        || echo 'NOT RUN HERE: the tests in a browser, because chromium cannot be installed' >&2; \
	else echo 'NOT RUN HERE: the tests in a browser, because there is no chromium' >&2; fi

screenshots: $(DEV) ## pictures of every page, light, dark and narrow, in build/screenshots
	@$(BIN)/python -m tools.screenshots $(ARGS)

clean: ## remove the environment, caches and build products
	rm -rf $(VENV) build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find bench docs proof src tests tools -name __pycache__ -prune -exec rm -rf {} +

# --- The environment --------------------------------------------------------------------------------

$(MADE):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	    echo 'Holdfast needs Python 3.11 or later, but $(PYTHON) is:' "$$($(PYTHON) --version 2>&1)" >&2; \
	    echo 'Name another one: make PYTHON=python3.12 ...' >&2; \
	    exit 1; }
	@echo '== making $(VENV)'
	@if $(PYTHON) -c 'import ensurepip' 2>/dev/null; then \
	    $(PYTHON) -m venv --clear $(VENV) && $(PIP) install --upgrade 'pip>=25.1'; \
	else \
	    $(PYTHON) -m venv --clear --without-pip $(VENV) && \
	    $(PYTHON) -m pip --quiet --python $(BIN)/python install 'pip>=25.1'; \
	fi
	@touch $@

$(PLAIN): pyproject.toml $(MADE)
	@echo '== installing into $(VENV)'
	@$(PIP) install --editable .
	@touch $@

$(DEV): pyproject.toml $(MADE)
	@echo '== installing into $(VENV)'
	@$(PIP) install --editable . --group dev
	@touch $@

$(BENCH): pyproject.toml $(DEV)
	@echo '== installing what bench compares with'
	@$(PIP) install --group bench
	@touch $@
