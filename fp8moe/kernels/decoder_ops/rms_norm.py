"""``rms_norm``: RMSNorm, fused with the residual addition before it and the quantization after it."""

import ctypes
import math
from typing import NamedTuple

import torch
from torch import Tensor

from fp8moe.quant.formats import FP8Tensor, align, ceil_div, empty_quantized
from fp8moe.quant.quantize import quantize_1x128, quantizer_defines
from fp8moe.runtime import autograd
from fp8moe.runtime.checks import FLOATING, aligned, check_dtype, check_like, check_tensor, describe, row_major
from fp8moe.runtime.jit import KernelSpec, load
from fp8moe.runtime.launch import PointerLauncher, planned
from fp8moe.runtime.operator import operator
from fp8moe.runtime.sm90 import WARP

MAX_HIDDEN = 32768
VECTOR_BYTES = 16
_MIN_THREADS = 128  # threads of a thread block that processes several short rows
_MAX_THREADS = 256  # most threads per row, unless a thread would then hold more than _MAX_VECTORS vectors
_MAX_VECTORS = 8


class Normed(NamedTuple):
    """Results of `rms_norm`; a result that was not requested is None.

    sum: x + residual. values: the norm. Both have the shape and dtype of x. quantized: the norm in FP8, 1x128 blocks.
    """

    sum: Tensor | None
    values: Tensor | None
    quantized: FP8Tensor | None


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    residual: Tensor | None = None,
    values: bool = True,
    quantized: bool = False,
) -> Normed:
    """Compute ``values = weight * (sum / sqrt(mean(sum**2) + eps))`` over the last dimension; sum is x + residual.

    x: (..., H) bfloat16, float16 or float32, any strides; H up to 32768, fewer than 2**31 rows.
    weight: (H,) in the dtype of x. residual: (..., H) in the dtype of x. None: the norm is that of x, and Normed.sum is
        None.
    values: return the norm in the dtype of x. quantized: return the norm in FP8, with the bits of
        ``quantize_1x128(values)``. At least one of `values` and `quantized` must be True.
    Returns Normed(sum, values, quantized). Everything is computed in float32. The sum, the quotient and its product
    with the weight are rounded to the dtype of x, as in PyTorch's modules. Equal inputs give equal bits. There is no
    backward: calling it raises RuntimeError. RMSNorm: arXiv:1910.07467.

    Raises TypeError for a wrong type or dtype, ValueError for a wrong shape, size or device.
    """
    check_tensor("x", x)
    check_tensor("weight", weight)
    if residual is not None:
        check_tensor("residual", residual)
    check_number("eps", eps)
    new_sum, new_values, data, scale = autograd.run(
        _op, "fp8moe.kernels.decoder_ops.rms_norm", x, weight, residual, eps, values, quantized
    )
    return Normed(
        None if residual is None else new_sum,
        new_values if values else None,
        FP8Tensor(data, scale) if quantized else None,
    )


def check_number(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float | torch.SymFloat):
        raise TypeError(f"{name}: expected a number, got {describe(value)}")


def row_threads(row_bytes: int) -> int:
    """Return how many threads share a row of `row_bytes` bytes: a power of two up to 32, or a multiple of 32."""
    vectors = ceil_div(row_bytes, VECTOR_BYTES)
    if vectors <= WARP:
        return 1 << (vectors - 1).bit_length()
    each = min(ceil_div(vectors, _MAX_THREADS), _MAX_VECTORS)
    return align(ceil_div(vectors, each), WARP)


class _RowSizes(ctypes.Structure):
    _fields_ = (*((name, ctypes.c_int64) for name in ("rows", "row_stride", "scale_pitch")), ("eps", ctypes.c_float))


def _threads(hidden: int, dtype: torch.dtype) -> tuple[int, int]:
    """Return the number of threads per row and per thread block."""
    row = row_threads(hidden * dtype.itemsize)
    return row, row if row > WARP else _MIN_THREADS


def kernel_spec(hidden: int, dtype: torch.dtype) -> KernelSpec:
    """Return the kernel for rows of `hidden` columns in `dtype`."""
    row, block = _threads(hidden, dtype)
    vector = hidden * dtype.itemsize % VECTOR_BYTES == 0
    sizes = (("HIDDEN", hidden), ("THREADS", block), ("ROW_THREADS", row), ("SIZES_BYTES", ctypes.sizeof(_RowSizes)))
    return KernelSpec("rms_norm.cu", "rms_norm", (*quantizer_defines(dtype, vector=vector), *sizes))


