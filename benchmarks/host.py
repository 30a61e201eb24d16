"""CPU time, first-call time and memory of calls: `python -m benchmarks host [--out DIR]`.

- CPU time of one eager call. Functions of the `deep_gemm` drop-in are timed next to the fp8moe function that each
  wraps. The time is by the host clock over a batch of calls without synchronization. A batch starts with an empty GPU
  queue and launches fewer kernels than the queue holds, so the host never waits for the GPU. `benchmarks.compare
  --clock host` compares revisions in the same way.
- First call: in a fresh process with an empty kernel cache, then in another process with the cache that the first
  process filled. The clock starts after imports, creation of the CUDA context, and making operands (without our
  kernels).
- Memory: the peak during one call, without the call's output; and what is still allocated after the output is freed.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial

import torch

from benchmarks import calls, timing
from benchmarks.report import ROOT, Bar, Benchmark
from fp8moe import FP8Tensor, gemm, grouped_gemm, grouped_gemm_k, grouped_gemm_masked, mqa_logits, paged_mqa_logits

NAMES = {"gemm": "gemm", "grouped_gemm": "grouped_gemm", "linear": "FP8Linear", "experts": "GroupedExperts"}
BATCHES = 15
# Shapes (m, n, k) of first calls: one runs a kernel for few rows, one a kernel for many rows.
FIRST_CALLS = ((1, 7168, 2048), (4096, 7168, 2048))
FIRST_CALL_REPEATS = 2
MEMORY_CALLS = ((1, 7168, 16384), (4096, 576, 7168), (4096, 7168, 16384))
# The allocator rounds the size of every tensor up to a multiple of this.
ALLOCATION_BYTES = 512


def host_us(call: Callable[[], object], *, calls: int = timing.CALLS_PER_BATCH, batches: int = BATCHES) -> float:
    """Return a call's CPU time in microseconds: the median over batches of a batch's mean."""
    return statistics.median(timing.host_times(call, batches, calls=calls))


def cpu_rows() -> list[dict]:
    """Measure the CPU time of eager calls."""
    rows = []
    for case in calls.eager():
        us = host_us(calls.build(case, calls.Operands()))
        rows.append({"what": NAMES[case.op], "case": case.name, **case.sizes, "us": us})
    return rows


def drop_in_calls(device: str = "cuda") -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
    """Map names of DeepGEMM functions to two calls on the same operands: fp8moe's function, and the drop-in's."""
    # So that `import deep_gemm` finds the drop-in, not an installed DeepGEMM
    sys.path.insert(0, str(ROOT / "integrations/deep_gemm"))
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
    """Time the two calls of each pair from `drop_in_calls` in turn. `extra_us` is the time that the drop-in adds."""
    rows = []
    for name, pair in drop_in_calls().items():
        turns = [[host_us(call, batches=1) for call in pair] for _ in range(BATCHES)]
        native_us, us = map(statistics.median, zip(*turns, strict=True))
        rows.append({"what": "deep_gemm", "case": name, "us": us, "native_us": native_us, "extra_us": us - native_us})
    return rows


FIRST_CALL = """
import json, sys, time, torch
m, n, k = map(int, sys.argv[1:])
start = time.perf_counter()
import cuda.core
from fp8moe import gemm
imported, times, k_blocks = time.perf_counter(), [], -(-k // 128)
a, b = (torch.randn(rows, k, device="cuda").to(torch.float8_e4m3fn) for rows in (m, n))
a_scale = torch.rand(k_blocks, -(-m // 4) * 4, device="cuda").T[:m]
b_scale = torch.rand(-(-n // 128), k_blocks, device="cuda")
torch.cuda.synchronize()
for _ in range(2):
    before = time.perf_counter()
    gemm((a, a_scale), (b, b_scale))
    torch.cuda.synchronize()
    times.append(1e3 * (time.perf_counter() - before))
print(json.dumps({"ms": times[0], "second_ms": times[1], "import_ms": 1e3 * (imported - start)}))
"""


def first_call_rows() -> list[dict]:
    """Measure the first `gemm` call in a process, with an empty kernel cache and with a filled one.

    Of several repeats the slowest is kept.
    """

    def first_call(cache: str, shape: tuple[int, int, int]) -> dict:
        arguments = [sys.executable, "-c", FIRST_CALL, *map(str, shape)]
        environment = os.environ | {"FP8MOE_CACHE_DIR": cache}
        done = subprocess.run(arguments, cwd=ROOT, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"the first call of {shape} failed:\n{done.stderr}")
        return json.loads(done.stdout.splitlines()[-1])

    rows = []
    for shape in FIRST_CALLS:
        runs = []
        for _ in range(FIRST_CALL_REPEATS):
            with tempfile.TemporaryDirectory() as cache:
                runs.append([first_call(cache, shape) for _ in range(2)])
        for what, some in zip(("empty cache", "from the disk cache"), zip(*runs, strict=True), strict=True):
            slowest = max(some, key=lambda run: run["ms"])
            rows.append({"what": f"first call, {what}", **dict(zip("mnk", shape, strict=True)), **slowest})
    return rows


def memory(call: Callable[[], torch.Tensor]) -> dict[str, int]:
    """Return the peak bytes of a call without its result, and the bytes still allocated after the result is freed."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = call()
    torch.cuda.synchronize()
    extra = torch.cuda.max_memory_allocated() - before - out.nbytes
    del out
    return {"extra_bytes": extra, "kept_bytes": torch.cuda.memory_allocated() - before}


def memory_rows() -> list[dict]:
    """Measure the memory of `gemm` calls."""
    rows = []
    for m, n, k in MEMORY_CALLS:
        make = calls.Operands()
        call = partial(gemm, make.rows(m, k), make.weights(n, k))
        call()  # run once, because the first call of a shape creates its launcher, which allocates a result
        rows.append({"what": "memory", "m": m, "n": n, "k": k, **memory(call)})
    return rows


def bar(name: str, what: str, column: str, limit: float, aim: float | None, unit: str) -> Bar:
    """Make a bar for the maximum of a column over all rows of the kind `what`."""
    return Bar(name, column, limit, aim, {"what": what}, unit=unit, over=max)


HOST = Benchmark(
    "host",
    lambda: [*memory_rows(), *cpu_rows(), *drop_in_rows(), *first_call_rows()],
    ("what", "case", "m", "n", "k", "us", "native_us", "extra_us", "ms", "second_ms", "import_ms", "extra_bytes"),
    [
        bar("CPU time of a gemm call", "gemm", "us", 25, 18, "us"),
        bar("CPU time of an FP8Linear call", "FP8Linear", "us", 45, 32, "us"),
        bar("CPU time of a GroupedExperts call", "GroupedExperts", "us", 180, 120, "us"),
        bar("CPU time of the drop-in beyond our function", "deep_gemm", "extra_us", 10, None, "us"),
        bar("first call of a new kernel", "first call, empty cache", "ms", 1000, 400, "ms"),
        bar("first call from the disk cache", "first call, from the disk cache", "ms", 50, None, "ms"),
        bar("memory of a gemm call beyond its output", "memory", "extra_bytes", ALLOCATION_BYTES, None, "bytes"),
        bar("memory kept after a gemm call", "memory", "kept_bytes", 0, None, "bytes"),
    ],
)


if __name__ == "__main__":
    sys.exit(HOST.main())
