"""Virtual environments in which vLLM, SGLang and torchtitan are tested with fp8moe.

Each is empty at first; fp8moe is installed as the READMEs of integrations/ say.
"""

import json
import re
import shlex
import subprocess
import sys
import venv
from argparse import ArgumentParser
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.report import ROOT, write_json


def commands_of(readme: Path) -> tuple[list[str], ...]:
    """Return the commands in the first code block of a README of integrations/: the first installs, the second runs."""
    block = re.search(r"```\n(.+?)\n```", readme.read_text(), re.DOTALL)[1]
    return tuple(map(shlex.split, block.replace("\\\n", "").splitlines()))


def make(environment: Path, torch_requirement: str) -> None:
    """Make a virtual environment and install PyTorch."""
    venv.create(environment, with_pip=True)
    pip(environment, "install", *shlex.split(torch_requirement))


def pip(environment: Path, *arguments: str) -> None:
    """Run the pip of an environment, in the checkout's directory."""
    print("pip", *arguments, flush=True)
    subprocess.run([environment / "bin/python", "-m", "pip", "-q", *arguments], cwd=ROOT, check=True)


def versions(environment: Path, packages: tuple[str, ...]) -> dict[str, str]:
    """Return the versions of packages in an environment."""
    program = f"import importlib.metadata as m, json; print(json.dumps({{n: m.version(n) for n in {packages}}}))"
    return json.loads(subprocess.check_output([environment / "bin/python", "-c", program], text=True))


def parser_of(name: str, file: Path, reuses: bool = True) -> ArgumentParser:
    """Make the argument parser of a tool that writes `file`.

    reuses: whether to add the option --environment, for an environment that exists already or is kept.
    """
    parser = ArgumentParser(prog=f"python -m tools.{name}")
    parser.add_argument("--torch", default="torch==2.13.0", help="pip requirement and options of its CPU build")
    if reuses:
        parser.add_argument("--environment", type=Path, help="a directory to install into, or where all is installed")
    parser.add_argument("--out", type=Path, default=file, metavar="FILE")
    return parser


def store(path: Path, content: dict) -> None:
    """Write `content` to a JSON file, with the current date added."""
    write_json(path, {"date": datetime.now(UTC).isoformat(timespec="seconds"), **content})


PYTHON = sys.version.split()[0]
