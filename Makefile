# The commands: make test, make demo, make docs, make format. Everything runs in .venv, which each target creates when it is
# missing or older than the pins.
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTHON ?= python3

# Compiles kernels while the linters run.
MAKEFLAGS += -j2

.PHONY: demo docs test test-lowest lint kernels format soak fuzz dist clean

$(STAMP): constraints.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		-e '.[bench,transformers,lightning,accelerate,dev]'
	touch $@

demo: $(STAMP)
	$(BIN)/laconic demo --out runs/demo --overwrite

# The documentation site, in runs/site: warnings are errors, links are checked, examples are executed.
DOCS_STAMP := $(VENV)/.docs-installed
$(DOCS_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	touch $@

docs: $(DOCS_STAMP) kernels
	rm -rf runs/site
	$(BIN)/python -m sphinx -W --keep-going -q -b html -c docs . runs/site
	$(BIN)/python docs/check_site.py runs/site
	$(BIN)/python -m pytest tests/test_documents.py
	@echo "open runs/site/index.html"

test: lint kernels
	$(BIN)/python -m pytest -n 4 --dist worksteal  # 4 on 2 cores: processes often wait for each other

# The same tests with the oldest packages that pyproject.toml allows.
LOWEST := .venv-lowest
test-lowest:
	$(PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-lowest.txt torch
	$(LOWEST)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-lowest.txt -e '.[bench]' \
		pytest pytest-timeout pytest-xdist hypothesis
	$(LOWEST)/bin/python -m pytest -n 3 --dist worksteal

# At least FAULTS faults over all methods, on real processes and emulated hosts; Linux, as root. See soak/__init__.py.
FAULTS := 1200
SEED := 0
soak: kernels
	$(BIN)/python -m soak --faults $(FAULTS) --seed $(SEED) --out soak.jsonl

# The wheel and the source archive, in dist. See docs/releasing.md.
dist: $(STAMP)
	rm -rf dist
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt build
	$(BIN)/python -m build

# Every fuzzer, for so many seconds each. See fuzz/__init__.py.
FUZZ_SECONDS := 60
FUZZERS := $(filter-out __init__ driver,$(basename $(notdir $(wildcard fuzz/*.py))))
fuzz: kernels
	set -e; for name in $(FUZZERS); do $(BIN)/python -m fuzz.$$name --seconds $(FUZZ_SECONDS) --seed $(SEED); done

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

kernels: $(STAMP)
	$(BIN)/python -c "from laconic.kernels import warm_up; warm_up()"

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(LOWEST) runs build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
