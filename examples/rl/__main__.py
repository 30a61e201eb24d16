"""Trains a small mixture of experts by reinforcement, generating in FP8: `python -m examples.rl`."""

import argparse
import json
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from statistics import fmean

import fp8moe
from benchmarks.report import write_json
from examples.demo.__main__ import device_name, pick_device
from examples.demo.smollm2 import SetupError
from examples.rl.loop import LEVELS, Step, train

ROWS = 5
PACKAGES = ("torch", "transformers")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.rl", description=__doc__.partition(":")[0])
    parser.add_argument("--steps", type=int, default=50, metavar="N", help="default: %(default)s")
    parser.add_argument("--seed", type=int, nargs="+", default=[0], metavar="S", help="a run for each; default: 0")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: %(default)s")
    levels = parser.add_mutually_exclusive_group()
    for level, what in zip(LEVELS, ("the trainer takes the generator's experts", "equal bits"), strict=True):
        levels.add_argument(f"--{level}", dest="level", action="store_const", const=level, help=what)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write what each step measured, as JSON")
    options = parser.parse_args(argv)
    if options.steps < ROWS:
        parser.error(f"--steps is {options.steps}; it must be at least {ROWS}")
    try:
        device = pick_device(options.device)
    except SetupError as error:
        raise SystemExit(f"rl: {error}") from error
    name = device_name(device) + ("" if options.level is None else f", --{options.level}")
    runs = {}
    for seed in options.seed:
        runs[seed] = train(options.steps, seed, device, options.level)
        print(table(f"seed {seed} on {name}", runs[seed]), flush=True)
    if options.out is not None:
        save(options.out, name, runs)
    return 0


def table(title: str, steps: Sequence[Step]) -> str:
    """Means over a fifth of the steps at a time, and largest differences."""
    lines = [title, "steps      reward   log probabilities apart: mean   most"]
    bounds = [len(steps) * row // ROWS for row in range(ROWS + 1)]
    for first, end in zip(bounds, bounds[1:], strict=False):
        rewards, apart, most = zip(*steps[first:end], strict=True)
        lines.append(f"{first + 1:3} to {end:<3} {fmean(rewards):7.3f} {fmean(apart):31.4f} {max(most):6.2f}")
    return "\n".join(lines)


def save(path: Path, name: str, runs: dict[int, list[Step]]) -> None:
    """Write runs to a file, which keeps those of other names. name: the device, and the level if there is one."""
    content = json.loads(path.read_text()) if path.exists() else {}
    versions = {"fp8moe": fp8moe.__version__} | {name: metadata.version(name) for name in PACKAGES}
    columns = {seed: dict(zip(Step._fields, zip(*steps, strict=True), strict=True)) for seed, steps in runs.items()}
    content[name] = {"versions": versions, "seeds": columns}
    write_json(path, content)


if __name__ == "__main__":
    raise SystemExit(main())
