# Everything runs in a virtual environment of the project's own: nothing else is touched.
PYTHON ?= python3
VENV   ?= .venv
# Any requirement of pip's, for example a build for CPU that you have.
TORCH  ?= torch==2.13.0
BIN    := $(VENV)/bin

.PHONY: demo test test-fast test-compat check format bench clean

# The installed package is what is tested, so it is installed anew whenever it has changed.
INSTALLED := $(VENV)/installed
$(INSTALLED): setup.cfg pyproject.toml sm_launch.py $(wildcard launcher/*.py)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (torch can take minutes) ..."
	rm -rf build
	$(BIN)/pip install --quiet "$(TORCH)" ".[train,test,check]"
	rm -rf build
	touch $@

demo: $(INSTALLED)  ## two "hosts" of two ranks each on this machine, to a trained model
	PATH="$(CURDIR)/$(BIN):$$PATH" sh examples/two_hosts.sh

test: $(INSTALLED)  ## all tests
	$(BIN)/pytest

test-fast: $(INSTALLED)  ## the tests that need no torch
	$(BIN)/pytest -m "not torch"

# The launcher's tests against the oldest torch it supports and the newest that installs.
test-compat:
	$(MAKE) test VENV=.venv-oldest TORCH="torch==2.4.0"
	$(MAKE) test VENV=.venv-newest TORCH="torch>=2.14"

check: $(INSTALLED)  ## lint, format, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(INSTALLED)  ## what the launcher costs over plain torchrun
	$(BIN)/python benchmarks/overhead.py

clean:
	rm -rf .venv .venv-oldest .venv-newest build runs *.egg-info
