"""Code that all benchmarks share: rows, bars (limits for rows), tables, stored files and the command line."""

import argparse
import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch

import fp8moe
from fp8moe.runtime.architectures import SM90

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Threshold:
    """A measured value, and its limit: an upper limit, or with `at_least` a lower one; `aim` is a stricter goal."""

    name: str
    value: float
    limit: float
    aim: float | None = None
    at_least: bool = False
    unit: str = ""

    @property
    def passed(self) -> bool:
        # NaN fails both comparisons, so it never passes.
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def as_dict(self) -> dict:
        """Return the fields, and whether the value passed, for JSON."""
        return {**asdict(self), "passed": self.passed}


class Bar(NamedTuple):
    """A limit for rows: for each row or, with `over`, for one number computed from the values of all rows.

    name: name of the threshold, a format string. It is filled in from the row or, with `over`, from `count`, the number
    of rows. value: a column, or a function of the row. Rows whose value is None are left out. where: maps a column to
    what each row must have in this column: a value, one of a tuple of values, or a value that a function accepts.
    """

    name: str
    value: str | Callable[[dict], float | None]
    limit: float
    aim: float | None = None
    where: Mapping[str, object] = {}
    at_least: bool = False
    unit: str = ""
    over: Callable[[list[float]], float] | None = None

    def judge(self, rows: Iterable[dict]) -> list[Threshold]:
        """Return the thresholds of this bar for the rows."""
        rows = [row for row in rows if all(_is(row.get(name), wanted) for name, wanted in self.where.items())]
        of = self.value if callable(self.value) else lambda row: row.get(self.value)
        found = [(row, value) for row in rows if (value := of(row)) is not None]
        if self.over is not None and found:
            found = [({"count": len(found)}, self.over([value for _, value in found]))]
        limits = (self.limit, self.aim, self.at_least, self.unit)
        return [Threshold(self.name.format(**about), value, *limits) for about, value in found]


def _is(value: object, wanted: object) -> bool:
    if callable(wanted):
        return value is not None and wanted(value)
    return value in wanted if isinstance(wanted, tuple) else value == wanted


def judge(rows: Sequence[dict], bars: Iterable[Bar]) -> list[Threshold]:
    """Return the thresholds of all bars for the rows."""
    return [threshold for bar in bars for threshold in bar.judge(rows)]


class Option(NamedTuple):
    """An option of a benchmark's command line.

    default: a tuple makes the option take several values, False makes it a switch.
    """

    default: Any
    choices: Sequence | None = None

    def add(self, parser: argparse.ArgumentParser, name: str) -> None:
        """Add the option to a parser. If the default is an empty tuple, values are integers."""
        several = isinstance(self.default, tuple)
        more: dict[str, Any] = {"action": "store_true"}
        if self.default is not False:
            kind = type(self.default) if not several else type(self.default[0]) if self.default else int
            more = {"type": kind, "choices": self.choices, "nargs": "+" if several else None}
        parser.add_argument(f"--{name}", default=self.default, **more)


class Benchmark(NamedTuple):
    """A benchmark, run as `python -m benchmarks NAME`.

    It measures rows and judges them by bars, which gives thresholds. It stores and prints the rows and the thresholds.

    measure: yields the rows; its parameters are the options. columns: the columns to print, or a mapping from kinds of
    row (`what`) to columns. bars: limits that depend on nothing but the rows.
    """

    name: str
    measure: Callable[..., Iterable[dict]]
    columns: Sequence[str] | Mapping[str, Sequence[str]]
    bars: Sequence[Bar]
    options: Mapping[str, Option] = {}

    def run(self, **options: object) -> dict:
        """Measure; return {"gpu", "rows", the options, "thresholds"}. SystemExit without a Hopper GPU."""
        gpu = start()
        rows = list(self.measure(**options))
        return result(gpu, rows, judge(rows, self.bars), **options)

    def main(self, argv: Sequence[str] | None = None) -> int:
        """Run with the options of the command line; write DIR/NAME.json."""
        parser = parser_of(self.name)
        for name, option in self.options.items():
            option.add(parser, name)
        options = vars(parser.parse_args(argv))
        path = options.pop("out") / f"{self.name}.json"
        made = self.run(**options)
        finish(path, made, *tables_of(made["rows"], self.columns))
        return 0


def start() -> str:
    """Seed PyTorch and return the GPU's name. SystemExit with one sentence unless PyTorch has an sm_90 GPU."""
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a Hopper GPU and PyTorch sees no GPU; run it on a machine that has one")
    name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    if capability != SM90.capability:
        raise SystemExit(f"this benchmark needs a Hopper (sm_90) GPU; {name} is sm_{capability[0]}{capability[1]}")
    torch.manual_seed(0)
    return name


