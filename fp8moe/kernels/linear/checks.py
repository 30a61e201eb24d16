"""Checks of the arguments of an FP8 linear layer, in the manner of `runtime.checks`."""

from torch import Tensor

from fp8moe.kernels.gemm.checks import check_bias
from fp8moe.quant.checks import check_floating, check_scale, fp8_matrix
from fp8moe.quant.formats import ceil_div


def linear(x: Tensor, weight: Tensor, weight_scale_inv: Tensor, bias: Tensor | None) -> None:
    """Dtypes, shapes and devices of an FP8 linear layer's input and parameters."""
    check_floating("x", x)
    n, k = fp8_matrix("weight", weight)
    if x.dim() == 0 or x.shape[-1] != k:
        raise ValueError(f"x: expected shape (..., {k}) to match the weight {(n, k)}, got {tuple(x.shape)}")
    device = x.device
    if weight.device != device:
        raise ValueError(f"weight: expected on {device} like x, got {weight.device}")
    check_scale("weight_scale_inv", weight_scale_inv, (ceil_div(n, 128), ceil_div(k, 128)), device)
    if bias is not None:
        check_bias(bias, n, device)
