"""Checks of the arguments of an FP8 linear layer, in the manner of `runtime.checks`."""

from torch import Tensor

from fp8moe.quant.checks import check_scale, fp8_data
from fp8moe.quant.formats import ceil_div
from fp8moe.runtime.checks import FLOATING, check_device, check_dtype, check_like


def linear(x: Tensor, weight: Tensor, weight_scale_inv: Tensor, bias: Tensor | None) -> None:
    """Dtypes, shapes and devices of an FP8 linear layer's input and parameters."""
    check_dtype("x", x, *FLOATING)
    n, k = fp8_data("weight", weight, "(N, K)")
    if x.dim() == 0 or x.shape[-1] != k:
        raise ValueError(f"x: expected shape (..., {k}) to match the weight {(n, k)}, got {tuple(x.shape)}")
    check_device("weight", weight, x.device, "x")
    check_scale("weight_scale_inv", weight_scale_inv, (ceil_div(n, 128), ceil_div(k, 128)), x.device)
    if bias is not None:
        check_like("bias", bias, FLOATING, (n,), x.device, "x")
