"""Install the wheel in empty environments, at both ends of the dependencies' bounds, and use it. Standard library only.

    python tools/matrix.py                                            every Python found here, oldest and newest
    python tools/matrix.py --python python3.12 --torch torch==2.13.0 --transformers transformers==5.17.* transformers

Each environment gets the wheel with its extra "transformers" from the package index, and runs README's code blocks and
a few tests, all without the source tree. PyTorch's CUDA builds take gigabytes: PIP_EXTRA_INDEX_URL may name an index of
CPU builds.
"""

import argparse
import itertools
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHONS = ("python3.11", "python3.12", "python3.13", "python3.14")
TESTS = ("import", "quantize", "gemm", "linear", "experts", "transformers", "transformers_formats", "export")
MODEL = "Qwen3-30B-A3B-FP8"
"""The model that README's second code block loads; `run_readme` puts a tiny model in its place."""

MAKE_MODEL = f"""
import shutil, sys
from tests.docs_pages import models
with models() as folder:
    shutil.copytree(folder + "/{MODEL}", sys.argv[1] + "/{MODEL}")
"""
_AFTER_BLOCKS = """
import fp8moe
assert "site-packages" in fp8moe.__file__, fp8moe.__file__
assert model.config._experts_implementation == "fp8moe"
assert model(torch.tensor([[2, 3, 5]], device=device)).logits.isfinite().all()
"""


class Failed(Exception):
    """A command has failed; the exception's text has the end of the command's output."""


def main() -> int:
    """Print a line for each environment; return 1 if one has failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--python", nargs="+", help=f"interpreters; without it those of {', '.join(PYTHONS)} that run")
    parser.add_argument("--torch", nargs="+", default=ends("torch"), help="requirements; default: %(default)s")
    parser.add_argument("--transformers", nargs="+", default=ends("transformers"), help="likewise: %(default)s")
    options = parser.parse_args()
    failures = 0
    with tempfile.TemporaryDirectory(prefix="fp8moe-matrix-") as directory:
        tree = copy_tree(Path(directory, "tree"))
        for python, *requirements in itertools.product(
            options.python or interpreters(PYTHONS), options.torch, options.transformers
        ):
            environment, begin = Path(directory, "environment"), time.monotonic()
            try:
                result = f"passed: {try_out(tree, environment, python, requirements)}"
            except Failed as error:
                result, failures = f"FAILED: {error}", failures + 1
            shutil.rmtree(environment, ignore_errors=True)
            print(python, *requirements, result, f"({time.monotonic() - begin:.0f} s)", flush=True)
    return int(failures > 0)


def ends(name: str) -> list[str]:
    """Return two pip requirements for a package: the oldest release that pyproject.toml allows, and the newest."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    every = project["dependencies"] + project["optional-dependencies"]["transformers"]
    bound = next(match[1] for text in every if (match := re.match(rf"{name}>=([\d.]+)", text)))
    return [f"{name}=={bound}.*", name]


def interpreters(names: Iterable[str]) -> list[str]:
    """Return those of the named Pythons that can be run.

    A version manager may have commands for Pythons that are not installed.
    """
    return [
        name
        for name in names
        if shutil.which(name) and not subprocess.call([name, "-c", ""], stderr=subprocess.DEVNULL)
    ]


def copy_tree(tree: Path) -> Path:
    """Copy the source tree without build outputs, so that the wheel has nothing left over from earlier builds."""
    ignored = shutil.ignore_patterns(".*", "build", "dist", "site", "*.egg-info", "__pycache__")
    return Path(shutil.copytree(ROOT, tree, ignore=ignored))


def try_out(tree: Path, environment: Path, python: str, requirements: list[str]) -> str:
    """Make a virtual environment and use the wheel in it; return the versions that were installed."""
    run([python, "-m", "venv", environment])
    python = str(environment / "bin" / "python")
    work = environment / "work"
    run([python, "-m", "pip", "wheel", "-q", "--no-deps", "--wheel-dir", work, tree])
    (wheel,) = work.glob("*.whl")
    tests = ["pytest", "hypothesis", "setuptools"]
    run([python, "-m", "pip", "install", "-q", f"{wheel}[transformers]", *requirements, *tests])
    run([python, "-m", "pip", "check"])
    without_package(tree, work / "tree")
    run_readme(python, work)
    run([python, "-m", "pytest", "-q", "-x", "-k", "not sample_of_the_rows", *tests_of(tree)], cwd=work / "tree")
    versions = "; ".join(f"print('{name}', metadata.version('{name}'))" for name in ("fp8moe", "torch", "transformers"))
    return run([python, "-c", f"from importlib import metadata; {versions}"]).strip().replace("\n", ", ")


def tests_of(tree: Path) -> list[Path]:
    """Return the test files of TESTS, except those for a GPU, relative to the tree."""
    found = (path for name in TESTS for path in tree.glob(f"tests/*/test_{name}.py"))
    return [path.relative_to(tree) for path in found if path.parent.name != "gpu"]


def without_package(tree: Path, target: Path) -> None:
    """Copy the tree without the package, so that `import fp8moe` finds the installed one."""
    shutil.copytree(tree, target, ignore=lambda folder, _: ["fp8moe"] if Path(folder) == tree else [])


def run_readme(python: str, work: Path) -> None:
    """Run README's Python blocks in ``work``, next to a tiny model. `without_package` has made ``work / "tree"``."""
    run([python, "-c", MAKE_MODEL, work], cwd=work / "tree")
    run_blocks(python, work)


def run_blocks(python: str, work: Path) -> None:
    """Run README's Python blocks in ``work``, which has the tiny model."""
    (work / "block.py").write_text(readme_blocks() + _AFTER_BLOCKS)
    run([python, "-I", "block.py"], cwd=work)


def readme_blocks() -> str:
    """Return README's Python blocks, joined."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return "\n".join(re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S))


def run(command: list, cwd: Path | None = None) -> str:
    """Run a command and return its output; raise Failed if it fails."""
    done = subprocess.run([*map(str, command)], cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        end = "\n".join((done.stdout + done.stderr).strip().splitlines()[-15:])
        raise Failed(f"{' '.join(map(str, command[:6]))} ended with {done.returncode}\n{end}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
