"""Helpers with which tests of DeepGEMM and of its users compare tensors and measure time."""

import functools
import os
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

P = ParamSpec("P")

_L2_BYTES = 256 << 20  # bytes written to flush the L2 cache; no GPU's L2 is larger


def calc_diff(x: Tensor, y: Tensor) -> float:
    """Return ``1 - 2 x.y / (x.x + y.y)``, computed in float64: 0 for equal tensors, also if all values are zero."""
    x, y = x.double(), y.double()
    size = (x * x + y * y).sum()
    return (1 - 2 * (x * y).sum() / size).item() if size != 0 else 0.0


def assert_bitwise_equal(x: Tensor, y: Tensor) -> None:
    """Raise AssertionError unless x and y have the same dtype, shape and bits, including those of NaN and zeros."""
    assert x.dtype is y.dtype and x.shape == y.shape, f"{x.dtype} {tuple(x.shape)}, {y.dtype} {tuple(y.shape)}"
    one, other = (value.reshape(-1).contiguous().view(torch.uint8) for value in (x, y))
    differ = (one != other).sum().item()
    assert not differ, f"{differ} of {x.nbytes} bytes differ"


def test_filter(condition: Callable[[], bool]) -> Callable[[Callable[P, Any]], Callable[P, None]]:
    """Make a decorator that runs the function only if condition() is true at the call, and otherwise prints a line."""

    def decorate(function: Callable[P, Any]) -> Callable[P, None]:
        @functools.wraps(function)
        def call(*args: P.args, **options: P.kwargs) -> None:
            if condition():
                function(*args, **options)
            else:
                print(f"{function.__name__}: left out by its condition")

        return call

    return decorate


def ignore_env(name: str, condition: Callable[[], bool]) -> Callable[[Callable[P, Any]], Callable[P, None]]:
    """Make a decorator that removes the environment variable `name` during the call if condition() is true."""

    def decorate(function: Callable[P, Any]) -> Callable[P, None]:
        @functools.wraps(function)
        def call(*args: P.args, **options: P.kwargs) -> None:
            value = os.environ.pop(name, None) if condition() else None
            try:
                function(*args, **options)
            finally:
                if value is not None:
                    os.environ[name] = value

        return call

    return decorate


def count_bytes(*tensors: Tensor | Iterable | None) -> int:
    """Return the total bytes of the elements of all tensors, also in nested tuples and lists; None counts 0."""
    total = 0
    for value in tensors:
        if isinstance(value, Tensor):
            total += value.numel() * value.element_size()
        elif value is not None:
            total += count_bytes(*value)
    return total


def get_arch_major() -> int:
    """Return the major number of the current GPU's compute capability: 9 on Hopper."""
    return torch.cuda.get_device_capability()[0]


def bench_kineto(
    fn: Callable[[], Any],
    kernel_names: str | tuple[str, ...],
    num_tests: int = 30,
    suppress_kineto_output: bool = False,
    trace_path: str | None = None,
    flush_l2: bool = True,
    with_multiple_kernels: bool = False,
) -> float | tuple[float, ...]:
    """Return the mean seconds per run of each kernel (without a GPU: operator) whose name contains a given string.

    fn: called once to compile its kernels, then num_tests times under PyTorch's profiler. kernel_names: one string (the
    result is a number) or several (the result is a tuple); 0 for a kernel that did not run. flush_l2: whether to write
    256 MB before each call. trace_path: where to write a trace. with_multiple_kernels: whether a string may match
    several kernels; the mean is then over the runs of all of them. Otherwise a string that matches several kernels
    raises ValueError. suppress_kineto_output: no effect, nothing is printed.
    """
    cuda = torch.cuda.is_available()
    fn()
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as profiler:
        for _ in range(num_tests):
            if flush_l2 and cuda:
                torch.empty(_L2_BYTES, dtype=torch.int8, device="cuda").zero_()
            fn()
        if cuda:
            torch.cuda.synchronize()
    if trace_path is not None:
        profiler.export_chrome_trace(trace_path)
    events = profiler.key_averages()
    names = (kernel_names,) if isinstance(kernel_names, str) else kernel_names
    times = tuple(_mean_seconds(name, events, cuda, with_multiple_kernels) for name in names)
    return times[0] if isinstance(kernel_names, str) else times


def _mean_seconds(name: str, events: Iterable, cuda: bool, several: bool) -> float:
    kernels = [event for event in events if name in event.key]
    if len(kernels) > 1 and not several:
        raise ValueError(f"kernel_names: expected the name of one kernel, got {name!r}, of {[e.key for e in kernels]}")
    count = sum(event.count for event in kernels)
    microseconds = sum(event.device_time_total if cuda else event.cpu_time_total for event in kernels)
    return microseconds / count / 1e6 if count else 0.0
