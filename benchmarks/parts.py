"""Benchmarks that are made of parts: what runs them, and their command line."""

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch

from benchmarks.device import require_hopper
from benchmarks.report import Bar, format_bars, format_table, select, write_json


def run_parts(parts: Iterable[Callable[[], list[dict]]], bars: Callable[[Sequence[dict]], list[Bar]]) -> dict:
    """Checks and times the parts; {"gpu", "rows", "bars"}."""
    gpu = require_hopper()
    torch.manual_seed(0)
    rows = [row for part in parts for row in part()]
    return {"gpu": gpu, "rows": rows, "bars": [bar.as_dict() for bar in bars(rows)]}


def command(
    name: str,
    description: str,
    run: Callable[[Sequence[str]], dict],
    parts: Iterable[str],
    columns: Mapping[str, Sequence[str]],
    argv: Sequence[str] | None,
) -> None:
    """`python -m benchmarks.NAME`: runs all parts or some, writes NAME.json, prints a table of each kind of row.

    columns: of the tables, by the `what` of their rows.
    """
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=description)
    parser.add_argument("--only", choices=parts, nargs="+", default=list(parts), metavar="PART")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), metavar="DIR")
    args = parser.parse_args(argv)
    result = run(args.only)
    write_json(args.out / f"{name}.json", result)
    rows = {what: select(result["rows"], what) for what in columns}
    tables = [f"{what}\n{format_table(found, columns[what])}" for what, found in rows.items() if found]
    print(*tables, format_bars(result["bars"]), sep="\n\n")
