"""What every benchmark reports: means, thresholds, tables and files, with the digest of what the GPU has run."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Threshold:
    """A number that must be at least (`at_least`) or at most `limit`; `aim` is what the project strives for."""

    name: str
    value: float
    limit: float
    aim: float | None = None
    at_least: bool = False
    unit: str = ""

    @property
    def passed(self) -> bool:
        # Written so that NaN never passes.
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def as_dict(self) -> dict:
        """The fields and `passed`, for JSON."""
        return {**asdict(self), "passed": self.passed}


def select(rows: Iterable[dict], what: str) -> list[dict]:
    """The rows of one kind."""
    return [row for row in rows if row["what"] == what]


def geomean(values: Iterable[float]) -> float:
    """Geometric mean of positive numbers; ValueError if there are none or one is not positive."""
    values = list(values)
    if not values or min(values) <= 0:
        raise ValueError(f"geomean needs positive numbers, got {values}")
    return math.exp(math.fsum(map(math.log, values)) / len(values))


def format_value(value: object) -> str:
    """A table cell: three to four significant digits, "-" for None."""
    if value is None:
        return "-"
    if not isinstance(value, float):
        return str(value)
    if value != 0 and abs(value) < 0.01:
        return f"{value:.1e}"
    return f"{value:.{0 if abs(value) >= 1000 else 1 if abs(value) >= 100 else 2}f}"


def format_table(rows: Sequence[dict], columns: Sequence[str]) -> str:
    """The given columns of the rows as aligned text, numbers to the right."""
    cells = [list(columns)] + [[format_value(row.get(column)) for column in columns] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    numeric = [all(not isinstance(row.get(column), str) for row in rows) for column in columns]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, numeric, strict=True)
        ).rstrip()
        for line in cells
    )


def format_kinds(rows: Sequence[dict], columns: Mapping[str, Sequence[str]]) -> list[str]:
    """A table of each kind of row that there is, under its name; columns: by kind."""
    kinds = {what: select(rows, what) for what in columns}
    return [f"{what}\n{format_table(found, columns[what])}" for what, found in kinds.items() if found]


def format_thresholds(thresholds: Sequence[dict]) -> str:
    """A table of thresholds as `Threshold.as_dict` gives them."""
    rows = [
        {
            "threshold": threshold["name"],
            "value": threshold["value"],
            "need": f"{'>=' if threshold['at_least'] else '<='} {threshold['limit']:g} {threshold['unit']}".rstrip(),
            "aim": "-" if threshold["aim"] is None else f"{threshold['aim']:g}",
            "": "pass" if threshold["passed"] else "MISS",
        }
        for threshold in thresholds
    ]
    return (
        format_table(rows, ("threshold", "value", "need", "aim", "")) if rows else "no threshold applies to these rows"
    )


def write_json(path: Path, content: dict) -> None:
    """Replaces the file in one step, making its directory if there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(content, indent=1) + "\n")
    temporary.replace(path)


def digest(root: Path) -> str:
    """What `tools.digest` prints for the checkout at `root`. RuntimeError with its output if that fails."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FP8MOE_")}
    done = subprocess.run(
        [sys.executable, "-m", "tools.digest"],
        cwd=root,
        env=environment | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"no digest of {root}:\n{done.stderr}")
    return done.stdout.split()[-1]
