"""Launches ``cuda/transpose_fp8.cu``. Arguments are checked by the callers."""

import ctypes
import functools

from torch import Tensor

from fp8moe.runtime.jit import KernelSpec, load
from fp8moe.runtime.launch import PointerLauncher, current_stream, device_guard

_THREADS = 256


def kernel_spec(load_vector: bool, store_vector: bool) -> KernelSpec:
    """The kernel for rows of the input, and of the output, that are vectors of 16 bytes, or are not."""
    defines = (("LOAD_VECTOR", int(load_vector)), ("STORE_VECTOR", int(store_vector)))
    return KernelSpec("transpose_fp8.cu", "transpose_fp8", defines)


@functools.lru_cache(maxsize=4096)
def plan(
    n: int, k: int, n_blocks: int, k_blocks: int, tiles: int, load_vector: bool, device_index: int
) -> PointerLauncher:
    """The launcher for data (E, n, k), contiguous, none of them 0, then scale, data_out and scale_out, in this order.

    tiles: E * n_blocks * k_blocks. load_vector: k is a multiple of 16, and so is the address of the data; that of
    data_out always is. device_index: of the current device.
    """
    return PointerLauncher(
        load(kernel_spec(load_vector, n % 16 == 0)),
        grid=tiles,
        block=_THREADS,
        pointers=4,
        args=tuple(map(ctypes.c_int64, (n, k, n_blocks, k_blocks))),
    )


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
