# Every target makes .venv first; `make demo` and `make test` need nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DURATION ?= 120
# Test processes side by side; a number, or auto for one a core.
WORKERS ?= auto
DEMO_FLAGS := --duration $(DURATION) $(if $(TRACE),--trace $(TRACE)) $(if $(TRACE_START),--trace-start $(TRACE_START)) $(if $(TRACE_SCALE),--trace-scale $(TRACE_SCALE)) $(if $(PORT_BASE),--port-base $(PORT_BASE))

.PHONY: setup demo up test test-all lint bench proto clean

setup: $(STAMP)

$(STAMP): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Trimtab needs Python 3.11 or newer; set PYTHON=…")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	PYTHONWARNINGS='ignore:Editable installation' $(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $(STAMP)

demo: setup
	$(BIN)/trimtab demo $(DEMO_FLAGS)

up: setup
	$(BIN)/trimtab up $(if $(PORT_BASE),--port-base $(PORT_BASE))

test: setup
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

test-all: setup
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --hypothesis-profile=thorough tests

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/buf lint protos
	$(BIN)/buf breaking protos --against protos/baseline.binpb
	$(BIN)/python protos/generate.py --check

bench: setup
	@set -e; for module in $(basename $(notdir $(wildcard bench/[a-z]*.py))); do $(BIN)/python -m bench.$$module --json; done

proto: setup
	$(BIN)/python protos/generate.py

clean:
	rm -rf $(VENV) .trimtab build dist
