# Everything runs from .venv, made on first use from the pinned versions in requirements.lock.
PYTHON ?= python3
BIN := .venv/bin

# What matters most, for the inner loop: the paper's equations, trials, tokens, cached attention, what users meet.
QUICK := $(addprefix tests/test_, penalty.py returns.py trial.py spaces.py transformer.py policy.py imports.py errors.py \
  cli.py::test_mistakes_are_one_line) \
  'tests/test_scared.py::test_real_valued_actions_and_costs[ppo]'

.PHONY: demo test quick docs mutants lint format lock clean

demo: .venv/ready  ## what the library does, in half a minute
	$(BIN)/safeicrl demo

test: .venv/ready lint  ## everything the continuous integration checks; a file of tests stays in one process
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile

quick: .venv/ready lint  ## lint, types and the tests that matter most; with programs compiled by an earlier run
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile $(QUICK)

docs: .venv/ready  ## the documentation site, in build/docs; a warning or a page that needs the network is an error
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going -c docs/site . build/docs
	@echo "open build/docs/index.html"

mutants: .venv/ready  ## put deliberate faults into a copy, one by one: a test must fail; ONLY=part of a name
	$(BIN)/python tests/mutants.py "$(ONLY)"

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.venv/ready: requirements.lock pyproject.toml
	$(PYTHON) -c 'import sys; assert (3, 11) <= sys.version_info < (3, 14), "safeicrl needs Python 3.11-3.13"'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --editable .
	touch $@

lock:  ## resolve the ranges of pyproject.toml anew (needs uv)
	uv pip compile --universal --python-version 3.11 --no-header --no-annotate \
	  --extra mujoco --extra dev --extra tensorboard --extra minari --extra pandas --extra onnx --extra play --extra docs \
	  --extra ray \
	  pyproject.toml -o requirements.lock

clean:
	rm -rf .venv .cache build dist *.egg-info
