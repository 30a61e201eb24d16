"""Kernels compiled by threads of their own: FP8MOE_JIT=background."""

import os
import threading
from concurrent.futures import Future
from queue import SimpleQueue

from fp8moe.runtime.jit import KernelSpec, cubin

_lock = threading.Lock()
_queue: SimpleQueue[KernelSpec] = SimpleQueue()
_futures: dict[KernelSpec, Future[bytes]] = {}
_threads: list[threading.Thread] = []


def compile_later(spec: KernelSpec) -> Future[bytes]:
    """`jit.cubin` in another thread: the future has what it returns or raises. One future for all calls with a spec."""
    with _lock:
        future = _futures.get(spec)
        if future is None:
            future = _futures[spec] = Future()
            _queue.put(spec)
            if len(_threads) < max(1, len(os.sched_getaffinity(0)) // 2):  # the other CPUs serve
                # A daemon: a process that ends does not wait for kernels that nobody needs any more.
                thread = threading.Thread(target=_work, name="fp8moe-compiler", daemon=True)
                _threads.append(thread)
                thread.start()
        return future


def busy() -> bool:
    """Whether any kernel that `compile_later` was called for is still to come."""
    return any(not future.done() for future in list(_futures.values()))


def finish() -> None:
    """Wait until all kernels that FP8MOE_JIT=background has begun are compiled or have failed. Raises nothing."""
    for future in list(_futures.values()):
        future.exception()


def _work() -> None:
    while True:
        spec = _queue.get()
        future = _futures[spec]
        try:
            future.set_result(cubin(spec))
        except Exception as error:
            future.set_exception(error)
