"""Compare two revisions of fp8moe: `python -m benchmarks.compare REVISION [--only PATTERN] [--out DIR]`.

Two processes, one for the older REVISION and one for this checkout, make the same calls of the public API on the same
random operands (the cases of `benchmarks.calls`). The processes time each case in turn, old, new, old, new, so that
both run at the same clock. The time of a call is GPU time from the start of its first kernel to the end of its last,
with a cold L2; layers, which launch several kernels, run as CUDA graphs. `ratio` is the older revision's median time
over the newer revision's: above 1 the newer revision is faster. `results` says that the results are equal bit for bit,
or else gives their largest difference over the largest magnitude of the older results.

`cublas` is not a call of fp8moe but the same GEMM by cuBLAS with one scale per operand, run by both processes: its
ratio shows how much the clock affects all other ratios. Cases that the older revision cannot run are listed and left
out. The exit status is 1 if a threshold is missed or a case fails.

With `--clock host` the CPU time of eager calls is compared instead (`benchmarks.calls.eager`).

REVISION: a git revision of this checkout, or, on machines without the repository, a directory with a checkout.
"""

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import calls, report
from benchmarks.calls import Case
from benchmarks.report import ROOT, Bar, Threshold, format_table, format_value, geomean

CONTROL = "cublas"
WIDTH = 80  # characters for a case's name in an output line
SLOWEST = 10


class Clock(NamedTuple):
    """How a case is timed, and the limits for ratios.

    turns: the number of turns of each revision. repeats: the number of repeats in each turn; on the host clock,
    the number of batches. geomean, least: lower limits for the geometric mean and for the minimum of all ratios.
    """

    turns: int
    repeats: int
    geomean: float
    least: float


# The turns on the host clock are short, so that fluctuations of the CPU affect both revisions alike.
CLOCKS = {"kernels": Clock(2, 15, 0.995, 0.97), "host": Clock(25, 6, 0.97, 0.9)}


class WorkerError(RuntimeError):
    """Raised when a worker process replies with an error."""


