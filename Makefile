# Everything runs in .venv, which each target makes when it is missing or older than the pins.
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTHON ?= python3

# Kernels are compiled while mypy reads.
MAKEFLAGS += -j2

.PHONY: demo test lint kernels format clean

$(STAMP): constraints.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench,dev]'
	touch $@

demo: $(STAMP)
	$(BIN)/laconic demo --out runs/demo --overwrite

test: lint kernels
	$(BIN)/python -m pytest -n 3 --dist worksteal  # much of their time, processes wait for each other

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

kernels: $(STAMP)
	$(BIN)/python -c "import laconic.loaded"

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) runs build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
