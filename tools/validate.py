"""`python -m tools.validate` (`make validate`): run GPU tests, sanitizers and benchmarks, and record them in one file.

The file also has a digest of what the GPU runs (`tools.digest`), so that a CPU test can tell when the file no longer
matches the sources. Parts may be run one at a time: each part is stored as soon as it is done, and parts that were
recorded with another digest are dropped. `--again` reruns only failed tests, for use after fixing a wrong test, and
only missing or failed benchmarks.

Each group of kernels (`tools.variants.GROUPS`) is validated by itself, into a file of its own: `--group NAME`.

Whole models are measured with `--only models`, into a separate file. That file has a digest too, and a test requires
both digests to be the same.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import torch

from benchmarks.__main__ import BENCHMARKS as BY_NAME
from benchmarks.report import ROOT, digest, versions, write_json
from fp8moe.runtime import config
from fp8moe.runtime.architectures import SM90
from tools.variants import GROUPS

SANITIZERS = ("memcheck", "racecheck", "synccheck")
TIMEOUT_S = 570
TAIL_LINES = 30
_SUMMARY = re.compile(r"^=+ (?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)", re.MULTILINE)


class File(NamedTuple):
    """A file in validation/ about one group of kernels.

    benchmarks: maps each part that measures to the names of the benchmarks it runs. tests: pytest's arguments that
    select the GPU tests; without them the file has no tests and no sanitizers.
    """

    name: str
    group: str
    benchmarks: Mapping[str, Sequence[str]]
    tests: Sequence[str] = ()

    @property
    def parts(self) -> tuple[str, ...]:
        return (*(("tests", "sanitizer") if self.tests else ()), *self.benchmarks)


KERNELS = File(
    "kernels.json",
    "kernels",
    {"benchmarks": ("quantize", "transpose", "host", "training", "mqa", "attention", "lora")},
    ("tests/gpu", "--ignore=tests/gpu/latent"),
)
MODELS = File("models.json", "kernels", {"models": ("decode", "requests")})
LATENT = File(
    "latent.json",
    "latent",
    {"benchmarks": ("latent", "top_k", "sparse_latent", "latent_decode")},
    ("tests/gpu/latent",),
)
FILES = (KERNELS, MODELS, LATENT)
"""The first file of a group is the evidence that its kernels are right, and its parts run by default."""


def require_gpu() -> None:
    """Raise SystemExit unless there is a Hopper GPU and all settings have their defaults."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != SM90.capability:
        raise SystemExit("validation needs a Hopper (sm_90) GPU that PyTorch can use")
    defaults = {"backend": "auto", "num_sms": None, "compiler": "nvrtc", "batch_invariant": False}
    changed = [f"FP8MOE_{name.upper()}" for name, value in defaults.items() if getattr(config.settings, name) != value]
    if changed:
        raise SystemExit(f"validation records what the defaults do: unset {', '.join(changed)}")


def parse_junit(report: Path) -> dict:
    """Return the test counts of a pytest run and the names of failed and skipped tests, from its JUnit file."""
    outcomes: dict[str, list[str]] = {"failed": [], "skipped": [], "passed": []}
    for case in ElementTree.parse(report).iter("testcase"):
        tags = {child.tag for child in case}
        outcome = "failed" if tags & {"failure", "error"} else "skipped" if "skipped" in tags else "passed"
        outcomes[outcome].append(f"{case.get('classname')}::{case.get('name')}")
    counts = {outcome: len(names) for outcome, names in outcomes.items()}
    return counts | {"failures": sorted(outcomes["failed"]), "skips": sorted(outcomes["skipped"])}


def environment_of_one_in(processes: int) -> dict[str, str]:
    """Return environment variables for one of several concurrent processes: its threads get a share of the cores."""
    return os.environ | {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // processes))}


def listed_gpus() -> dict[str, str]:
    """Return CUDA_VISIBLE_DEVICES with every GPU of this process by its index, unless it is set or there is no GPU."""
    count = torch.cuda.device_count()
    known = count == 0 or "CUDA_VISIBLE_DEVICES" in os.environ
    return {} if known else {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(count)))}


def run_tests(root: Path, tests: Sequence[str]) -> dict:
    """Run GPU tests in parallel processes, two fewer than there are cores: most of their time is CPU time.

    tests: pytest's arguments that select them. Where there are several GPUs, tests/conftest.py spreads the processes
    over them.
    """
    processes = max(1, (os.cpu_count() or 1) - 2)
    spread = ("-n", str(processes), "--dist", "worksteal") if processes > 1 else ()
    return run_alone(root, _pytest(root, *spread, *tests, processes=processes))


