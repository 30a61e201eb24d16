"""Cost of `fp8moe warmup` for whole models, and the number of kernels that models still compile afterwards."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.decode import ROOM, random_prompts
from benchmarks.report import Bar, Benchmark, Option
from benchmarks.whole_models import CONFIGS, WHOLE, build
from fp8moe.decode import GraphDecoder

MODELS = ("qwen3-30b-a3b", "deepseek-v3")
BATCH_SIZES, LONGEST = (1, 8, 64), 8192
STEPS = ((1, 512), (8, 512), (64, 512), (1, LONGEST))  # (batch, prompt tokens) of decode steps
POWERS = [1 << i for i in range(LONGEST.bit_length())]
LENGTHS = sorted({*range(1, 40), *POWERS, *(power + 1 for power in POWERS[:-1]), 200, 300, 700, 1500, 3000, 5000, 6500})


def configuration(name: str) -> dict[str, Any]:
    """Make the config.json of an FP8 checkpoint of the whole model."""
    model_type, options = CONFIGS[name]
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    return {"model_type": model_type, **options, **WHOLE.get(name, {}), "quantization_config": quantization}


def run_python(program: str, *arguments: str, **environment: str) -> str:
    """Run a Python program in another process; return what it prints. CalledProcessError if it fails."""
    line = [sys.executable, "-c", program, *arguments]
    return subprocess.run(line, env=os.environ | environment, check=True, stdout=subprocess.PIPE, text=True).stdout


def fill_cache(name: str, directory: Path) -> dict:
    """Run `fp8moe warmup` for BATCH_SIZES and prompts of up to LONGEST tokens; return a row with its cost."""
    source = directory / "config.json"
    source.write_text(json.dumps(configuration(name)))
    sizes = ["--batch-sizes", *map(str, BATCH_SIZES), "--max-length", str(LONGEST + ROOM)]
    options = [*sizes, "--tokens", str(LONGEST), "--output", str(directory / "cache")]
    begin = time.perf_counter()
    run_python("import sys; from fp8moe.cli import main; sys.exit(main())", "warmup", str(source), *options)
    seconds = time.perf_counter() - begin
    cubins = [size for path in (directory / "cache").rglob("*") if path.is_file() and (size := path.stat().st_size)]
    found = {"kernels": len(cubins), "mb": sum(cubins) / 1e6, "seconds": seconds}
    return {"model": name, "cpus": len(os.sched_getaffinity(0)), **found}


def compiled_by(name: str, lengths: Iterable[int] = LENGTHS) -> list[str]:
    """Return the names of kernels that a model compiles in this process, for STEPS and for prompts of `lengths`."""
    from fp8moe.runtime import compilers

    compiled: list[str] = []
    compile_source = compilers.compile_source

    def count(text: str, kernel: str, *options: str) -> tuple[bytes, str]:
        compiled.append(kernel)
        return compile_source(text, kernel, *options)

    compilers.compile_source = count
    model = build(name)
    for batch, prompt in STEPS:
        decoder = GraphDecoder(model, batch_sizes=(batch,), max_length=prompt + ROOM)
        decoder.generate(random_prompts(model, batch, prompt), max_new_tokens=3, eos_token_id=())
        decoder.close()
    decoder = GraphDecoder(model, batch_sizes=(1,), max_length=LONGEST + ROOM)
    for length in lengths:
        decoder.generate(random_prompts(model, 1, length), max_new_tokens=1, eos_token_id=())
    decoder.close()
    return compiled


COMPILED = "import json, sys; from {} import compiled_by; print(json.dumps(compiled_by(sys.argv[1])))"


def measure(model: Sequence[str] = MODELS) -> Iterator[dict]:
    """Warm up a kernel cache, then count the kernels that the model still compiles with this cache; the goal is 0."""
    for name in model:
        with tempfile.TemporaryDirectory() as directory:
            row = fill_cache(name, Path(directory))
            cache = str(Path(directory) / "cache")
            printed = run_python(COMPILED.format(__name__), name, FP8MOE_CACHE_DIR=cache)
        missing = json.loads(printed.splitlines()[-1])
        yield row | {"compiled": len(missing), "missing": missing}


WARMUP = Benchmark(
    "warmup",
    measure,
    ("model", "cpus", "kernels", "mb", "seconds", "compiled"),
    [Bar("{model}, kernels compiled after warm-up", "compiled", 0)],
    {"model": Option(MODELS, MODELS)},
)
