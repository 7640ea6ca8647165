# Every target installs what it needs into .venv, pinned, the first time it is called.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Python compiles the modules that are imported; pip would compile all that it installs, ten thousand more.
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
# Where this is set, each process compiles torch's modules again, seven seconds of each test that starts one.
unexport PYTHONDONTWRITEBYTECODE

# Threads that wait for each other sleep. By default they spin, which on a machine that others use as well made the demo's
# eager arm ten times slower (2 cores at load 4, torch 2.13).
export OMP_WAIT_POLICY ?= passive

.DEFAULT_GOAL := help
.PHONY: help demo docs test test-all test-gpu test-gpu2 test-matrix slow-tests mutations fuzz sweep lint format clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/demo.done ## Train a small Llama eagerly, compiled, and in FP8; ARGS="--recipes current --steps 300"
	$(BIN)/python -m examples.demo $(ARGS)

docs: $(VENV)/dev.done $(VENV)/docs.done ## Build the site into out/site; a warning is an error; SITE=--without-outputs
	$(BIN)/python docs/build_site.py out/site $(SITE)

test: $(VENV)/dev.done ## Run the quick tests that need no GPU; ARGS="-k explain"
	$(BIN)/python -m pytest -m "not gpu and not gpu2 and not thorough" --ignore tests/gpu -n 2 --dist worksteal $(ARGS)

slow-tests: $(VENV)/dev.done ## Run the quick tests and list the dearest by processor time; ARGS="tests/backend --costs 20"
	$(BIN)/python -m pytest -p tests.cpu_time -m "not gpu and not gpu2 and not thorough" --ignore tests/gpu -n 2 --dist worksteal $(ARGS)

test-all: $(VENV)/dev.done ## Run all tests that need no GPU
	$(BIN)/python -m pytest -m "not gpu and not gpu2" --ignore tests/gpu --whole -n 2 --dist worksteal $(ARGS)

test-gpu: $(VENV)/dev.done ## Run the tests that need a GPU
	$(BIN)/python -m pytest -m gpu $(ARGS)

test-gpu2: $(VENV)/dev.done ## Run the tests that need two GPUs
	$(BIN)/python -m pytest -m gpu2 $(ARGS)

test-matrix: ## Run them on each Python and torch that we support; ARGS="--cell 3.12:2.13.0 tests/numerics"
	$(PYTHON) -m tests.matrix $(ARGS)

fuzz: $(VENV)/dev.done ## Check 2,000 random models, 50 compiled, 2,000 that write in place; ARGS="--seed 7 --cases 200 --compiled 0"
	$(BIN)/python -m pytest tests/backend/test_fuzz.py tests/backend/test_writes.py -n 2 --cases 2000 --compiled 50 $(ARGS)

sweep: $(VENV)/dev.done ## Take a step of every class of transformers that can be tiny; ARGS="--kinds image"
	$(BIN)/python -m tests.sweep $(ARGS)

mutations: $(VENV)/dev.done ## Check that make test finds faults that are put into the package
	$(BIN)/python -m tests.mutations $(ARGS)

lint: $(VENV)/dev.done ## Check style, formatting and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(VENV)/dev.done ## Format the sources and apply the safe fixes
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean: ## Remove .venv, caches and figures
	rm -rf $(VENV) .venv-matrix out build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

# A GPU machine keeps the torch it has, if that is one we support and it sees the GPU; any other gets the pinned one.
USABLE_TORCH := import sys, torch; sys.exit(not torch.cuda.is_available() or torch.__version__ < (2, 11))

# On a core that pip leaves idle. Otherwise each worker of pytest compiles all of it, at the same time, and the first that
# compiles C++ its headers.
COMPILE_TORCH = ( \
	$(BIN)/python -c "import torch._inductor.compile_fx, torch.distributed.fsdp"; \
	OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1 TORCHINDUCTOR_VEC_ISA_OK=1 $(BIN)/python -m tests.hastened \
) >/dev/null 2>&1

$(BIN)/python:
	@if $(PYTHON) -c "$(USABLE_TORCH)" 2>/dev/null; then \
		echo "using this machine's torch"; \
		$(PYTHON) -m venv --system-site-packages $(VENV); \
	else \
		$(PYTHON) -m venv $(VENV); \
	fi

$(VENV)/torch.done: requirements/torch.txt requirements/constraints.txt | $(BIN)/python
	@$(BIN)/python -c "$(USABLE_TORCH)" 2>/dev/null || { echo "installing torch"; $(INSTALL) -r $<; }
	@touch $@

# Sphinx, beside what the tests need: the package is in the environment by then, and stays as it is while tests run.
$(VENV)/docs.done: requirements/docs.txt requirements/constraints.txt | $(VENV)/dev.done
	@echo "installing $<"
	@$(INSTALL) -r $<
	@touch $@

$(VENV)/%.done: requirements/%.txt requirements/constraints.txt pyproject.toml setup.cfg | $(VENV)/torch.done
	@echo "installing requirements/$*.txt"
	@$(COMPILE_TORCH) & $(INSTALL) -r $<; status=$$?; wait; exit $$status
	@$(INSTALL) --no-deps --no-build-isolation --editable .
	@touch $@