def run_alone(root: Path, beside_others: dict) -> dict:
    """Run the tests that failed in a parallel run again, one after another: some of them measure CPU time.

    Tests that pass this time do not count as failures; they are listed under "passed_alone".
    """
    failed = beside_others["failures"]
    # A name without a module means that a test file could not be collected.
    if not failed or any(name.startswith("::") for name in failed):
        return beside_others
    modules = [name.split("::", 1) for name in failed]
    again = _pytest(root, *(f"{module.replace('.', '/')}.py::{test}" for module, test in modules), processes=1)
    passed = sorted(set(failed) - set(again["failures"])) if again["passed"] + again["failed"] == len(failed) else []
    return beside_others | {
        "passed": beside_others["passed"] + len(passed),
        "failed": beside_others["failed"] - len(passed),
        "failures": sorted(set(failed) - set(passed)),
        "passed_alone": sorted({*beside_others.get("passed_alone", ()), *passed}),
        "exit_code": again["exit_code"],
    }


def run_failures(root: Path, content: dict, current: str) -> dict:
    """Run the failed tests of a validation file again; return the file's updated content.

    Raises SystemExit if the file has no tests with the `current` digest.
    """
    if content.get("digest") != current or "tests" not in content:
        raise SystemExit("--again needs tests that are recorded with the digest of these sources: run --only tests")
    return content | {"tests": run_alone(root, content["tests"])}


def _pytest(root: Path, *arguments: str, processes: int) -> dict:
    """Run GPU tests in the given number of processes; return counts of outcomes, names, and pytest's exit code."""
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
        environment = environment_of_one_in(processes) | listed_gpus()
        done = subprocess.run([*command, *arguments], cwd=root, env=environment, timeout=TIMEOUT_S)
        if not report.exists():
            raise RuntimeError(f"pytest ended with exit code {done.returncode} and wrote no report")
        return parse_junit(report) | {"exit_code": done.returncode}


def parse_sanitizer(output: str) -> int | None:
    """Return the number of errors, or hazards of any severity, in compute-sanitizer's summary; None if it has none."""
    found = _SUMMARY.findall(output)
    return sum(int(count) for match in found for count in match if count) if found else None


def find_sanitizer() -> str:
    """Return the path of compute-sanitizer. Raises SystemExit if it is not installed."""
    directories = os.pathsep.join((os.environ.get("PATH", ""), "/usr/local/cuda/bin"))
    path = shutil.which("compute-sanitizer", path=directories)
    if path is None:
        raise SystemExit("validation needs compute-sanitizer, which comes with the CUDA toolkit: put it on PATH")
    return path


