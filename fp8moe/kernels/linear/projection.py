"""A frozen FP8 linear layer for an already quantized input: ``projection`` and its operator."""

from typing import Annotated

import torch
from torch import Tensor

from fp8moe.kernels.gemm import checks
from fp8moe.kernels.gemm.api import empty_product, product
from fp8moe.kernels.gemm.launch import GemmOperands
from fp8moe.quant.checks import fp8_operand
from fp8moe.quant.formats import FP8Tensor
from fp8moe.runtime import autograd
from fp8moe.runtime.operator import define


def projection(
    x: FP8Tensor, weight: FP8Tensor, bias: Tensor | None = None, *, out_dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """Compute `fp8moe.gemm` of x, weight and bias, launched before the kernel ahead in the stream has ended.

    x: data (M, K) float8_e4m3fn, scale (M, ceil(K/128)) float32, MN-major. K a multiple of 16.
    weight: data (N, K) float8_e4m3fn, scale (ceil(N/128), ceil(K/128)) float32. N a multiple of 8.
    bias: (N,) bfloat16, float16 or float32. out_dtype: bfloat16 or float32.
    Returns (M, N).

    The kernel fetches weight and bias while the kernel ahead still runs (programmatic dependent launch): a kernel of
    this package that is ahead must not write them; a kernel of PyTorch may. There is no backward: calling it raises
    RuntimeError.

    Raises as `fp8moe.gemm` does.
    """
    operands = (*fp8_operand("a", x), *fp8_operand("b", weight), bias)
    checks.out_dtype(out_dtype, None)
    return autograd.run(_projection_op, "fp8moe.kernels.linear.projection", *operands, out_dtype is torch.float32)


def _projection(operands: Annotated[GemmOperands, (*GemmOperands._fields[:4], "bias")], float32: bool) -> Tensor:
    return product(operands, float32, pdl=True)


_projection_op = define("projection -> Tensor", _projection, empty_product, forward_only=True)
