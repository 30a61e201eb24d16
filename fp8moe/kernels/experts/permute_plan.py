"""Launches ``cuda/permute_quantize.cu``."""

import ctypes

import torch
from torch import Tensor

from fp8moe.quant.formats import BLOCK, align, ceil_div, empty_mn_major
from fp8moe.quant.quantize_plan import quantizer_defines
from fp8moe.runtime.checks import row_major
from fp8moe.runtime.hopper import WARP
from fp8moe.runtime.jit import KernelSpec, load
from fp8moe.runtime.launch import PointerLauncher, current_stream, device_guard, resident_blocks
from fp8moe.runtime.plans import PlanCache

WARPS, _WARP_COLUMNS = 4, 512  # warps of a thread block, columns that one takes at a time
_BLOCKS_PER_SM = 12  # as many as run at once
_READ_AHEAD_TOKENS = 512  # more fill the GPU, and reading those without a row costs more than waiting does

_plans: PlanCache[PointerLauncher] = PlanCache()


class Sizes(ctypes.Structure):
    """``struct PermuteSizes`` of the kernels."""

    _fields_ = (
        *((name, ctypes.c_uint32) for name in ("tokens", "top_k", "num_rows", "read_ahead", "warps")),
        *((name, ctypes.c_int64) for name in ("row_stride", "scale_pitch")),
    )


def kernel_spec(hidden: int, dtype: torch.dtype) -> KernelSpec:
    """The kernel for tokens of `hidden` columns and `dtype`."""
    defines = (*quantizer_defines(dtype), *permute_defines(hidden), ("SIZES_BYTES", ctypes.sizeof(Sizes)))
    return KernelSpec("permute_quantize.cu", "permute_quantize", defines)


def permute_defines(hidden: int) -> tuple[tuple[str, int], ...]:
    """What cuda/permute.cuh wants defined, save BLOCK."""
    return ("WARPS", WARPS), ("WARP_COLUMNS", _WARP_COLUMNS), ("HIDDEN", hidden)


def shape(
    tokens: int, hidden: int, top_k: int, num_rows: int, row_stride: int, sparse: bool, device_index: int
) -> tuple[int, Sizes]:
    """The thread blocks and sizes of `plan`: a warp for each part of a token, or, if sparse, a warp for each token, of
    which no more run than fit at once.

    Where all tokens have rows, many short blocks are quicker by a tenth.
    """
    warps = 1 if sparse else ceil_div(hidden, _WARP_COLUMNS)  # that share a token
    blocks = ceil_div(tokens * warps, WARPS)
    if sparse:
        blocks = min(blocks, resident_blocks(_BLOCKS_PER_SM, device_index))
    # The kernel finds the rows of as many assignments as a warp has lanes at a time.
    read_ahead = (tokens <= _READ_AHEAD_TOKENS and not sparse) or top_k > WARP
    return blocks, Sizes(tokens, top_k, num_rows, read_ahead, warps, row_stride, align(num_rows, 4))


def plan(
    tokens: int,
    hidden: int,
    top_k: int,
    num_rows: int,
    row_stride: int,
    dtype: torch.dtype,
    device_index: int,
    *,
    sparse: bool = False,
    pdl: bool = False,
) -> PointerLauncher:
    """The launcher for x, rows, data, scale and assignments, in this order; x (tokens, hidden) of `dtype`, not empty.

    device_index: of the current device. row_stride: from one token to the next, in elements, a multiple of 16 bytes;
    within a token the stride is 1. rows (tokens, top_k) is contiguous. It writes data (num_rows, hidden), contiguous,
    the scale of row i and block j of 128 columns to element i + j * align(num_rows, 4) of scale, and to assignments,
    which may be 0, token * top_k + k of each row that has one, int32. x and data are at multiples of 16 bytes. sparse:
    most tokens have no row; only the speed depends on it. pdl: start before the kernel ahead has ended; nothing is read
    or written before it has.
    """

    def build() -> PointerLauncher:
        blocks, sizes = shape(tokens, hidden, top_k, num_rows, row_stride, sparse, device_index)
        kernel = load(kernel_spec(hidden, dtype))
        return PointerLauncher(kernel, grid=blocks, block=WARPS * WARP, pdl=pdl, pointers=5, args=(sizes,))

    return _plans.get((tokens, hidden, top_k, num_rows, row_stride, dtype, device_index, sparse, pdl), build)


def permute_quantize(x: Tensor, rows: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Data and scale of x (T, H) and rows (T, K) in any layout, as ``experts.permute`` describes them."""
    tokens, hidden = x.shape
    data = torch.empty((num_rows, hidden), dtype=torch.float8_e4m3fn, device=x.device)
    scale = empty_mn_major(num_rows, ceil_div(hidden, BLOCK), device=x.device)
    if data.numel() and rows.numel():
        x, rows = row_major(x), rows.contiguous()
        device_index = x.get_device()
        with device_guard(device_index):
            plan(tokens, hidden, rows.shape[1], num_rows, x.stride(0), x.dtype, device_index).launch(
                current_stream(device_index), x.data_ptr(), rows.data_ptr(), data.data_ptr(), scale.data_ptr(), 0
            )
    return data, scale
