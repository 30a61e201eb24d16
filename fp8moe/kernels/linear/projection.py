"""A frozen FP8 linear on an input that is quantized already: ``projection`` and its operator ``fp8moe::projection``."""

import torch
from torch import Tensor

from fp8moe.kernels.gemm import checks, launch
from fp8moe.kernels.gemm.api import multiply
from fp8moe.kernels.gemm.launch import Operands
from fp8moe.quant.checks import fp8_operand
from fp8moe.quant.formats import FP8Tensor
from fp8moe.runtime import autograd
from fp8moe.runtime.operator import define


def projection(
    x: FP8Tensor, weight: FP8Tensor, bias: Tensor | None = None, *, out_dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """``dequantize(x) @ dequantize(weight).T + bias``, as `fp8moe.gemm` computes it, launched ahead of its turn.

    x: data (M, K) float8_e4m3fn, scale (M, ceil(K/128)) float32, MN-major. K a multiple of 16.
    weight: data (N, K) float8_e4m3fn, scale (ceil(N/128), ceil(K/128)) float32. N a multiple of 8.
    bias: (N,) bfloat16, float16 or float32. out_dtype: bfloat16 or float32.
    Returns (M, N).

    The kernel fetches weight and bias while the one ahead of it in the stream still runs (programmatic dependent
    launch). So that one must not write them, where it is a kernel of this package; those of PyTorch may.
    There is no backward: calling it raises RuntimeError.

    Raises as `fp8moe.gemm` does.
    """
    operands = (*fp8_operand("a", x), *fp8_operand("b", weight), bias)
    checks.out_dtype(out_dtype, None)
    return autograd.run(_projection_op, "fp8moe.kernels.linear.projection", *operands, out_dtype is torch.float32)


def _projection(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, bias: Tensor | None, float32: bool) -> Tensor:
    operands, out_dtype = Operands(a, a_scale, b, b_scale, bias), torch.float32 if float32 else torch.bfloat16
    found = launch.find_dense(operands, out_dtype, True)
    if found is not None:
        out = found.new_out()
        launch.run_dense(found, operands, out)
        return out
    out = _projection_fake(a, a_scale, b, b_scale, bias, float32)
    multiply(operands, out, pdl=True)
    return out


def _projection_fake(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, bias: Tensor | None, float32: bool
) -> Tensor:
    shape = checks.dense(a, a_scale, b, b_scale, bias)
    return a.new_empty(shape, dtype=torch.float32 if float32 else torch.bfloat16)


_projection_op = define(
    "projection(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, Tensor? bias, bool float32) -> Tensor",
    _projection,
    _projection_fake,
    forward_only=True,
)
