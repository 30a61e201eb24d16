"""FP8 linear layer as one operator, ``fp8moe::linear``: quantize the input 1x128, multiply by quantized weights."""

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8moe.kernels.gemm.dense import compute
from fp8moe.kernels.gemm.dense_plan import Operands
from fp8moe.kernels.linear import checks, plan
from fp8moe.kernels.linear.training import linear_training
from fp8moe.quant import reference
from fp8moe.runtime import autograd
from fp8moe.runtime.backend import use_cuda
from fp8moe.runtime.operator import define


def linear(x: Tensor, weight: Tensor, weight_scale_inv: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ dequantize(weight).T + bias`` with x quantized to FP8 by blocks of 1x128.

    x: (..., K) bfloat16, float16 or float32; any K.
    weight: (N, K) float8_e4m3fn; any N. weight_scale_inv: (ceil(N/128), ceil(K/128)) float32.
    bias: (N,) bfloat16, float16 or float32, or None.
    Returns (..., N) in the dtype of x, rounded once from float32.

    Where K is not a multiple of 16 or N not of 8, the call pads copies of the operands with zeros. x and bias get
    gradients, as `linear_training` describes them. An FP8 weight has none: where it requires one, the backward raises
    RuntimeError.

    Raises TypeError for a wrong dtype, ValueError for a wrong shape or device, RuntimeError under forward-mode
    differentiation and the derivatives of torch.func.
    """
    autograd.check_derivatives("fp8moe.FP8Linear", x, weight, bias)
    if autograd.recorded(weight, weight_scale_inv):
        name = "fp8moe.FP8Linear with an FP8 weight that requires a gradient, not a master_dtype,"
        return autograd.run(_linear_op, name, x, weight, weight_scale_inv, bias)
    if autograd.recorded(x, bias):
        return linear_training(x, weight, weight_scale_inv, bias)
    return _linear_op(x, weight, weight_scale_inv, bias)


def _linear(x: Tensor, weight: Tensor, weight_scale_inv: Tensor, bias: Tensor | None) -> Tensor:
    known = plan.find(x, weight, weight_scale_inv, bias)
    if known is not None:
        return known.run(x, weight, weight_scale_inv, bias)
    checks.linear(x, weight, weight_scale_inv, bias)
    n, k = weight.shape
    pad_n, pad_k = -n % 8, -k % 16
    if pad_n or pad_k:
        # Zeros fall into blocks that are there already, so the scales stay as they are.
        x = F.pad(x, (0, pad_k))
        weight = F.pad(weight.view(torch.uint8), (0, pad_k, 0, pad_n)).view(weight.dtype)
        bias = bias if bias is None else F.pad(bias, (0, pad_n))
    if n and x.numel() and use_cuda(x):
        out = plan.linear(x, weight, weight_scale_inv, bias)
    else:
        out = _composed(x, weight, weight_scale_inv, bias)
    return out[..., :n].clone(memory_format=torch.contiguous_format) if pad_n else out


def _composed(x: Tensor, weight: Tensor, weight_scale_inv: Tensor, bias: Tensor | None) -> Tensor:
    """The layer from the reference quantizer and the GEMM, for the reference backend and for empty operands."""
    lead = x.shape[:-1]
    data, scale = reference.quantize_1x128(x.reshape(lead.numel(), x.shape[-1]), False)
    dtype = torch.float32 if x.dtype is torch.float16 else x.dtype
    out = torch.empty((lead.numel(), weight.shape[0]), dtype=dtype, device=x.device)
    compute(Operands(data, scale, weight, weight_scale_inv, bias), out)
    return out.to(x.dtype).view(*lead, weight.shape[0])


def _linear_fake(x: Tensor, weight: Tensor, weight_scale_inv: Tensor, bias: Tensor | None) -> Tensor:
    checks.linear(x, weight, weight_scale_inv, bias)
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


_linear_op = define(
    "linear(Tensor x, Tensor weight, Tensor weight_scale_inv, Tensor? bias) -> Tensor",
    _linear,
    _linear_fake,
    forward_only=True,  # linear_training has a backward
)
