# The two commands: `make demo` and `make test`. Each sets up .venv on first use and works offline after.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
BROWSER := $(VENV)/.browser
PEER := $(VENV)/peers/kondo_gate-0.1.0.tar.gz
VERL := .venv-verl
TRL_OLDEST := .venv-trl-oldest

.PHONY: demo test test-core test-slow test-trl-oldest test-verl attack mutants lint bench bench-lab docs dist clean

demo: $(READY)
	$(BIN)/kondo demo

# Coverage is of core and engine, and a test takes up to twice as long with it: only the tests of those
# two have it. mypy uses one core, so that the tests of core start beside it. Files stay in order: the
# last are doctests, which are short, and no worker waits for the other at the end.
# Where bytecode is not written, each of some hundred processes would compile this repository anew.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not slow"
CORE := tests/core tests/engine tests/invariants src/kondo/core src/kondo/engine
test: $(READY) $(PEER) $(BROWSER)
	$(MAKE) --no-print-directory --jobs=2 lint test-core
	$(PYTEST) $(CORE:%=--ignore=%)

test-core: $(READY)
	$(PYTEST) $(CORE) --cov --cov-report=term --cov-fail-under=95

# The docs site in site/: open site/index.html, no server and no network needed.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# One after another: they start clusters, kill processes and wait for them to come back.
test-slow: $(READY)
	$(BIN)/python -m pytest -m slow tests

# The TRL trainer with the oldest TRL that it supports, in an environment of its own; the newest is
# what `make test` has.
test-trl-oldest: $(TRL_OLDEST)/.ready
	$(TRL_OLDEST)/bin/python -m pytest tests/integrations/trl -m "not slow"

# verl pins transformers and tensordict below ours, so it has an environment of its own.
test-verl: $(VERL)/.ready
	$(VERL)/bin/python -m pytest tests/integrations/verl

# Every fuzzer for SECONDS, and the chaos run of the actors. ATTACK='-k ranks' runs one of them.
SECONDS ?= 75
attack: $(READY)
	$(BIN)/python -m pytest tests/attack -m "slow or not slow" --timeout 3600 \
		--attack-seconds $(SECONDS) $(ATTACK)

# Every fault of tests/mutants/*.toml in a copy of its own. MUTANTS='-k ranks' plants some of them.
mutants: $(READY)
	PYTHONPATH=tests $(BIN)/python -m mutants.runner $(MUTANTS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(READY)
	$(BIN)/python benchmarks/bench_step.py

bench-lab: $(READY)
	$(BIN)/python benchmarks/bench_lab.py

# Source distributions and wheels of both, as docs/contributing/releasing.md uploads them.
dist: $(READY)
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist .
	$(BIN)/python -m build --no-isolation --outdir dist lab
	$(BIN)/python -m twine check --strict dist/*

# torch is asked for by its exact pin before anything that depends on it: the constraint then finds
# the build at hand, and nothing later in the install can widen the choice.
$(READY): pyproject.toml lab/pyproject.toml lab/setup.py constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]' --editable './lab[control]'
	touch $@

$(TRL_OLDEST)/.ready: pyproject.toml constraints-trl-oldest.txt
	test -x $(TRL_OLDEST)/bin/python || $(PYTHON) -m venv $(TRL_OLDEST)
	$(TRL_OLDEST)/bin/python -m pip install --quiet "$$(grep '^torch==' constraints-trl-oldest.txt)"
	$(TRL_OLDEST)/bin/python -m pip install --quiet --requirement constraints-trl-oldest.txt
	$(TRL_OLDEST)/bin/python -m pip install --quiet --no-deps --editable .
	touch $@

# cachetools, fastapi, nvtx and uvicorn are imported by verl's servers, and are not among what it requires.
$(VERL)/.ready: pyproject.toml constraints-verl.txt
	test -x $(VERL)/bin/python || $(PYTHON) -m venv $(VERL)
	$(VERL)/bin/python -m pip install --quiet --constraint constraints-verl.txt "$$(grep '^torch==' constraints-verl.txt)"
	$(VERL)/bin/python -m pip install --quiet --constraint constraints-verl.txt --editable '.[verl]' \
		cachetools fastapi nvtx uvicorn hypothesis pytest pytest-timeout
	touch $@

# The source distribution of the package we stand in for: its own tests run against our module.
# Without a registry the tests that need it are skipped, with the reason.
$(PEER): $(READY)
	-$(BIN)/python -m pip download --quiet --no-deps --no-build-isolation --no-binary :all: \
		--dest $(VENV)/peers kondo-gate==0.1.0
	mkdir -p $(VENV)/peers

# The report is tested in Debian's Chromium. It is asked for once, and only where apt-get may install
# it; without it the tests that need it are skipped, with the reason.
INSTALL := DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends chromium
$(BROWSER): | $(READY)
	@command -v chromium > /dev/null \
		|| { test "$$(id -u)" = 0 && command -v apt-get > /dev/null && echo "installing chromium" \
			&& { $(INSTALL) || { apt-get update -qq && $(INSTALL); }; } > $@.log 2>&1; } \
		|| echo "Chromium is not here and could not be installed: its tests will be skipped"
	@touch $@

clean:
	rm -rf $(VENV) $(TRL_OLDEST) $(VERL) build dist site kondo-demo* kondo-runs report.html .coverage .mypy_cache .pytest_cache .ruff_cache .hypothesis
