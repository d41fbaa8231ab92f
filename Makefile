# Every target is a command a user runs too. `make help` lists them.
.DEFAULT_GOAL := help
SHELL := /bin/bash
BIN := .venv/bin
SOURCES := $(shell git ls-files 'lptctl/*.py' 'engine/*.py' 'plotting/*.py' 2>/dev/null)

.PHONY: help demo test test-gpu soak lint format bench-cpu bench-gpu bench-gpu-peers bench-cli operator-table docs-tables constraints clean

help:  ## Show this list
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' Makefile

.venv/.engine: pyproject.toml constraints.txt tools/make_env.sh
	tools/make_env.sh engine

.venv/.dev: .venv/.engine
	tools/make_env.sh dev

demo: .venv/.engine  ## Train several recipes on this machine and draw the comparison (under 5 minutes on 2 cores)
	tools/demo.sh

test: .venv/.dev  ## Run every test (builds the environment first)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

test-gpu: .venv/.dev  ## Run the tests that need a GPU
	TRITON_INTERPRET=0 $(BIN)/python -m pytest -m gpu --timeout 1800 tests/gpu

soak: .venv/.dev  ## Run the long tests: full products, every fault, many random kills
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m soak --timeout 3600

lint: .venv/.dev  ## Check style, types and import directions
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p lptctl -p plotting

format: .venv/.dev  ## Apply the house style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench-cpu: .venv/.dev  ## Quantise-dequantise on this CPU against torchao, interleaved -> docs/benchmarks/cpu-quantise.md
	$(BIN)/python -m tools.bench_cpu

bench-gpu: .venv/.dev  ## Quantise kernels on this GPU as fractions of its copy bandwidth -> docs/benchmarks/
	$(BIN)/python -m tools.bench_gpu --check

bench-gpu-peers: .venv/.dev  ## The same beside torchao's compiled to_mx -> docs/benchmarks/
	$(BIN)/python -m tools.bench_gpu --peers --only quantise

bench-cli: .venv/.dev  ## Start-up of lptctl against a bare typer app, plan of 10,000 runs -> docs/benchmarks/cli.md
	$(BIN)/python -m tools.bench_cli

operator-table: .venv/.engine  ## SNR and bias of each recipe's three GEMMs -> docs/operator-table.md
	$(BIN)/python -m engine.recipes.score --out docs/operator-table.md

docs-tables: .venv/.engine  ## Refresh the generated tables in docs/
	$(BIN)/python -m tools.docs_tables

constraints: .venv/.dev  ## Pin the versions of this environment in constraints.txt
	tools/pin_constraints.sh

clean:  ## Remove the environment and caches (never runs/)
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
