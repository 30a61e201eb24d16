"""Quantization against the bandwidth of a copy: `python -m benchmarks.quantize [--out DIR]`.

Times quantize_1x128 and quantize_128x128 of bfloat16, counts the bytes read and written, and compares with the
bandwidth of a copy.
"""

from collections.abc import Sequence
from functools import partial

import torch

import fp8moe
from benchmarks import command, operands, roofline, timing
from benchmarks.report import Threshold, format_table

K = 7168
SMALL_M = (1, 2, 4, 8, 16, 32, 64)
LARGE_M = (4096, 65536)
# E4M3 keeps 3 bits of mantissa: normal data quantized in blocks measures about 2.6e-2.
MAX_ERROR = 4e-2
COLUMNS = ("op", "m", "k", "us", "gbps", "of_copy")


def bytes_moved(op: str, m: int, k: int) -> int:
    """Bytes of one call: bfloat16 read once, FP8 data and float32 scales written once."""
    row_blocks = m if op == "quantize_1x128" else -(-m // 128)
    return 2 * m * k + m * k + 4 * row_blocks * -(-k // 128)


def make_row(op: str, m: int, k: int, us: float) -> dict:
    """One measurement; `of_copy` is its bandwidth over that of a copy."""
    gbps = bytes_moved(op, m, k) / us / 1e3
    return {
        "op": op,
        "m": m,
        "k": k,
        "us": us,
        "gbps": gbps,
        "of_copy": gbps / 1e3 / roofline.copy_tbps(),
    }


def thresholds(rows: Sequence[dict]) -> list[Threshold]:
    """The thresholds on the given rows."""
    found = []
    limits = {65536: (0.85, 0.92), 4096: (0.60, 0.72)}
    for row in rows:
        if row["m"] in limits:
            limit, aim = limits[row["m"]]
            name = f"{row['op']} ({row['m']}, {row['k']}), share of the copy bandwidth"
            found.append(Threshold(name, row["of_copy"], limit, aim, at_least=True))
    if small := [row["us"] for row in rows if row["op"] == "quantize_1x128" and row["m"] in SMALL_M]:
        found.append(Threshold(f"quantize_1x128 (1..64, {K}), slowest", max(small), 3.0, 2.0, unit="us"))
    return found


def run() -> dict:
    """Checks and times every case; {"gpu", "rows", "thresholds"}. RuntimeError if a result is wrong."""
    gpu = command.start()
    cases = [("quantize_1x128", m) for m in SMALL_M + LARGE_M] + [("quantize_128x128", m) for m in LARGE_M]
    inputs = {m: torch.randn(m, K, device="cuda", dtype=torch.bfloat16) for m in SMALL_M + LARGE_M}
    calls = [partial(getattr(fp8moe, op), inputs[m]) for op, m in cases]
    for (op, m), call in zip(cases, calls, strict=True):
        error = operands.relative_error(operands.exact(call()), inputs[m].double())
        if not error <= MAX_ERROR:
            raise RuntimeError(f"{op} ({m}, {K}): relative error {error:.2e}, must be <= {MAX_ERROR}")
    rows = [make_row(op, m, K, timed.median_us) for (op, m), timed in zip(cases, timing.measure(calls), strict=True)]
    return command.result(gpu, rows, thresholds(rows))


def main(argv: Sequence[str] | None = None) -> None:
    args = command.parser("quantize", "quantization against a copy").parse_args(argv)
    result = run()
    command.finish(args.out / "quantize.json", result, format_table(result["rows"], COLUMNS))


if __name__ == "__main__":
    main()
