# make demo   set up, then pretrain on generated images for two minutes and measure the result
# make test   set up, then lint, type-check and test everything

PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test lint benchmarks clean

demo: .venv/demo.stamp
	$(BIN)/adasim demo

test: .venv/test.stamp lint
	$(BIN)/python -m pytest

lint: .venv/test.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

benchmarks: .venv/test.stamp
	for script in benchmarks/[a-z]*.py; do $(BIN)/python $$script || exit 1; done

clean:
	rm -rf .venv

.venv/demo.stamp: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "adasim needs Python 3.11 or newer; set PYTHON=")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --editable .
	touch $@

.venv/test.stamp: .venv/demo.stamp
	$(BIN)/pip install --quiet --editable '.[test]'
	touch $@
