# make demo    train a small GPT at tp2 x pp2 on this machine, from nothing but Python 3.11+, python3-venv and git
# make test    the tests, on a real Slurm cluster where this machine allows one; make test TESTS=tests/slurm for some
# make test-all    the same, and what is too long for every change: whole tables; CI_DAY=2026-12-01 make test    that day's sixth of it
# make mutations   does a test fail where it must? One-line faults, drawn by SEED, each in a copy of the tree; FAULTS=40,
#                  FILES=hpc_gpt/core/ends/ for those of some files
# make torture     break runs on purpose on that cluster, 100 times; FAULTS=20 SEED=2 for less, ONLY=7 for one of them,
#                  EP=2 for runs whose ranks divide experts
# make test-gpu, make lint, make bench
# make torch-2.9   install the oldest PyTorch that the trainer takes, for the test of it
#
# PYTHON=python3.12 chooses the interpreter of .venv; PIP_ARGS='…' goes to pip.

PYTHON ?= python3
PIP_ARGS ?=
TESTS ?= tests
# Two compute; the others mostly wait, for Slurm's daemons and for timers. Each imports torch and every test: 8 s.
WORKERS ?= 4
SEED ?= 1
AT_ONCE ?= 2
# What a worker or a rank imports is compiled once, and not by each of some thousand processes.
PYTHONDONTWRITEBYTECODE :=
export PYTHON PIP_ARGS PYTHONDONTWRITEBYTECODE

BIN := .venv/bin
PINS := constraints.txt setup.cfg pyproject.toml .ci/make-venv

PYTEST := $(BIN)/python -m pytest
SIDE_BY_SIDE := -n $(WORKERS) --dist loadgroup --durations 40

.PHONY: demo test test-all test-gpu torch-2.9 torture mutations lint bench packages tests-exist
.DELETE_ON_ERROR:
# One .venv, and a typing error in TESTS is said before it is made.
.NOTPARALLEL:

demo: .venv/.ready
	@$(BIN)/hpc-gpt submit experiments/demo.toml --cluster local --wait

test: tests-exist .venv/.ready-test packages
	@$(PYTEST) -m "not gpu" $(SIDE_BY_SIDE) $(TESTS)

test-all: tests-exist .venv/.ready-test packages
	@ALL_TESTS=true $(PYTEST) -m "not gpu" $(SIDE_BY_SIDE) $(TESTS)

test-gpu: tests-exist .venv/.ready-test
	@$(PYTEST) -m gpu $(TESTS)

mutations: .venv/.ready-test packages
	@$(BIN)/python -m bench.mutations --faults $(or $(FAULTS),40) --seed $(SEED) --at-once $(AT_ONCE) $(FILES)

torture: .venv/.ready-test packages
	@$(BIN)/python -m bench.torture --faults $(or $(FAULTS),100) --seed $(SEED) --at-once $(AT_ONCE) \
		$(if $(ONLY),--only $(ONLY)) $(if $(RANKS),--ranks $(RANKS)) $(if $(EP),--ep $(EP))

lint: .venv/.ready-test
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@# Not the scripts that init reads: they are as users write them. Of one around a user's own the part after `exit`
	@# counts as never reached, so tests/golden asks for less.
	@folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && $(BIN)/python -m tests.golden.test_scripts "$$folder" && \
		$(BIN)/shellcheck "$$folder"/*.sh \
		$$(git ls-files --cached --others --exclude-standard '.ci/*' '*.sh' ':!tests/golden/*/job-script-*')

# PyPI has CUDA's build alone: 900 MB, and 4 GB with its libraries. tests/trainer/test_older_pytorch.py runs with it.
torch-2.9: .venv/.ready-test
	@$(BIN)/python -m pip install --quiet --target .venv/torch-2.9.1 torch==2.9.1

bench: .venv/.ready-test
	@$(BIN)/python bench/start_up.py
	@$(BIN)/python -m bench.walk
	@$(BIN)/python bench/processes.py
	@$(BIN)/python bench/read_logs.py
	@$(BIN)/python bench/plan.py
	@$(BIN)/python bench/sweep.py
	@$(BIN)/python bench/engines.py
	@$(BIN)/python bench/loss_on_text.py
	@$(BIN)/python bench/data_path.py

tests-exist:
	@.ci/check-tests $(TESTS)

packages:
	@.ci/install-test-packages

.venv/.ready: $(PINS)
	@.ci/make-venv
	@touch $@

.venv/.ready-test: $(PINS)
	@.ci/make-venv test
	@touch .venv/.ready $@
