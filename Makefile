# make demo | test | test-slow | lint | format | bench | docs | clean
# Needs python3 (3.11.4 or newer) and make; everything else is installed into .venv.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt

.PHONY: help demo test test-slow lint format bench docs clean

help:
	@sed -n '1,2s/^# //p' Makefile

# One stamp per set of packages. When pyproject.toml or constraints.txt change, the virtualenv is recreated,
# so that it never holds a package the files no longer name.
$(VENV)/made: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11, 4) else "equipoise needs Python 3.11.4 or newer, and $(PYTHON) is " + sys.version.split()[0] + ": try make PYTHON=python3.12")'
	@echo 'setting up $(VENV) (once; a minute or two)'
	@$(PYTHON) -m venv --clear $(VENV)
	@touch $@

$(VENV)/with-lab: $(VENV)/made
	$(PIP) -e '.[lab]'
	@touch $@

$(VENV)/with-dev: $(VENV)/made
	$(PIP) -e '.[dev,lab,attacks,baselines,tensorboard,onnx,page,bench]'
	@touch $(VENV)/with-lab $(VENV)/with-bench $@

$(VENV)/with-bench: $(VENV)/made
	$(PIP) -e '.[bench]'
	@touch $@

$(VENV)/with-docs: $(VENV)/made
	$(PIP) -e '.[docs,lab,onnx]'
	@touch $(VENV)/with-lab $@

# Tensors this small gain little from more threads, and lose much when a core is busy.
demo: $(VENV)/with-lab
	$(BIN)/equipoise train core/digits --report --threads 1

# Two workers with one thread each are faster and steadier on small tensors than one worker with all threads.
test test-slow: export OMP_NUM_THREADS = 1
test: $(VENV)/with-dev
	$(BIN)/python -m pytest -q -n 2

test-slow: $(VENV)/with-dev $(VENV)/with-docs
	$(BIN)/python -m pytest -q -n 2 -m slow || test $$? -eq 5  # 5: no test is that slow (yet)

# The wrapper would ask the network whether a newer pyright exists.
lint: export PYRIGHT_PYTHON_IGNORE_WARNINGS = 1
lint: $(VENV)/with-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(VENV)/with-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/with-bench
	$(BIN)/python benchmarks/bench.py

# The site, in docs/_build/html: the pages, the tutorials with their pictures, the reference. Warnings are errors.
docs: export OMP_NUM_THREADS = 1
docs: $(VENV)/with-docs
	$(BIN)/python -m sphinx -q -W --keep-going -j 2 -c docs/site -d docs/_build/doctrees . docs/_build/html
	@echo 'built docs/_build/html/index.html'

clean:
	rm -rf docs/_build docs/reference docs/tutorials
	rm -rf $(VENV) runs dist .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
