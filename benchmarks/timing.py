"""GPU time and CPU time of calls.

The GPU time of a call is the sum of the durations of the kernels that it launches, read from the torch profiler. A fill
of 256 MB before every call empties the L2 cache. All calls are measured in one profiler session, so that many calls
take little longer than one. A call's kernels are those that started between one fill and the next. `host_times`
measures CPU time.
"""

import functools
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import torch

WARMUP = 3
REPEATS = 20
ATTEMPTS = 3
FILLS_AHEAD = 10
# Seconds of rest before each call, so that it runs as if measured alone: at its power limit the GPU lowers its clocks,
# more so the longer it has been busy.
REST_S = 0.3
SHORT_REST_S = 0.05  # rest before calls that do not reach the power limit
# The untimed WARMUP_BATCHES bring clocks and caches of the CPU to the state of a busy process.
CALLS_PER_BATCH, WARMUP_BATCHES = 100, 5
FLUSH_BYTES = 256 << 20
# No op of this package fills an int16 tensor, so a kernel that fills int16 can only be the flush of the L2 cache.
FLUSH_DTYPE = torch.int16


class KernelEvent(NamedTuple):
    """One piece of work on the GPU: its name, start and duration."""

    name: str
    start_ns: int
    duration_ns: int


@dataclass(frozen=True)
class Timing:
    """GPU time of one call in microseconds over its repeats, and the names of its kernels in launch order.

    spans_us: for each repeat, the time from the start of the first kernel to the end of the last.
    places_us: median start and end of each kernel, counted from the start of the first.
    """

    samples_us: tuple[float, ...]
    kernels: tuple[str, ...]
    places_us: tuple[tuple[float, float], ...] = ()
    spans_us: tuple[float, ...] = ()

    @property
    def median_us(self) -> float:
        """Return the median GPU time of the repeats, in microseconds."""
        return statistics.median(self.samples_us)


def attribute(
    events: Iterable[KernelEvent], fill: str, calls: int, repeats: int, *, in_turn: bool = False
) -> list[Timing]:
    """Divide the events of one profiler session among the calls.

    The session ran (fill, call) `repeats` times for each of `calls` calls, in order. fill: the name of the fill's
    kernel. in_turn: each repeat ran all calls; otherwise each call ran all its repeats before the next call. Raises
    RuntimeError if the events do not fit that order: a fill too many or too few, a call without GPU work, or a call
    whose repeats launched different kernels (records were lost).
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
        group = segments[call::calls] if in_turn else segments[call * repeats : (call + 1) * repeats]
        kernels = {tuple(event.name for event in segment) for segment in group}
        if len(kernels) != 1 or () in kernels:
            raise RuntimeError(f"call {call}: expected the same kernels in every repeat, recorded {sorted(kernels)}")
        samples = tuple(sum(event.duration_ns for event in segment) / 1000 for segment in group)
        places = [[_place_ns(event, segment[0]) for event in segment] for segment in group]
        medians = (tuple(zip(*times, strict=True)) for times in zip(*places, strict=True))
        timings.append(
            Timing(
                *(samples, kernels.pop()),
                tuple((statistics.median(starts) / 1000, statistics.median(ends) / 1000) for starts, ends in medians),
                tuple(place[-1][1] / 1000 for place in places),
            )
        )
    return timings


def _place_ns(event: KernelEvent, first: KernelEvent) -> tuple[int, int]:
    start = event.start_ns - first.start_ns
    return start, start + event.duration_ns


def profile(work: Callable[[], None]) -> list[KernelEvent]:
    """Run `work`; return the GPU events that the torch profiler recorded during it."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    return [
        KernelEvent(event.name(), event.start_ns(), event.duration_ns())
        for event in profiler.profiler.kineto_results.events()
        if event.device_type() == torch.autograd.DeviceType.CUDA
    ]


def measure(calls: Sequence[Callable[[], object]], *, rests: Sequence[float] | None = None) -> list[Timing]:
    """Measure the GPU time of each call, one call after another, with a cold L2.

    Every call runs WARMUP times first, which excludes compilation and module loading. rests: idle seconds before each
    call's repeats, REST_S by default.
    """
    return _profiled(calls, [[call] for call in calls], _rests(calls, rests), REPEATS)


def measure_in_turn(calls: Sequence[Callable[[], object]], *, repeats: int, rest: float = REST_S) -> list[Timing]:
    """Measure the GPU time of equivalent calls with a cold L2; each repeat runs all of them, in turn."""
    return _profiled(calls, [calls], [rest], repeats)


