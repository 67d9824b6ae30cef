# make test     everything CI runs: lint, types, import contracts, tests (installs into .venv first)
# make lint     ruff, mypy and import-linter only
# make test-sims  tests of the MuJoCo simulators (installs them; they need a GL library of the system)
# make bench    speed, on this machine
# make demo     the whole way once: record, imitate, improve, evaluate, report (two cores, ten minutes)
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help install test test-sims lint format bench demo clean

help:
	@sed -n 's/^# //p' Makefile

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

lint: $(STAMP)
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: $(STAMP)
	$(BIN)/ruff check --fix src tests benchmarks
	$(BIN)/ruff format src tests benchmarks

# Two workers: compiling is most of the time and hardly parallel. A file stays with one worker, and so do its fixtures.
WORKERS ?= 2
test: lint
	$(BIN)/pytest -n $(WORKERS) --dist loadfile
	@echo "make test: lint, types, import contracts and tests all passed"

## The simulators are extras, installed into the same environment (or another: `make test-sims VENV=.venv-sims`), and
## render with libraries that only the system's package manager has. Without a graphics card, OSMesa is the one that works.
MUJOCO_GL ?= osmesa
test-sims: $(STAMP)
	@echo "needs libraries of the system: apt-get install libosmesa6 libegl1 libgl1-mesa-dri libgles2"
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev,sims]'
	MUJOCO_GL=$(MUJOCO_GL) $(BIN)/pytest -rs tests/sims

bench: $(STAMP)
	$(BIN)/python benchmarks/data.py

demo: $(STAMP)
	$(BIN)/pirl demo

clean:
	rm -rf $(VENV) build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