def result(gpu: str, rows: Sequence[dict], thresholds: Iterable[Threshold], **more: object) -> dict:
    """Return the content of a result file, without the digest."""
    return {"gpu": gpu, "rows": rows, **more, "thresholds": [threshold.as_dict() for threshold in thresholds]}


def parser_of(name: str) -> argparse.ArgumentParser:
    """Make a benchmark's argument parser, with the option --out, the directory for results."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks {name}")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), metavar="DIR")
    return parser


def finish(path: Path, made: dict, *tables: str) -> None:
    """Write a result and the digest of what the GPU runs to `path`; print the tables and the thresholds."""
    write_json(path, {"digest": digest(ROOT)} | made)
    print(*tables, format_thresholds(made["thresholds"]), sep="\n\n")


def select(rows: Iterable[dict], what: str) -> list[dict]:
    """Return the rows of one kind, `what`."""
    return [row for row in rows if row["what"] == what]


def geomean(values: Iterable[float]) -> float:
    """Return the geometric mean of positive numbers. ValueError if there are no numbers or any is not positive."""
    values = list(values)
    if not values or min(values) <= 0:
        raise ValueError(f"geomean needs positive numbers, got {values}")
    return math.exp(math.fsum(map(math.log, values)) / len(values))


def format_value(value: object) -> str:
    """Return the text of a table's cell: a float with three to four significant digits; "-" for None."""
    if value is None:
        return "-"
    if not isinstance(value, float):
        return str(value)
    if value != 0 and abs(value) < 0.01:
        return f"{value:.1e}"
    return f"{value:.{0 if abs(value) >= 1000 else 1 if abs(value) >= 100 else 2}f}"


def format_table(rows: Sequence[dict], columns: Sequence[str]) -> str:
    """Return the given columns of the rows as an aligned text table, numbers right-aligned."""
    cells = [list(columns)] + [[format_value(row.get(column)) for column in columns] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    numeric = [all(not isinstance(row.get(column), str) for row in rows) for column in columns]
    lines = [
        "  ".join(
            f"{cell:{'>' if right else '<'}{width}}" for cell, width, right in zip(line, widths, numeric, strict=True)
        )
        for line in cells
    ]
    return "\n".join(map(str.rstrip, lines))


def tables_of(rows: Sequence[dict], columns: Sequence[str] | Mapping[str, Sequence[str]]) -> list[str]:
    """Return one table or, if columns are given by kind of row, one table for each kind, below the kind's name."""
    if not isinstance(columns, Mapping):
        return [format_table(rows, columns)]
    kinds = {what: select(rows, what) for what in columns}
    return [f"{what}\n{format_table(found, columns[what])}" for what, found in kinds.items() if found]


def format_thresholds(thresholds: Sequence[dict]) -> str:
    """Return a table of thresholds, each a result of `Threshold.as_dict`."""
    if not thresholds:
        return "no threshold applies to these rows"
    rows = [
        {
            **{"threshold": one["name"], "value": one["value"]},
            "need": f"{'>=' if one['at_least'] else '<='} {one['limit']:g} {one['unit']}".rstrip(),
            "aim": "-" if one["aim"] is None else f"{one['aim']:g}",
            "": "pass" if one["passed"] else "MISS",
        }
        for one in thresholds
    ]
    return format_table(rows, list(rows[0]))


def write_json(path: Path, content: dict) -> None:
    """Write a JSON file atomically; create its directory if needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(content, indent=1) + "\n")
    temporary.replace(path)


def digest(root: Path, group: str = "kernels") -> str:
    """Return the digest of a group of kernels at `root`. RuntimeError with the output of `tools.digest` if it fails."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FP8MOE_")}
    command = [sys.executable, "-m", "tools.digest"]
    if group != "kernels":  # older checkouts have this group alone, and no --group
        command += ["--group", group]
    done = subprocess.run(
        command, cwd=root, env=environment | {"CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"no digest of {root}:\n{done.stderr}")
    return done.stdout.split()[-1]


def versions() -> dict[str, str]:
    """Return what results depend on: the name of the GPU, and the versions of its driver, Python and packages."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    packages = ("torch", "cuda-core", "cuda-bindings", "nvidia-cuda-nvrtc")
    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": driver,
        "python": platform.python_version(),
        "fp8moe": fp8moe.__version__,
        **{package: metadata.version(package) for package in packages},
    }
