"""Markdown tables of what works, which tools write into pages of docs/.

A cell of a table is "yes" or another word, then possibly a colon and a reason.
"""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

Rows = dict[str, dict[str, str]]
"""The cells of a table, by row name and then by column name."""


class Wrong(Exception):
    """Raised when a result is not what it should be."""


def lines(
    table: Rows, columns: Sequence[str], first: str = "", say: Callable[[str], str] = lambda reason: ""
) -> list[str]:
    """Return the lines of a Markdown table, with reasons as notes below. say: returns the text before a reason."""
    notes: dict[str, int] = {}

    def text(cell: str) -> str:
        kind, _, reason = cell.partition(": ")
        return f"{kind} ({notes.setdefault(reason.replace('`', ''), len(notes) + 1)})" if reason else kind

    found = [f"| {first + ' ' if first else ''}| " + " | ".join(columns) + " |", "|" + " --- |" * (len(columns) + 1)]
    found += [
        f"| {name} | " + " | ".join(text(row[column]) for column in columns) + " |" for name, row in table.items()
    ]
    return [*found, "", "Reasons:", "", *(f"{number}. {say(reason)}`{reason}`" for reason, number in notes.items())]


def read(page: str, columns: Sequence[str]) -> Rows:
    """Parse the table of a page; return its cells, each with its reason."""
    notes = dict(re.findall(r"^(\d+)\. [^`]*`(.*)`$", page, re.MULTILINE))
    table = {}
    for line in re.findall(r"^\| (\w.*) \|$", page, re.MULTILINE):
        name, *cells = line.split(" | ")
        if len(cells) == len(columns) and cells != list(columns):
            reasons = (re.sub(r" \((\d+)\)$", lambda found: f": {notes[found[1]]}", cell) for cell in cells)
            table[name] = dict(zip(columns, reasons, strict=True))
    return table


def write(path: Path, mark: str, below: str) -> None:
    """Replace everything below the mark in a page by the text `below`."""
    head, mark, _ = path.read_text().partition(mark)
    path.write_text(f"{head}{mark}\n{below}")


def collect(found: Iterable[tuple[str, dict[str, str]]]) -> Rows:
    """Collect rows into a table, and print each as soon as it is done."""
    table = {}
    for name, row in found:
        table[name] = row
        print(json.dumps({name: row}), flush=True)
    return table
