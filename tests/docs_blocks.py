"""The code blocks of README.md and docs/*.md, and how they run: as written, page by page, in a directory of their own.

Python blocks of a page share one namespace; a line of an ``sh`` block is a command; ``text`` is no code. README's, and
the first of each section, run by themselves too. Before a block, an HTML comment says what is special about it:

    <!-- needs a GPU -->                elsewhere it is compiled, and its names are looked up
    <!-- needs a C++ compiler -->       where AOTInductor cannot package, likewise
    <!-- needs transformers X.Y -->     left out where transformers is older
    <!-- needs the package NAME -->     left out where it is not installed
    <!-- save as NAME.py -->            a script, which a later sh block starts
"""

import ast
import builtins
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.aot_inductor import can_package
from tests.docs_commands import COMMANDS, OUTPUT

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
LANGUAGES = ("python", "sh", "text")
NEEDS_GPU = "needs a GPU"
NEEDS_COMPILER = "needs a C++ compiler"

_BLOCK = re.compile(r"((?:^<!-- .* -->\n)*)^```(.*)\n((?:.*\n)*?)^```$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    page: Path
    section: int  # how many headings are above it
    line: int
    language: str
    text: str
    marks: tuple[str, ...]

    @property
    def place(self) -> str:
        return f"{self.page.name}:{self.line}"

    def mark(self, beginning: str) -> str | None:
        """What follows this beginning in one of the marks."""
        return next((mark.removeprefix(beginning) for mark in self.marks if mark.startswith(beginning)), None)

    def tree(self) -> ast.Module:
        """The parsed text, with the lines that it has in the page."""
        return ast.increment_lineno(ast.parse(self.text, str(self.page)), self.line)


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = []
    for match in _BLOCK.finditer(text):
        marks = tuple(re.findall(r"<!-- (.*) -->", match[1]))
        section = len(re.findall("^#", _BLOCK.sub("", text[: match.start()]), re.MULTILINE))
        found.append(Block(page, section, 1 + text.count("\n", 0, match.end(1)), match[2], match[3], marks))
    return found


def lone_blocks(page: Path) -> list[Block]:
    """Python blocks that run by themselves: all of README, elsewhere the first below each heading.

    Scripts, as commands, run in processes of their own anyway.
    """
    code = [block for block in blocks(page) if block.language != "text"]
    first = {block.line if page.name == "README.md" else block.section: block for block in reversed(code)}
    return [block for block in first.values() if block.language == "python" and block.mark("save as ") is None]


def run_blocks(found: Sequence[Block], directory: Path, has_gpu: bool) -> dict[str, Any]:
    """Run blocks in the working directory ``directory``. Returns the names that they define."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in found:
        newer = block.mark("needs transformers ")
        if newer is not None and _version(metadata.version("transformers")) < _version(newer):
            continue
        package = block.mark("needs the package ")
        if package is not None and util.find_spec(package) is None:
            continue
        script = block.mark("save as ")
        if script is not None:
            block.tree()
            (directory / script).write_text(block.text)
        elif not _can_run(block, has_gpu):
            assert unresolved(block.tree(), names) == [], block.place
        elif block.language == "python":
            exec(compile(block.tree(), str(block.page), "exec"), names)
        elif block.language == "sh":
            _run_commands(block, directory / OUTPUT)
    return names


def _run_commands(block: Block, output: Path) -> None:
    for line in block.text.splitlines():
        command, *arguments = shlex.split(line, comments=True)
        assert command in COMMANDS, f"{block.place}: no stand-in for {command}"
        status = COMMANDS[command](arguments)
        assert status == 0, f"{block.place}: {line}\n{output.read_text() if output.exists() else ''}"


def _can_run(block: Block, has_gpu: bool) -> bool:
    if block.mark(NEEDS_COMPILER) is not None:
        return can_package(has_gpu)
    return has_gpu or block.mark(NEEDS_GPU) is None


def unresolved(tree: ast.Module, names: dict[str, Any]) -> list[str]:
    """Names in a block that is not run which are not there: neither defined in it or before it, nor to be imported."""
    nodes = list(ast.walk(tree))
    known = vars(builtins) | names
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            exec(compile(ast.Module([node], []), "<import>", "exec"), known)
    defined = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    wrong = {node.id for node in nodes if isinstance(node, ast.Name)} - defined - known.keys()
    for node in nodes:
        root, *attributes = _dotted(node)
        found = known.get(root)
        if attributes and isinstance(found, ModuleType):  # what calls return is not known here
            wrong |= set() if _has(found, attributes) else {".".join((root, *attributes))}
    return sorted(wrong)


def _dotted(node: ast.AST) -> list[str]:
    """The parts of a.b.c, or a part that nothing is called."""
    if isinstance(node, ast.Name):
        return [node.id]
    return [*_dotted(node.value), node.attr] if isinstance(node, ast.Attribute) else [""]


def _has(value: Any, attributes: list[str]) -> bool:
    for attribute in attributes:
        if not hasattr(value, attribute):
            return False
        value = getattr(value, attribute)
    return True


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:2])
