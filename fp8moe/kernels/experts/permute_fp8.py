"""Quantized tokens to the rows of their experts: ``permute_fp8`` and the operator ``fp8moe::permute_fp8`` behind it."""

import torch
from torch import Tensor

from fp8moe.kernels.experts import checks, permute_fp8_plan, reference
from fp8moe.kernels.experts.permute import empty_rows
from fp8moe.quant.checks import fp8_operand
from fp8moe.quant.formats import FP8Tensor
from fp8moe.runtime.backend import use_cuda
from fp8moe.runtime.checks import check_tensor
from fp8moe.runtime.operators import define


def permute_fp8(x: FP8Tensor, rows: Tensor, num_rows: int) -> FP8Tensor:
    """Write each token, quantized in blocks of 1x128 already, to every row that it has.

    x: FP8Tensor or (data, scale): data (T, H) float8_e4m3fn, H a multiple of 16, scale (T, ceil(H/128)) float32, both
        of any strides.
    rows, num_rows: as for `permute_quantize`.
    Returns what `permute_quantize` returns for tokens that are quantized so: data (num_rows, H) contiguous and scale
    (num_rows, ceil(H/128)) MN-major. Rows that nothing maps to are uninitialized.

    Raises TypeError for a wrong type or dtype, ValueError for a wrong rank, size or device.
    """
    data, scale = fp8_operand("x", x)
    check_tensor("rows", rows)
    return FP8Tensor(*torch.ops.fp8moe.permute_fp8(data, scale, rows, num_rows))


def _permute_fp8(data: Tensor, scale: Tensor, rows: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    checks.permute_fp8(data, scale, rows, num_rows)
    backend = permute_fp8_plan if use_cuda(data) else reference
    return backend.permute_fp8(data, scale, rows, num_rows)


def _permute_fp8_fake(data: Tensor, scale: Tensor, rows: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    checks.permute_fp8(data, scale, rows, num_rows)
    return empty_rows(data, num_rows)


define(
    "permute_fp8(Tensor data, Tensor scale, Tensor rows, SymInt num_rows) -> (Tensor, Tensor)",
    _permute_fp8,
    _permute_fp8_fake,
)
