# make demo     set up, then pretrain on generated images for three minutes and measure the result
# make quick    set up, then lint, type-check and run the quick tests: a minute or two
# make test     set up, then lint, type-check and test everything
# make paper    the paper's tables at desk scale: many hours; see docs/benchmarks.md
# make lowest   the quick tests with the oldest versions of everything that pyproject.toml allows

PYTHON ?= python3
BIN := .venv/bin
LOWEST := .venv-lowest
# Tests at a time, each on one thread. Those of a file share a process, see tests/conftest.py.
WORKERS ?= 2

.PHONY: demo quick test lint lowest benchmarks paper clean

demo: .venv/demo.stamp
	$(BIN)/adasim demo

quick: .venv/test.stamp lint
	$(BIN)/python -m pytest -n $(WORKERS) -m "not slow"

test: .venv/test.stamp lint
	$(BIN)/python -m pytest -n $(WORKERS)

lint: .venv/test.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

lowest: $(LOWEST)/test.stamp
	$(LOWEST)/bin/python -m pytest -n $(WORKERS) -m "not slow"

NEED_DATA := benchmarks/continuing.py benchmarks/parity.py benchmarks/soak.py
benchmarks: .venv/test.stamp
	for script in $(filter-out $(NEED_DATA),$(wildcard benchmarks/[a-z]*.py)); do $(BIN)/python $$script || exit 1; done

DATA ?= data/cifar10
paper: .venv/test.stamp
	for table in main oracle policies more ablation contrast weak collapse; do \
		$(BIN)/python -m benchmarks.paper $$table --data $(DATA) || exit 1; done

clean:
	rm -rf .venv $(LOWEST)

.venv/demo.stamp: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "adasim needs Python 3.11 or newer. Name one that you have, as in: make demo PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --editable .
	touch $@

.venv/test.stamp: .venv/demo.stamp
	$(BIN)/pip install --quiet --editable '.[test,test-others]'
	@$(CHROMIUM) || echo "No Chromium here, and none could be installed: the tests of the explorer's page are skipped."
	touch $@

# The explorer's page is tested in a real browser, Debian's own.
CHROMIUM = command -v chromium > /dev/null || command -v chromium-browser > /dev/null \
	|| $(INSTALL_CHROMIUM) || { apt-get update > /dev/null 2>&1 && $(INSTALL_CHROMIUM); }
INSTALL_CHROMIUM = DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends chromium > /dev/null 2>&1

# uv knows which versions are the lowest; pip installs them.
$(LOWEST)/test.stamp: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit((3, 11) != sys.version_info[:2] and "The lowest versions need Python 3.11. Name it, as in: make lowest PYTHON=python3.11")'
	test -x $(LOWEST)/bin/python || $(PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/pip install --quiet uv
	$(LOWEST)/bin/uv pip compile --quiet --resolution lowest-direct --extra test --python-version 3.11 \
		--output-file $(LOWEST)/requirements.txt pyproject.toml
	$(LOWEST)/bin/pip install --quiet --requirement $(LOWEST)/requirements.txt
	$(LOWEST)/bin/pip install --quiet --no-deps --editable .
	touch $@
