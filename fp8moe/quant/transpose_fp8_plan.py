"""Launches ``cuda/transpose_fp8.cu``. Arguments are checked by the callers."""

import ctypes

from torch import Tensor

from fp8moe.quant.formats import BLOCK
from fp8moe.runtime.jit import KernelSpec, load
from fp8moe.runtime.launch import PointerLauncher, current_stream, device_guard
from fp8moe.runtime.plans import PlanCache
from fp8moe.runtime.sm90 import WARP

_WARPS = 8

_plans: PlanCache[PointerLauncher] = PlanCache()


def kernel_spec(load_aligned: bool, store_aligned: bool) -> KernelSpec:
    """The kernel for rows of the input, and of the output, that are vectors of 16 bytes, or are not."""
    alignment = (("LOAD_ALIGNED", int(load_aligned)), ("STORE_ALIGNED", int(store_aligned)))
    return KernelSpec("transpose_fp8.cu", "transpose_fp8", (("BLOCK", BLOCK), ("WARPS", _WARPS), *alignment))


def plan(
    n: int, k: int, n_blocks: int, k_blocks: int, grid: int, load_aligned: bool, device_index: int
) -> PointerLauncher:
    """The launcher for data (E, n, k), contiguous, none of them 0, then scale, data_out and scale_out, in this order.

    grid: E * n_blocks * k_blocks. load_aligned: k is a multiple of 16, and so is the address of the data; that of
    data_out always is. device_index: of the current device.
    """
    sizes = (n, k, n_blocks, k_blocks)
    return _plans.get(
        (*sizes, grid, load_aligned, device_index),
        lambda: PointerLauncher(
            load(kernel_spec(load_aligned, n % 16 == 0)),
            grid=grid,
            block=_WARPS * WARP,
            pointers=4,
            args=tuple(map(ctypes.c_int64, sizes)),
        ),
    )


def transpose_fp8(data: Tensor, scale: Tensor, data_out: Tensor, scale_out: Tensor) -> None:
    """data (..., N, K), scale (..., N blocks, K blocks) to data_out (..., K, N), scale_out; all contiguous."""
    if not data.numel():
        return
    n, k = data.shape[-2:]
    index = data.get_device()
    load_aligned = not (data.data_ptr() | k) & 15
    with device_guard(index):
        plan(n, k, *scale.shape[-2:], scale.numel(), load_aligned, index).launch(
            current_stream(index), data.data_ptr(), scale.data_ptr(), data_out.data_ptr(), scale_out.data_ptr()
        )
