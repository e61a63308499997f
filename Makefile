# make demo    train a small GPT at tp2 x pp2 on this machine, from nothing but Python 3.11+, python3-venv and git
# make test    the tests, on a real Slurm cluster where this machine allows one; make test TESTS=tests/slurm for some
# make test-all    the same, and what is too long for every change: whole tables; make test-long    what that adds, alone
# make mutations   does a test fail where it must? 200 and more one-line faults, each in a copy of the tree;
#                  .venv/bin/python -m tests.mutations --random 40 --seed 1: faults that nobody chose
# make torture     break runs on purpose on that cluster, 100 times; FAULTS=20 SEED=2 for less, ONLY=7 for one of them
# make test-gpu, make lint, make bench; make test CHANGED=main, make test-gpu CHANGED=main: those that a change concerns
# make map      which test executes which line, for CHANGED and for faults that nobody chose; in pieces, goes on where it was
#
# PYTHON=python3.12 chooses the interpreter of .venv; PIP_ARGS='…' goes to pip.

PYTHON ?= python3
PIP_ARGS ?=
TESTS ?= tests
# Two compute; the others mostly wait, for Slurm's daemons and for timers. Each imports torch and every test: 8 s.
WORKERS ?= 4
FAULTS ?= 100
SEED ?= 1
AT_ONCE ?= 2
# What a worker or a rank imports is compiled once, and not by each of some thousand processes.
PYTHONDONTWRITEBYTECODE :=
export PYTHON PIP_ARGS PYTHONDONTWRITEBYTECODE

BIN := .venv/bin
PINS := constraints.txt setup.cfg pyproject.toml .ci/make-venv

PYTEST := $(BIN)/python -m pytest
SIDE_BY_SIDE := -n $(WORKERS) --dist loadgroup --durations 20

.PHONY: demo test test-all test-long test-gpu torture mutations map lint bench packages tests-exist
.DELETE_ON_ERROR:
# One .venv, and a typing error in TESTS is said before it is made.
.NOTPARALLEL:

demo: .venv/.ready
	@$(BIN)/hpc-gpt submit experiments/demo.toml --cluster local --wait

test: tests-exist .venv/.ready-test packages
	@$(if $(CHANGED),words=$$($(BIN)/python -m tests.changed $(CHANGED)) && \
		{ [ "$$words" = none ] || $(PYTEST) -m "not gpu" $(SIDE_BY_SIDE) $$words; },$(PYTEST) -m "not gpu" $(SIDE_BY_SIDE) $(TESTS))

test-all: tests-exist .venv/.ready-test packages
	@ALL_TESTS=true $(PYTEST) -m "not gpu" $(SIDE_BY_SIDE) $(TESTS)

test-long: tests-exist .venv/.ready-test packages
	@ALL_TESTS=long $(PYTEST) -m "not gpu" $(SIDE_BY_SIDE) $(TESTS)

test-gpu: tests-exist .venv/.ready-test
	@$(if $(CHANGED),files=$$($(BIN)/python -m tests.changed $(CHANGED) --gpu) && echo "marked gpu and changed: $$files" && \
		{ [ "$$files" = none ] || $(PYTEST) -m gpu $$files; },$(PYTEST) -m gpu $(TESTS))

map: .venv/.ready-test packages
	@$(BIN)/python -m tests.mutations.map $(PIECES)

mutations: .venv/.ready-test packages
	@$(BIN)/python -m tests.mutations

torture: .venv/.ready-test packages
	@$(BIN)/python -m tests.torture --faults $(FAULTS) --seed $(SEED) --at-once $(AT_ONCE) \
		$(if $(ONLY),--only $(ONLY)) $(if $(RANKS),--ranks $(RANKS))

lint: .venv/.ready-test
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@# Not the scripts that init reads: they are as users write them. Of one around a user's own the part after `exit`
	@# counts as never reached, so tests/golden asks for less.
	@folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && $(BIN)/python -m tests.golden.test_scripts "$$folder" && \
		$(BIN)/shellcheck "$$folder"/*.sh \
		$$(git ls-files --cached --others --exclude-standard '.ci/*' '*.sh' ':!tests/golden/*/job-script-*')

bench: .venv/.ready-test
	@$(BIN)/python tests/benchmarks/start_up.py
	@$(BIN)/python tests/benchmarks/read_logs.py
	@$(BIN)/python tests/benchmarks/plan.py
	@$(BIN)/python tests/benchmarks/sweep.py
	@$(BIN)/python tests/benchmarks/engines.py
	@$(BIN)/python tests/benchmarks/loss_on_text.py
	@$(BIN)/python tests/benchmarks/data_path.py

tests-exist:
	@CHANGED='$(CHANGED)' .ci/check-tests $(TESTS)

packages:
	@.ci/install-test-packages

.venv/.ready: $(PINS)
	@.ci/make-venv
	@touch $@

.venv/.ready-test: $(PINS)
	@.ci/make-venv test
	@touch .venv/.ready $@
