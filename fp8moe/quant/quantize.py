"""Quantize to FP8 E4M3 with one scale per block, and back. Blocks of 1x128 for activations, 128x128 for weights.

Block-wise scaling as in DeepSeek-V3 (arXiv:2412.19437, section 3.3.2), with scales in float32 or rounded up to powers
of two (the E8M0 scales of the OCP Microscaling specification v1.0, section 5.4, kept as float32 values).
Quantization has no derivative: the results are detached from the input's autograd graph.
"""

import math

import torch

from fp8moe.quant import quantize_plan, reference
from fp8moe.quant.checks import fp8_operand
from fp8moe.quant.formats import BLOCK, SCALE_FORMATS, FP8Tensor, align, ceil_div
from fp8moe.runtime.autograd import detached
from fp8moe.runtime.backend import use_cuda
from fp8moe.runtime.checks import FLOATING, check_device, check_dtype, check_tensor
from fp8moe.runtime.operator import define


def quantize_1x128(x: torch.Tensor, *, scale_format: str = "float32") -> FP8Tensor:
    """Quantize activations, one scale per row and 128 columns.

    x: (..., K) bfloat16, float16 or float32, any strides.
    scale_format: "float32", or "ue8m0" for scales rounded up to powers of two.
    Returns data (..., K) contiguous and scale (..., ceil(K/128)), a view over one MN-major (rows, ceil(K/128)) buffer
    with rows = product of the leading sizes: strides (..., 1, align(rows, 4)).
    Raises TypeError for a wrong type or dtype, ValueError for a wrong rank or scale_format.
    """
    _check_input("x", x, 1)
    _check_scale_format(scale_format)
    return FP8Tensor(*torch.ops.fp8moe.quantize_1x128(detached(x), scale_format))


def quantize_128x128(w: torch.Tensor, *, scale_format: str = "float32") -> FP8Tensor:
    """Quantize weights, one scale per block of 128x128.

    w: (..., N, K) bfloat16, float16 or float32, any strides.
    scale_format: "float32", or "ue8m0" for scales rounded up to powers of two.
    Returns data (..., N, K) and scale (..., ceil(N/128), ceil(K/128)), both contiguous.
    Raises TypeError for a wrong type or dtype, ValueError for a wrong rank or scale_format.
    """
    _check_input("w", w, 2)
    _check_scale_format(scale_format)
    return FP8Tensor(*torch.ops.fp8moe.quantize_128x128(detached(w), scale_format))


def quantize_128x1(x: torch.Tensor) -> FP8Tensor:
    """Transpose and quantize, one scale per column and 128 rows of x: an operand whose K runs along the rows of x.

    x: (K, M) bfloat16, float16 or float32, any strides.
    Returns data (M, K) contiguous and MN-major scale (M, ceil(K/128)): what `quantize_1x128(x.t())` returns.
    Raises TypeError for a wrong type or dtype, ValueError for a wrong rank.
    """
    _check_input("x", x, 2)
    if x.dim() != 2:
        raise ValueError(f"x: expected shape (K, M), got {tuple(x.shape)}")
    return FP8Tensor(*torch.ops.fp8moe.quantize_128x1(detached(x)))


