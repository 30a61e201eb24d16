"""The activation of frozen experts and its backward: quantized for FP8 products, in bfloat16 for those of adapters."""

from torch import Tensor

from fp8moe.kernels.activation import Activation, weighted_backward
from fp8moe.kernels.experts.backward import values_of
from fp8moe.kernels.experts.swiglu import swiglu_backward_quantize_rows, swiglu_quantize_rows
from fp8moe.quant.formats import FP8Tensor
from fp8moe.quant.quantize import quantize_1x128


def activate(projected: Tensor, groups: Tensor, activation: Activation, size: int) -> tuple[FP8Tensor, Tensor]:
    """Of projected (R, 2I) or (R, I): quantized by rows, and in bfloat16. size: the columns that are not padding."""
    if activation.is_swiglu:
        return swiglu_quantize_rows(projected, groups, activation=activation, values=True)
    values = values_of(projected, activation, size)
    return quantize_1x128(values), values.bfloat16()


def activate_backward(
    projected: Tensor, d_h: Tensor, row_weights: Tensor, groups: Tensor, activation: Activation
) -> tuple[FP8Tensor, Tensor, Tensor, Tensor]:
    """The gradient of projected, quantized by rows; that of row_weights (R,); the first in bfloat16; and the values of
    `activate` in bfloat16.

    d_h: (R, I), without the weights of the rows.
    """
    if activation.is_swiglu:
        return swiglu_backward_quantize_rows(projected, d_h, row_weights, groups, activation=activation, values=True)
    d_projected, values, dots = weighted_backward(projected, d_h, row_weights, activation)
    return quantize_1x128(d_projected), dots, d_projected.bfloat16(), values.bfloat16()
