"""One of the two processes of `benchmarks.compare`: `python -m benchmarks.compare_worker TREE DEVICE CLOCK`.

The process runs the cases that it receives with the fp8moe of TREE. All other modules come from the checkout in which
the process was started.

Requests and replies are lines of JSON on standard input and output. A request {"do": NAME, arguments} calls the method
NAME of `Worker`; the reply is {"result": the method's result} or {"error": text}. CLOCK: "kernels" measures GPU time,
"host" CPU time.
"""

import gc
import hashlib
import importlib
import json
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from benchmarks import timing


def load(tree: Path) -> str:
    """Import fp8moe from `tree`; return the path of the imported file. SystemExit if another fp8moe was imported."""
    sys.path.insert(0, str(tree))
    file = importlib.import_module("fp8moe").__file__
    sys.path.remove(str(tree))
    if file is None or not Path(file).resolve().is_relative_to(tree):
        raise SystemExit(f"fp8moe was imported from {file}, not from {tree}")
    return file


def checksum(tensor: Tensor) -> str:
    """Return a hash of a tensor's bytes."""
    data = tensor.contiguous().view(-1).view(torch.uint8).cpu()
    return hashlib.blake2b(data.numpy(), digest_size=16).hexdigest()


def difference(old: Tensor, new: Tensor) -> float:
    """Return the largest difference over the largest finite magnitude in `old`. Two NaNs count as equal."""
    if old.shape != new.shape:
        return math.inf
    old, new = old.float().flatten(), new.float().flatten()
    apart = (old != new) & ~(old.isnan() & new.isnan())
    if not apart.any():
        return 0.0
    largest = old.where(old.isfinite(), 0).abs().max()
    return ((new - old)[apart].abs().max() / largest).nan_to_num(nan=math.inf, posinf=math.inf).item()


def gpu_times(call: Callable[[], object], repeats: int) -> list[float]:
    """Return each repeat's microseconds from the start of the first kernel to the end of the last, with a cold L2."""
    return list(timing.measure_in_turn([call], repeats=repeats, rest=timing.SHORT_REST_S)[0].spans_us)


def graph_times(replay: Callable[[], object], repeats: int) -> list[float]:
    """Return the microseconds of each graph replay, by CUDA events: the profiler may lose kernels of a graph."""
    flush = timing.warm_up([replay])
    time.sleep(timing.SHORT_REST_S)
    return timing.elapsed_each([replay], flush, repeats)[0]


def wall_times(call: Callable[[], object], repeats: int) -> list[float]:
    """Return the wall time of each call in microseconds, for tests without a GPU."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(1e6 * (time.perf_counter() - start))
    return times


def fastest_batch(call: Callable[[], object], repeats: int) -> list[float]:
    """Return a list with one number, the CPU time of the fastest batch: other processes can only add time."""
    return [min(timing.host_times(call, repeats))]


class Worker:
    """The methods that requests may call. A worker holds one case at a time."""

    def __init__(self, device: str, clock: str = "kernels"):
        from benchmarks import calls  # not at the top of the file: `calls` imports fp8moe, which `load` imports first

        self._calls = calls
        self._device = device
        self._graphs = device == "cuda" and clock == "kernels"
        self._timer = wall_times
        if device == "cuda":
            self._timer = gpu_times if clock == "kernels" else fastest_batch
        self._call: Callable[[], object] | None = None
        self._measure = self._timer
        self._results: list[Tensor] = []

    def prepare(self, op: str, sizes: dict) -> list[str]:
        """Build a case and run it once, to compile its kernels; return checksums of its results."""
        self.drop()
        call = self._calls.build(self._calls.Case(op, sizes), self._calls.Operands(self._device))
        results = [call()]
        self._measure = self._timer
        if self._graphs and op in self._calls.LAYERS:
            # Time a CUDA graph instead, so that the host's time between kernels does not count.
            eager = call

            def keep() -> None:
                results[:] = [eager()]

            call = timing.capture(keep)  # `results` now holds the tensors that each replay writes
            call()
            self._measure = graph_times
        self._call, self._results = call, self._calls.flatten(results[-1])
        return [checksum(tensor) for tensor in self._results]

    def measure(self, repeats: int) -> list[float]:
        """Time the case; return microseconds. repeats: number of calls or, on the host clock, of batches of calls."""
        return self._measure(self._call, repeats)

    def save(self, path: str) -> None:
        """Save the results of the case to a file, for `difference` in the other process."""
        torch.save([tensor.cpu() for tensor in self._results], path)

    def difference(self, path: str) -> float:
        """Return the largest relative difference of the results from the older revision's results, saved at `path`."""
        saved = torch.load(path)
        if len(saved) != len(self._results):
            return math.inf
        pairs = zip(saved, self._results, strict=True)
        return max(difference(old.to(self._device), new) for old, new in pairs)

    def drop(self) -> None:
        """Drop the case and free its memory."""
        self._call, self._results = None, []
        gc.collect()
        if self._device == "cuda":
            torch.cuda.empty_cache()


def main() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # print all other output to stderr, as stdout carries only replies

    def reply(**content: object) -> None:
        print(json.dumps(content), file=replies, flush=True)

    tree, device, clock = Path(sys.argv[1]).resolve(), *sys.argv[2:]
    file = load(tree)
    worker = Worker(device, clock)
    reply(result={"file": file, "torch": torch.__version__})
    for line in sys.stdin:
        request = json.loads(line)
        try:
            reply(result=getattr(worker, request.pop("do"))(**request))
        except Exception as error:
            if device == "cuda":
                torch.cuda.synchronize()  # raises, and so ends this process, if an error has made the GPU unusable
            reply(error=f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
