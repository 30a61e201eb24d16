"""A digest of the sources that decide what the GPU computes: kernels, their entries and quantizers.

Comments, docstrings and white space are left out, so that the stored results of a GPU run stay valid when only those
change. The result does not depend on the version of Python.
"""

import ast
import hashlib
import io
import itertools
import re
import token
import tokenize
from pathlib import Path

DIRECTORIES = ("fp8moe/cuda", "fp8moe/kernels", "fp8moe/quant")

# Comments and literals first: neither begins inside the other.
_CUDA_TOKEN = re.compile(
    r"""
      (?P<comment> //[^\n]* | /\*.*?\*/ )
    | (?P<space> [^\S\n]+ )
    | (?P<newline> \n )
    | (?P<text>
          \bR"(?P<delimiter>[^()\\\s]*)\(.*?\)(?P=delimiter)"
        | "(?:\\.|[^"\\\n])*"
        | '(?:\\.|[^'\\\n])*'
        | [0-9](?:'?[\w.])*
        | \w+
        | .
      )
    """,
    re.VERBOSE | re.DOTALL,
)


def normalize_cuda(source: str) -> str:
    """The tokens of CUDA C++ text, one a line; a preprocessor directive ends with an empty line."""
    source = source.replace("\\\n", "")
    tokens: list[str] = []
    directive, line_start = False, True
    for match in _CUDA_TOKEN.finditer(source):
        if match["newline"]:
            if directive:
                tokens.append("")
            directive, line_start = False, True
        elif match["text"]:
            directive = directive or (line_start and match["text"] == "#")
            line_start = False
            tokens.append(match["text"])
    return "\n".join(tokens)


def _docstrings(source: str) -> set[tuple[int, int]]:
    """Positions (line, column in characters) at which the docstrings of a module start."""
    lines = source.split("\n")
    starts = set()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        first = node.body[0] if node.body else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
            # ast counts columns in bytes of UTF-8, tokenize in characters.
            column = len(lines[first.lineno - 1].encode()[: first.col_offset].decode())
            starts.add((first.lineno, column))
    return starts


def normalize_python(source: str) -> str:
    """The tokens of Python text, one a line, the structure of its blocks kept."""
    line_starts = list(itertools.accumulate((len(line) + 1 for line in source.split("\n")), initial=0))

    def offset(position: tuple[int, int]) -> int:
        return line_starts[position[0] - 1] + position[1]

    # From Python 3.12 an f-string comes in pieces: take its text from the source, as earlier versions give it.
    opening = {getattr(token, name) for name in ("FSTRING_START", "TSTRING_START") if hasattr(token, name)}
    closing = {getattr(token, name) for name in ("FSTRING_END", "TSTRING_END") if hasattr(token, name)}
    skipped = {token.COMMENT, token.NL, token.ENCODING, token.ENDMARKER}
    structure = {token.NEWLINE: "<line>", token.INDENT: "<indent>", token.DEDENT: "<dedent>"}
    docstrings = _docstrings(source)
    tokens: list[str] = []
    in_docstring, depth, start = False, 0, 0
    for item in tokenize.generate_tokens(io.StringIO(source).readline):
        if item.type in opening:
            depth += 1
            start = offset(item.start) if depth == 1 else start
        elif item.type in closing:
            depth -= 1
            if depth == 0:
                tokens.append(source[start : offset(item.end)])
        elif depth or item.type in skipped:
            continue
        elif item.type == token.STRING and (in_docstring or item.start in docstrings):
            in_docstring = True
        elif in_docstring and item.type == token.NEWLINE:
            in_docstring = False
        else:
            in_docstring = False
            tokens.append(structure.get(item.type, item.string))
    return "\n".join(tokens)


_NORMALIZE = {".py": normalize_python, ".cu": normalize_cuda, ".cuh": normalize_cuda}


def digest(root: Path) -> str:
    """SHA-256 over the sources below `root` (a checkout), file by file in the order of their paths.

    Raises FileNotFoundError if one of the directories holds no source.
    """
    hashed = hashlib.sha256()
    for directory in DIRECTORIES:
        files = sorted(path for path in (root / directory).rglob("*") if path.suffix in _NORMALIZE)
        if not files:
            raise FileNotFoundError(f"no sources in {root / directory}: the digest needs a source checkout")
        for path in files:
            text = _NORMALIZE[path.suffix](path.read_text(encoding="utf-8"))
            hashed.update(f"{path.relative_to(root).as_posix()}\0{text}\0".encode())
    return hashed.hexdigest()
