"""CPU time, first-call time and memory of calls: `python -m benchmarks.host [--against REVISION] [--out DIR]`.

- CPU time of one eager call, and of the `deep_gemm` drop-in beside our function that it stands for: the host clock over
  a batch of calls without a wait. A batch launches fewer kernels than the GPU's queue holds and starts with an empty
  queue, so the GPU never holds the host up.
- First call: in a fresh process with an empty kernel cache, then in another with that cache.
- Memory: the peak over one call less its output, and what is still held when the output is gone.

With `--against` only the CPU times, of that revision and of this one by two processes that take turns, as
`benchmarks.compare` times kernels. `ratio` is the older time over the newer: above 1 the newer one is faster.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from benchmarks import calls, command, compare, operands, timing
from benchmarks.calls import Case
from benchmarks.report import Threshold, format_table
from benchmarks.shapes import DENSE_SHAPES
from fp8moe import FP8Tensor, gemm, grouped_gemm, grouped_gemm_k, grouped_gemm_masked, mqa_logits, paged_mqa_logits

NAMES = {"gemm": "gemm", "grouped_gemm": "grouped_gemm", "linear": "FP8Linear", "experts": "GroupedExperts"}
BATCHES = 15
TURNS, BATCHES_OF_A_TURN = 25, 6  # short ones, so that both revisions meet the same moods of the CPU
GEOMEAN, LEAST = 0.97, 0.9  # thresholds of ratios
# A kernel for few rows and one for many: (m, n, k).
FIRST_CALLS = ((1, 7168, 2048), (4096, 7168, 2048))
FIRST_CALL_REPEATS = 2
MEMORY_CALLS = ((1, 7168, 16384), (4096, 576, 7168), (4096, 7168, 16384))
# The allocator rounds every tensor up to this.
ALLOCATION_BYTES = 512
CPU_COLUMNS = ("case", "us", "native_us", "extra_us")
OLD_AND_NEW = ("case", "old_us", "new_us", "ratio")
COLUMNS = ("what", "m", "n", "k", "ms", "second_ms", "import_ms", "extra_bytes", "kept_bytes")


def cases() -> list[Case]:
    """What CPU time is measured of: eager calls on few rows."""
    found = []
    for n, k in DENSE_SHAPES:
        sizes = {"m": 1, "n": n, "k": k}
        found += [Case("gemm", sizes | {"new_out": True}), Case("linear", sizes)]
    found.append(Case("grouped_gemm", {"groups": 16, "mean_rows": 1, "n": 1024, "k": 1024, "new_out": True}))
    experts = {"hidden": 1024, "intermediate": 512, "experts": 16, "top_k": 4, "tokens": 1}
    return [*found, Case("experts", experts)]


def host_us(call: Callable[[], object], *, calls: int = timing.CALLS_PER_BATCH, batches: int = BATCHES) -> float:
    """CPU time in microseconds of one call: the median over batches of the mean in a batch."""
    return statistics.median(timing.host_times(call, batches, calls=calls))


def cpu_rows() -> list[dict]:
    """CPU time of `cases`."""
    rows = []
    for case in cases():
        us = host_us(calls.build(case, calls.Operands()))
        rows.append({"what": NAMES[case.op], "case": case.name, **case.sizes, "us": us})
    return rows


def drop_in_calls(device: str = "cuda") -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
    """By the name of a function of DeepGEMM: our function, and the drop-in's, on the same operands."""
    sys.path.insert(0, str(compare.ROOT / "integrations/deep_gemm"))  # ahead of a DeepGEMM that is installed
    import deep_gemm

    make = calls.Operands(device)
    a, b, offsets = make.rows(64, 1024), make.weights(4, 512, 1024), make.integers([0, 16, 32, 48, 64])
    one, layout = FP8Tensor(b.data[0], b.scale[0]), make.integers([row // 16 for row in range(64)])
    places, counts = FP8Tensor(a.data.view(4, 16, 1024), make.uniform(4, 16, 8, mean=1.0)), make.integers([16] * 4)
    d, masked = (make.zeros(*shape, dtype=torch.bfloat16) for shape in ((64, 512), (4, 16, 512)))
    x, y, ks = make.rows(512, 1024), make.rows(256, 1024), make.integers([256] * 4)
    columns = [(data.t(), scale.t()) for data, scale in (x, y)]
    dw, ends = make.zeros(4, 512, 256, dtype=torch.float32), make.integers([256 * group for group in range(5)])
    q, kv, heads = (
        make.codes(16, 32, 128),
        (make.codes(256, 128), make.uniform(256, mean=1.0)),
        make.uniform(16, 32, mean=1.0),
    )
    ranges = make.integers([0] * 16), make.integers([256] * 16)
    pages = make.codes(16, 1, 32, 128), make.kv_cache(16, 128), heads, ranges[1], make.integers([range(4)] * 16)
    return {
        "fp8_gemm_nt": (lambda: gemm(a, one, out=d), lambda: deep_gemm.fp8_gemm_nt(a, one, d)),
        "m_grouped_fp8_gemm_nt_contiguous": (
            lambda: grouped_gemm(a, b, offsets, out=d),
            lambda: deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, d, layout),
        ),
        "m_grouped_fp8_gemm_nt_masked": (
            lambda: grouped_gemm_masked(places, b, counts, expected_m=16, out=masked),
            lambda: deep_gemm.m_grouped_fp8_gemm_nt_masked(places, b, masked, counts, 16),
        ),
        "k_grouped_fp8_gemm_tn_contiguous": (
            lambda: grouped_gemm_k(x, y, ends, out=dw),
            lambda: deep_gemm.k_grouped_fp8_gemm_tn_contiguous(*columns, dw, None, ks),
        ),
        "fp8_mqa_logits": (
            lambda: mqa_logits(q, kv, heads, *ranges),
            lambda: deep_gemm.fp8_mqa_logits(q, kv, heads, *ranges),
        ),
        "fp8_paged_mqa_logits": (
            lambda: paged_mqa_logits(*pages, max_context_len=256),
            lambda: deep_gemm.fp8_paged_mqa_logits(*pages, None, 256, True),
        ),
    }


def drop_in_rows() -> list[dict]:
    """CPU time of `drop_in_calls`, and what the drop-in takes beyond our function, with which it takes turns."""
    rows = []
    for name, pair in drop_in_calls().items():
        turns = [[host_us(call, batches=1) for call in pair] for _ in range(BATCHES)]
        native_us, us = map(statistics.median, zip(*turns, strict=True))
        rows.append({"what": "deep_gemm", "case": name, "us": us, "native_us": native_us, "extra_us": us - native_us})
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
        call = partial(gemm, operands.activation(m, k), operands.weight(n, k))
        call()  # the first of a shape makes its launcher, with a result of its own
        rows.append({"what": "memory", "m": m, "n": n, "k": k, **memory(call)})
    return rows


def thresholds(rows: Sequence[dict]) -> list[Threshold]:
    """The thresholds on the given rows: the slowest shape counts."""

    def worst(what: str, column: str) -> float:
        return max(row[column] for row in rows if row["what"] == what)

    return [
        Threshold("CPU time of a gemm call", worst("gemm", "us"), 25, 18, unit="us"),
        Threshold("CPU time of an FP8Linear call", worst("FP8Linear", "us"), 45, 32, unit="us"),
        Threshold("CPU time of a GroupedExperts call", worst("GroupedExperts", "us"), 180, 120, unit="us"),
        Threshold("CPU time of the drop-in beyond our function", worst("deep_gemm", "extra_us"), 10, unit="us"),
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
    rows = memory_rows() + cpu_rows() + drop_in_rows() + first_call_rows()
    return command.result(gpu, rows, thresholds(rows))


def against(revision: str, out: Path) -> dict:
    """CPU times of `cases`, with a revision and with this checkout; {"gpu", "rows", "old", "thresholds"}."""
    gpu = command.start()
    caches = out.resolve() / "kernels/old", out.resolve() / "kernels/new"
    with tempfile.TemporaryDirectory() as directory:
        trees = compare.tree_of(revision, Path(directory)), compare.ROOT
        rows = compare.compare(cases(), trees, caches, clock="host", turns=TURNS, repeats=BATCHES_OF_A_TURN)
    return command.result(gpu, rows, compare.thresholds(rows, GEOMEAN, LEAST), old=revision)


def main(argv: Sequence[str] | None = None) -> int:
    parser = command.parser("host", "CPU time, first calls and memory")
    parser.add_argument("--against", metavar="REVISION", help="CPU times of a git revision, or a checkout, and of this")
    args = parser.parse_args(argv)
    if args.against is not None:
        result = against(args.against, args.out)
        failed = [compare.format_row(row) for row in result["rows"] if "ratio" not in row]
        command.finish(args.out / "host_against.json", result, *failed, format_table(result["rows"], OLD_AND_NEW))
        return int(not all(threshold["passed"] for threshold in result["thresholds"]))
    result = run()
    timed = [row for row in result["rows"] if "us" in row]
    others = [row for row in result["rows"] if "us" not in row]
    command.finish(args.out / "host.json", result, format_table(timed, CPU_COLUMNS), format_table(others, COLUMNS))
    return 0


if __name__ == "__main__":
    sys.exit(main())