def _profiled(calls: Sequence, groups: Sequence[Sequence], rests: Sequence[float], repeats: int) -> list[Timing]:
    """Profile groups of calls, with a rest before each group; in each repeat of a group its calls run in turn.

    Profiles again if the profiler lost records.
    """
    flush, fill = warm_up(calls), _name_of_fill()

    def session() -> None:
        for group, rest in zip(groups, rests, strict=True):
            torch.cuda.synchronize()
            time.sleep(rest)
            for repeat in range(repeats):
                for call in group:
                    flush.fill_(repeat)
                    call()

    for _ in range(ATTEMPTS - 1):
        with suppress(RuntimeError):  # raised if the profiler lost records: try again
            return attribute(profile(session), fill, len(calls), repeats, in_turn=len(groups) == 1)
    return attribute(profile(session), fill, len(calls), repeats, in_turn=len(groups) == 1)


@functools.cache
def _name_of_fill() -> str:
    """Return the name of the kernel that fills an int16 tensor in this version of PyTorch."""
    flush = torch.empty(1 << 20, dtype=FLUSH_DTYPE, device="cuda")
    flush.fill_(0)
    names = {event.name for event in profile(lambda: flush.fill_(0))}
    if len(names) != 1:
        raise RuntimeError(f"expected one kernel for the fill of the L2 cache, recorded {sorted(names)}")
    return names.pop()


def capture(call: Callable[[], object]) -> Callable[[], None]:
    """Capture a call in a CUDA graph and return the graph's replay.

    Warms up on a side stream, as PyTorch requires for backward. The replay keeps the call alive, and with it the
    operands: the graph holds only their addresses.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARMUP):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return lambda held=call: graph.replay()


def elapsed(calls: Sequence[Callable[[], object]], *, rests: Sequence[float] | None = None) -> list[float]:
    """Return median microseconds on the GPU from before each call to after it, by CUDA events, with a cold L2.

    Unlike the sum of kernel times, this time includes gaps between kernels and counts overlapping kernels once. It is
    right only for calls that the host launches in less time than the GPU takes for the fill, such as replays of a
    graph: then the GPU never waits for the host.
    """
    pairs = zip(calls, _rests(calls, rests), strict=True)
    return [us for call, rest in pairs for us in elapsed_in_turn([call], repeats=REPEATS, rest=rest)]


def elapsed_in_turn(calls: Sequence[Callable[[], object]], *, repeats: int, rest: float = REST_S) -> list[float]:
    """Return the same times as `elapsed`, for calls that take turns in every repeat."""
    flush = warm_up(calls)
    time.sleep(rest)
    return [*map(statistics.median, elapsed_each(calls, flush, repeats))]


def elapsed_each(calls: Sequence[Callable[[], object]], flush: torch.Tensor, repeats: int) -> list[list[float]]:
    """Return each repeat's microseconds for each call. flush: a tensor that is filled to empty the L2 cache."""
    for _ in range(FILLS_AHEAD):
        flush.fill_(0)  # takes long enough for the host to get ahead of the GPU
    events = [[[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in calls] for _ in range(repeats)]
    for repeat, pairs in enumerate(events):
        for call, (start, end) in zip(calls, pairs, strict=True):
            flush.fill_(repeat)
            start.record()
            call()
            end.record()
    torch.cuda.synchronize()
    return [[1000 * start.elapsed_time(end) for start, end in pairs] for pairs in zip(*events, strict=True)]


def host_times(call: Callable[[], object], batches: int, *, calls: int = CALLS_PER_BATCH) -> list[float]:
    """Return the CPU time of a call in microseconds: the mean of each batch.

    A batch starts with an empty GPU queue, and should launch fewer kernels than the queue holds (1024).
    """
    times = []
    for _ in range(WARMUP_BATCHES + batches):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        times.append(1e6 * (time.perf_counter() - start) / calls)
    torch.cuda.synchronize()
    return times[WARMUP_BATCHES:]


def warm_up(calls: Sequence[Callable[[], object]]) -> torch.Tensor:
    """Run every call WARMUP times, wait for the GPU, and return the tensor whose fill empties the L2 cache."""
    for call in calls:
        for _ in range(WARMUP):
            call()
    flush = torch.empty(FLUSH_BYTES // FLUSH_DTYPE.itemsize, dtype=FLUSH_DTYPE, device="cuda")
    torch.cuda.synchronize()
    return flush


def _rests(calls: Sequence, rests: Sequence[float] | None) -> Sequence[float]:
    return [REST_S] * len(calls) if rests is None else rests
