"""Dense FP8 GEMM: ``gemm`` and the operators ``fp8moe::gemm`` and ``fp8moe::gemm_out`` behind it."""

import torch
from torch import Tensor

from fp8moe.kernels.gemm import checks, dense_plan
from fp8moe.kernels.gemm.reference import gemm_reference
from fp8moe.quant.checks import fp8_operand, mn_major
from fp8moe.quant.formats import FP8Tensor
from fp8moe.runtime import autograd
from fp8moe.runtime.backend import use_cuda
from fp8moe.runtime.checks import check_own_memory, check_tensor, overlap, row_major
from fp8moe.runtime.operators import define


def gemm(
    a: FP8Tensor,
    b: FP8Tensor,
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
    if torch.is_grad_enabled() and any(value is not None and value.requires_grad for value in (out, bias, c)):
        raise RuntimeError("fp8moe.gemm: out= has no automatic differentiation, but out, bias or c requires a gradient")
    _gemm_out_op(*operands, out)
    return out


def compute(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    out: Tensor,
    c: Tensor | None = None,
) -> None:
    """Write the product of checked operands to ``out`` on the backend that takes them."""
    if out.numel() == 0:
        return
    if not use_cuda(a):
        dtype = out.dtype if c is None else torch.float32
        sums = gemm_reference(FP8Tensor(a, a_scale), FP8Tensor(b, b_scale), bias, dtype)
        out.copy_(sums if c is None else sums + c)
    elif a.shape[1] == 0:
        sums = out.new_zeros((), dtype=torch.float32) if bias is None else bias.float()
        out.copy_((sums if c is None else sums + c).expand_as(out))
    else:
        dense_plan.gemm(
            *(row_major(a), mn_major(a_scale)),
            *(row_major(b), b_scale.contiguous()),
            *(checks.bias_vector(bias), c if c is None else row_major(c)),
            out,
        )


def _check(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    c: Tensor | None,
    out_dtype: torch.dtype,
) -> tuple[int, int]:
    """Dtypes, shapes and devices of the operands. Returns M and N."""
    m, n, _ = checks.dense(a, a_scale, b, b_scale, bias)
    if c is not None:
        if c.dtype is not out_dtype:
            raise TypeError(f"c: expected {out_dtype} like the result, got {c.dtype}")
        if c.shape != (m, n):
            raise ValueError(f"c: expected shape {(m, n)}, got {tuple(c.shape)}")
        if c.device != a.device:
            raise ValueError(f"c: expected on {a.device} like a.data, got {c.device}")
    return m, n


def _gemm(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    c: Tensor | None,
    float32: bool,
) -> Tensor:
    out_dtype = torch.float32 if float32 else torch.bfloat16
    operands = (a, a_scale, b, b_scale, bias, c)
    plan = dense_plan.find(*operands, out_dtype)
    if plan is not None:
        out = plan.new_out()
        dense_plan.run(plan, *operands, out)
        return out
    out = torch.empty(_check(*operands, out_dtype), dtype=out_dtype, device=a.device)
    compute(a, a_scale, b, b_scale, bias, out, c)
    return out


def _gemm_fake(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    c: Tensor | None,
    float32: bool,
) -> Tensor:
    out_dtype = torch.float32 if float32 else torch.bfloat16
    return a.new_empty(_check(a, a_scale, b, b_scale, bias, c, out_dtype), dtype=out_dtype)


def _gemm_out(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    c: Tensor | None,
    out: Tensor,
) -> None:
    operands = (a, a_scale, b, b_scale, bias, c)
    plan = dense_plan.find(*operands, out.dtype)
    shape = _check(*operands, out.dtype) if plan is None else plan.shape
    checks.dense_out(out, *shape, a.device)
    check_own_memory(out, {"a.data": a, "a.scale": a_scale, "b.data": b, "b.scale": b_scale, "bias": bias})
    if c is not None and (c.data_ptr(), c.stride()) != (out.data_ptr(), out.stride()) and overlap(c, out):
        raise ValueError("c: expected out itself or memory of its own, got a tensor that overlaps a part of out")
    if plan is None:
        compute(a, a_scale, b, b_scale, bias, out, c)
    else:
        dense_plan.run(plan, *operands, out)


def _gemm_out_fake(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    c: Tensor | None,
    out: Tensor,
) -> None:
    checks.dense_out(out, *_check(a, a_scale, b, b_scale, bias, c, out.dtype), a.device)


_OPERANDS = "Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, Tensor? bias, Tensor? c"
# The result's dtype is a bool because PyTorch takes a microsecond to convert a ScalarType.
_gemm_op = define(f"gemm({_OPERANDS}, bool float32) -> Tensor", _gemm, _gemm_fake, forward_only=True)
_gemm_out_op = define(f"gemm_out({_OPERANDS}, Tensor(a!) out) -> ()", _gemm_out, _gemm_out_fake, forward_only=True)
