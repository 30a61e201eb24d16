"""What batch invariance costs: `python -m benchmarks.batch_invariance [--out DIR]`.

Every dense shape of `benchmarks.shapes`, and the experts of two models, as they are and inside of
`fp8moe.batch_invariant`, in turn.
`parts` is how many parts of K are summed one by one there; `ratio` is the mode's time over the usual one, less is
better. That results have the same bits is tests/gpu/test_batch_invariance.py's.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

import fp8moe
from benchmarks import command, operands, timing
from benchmarks.report import Threshold, format_kinds, geomean, select
from benchmarks.shapes import DENSE_SHAPES, MODELS
from fp8moe.kernels.gemm.tiles import invariant_parts

DENSE_M = (1, 16, 64, 512, 4096)
EXPERTS, TOKENS = ("dsv3_ep8", "qwen3_30b"), (1, 16, 64, 512, 4096)
FEW, MANY = 64, 512  # tokens, up to which and from which on the bars hold
COLUMNS = {
    "gemm": ("m", "n", "k", "parts", "usual_us", "us", "ratio"),
    "experts": ("model", "tokens", "usual_us", "us", "ratio"),
}


class Calls(NamedTuple):
    """One problem: its row without times, and the call."""

    row: dict
    call: Callable[[], object]

    def invariant(self) -> object:
        with fp8moe.batch_invariant():
            return self.call()


def dense_calls(m: int, n: int, k: int) -> Calls:
    a, b = operands.activation(m, k), operands.weight(n, k)
    out = torch.empty(m, n, dtype=torch.bfloat16, device="cuda")
    row = {"what": "gemm", "m": m, "n": n, "k": k, "parts": invariant_parts(n, k)}
    return Calls(row, lambda: fp8moe.gemm(a, b, out=out))


def experts_calls(layer: fp8moe.GroupedExperts, name: str, tokens: int) -> Calls:
    model = MODELS[name]
    inputs = operands.experts_inputs(model, operands.route(model, tokens))
    return Calls({"what": "experts", "model": name, "tokens": tokens}, lambda: layer(*inputs))


def measure(problems: Sequence[Calls]) -> list[dict]:
    """Rows with both times of each problem."""
    calls = [call for problem in problems for call in (problem.call, problem.invariant)]
    times = iter(timing.measure(calls, rests=[timing.SHORT_REST_S] * len(calls)))
    rows = []
    for problem in problems:
        usual, invariant = next(times).median_us, next(times).median_us
        rows.append(problem.row | {"usual_us": usual, "us": invariant, "ratio": invariant / usual})
    return rows


def thresholds(rows: Sequence[dict]) -> list[Threshold]:
    found = []
    for what, size in (("gemm", "m"), ("experts", "tokens")):
        few = [row["ratio"] for row in select(rows, what) if row[size] <= FEW]
        many = [row["ratio"] for row in select(rows, what) if row[size] >= MANY]
        for some, text, limit in ((few, f"up to {FEW} tokens", 1.15), (many, f"from {MANY} tokens on", 1.05)):
            found.append(Threshold(f"batch invariance, {what}, {text}, largest ratio", max(some), limit))
            found.append(Threshold(f"batch invariance, {what}, {text}, geomean", geomean(some), limit))
    return found


@torch.no_grad()
def run() -> dict:
    """Times all problems; {"gpu", "rows", "thresholds"}."""
    gpu = command.start()
    rows = measure([dense_calls(m, n, k) for n, k in DENSE_SHAPES for m in DENSE_M])
    for name in EXPERTS:
        layer = operands.experts_layer(MODELS[name])
        rows += measure([experts_calls(layer, name, tokens) for tokens in TOKENS])
    return command.result(gpu, rows, thresholds(rows))


def main(argv: Sequence[str] | None = None) -> None:
    args = command.parser("batch_invariance", "batch invariance against the usual choice").parse_args(argv)
    result = run()
    command.finish(args.out / "batch_invariance.json", result, *format_kinds(result["rows"], COLUMNS))


if __name__ == "__main__":
    main()
