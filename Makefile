PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: help setup demo test check bench sanitize fix lock clean

help:            ## this list
	@grep -E '^[a-z]+:.*##' Makefile | sed 's/:.*## */\t/'

setup: $(STAMP)  ## make .venv with everything kvd and its tests need

$(STAMP): pyproject.toml requirements.lock setup.py kvd/core/_native.pyx $(wildcard kvd/core/native*)
	@command -v $(PYTHON) >/dev/null || { echo "kvd needs CPython 3.11 or newer: set PYTHON=/path/to/python"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	touch $@

demo: setup      ## a daemon, two workers' real event streams, a few requests scored
	$(BIN)/python -m examples.demo

test: setup      ## the whole test suite
	$(BIN)/python -m pytest

check: setup     ## types, lint, format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

sanitize: setup  ## the compiled core under AddressSanitizer; needs gcc
	tests/native/sanitize.sh $(BIN)/python

fix: setup       ## what lint and format can mend by themselves
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup     ## measurements: planning, recovery, soak
	$(BIN)/python -m bench planner
	$(BIN)/python -m bench recovery --blocks 100000 --streams 8
	$(BIN)/python -m bench soak

lock:            ## rewrite requirements.lock from pyproject.toml
	$(PYTHON) -m venv $(VENV)-lock
	$(VENV)-lock/bin/python -m pip install --quiet pip-tools
	$(VENV)-lock/bin/pip-compile --quiet --strip-extras --no-emit-index-url --no-emit-find-links --extra bench --extra otel --extra planner --extra test --output-file requirements.lock pyproject.toml
	rm -rf $(VENV)-lock

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info build kvd/core/_native.*.so
