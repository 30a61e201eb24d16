"""`fp8moe warmup` of whole models, and what they compile after it: `python -m benchmarks.warmup [--model M ...]`.

- `kernels`, `mb`, `seconds`: of the command with an empty directory, for decode steps of BATCH_SIZES and prompts of up
  to LONGEST tokens, in one process for each of `cpus`.
- `compiled`: what the model, with random weights, still compiles in a process of its own that reads this directory:
  decode steps behind the prompts of STEPS, and prompts of every number of tokens in LENGTHS. The goal is nothing.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import command
from benchmarks.decode import ROOM, random_prompts
from benchmarks.report import Threshold, format_table
from benchmarks.whole_models import CONFIGS, WHOLE, build

MODELS = ("qwen3-30b-a3b", "deepseek-v3")
BATCH_SIZES, LONGEST = (1, 8, 64), 8192
STEPS = ((1, 512), (8, 512), (64, 512), (1, LONGEST))  # batch and prompt
POWERS = [1 << i for i in range(LONGEST.bit_length())]
LENGTHS = sorted({*range(1, 40), *POWERS, *(power + 1 for power in POWERS[:-1]), 200, 300, 700, 1500, 3000, 5000, 6500})
COLUMNS = ("model", "cpus", "kernels", "mb", "seconds", "compiled")


def configuration(name: str) -> dict[str, Any]:
    """What config.json says of an FP8 checkpoint of the whole model."""
    model_type, options = CONFIGS[name]
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    return {"model_type": model_type, **options, **WHOLE.get(name, {}), "quantization_config": quantization}


def warm_up(name: str, directory: Path) -> dict:
    """Fills the directory; the row of the model, but for what it compiles afterwards."""
    source = directory / "config.json"
    source.write_text(json.dumps(configuration(name)))
    sizes = ["--batch-sizes", *map(str, BATCH_SIZES), "--max-length", str(LONGEST + ROOM)]
    options = [*sizes, "--tokens", str(LONGEST), "--output", str(directory / "cache")]
    begin = time.perf_counter()
    run_python("import sys; from fp8moe.cli import main; sys.exit(main())", "warmup", str(source), *options)
    seconds = time.perf_counter() - begin
    files = [path for path in (directory / "cache").rglob("*") if path.is_file()]
    cubins = [path.stat().st_size for path in files if path.stat().st_size]
    return {
        "model": name,
        "cpus": len(os.sched_getaffinity(0)),
        "kernels": len(cubins),
        "mb": sum(cubins) / 1e6,
        "seconds": seconds,
    }


def run_python(program: str, *arguments: str, **environment: str) -> str:
    """What a program of its own prints; CalledProcessError if it fails, with what it says on standard error shown."""
    line = [sys.executable, "-c", program, *arguments]
    return subprocess.run(line, env=os.environ | environment, check=True, stdout=subprocess.PIPE, text=True).stdout


def compiled_by(name: str, lengths: Iterable[int] = LENGTHS) -> list[str]:
    """Names of the kernels that the model compiles in this process."""
    from fp8moe.decode import GraphDecoder
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


def measure(name: str) -> dict:
    with tempfile.TemporaryDirectory() as directory:
        row = warm_up(name, Path(directory))
        program = (
            "import json, sys; from benchmarks.warmup import compiled_by; print(json.dumps(compiled_by(sys.argv[1])))"
        )
        printed = run_python(program, name, FP8MOE_CACHE_DIR=str(Path(directory) / "cache"))
    missing = json.loads(printed.splitlines()[-1])
    return row | {"compiled": len(missing), "missing": missing}


def thresholds(rows: Sequence[dict]) -> list[Threshold]:
    return [Threshold(f"{row['model']}, kernels compiled after warm-up", row["compiled"], 0) for row in rows]


def run(models: Iterable[str] = MODELS) -> dict:
    """{"gpu", "rows", "thresholds"}."""
    gpu = command.start()
    rows = [measure(name) for name in models]
    return command.result(gpu, rows, thresholds(rows))


def main(argv: Sequence[str] | None = None) -> None:
    parser = command.parser("warmup", "fp8moe warmup, and what is compiled after it")
    parser.add_argument("--model", choices=CONFIGS, nargs="+", default=MODELS)
    args = parser.parse_args(argv)
    result = run(args.model)
    command.finish(args.out / "warmup.json", result, format_table(result["rows"], COLUMNS))


if __name__ == "__main__":
    main()