@planned
def launcher(
    device_index: int, rows: int, hidden: int, row_stride: int, eps: float, dtype: torch.dtype
) -> PointerLauncher:
    """Return the launcher, called with (x, residual, weight, sum, values, data, scale).

    All tensors except x and weight may be None. x: (rows, hidden) in `dtype`, rows `row_stride` elements apart. If the
    size of a row is a multiple of 16 bytes, the stride must also be one. The scale is MN-major, and all tensors
    other than x and the scale are contiguous. All tensors start at multiples of 16 bytes.
    """
    row, block = _threads(hidden, dtype)
    return PointerLauncher(
        load(kernel_spec(hidden, dtype)),
        grid=ceil_div(rows, block // row),
        block=block,
        pdl=True,
        pointers=7,
        args=(_RowSizes(rows, row_stride, align(rows, 4), eps),),
    )


def _check(x: Tensor, weight: Tensor, residual: Tensor | None, eps: float, values: bool, quantized: bool) -> None:
    check_dtype("x", x, *FLOATING)
    if not x.dim() or x.shape[-1] > MAX_HIDDEN or math.prod(x.shape[:-1]) >= 1 << 31:
        raise ValueError(
            f"x: expected shape (..., H) with fewer than 2**31 rows and H up to {MAX_HIDDEN}, got {tuple(x.shape)}"
        )
    check_like("weight", weight, (x.dtype,), (x.shape[-1],), x.device, "x")
    if residual is not None:
        check_like("residual", residual, (x.dtype,), x.shape, x.device, "x")
    if not (values or quantized):
        raise ValueError("values: expected True where quantized is False, got False")


def _launch(
    x: Tensor, weight: Tensor, residual: Tensor | None, eps: float, values: bool, quantized: bool
) -> tuple[Tensor, ...]:
    results = new_sum, out, data, scale = _empty(x, weight, residual, eps, values, quantized)
    if x.numel():
        hidden = x.shape[-1]
        rows = x.reshape(-1, hidden)
        rows = row_major(rows) if hidden * x.itemsize % VECTOR_BYTES == 0 else rows.contiguous()
        added = None if residual is None else aligned(residual)
        launch = launcher(x.get_device(), *rows.shape, rows.stride(0), eps, x.dtype)
        wanted = (new_sum if residual is not None else None, out if values else None)
        launch(rows, added, aligned(weight), *wanted, *((data, scale) if quantized else (None, None)))
    return results


def _reference(
    x: Tensor, weight: Tensor, residual: Tensor | None, eps: float, values: bool, quantized: bool
) -> tuple[Tensor, ...]:
    new_sum = x.new_empty(0) if residual is None else (x + residual).contiguous()
    norm = normalized(x if residual is None else new_sum, weight, eps).contiguous()
    data, scale = quantize_1x128(norm) if quantized else (x.new_empty(0), x.new_empty(0))
    return new_sum, norm if values else x.new_empty(0), data, scale


def normalized(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return ``weight * x / sqrt(mean(x**2) + eps)`` over the last dimension, rounded like transformers' modules."""
    values = x.float()
    return weight * (values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def _empty(
    x: Tensor, weight: Tensor, residual: Tensor | None, eps: float, values: bool, quantized: bool
) -> tuple[Tensor, ...]:
    """Return uninitialized sum, values, data and scale; results that are not requested have no elements."""
    new_sum, new_values = x.new_empty(0 if residual is None else x.shape), x.new_empty(x.shape if values else 0)
    if not quantized:
        return new_sum, new_values, x.new_empty(0), x.new_empty(0)
    *lead, hidden = x.shape
    data, scale = empty_quantized(x, math.prod(lead), hidden)
    if len(lead) != 1:
        data, scale = data.view(x.shape), scale.view(*lead, scale.shape[1])
    return new_sum, new_values, data, scale


_op = operator(
    "rms_norm -> (Tensor, Tensor, Tensor, Tensor)",
    check=_check,
    cuda=_launch,
    reference=_reference,
    fake=_empty,
    forward_only=True,
)
