# Everything runs from .venv, made on first use from the pinned versions in requirements.lock.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test lint format lock clean

demo: .venv/ready  ## what the library does, in under two minutes
	$(BIN)/safeicrl demo

test: .venv/ready lint  ## everything the continuous integration checks; a file of tests stays in one process
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile

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
	  --extra mujoco --extra dev --extra tensorboard --extra minari pyproject.toml -o requirements.lock

clean:
	rm -rf .venv build dist *.egg-info
