"""What a wrong `expected_m` costs `grouped_gemm_masked`: `python -m benchmarks.expected_m [--out DIR]`.

It is a caller's guess of the mean rows of a group, often an upper bound, and decides the tile. Every stored shape of
GROUPS with FACTORS of the mean, in turn. `over_mean` is the time over that with the mean itself; less is better.
"""

import statistics
from collections.abc import Sequence
from functools import partial

from benchmarks import baselines, command, grouped_gemm, operands, timing
from benchmarks.grouped_gemm import Case
from benchmarks.report import Threshold, format_table

GROUPS = ((32, 192), (6, 1024))  # and their mean rows
FACTORS = (1.0, 0.7, 0.8, 0.9, 1.1, 1.2, 1.35, 1.5)
ROUNDS = 2
OP = "grouped_gemm_masked"
COLUMNS = ("groups", "mean_m", "n", "k", "factor", "us", "over_mean")


def stored_cases() -> list[Case]:
    """The shapes of the baselines with these groups."""
    cases = [Case(OP, *case.sizes.values(), case.expected_m) for case in baselines.cases(OP)]
    return [case for case in cases if (case.groups, case.mean_m) in GROUPS]


def make_rows(case: Case, us: Sequence[float]) -> list[dict]:
    """us: with each of FACTORS."""
    size = {"groups": case.groups, "mean_m": case.mean_m, "n": case.n, "k": case.k}
    return [
        {**size, "factor": factor, "us": one, "over_mean": one / us[0]} for factor, one in zip(FACTORS, us, strict=True)
    ]


def measure(case: Case, *, device: str = "cuda") -> list[dict]:
    """Checks the result, then times all factors, ROUNDS times in turn."""
    weights = operands.random_experts(case.groups, case.n, case.k, device=device)
    call, _ = grouped_gemm.prepare(case, weights, device=device).calls
    calls = [partial(call, expected_m=round(factor * case.mean_m)) for factor in FACTORS]
    timed = [one.median_us for one in timing.measure(calls * ROUNDS)]
    return make_rows(case, [statistics.median(timed[index :: len(FACTORS)]) for index in range(len(FACTORS))])


def thresholds(rows: Sequence[dict]) -> list[Threshold]:
    name = f"{OP}, expected_m from {min(FACTORS)} to {max(FACTORS)} of the mean, largest time over that with the mean"
    return [Threshold(name, max(row["over_mean"] for row in rows), 1.05, 1.02)]


def run() -> dict:
    """Times all cases; {"gpu", "rows", "thresholds"}."""
    gpu = command.start()
    rows = [row for case in stored_cases() for row in measure(case)]
    return command.result(gpu, rows, thresholds(rows))


def main(argv: Sequence[str] | None = None) -> None:
    args = command.parser("expected_m", "masked groups with a wrong expected_m").parse_args(argv)
    result = run()
    command.finish(args.out / "expected_m.json", result, format_table(result["rows"], COLUMNS))


if __name__ == "__main__":
    main()
