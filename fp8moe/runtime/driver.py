"""Access to the CUDA driver: checked calls, loading kernels under stream capture, and importing cuda.core."""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

_importing = threading.Lock()


def cuda_core() -> ModuleType:
    """Import cuda.core under a lock: cuda.core 1.2 is visible to other threads while half imported."""
    with _importing:
        import cuda.core

        return cuda.core


class DriverError(RuntimeError):
    """A CUDA driver call failed. `name`: the driver's name of the error, such as CUDA_ERROR_INVALID_IMAGE."""

    def __init__(self, function: str, name: str):
        super().__init__(f"{function} failed: {name}")
        self.name = name


def check(function: Any, *args: Any) -> Any:
    """Call a `cuda.bindings.driver` function and return its results: None, the value, or a tuple of values."""
    status, *values = function(*args)
    if status.value != 0:
        raise DriverError(function.__name__, status.name)
    if not values:
        return None
    return values[0] if len(values) == 1 else tuple(values)


def driver_version() -> tuple[int, int]:
    """Return (major, minor) of the CUDA version that the driver supports. Raises RuntimeError without a driver."""
    from cuda.bindings import driver

    try:
        version = check(driver.cuDriverGetVersion)
    except DriverError:
        raise
    except RuntimeError as error:  # libcuda cannot be loaded
        raise RuntimeError("no NVIDIA driver found: install one, or set FP8MOE_BACKEND=reference") from error
    return version // 1000, version % 1000 // 10


# Driver errors for code that is newer than the driver, or compiled for another architecture.
_CANNOT_RUN = re.compile(r"UNSUPPORTED_PTX_VERSION|NO_BINARY_FOR_GPU|INVALID_IMAGE|INVALID_SOURCE")


@contextmanager
def loading_code() -> Iterator[None]:
    """Allow loading a compiled kernel while a stream is captured, and explain the driver's errors.

    Loading allocates memory, which a capture in global mode (PyTorch's default) forbids, and the first call of a kernel
    may happen inside a capture. Loading itself is not captured, so the relaxed mode is safe for this thread.

    Raises RuntimeError if the driver is missing or cannot run the compiled code.
    """
    from cuda.bindings import driver

    version = driver_version()
    check(driver.cuInit, 0)
    exchange = driver.cuThreadExchangeStreamCaptureMode
    previous = check(exchange, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
    try:
        yield
    except Exception as error:  # cuda.core's error classes are private
        if not _CANNOT_RUN.search(str(error)):
            raise
        raise RuntimeError(
            f"the NVIDIA driver (CUDA {version[0]}.{version[1]}) cannot load the compiled kernels ({error}): update "
            "the driver, install an nvidia-cuda-nvrtc that is not newer than it, or set FP8MOE_BACKEND=reference"
        ) from error
    finally:
        check(exchange, previous)
