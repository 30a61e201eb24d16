"""Dense FP8 GEMM: ``gemm`` and the operators ``fp8moe::gemm`` and ``fp8moe::gemm_out`` behind it."""

import torch
from torch import Tensor

from fp8moe.kernels.gemm import checks, dense_plan
from fp8moe.kernels.gemm.reference import gemm_reference
from fp8moe.quant.checks import fp8_operand, mn_major
from fp8moe.quant.formats import FP8Tensor
from fp8moe.runtime import autograd
from fp8moe.runtime.backend import use_cuda
from fp8moe.runtime.checks import check_own_memory, check_tensor, row_major
from fp8moe.runtime.operators import define


def gemm(
    a: FP8Tensor,
    b: FP8Tensor,
    *,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """``dequantize(a) @ dequantize(b).T + bias`` with float32 accumulation of every 128 products along K.

    a: activations, FP8Tensor or (data, scale): data (M, K) float8_e4m3fn, scale (M, ceil(K/128)) float32, MN-major as
        `quantize_1x128` writes it. M may be 0, K a multiple of 16.
    b: weights, FP8Tensor or (data, scale): data (N, K) float8_e4m3fn, scale (ceil(N/128), ceil(K/128)) float32,
        contiguous. N a multiple of 8.
    bias: (N,) bfloat16, float16 or float32, added in float32 before the result is rounded.
    out: (M, N) bfloat16 or float32, row-major with rows at multiples of 16 bytes, in memory that no operand uses.
    out_dtype: bfloat16 or float32, the result's dtype where ``out`` is None. With ``out`` its dtype holds, and asking
        for float32 while ``out`` is bfloat16 is an error.
    Returns ``out``, or a new (M, N) tensor. Equal inputs give equal bits.

    Operands in another layout (transposed data, rows or base address not at multiples of 16 bytes, row-major activation
    scales) are copied first on the CUDA backend. There is no backward: calling it raises RuntimeError.
    Method: DeepSeek-V3, arXiv:2412.19437, section 3.3.2.

    Raises TypeError for a wrong type or dtype, ValueError for a wrong rank, size, device, scale shape, or an ``out``
    that does not fit or overlaps an operand.
    """
    a_data, a_scale = fp8_operand("a", a)
    b_data, b_scale = fp8_operand("b", b)
    if bias is not None:
        check_tensor("bias", bias)
    if out is not None:
        check_tensor("out", out)
    checks.out_dtype(out_dtype, out)
    if out is None:
        float32 = out_dtype is torch.float32
        return autograd.run(_gemm_op, "fp8moe.gemm", a_data, a_scale, b_data, b_scale, bias, float32)
    if torch.is_grad_enabled() and (out.requires_grad or (bias is not None and bias.requires_grad)):
        raise RuntimeError("fp8moe.gemm: out= has no automatic differentiation, but out or bias requires a gradient")
    _gemm_out_op(a_data, a_scale, b_data, b_scale, bias, out)
    return out


def compute(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Write the product of checked operands to ``out`` on the backend that takes them."""
    if out.numel() == 0:
        return
    if not use_cuda(a):
        out.copy_(gemm_reference(FP8Tensor(a, a_scale), FP8Tensor(b, b_scale), bias, out.dtype))
    elif a.shape[1] == 0:
        out.zero_() if bias is None else out.copy_(bias.expand_as(out))
    else:
        dense_plan.gemm(
            *(row_major(a), mn_major(a_scale)),
            *(row_major(b), b_scale.contiguous()),
            checks.bias_vector(bias),
            out,
        )


def _gemm(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, bias: Tensor | None, float32: bool) -> Tensor:
    out_dtype = torch.float32 if float32 else torch.bfloat16
    plan = dense_plan.find(a, a_scale, b, b_scale, bias, out_dtype)
    if plan is not None:
        out = plan.new_out()
        dense_plan.run(plan, a, a_scale, b, b_scale, bias, out)
        return out
    m, n, _ = checks.dense(a, a_scale, b, b_scale, bias)
    out = torch.empty((m, n), dtype=out_dtype, device=a.device)
    compute(a, a_scale, b, b_scale, bias, out)
    return out


def _gemm_fake(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, bias: Tensor | None, float32: bool) -> Tensor:
    m, n, _ = checks.dense(a, a_scale, b, b_scale, bias)
    return a.new_empty((m, n), dtype=torch.float32 if float32 else torch.bfloat16)


def _gemm_out(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, bias: Tensor | None, out: Tensor) -> None:
    plan = dense_plan.find(a, a_scale, b, b_scale, bias, out.dtype)
    shape = checks.dense(a, a_scale, b, b_scale, bias)[:2] if plan is None else plan.shape
    checks.dense_out(out, *shape, a.device)
    operands = {"a.data": a, "a.scale": a_scale, "b.data": b, "b.scale": b_scale, "bias": bias}
    check_own_memory(out, operands)
    if plan is None:
        compute(a, a_scale, b, b_scale, bias, out)
    else:
        dense_plan.run(plan, a, a_scale, b, b_scale, bias, out)


def _gemm_out_fake(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, bias: Tensor | None, out: Tensor) -> None:
    m, n, _ = checks.dense(a, a_scale, b, b_scale, bias)
    checks.dense_out(out, m, n, a.device)


_OPERANDS = "Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, Tensor? bias"
# The result's dtype is a bool because PyTorch takes a microsecond to convert a ScalarType.
_gemm_op = define(f"gemm({_OPERANDS}, bool float32) -> Tensor", _gemm, _gemm_fake, forward_only=True)
_gemm_out_op = define(f"gemm_out({_OPERANDS}, Tensor(a!) out) -> ()", _gemm_out, _gemm_out_fake, forward_only=True)
