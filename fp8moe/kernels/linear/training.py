"""FP8 linear layer with a backward: operators ``fp8moe::linear_training`` and ``fp8moe::linear_training_backward``."""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8moe.kernels.gemm.api import gemm, weight_gradient
from fp8moe.quant.checks import check_block_scales, check_weight_scale, fp8_data
from fp8moe.quant.formats import BLOCK, FP8Tensor, align, empty_quantized
from fp8moe.quant.quantize import quantize_1x128
from fp8moe.quant.transpose import backward_operand, quantize_with_transpose, transposed_weight
from fp8moe.runtime.autograd import KeptMasters
from fp8moe.runtime.checks import FLOATING, check_device, check_dtype, check_like
from fp8moe.runtime.operator import define

# N and K are padded to multiples of this: K is the inner dimension of the forward GEMM, N of the input gradient's GEMM.
_MULTIPLE = 16
_NAME = "fp8moe.FP8Linear"


def linear_training(
    x: Tensor, weight: Tensor, weight_scale_inv: Tensor, bias: Tensor | None = None, master: Tensor | None = None
) -> Tensor:
    """Return ``x @ dequantize(weight).T + bias`` with x quantized 1x128; x, bias and master get gradients.

    x: (..., K) bfloat16, float16 or float32; any K.
    weight: (N, K) float8_e4m3fn; any N. weight_scale_inv: (ceil(N/128), ceil(K/128)) float32. Neither gets a gradient.
    bias: (N,) bfloat16, float16 or float32, or None.
    master: (N, K) of any floating dtype, the source of the quantized weight: it gets the weight's gradient. None for a
        frozen weight.
    Returns (..., N) in the dtype of x, rounded once from float32.

    Gradients treat every quantization as the identity (straight through). They are summed in float32 and rounded once
    to the dtype of their tensor. The gradients of x and master are products of FP8 operands. Equal inputs give equal
    bits. For the backward the forward keeps the FP8 weight and, with a master, x in FP8: ``K * P`` bytes and 4 for each
    block of 128x128, P being the number of rows rounded up to a multiple of 128. If N or K is not a multiple of 16,
    copies of the operands are padded with zeros.

    Raises TypeError for a wrong dtype, ValueError for a wrong shape or device. The backward raises RuntimeError if the
    master has been changed in place since the forward; so does a backward of the backward.

    Method: DeepSeek-V3, arXiv:2412.19437, section 3.3. Forward, input gradient and weight gradient are FP8 GEMMs, and
    every tensor is quantized once: x and the gradient by rows and by columns in one pass. The input gradient uses the
    transpose of the same FP8 weight.
    """
    check_block_scales("weight_scale_inv", FP8Tensor(weight, weight_scale_inv))
    return _op(x, weight, weight_scale_inv, bias, master)[0]


def check(x: Tensor, weight: Tensor, weight_scale_inv: Tensor, bias: Tensor | None) -> None:
    """Check dtypes, shapes and devices of an FP8 linear layer's input and parameters."""
    check_dtype("x", x, *FLOATING)
    n, k = fp8_data("weight", weight, "(N, K)")
    if x.dim() == 0 or x.shape[-1] != k:
        raise ValueError(f"x: expected shape (..., {k}) to match the weight {(n, k)}, got {tuple(x.shape)}")
    check_device("weight", weight, x.device, "x")
    check_weight_scale("weight_scale_inv", FP8Tensor(weight, weight_scale_inv), x.device)
    if bias is not None:
        check_like("bias", bias, FLOATING, (n,), x.device, "x")


def _check(x: Tensor, weight: Tensor, weight_scale_inv: Tensor, bias: Tensor | None, master: Tensor | None) -> None:
    check(x, weight, weight_scale_inv, bias)
    if master is not None and master.shape != weight.shape:
        raise ValueError(f"master: expected shape {tuple(weight.shape)} like the weight, got {tuple(master.shape)}")


