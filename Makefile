# Fairlane. `make` lists the targets. Needs Python >= 3.11 with venv and pip; everything else goes into .venv.

# Any Python 3.11-3.13: make setup PYTHON=python3.12
PYTHON ?= python3
# Where the model is pulled to can be moved with XDG_CACHE_HOME. More arguments for pip: make setup PIP_ARGS="..."
PIP_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp

# The folders gateway/, scheduler/, kernels/... must never be importable by their bare names because of the working directory.
export PYTHONSAFEPATH := 1

.DEFAULT_GOAL := help
.PHONY: help setup model run demo test test-long test-gpu sanitize-gpu bench-kernels bench-engine bench-serving bench-serving-gpu bench-gpu bench-scheduler bench-policies bench-simulator bench-replay bench-shares bench-shaping bench-tenants bench-tiers bench-cpu check format layering protos protos-check clean
.DELETE_ON_ERROR:

help: ## List the targets
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  make %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## Create .venv with everything (again only when pyproject.toml or constraints.txt change)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' || \
	  { echo "Fairlane needs Python 3.11, 3.12 or 3.13, and $(PYTHON) is `$(PYTHON) --version 2>&1`. Try: make setup PYTHON=python3.12"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt torch
	@$(BIN)/python -c "$$TORCH_CHECK"
	$(BIN)/pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e '.[all,dev]'
	@touch $@

# A CUDA build on a machine without a GPU works, but costs gigabytes; nobody should get one by accident.
define TORCH_CHECK
import sys, torch
if torch.version.cuda is None or torch.cuda.is_available():
    sys.exit(0)
sys.exit(f"""
torch {torch.__version__} is a CUDA build, but this machine shows no usable GPU.
  For the CPU build (smaller):
    .venv/bin/pip uninstall -y torch
    make setup PIP_ARGS='--extra-index-url URL'   # URL: the CPU wheel index that PyTorch's "Get started" page names
  With a GPU: repair the driver until `nvidia-smi` shows it, then run make setup again.""")
endef
export TORCH_CHECK

# Sets `python` in the recipe's shell to the first interpreter that has these modules and sees a GPU, or says why there is none.
with_gpu = python=; for tried in $(PYTHON) $(BIN)/python; do \
  why="$$why`$$tried -c "$$GPU_CHECK" $(1) 2>&1`\n" && python=$$tried && break; done; \
  test -n "$$python" || { printf '%b' "no CUDA device for make $@:\n$$why"; \
  echo "Name a Python whose torch is a CUDA build: make $@ PYTHON=python3.12"; exit 1; }

define GPU_CHECK
import importlib, sys
try:
    for name in sys.argv[1:]:
        importlib.import_module(name)
except ImportError as error:
    sys.exit(f"  {sys.executable}: {error}")
import torch
if torch.version.cuda is None:
    sys.exit(f"  {sys.executable}: torch {torch.__version__} is built without CUDA")
if not torch.cuda.is_available():
    sys.exit(f"  {sys.executable}: torch {torch.__version__} sees no GPU (does nvidia-smi show one?)")
endef
export GPU_CHECK

model: setup ## Fetch the default model (SmolLM2-135M-Instruct) into the cache
	$(BIN)/fairlane model pull

run: setup model ## Serve the default model on this machine
	$(BIN)/fairlane serve

demo: setup model ## Three tenants under FCFS, VIP and FAIR, live in this terminal (about two minutes)
	$(BIN)/fairlane demo $(DEMO_ARGS)

test: setup model ## Run the tests that need no GPU
	$(BIN)/pytest -n 2

# `make test` runs one to three hundred histories of each. JOBS processes share the HISTORIES of each property. A failure prints what
# to add above the test to see it again.
HISTORIES ?= 10000
JOBS ?= 1
test-long: setup ## The scheduler's hard properties over HISTORIES=10000 random ones each (some two hours of one core; JOBS=8 PYTEST_ARGS="-k f1")
	@$(BIN)/python tests/support/long_search.py --histories $(HISTORIES) --jobs $(JOBS) $(PYTEST_ARGS)

# On a GPU machine the CUDA build of torch is often $(PYTHON)'s own, and then no .venv is needed; nothing is installed here.
# Where there is pytest-xdist, files run side by side: most of the time goes into compiling. More: make test-gpu PYTEST_ARGS="-k sample"
test-gpu: ## Run the tests that need a GPU, with PYTHON or .venv, whichever sees one
	@$(call with_gpu,torch triton pytest hypothesis) && \
	  aside=`"$$python" -c 'import xdist' 2>/dev/null && echo "-n 6 --dist loadfile"`; set -x && PYTHONPATH=src$${PYTHONPATH:+:$$PYTHONPATH} \
	  "$$python" -m pytest -c tests/gpu/pytest.ini --rootdir=. --confcutdir=tests $$aside tests/gpu $(PYTEST_ARGS)

# Without torch's memory pool every tensor is an allocation of its own, so that memcheck sees where it ends. The first run, without
# a sanitizer, compiles. SANITIZE_ARGS: parts of cases' names, for some of them.
sanitize-gpu: ## compute-sanitizer's memcheck and racecheck over small shapes of every kernel (about three minutes)
	@command -v compute-sanitizer >/dev/null || { echo "make $@ needs compute-sanitizer on the PATH: it comes with the CUDA toolkit"; exit 1; }
	@$(call with_gpu,torch triton numpy) && set -x && export PYTHONPATH=src:tests/support$${PYTHONPATH:+:$$PYTHONPATH} && \
	  smoke="$$python tests/support/kernel_smoke.py $(SANITIZE_ARGS)" && check="compute-sanitizer --error-exitcode 3 --target-processes application-only" && \
	  $$smoke && PYTORCH_NO_CUDA_MEMORY_CACHING=1 $$check --tool memcheck $$smoke && $$check --tool racecheck $$smoke

bench-scheduler: setup ## A scheduler step's cost against a bare Python loop (about four minutes)
	PYTHONPATH=benchmarks $(BIN)/python benchmarks/bench_scheduler.py $(if $(JSON),--json $(JSON))

bench-policies: setup ## The policies' promises in the simulator, over five seeds, T1 and T2 (under a quarter of an hour on two cores)
	PYTHONPATH=benchmarks $(BIN)/python benchmarks/bench_policies.py $(if $(JSON),--json $(JSON)) $(BENCH_ARGS)

bench-simulator: setup ## How fast the simulator is (about two minutes)
	PYTHONPATH=benchmarks $(BIN)/python benchmarks/bench_simulator.py $(if $(JSON),--json $(JSON))

bench-replay: setup model ## The simulator against the real worker, recorded and replayed (a quarter of an hour, or twice that)
	PYTHONPATH=benchmarks $(BIN)/python benchmarks/bench_replay.py $(if $(JSON),--json $(JSON)) $(BENCH_ARGS)

bench-shaping: setup model ## VIPs under each shaping on the real worker: V1 and V2 (about seven minutes)
	PYTHONPATH=benchmarks $(BIN)/python benchmarks/bench_shaping.py $(if $(JSON),--json $(JSON))

bench-shares: setup model ## Weighted shares of four backlogged tenants on the real worker (about four minutes)
	PYTHONPATH=benchmarks $(BIN)/python benchmarks/bench_shares.py $(if $(JSON),--json $(JSON))

bench-tiers: setup model ## VIPs against a crowd on the real worker, FCFS and VIP (about a minute)
	PYTHONPATH=benchmarks $(BIN)/python benchmarks/bench_tiers.py $(if $(JSON),--json $(JSON))

bench-cpu: setup model ## Fairlane against transformers on this CPU, ceilings, a profile (about three minutes)
	PYTHONPATH=benchmarks $(BIN)/python benchmarks/bench_cpu.py $(if $(JSON),--json $(JSON))

bench-kernels: ## The GPU kernels against ceilings and published figures (about two minutes; BENCH_ARGS=--sweep: tuning)
	@$(call with_gpu,torch triton numpy) && set -x && PYTHONPATH=src:benchmarks$${PYTHONPATH:+:$$PYTHONPATH} \
	  "$$python" benchmarks/bench_kernels.py $(if $(JSON),--json $(JSON)) $(BENCH_ARGS)

bench-engine: ## The engine on one GPU against vLLM's and transformers' figures (about five minutes; BENCH_ARGS="--only H1")
	@$(call with_gpu,torch triton numpy yaml) && set -x && PYTHONPATH=src:benchmarks$${PYTHONPATH:+:$$PYTHONPATH} \
	  "$$python" benchmarks/bench_engine.py $(if $(JSON),--json $(JSON)) $(BENCH_ARGS)

bench-serving: setup model ## The gateway's cost: a load over gRPC against the engine alone (about two minutes; BENCH_ARGS=--help)
	PYTHONPATH=benchmarks $(BIN)/python benchmarks/bench_serving.py $(if $(JSON),--json $(JSON)) $(if $(BENCH_ARGS),$(BENCH_ARGS),--scale 0.05 --set threads=1)

GATEWAY_MODULES = torch triton numpy yaml grpc grpc_health grpc_reflection grpc_status watchfiles typer rich tokenizers jinja2 prometheus_client

# Where there is no network: the modules that are missing can lie in any folder that PYTHONPATH names.
bench-serving-gpu: ## The gateway on one GPU: the chat list over gRPC against the engine alone (about three minutes)
	@$(call with_gpu,$(GATEWAY_MODULES)) \
	  && set -x && PYTHONPATH=src:benchmarks$${PYTHONPATH:+:$$PYTHONPATH} \
	  "$$python" benchmarks/bench_serving.py --device cuda --model llama-3.1-8b $(if $(JSON),--json $(JSON)) $(BENCH_ARGS)

bench-tenants: ## Tenants beside each other under overload on one H200: latency, throughput, shares (about 14 minutes)
	@$(call with_gpu,$(GATEWAY_MODULES)) \
	  && set -x && PYTHONPATH=src:benchmarks$${PYTHONPATH:+:$$PYTHONPATH} \
	  "$$python" benchmarks/bench_tenants.py $(if $(JSON),--json $(JSON)) $(BENCH_ARGS)

bench-gpu: ## Kernels, engine and gateway on one H200, results into benchmarks/results (about five minutes)
	$(MAKE) bench-kernels JSON=benchmarks/results/bench_kernels-h200.json
	$(MAKE) bench-engine JSON=benchmarks/results/bench_engine-h200.json \
	  BENCH_ARGS="--model llama-3.1-8b,qwen3-0.6b,llama-2-7b --csv benchmarks/results/bench_engine-h200.csv"
	$(MAKE) bench-serving-gpu JSON=benchmarks/results/bench_serving-h200.json

check: setup layering protos-check ## Lint, format check, types, import rules, generated code
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	MYPYPATH=benchmarks $(BIN)/mypy benchmarks/*.py

layering: setup ## Check the folder layout and the import rules
	$(BIN)/pytest -q tests/unit/house/test_layout.py

format: setup ## Format the code and sort the imports
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

protos: setup ## Generate the code of protos/ again
	$(BIN)/python protos/generate.py

protos-check: setup ## Fail if the committed code of protos/ is not what its .proto files give
	@out=`mktemp -d` && trap 'rm -rf "$$out"' EXIT && $(BIN)/python protos/generate.py "$$out" >/dev/null && \
	  for f in "$$out"/fairlane/v1/*; do \
	    diff -u "protos/fairlane/v1/$${f##*/}" "$$f" || { echo "protos/fairlane/v1/$${f##*/} is stale: run make protos"; exit 1; }; \
	  done

clean: ## Remove .venv, caches and build outputs
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
