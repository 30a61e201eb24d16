"""CPU time, first-call time and memory of calls: `python -m benchmarks.host [--out DIR]`.

- CPU time of one eager call: the host clock over a batch of calls without a wait. A batch launches fewer kernels than
  the GPU's queue holds and starts with an empty queue, so the GPU never holds the host up.
- First call: in a fresh process with an empty kernel cache, then in another with that cache.
- Memory: the peak over one call less its output, and what is still held when the output is gone.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from benchmarks import baselines, command, operands
from benchmarks.report import Threshold, format_table
from fp8moe import FP8Linear, gemm

CALLS_PER_BATCH = 200
BATCHES = 15
WARMUP_BATCHES = 5  # until clocks and caches of the CPU are those of a process that works
# A kernel for few rows and one for many: (m, n, k).
FIRST_CALLS = ((1, 7168, 2048), (4096, 7168, 2048))
FIRST_CALL_REPEATS = 2
MEMORY_CALLS = ((1, 7168, 16384), (4096, 576, 7168), (4096, 7168, 16384))
# The allocator rounds every tensor up to this.
ALLOCATION_BYTES = 512
COLUMNS = ("what", "m", "n", "k", "us", "deep_gemm_us", "ms", "second_ms", "import_ms", "extra_bytes", "kept_bytes")


def host_us(call: Callable[[], object], *, calls: int = CALLS_PER_BATCH, batches: int = BATCHES) -> float:
    """CPU time in microseconds of one call: the median over batches of the mean in a batch."""
    times = []
    for _ in range(WARMUP_BATCHES + batches):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        times.append(1e6 * (time.perf_counter() - start) / calls)
    torch.cuda.synchronize()
    return statistics.median(times[WARMUP_BATCHES:])


def cpu_rows() -> list[dict]:
    """CPU time of `gemm` and `FP8Linear` calls on one row, for each stored shape."""
    rows = []
    with torch.no_grad():
        for n, k in baselines.DENSE_SHAPES:
            x = torch.randn(1, k, device="cuda", dtype=torch.bfloat16)
            linear = FP8Linear.from_linear(torch.nn.Linear(k, n, bias=False, device="cuda", dtype=torch.bfloat16))
            a, b = operands.activation(1, k), operands.weight(n, k)
            calls = {"gemm": partial(gemm, a, b), "FP8Linear": partial(linear, x)}
            for what, call in calls.items():
                row = {"what": what, "m": 1, "n": n, "k": k, "us": host_us(call)}
                rows.append(row | ({"deep_gemm_us": baselines.deep_gemm_host_us(n, k)} if what == "gemm" else {}))
    return rows


def first_call_rows() -> list[dict]:
    """First `gemm` call of fresh processes with an empty and with a filled kernel cache; the slowest of the repeats."""

    def first_call(cache: str, shape: tuple[int, int, int]) -> dict:
        arguments = [sys.executable, "-m", "benchmarks.first_call", *map(str, shape)]
        root = Path(__file__).resolve().parent.parent
        environment = os.environ | {"FP8MOE_CACHE_DIR": cache}
        done = subprocess.run(arguments, cwd=root, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(arguments)} failed:\n{done.stderr}")
        return json.loads(done.stdout.splitlines()[-1])

    rows = []
    for shape in FIRST_CALLS:
        cold, warm = [], []
        for _ in range(FIRST_CALL_REPEATS):
            with tempfile.TemporaryDirectory() as cache:
                cold.append(first_call(cache, shape))
                warm.append(first_call(cache, shape))
        for what, runs in (("first call, empty cache", cold), ("first call, from the disk cache", warm)):
            slowest = max(runs, key=lambda run: run["first_ms"])
            row = {"what": what} | dict(zip("mnk", shape, strict=True)) | {"ms": slowest["first_ms"]}
            rows.append(row | {key: slowest[key] for key in ("second_ms", "import_ms")})
    return rows


def memory(call: Callable[[], torch.Tensor]) -> dict[str, int]:
    """Bytes that a call takes at its peak beside its result, and that stay allocated when the result is gone."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = call()
    torch.cuda.synchronize()
    extra = torch.cuda.max_memory_allocated() - before - out.nbytes
    del out
    return {"extra_bytes": extra, "kept_bytes": torch.cuda.memory_allocated() - before}


def memory_rows() -> list[dict]:
    """Memory of `gemm` calls."""
    rows = []
    for m, n, k in MEMORY_CALLS:
        a, b = operands.activation(m, k), operands.weight(n, k)
        rows.append({"what": "memory", "m": m, "n": n, "k": k, **memory(partial(gemm, a, b))})
    return rows


def thresholds(rows: Sequence[dict]) -> list[Threshold]:
    """The thresholds on the given rows: the slowest shape counts."""

    def worst(what: str, column: str) -> float:
        return max(row[column] for row in rows if row["what"] == what)

    return [
        Threshold("CPU time of a gemm call", worst("gemm", "us"), 25, 18, unit="us"),
        Threshold("CPU time of an FP8Linear call", worst("FP8Linear", "us"), 45, 32, unit="us"),
        Threshold("first call of a new kernel", worst("first call, empty cache", "ms"), 1000, 400, unit="ms"),
        Threshold("first call from the disk cache", worst("first call, from the disk cache", "ms"), 50, unit="ms"),
        Threshold(
            "memory of a gemm call beyond its output", worst("memory", "extra_bytes"), ALLOCATION_BYTES, unit="bytes"
        ),
        Threshold("memory kept after a gemm call", worst("memory", "kept_bytes"), 0, unit="bytes"),
    ]


def run() -> dict:
    """Measures everything; {"gpu", "rows", "thresholds"}."""
    gpu = command.start()
    rows = memory_rows() + cpu_rows() + first_call_rows()
    return command.result(gpu, rows, thresholds(rows))


def main(argv: Sequence[str] | None = None) -> None:
    args = command.parser("host", "CPU time, first calls and memory").parse_args(argv)
    result = run()
    command.finish(args.out / "host.json", result, format_table(result["rows"], COLUMNS))


if __name__ == "__main__":
    main()
