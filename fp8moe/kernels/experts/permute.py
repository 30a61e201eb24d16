"""Tokens to the rows of their experts: ``permute_quantize`` and the operator ``fp8moe::permute_quantize`` behind it."""

import torch
from torch import Tensor

from fp8moe.kernels.experts import checks, permute_plan, reference
from fp8moe.quant.formats import BLOCK, FP8Tensor, align, ceil_div
from fp8moe.runtime.autograd import detached
from fp8moe.runtime.backend import use_cuda
from fp8moe.runtime.checks import check_tensor
from fp8moe.runtime.operators import define


def permute_quantize(x: Tensor, rows: Tensor, num_rows: int) -> FP8Tensor:
    """Quantize each token once, in blocks of 1x128, and write it to every row that it has.

    x: (T, H) bfloat16, float16 or float32, any strides; H a multiple of 16.
    rows: (T, K) int32, as `sort_by_expert` returns them: the rows of each token. Values outside [0, num_rows) are none.
    num_rows: rows of the result, < 2**31.
    Returns data (num_rows, H) contiguous and scale (num_rows, ceil(H/128)) MN-major, each row with the bits that
    `quantize_1x128` gives its token. Rows that nothing maps to are uninitialized, as is a row to which several tokens
    map. The result is detached from the autograd graph of x.

    Raises TypeError for a wrong type or dtype, ValueError for a wrong rank, size or device.
    """
    check_tensor("x", x)
    check_tensor("rows", rows)
    return FP8Tensor(*torch.ops.fp8moe.permute_quantize(detached(x), rows, num_rows))


def _permute_quantize(x: Tensor, rows: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    checks.permute(x, rows, num_rows)
    backend = permute_plan if use_cuda(x) else reference
    return backend.permute_quantize(x, rows, num_rows)


def _permute_quantize_fake(x: Tensor, rows: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    checks.permute(x, rows, num_rows)
    return empty_rows(x, num_rows)


def empty_rows(x: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Uninitialized data (num_rows, H) and MN-major scale for rows of x (T, H), on its device."""
    hidden = x.shape[1]
    scale = x.new_empty_strided((num_rows, ceil_div(hidden, BLOCK)), (1, align(num_rows, 4)), dtype=torch.float32)
    return x.new_empty((num_rows, hidden), dtype=torch.float8_e4m3fn), scale


define(
    "permute_quantize(Tensor x, Tensor rows, SymInt num_rows) -> (Tensor, Tensor)",
    _permute_quantize,
    _permute_quantize_fake,
)