def dequantize(t: FP8Tensor | tuple[torch.Tensor, torch.Tensor], *, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """``data * scale`` of each block, computed in float32.

    t: FP8Tensor or (data, scale). data (..., R, K) float8_e4m3fn; scale float32, any strides,
    (..., R, ceil(K/128)) for 1x128 blocks or (..., ceil(R/128), ceil(K/128)) for 128x128 blocks.
    dtype: floating dtype of the result, shaped as data.
    Raises TypeError for a wrong type or dtype, ValueError for a scale of another shape.
    """
    data, scale = fp8_operand("t", t)
    check_dtype("t.data", data, torch.float8_e4m3fn)
    check_dtype("t.scale", scale, torch.float32)
    if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"dtype: expected a floating dtype, got {dtype!r}")
    if data.dim() == 0:
        raise ValueError("t.data: expected at least one dimension, got a scalar")
    check_device("t.scale", scale, data.device, "t.data")
    k = data.shape[-1]
    per_row = (*data.shape[:-1], ceil_div(k, BLOCK))
    if scale.shape != per_row:
        per_tile = data.dim() > 1 and (*data.shape[:-2], ceil_div(data.shape[-2], BLOCK), per_row[-1])
        if scale.shape != per_tile:
            raise ValueError(
                f"t.scale: expected shape {per_row} (1x128 blocks)"
                + (f" or {per_tile} (128x128 blocks)" if per_tile else "")
                + f" for data of shape {tuple(data.shape)}, got {tuple(scale.shape)}"
            )
        scale = scale.repeat_interleave(BLOCK, dim=-2)[..., : data.shape[-2], :]
    values = data.float()
    whole = k // BLOCK
    values[..., : whole * BLOCK].unflatten(-1, (whole, BLOCK)).mul_(scale[..., :whole, None])
    values[..., whole * BLOCK :].mul_(scale[..., whole:])
    return values.to(dtype)


def _check_input(name: str, x: torch.Tensor, min_dim: int) -> None:
    check_tensor(name, x)
    check_dtype(name, x, *FLOATING)
    if x.dim() < min_dim:
        raise ValueError(f"{name}: expected at least {min_dim} dimension(s), got shape {tuple(x.shape)}")


def _check_scale_format(scale_format: str) -> None:
    if scale_format not in SCALE_FORMATS:
        raise ValueError(f"scale_format: expected one of {SCALE_FORMATS}, got {scale_format!r}")


def _quantize_1x128_op(x: torch.Tensor, scale_format: str) -> tuple[torch.Tensor, torch.Tensor]:
    lead, k = x.shape[:-1], x.shape[-1]
    rows = x if len(lead) == 1 else x.reshape(math.prod(lead), k)
    backend = quantize_plan if use_cuda(x) else reference
    data, scale = backend.quantize_1x128(rows, scale_format == "ue8m0")
    return (data, scale) if len(lead) == 1 else (data.view(x.shape), scale.view(*lead, scale.shape[-1]))


def _quantize_128x128_op(w: torch.Tensor, scale_format: str) -> tuple[torch.Tensor, torch.Tensor]:
    lead = w.shape[:-2]
    experts = w.reshape(math.prod(lead), *w.shape[-2:])
    backend = quantize_plan if use_cuda(w) else reference
    data, scale = backend.quantize_128x128(experts, scale_format == "ue8m0")
    return data.view(w.shape), scale.view(*lead, *scale.shape[-2:])


def _quantize_128x1_op(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return quantize_plan.quantize_128x1(x) if use_cuda(x) else reference.quantize_1x128(x.t(), False)


def _quantize_1x128_fake(x: torch.Tensor, scale_format: str) -> tuple[torch.Tensor, torch.Tensor]:
    lead, k_blocks = x.shape[:-1], ceil_div(x.shape[-1], BLOCK)
    rows = math.prod(lead)
    scale = x.new_empty_strided((rows, k_blocks), (1, align(rows, 4)), dtype=torch.float32)
    data = x.new_empty(x.shape, dtype=torch.float8_e4m3fn)
    return data, scale if len(lead) == 1 else scale.view(*lead, k_blocks)


def _quantize_128x128_fake(w: torch.Tensor, scale_format: str) -> tuple[torch.Tensor, torch.Tensor]:
    *lead, n, k = w.shape
    scale = w.new_empty((*lead, ceil_div(n, BLOCK), ceil_div(k, BLOCK)), dtype=torch.float32)
    return w.new_empty(w.shape, dtype=torch.float8_e4m3fn), scale


def _quantize_128x1_fake(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return _quantize_1x128_fake(x.t(), "float32")


define("quantize_1x128(Tensor x, str scale_format) -> (Tensor, Tensor)", _quantize_1x128_op, _quantize_1x128_fake)
define("quantize_128x128(Tensor w, str scale_format) -> (Tensor, Tensor)", _quantize_128x128_op, _quantize_128x128_fake)
define("quantize_128x1(Tensor x) -> (Tensor, Tensor)", _quantize_128x1_op, _quantize_128x1_fake)
