"""GPU time of calls by the method of the stored peers.

The time of a call is the sum of the durations of the kernels that it launches, read from the torch profiler. A fill of
256 MB before every call empties the L2 cache. All cases are measured in one profiler session, so that many of them
cost little more than one; a call's kernels are those that started between one fill and the next.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

REPEATS = 20
# Before each case, as if it were measured alone: at its power limit the GPU clocks down, more the longer it was busy.
REST_S = 0.3
FLUSH_BYTES = 256 << 20
# No op of this package fills int16, so the kernel that does is recognised by its name.
FLUSH_DTYPE = torch.int16


class KernelEvent(NamedTuple):
    """One piece of GPU work: name, start and duration in nanoseconds."""

    name: str
    start_ns: int
    duration_ns: int


@dataclass(frozen=True)
class Timing:
    """GPU time of one call in microseconds over its repeats, and the names of its kernels in launch order."""

    samples_us: tuple[float, ...]
    kernels: tuple[str, ...]

    @property
    def median_us(self) -> float:
        return statistics.median(self.samples_us)

    @property
    def mean_us(self) -> float:
        return statistics.fmean(self.samples_us)


def attribute(events: Iterable[KernelEvent], fill: str, calls: int, repeats: int) -> list[Timing]:
    """Shares out the events of one session, `repeats` times (fill, call) for each of `calls` calls in order.

    `fill` is the name of the fill's kernel. Raises RuntimeError if the events do not fit that order: a fill too many
    or too few, a call without GPU work, or a call whose repeats launched different kernels (records were lost).
    """
    segments: list[list[KernelEvent]] = []
    for event in sorted(events, key=lambda event: event.start_ns):
        if event.name == fill:
            segments.append([])
        elif segments:
            segments[-1].append(event)
        else:
            raise RuntimeError(f"the profiler recorded {event.name!r} before the first fill")
    if len(segments) != calls * repeats:
        raise RuntimeError(f"the profiler recorded {len(segments)} fills for {calls} calls of {repeats} repeats")
    timings = []
    for call in range(calls):
        group = segments[call * repeats : (call + 1) * repeats]
        kernels = {tuple(event.name for event in segment) for segment in group}
        if len(kernels) != 1 or () in kernels:
            raise RuntimeError(f"call {call}: expected the same kernels in every repeat, recorded {sorted(kernels)}")
        samples = tuple(sum(event.duration_ns for event in segment) / 1000 for segment in group)
        timings.append(Timing(samples, kernels.pop()))
    return timings


def _profile(work: Callable[[], None]) -> list[KernelEvent]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    return [
        KernelEvent(event.name(), event.start_ns(), event.duration_ns())
        for event in profiler.profiler.kineto_results.events()
        if event.device_type() == torch.autograd.DeviceType.CUDA
    ]


def measure(calls: Sequence[Callable[[], object]], *, repeats: int = REPEATS, warmup: int = 3) -> list[Timing]:
    """GPU time of each call, in order, with a cold L2.

    Every call runs `warmup` times first, so that compilation and module loading stay out of the numbers.
    """
    for call in calls:
        for _ in range(warmup):
            call()
    flush = torch.empty(FLUSH_BYTES // FLUSH_DTYPE.itemsize, dtype=FLUSH_DTYPE, device="cuda")
    torch.cuda.synchronize()
    # A first short session initialises the profiler and says what the fill's kernel is called in this version of torch.
    names = {event.name for event in _profile(lambda: flush.fill_(0))}
    if len(names) != 1:
        raise RuntimeError(f"expected one kernel for the fill of the L2 cache, recorded {sorted(names)}")

    def session() -> None:
        for call in calls:
            torch.cuda.synchronize()
            time.sleep(REST_S)
            for repeat in range(repeats):
                flush.fill_(repeat)
                call()

    return attribute(_profile(session), names.pop(), len(calls), repeats)