class Worker:
    """A process that runs `benchmarks.compare_worker` with the fp8moe of `tree` and the kernel cache `cache`."""

    def __init__(self, tree: Path, cache: Path, device: str, clock: str):
        environment = {name: value for name, value in os.environ.items() if not name.startswith("FP8MOE_")}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.compare_worker", str(tree), device, clock],
            cwd=report.ROOT,
            # KINETO_LOG_LEVEL silences what some versions of PyTorch log about every profiler session.
            env=environment | {"FP8MOE_CACHE_DIR": str(cache), "KINETO_LOG_LEVEL": "99"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.tree = tree

    def send(self, do: str, **arguments: object) -> None:
        """Ask the worker process to call the method named `do`; `receive` returns the result."""
        with suppress(BrokenPipeError):  # The pipe breaks if the process has ended, which `receive` reports.
            print(json.dumps({"do": do, **arguments}), file=self._process.stdin, flush=True)

    def receive(self) -> Any:
        """Return the result of the oldest open request.

        Raises WorkerError if the request failed, SystemExit if the process ended.
        """
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the process for {self.tree} ended with exit code {self._process.wait()}")
        reply = json.loads(line)
        if "error" in reply:
            raise WorkerError(reply["error"])
        return reply["result"]

    def ask(self, do: str, **arguments: object) -> Any:
        """Send a request and return its result."""
        self.send(do, **arguments)
        return self.receive()

    def close(self) -> None:
        """Kill the worker process."""
        self._process.kill()
        self._process.communicate()


def tree_of(revision: str, directory: Path) -> Path:
    """Return a checkout of a revision: `revision` itself if it is a directory with fp8moe in it, else `directory`.

    In the latter case git extracts the revision's fp8moe into `directory`.
    """
    path = Path(revision)
    if (path / "fp8moe/__init__.py").is_file():
        return path.resolve()
    archive = subprocess.run(["git", "-C", ROOT, "archive", "--format=tar", revision, "fp8moe"], capture_output=True)
    if archive.returncode:
        reason = archive.stderr.decode().strip()
        raise SystemExit(f"{revision!r} is neither a directory with fp8moe in it nor a revision of {ROOT}: {reason}")
    directory.mkdir(parents=True, exist_ok=True)
    subprocess.run(["tar", "-x", "-C", directory], input=archive.stdout, check=True)
    return directory


def compare_case(case: Case, old: Worker, new: Worker, clock: Clock, directory: Path) -> dict:
    """Return a case's row, with `skipped` if the older revision cannot run the case, `error` if the newer cannot."""
    row: dict = {"case": case.name, "op": case.op, "sizes": case.sizes}
    for worker in (old, new):  # send to both before receiving, so that the processes compile at the same time
        worker.send("prepare", **case._asdict())
    sums, failures = [], {}
    for worker, kind in ((old, "skipped"), (new, "error")):
        try:
            sums.append(worker.receive())
        except WorkerError as error:
            failures[kind] = str(error)
    if failures:
        return row | failures
    equal, difference = sums[0] == sums[1], 0.0
    samples: tuple[list[float], list[float]] = [], []
    try:
        if not equal:
            path = str(directory / "results.pt")
            old.ask("save", path=path)
            difference = new.ask("difference", path=path)
        for _ in range(clock.turns):
            for worker, times in zip((old, new), samples, strict=True):
                times += worker.ask("measure", repeats=clock.repeats)
    except WorkerError as error:
        return row | {"error": str(error)}
    old_us, new_us = map(statistics.median, samples)
    times = {"old_us": old_us, "new_us": new_us, "ratio": old_us / new_us}
    return row | times | {"equal": equal, "difference": difference}


def compare(
    cases: Iterable[Case],
    trees: tuple[Path, Path],
    caches: tuple[Path, Path],
    *,
    clock: str = "kernels",
    how: Clock | None = None,
    device: str = "cuda",
    show: Callable[[dict], None] = lambda row: None,
) -> list[dict]:
    """Compare all cases; return their rows. SystemExit if a worker process ends.

    trees, caches: pairs, the older revision's tree or cache first.
    """
    rows = []
    with ExitStack() as stack:
        workers = [Worker(*place, device, clock) for place in zip(trees, caches, strict=True)]
        for worker in workers:
            stack.callback(worker.close)
        for worker in workers:
            worker.receive()
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        for case in cases:
            rows.append(compare_case(case, *workers, how or CLOCKS[clock], Path(directory)))
            show(rows[-1])
    return rows


def format_row(row: dict) -> str:
    """Return one case's row as a line of text."""
    if "ratio" not in row:
        what = f"error: {row['error']}" if "error" in row else f"not run by the older: {row['skipped']}"
        return f"{row['case']}  {what}"
    results = "" if row["equal"] else f"  results {row['difference']:.1e} apart"
    times = f"{format_value(row['old_us']):>8} {format_value(row['new_us']):>8} us {row['ratio']:7.3f}"
    return f"{row['case']:<{WIDTH}} {times}{results}"


def compared(rows: Iterable[dict]) -> list[dict]:
    """Return the rows of cases that both revisions ran, without the control, `cublas`."""
    return [row for row in rows if "ratio" in row and row["op"] != CONTROL]


def summarize(rows: Sequence[dict]) -> list[dict]:
    """Summarize rows for each op, and for all ops without the control: number of cases, ratios, equal results."""
    groups = {op: [row for row in rows if row["op"] == op and "ratio" in row] for op in {row["op"]: 0 for row in rows}}
    lines = []
    for name, group in (groups | {f"all but {CONTROL}": compared(rows)}).items():
        if ratios := [row["ratio"] for row in group]:
            means = {"geomean": f"{geomean(ratios):.3f}", "least": f"{min(ratios):.3f}"}
            lines.append({"op": name, "cases": len(group), **means, "equal": sum(row["equal"] for row in group)})
    return lines


def thresholds(rows: Sequence[dict], clock: Clock) -> list[Threshold]:
    """Make thresholds: no case failed, and limits for the geometric mean and minimum of ratios, without the control."""
    found = [
        Threshold("cases that failed", sum("error" in row for row in rows), 0),
        Threshold("cases compared", len(compared(rows)), 1, at_least=True),
    ]
    bars = [("geomean", clock.geomean, geomean), ("least", clock.least, min)]
    ratios = (Bar(f"old time / new, {name}", "ratio", limit, at_least=True, over=over) for name, limit, over in bars)
    return [*found, *report.judge(compared(rows), ratios)]


def main(argv: Sequence[str] | None = None) -> int:
    """Compare two revisions; return 1 if a threshold is missed."""
    parser = report.parser_of("compare")
    parser.prog = "python -m benchmarks.compare"
    parser.add_argument("revision", metavar="REVISION", help="a git revision, or a directory with a checkout")
    parser.add_argument("--new", default=str(ROOT), metavar="REVISION", help="the newer one; default: this checkout")
    parser.add_argument("--clock", choices=CLOCKS, default="kernels", help="what is timed (default: kernels)")
    parser.add_argument("--only", default="", metavar="PATTERN", help="cases whose name this regular expression finds")
    args = parser.parse_args(argv)
    every = calls.eager() if args.clock == "host" else calls.timed() + calls.more_timed()
    cases = [case for case in every if re.search(args.only, case.name)]
    if not cases:
        parser.error(f"--only: no case has {args.only!r} in its name")
    gpu = report.start()
    caches = tuple(args.out.resolve() / "kernels" / side for side in ("old", "new"))
    with tempfile.TemporaryDirectory() as directory:
        names = (args.revision, args.new)
        trees = tuple(tree_of(name, Path(directory) / side) for name, side in zip(names, ("old", "new"), strict=True))
        show = lambda row: print(format_row(row), flush=True)  # noqa: E731
        rows = compare(cases, trees, caches, clock=args.clock, show=show)
    made = report.result(gpu, rows, thresholds(rows, CLOCKS[args.clock]), old=args.revision, new=args.new)
    slowest = sorted(compared(rows), key=lambda row: row["ratio"])[:SLOWEST]
    summary = format_table(summarize(rows), ("op", "cases", "geomean", "least", "equal"))
    report.finish(args.out / "compare.json", made, "the least ratios", "\n".join(map(format_row, slowest)), summary)
    return int(not all(threshold["passed"] for threshold in made["thresholds"]))


if __name__ == "__main__":
    sys.exit(main())
