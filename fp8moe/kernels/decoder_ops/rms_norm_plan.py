"""Launches ``cuda/rms_norm.cu``."""

import ctypes

import torch
from torch import Tensor

from fp8moe.kernels.decoder_ops.threads import VECTOR_BYTES, row_threads
from fp8moe.quant.formats import BLOCK, align, ceil_div, empty_mn_major
from fp8moe.quant.quantize import quantizer_defines
from fp8moe.runtime.checks import aligned, row_major
from fp8moe.runtime.jit import KernelSpec, load
from fp8moe.runtime.launch import PointerLauncher, current_stream, device_guard
from fp8moe.runtime.plans import PlanCache
from fp8moe.runtime.sm90 import WARP

_MIN_THREADS = 128  # of a thread block, which has several short rows

_plans: PlanCache[PointerLauncher] = PlanCache()


class _Sizes(ctypes.Structure):
    """``struct Sizes`` of the kernel."""

    _fields_ = (*((name, ctypes.c_int64) for name in ("rows", "row_stride", "scale_pitch")), ("eps", ctypes.c_float))


def _threads(hidden: int, dtype: torch.dtype) -> tuple[int, int]:
    """Of a row, of a thread block."""
    row = row_threads(hidden * dtype.itemsize)
    return row, row if row > WARP else _MIN_THREADS


def kernel_spec(hidden: int, dtype: torch.dtype) -> KernelSpec:
    """The kernel for rows of `hidden` columns and `dtype`."""
    row, block = _threads(hidden, dtype)
    vector = hidden * dtype.itemsize % VECTOR_BYTES == 0
    sizes = (("HIDDEN", hidden), ("THREADS", block), ("ROW_THREADS", row), ("SIZES_BYTES", ctypes.sizeof(_Sizes)))
    return KernelSpec("rms_norm.cu", "rms_norm", (*quantizer_defines(dtype, vector=vector), *sizes))


def plan(rows: int, hidden: int, row_stride: int, eps: float, dtype: torch.dtype, device_index: int) -> PointerLauncher:
    """The launcher for x, residual, weight, sum, values, data and scale, in this order; rows and hidden are not 0.

    x (rows, hidden) of `dtype`, its rows `row_stride` elements apart, a multiple of 16 bytes where `hidden` is one. The
    others are contiguous; the scale of row i and block j of 128 columns is element i + j * align(rows, 4) of scale. All
    are at multiples of 16 bytes. 0 is for those that are not there: residual and sum, values, data and scale.
    device_index: of the current device. The kernel starts before the one ahead has ended; nothing is read or written
    before it has.
    """

    def build() -> PointerLauncher:
        row, block = _threads(hidden, dtype)
        return PointerLauncher(
            load(kernel_spec(hidden, dtype)),
            grid=ceil_div(rows, block // row),
            block=block,
            pdl=True,
            pointers=7,
            args=(_Sizes(rows, row_stride, align(rows, 4), eps),),
        )

    return _plans.get((rows, hidden, row_stride, eps, dtype, device_index), build)


def rms_norm(
    x: Tensor, weight: Tensor, residual: Tensor | None, eps: float, values: bool, quantized: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """sum, values, data and scale of x (R, H) and residual (R, H) in any layout, None for what is not asked for."""
    rows, hidden = x.shape
    new_sum = None if residual is None else torch.empty((rows, hidden), dtype=x.dtype, device=x.device)
    out = torch.empty((rows, hidden), dtype=x.dtype, device=x.device) if values else None
    data = torch.empty((rows, hidden), dtype=torch.float8_e4m3fn, device=x.device) if quantized else None
    scale = empty_mn_major(rows, ceil_div(hidden, BLOCK), device=x.device) if quantized else None
    if x.numel():
        whole = hidden * x.itemsize % VECTOR_BYTES == 0
        x = row_major(x) if whole else x.contiguous()
        residual = None if residual is None else aligned(residual)
        device_index = x.get_device()
        operands = (x, residual, aligned(weight), new_sum, out, data, scale)
        with device_guard(device_index):
            plan(rows, hidden, x.stride(0), eps, x.dtype, device_index).launch(
                current_stream(device_index), *(0 if operand is None else operand.data_ptr() for operand in operands)
            )
    return new_sum, out, data, scale
