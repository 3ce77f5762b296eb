# `make demo` runs the main job on a real model; `make test` passes the tests. Both set themselves up.
# On a machine whose package index has no CPU build of torch, name PyTorch's:
#   PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make demo

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
LOCK := $(shell cat requirements/cpu.txt | cksum | tr -d ' ')
# Published quantizers to compare bytes with, and Triton, each apart from the environment.
ORACLE_LIST := tests/kernels/oracles.txt
TRITON_LIST := tests/kernels/triton.txt
DEV_LOCK := $(shell cat requirements/dev.txt $(ORACLE_LIST) $(TRITON_LIST) | cksum | tr -d ' ')
READY := $(VENV)/.ready-$(LOCK)
DEV_READY := $(VENV)/.dev-ready-$(DEV_LOCK)
ORACLES := .oracles
TRITON := .triton
# SGLang pins other packages than vLLM: an environment of its own, found through this variable.
export MINITE_DIAG_ENVIRONMENTS ?= $(CURDIR)/.environments
SGLANG := $(MINITE_DIAG_ENVIRONMENTS)/sglang/minite-diag-ready.txt
RUN ?= runs/demo
export OMP_NUM_THREADS ?= 2
# Test files run side by side, each on one thread: small models gain nothing from a second one.
WORKERS ?= 2

.PHONY: demo test lint wheel clean

demo: $(READY)
	rm -rf $(RUN)
	$(BIN)/minite-diag compare --learner te --sampler vllm --model demo --out $(RUN)

test: export OMP_NUM_THREADS = 1
test: $(DEV_READY) $(SGLANG) lint wheel
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(PYTEST_ARGS)

lint: $(DEV_READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The wheel is built once and looked into: what users install must hold probes and templates.
wheel: $(DEV_READY)
	rm -rf build dist
	$(BIN)/pip wheel -q --no-deps --no-build-isolation -w dist .
	$(BIN)/python tests/check_wheel.py dist

$(READY): requirements/cpu.txt pyproject.toml
	@echo "setting up $(VENV): about 160 pinned packages, some minutes the first time"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --disable-pip-version-check --progress-bar off --no-deps -r requirements/cpu.txt
	$(BIN)/pip install --disable-pip-version-check -q --no-deps --no-build-isolation -e .
	touch $@

$(DEV_READY): $(READY) requirements/dev.txt $(ORACLE_LIST) $(TRITON_LIST)
	$(BIN)/pip install --disable-pip-version-check -q --no-deps -r requirements/dev.txt
	rm -rf $(ORACLES) $(TRITON)
	$(BIN)/pip install --disable-pip-version-check -q --no-deps --target $(ORACLES) -r $(ORACLE_LIST)
	$(BIN)/pip install --disable-pip-version-check -q --no-deps --target $(TRITON) -r $(TRITON_LIST)
	touch $@

$(SGLANG): minite_diag/environments/sglang.txt $(wildcard minite_diag/environments/*/*.py) pyproject.toml | $(DEV_READY)
	$(BIN)/minite-diag env create sglang

clean:
	rm -rf $(VENV) .environments $(ORACLES) $(TRITON) build dist
