"""Launches ``cuda/transpose_fp8.cu``. Arguments are checked by the callers."""

import ctypes
import functools

from torch import Tensor

from fp8moe.kernels.jit import KernelSpec, load
from fp8moe.kernels.launch import Launcher, current_stream, device_guard

_THREADS = 256


def kernel_spec(load_vector: bool, store_vector: bool) -> KernelSpec:
    """The kernel for rows of the input, and of the output, that are vectors of 16 bytes, or are not."""
    defines = (("LOAD_VECTOR", int(load_vector)), ("STORE_VECTOR", int(store_vector)))
    return KernelSpec("transpose_fp8.cu", "transpose_fp8", defines)


class Plan:
    """The kernel with every argument but the four pointers. Build it with its device current; see `plan`."""

    def __init__(self, n: int, k: int, n_blocks: int, k_blocks: int, tiles: int, load_vector: bool):
        self._pointers = tuple(ctypes.c_int64() for _ in range(4))
        self._launcher = Launcher(
            load(kernel_spec(load_vector, n % 16 == 0)),
            grid=tiles,
            block=_THREADS,
            args=(*self._pointers, *map(ctypes.c_int64, (n, k, n_blocks, k_blocks))),
        )

    def launch(self, stream: int, data: int, scale: int, data_out: int, scale_out: int) -> None:
        """Enqueue the kernel for operands and results at these addresses; `data_out` is a multiple of 16."""
        launcher = self._launcher
        with launcher.lock:
            for pointer, address in zip(self._pointers, (data, scale, data_out, scale_out), strict=True):
                pointer.value = address
            launcher.launch(stream)


@functools.lru_cache(maxsize=4096)
def plan(n: int, k: int, n_blocks: int, k_blocks: int, tiles: int, load_vector: bool, device_index: int) -> Plan:
    """The plan for data (E, n, k), contiguous, none of them 0, on the current device, `device_index`.

    tiles: E * n_blocks * k_blocks. load_vector: k is a multiple of 16, and so is the address of the data.
    """
    return Plan(n, k, n_blocks, k_blocks, tiles, load_vector)


def transpose_fp8(data: Tensor, scale: Tensor, data_out: Tensor, scale_out: Tensor) -> None:
    """data (..., N, K), scale (..., N blocks, K blocks) to data_out (..., K, N), scale_out; all contiguous."""
    if not data.numel():
        return
    n, k = data.shape[-2:]
    index = data.get_device()
    load_vector = not (data.data_ptr() | k) & 15
    with device_guard(index):
        plan(n, k, *scale.shape[-2:], scale.numel(), load_vector, index).launch(
            current_stream(index), data.data_ptr(), scale.data_ptr(), data_out.data_ptr(), scale_out.data_ptr()
        )
