"""Dense FP8 GEMM: ``gemm`` and the operators ``fp8moe::gemm`` and ``fp8moe::gemm_out`` behind it."""

import torch
from torch import Tensor

from fp8moe.kernels.gemm import checks, dense_plan
from fp8moe.kernels.gemm.dense_plan import Operands
from fp8moe.kernels.gemm.reference import gemm_reference
from fp8moe.quant.checks import fp8_operand, mn_major
from fp8moe.quant.formats import FP8Tensor
from fp8moe.runtime import autograd
from fp8moe.runtime.backend import use_cuda
from fp8moe.runtime.checks import check_like, check_own_memory, check_tensor, overlap, row_major
from fp8moe.runtime.operator import define


def gemm(
    a: FP8Tensor | tuple[Tensor, Tensor],
    b: FP8Tensor | tuple[Tensor, Tensor],
    *,
    bias: Tensor | None = None,
    c: Tensor | None = None,
    out: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """``dequantize(a) @ dequantize(b).T + bias + c`` with float32 accumulation of every 128 products along K.

    a: activations, FP8Tensor or (data, scale): data (M, K) float8_e4m3fn, scale (M, ceil(K/128)) float32, MN-major as
        `quantize_1x128` writes it. M may be 0, K a multiple of 16.
    b: weights, FP8Tensor or (data, scale): data (N, K) float8_e4m3fn, scale (ceil(N/128), ceil(K/128)) float32,
        contiguous. N a multiple of 8.
    bias: (N,) bfloat16, float16 or float32, added in float32 before the result is rounded.
    c: (M, N) of the result's dtype, added likewise. It is ``out`` itself, or shares no memory with it.
    out: (M, N) bfloat16 or float32, row-major with rows at multiples of 16 bytes, in memory that no operand but c uses.
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
    for name, value in (("bias", bias), ("c", c), ("out", out)):
        if value is not None:
            check_tensor(name, value)
    checks.out_dtype(out_dtype, out)
    operands = (a_data, a_scale, b_data, b_scale, bias, c)
    if out is None:
        return autograd.run(_gemm_op, "fp8moe.gemm", *operands, out_dtype is torch.float32)
    autograd.check_out("fp8moe.gemm", (*_NAMES, "c", "out"), (*operands, out))
    _gemm_out_op(*operands, out)
    return out


def compute(operands: Operands, out: Tensor, *, pdl: bool = False) -> None:
    """Write the product of checked operands to ``out`` on the backend that takes them.

    pdl: start before the kernel ahead has ended; then it must not write b or bias.
    """
    a, a_scale, b, b_scale, bias, c = operands
    if out.numel() == 0:
        return
    if use_cuda(a) and a.shape[1]:
        c = c if c is None else row_major(c)
        a, a_scale, b, b_scale = row_major(a), mn_major(a_scale), row_major(b), b_scale.contiguous()
        dense_plan.gemm(Operands(a, a_scale, b, b_scale, checks.bias_vector(bias), c), out, pdl=pdl)
        return
    dtype = out.dtype if c is None else torch.float32
    sums = gemm_reference(FP8Tensor(a, a_scale), FP8Tensor(b, b_scale), bias, dtype)
    out.copy_(sums if c is None else sums + c)


def _check(operands: Operands, out_dtype: torch.dtype) -> tuple[int, int]:
    """Dtypes, shapes and devices of the operands. Returns M and N."""
    a, a_scale, b, b_scale, bias, c = operands
    shape = checks.dense(a, a_scale, b, b_scale, bias)
    if c is not None:
        check_like("c", c, (out_dtype,), shape, a.device, "a.data")
    return shape


def _gemm(*arguments: Tensor | bool | None) -> Tensor:
    operands, out_dtype = Operands(*arguments[:-1]), torch.float32 if arguments[-1] else torch.bfloat16
    plan = dense_plan.find(operands, out_dtype)
    if plan is not None:
        out = plan.new_out()
        dense_plan.run(plan, operands, out)
        return out
    out = torch.empty(_check(operands, out_dtype), dtype=out_dtype, device=operands.a.device)
    compute(operands, out)
    return out


def _gemm_fake(*arguments: Tensor | bool | None) -> Tensor:
    operands, out_dtype = Operands(*arguments[:-1]), torch.float32 if arguments[-1] else torch.bfloat16
    return operands.a.new_empty(_check(operands, out_dtype), dtype=out_dtype)


def _gemm_out(*arguments: Tensor | None) -> None:
    *values, out = arguments
    operands = Operands(*values)
    plan = dense_plan.find(operands, out.dtype)
    checks.result(out, _check(operands, out.dtype) if plan is None else plan.shape, operands.a.device)
    c = operands.c
    check_own_memory(out, dict(zip(_NAMES, values, strict=False)))
    if c is not None and (c.data_ptr(), c.stride()) != (out.data_ptr(), out.stride()) and overlap(c, out):
        raise ValueError("c: expected out itself or memory of its own, got a tensor that overlaps a part of out")
    if plan is None:
        compute(operands, out)
    else:
        dense_plan.run(plan, operands, out)


def _gemm_out_fake(*arguments: Tensor | None) -> None:
    *values, out = arguments
    checks.result(out, _check(Operands(*values), out.dtype), values[0].device)


_NAMES = ("a.data", "a.scale", "b.data", "b.scale", "bias")
_OPERANDS = "Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, Tensor? bias, Tensor? c"
# The result's dtype is a bool because PyTorch takes a microsecond to convert a ScalarType.
_gemm_op = define(f"gemm({_OPERANDS}, bool float32) -> Tensor", _gemm, _gemm_fake, forward_only=True)
_gemm_out_op = define(f"gemm_out({_OPERANDS}, Tensor(a!) out) -> ()", _gemm_out, _gemm_out_fake, forward_only=True)
