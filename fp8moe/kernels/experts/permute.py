"""Copy tokens to their rows in expert order: `permute_quantize` quantizes tokens, `permute_fp8` takes FP8 tokens."""

import ctypes

import torch
from torch import Tensor

from fp8moe.kernels.experts import checks, reference
from fp8moe.quant.checks import fp8_operand
from fp8moe.quant.formats import BLOCK, FP8Tensor, align, ceil_div, empty_quantized
from fp8moe.quant.quantize import quantizer_defines
from fp8moe.runtime.autograd import detached
from fp8moe.runtime.checks import check_tensor, row_major
from fp8moe.runtime.jit import KernelSpec, load
from fp8moe.runtime.launch import PointerLauncher, planned, resident_blocks
from fp8moe.runtime.operator import operator
from fp8moe.runtime.sm90 import WARP

WARPS, _WARP_COLUMNS = 4, 512  # warps of a thread block; columns that a warp processes at a time
_BLOCKS_PER_SM = 12  # thread blocks that an SM runs at once
# Up to this many tokens, each token is loaded before it is known to have a row. More tokens fill the GPU, and then
# loading tokens without a row costs more than waiting does.
_READ_AHEAD_TOKENS = 512


def permute_quantize(x: Tensor, rows: Tensor, num_rows: int) -> FP8Tensor:
    """Quantize each token once, in blocks of 1x128, and write it to all of its rows.

    x: (T, H) bfloat16, float16 or float32, any strides; H a multiple of 16.
    rows: (T, K) int32, the rows of each token, from `sort_by_expert`. Values outside [0, num_rows) are ignored.
    num_rows: number of rows of the result, < 2**31.
    Returns data (num_rows, H) contiguous and scale (num_rows, ceil(H/128)) MN-major, each row with the bits that
    `quantize_1x128` gives its token. A row to which no token or more than one token maps has unspecified contents.
    The result is detached from the autograd graph of x.

    Raises TypeError for a wrong type or dtype, ValueError for a wrong rank, size or device.
    """
    check_tensor("x", x)
    check_tensor("rows", rows)
    return FP8Tensor(*_permute_quantize(detached(x), rows, num_rows))


def permute_fp8(x: FP8Tensor, rows: Tensor, num_rows: int) -> FP8Tensor:
    """Copy each token to all of its rows, like `permute_quantize`, but for tokens that are already quantized 1x128.

    x: FP8Tensor or (data, scale), data (T, H) and scale (T, ceil(H/128)) of any strides. rows, num_rows, result and
    errors: as for `permute_quantize`.
    """
    data, scale = fp8_operand("x", x)
    check_tensor("rows", rows)
    return FP8Tensor(*_permute_fp8(data, scale, rows, num_rows))


class PermuteSizes(ctypes.Structure):
    """``struct PermuteSizes`` of cuda/ops/permute.cuh."""

    _fields_ = (
        *((name, ctypes.c_uint32) for name in ("tokens", "top_k", "num_rows", "read_ahead", "warps")),
        *((name, ctypes.c_int64) for name in ("row_stride", "scale_pitch")),
    )


class _PermuteFP8Sizes(ctypes.Structure):
    """``struct Sizes`` of cuda/ops/permute_fp8.cu."""

    _fields_ = (("permute", PermuteSizes), ("scale_row_stride", ctypes.c_int64), ("scale_block_stride", ctypes.c_int64))


def kernel_spec(hidden: int, dtype: torch.dtype) -> KernelSpec:
    """Return the kernel for tokens of `hidden` columns in `dtype`: float8_e4m3fn for tokens already quantized."""
    fp8 = dtype is torch.float8_e4m3fn
    name = "permute_fp8" if fp8 else "permute_quantize"
    block = (("BLOCK", BLOCK),) if fp8 else quantizer_defines(dtype)
    warps = ("WARPS", WARPS), ("WARP_COLUMNS", _WARP_COLUMNS), ("HIDDEN", hidden)
    sizes = ("SIZES_BYTES", ctypes.sizeof(_PermuteFP8Sizes if fp8 else PermuteSizes))
    return KernelSpec(f"{name}.cu", name, (*block, *warps, sizes))


@planned
def launcher(
    device_index: int,
    x: Tensor,
    x_scale: Tensor | None,
    top_k: int,
    num_rows: int,
    *,
    sparse: bool = False,
    pdl: bool = False,
) -> PointerLauncher:
    """Return the launcher, to be called with (x, x_scale if x is FP8, rows, data, scale, assignments).

    Each warp processes 512 columns of one token. With sparse (most tokens have no row), each warp processes whole
    tokens, and only as many blocks are launched as run at once. Where all tokens have rows, many short blocks are a
    tenth faster.

    x: (T, H), rows at multiples of 16 bytes. The kernel writes data (num_rows, H), contiguous; the MN-major scale; and,
    unless assignments is None, the int32 token * top_k + k of every row that has an assignment.
    """
    tokens, hidden = x.shape
    warps = 1 if sparse else ceil_div(hidden, _WARP_COLUMNS)  # warps that share a token
    blocks = ceil_div(tokens * warps, WARPS)
    if sparse:
        blocks = min(blocks, resident_blocks(_BLOCKS_PER_SM, device_index))
    # A warp looks up the rows of 32 assignments at a time; with a larger top_k the kernel requires read_ahead.
    read_ahead = (tokens <= _READ_AHEAD_TOKENS and not sparse) or top_k > WARP
    sizes = PermuteSizes(tokens, top_k, num_rows, read_ahead, warps, x.stride(0), align(num_rows, 4))
    args, pointers = (sizes, 5) if x_scale is None else (_PermuteFP8Sizes(sizes, *x_scale.stride()), 6)
    kernel = load(kernel_spec(hidden, x.dtype))
    return PointerLauncher(kernel, grid=blocks, block=WARPS * WARP, pdl=pdl, pointers=pointers, args=(args,))


def _launch(x: Tensor, x_scale: Tensor | None, rows: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    data, scale = empty_quantized(x, num_rows, x.shape[1])
    if data.numel() and rows.numel():
        x, quantized = row_major(x), () if x_scale is None else (x_scale,)
        launch = launcher(x.get_device(), x, x_scale, rows.shape[1], num_rows)
        launch(x, *quantized, rows.contiguous(), data, scale, None)
    return data, scale


_permute_quantize = operator(
    "permute_quantize -> (Tensor, Tensor)",
    check=checks.permute,
    cuda=lambda x, rows, num_rows: _launch(x, None, rows, num_rows),
    reference=reference.permute_quantize,
    fake=lambda x, rows, num_rows: empty_quantized(x, num_rows, x.shape[1]),
)
_permute_fp8 = operator(
    "permute_fp8 -> (Tensor, Tensor)",
    check=checks.permute_fp8,
    cuda=_launch,
    reference=reference.permute_fp8,
    fake=lambda data, scale, rows, num_rows: empty_quantized(data, num_rows, data.shape[1]),
)
