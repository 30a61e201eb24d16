"""`grouped_gemm_k` of groups that lie one behind the other, each a matrix of its own: DeepGEMM's layout.

With the operator ``fp8moe::grouped_gemm_k_flat`` behind it.
"""

import torch
from torch import Tensor

from fp8moe.kernels.gemm import flat_k_plan
from fp8moe.kernels.gemm.grouped_k import grouped_gemm_k
from fp8moe.kernels.gemm.reference import join_groups
from fp8moe.quant.checks import check_scale, check_vector, fp8_data
from fp8moe.quant.formats import BLOCK, FP8Tensor
from fp8moe.runtime import autograd
from fp8moe.runtime.backend import use_cuda
from fp8moe.runtime.checks import aligned, check_like, check_own_memory
from fp8moe.runtime.operator import define


def grouped_gemm_k_flat(a: FP8Tensor, b: FP8Tensor, sizes: Tensor, out: Tensor, *, accumulate: bool = False) -> None:
    """``out[e] (+)= a_e @ b_e.T`` of dequantized operands, for every group e along K.

    a: data (M * K,) float8_e4m3fn: the matrices (M, sizes[e]) of all groups, row-major, one behind the other; scale
        (M, K/128) float32, a column for each 128 of all groups. b: likewise with N instead of M, a multiple of 8.
    sizes: (E,) int32, on the device of the operands, multiples of 128. Their sum is at most K.
    out: (E, M, N) float32, or bfloat16 unless accumulate; contiguous, in memory that no operand uses.
    accumulate: add to what ``out`` holds. Otherwise groups without columns give zeros.

    On the CUDA backend the host neither knows nor waits for the sizes. Both operands are copied to one matrix each.
    Groups that do not lie within K at multiples of 128 are uninitialized or NaN there, and ValueError on the reference
    backend.
    """
    operands = (*a, *b, sizes)
    autograd.check_out("fp8moe.grouped_gemm_k_flat", (*_NAMES, "out"), (*operands, out))
    _op(*operands, out, accumulate)


def _compute(*arguments: Tensor | bool) -> None:
    a, a_scale, b, b_scale, sizes, out, accumulate = arguments
    _fake(*arguments)
    check_own_memory(out, dict(zip(_NAMES, arguments[:5], strict=True)))
    shape = *out.shape[1:], a_scale.shape[1] * BLOCK
    if use_cuda(a):
        a, b, offsets = flat_k_plan.join_groups(aligned(a), aligned(b), sizes.contiguous(), *shape)
    else:
        a, b, offsets = join_groups(a.contiguous(), b.contiguous(), sizes, *shape)
    grouped_gemm_k(FP8Tensor(a, a_scale), FP8Tensor(b, b_scale), offsets, out=out, accumulate=accumulate)


def _fake(*arguments: Tensor | bool) -> None:
    a, a_scale, b, b_scale, sizes, out, accumulate = arguments
    check_vector("sizes", sizes, torch.int32, None, a.device)
    dtypes = (torch.float32,) if accumulate else (torch.float32, torch.bfloat16)
    if out.dim() != 3:
        raise ValueError(f"out: expected shape (E, M, N), got {tuple(out.shape)}")
    check_like("out", out, dtypes, (sizes.shape[0], *out.shape[1:]), a.device, "a.data")
    _, m, n = out.shape
    blocks = a_scale.shape[-1] if a_scale.dim() else 0
    for name, data, scale, rows in (("a", a, a_scale, m), ("b", b, b_scale, n)):
        (length,) = fp8_data(f"{name}.data", data, "(rows * K)")
        if length != rows * blocks * BLOCK:
            expected = f"({rows} * {blocks * BLOCK},) to match out {tuple(out.shape)} and the scales of a"
            raise ValueError(f"{name}.data: expected shape {expected}, got {tuple(data.shape)}")
        check_scale(f"{name}.scale", scale, (rows, blocks), a.device)


_NAMES = ("a.data", "a.scale", "b.data", "b.scale", "sizes")
_op = define(
    "grouped_gemm_k_flat(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, Tensor sizes, Tensor(a!) out, "
    "bool accumulate) -> ()",
    _compute,
    _fake,
    forward_only=True,
)
