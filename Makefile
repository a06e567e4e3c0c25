# Everything a fresh machine needs is `make run` and `make test`.
# Needs python3 (3.11 or newer) and make; the rest goes into .venv.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.setup-done
CONFIG ?= configs/local.toml
# A part of the test run at most this many tests in parallel.
JOBS   ?= 2
TRACE  ?= ../shared/traces/conversation.jsonl
# What the client library of the mooncake backend is linked with.
LIBRARIES_READY = $(BIN)/python -c "import ctypes; [ctypes.CDLL(f'lib{n}.so.1') for n in ('ibverbs', 'rdmacm', 'numa')]" 2> /dev/null

# Within a recipe, followed by packages; asks for no password.
APT_INSTALL = sudo=""; test "$$(id -u)" = 0 || sudo="sudo -n"; $$sudo apt-get update -q && $$sudo apt-get install -qy

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help setup run test check format replay-mooncake replay-store-loss soak replay-full gpu $(addprefix gpu-,correct control order model sanitize bench) clean

help: ## Say what can be made
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 18

setup: $(STAMP) ## Make .venv and install the package in it; nothing to do the second time

$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV) || { \
	  echo "python3 cannot make a virtual environment; installing python3-venv"; \
	  sudo=""; test "$$(id -u)" = 0 || sudo=sudo; \
	  $$sudo apt-get update -q && $$sudo apt-get install -qy python3-venv && \
	  $(PYTHON) -m venv --clear $(VENV); }
	$(BIN)/pip install -q -c constraints.txt -e '.[test]'
	@$(LIBRARIES_READY) || { \
	  echo "the Mooncake client needs libibverbs1, librdmacm1 and libnuma1; installing them"; \
	  { $(APT_INSTALL) libibverbs1 librdmacm1 libnuma1; } || \
	  echo "that did not work: tests of backends/mooncake will fail (docs/mooncake.md)"; }
	@command -v cc >/dev/null || command -v gcc >/dev/null || command -v clang >/dev/null || { \
	  echo "there is no C compiler; installing gcc"; \
	  { $(APT_INSTALL) gcc libc6-dev; } || \
	  echo "that did not work: tests of tests/gpu_runtime/test_cuda_chunks.py will fail"; }
	@touch $@

run: setup ## Replay the small trace that the package ships (CONFIG=configs/local.toml)
	$(BIN)/kvstrata replay --config $(CONFIG)

test: setup check ## All checks, then all tests with coverage
	$(BIN)/pytest -n $(JOBS) --dist worksteal --cov --cov-report=term --cov-fail-under=90

check: setup ## Format, lint, types, import contracts, tidy
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pytest -q tests/checks/test_tidy.py

format: setup ## Format the code and mend what ruff can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

SOAK_OPERATIONS ?= 10000
SOAK_SEED ?=

soak: setup ## Storage workers over backends that fail in every way, from a seed (SOAK_SEED=…)
	$(BIN)/python -m kvstrata.backends.testing.soak --operations $(SOAK_OPERATIONS) \
	  $(if $(SOAK_SEED),--seed $(SOAK_SEED))

replay-mooncake: setup ## Replay a trace with a Mooncake Store as L3, on stores of its own (TRACE=…)
	$(BIN)/kvstrata mooncake up --config configs/mooncake.toml --private -- \
	  $(BIN)/kvstrata replay --config configs/mooncake.toml --requests 1000 --trace "$(TRACE)"

replay-store-loss: setup ## 1,000 requests with a Mooncake store that is killed, then a second client
	$(BIN)/pytest -s tests/backends/mooncake/test_processes.py -k replay 2>/dev/null

replay-full: setup ## Replay a whole trace in each replay configuration (TRACE=…)
	@test -f "$(TRACE)" || { echo "there is no trace $(TRACE): make replay-full TRACE=FILE"; exit 2; }
	for name in cache buffer-only; do \
	  rm -rf "var/replay-$$name" && \
	  $(BIN)/kvstrata replay --config "configs/replay-$$name.toml" --trace "$(TRACE)" \
	    --batch 1 --decode none || exit $$?; \
	done

GPU_PYTHON ?= $(BIN)/python

GPU_OUT    ?= var/gpu
GPU_PARTS  := correct control order model sanitize bench
RUN_PART    = PYTHONPATH=src $(GPU_PYTHON) tests/gpu_parts.py --out $(GPU_OUT)

gpu-correct: ## What needs a GPU: bytes, plans, order (GPU_PYTHON=python3 uses another Python)
	$(RUN_PART) run correct

gpu-control: ## The whole suite of control on a GPU
	$(RUN_PART) run control

gpu-order: ## 1,000 rounds with slow kernels under memory pressure
	$(RUN_PART) run order

gpu-model: ## A Transformers model on the GPU
	$(RUN_PART) run model

gpu-sanitize: ## A few tests under compute-sanitizer, where it is installed
	$(RUN_PART) run sanitize

gpu-bench: ## kvstrata bench transfer
	$(RUN_PART) run bench

gpu: ## Everything that needs a GPU, in parts of a few minutes each; then one JSON file, and a table
	for part in $(GPU_PARTS); do $(RUN_PART) run $$part || true; done
	$(RUN_PART) merge

clean: ## Remove what was made, but not .venv and not var
	rm -rf build dist *.egg-info src/*.egg-info .mypy_cache .ruff_cache .pytest_cache \
	  .hypothesis .import_linter_cache .coverage .coverage.*
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
