"""Fits the cost model of the GEMMs to times of candidates: `python -m tools.fit_cost dense FILE ... [--rounds N]`.

FILE: of `benchmarks.choice` with a seed of its own, or benchmarks/baselines/tiles_h200.json. Prints the constants, for
cost.py, and the regret before and after.

One constant after the other is changed, as far as the loss falls: half the root mean square of the logarithmic error
of the times, those of slow tiles counting a fifth, plus six times the mean regret of the choice, plus how far the
constants are from where they began. Few problems should not undo what many have taught.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from math import log
from pathlib import Path
from typing import NamedTuple

from benchmarks.choice import Problem, every_candidate, expected_us, name
from fp8moe.kernels.gemm import cost
from fp8moe.kernels.gemm.config import GemmConfig

UNSEEN_US = 0.25  # how much times of one tile differ from run to run
SLOW, OF_SLOW = 1.25, 0.2  # over the time of the fastest; weight of its error
FIRST_STEP = 0.12
CONSTANTS = {
    "dense": [f"_STRAIGHT.{field}" for field in ("epilogue", "per_tile", "piece", "mma", "step", "dram", "overlap")],
    "swapped": [f"_SWAPPED.{field}" for field in ("per_stage", "per_split", "reduction", "epilogue", "step", "dram")],
    "grouped": [
        f"_GROUPED_{field}" for field in ("START", "STEP", "OVERLAPPED", "OVERLAPPED_PRODUCT", "MMA", "LOAD", "L2")
    ]
    + [
        f"_GROUPED_{name}"
        for name in ("DRAM", "EPILOGUE", "STAGED_EPILOGUE", "SHALLOW", "FULLEST", "SHARED", "OVERLAP")
    ],
}
"""What is changed for which problems: fields of a constant of cost.py, or constants."""


class Timed(NamedTuple):
    """A problem, and the times of its candidates in microseconds."""

    problem: Problem
    times: dict[GemmConfig, float]


def load(path: Path) -> list[Timed]:
    """The rows of a file whose tiles are still candidates."""
    found = []
    for row in json.loads(path.read_text())["rows"]:
        problem = Problem(*(row[field] for field in Problem._fields))
        named = {name(config): config for config in every_candidate(problem)}
        times = {named[tile]: us for tile, us in row["times"].items() if tile in named}
        if len(times) > 1:
            found.append(Timed(problem, times))
    return found


def of_kind(timed: Sequence[Timed], kind: str) -> list[Timed]:
    """Those whose times `CONSTANTS[kind]` decide."""
    kinds = ("grouped" if one.problem.groups else "swapped" if one.problem.m <= 32 else "dense" for one in timed)
    return [one for one, its in zip(timed, kinds, strict=True) if its == kind]


def regret(one: Timed) -> float:
    """How much slower the choice is than the fastest candidate; differences that no one sees count as none."""
    chosen = min(one.times, key=lambda config: expected_us(one.problem, config))
    best = min(one.times.values())
    return max(one.times[chosen] - UNSEEN_US, best) / best - 1


def loss(timed: Sequence[Timed]) -> float:
    error = weight = 0.0
    for problem, times in timed:
        best = min(times.values())
        for config, us in times.items():
            share = 1 if us < SLOW * best else OF_SLOW
            error += share * log(expected_us(problem, config) / us) ** 2
            weight += share
    return 0.5 * (error / weight) ** 0.5 + 6 * sum(map(regret, timed)) / len(timed)


def get(constant: str) -> float:
    value, *field = constant.split(".")
    return getattr(getattr(cost, value), *field) if field else getattr(cost, value)


def put(constant: str, number: float) -> None:
    value, *field = constant.split(".")
    setattr(cost, value, getattr(cost, value)._replace(**{field[0]: number}) if field else number)


def fit(constants: Sequence[str], loss: Callable[[], float], rounds: int, hold: float) -> dict[str, float]:
    """Changes constants of the cost model, as far as the loss falls; returns what they are then.

    hold: what the mean square of their logarithmic changes adds to the loss.
    """
    begun = {constant: get(constant) for constant in constants if get(constant) > 0}
    steps = dict.fromkeys(begun, FIRST_STEP)

    def total() -> float:
        return loss() + hold * sum(log(get(constant) / number) ** 2 for constant, number in begun.items()) / len(begun)

    least = total()
    for _ in range(rounds):
        for constant, step in steps.items():
            before = get(constant)
            for factor in (1 + step, 1 - step):
                put(constant, before * factor)
                now = total()
                if now < least:
                    least, steps[constant] = now, 1.3 * step
                    break
            else:
                put(constant, before)
                steps[constant] = step / 2
    return {constant: get(constant) for constant in begun}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.fit_cost", description="fit the cost model of the GEMMs")
    parser.add_argument("kind", choices=CONSTANTS)
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--hold", type=float, default=0.3, help="how much changes of constants weigh (default: 0.3)")
    args = parser.parse_args(argv)
    timed = of_kind([one for path in args.files for one in load(path)], args.kind)
    if not timed:
        raise SystemExit(f"no {args.kind} problems in {', '.join(map(str, args.files))}")

    def report(when: str) -> None:
        regrets = [regret(one) for one in timed]
        print(
            f"{when}: {len(timed)} problems, mean regret {sum(regrets) / len(regrets):.2%}, largest {max(regrets):.1%}"
        )

    report("before")
    fitted = fit(CONSTANTS[args.kind], lambda: loss(timed), args.rounds, args.hold)
    report("after")
    for constant, number in fitted.items():
        print(f"{constant} = {number:.4g}")


if __name__ == "__main__":
    main()
