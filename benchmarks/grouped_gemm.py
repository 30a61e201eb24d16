"""Grouped FP8 GEMMs against the baselines: `python -m benchmarks.grouped_gemm [--op OP ...] [--groups G ...]`.

Groups are drawn like those of the baselines, 0.7 to 1.3 times the mean, but are not the same ones. `vs_deep_gemm` is
DeepGEMM's time over ours; more is better:

- `grouped_gemm`: both relative to cuBLAS's time for all rows of the groups by one weight with one scale (`cublas_us`),
  which knows how many rows there were. DeepGEMM adds rows to align groups to 128; ours needs none.
- `grouped_gemm_masked`: times as they are. Groups of few rows take the time of reading the weights, however many rows
  there are; the others are off by as much as the rows differ. `expected_m` is what the baselines' callers gave.

Every case is checked before it is timed: some rows of several groups against float64 over the quantized operands, and
that exactly the rows of groups are written. With --no-rest times are those at the power limit, as of `benchmarks.gemm`.
"""

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch

from benchmarks import baselines, command, operands, timing
from benchmarks.calls import group_sizes
from benchmarks.gemm import MAX_ERROR
from benchmarks.report import Threshold, format_table, geomean, summarize
from fp8moe import FP8Tensor, grouped_gemm, grouped_gemm_masked

OPS = ("grouped_gemm", "grouped_gemm_masked")
FEW_ROWS = 20  # groups of so many rows read weights most of the time
SAMPLED_ROWS = 16  # of a group
BARS = (
    ("grouped_gemm", (4, 8), 1.02, 1.06, 0.99),
    ("grouped_gemm", (32,), 1.08, 1.25, 1.02),
    ("grouped_gemm", (256,), 1.2, 1.25, None),
    ("grouped_gemm_masked", (), 1.06, 1.12, 0.98),
)
"""Operation and numbers of groups, all if none; the least geometric mean of ratios, the aim for it, the least ratio."""
COLUMNS = ("op", "groups", "mean_m", "n", "k", "us", "cublas_us", "tflops", "gbps", "vs_deep_gemm", "error")


class Case(NamedTuple):
    """One measurement: an operation, how many groups of about how many rows, and the shape of the weights."""

    op: str
    groups: int
    mean_m: int
    n: int
    k: int
    expected_m: int | None = None  # of grouped_gemm_masked

    @property
    def baseline(self) -> baselines.Case | None:
        return baselines.get(*self[:5])


def stored_cases() -> list[Case]:
    """All cases of the baselines."""
    return [Case(op, *case.sizes.values(), case.expected_m) for op in OPS for case in baselines.cases(op)]


def places(mean_m: int) -> int:
    """Rows that a group of the masked layout has room for."""
    return 4096 if mean_m >= 192 else 1024


