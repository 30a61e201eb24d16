"""Launches ``cuda/merge_splits.cu``."""

import ctypes

import torch
from torch import Tensor

from fp8moe.quant.formats import BLOCK, align, ceil_div, empty_mn_major
from fp8moe.quant.quantize import quantizer_defines
from fp8moe.runtime.checks import aligned
from fp8moe.runtime.jit import KernelSpec, load
from fp8moe.runtime.launch import PointerLauncher, current_stream, device_guard
from fp8moe.runtime.plans import PlanCache

_GROUPS = 8
_VECTOR_BYTES = 16

_plans: PlanCache[PointerLauncher] = PlanCache()


class _Sizes(ctypes.Structure):
    """``struct Sizes`` of the kernel."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("lse_part", "lse_head", "scale_pitch")),
        ("splits", ctypes.c_int32),
    )


def kernel_spec(heads: int, key_heads: int, size: int, dtype: torch.dtype) -> KernelSpec:
    """The kernel for heads of `size` values of `dtype`."""
    sizes = (("HEADS", heads), ("KEY_HEADS", key_heads), ("SIZE", size), ("GROUPS", _GROUPS))
    defines = (*quantizer_defines(dtype), *sizes, ("SIZES_BYTES", ctypes.sizeof(_Sizes)))
    return KernelSpec("merge_splits.cu", "merge_splits", defines)


def merge_splits(
    parts: Tensor, lse: Tensor, counts: Tensor, quantized: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """values, or data and scale, as ``block.merge_splits`` describes them; operands in any layout."""
    rows, key_heads, splits, shared, size = parts.shape
    heads, columns, dtype, device = key_heads * shared, key_heads * shared * size, parts.dtype, parts.device
    values = None if quantized else torch.empty((rows, columns), dtype=dtype, device=device)
    data = torch.empty((rows, columns), dtype=torch.float8_e4m3fn, device=device) if quantized else None
    scale = empty_mn_major(rows, ceil_div(columns, BLOCK), device=device) if quantized else None
    if not rows * columns:
        return values, data, scale
    lse = lse.flatten(0, 2)
    strides = lse.stride()
    index = parts.get_device()

    def build() -> PointerLauncher:
        return PointerLauncher(
            load(kernel_spec(heads, key_heads, size, dtype)),
            grid=(ceil_div(columns, BLOCK), rows),
            block=_GROUPS * BLOCK * dtype.itemsize // _VECTOR_BYTES,
            pdl=True,
            pointers=6,
            args=(_Sizes(*strides, align(rows, 4), splits),),
        )

    operands = (aligned(parts), lse, counts.contiguous(), values, data, scale)
    with device_guard(index):
        plan = _plans.get((rows, key_heads, splits, shared, size, dtype, strides, index), build)
        plan.launch(current_stream(index), *(0 if operand is None else operand.data_ptr() for operand in operands))
    return values, data, scale
