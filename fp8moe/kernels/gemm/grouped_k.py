"""Weight gradients of grouped linear layers, one GEMM along the rows of each group: ``grouped_gemm_k``."""

import torch
from torch import Tensor

from fp8moe.kernels.gemm import checks, grouped_k_plan
from fp8moe.kernels.gemm.reference import grouped_gemm_k_reference
from fp8moe.quant.checks import fp8_operand, mn_major
from fp8moe.quant.formats import FP8Tensor
from fp8moe.runtime import autograd
from fp8moe.runtime.backend import use_cuda
from fp8moe.runtime.checks import check_like, check_own_memory, check_tensor, row_major
from fp8moe.runtime.operator import define


def grouped_gemm_k(
    a: FP8Tensor | tuple[Tensor, Tensor],
    b: FP8Tensor | tuple[Tensor, Tensor],
    group_offsets: Tensor,
    *,
    out: Tensor | None = None,
    accumulate: bool = False,
) -> Tensor:
    """``dequantize(a)[:, columns of e] @ dequantize(b)[:, columns of e].T`` for every group e of columns.

    For a weight gradient a is the gradient of the layer's output and b the layer's input, both transposed: their
    columns are tokens.

    a: FP8Tensor or (data, scale): data (M, K) float8_e4m3fn, scale (M, K/128) float32, MN-major as `quantize_128x1`
        writes it. K a multiple of 128: the columns of all groups.
    b: FP8Tensor or (data, scale): data (N, K), scale (N, K/128), as for a. N a multiple of 8.
    group_offsets: (E+1,) int32, on the device of the operands: group e has columns ``group_offsets[e]`` up to
        ``group_offsets[e+1]``. Both are multiples of 128: pad each group with zeros. They are clamped to [0, K].
    out: (E, M, N) float32, or bfloat16, to which the sums are then rounded; contiguous, in memory that no operand uses.
    accumulate: add to what ``out`` holds, which is float32; a group without columns then leaves its part of it alone.
    Returns ``out``, or a new (E, M, N) float32 tensor. Groups without columns give zeros. Equal inputs give equal bits.

    On the CUDA backend the host neither knows nor waits for the group sizes, so that a call can be captured in a CUDA
    graph. A group that does not begin and end at multiples of 128 gives NaN there, and ValueError on the reference
    backend. Operands in another layout are copied first. There is no backward: calling it raises RuntimeError.
    Method: DeepSeek-V3, arXiv:2412.19437, section 3.3.2; both operands have a scale for each row and 128 columns.

    Raises TypeError for a wrong type or dtype, ValueError for a wrong rank, size, device, scale shape, ``accumulate``
    without ``out``, or an ``out`` that does not fit or overlaps an operand.
    """
    operands = (*fp8_operand("a", a), *fp8_operand("b", b))
    check_tensor("group_offsets", group_offsets)
    if out is None:
        if accumulate:
            raise ValueError("accumulate: expected out, the sums to add to, got None")
        return autograd.run(_op, "fp8moe.grouped_gemm_k", *operands, group_offsets)
    check_tensor("out", out)
    autograd.check_out("fp8moe.grouped_gemm_k", (*_NAMES, "out"), (*operands, group_offsets, out))
    _out_op(*operands, group_offsets, out, accumulate)
    return out


def weight_gradients(a: FP8Tensor, b: FP8Tensor, group_offsets: Tensor, dtype: torch.dtype) -> Tensor:
    """`grouped_gemm_k` in another dtype: (E, M, N), rounded once from float32."""
    shape = (group_offsets.shape[0] - 1, a.data.shape[0], b.data.shape[0])
    direct = dtype in (torch.float32, torch.bfloat16)
    out = torch.empty(shape, dtype=dtype if direct else torch.float32, device=a.data.device)
    return grouped_gemm_k(a, b, group_offsets, out=out).to(dtype)


def _compute(operands: tuple[Tensor, ...], out: Tensor, accumulate: bool) -> None:
    a, a_scale, b, b_scale, group_offsets = operands
    if out.numel() == 0:
        return
    if not use_cuda(a):
        grouped_gemm_k_reference(FP8Tensor(a, a_scale), FP8Tensor(b, b_scale), group_offsets, out, accumulate)
    elif a.shape[1] == 0:
        if not accumulate:
            out.zero_()
    else:
        a, b = FP8Tensor(row_major(a), mn_major(a_scale)), FP8Tensor(row_major(b), mn_major(b_scale))
        grouped_k_plan.grouped_gemm_k(a, b, group_offsets.contiguous(), out, accumulate)


def _grouped_gemm_k(*operands: Tensor) -> Tensor:
    out = _fake(*operands)
    _compute(operands, out, False)
    return out


def _fake(*operands: Tensor) -> Tensor:
    return torch.empty(checks.along_k(*operands), dtype=torch.float32, device=operands[0].device)


def _grouped_gemm_k_out(*arguments: Tensor | bool) -> None:
    *operands, out, accumulate = arguments
    _out_fake(*arguments)
    check_own_memory(out, dict(zip(_NAMES, operands, strict=True)))
    _compute(operands, out, accumulate)


def _out_fake(*arguments: Tensor | bool) -> None:
    *operands, out, accumulate = arguments
    dtypes = (torch.float32,) if accumulate else (torch.float32, torch.bfloat16)
    check_like("out", out, dtypes, checks.along_k(*operands), operands[0].device, "a.data")
    if not out.is_contiguous():
        raise ValueError(f"out: expected a contiguous tensor, got strides {out.stride()}")


_NAMES = ("a.data", "a.scale", "b.data", "b.scale", "group_offsets")
_OPERANDS = "Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, Tensor group_offsets"
_op = define(f"grouped_gemm_k({_OPERANDS}) -> Tensor", _grouped_gemm_k, _fake, forward_only=True)
_out_op = define(
    f"grouped_gemm_k_out({_OPERANDS}, Tensor(a!) out, bool accumulate) -> ()",
    _grouped_gemm_k_out,
    _out_fake,
    forward_only=True,
)
