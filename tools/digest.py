"""A digest of what the GPU runs: `python -m tools.digest` prints it, on any machine.

It is taken over the launches of the calls in `tools.variants`, as `tools.launches` records them for an H200: kernels,
launch configurations, tensor maps, arguments, and the complete source of every kernel with the compiler's options. So
the stored results of a GPU run stay valid while names, comments or the Python around the launches change.
"""

import functools
import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fp8moe.runtime.jit import KernelSpec

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
_LINE_DIRECTIVE = re.compile(r"^[ \t]*#[ \t]*line[ \t].*\n?", re.MULTILINE)


@functools.cache
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


def normalize_unit(source: str) -> str:
    """The same of a whole translation unit, in which files begin and end with #line directives: these do not count."""
    # Piece by piece, as units share most of their files.
    return "\n".join(filter(None, map(normalize_cuda, _LINE_DIRECTIVE.split(source))))


def fingerprint(calls: Iterable[list[dict]], kernels: "Iterable[KernelSpec]") -> str:
    """SHA-256 over launches and the kernels that they name by index, as `tools.launches.Recorder` has them."""
    from fp8moe.runtime import compilers, jit

    units = [
        [spec.name, hashlib.sha256(normalize_unit(jit.full_source(spec)).encode()).hexdigest()] for spec in kernels
    ]
    options = [compilers.ARCH, compilers.STD, *compilers.PTXAS_OPTIONS]
    content = {"options": options, "kernels": units, "calls": list(calls)}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def digest(root: Path) -> str:
    """The digest of the checkout at `root`, in a process of its own. RuntimeError with its output if that fails."""
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


def main() -> None:
    from tools.launches import Recorder, Untouched
    from tools.variants import all_calls

    recorder = Recorder()
    for call in all_calls(Untouched()):
        recorder.record(call)
    print(fingerprint(recorder.calls, recorder.kernels))


if __name__ == "__main__":
    main()
