"""Dense FP8 GEMM against the stored peers: `python -m benchmarks.gemm [--m M ...] [--shapes NxK ...] [--out DIR]`.

Every shape is checked against float64 over its quantized operands before it is timed.
"""

from collections.abc import Sequence
from functools import partial

import torch

from benchmarks import command, operands, peers, timing
from benchmarks.report import Bar, format_table, geomean, summarize
from fp8moe import gemm

# Rows of a decode step: the time is that of reading the weight, so the stored floor applies.
DECODE_M = (1, 16, 64)
MAX_ERROR = 3e-4  # against float64 over the quantized operands, beyond the rounding to bfloat16
RATIOS = ("vs_deep_gemm", "vs_best", "over_floor")
COLUMNS = ("m", "n", "k", "us", "tflops", "gbps", *RATIOS, "error")


def work(m: int, n: int, k: int) -> tuple[int, int]:
    """Operations and bytes of one call: each operand and scale read once, the bfloat16 output written once."""
    k_blocks, n_blocks = -(-k // 128), -(-n // 128)
    return 2 * m * n * k, m * k + n * k + 4 * k_blocks * (m + n_blocks) + 2 * m * n


def make_row(m: int, n: int, k: int, us: float, mean_us: float, error: float, kernels: int) -> dict:
    """One measurement with its rates and its ratios to the stored peers (None where no peer was measured).

    `vs_deep_gemm` and `vs_best` (the faster of DeepGEMM and cuBLAS block-scaled) are peer time over ours: more is
    better. `over_floor` is our time over the stored time of reading the weight: less is better.
    """
    flops, moved = work(m, n, k)
    deep_gemm = peers.dense("deep_gemm").get((m, n, k))
    cublas = peers.dense("cublas_block").get((m, n, k))
    known = [peer for peer in (deep_gemm, cublas) if peer is not None]
    floor = peers.stream_floor().get((n, k)) if m in DECODE_M else None
    return {
        "m": m,
        "n": n,
        "k": k,
        "us": us,
        "mean_us": mean_us,
        "tflops": flops / us / 1e6,
        "gbps": moved / us / 1e3,
        "vs_deep_gemm": deep_gemm / us if deep_gemm else None,
        "vs_best": min(known) / us if known else None,
        "over_floor": us / floor if floor else None,
        "error": error,
        "kernels": kernels,
    }


def bars(rows: Sequence[dict]) -> list[Bar]:
    """The bars whose shapes are all among the rows, and the bar on the error of those there are."""
    measured = {(row["m"], row["n"], row["k"]): row for row in rows}

    def ratios(column: str, *sizes: int) -> list[float]:
        keys = [(m, n, k) for m in sizes for n, k in peers.DENSE_SHAPES]
        return [measured[key][column] for key in keys] if measured.keys() >= set(keys) else []

    found = []
    if large := ratios("vs_deep_gemm", 4096):
        found.append(Bar("m=4096, geomean of DeepGEMM / ours", geomean(large), 1.0, 1.08, at_least=True))
        found.append(Bar("m=4096, least", min(large), 0.95, at_least=True))
    if medium := ratios("vs_deep_gemm", 512):
        found.append(Bar("m=512, geomean of DeepGEMM / ours", geomean(medium), 1.05, 1.2, at_least=True))
    if small := ratios("vs_best", 128):
        name = "m=128, geomean of the faster of DeepGEMM and cuBLAS / ours"
        found.append(Bar(name, geomean(small), 1.2, 1.4, at_least=True))
    if decode := ratios("vs_deep_gemm", *DECODE_M):
        found.append(Bar("m=1, 16, 64, geomean of DeepGEMM / ours", geomean(decode), 1.35, 1.5, at_least=True))
        found.append(Bar("m=1, 16, 64, least", min(decode), 1.12, at_least=True))
    if floors := ratios("over_floor", *DECODE_M):
        found.append(Bar("m=1, 16, 64, geomean of ours / reading the weight", geomean(floors), 1.25, 1.1))
    if rows:
        found.append(
            Bar(
                "largest relative error beyond rounding to bfloat16",
                max(row["error"] for row in rows),
                MAX_ERROR,
            )
        )
    return found


def run(sizes: Sequence[int] = peers.DENSE_M, shapes: Sequence[tuple[int, int]] = peers.DENSE_SHAPES) -> dict:
    """Checks and times every (m, n, k); {"gpu", "rows", "bars"}. RuntimeError if a result is wrong."""
    gpu = command.start()
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
            calls.append(partial(gemm, a, b, out=out))
            errors.append(error)
    rows = [
        make_row(*key, timed.median_us, timed.mean_us, error, len(timed.kernels))
        for key, timed, error in zip(keys, timing.measure(calls), errors, strict=True)
    ]
    return command.result(gpu, rows, bars(rows))


def parse_shape(text: str) -> tuple[int, int]:
    """ "7168x2048" -> (7168, 2048)."""
    n, k = text.split("x")
    return int(n), int(k)


def main(argv: Sequence[str] | None = None) -> None:
    parser = command.parser("gemm", "dense FP8 GEMM against peers")
    parser.add_argument("--m", type=int, nargs="+", default=peers.DENSE_M)
    parser.add_argument("--shapes", type=parse_shape, nargs="+", default=peers.DENSE_SHAPES, metavar="NxK")
    args = parser.parse_args(argv)
    result = run(args.m, args.shapes)
    by_m = format_table(summarize(result["rows"], ("m",), RATIOS), ("m", *RATIOS))
    command.finish(args.out / "gemm.json", result, format_table(result["rows"], COLUMNS), by_m)


if __name__ == "__main__":
    main()
