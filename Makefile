# The two commands of this project. Each makes its own environment, on first use, from Python >= 3.10, venv and make.
#
#   make demo   three specs to three trained language models, on a CPU, in some minutes; writes demo/loss.png
#   make test   what CI runs: ruff, mypy, pytest
#
# Tests that take other layers, sizes and versions to what those of `make test` have are left to `make thorough`.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
ARGS ?=

.PHONY: demo test lint types tests thorough aot clean

demo: $(VENV)/.demo
	$(BIN)/python -m ttmdsl.demo $(ARGS)

# Types are checked beside tests: on one core, which these leave idle for a while.
test: $(VENV)/.dev
	$(MAKE) --no-print-directory -j2 lint types tests

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy

# One thread a worker: there are as many workers as cores, and small tensors.
tests: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -q --durations=5 $(ARGS)

thorough: $(VENV)/.dev
	$(MAKE) --no-print-directory tests ARGS='-m "" $(ARGS)'

# Every kernel at every head size and target, with both versions of Triton: the table in docs/aot.md. Takes long.
aot: $(VENV)/.dev
	$(BIN)/python tests/aot_matrix.py 2

clean:
	rm -rf $(VENV) demo dist tests/.cache .pytest_cache .mypy_cache .ruff_cache .hypothesis

# What was installed, and from which lists: a stamp for each set of extras.
$(VENV)/.demo $(VENV)/.dev: $(VENV)/.%: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing ttmdsl[$*] into $(VENV); the first time takes a minute or two"
	$(PIP) install --no-compile -c constraints.txt -e '.[$*]'
	@touch $@

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
