# make demo    decode a batch of mixed lengths, checked, with a picture of its schedule
# make test    every test that this machine can run; PYTEST_ARGS=--slow adds those that take minutes on a CPU
# make lint    style, types, whether tables and report match the result files, whether the docs build
# make bench   measure all operators on this machine's GPU
# make tables  write the tables and the report from the result files
# make docs    build the documentation into site/
# make clean   remove environments and outputs
#
# Each sets up what it needs in $(VENV). To use a Python that has torch and triton already (a GPU machine without
# a network), name it and leave VENV empty: make test PYTHON=python3 VENV=

PYTHON ?= python3
VENV ?= .venv

# The lowest and the highest Triton that is supported. The second one is for compile tests only.
TORCH := 2.13.0
TRITON_MIN := 3.6.0
TRITON_MAX := 3.8.0

# Tests run in parallel on CPU cores; on a GPU one after the other, so that memory and timings stay their own.
GPU := $(shell command -v nvidia-smi 2>/dev/null)
WORKERS ?= $(if $(GPU),0,$(shell nproc 2>/dev/null || echo 1))
PYTEST_ARGS ?=

ifeq ($(strip $(VENV)),)
RUN := PYTHONPATH=src$${PYTHONPATH:+:$$PYTHONPATH} $(PYTHON)
SETUP :=
DOCS_SETUP :=
SECOND_TRITON :=
else
RUN := $(VENV)/bin/python
SETUP := $(VENV)/.stamp-dev
DOCS_SETUP := $(VENV)/.stamp-docs
SECOND_TRITON := .triton/$(TRITON_MAX)/.stamp
endif
PIP := $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check

# A broken link, a missing page or a docstring that does not parse is an error.
MKDOCS := NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict
REPORT := $(RUN) -m hpc bench report benchmarks/results -o docs/measured.md

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint format bench tables docs triton-max clean

help:
	@sed -n '1,/^$$/s/^# \{0,1\}//p' Makefile

setup: $(SETUP)

demo: $(SETUP)
	$(RUN) -m hpc demo

# With a GPU the kernels of this process are compiled ones; the interpreted ones get a process of their own.
test: $(SETUP) $(SECOND_TRITON)
	$(if $(GPU),TRITON_INTERPRET=1 $(RUN) -m pytest -m interpret)
	$(RUN) -m pytest $(if $(filter-out 0,$(WORKERS)),-n $(WORKERS)) $(PYTEST_ARGS)

lint: $(SETUP) $(DOCS_SETUP)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(RUN) tools/readme_tables.py --check
	$(RUN) tools/serving_tables.py --check
	$(REPORT) --check
	$(MKDOCS) --site-dir site

format: $(SETUP)
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

bench: $(SETUP)
	$(RUN) -m hpc bench --save
	$(MAKE) tables

tables: $(SETUP)
	$(REPORT)
	$(RUN) tools/readme_tables.py
	$(RUN) tools/serving_tables.py

docs: $(DOCS_SETUP)
	$(MKDOCS) --site-dir site

triton-max: .triton/$(TRITON_MAX)/.stamp

clean:
	rm -rf .venv .triton site build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find src tests tools benchmarks -name __pycache__ -prune -exec rm -rf {} +

# Triton is installed around pip's resolver, before and after: a CUDA build of torch asks for one exact version of it,
# and the tests want the lowest that is supported.
$(VENV)/.stamp-dev: pyproject.toml constraints/dev.txt Makefile
	@echo "Setting up $(VENV): torch $(TORCH), triton $(TRITON_MIN) and the tools. This takes some minutes the first time."
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch==$(TORCH)
	$(PIP) --no-deps triton==$(TRITON_MIN)
	$(PIP) -c constraints/dev.txt -e '.[test,bench,lint]'
	$(PIP) --no-deps triton==$(TRITON_MIN)
	touch $@

$(VENV)/.stamp-docs: $(VENV)/.stamp-dev
	$(PIP) -c constraints/dev.txt -e '.[docs]'
	$(PIP) --no-deps triton==$(TRITON_MIN)
	touch $@

.triton/$(TRITON_MAX)/.stamp: $(SETUP)
	@echo "Fetching triton $(TRITON_MAX) for the compile tests."
	test -d .triton/$(TRITON_MAX)/triton || $(PIP) --no-deps --target .triton/$(TRITON_MAX) triton==$(TRITON_MAX)
	touch $@
