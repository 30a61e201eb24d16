"""Dense FP8 GEMM against the baselines: `python -m benchmarks.gemm [--m M ...] [--shapes NxK ...] [--no-rest]`.

- `vs_deep_gemm` and `vs_best`: time of DeepGEMM, and of the faster of DeepGEMM and cuBLAS with block scales, over ours;
  more is better. Where the baselines have cuBLAS with one scale per tensor, it is timed here too (`cublas_us`) and all
  times are taken relative to it, since GPUs of one kind differ by 2 to 3%. The baselines are those of this kind.
- `over_reading`: mean time over the stored mean of reading the weight, for rows of a decode step on an H200; less is
  better.
- `of_copy`: bytes per second over those of a copy.

Every shape is checked against float64 over its quantized operands before it is timed. With --no-rest times are those at
the power limit, beside cuBLAS's; the baselines are of a GPU that rested, so that nothing is compared with them.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch

from benchmarks import baselines, command, operands, timing
from benchmarks.report import Threshold, format_table, geomean, summarize
from fp8moe import gemm

DECODE_M = (1, 16, 64)  # rows of a decode step: the time is that of reading the weight
H100_LIMIT = 0.98  # of the geometric mean for any number of rows
MAX_ERROR = 3e-4  # against float64 over the quantized operands, beyond the rounding to bfloat16
RATIOS = ("vs_deep_gemm", "vs_best", "over_reading", "of_copy")
COLUMNS = ("m", "n", "k", "us", "cublas_us", "tflops", "gbps", *RATIOS, "error")


class Bar(NamedTuple):
    """What some rows are to reach on an H200: the geometric mean of a column of ratios, and the least of them."""

    m: tuple[int, ...]
    column: str
    mean: float
    aim: float
    least: float


BARS = (
    Bar((4096,), "vs_deep_gemm", 1.02, 1.06, 0.99),
    Bar((512,), "vs_deep_gemm", 1.08, 1.15, 0.98),
    Bar((128,), "vs_best", 1.06, 1.15, 0.98),
    Bar(DECODE_M, "vs_deep_gemm", 1.25, 1.35, 1.0),
)


def work(m: int, n: int, k: int) -> tuple[int, int]:
    """Operations and bytes of one call: each operand and scale read once, the bfloat16 output written once."""
    k_blocks, n_blocks = -(-k // 128), -(-n // 128)
    return 2 * m * n * k, m * k + n * k + 4 * k_blocks * (m + n_blocks) + 2 * m * n


def make_row(
    m: int,
    n: int,
    k: int,
    timed: timing.Timing,
    error: float,
    yardstick: timing.Timing | None = None,
    device: str = "H200",
) -> dict:
    """One measurement with its rates and its ratios to the baselines of the device (None where there is none)."""
    flops, moved = work(m, n, k)
    us, cublas_us = timed.median_us, yardstick and yardstick.median_us
    baseline = baselines.get("gemm", m, n, k, device=device)
    blocks = [name for name in ("deep_gemm", "cublas_block") if baseline and name in baseline.medians]
    reading_us = baselines.reading_us(n, k) if m in DECODE_M and device == "H200" else None
    ratios = {name: baseline.over(us, name, cublas_us) for name in blocks}
    return {
        "m": m,
        "n": n,
        "k": k,
        "us": us,
        "mean_us": timed.mean_us,
        "cublas_us": cublas_us,
        "tflops": flops / us / 1e6,
        "gbps": moved / us / 1e3,
        "vs_deep_gemm": ratios.get("deep_gemm"),
        "vs_best": min(ratios.values(), default=None),
        "over_reading": timed.mean_us / reading_us if reading_us else None,
        "of_copy": moved / us / 1e6 / baselines.copy_tbps(),
        "error": error,
        "kernels": len(timed.kernels),
    }


def thresholds(rows: Sequence[dict], device: str = "H200") -> list[Threshold]:
    """The thresholds whose shapes are all among the rows, and the threshold on the error of those there are."""
    measured = {(row["m"], row["n"], row["k"]): row for row in rows}

    def ratios(column: str, sizes: Sequence[int]) -> list[float]:
        keys = [(m, n, k) for m in sizes for n, k in baselines.DENSE_SHAPES]
        return [measured[key][column] for key in keys] if measured.keys() >= set(keys) else []

    found = []
    for bar in BARS:
        if values := ratios(bar.column, bar.m):
            what = f"m={', '.join(map(str, bar.m))}"
            peer = {"vs_deep_gemm": "DeepGEMM", "vs_best": "the faster of DeepGEMM and cuBLAS"}[bar.column]
            limit, aim = (bar.mean, bar.aim) if device == "H200" else (H100_LIMIT, None)
            found.append(Threshold(f"{what}, geomean of {peer} / ours", geomean(values), limit, aim, at_least=True))
            if device == "H200":
                found.append(Threshold(f"{what}, least", min(values), bar.least, at_least=True))
    if device == "H200" and (reading := ratios("over_reading", DECODE_M)):
        found.append(Threshold("m=1, 16, 64, geomean of ours / reading the weight", geomean(reading), 1.25, 1.1))
    if rows:
        worst = max(row["error"] for row in rows)
        found.append(Threshold("largest relative error beyond rounding to bfloat16", worst, MAX_ERROR))
    return found


def run(
    sizes: Sequence[int] = baselines.DENSE_M,
    shapes: Sequence[tuple[int, int]] = baselines.DENSE_SHAPES,
    *,
    rest: bool = True,
) -> dict:
    """Checks and times every (m, n, k); {"gpu", "rows", "thresholds"}. RuntimeError if a result is wrong."""
    gpu = command.start()
    device = baselines.device(gpu)
    keys, calls, errors = [], [], []
    weights = {(n, k): operands.weight(n, k) for n, k in shapes}
    for m in sizes:
        for n, k in shapes:
            a, b = operands.activation(m, k), weights[n, k]
            out = torch.full((m, n), float("nan"), device="cuda", dtype=torch.bfloat16)
            error = operands.rounded_error(gemm(a, b, out=out), operands.exact(a) @ operands.exact(b).T)
            if not error <= MAX_ERROR:
                raise RuntimeError(f"gemm m={m} n={n} k={k}: relative error {error:.2e}, must be <= {MAX_ERROR}")
            keys.append((m, n, k))
            baseline = baselines.get("gemm", m, n, k, device=device)
            yardstick = operands.yardstick(a.data, b.data) if baseline and baseline.has_yardstick else None
            calls.append((partial(gemm, a, b, out=out), yardstick))
            errors.append(error)
    rows = [
        make_row(*key, timed, error, yardstick, device)
        for key, (timed, yardstick), error in zip(keys, timing.measure_pairs(calls, rest=rest), errors, strict=True)
    ]
    if not rest:
        return command.result(gpu, [row | dict.fromkeys(RATIOS) for row in rows], [])
    return command.result(gpu, rows, thresholds(rows, device))


def parse_shape(text: str) -> tuple[int, int]:
    """ "7168x2048" -> (7168, 2048)."""
    n, k = text.split("x")
    return int(n), int(k)


def main(argv: Sequence[str] | None = None) -> None:
    parser = command.parser("gemm", "dense FP8 GEMM against the baselines")
    parser.add_argument("--m", type=int, nargs="+", default=baselines.DENSE_M)
    parser.add_argument("--shapes", type=parse_shape, nargs="+", default=baselines.DENSE_SHAPES, metavar="NxK")
    command.add_rest(parser)
    args = parser.parse_args(argv)
    result = run(args.m, args.shapes, rest=args.rest)
    by_m = format_table(summarize(result["rows"], ("m",), RATIOS), ("m", *RATIOS))
    file = "gemm.json" if args.rest else "gemm_hot.json"
    command.finish(args.out / file, result, format_table(result["rows"], COLUMNS), by_m)


if __name__ == "__main__":
    main()
