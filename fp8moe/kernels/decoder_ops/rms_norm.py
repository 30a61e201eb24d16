"""RMSNorm with what surrounds it in a decoder layer: ``rms_norm`` and its operator ``fp8moe::rms_norm``."""

import math
from typing import NamedTuple

from torch import Tensor

from fp8moe.kernels.decoder_ops import checks, rms_norm_plan
from fp8moe.kernels.decoder_ops.rms_norm_reference import normalized
from fp8moe.quant.formats import FP8Tensor
from fp8moe.quant.quantize import quantize_1x128
from fp8moe.runtime import autograd
from fp8moe.runtime.backend import use_cuda
from fp8moe.runtime.checks import check_tensor
from fp8moe.runtime.operator import define


class Normed(NamedTuple):
    """What `rms_norm` was asked for; the rest is None.

    sum: x + residual, in the shape and dtype of x. values: the norm, likewise. quantized: the same in blocks of 1x128.
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
    """``values = weight * (sum / sqrt(mean(sum**2) + eps))`` over the last dimension, with sum = x + residual, or x.

    x: (..., H) bfloat16, float16 or float32, any strides; H up to 32768, fewer than 2**31 rows.
    weight: (H,) of its dtype. residual: (..., H) of its dtype, or None: then Normed.sum is None.
    values, quantized: what is wanted, at least one of them. quantized has the bits of ``quantize_1x128(values)``; then
        values need not be in memory.
    Everything is computed in float32. What PyTorch's modules round is rounded to the dtype of x: the sum, the quotient,
    its product with the weight. Equal inputs give equal bits. There is no backward: calling it raises RuntimeError.

    RMSNorm: arXiv:1910.07467.

    Raises TypeError for a wrong type or dtype, ValueError for a wrong shape, size or device.
    """
    check_tensor("x", x)
    check_tensor("weight", weight)
    if residual is not None:
        check_tensor("residual", residual)
    checks.number("eps", eps)
    new_sum, new_values, data, scale = autograd.run(
        _rms_norm_op, "fp8moe.kernels.decoder_ops.rms_norm", x, weight, residual, eps, values, quantized
    )
    return Normed(
        None if residual is None else new_sum,
        new_values if values else None,
        FP8Tensor(data, scale) if quantized else None,
    )


def _rms_norm(
    x: Tensor, weight: Tensor, residual: Tensor | None, eps: float, values: bool, quantized: bool
) -> tuple[Tensor, ...]:
    checks.rms_norm(x, weight, residual, values, quantized)
    if not use_cuda(x):
        return _composed(x, weight, residual, eps, values, quantized)
    rows = (math.prod(x.shape[:-1]), x.shape[-1])
    residual_rows = None if residual is None else residual.reshape(rows)
    *results, scale = rms_norm_plan.rms_norm(x.reshape(rows), weight, residual_rows, eps, values, quantized)
    results = (_or_empty(x, result if result is None else result.view(x.shape)) for result in results)
    return *results, _or_empty(x, scale if scale is None else scale.view(*x.shape[:-1], scale.shape[-1]))


def _composed(
    x: Tensor, weight: Tensor, residual: Tensor | None, eps: float, values: bool, quantized: bool
) -> tuple[Tensor, ...]:
    """From PyTorch's operations, which define the result."""
    new_sum = None if residual is None else (x + residual).contiguous()
    norm = normalized(x if new_sum is None else new_sum, weight, eps).contiguous()
    data, scale = quantize_1x128(norm) if quantized else (None, None)
    return tuple(_or_empty(x, result) for result in (new_sum, norm if values else None, data, scale))


def _or_empty(x: Tensor, result: Tensor | None) -> Tensor:
    """The result, or what an operator returns in its place."""
    return x.new_empty(0) if result is None else result


def _rms_norm_fake(
    x: Tensor, weight: Tensor, residual: Tensor | None, eps: float, values: bool, quantized: bool
) -> tuple[Tensor, ...]:
    checks.rms_norm(x, weight, residual, values, quantized)
    data, scale = quantize_1x128(x) if quantized else (None, None)
    new_sum = None if residual is None else x.new_empty(x.shape)
    return tuple(_or_empty(x, result) for result in (new_sum, x.new_empty(x.shape) if values else None, data, scale))


_rms_norm_op = define(
    "rms_norm(Tensor x, Tensor weight, Tensor? residual, float eps, bool values, bool quantized) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _rms_norm,
    _rms_norm_fake,
    forward_only=True,
)
