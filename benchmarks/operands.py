"""Float64 values of quantized tensors, and errors of results relative to exact values."""

import torch

from fp8moe import FP8Tensor
from fp8moe.quant.formats import BLOCK


def exact(tensor: FP8Tensor) -> torch.Tensor:
    """Return the exact float64 values of a quantized (rows, k) tensor, with one scale per row or per 128 rows.

    This is the reference for results. It uses no code of the package. Unlike `fp8moe.dequantize`, which rounds to
    float32, this function does not round.
    """
    data, scale = tensor
    rows_per_block = 1 if scale.shape[0] == data.shape[0] else BLOCK
    scale = scale.double().repeat_interleave(rows_per_block, 0)[: data.shape[0]]
    return data.double() * scale.repeat_interleave(BLOCK, 1)[:, : data.shape[1]]


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the Frobenius norm of `actual` - `expected` over the norm of `expected`, in float64."""
    return ((actual.double() - expected).norm() / expected.norm()).item()


def rounded_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the relative Frobenius error of `actual`, less the error of rounding `expected` to the dtype of `actual`.

    Rounding normal data to bfloat16 alone costs 1.66e-3, which would hide the error of the computation.
    """
    rounding = relative_error(expected.to(actual.dtype), expected)
    error = relative_error(actual, expected) - rounding
    return 0.0 if error < 0 else error  # max(error, 0) would hide NaN