def run_sanitizer(root: Path, group: str) -> dict:
    """Run a script with a reduced set of a group's operations under each sanitizer tool, in parallel.

    The script also checks results.
    """
    sanitizer = find_sanitizer()
    # Without PyTorch's caching allocator every tensor is a separate allocation, so memcheck knows its bounds.
    environment = environment_of_one_in(len(SANITIZERS))
    environment |= {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "FP8MOE_PRINT_CONFIGS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))

    def run(tool: str) -> dict:
        # The script checks API errors itself: it raises, or handles errors that PyTorch provokes.
        command = [sanitizer, "--tool", tool, "--report-api-errors", "no", "--print-limit", "20"]
        command += [sys.executable, "tests/gpu/sanitize_cases.py", group]
        try:
            piped = {"text": True, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
            done = subprocess.run(command, cwd=root, env=environment, timeout=TIMEOUT_S, **piped)
        except subprocess.TimeoutExpired as error:
            output = (error.stdout or b"").decode(errors="replace")
            return {"errors": None, "exit_code": None, "tail": output.splitlines()[-TAIL_LINES:]}
        tail = done.stdout.splitlines()[-TAIL_LINES:]
        return {"errors": parse_sanitizer(done.stdout), "exit_code": done.returncode, "tail": tail}

    with ThreadPoolExecutor(len(SANITIZERS)) as pool:
        return dict(zip(SANITIZERS, pool.map(run, SANITIZERS), strict=True))


def run_benchmarks(
    names: Sequence[str], save: Callable[[dict], object] = lambda results: None, done: dict | None = None
) -> dict:
    """Run benchmarks. If one raises, its error is recorded and the others still run.

    save: called with the results after each benchmark. done: results of an earlier run; results without an error are
    kept.
    """
    results = {name: result for name, result in (done or {}).items() if name in names and "error" not in result}
    for name in names:
        if name in results:
            continue
        try:
            results[name] = BY_NAME[name].run()
        except Exception:
            results[name] = {"error": traceback.format_exc()}
        save(results)
    return results


PARTS: dict[str, Callable[[File, Path, Callable, dict], dict]] = {
    "tests": lambda file, root, save, done: run_tests(root, file.tests),
    "sanitizer": lambda file, root, save, done: run_sanitizer(root, file.group),
    "benchmarks": lambda file, root, save, done: run_benchmarks(file.benchmarks["benchmarks"], save, done),
    "models": lambda file, root, save, done: run_benchmarks(file.benchmarks["models"], save, done),
}
"""Maps each part to a function (file, root, save, done) that returns its result.

save: function that stores partial results. done: results of an earlier run.
"""


def merge(stored: dict, current: str, part: str, result: dict) -> dict:
    """Return a file's content with one more part; stored parts whose digest is not `current` are dropped."""
    parts = {**(stored if stored.get("digest") == current else {}), part: result}
    return {"digest": current, **{name: parts[name] for name in PARTS if name in parts}}


def problems(content: dict, current: str, file: File, needed: Iterable[str] | None = None) -> list[str]:
    """Return why a file's content does not validate sources with the digest `current`: one sentence a reason.

    needed: the parts that must be there, by default all parts of the file.
    """
    found, parts = [], file.parts if needed is None else needed
    if content.get("digest") != current:
        command = f"python -m tools.validate --group {file.group}"
        found.append(f"the digest is not that of what the GPU runs now: run `{command}` again")
    found += [f"the part {part!r} is missing" for part in parts if part not in content]
    if tests := content.get("tests"):
        found += [f"failed: {name}" for name in tests["failures"]]
        if not tests["passed"] or tests["exit_code"]:
            found.append(f"{tests['passed']} GPU tests passed and pytest ended with exit code {tests['exit_code']}")
    for tool in SANITIZERS if "sanitizer" in content else ():
        result = content["sanitizer"][tool]
        if result["errors"] != 0 or result["exit_code"] != 0:
            found.append(f"{tool}: {result['errors']} errors, exit code {result['exit_code']}")
    for name, result in recorded(content, file):
        if "error" in result:
            found.append(f"benchmark {name}: {result['error']}")
    return found


def recorded(content: dict, file: File) -> Iterator[tuple[str, dict]]:
    """Yield the name and result of every benchmark in the recorded parts; a missing result is {"error": "missing"}."""
    for part, names in file.benchmarks.items():
        if part in content:
            yield from ((name, content[part].get(name, {"error": "missing"})) for name in names)


def missed_thresholds(content: dict, file: File) -> list[str]:
    """Return one line for each threshold that a recorded benchmark misses."""
    missed = [one for _, result in recorded(content, file) for one in result.get("thresholds", ()) if not one["passed"]]
    return [f"{one['name']}: {one['value']:.4g}, limit {one['limit']:g} {one['unit']}".rstrip() for one in missed]


def summary(content: dict, current: str, file: File) -> str:
    """Return a text: what was recorded in a validation file, and what is wrong with it."""
    lines = [f"digest {content['digest'][:16]}"]
    if tests := content.get("tests"):
        lines.append(f"tests: {tests['passed']} passed, {tests['failed']} failed, {tests['skipped']} skipped")
    if sanitizer := content.get("sanitizer"):
        lines.append("sanitizer: " + ", ".join(f"{tool} {sanitizer[tool]['errors']} errors" for tool in SANITIZERS))
    rows = [f"{name} {len(result.get('rows', ()))} rows" for name, result in recorded(content, file)]
    lines += [f"benchmarks: {', '.join(rows)}"] if rows else []
    lines += [f"threshold missed: {threshold}" for threshold in missed_thresholds(content, file)]
    return "\n".join(lines + [f"problem: {problem}" for problem in problems(content, current, file)])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the chosen parts and write the file; return 1 if a chosen part failed. Missed thresholds are only listed."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.validate", description="check and time every kernel on this GPU"
    )
    parser.add_argument("--group", choices=GROUPS, default="kernels", help="group of kernels (default: %(default)s)")
    help_parts = f"of {', '.join(PARTS)} (default: {', '.join(KERNELS.parts)})"
    parser.add_argument("--only", metavar="PART[,PART]", help=help_parts)
    parser.add_argument(
        "--again",
        action="store_true",
        help="run the tests that failed in the file, then only PARTs, without benchmarks that are done",
    )
    default_path = "validation/GROUP.json of the checkout, of models models.json"
    parser.add_argument("--out", type=Path, metavar="FILE", help=f"default: {default_path}")
    args = parser.parse_args(argv)
    files = [file for file in FILES if file.group == args.group]
    parts = [part for file in files for part in file.parts]
    chosen = args.only.split(",") if args.only else [] if args.again else list(files[0].parts)
    if unknown := set(chosen) - set(parts):
        names = ", ".join(sorted(unknown))
        parser.error(f"--only: no part {names} in group {args.group}; there are {', '.join(parts)}")
    file = next((file for file in files if set(chosen) <= set(file.parts)), None)
    if file is None:
        parser.error("models have a file of their own: run --only models by itself")
    require_gpu()
    if "sanitizer" in chosen:
        find_sanitizer()  # exit now, rather than after the long parts, if there is no compute-sanitizer
    path = args.out or ROOT / "validation" / file.name
    current = digest(ROOT, file.group)
    content = json.loads(path.read_text()) if path.exists() else {}
    if args.again and file.tests:
        write_json(path, content := run_failures(ROOT, content, current))
    measured_with = versions()
    for part in chosen:
        head = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "versions": measured_with}

        def save(result: dict, part: str = part, head: dict = head, before: dict = content) -> dict:
            after = merge(before, current, part, {**head, **result})
            write_json(path, after)
            return after

        earlier = content.get(part, {}) if args.again else {}
        # All results in a part must be from the same GPU, driver and versions of packages.
        done = earlier if earlier.get("versions") == measured_with else {}
        content = save(PARTS[part](file, ROOT, save, done))
    print(summary(content, current, file))
    return int(bool(problems(content, current, file, needed=chosen)))


if __name__ == "__main__":
    sys.exit(main())