def _forward(
    x: Tensor, weight: Tensor, weight_scale_inv: Tensor, bias: Tensor | None, master: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the result, and the quantized transpose of x (data and scale), which is empty without a master."""
    if master is None:
        out = torch.ops.fp8moe.linear.default(x, weight, weight_scale_inv, bias)
        return out, x.new_empty(0), x.new_empty(0)
    _check(x, weight, weight_scale_inv, bias, master)
    n, k = weight.shape
    rows, columns, _ = quantize_with_transpose(_matrix(x), blocks=True)
    bias = bias if bias is None else _padded_columns(bias, n)
    return _product(rows, _padded(weight, weight_scale_inv), bias, (*x.shape[:-1], n), x.dtype), *columns


def _forward_fake(
    x: Tensor, weight: Tensor, weight_scale_inv: Tensor, bias: Tensor | None, master: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    _check(x, weight, weight_scale_inv, bias, master)
    lead = x.shape[:-1]
    n, k = weight.shape
    out = x.new_empty((*lead, n))
    if master is None:
        return out, x.new_empty(0), x.new_empty(0)
    return out, *empty_quantized(x, align(k, _MULTIPLE), align(math.prod(lead), BLOCK), blocks=True)


class _Backward(NamedTuple):
    """Operands of the backward. columns: the quantized transpose of x, empty without a master.

    input_grad, bias_grad: whether x and the bias need gradients.
    """

    grad: Tensor
    weight: Tensor
    weight_scale_inv: Tensor
    columns: FP8Tensor
    master: Tensor | None
    input_grad: bool
    bias_grad: bool


def _backward(operands: _Backward) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, master and bias (in float32); gradients that are not needed are empty."""
    grad, weight, weight_scale_inv, columns, master, input_grad, bias_grad = operands
    d_x, d_weight, d_bias = (grad.new_empty(0) for _ in range(3))
    n, k = weight.shape
    if bias_grad:
        d_bias = grad.reshape(math.prod(grad.shape[:-1]), n).sum(0, dtype=torch.float32)
    if master is not None:
        rows, grad_columns, offsets = quantize_with_transpose(_matrix(grad))
        d_weight = weight_gradient(grad_columns, columns, offsets, master)
        del grad_columns
    elif input_grad:
        rows = quantize_1x128(_matrix(grad))
    if input_grad:
        transposed = transposed_weight(_padded(weight, weight_scale_inv))
        d_x = _product(rows, transposed, None, (*grad.shape[:-1], k), grad.dtype)
    return d_x, d_weight, d_bias


def _backward_fake(operands: _Backward) -> tuple[Tensor, Tensor, Tensor]:
    grad, weight, master = operands.grad, operands.weight, operands.master
    n, k = weight.shape
    return (
        grad.new_empty((*grad.shape[:-1], k) if operands.input_grad else 0),
        master.new_empty((n, k)) if master is not None else grad.new_empty(0),
        grad.new_empty(n, dtype=torch.float32) if operands.bias_grad else grad.new_empty(0),
    )


def _matrix(x: Tensor) -> Tensor:
    """Return x (..., F) as a matrix (rows, F), F padded with zeros to a multiple of 16."""
    features = x.shape[-1]
    return _padded_columns(x.reshape(math.prod(x.shape[:-1]), features), features)


def _padded_columns(x: Tensor, features: int) -> Tensor:
    pad = -features % _MULTIPLE
    return F.pad(x, (0, pad)) if pad else x


def _padded(weight: Tensor, scale: Tensor) -> FP8Tensor:
    """Pad N and K of a weight with zeros to multiples of 16. Padding adds no quantization blocks: scales stay equal."""
    pad_n, pad_k = (-size % _MULTIPLE for size in weight.shape)
    if pad_n or pad_k:
        weight = F.pad(weight.view(torch.uint8), (0, pad_k, 0, pad_n)).view(weight.dtype)
    return FP8Tensor(weight, scale)


def _product(a: FP8Tensor, b: FP8Tensor, bias: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return ``a @ b.T + bias`` with padding columns dropped, in ``shape``, rounded once to ``dtype``."""
    out = torch.empty(shape, dtype=dtype, device=a.data.device)
    rows = out.view(a.data.shape[0], shape[-1])  # `out` must not be a view itself, because FSDP2 changes it in place
    if dtype is not torch.float16 and b.data.shape[0] == shape[-1]:
        gemm(a, b, bias=bias, out=rows)
    else:
        out_dtype = torch.bfloat16 if dtype is torch.bfloat16 else torch.float32
        rows.copy_(gemm(a, b, bias=bias, out_dtype=out_dtype)[:, : shape[-1]])
    return out


def _setup_context(ctx, inputs, output) -> None:
    _, weight, scale, _, master = inputs
    _, *columns = output
    ctx.mark_non_differentiable(*columns)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*backward_operand(FP8Tensor(weight, scale)), *columns)
    ctx.masters = KeptMasters(_NAME, {"weight": master})


def _run_backward(ctx, grad, *_):
    if grad is None:
        return (None,) * 5
    (master,) = ctx.masters.unchanged()
    input_grad, _, _, bias_grad, _ = ctx.needs_input_grad
    if hasattr(master, "grad_sum"):  # which an operator with an autograd formula may not write to
        if torch.is_grad_enabled():
            _no_double_backward(ctx)
        weight, scale, *columns = ctx.saved_tensors
        operands = _Backward(grad, weight, scale, FP8Tensor(*columns), master, input_grad, bias_grad)
        d_x, d_weight, d_bias = _backward(operands)
    else:
        d_x, d_weight, d_bias = _backward_op(grad, *ctx.saved_tensors, master, input_grad, bias_grad)
    input_grads = d_x if input_grad else None, None, None
    return *input_grads, d_bias if bias_grad else None, None if master is None else d_weight


def _no_double_backward(ctx, *grads):
    raise RuntimeError(f"{_NAME}: there is no double backward; differentiate its gradients no further")


_op = define(
    "linear_training -> (Tensor, Tensor, Tensor)",
    _forward,
    _forward_fake,
    backward=_run_backward,
    setup_context=_setup_context,
)
_backward_op = define(
    "linear_training_backward -> (Tensor, Tensor, Tensor)", _backward, _backward_fake, backward=_no_double_backward
)
