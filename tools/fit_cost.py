"""Fits the cost model of the GEMMs to times of candidates: `python -m tools.fit_cost dense FILE ... [--proposals N]`.

FILE: written by `python -m benchmarks choice --fit`, such as benchmarks/fit/tiles_h200.json, or by `--models`, such as
measured_h200.json. Prints the constants, for cost.py, and the regret before and after the fit.

Minimizes a loss by simulated annealing (Kirkpatrick, Gelatt and Vecchi, "Optimization by Simulated Annealing", 1983).
The loss is half the root mean square of the logarithmic error of the times (errors of slow tiles have a fifth of the
weight), plus six times the mean regret of the choice, plus the distance of the constants from their initial values: a
few problems should not undo an earlier fit to many. So that the loss is continuous, a problem's regret is a weighted
mean over tiles: the longer a tile's expected time, the less its weight. The error compares times with expected times
for the actual routing of a problem; the choice of a tile does not know the routing.
"""

import argparse
import json
import random
from collections.abc import Callable, Sequence
from math import exp, log
from pathlib import Path
from typing import NamedTuple

from benchmarks.routines.tiles import Problem, every_candidate, expected_us
from fp8moe.kernels.gemm import cost
from fp8moe.kernels.gemm.sm90 import TileConfig

UNSEEN_US = 0.25  # how much the time of a tile differs from run to run, in microseconds
# A tile is slow if it takes more than SLOW times as long as the fastest; OF_SLOW: weight of a slow tile's error
SLOW, OF_SLOW = 1.25, 0.2
NEARLY = 0.01  # a tile with an expected time this fraction above the least has 1/e of the weight in the regret
STEPS = (0.01, 0.03, 0.1, 0.25)  # standard deviations of a proposed step, in the logarithm of a constant
HOTTEST = 2e-3  # initial temperature: a loss that is higher by this much is accepted with probability 1/e
_ENDS = ("start", "per_stage", "split", "per_split", "reduction", "epilogue", "last_epilogue")
_EVERY = (*_ENDS, "step", "shared", "dram", "overlap")
_STRAIGHT = (*_EVERY, "per_tile", "piece", "mma", "wait", "overlapped_step", "overlapped_mma")
CONSTANTS = {
    "dense": [f"_STRAIGHT.{field}" for field in _STRAIGHT],
    "swapped": [f"_SWAPPED.{field}" for field in (*_EVERY, "crowded")],
    "grouped": [f"_GROUPED_{name}" for name in ("START", "STEP", "OVERLAPPED", "OVERLAPPED_PRODUCT", "MMA", "LOAD")]
    + [f"_GROUPED_{name}" for name in ("DRAM", "EPILOGUE", "STAGED_EPILOGUE", "FULLEST", "SHARED", "OVERLAP")]
    + [f"_GROUPED_{name}" for name in ("SM_LOAD", "SWAPPED_SM_LOAD", "LATENCY", "LAST_EPILOGUE")]
    + [f"_GROUPED_TILES.{tile}" for tile in cost._GROUPED_TILES],
}
"""For each kind of problem, the constants of cost.py to fit; some are fields of a constant, or entries of a table."""


class Timed(NamedTuple):
    """A problem and the times of its candidates, in microseconds."""

    problem: Problem
    times: dict[TileConfig, float]


def load(path: Path) -> list[Timed]:
    """Read the problems and times in a file; keep only the times of tiles that are still candidates."""
    found = []
    for row in json.loads(path.read_text())["rows"]:
        problem = Problem(*(row[field] for field in Problem._fields))
        named = {config.name: config for config in every_candidate(problem)}
        times = {named[tile]: us for tile, us in row["times"].items() if tile in named}
        if len(times) > 1:
            found.append(Timed(problem, times))
    return found


def of_kind(timed: Sequence[Timed], kind: str) -> list[Timed]:
    """Return the problems of one kind: their times depend on the constants in `CONSTANTS[kind]`."""
    kinds = ("grouped" if one.problem.groups else "swapped" if one.problem.m <= 32 else "dense" for one in timed)
    return [one for one, its in zip(timed, kinds, strict=True) if its == kind]


def excess(times: dict[TileConfig, float], chosen: TileConfig) -> float:
    """Return how much slower the chosen tile is than the fastest: 0.1 for 10%. Ignores differences below UNSEEN_US."""
    best = min(times.values())
    return max(times[chosen] - UNSEEN_US, best) / best - 1


def regret(one: Timed) -> float:
    """Return how much slower the chosen tile is than the fastest candidate, for a problem: 0.1 for 10%."""
    return excess(one.times, min(one.times, key=lambda config: expected_us(one.problem, config)))


def loss(timed: Sequence[Timed]) -> float:
    error = weight = regrets = 0.0
    for problem, times in timed:
        expected = {config: expected_us(problem, config) for config in times}
        known = {config: expected_us(problem, config, skewed=problem.skewed) for config in times}
        best, first = min(times.values()), min(expected.values())
        for config, us in times.items():
            share = 1 if us < SLOW * best else OF_SLOW
            error += share * log(known[config] / us) ** 2
            weight += share
        shares = {config: exp(-(us / first - 1) / NEARLY) for config, us in expected.items()}
        regrets += sum(share * excess(times, config) for config, share in shares.items()) / sum(shares.values())
    return 0.5 * (error / weight) ** 0.5 + 6 * regrets / len(timed)


def get(constant: str) -> float:
    value, *field = constant.split(".")
    found = getattr(cost, value)
    if isinstance(found, dict):
        return found[field[0]]
    return getattr(found, *field) if field else found


def put(constant: str, number: float) -> None:
    value, *field = constant.split(".")
    found = getattr(cost, value)
    if isinstance(found, dict):
        changed: object = {**found, field[0]: number}
    else:
        changed = found._replace(**{field[0]: number}) if field else number
    setattr(cost, value, changed)


def fit(constants: Sequence[str], loss: Callable[[], float], proposals: int, hold: float) -> dict[str, float]:
    """Change constants of the cost model to minimize the loss; return their final values.

    hold: weight in the loss of the mean square of the constants' logarithmic changes.
    """
    draw = random.Random(0)
    begun = {constant: get(constant) for constant in constants if get(constant) > 0}

    def total() -> float:
        return loss() + hold * sum(log(get(constant) / number) ** 2 for constant, number in begun.items()) / len(begun)

    current = least = total()
    best = begun
    for i in range(proposals):
        heat, step = HOTTEST * (1 - i / proposals), draw.choice(STEPS)
        changed = draw.sample(list(begun), min(draw.choice((1, 2, 3)), len(begun)))
        before = {constant: get(constant) for constant in changed}
        for constant, number in before.items():
            put(constant, number * exp(draw.gauss(0, step)))
        now = total()
        if now < current or draw.random() < exp((current - now) / heat):
            current = now
            if now < least:
                least, best = now, {constant: get(constant) for constant in begun}
        else:
            for constant, number in before.items():
                put(constant, number)
    for constant, number in best.items():
        put(constant, number)
    return best


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.fit_cost", description="fit the cost model of the GEMMs")
    parser.add_argument("kind", choices=CONSTANTS)
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE")
    parser.add_argument("--proposals", type=int, default=10000)
    parser.add_argument("--hold", type=float, default=0.02, help="how much changes of constants weigh (default: 0.02)")
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
    fitted = fit(CONSTANTS[args.kind], lambda: loss(timed), args.proposals, args.hold)
    report("after")
    for constant, number in fitted.items():
        print(f"{constant} = {number:.4g}")


if __name__ == "__main__":
    main()
