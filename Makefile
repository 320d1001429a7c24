# `make demo` and `make test` each make the environment they need and reuse it as long as pyproject.toml and
# constraints.txt stay the same. PYTHON chooses the interpreter, VENV the folder of the environment.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PINS := $(shell cat pyproject.toml constraints.txt | cksum | cut -d' ' -f1)
FOR_DEMO := $(VENV)/.demo-$(PINS)
FOR_TEST := $(VENV)/.test-$(PINS)
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

# `make test ROOM=optim` is the fast loop: lint, and the tests of one room. K narrows these as pytest's -k does.
ROOMS := $(sort $(notdir $(patsubst %/__init__.py,%,$(wildcard tests/*/__init__.py))))
ROOM :=
K :=
# Files in order on each worker: tests that fork go before those that use an accelerator. One thread each: OpenMP spins.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

.PHONY: help demo test lint types docs unit room slow clean

help:
	@echo "make demo   train a small language model within a memory budget (a few minutes on 2 CPU cores)"
	@echo "make test   all that CI runs: lint, types, docs, tests (one part alone: make lint|types|docs|unit)"
	@echo "make test ROOM=optim [K=kahan]   lint, and the tests of one room: tests/optim (K: pytest's -k)"
	@echo "make slow   the long sweeps"
	@echo "make clean  remove the environment and what the tools left"

demo: $(FOR_DEMO)
	$(BIN)/memkit fit --config examples/pretrain_causal_lm/budget.yaml --config examples/pretrain_causal_lm/demo.yaml \
	  $$($(BIN)/python -c 'import torch; print("--config examples/pretrain_causal_lm/demo_on_gpu.yaml" * torch.cuda.is_available())')

# Two at once: those that use one core run beside each other, and the longest of them beside the first tests.
ifeq ($(strip $(ROOM)),)
test: $(FOR_TEST)
	@$(MAKE) --no-print-directory --jobs=2 lint types docs unit
else ifeq ($(words $(ROOM)) $(filter $(ROOM),$(ROOMS)),1 $(strip $(ROOM)))
test: lint room
else
test:
	@echo "ROOM=$(ROOM) is no room of tests/; there are: $(ROOMS)" >&2; exit 2
endif

lint: $(FOR_TEST)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(FOR_TEST)
	$(BIN)/pyright --pythonpath $(BIN)/python

docs: $(FOR_TEST)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

unit: $(FOR_TEST)
	$(PYTEST)

room: $(FOR_TEST)
	$(PYTEST) -m "not slow" tests/$(ROOM) $(if $(K),-k "$(K)")

slow: $(FOR_TEST)
	$(PYTEST) -m slow

clean:
	rm -rf $(VENV) site .pytest_cache .ruff_cache

$(BIN)/python:
	$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 10) and 'memkit needs Python 3.10 or newer: make PYTHON=python3.11 ...')"
	$(PYTHON) -m venv $(VENV)

# The test environment holds all of the demo's: then there is nothing to install.
$(FOR_DEMO): | $(BIN)/python
	test -e $(FOR_TEST) || $(INSTALL) --editable .
	@touch $@

$(FOR_TEST): | $(BIN)/python
	$(INSTALL) --editable '.[dev,docs]'
	@touch $@
