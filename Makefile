# make demo: train ResNet20 on the embedded digits, in fixed point and in float32
# make test: all tests            make lint: format, lint and types
VENV ?= .venv
PYTHON ?= python3
PIP = $(VENV)/bin/python -m pip install --quiet -c constraints.txt

.PHONY: demo test lint

demo: $(VENV)/installed
	$(VENV)/bin/python -m train.demo

test: $(VENV)/installed-dev
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n auto

lint: $(VENV)/installed-dev
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/pyright

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) -e .
	touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(PIP) -e ".[dev,qtorch]"
	touch $@