def work(case: Case, rows: int) -> tuple[int, int]:
    """Operations and bytes of one call: operands and scales in use read once, the bfloat16 output written once."""
    _, groups, _, n, k, _ = case
    k_blocks, n_blocks = -(-k // 128), -(-n // 128)
    return 2 * rows * n * k, rows * k + groups * n * k + 4 * k_blocks * (rows + groups * n_blocks) + 2 * rows * n


def make_row(case: Case, rows: int, timed: timing.Timing, error: float, yardstick: timing.Timing | None = None) -> dict:
    """One measurement over `rows` rows in all, with its rates and its ratio to DeepGEMM (None without a baseline)."""
    flops, moved = work(case, rows)
    us, cublas_us = timed.median_us, yardstick and yardstick.median_us
    return {
        **case._asdict(),
        "rows": rows,
        "us": us,
        "mean_us": timed.mean_us,
        "cublas_us": cublas_us,
        "tflops": flops / us / 1e6,
        "gbps": moved / us / 1e3,
        "vs_deep_gemm": case.baseline.over(us, yardstick_us=cublas_us) if case.baseline else None,
        "error": error,
        "kernels": len(timed.kernels),
    }


def thresholds(rows: Sequence[dict]) -> list[Threshold]:
    """The thresholds whose cases are all among the rows, and the threshold on the error of those there are."""
    measured = {Case(*(row[field] for field in Case._fields)): row["vs_deep_gemm"] for row in rows}

    def ratios(op: str, *groups: int) -> list[float]:
        cases = [case for case in stored_cases() if case.op == op and (not groups or case.groups in groups)]
        found = [measured[case] for case in cases] if measured.keys() >= set(cases) else []
        return found if None not in found else []

    found = []
    for op, groups, limit, aim, least in BARS:
        if values := ratios(op, *groups):
            what = f"{op}, {' and '.join(map(str, groups))} groups" if groups else op
            name = f"{what}, geomean of DeepGEMM / ours"
            found.append(Threshold(name, geomean(values), limit, aim, at_least=True))
            if least is not None:
                found.append(Threshold(f"{what}, least", min(values), least, at_least=True))
    if rows:
        worst = max(row["error"] for row in rows)
        found.append(Threshold("grouped, largest relative error beyond rounding to bfloat16", worst, MAX_ERROR))
    return found


def sampled_rows(sizes: Sequence[int]) -> dict[int, list[int]]:
    """Rows to check, counted from the start of their group: of the first, the last, the largest and the smallest."""
    chosen = {0, len(sizes) - 1, sizes.index(max(sizes)), sizes.index(min(sizes))}
    steps = SAMPLED_ROWS - 1
    return {group: sorted({i * (sizes[group] - 1) // steps for i in range(SAMPLED_ROWS)}) for group in sorted(chosen)}


def check(a: FP8Tensor, b: FP8Tensor, out: torch.Tensor, starts: Sequence[int], sizes: Sequence[int]) -> float:
    """Error of sampled rows against float64, beyond rounding.

    a (rows, K), b (E, N, K); out (rows, N), NaN before the call; group e has sizes[e] rows from starts[e] on.
    RuntimeError if a row of a group was not written, or another was.
    """
    written = torch.zeros(len(out), dtype=torch.bool)
    for start, size in zip(starts, sizes, strict=True):
        written[start : start + size] = True
    written = written.to(out.device)
    nan = out.isnan()
    if nan.any(-1)[written].any() or not nan.all(-1)[~written].all():
        raise RuntimeError("rows of groups were left out, or other rows were written")
    actual, expected = [], []
    for group, rows in sampled_rows(sizes).items():
        rows = [starts[group] + row for row in rows]
        # As bytes, because not every version of PyTorch picks rows of FP8 values.
        x = FP8Tensor(a.data.view(torch.uint8)[rows].view(a.data.dtype), a.scale[rows])
        w = FP8Tensor(b.data[group], b.scale[group])
        actual.append(out[rows])
        expected.append(operands.exact(x) @ operands.exact(w).T)
    return operands.rounded_error(torch.cat(actual), torch.cat(expected))


class Prepared(NamedTuple):
    """A call to time, with the yardstick's where the baseline has it; its rows in all; and its error."""

    calls: tuple[partial, partial | None]
    rows: int
    error: float


def prepare(case: Case, b: FP8Tensor, *, device: str = "cuda") -> Prepared:
    """RuntimeError if the result is wrong."""
    sizes = group_sizes(case.groups, case.mean_m)
    masked = case.op == "grouped_gemm_masked"
    max_m = places(case.mean_m)
    rows = case.groups * max_m if masked else sum(sizes)
    starts = [group * max_m for group in range(case.groups)] if masked else [0, *accumulate(sizes)][:-1]
    a = operands.random_rows(rows, case.k, device=device)
    out = torch.full((rows, case.n), float("nan"), device=device, dtype=torch.bfloat16)
    groups = torch.tensor(sizes if masked else [*starts, rows], device=device, dtype=torch.int32)
    if masked:
        experts = FP8Tensor(*(part.unflatten(0, (case.groups, max_m)) for part in a))
        shape = (case.groups, max_m, case.n)
        call = partial(grouped_gemm_masked, experts, b, groups, expected_m=case.expected_m, out=out.view(shape))
    else:
        call = partial(grouped_gemm, a, b, groups, out=out)
    call()
    error = check(a, b, out, starts, sizes)
    if not error <= MAX_ERROR:
        raise RuntimeError(f"{case}: relative error {error:.2e}, must be <= {MAX_ERROR}")
    stored = baselines.get(*case[:5], device="H200")
    yardstick = operands.yardstick(a.data, b.data[0]) if stored and stored.has_yardstick else None
    return Prepared((call, yardstick), sum(sizes), error)


def run(cases: Sequence[Case] | None = None, *, device: str = "cuda", rest: bool = True) -> dict:
    """Checks and times every case, by default the stored ones; {"gpu", "rows", "thresholds"}."""
    gpu = command.start()
    cases = stored_cases() if cases is None else cases
    shapes = dict.fromkeys((case.groups, case.n, case.k) for case in cases)
    weights = {shape: operands.random_experts(*shape, device=device) for shape in shapes}
    prepared = [prepare(case, weights[case.groups, case.n, case.k], device=device) for case in cases]
    rests = [timing.REST_S if case.mean_m > FEW_ROWS else timing.SHORT_REST_S for case in cases]
    timings = timing.measure_pairs([one.calls for one in prepared], rests=rests, rest=rest)
    rows = [
        make_row(case, one.rows, timed, one.error, yardstick)
        for case, one, (timed, yardstick) in zip(cases, prepared, timings, strict=True)
    ]
    if not rest:
        return command.result(gpu, [row | {"vs_deep_gemm": None} for row in rows], [])
    return command.result(gpu, rows, thresholds(rows))


def main(argv: Sequence[str] | None = None) -> None:
    parser = command.parser("grouped_gemm", "grouped GEMMs against the baselines")
    parser.add_argument("--op", choices=OPS, nargs="+", default=OPS)
    parser.add_argument("--groups", type=int, nargs="+", help="only cases with so many groups")
    command.add_rest(parser)
    args = parser.parse_args(argv)
    cases = [case for case in stored_cases() if case.op in args.op]
    result = run([case for case in cases if args.groups is None or case.groups in args.groups], rest=args.rest)
    kinds, ratios = ("op", "groups", "mean_m"), ("vs_deep_gemm",)
    by_kind = format_table(summarize(result["rows"], kinds, ratios), (*kinds, *ratios))
    file = "grouped_gemm.json" if args.rest else "grouped_gemm_hot.json"
    command.finish(args.out / file, result, format_table(result["rows"], COLUMNS), by_kind)


if __name__ == "__main__":
    main()
