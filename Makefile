# Two commands for a newcomer: `make demo` and `make test`. Both make their own virtual environment.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
# The same environment with flwr and the versions that it wants over it, because no one environment can have both.
FLOWER = $(VENV)-flower
PIP = $(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt
PYTEST = $(BIN)/python -m pytest -q
# A worker for each processor, and one more. A worker that has nothing left takes tests from the others.
ALL_CORES = -n auto --dist worksteal
FLOWER_TESTS = tests/client/flower tests/sim/flower tests/sim/engines/flower tests/sim/bench/flower tests/contracts/test_flower_over_http.py tests/aggregation/optimizers/test_flower_strategies.py
PARTS = aggregation client server sim umbel tests examples
BUILD = pyproject.toml setup.py constraints.txt $(wildcard aggregation/kernels/*.cpp aggregation/kernels/*.h)

UV = build/uv/bin/uv
LOCK = $(UV) pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate \
	--custom-compile-command "make locks" --no-emit-index-url -c constraints.txt

# Without a cache of bytecode each of the hundreds of processes that tests start compiles umbel anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test test-fast test-nightly test-marks test-bits test-bits-fast check fmt fuzz mutants bench docs locks clean

help: ## list these commands
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

demo: $(VENV)/.demo ## run the whole system on this machine: a coordinator, twelve clients, real data
	$(BIN)/umbel demo

# Both parts run, whatever the first says, and each failure counts: nothing is tried again.
test: $(VENV)/.dev $(FLOWER)/.made ## run all tests but the nightly ones: first on all cores, then those with Flower, then those that measure real time
	$(PYTEST) $(ALL_CORES) -m "not realtime and not nightly"; first=$$?; \
	$(FLOWER)/bin/python -m pytest -q $(ALL_CORES) -m "not nightly" $(FLOWER_TESTS); flower=$$?; \
	$(PYTEST) -m "realtime and not nightly" && exit $$((first + flower))

test-fast: $(VENV)/.dev ## run the tests of arithmetic, protocols and rules (two minutes); they start no coordinator, client or process
	HYPOTHESIS_PROFILE=$${HYPOTHESIS_PROFILE:-fast} $(PYTEST) $(ALL_CORES) -p tests.suite.parties -m "not slow and not postgresql"

test-nightly: $(VENV)/.dev ## run the nightly tests, then the property tests with twenty times the examples (hours)
	$(PYTEST) $(ALL_CORES) -m "nightly and not realtime"; first=$$?; \
	HYPOTHESIS_PROFILE=hour $(PYTEST) $(ALL_CORES) --timeout 7200 -m "hypothesis and not nightly"; second=$$?; \
	$(PYTEST) -m "nightly and realtime" && exit $$((first + second))

# What took longer is measured a second time, so that one stall of the machine fails nothing.
test-marks: $(VENV)/.dev ## check on a quiet machine that each test without the mark `slow` takes at most a second
	$(PYTEST) -m "not slow" --seconds-max 1 || \
	{ test $$? -eq 1 && $(PYTEST) -m "not slow" --seconds-max 1 --last-failed --last-failed-no-failures none; }

test-bits: $(VENV)/.dev ## run all tests of arithmetic with the settings of other processors, thread counts and kernels (hours)
	$(BIN)/python -m tests.suite.bits --all

test-bits-fast: $(VENV)/.dev ## check the bits that docs/reference/bits.md promises, with each of these settings (a minute)
	$(BIN)/python -m tests.suite.bits

check: $(VENV)/.dev $(FLOWER)/.made ## check formatting, lint, types and import rules
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(FLOWER)/bin/python -m mypy --config-file= --strict --untyped-calls-exclude torch -p umbel.client.flower -p umbel.sim.engines.flower -p umbel.sim.flower
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

fmt: $(VENV)/.dev ## format the code and sort its imports
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

fuzz: $(VENV)/.dev ## send random bytes to each reader for SECONDS, and random requests to the API (minutes)
	$(BIN)/python -m tests.fuzz.fuzz $(or $(SECONDS),60)
	HYPOTHESIS_PROFILE=nightly $(PYTEST) tests/contracts/test_openapi.py tests/fuzz

mutants: $(VENV)/.dev ## plant small faults in what changed since BASE, or in RANDOM=200 places; a test must notice each
	$(BIN)/python -m tests.mutation.mutants $(if $(BASE),--base $(BASE)) \
		$(if $(RANDOM),--random $(RANDOM) --seed $(or $(SEED),0) $(IN)) \
		$(if $(AGAIN),--again $(AGAIN) --slow)

bench: $(VENV)/.dev $(FLOWER)/.made ## measure ratios against peers, baselines and limits
	$(BIN)/umbel bench coordinator
	$(BIN)/umbel bench aggregate
	$(BIN)/umbel bench window
	$(BIN)/umbel bench sampling --quick
	$(BIN)/umbel bench codec
	$(BIN)/umbel bench secagg
	$(BIN)/umbel bench collective
	$(BIN)/umbel bench simulate
	$(FLOWER)/bin/python -m umbel bench flower

docs: $(VENV)/.dev ## check the documentation against the code
	$(PYTEST) tests/packaging/test_docs.py

locks: ## write deploy/locks: the versions of constraints.txt, with the package index's hashes of their files
	$(PYTHON) -m venv build/uv
	build/uv/bin/python -m pip install --disable-pip-version-check --quiet uv==0.13.9
	rm -f deploy/locks/*.txt
	echo setuptools | $(LOCK) -o deploy/locks/build.txt - >/dev/null
	$(LOCK) --extra privacy -o deploy/locks/client.txt pyproject.toml >/dev/null
	$(LOCK) --extra privacy --extra example -o deploy/locks/example.txt pyproject.toml >/dev/null
	$(LOCK) --extra server --extra postgres --extra s3 -o deploy/locks/coordinator.txt pyproject.toml >/dev/null

clean: ## remove the environments and build outputs
	rm -rf $(VENV) $(FLOWER) demo-out build *.egg-info

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "umbel needs Python 3.11 or newer; try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)

# torch first and alone: its pin decides which build is taken, before another package asks for it loosely.
$(VENV)/.demo: $(BUILD) | $(VENV)/bin/python
	@echo "installing umbel into $(VENV) (some minutes the first time)"
	$(PIP) torch
	$(PIP) -e '.[server,sim]'
	@touch $@

$(VENV)/.dev: $(BUILD) | $(VENV)/bin/python
	@echo "installing umbel and its development tools into $(VENV) (some minutes the first time)"
	$(PIP) torch
	$(PIP) -e '.[dev]'
	@touch $@ $(VENV)/.demo

# Packages of $(VENV) that are not here are taken from there, and umbel from this folder.
$(FLOWER)/.made: constraints-flower.txt $(VENV)/.dev
	@echo "installing Flower over $(VENV) into $(FLOWER) (a minute the first time)"
	$(BIN)/python -m venv --clear $(FLOWER)
	printf '%s\n' "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" "$(CURDIR)" \
		> "$$($(FLOWER)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth"
	$(FLOWER)/bin/python -m pip install --disable-pip-version-check --quiet -c constraints-flower.txt flwr
	@touch $@
