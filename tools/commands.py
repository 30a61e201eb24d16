"""README's figures for `make demo` and `make test`: `python -m tools.commands`, on an idle machine without a GPU.

Clones the last commit into an empty home directory and measures seconds and peak memory of making .venv and of both
commands, and the disk space that they and an installation take. Writes validation/commands.json and README. Memory is
the sum over all processes of a command, sampled once a second; shared pages count once.
"""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import fp8moe
from benchmarks.report import write_json
from benchmarks.tables import with_tables

ROOT = Path(__file__).parent.parent
FILE = ROOT / "validation" / "commands.json"
README = ROOT / "README.md"
TARGETS = (".venv/.installed", "demo", "test")
BEGIN, END = "<!-- tools.commands writes what follows -->\n", "<!-- that was tools.commands -->\n"


def measure(target: str, clone: Path, environment: dict[str, str]) -> dict[str, float]:
    """Return the seconds and peak memory of `make target`.

    Raises SystemExit with the end of the output if make fails.
    """
    print("make", target, flush=True)
    output = clone.parent / "output"
    command = ["make", target, f"PYTHON={getattr(sys, '_base_executable', sys.executable)}"]
    begin, peak = time.perf_counter(), 0
    with output.open("w") as file:
        process = subprocess.Popen(
            command, cwd=clone, env=environment, stdout=file, stderr=file, start_new_session=True
        )
        while process.poll() is None:
            peak = max(peak, memory_of_session(process.pid))
            time.sleep(1)
    seconds = time.perf_counter() - begin
    if process.returncode:
        raise SystemExit(f"{output.read_text()[-3000:]}\nmake {target} ended with {process.returncode}")
    return {"seconds": round(seconds, 1), "peak_gb": round(peak / 1e9, 2)}


def memory_of_session(session: int) -> int:
    """Return the bytes of memory held by the processes of a session; shared pages are divided among processes."""
    total = 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.getsid(int(process.name)) == session:
                total += 1024 * int(re.search(r"^Pss: +(\d+)", (process / "smaps_rollup").read_text(), re.M)[1])
        except (OSError, TypeError):  # the process has ended meanwhile
            continue
    return total


def disk_gb(directory: Path) -> float:
    """Return the disk space of a directory's files in GB."""
    sizes = (path.lstat().st_blocks * 512 for path in directory.rglob("*") if not path.is_symlink())
    return round(sum(sizes) / 1e9, 2)


def bare_gb() -> float:
    """Return how many GB `pip install .` takes on disk in addition to PyTorch, measured in this environment."""
    beside = dependencies("fp8moe", without="torch") - dependencies("torch")
    files = (Path(file.locate()) for name in beside for file in metadata.distribution(name).files or ())
    return round(sum(file.lstat().st_blocks * 512 for file in files if file.is_file()) / 1e9, 2)


def dependencies(name: str, without: str | None = None) -> set[str]:
    """Return the names of all distributions that a distribution requires, directly or indirectly."""
    found, todo = set(), [name]
    for one in todo:
        requirements = map(Requirement, metadata.requires(one) or ())
        names = {
            canonicalize_name(r.name) for r in requirements if r.marker is None or r.marker.evaluate({"extra": ""})
        }
        todo += sorted(names - found - {without})
        found |= names - {without}
    return found


def record() -> dict:
    """Measure both make commands and disk space; return the content of validation/commands.json."""
    with tempfile.TemporaryDirectory() as directory:
        home, clone = Path(directory), Path(directory, "fp8moe")
        subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("FP8MOE_", "PYTHON"))}
        environment |= {"HOME": str(home), "XDG_CACHE_HOME": str(home / ".cache")}
        commands = {target: measure(target, clone, environment) for target in TARGETS}
        torch_version = torch.__version__.partition("+")[0]
        install = [clone / ".venv/bin/python", "-m", "pip", "install", "-q", "--target", home / "installed"]
        subprocess.run([*install, f"torch=={torch_version}", f"{clone}[transformers]"], env=environment, check=True)
        places = {"installed": home / "installed", "venv": clone / ".venv", "cache": home / ".cache" / "fp8moe"}
        return {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "versions": {"fp8moe": fp8moe.__version__, "torch": torch.__version__, "python": platform.python_version()},
            "cpus": len(os.sched_getaffinity(0)),
            "commands": commands,
            "disk_gb": {name: disk_gb(place) for name, place in places.items()} | {"bare": bare_gb()},
        }


def sentences() -> str:
    """Return README's sentences about the stored measurement; "" if nothing is stored."""
    if not FILE.exists():
        return ""
    recorded = json.loads(FILE.read_text())
    environment, demo, test = (recorded["commands"][target] for target in TARGETS)
    disk = recorded["disk_gb"]
    build = "build for CPUs" if recorded["versions"]["torch"].endswith("+cpu") else "CUDA build"

    def took(row: dict[str, float]) -> str:
        return f"{row['seconds'] / 60:.1f} minutes and {row['peak_gb']:.1f} GB of memory"

    return (
        f"On {recorded['cpus']} CPU cores `make demo` took {took(demo)}, `make test` {took(test)}; `.venv`, which the"
        f" first of them makes, {environment['seconds'] / 60:.1f} minutes beside the download. With PyTorch's {build}"
        f" `.venv` takes {disk['venv']:.1f} GB on the disk, and `pip install '.[transformers]'` alone"
        f" {disk['installed']:.1f} GB; the demo keeps {disk['cache']:.1f} GB in the cache directory. Beside PyTorch"
        f" a bare `pip install .` takes {disk['bare']:.2f} GB, mostly NVRTC,"
        " which PyTorch's build for CUDA brings anyway.\n"
    )


def main() -> None:
    argparse.ArgumentParser(prog="python -m tools.commands", description=__doc__.partition(":")[0]).parse_args()
    write_json(FILE, record())
    README.write_text(with_tables(README.read_text(encoding="utf-8"), sentences(), BEGIN, END), encoding="utf-8")


if __name__ == "__main__":
    main()
