# make test     everything CI runs: lint, types, import contracts, tests (installs into .venv first)
# make quick    lint and the fast tests: for daily work
# make lint     ruff, mypy and import-linter only
# make test-sims  tests of the MuJoCo simulators (installs them; they need a GL library of the system)
# make campaign  attacks: mutants of datasets and files, kills at random moments (minutes; seeded)
# make coverage  the tests again, and how many lines of each file they run
# make bench    speed, on this machine
# make demo     the whole way once: record, imitate, improve, evaluate, report (two cores, ten minutes)
# make docs     write docs/cli.md and docs/recipes.md from the code, build the site into site/; warnings are errors
# make docs-serve  the site while you write, at http://127.0.0.1:8000
# make docs-check  runs the commands of README*.md and docs/*.md, small (about 25 minutes of CPU time, later ones less)
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SOURCES := src tests benchmarks examples tools docs

.DEFAULT_GOAL := help
.PHONY: help install test quick test-sims campaign lint format coverage bench demo docs docs-serve docs-check clean

help:
	@sed -n 's/^# //p' Makefile

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

lint: $(STAMP)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: $(STAMP)
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

## Two workers: compiling is most of the time and hardly parallel. A file stays with one worker, and so do its fixtures.
WORKERS ?= 2
test: lint
	$(BIN)/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
	@echo "make test: lint, types, import contracts and tests all passed"

campaign: $(STAMP)
	CAMPAIGN=1 $(BIN)/pytest -n $(WORKERS) --dist loadfile --durations=0 tests/campaign

## What takes longest and changes least often: whole runs, compiled models, plans of full size, other programs.
SLOW := benchmarks campaign e2e examples kernels parallel parity planning promises sims tune \
	models agents/test_acrlpd.py agents/test_ript.py checkpoints/test_checkpoint.py checkpoints/test_weights.py \
	cli/test_eval_cli.py cli/test_train_cli.py cli/test_tune_cli.py data/test_bad_datasets.py label/test_browser.py \
	rollout/test_ray.py serve \
	training/test_acting.py training/test_step.py test_docs.py test_docs_site.py
quick: lint
	$(BIN)/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "not slow" $(SLOW:%=--ignore=tests/%)
	@echo "make quick: passed; make test runs the rest"

coverage: $(STAMP)
	$(BIN)/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --cov=pirl --cov-report=
	$(BIN)/coverage report --skip-covered
	@for part in agents data training rollout; do \
		total=$$($(BIN)/coverage report --include="*/pirl/$$part/*" --fail-under=90 --format=total) || exit 1; \
		echo "$$part: $$total %"; done

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

## (Material announces its successor at every build; the variable asks it not to.)
docs: $(STAMP)
	$(BIN)/python docs/generate.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

docs-serve: $(STAMP)
	$(BIN)/python docs/generate.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

docs-check: $(STAMP)
	$(BIN)/python tools/docs_check.py

clean:
	rm -rf $(VENV) build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis site .coverage
