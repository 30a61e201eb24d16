"""Commands of the pages' shell blocks: fp8moe, and stand-ins for what needs a network or would run the tests again.

A stand-in checks its arguments: what it would install, make or download exists.
"""

import re
import shutil
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
DOWNLOADED = ".downloaded"  # in the working directory: the model that every repository has


def fp8moe(arguments: list[str]) -> int:
    from fp8moe.cli import main

    return main(arguments)


def hf(arguments: list[str]) -> int:
    command, repository, option, directory = arguments
    assert (command, option, repository.count("/")) == ("download", "--local-dir", 1), arguments
    shutil.copytree(DOWNLOADED, directory)
    return 0


def make(arguments: list[str]) -> int:
    targets = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)[1].split()
    return 0 if arguments and set(arguments) <= set(targets) else 2


def pip(arguments: list[str]) -> int:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    command, *requirements = (argument for argument in arguments if not argument.startswith("--"))
    for requirement in requirements:
        ours = re.fullmatch(r"(?:\.|fp8moe)(?:\[(\w+)\])?", requirement)
        if not (ours and (ours[1] is None or ours[1] in extras) or re.fullmatch(r"[\w-]+==[\d.]+", requirement)):
            return 2
    return 0 if command == "install" and requirements else 2


COMMANDS = {command.__name__: command for command in (fp8moe, hf, make, pip)}

if __name__ == "__main__":
    sys.exit(COMMANDS[sys.argv[1]](sys.argv[2:]))
