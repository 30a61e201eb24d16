"""Launches ``cuda/permute_fp8.cu``."""

import ctypes

import torch
from torch import Tensor

from fp8moe.kernels.experts.permute_plan import WARPS, Sizes, permute_defines, shape
from fp8moe.quant.formats import BLOCK, ceil_div, empty_mn_major
from fp8moe.runtime.checks import row_major
from fp8moe.runtime.hopper import WARP
from fp8moe.runtime.jit import KernelSpec, load
from fp8moe.runtime.launch import PointerLauncher, current_stream, device_guard
from fp8moe.runtime.plans import PlanCache

_plans: PlanCache[PointerLauncher] = PlanCache()


class _Sizes(ctypes.Structure):
    """``struct Sizes`` of the kernel."""

    _fields_ = (("permute", Sizes), ("scale_row_stride", ctypes.c_int64), ("scale_block_stride", ctypes.c_int64))


def kernel_spec(hidden: int) -> KernelSpec:
    """The kernel for tokens of `hidden` columns."""
    defines = (("BLOCK", BLOCK), *permute_defines(hidden), ("SIZES_BYTES", ctypes.sizeof(_Sizes)))
    return KernelSpec("permute_fp8.cu", "permute_fp8", defines)


def plan(
    tokens: int,
    hidden: int,
    top_k: int,
    num_rows: int,
    row_stride: int,
    scale_strides: tuple[int, int],
    device_index: int,
    *,
    sparse: bool = False,
    pdl: bool = False,
) -> PointerLauncher:
    """The launcher for the data of x, its scale, rows, data, scale and assignments, in this order.

    scale_strides: of the scale of x, in elements. The others, and what it reads and writes, as for `permute_plan.plan`.
    """

    def build() -> PointerLauncher:
        blocks, sizes = shape(tokens, hidden, top_k, num_rows, row_stride, sparse, device_index)
        args, kernel = (_Sizes(sizes, *scale_strides),), load(kernel_spec(hidden))
        return PointerLauncher(kernel, grid=blocks, block=WARPS * WARP, pdl=pdl, pointers=6, args=args)

    key = (tokens, hidden, top_k, num_rows, row_stride, scale_strides, device_index, sparse, pdl)
    return _plans.get(key, build)


def permute_fp8(x: Tensor, x_scale: Tensor, rows: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Data and scale of x (T, H), x_scale and rows (T, K) in any layout, as ``experts.permute_fp8`` describes them."""
    tokens, hidden = x.shape
    data = torch.empty((num_rows, hidden), dtype=torch.float8_e4m3fn, device=x.device)
    scale = empty_mn_major(num_rows, ceil_div(hidden, BLOCK), device=x.device)
    if data.numel() and rows.numel():
        x, rows = row_major(x), rows.contiguous()
        device_index = x.get_device()
        operands = (x, x_scale, rows, data, scale)
        with device_guard(device_index):
            plan(tokens, hidden, rows.shape[1], num_rows, x.stride(0), x_scale.stride(), device_index).launch(
                current_stream(device_index), *(operand.data_ptr() for operand in operands), 0
            )
    return data, scale
