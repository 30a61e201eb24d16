"""Quantize activations and output gradients both ways in one pass: row by row, and transposed for weight gradients.

A weight gradient ``dY.T @ X`` sums over tokens, so its operands need blocks of 128 tokens along K, beside the blocks of
128 features that forward and input gradient need: DeepSeek-V3, arXiv:2412.19437, section 3.3.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fp8moe.quant import transpose_reference
from fp8moe.quant.formats import BLOCK, FP8Tensor, align, ceil_div
from fp8moe.quant.quantize import INPUT_DTYPES
from fp8moe.quant.transpose_reference import Results, padded_rows
from fp8moe.runtime.backend import use_cuda
from fp8moe.runtime.checks import check_tensor
from fp8moe.runtime.operators import define


class Transposed(NamedTuple):
    """A matrix (R, F) of E groups of rows, quantized along its rows and along its columns.

    rows: data (R, F), scale (R, ceil(F/128)) MN-major: what `quantize_1x128` returns.
    columns: the transpose with every group padded with zeros to a multiple of 128 rows: data (F, P), scale (F, P/128)
        MN-major, P = `padded_rows` (R, E). Columns past ``offsets[E]`` are uninitialized.
    offsets: (E+1,) int32: group e has the columns ``offsets[e]`` up to ``offsets[e+1]`` of `columns`.
    """

    rows: FP8Tensor
    columns: FP8Tensor
    offsets: Tensor


def quantize_with_transpose(
    x: Tensor,
    group_offsets: Tensor | None = None,
    *,
    tokens: Tensor | None = None,
    row_weights: Tensor | None = None,
) -> Transposed:
    """Quantize the rows of x in blocks of 1x128, and its transpose too, reading x once.

    x: (M, F) bfloat16, float16 or float32, any strides.
    group_offsets: (E+1,) int32: group e has the rows ``group_offsets[e]`` up to ``group_offsets[e+1]``, any number of
        them. Both ends are clamped to [0, R], and a group whose end comes before its start is empty. None: one group
        of all rows.
    tokens: (R,) int32: row r is ``x[tokens[r]]``, or zeros where that is outside [0, M). None: R = M, row r is x[r].
    row_weights: (R,) float32: multiply the rows in float32 for `columns`, not for `rows`.
    Returns `Transposed`. Rows of no group are uninitialized. A NaN or infinity stays visible in its block of the row
    and in its block of the column, and reaches no other. Equal inputs give equal bits. The results are detached from
    the autograd graph.

    On the CUDA backend the host neither knows nor waits for the group sizes, so that a call can be captured in a CUDA
    graph.

    Raises TypeError for a wrong type or dtype, ValueError for a wrong rank, size or device.
    """
    check_tensor("x", x)
    for name, value in (("group_offsets", group_offsets), ("tokens", tokens), ("row_weights", row_weights)):
        if value is not None:
            check_tensor(name, value)
    x, row_weights = (
        value.detach() if value is not None and value.requires_grad else value for value in (x, row_weights)
    )
    return transposed(torch.ops.fp8moe.quantize_with_transpose(x, group_offsets, tokens, row_weights))


def transposed(results: Results) -> Transposed:
    """The tensors that an operator returns, by name."""
    rows, row_scale, columns, column_scale, offsets = results
    return Transposed(FP8Tensor(rows, row_scale), FP8Tensor(columns, column_scale), offsets)


def empty_results(like: Tensor, rows: int, features: int, groups: int) -> Results:
    """Uninitialized results for `rows` rows of `features` in `groups` groups, on the device of `like`."""
    columns = padded_rows(rows, groups)
    float8, float32 = torch.float8_e4m3fn, torch.float32
    return (
        like.new_empty((rows, features), dtype=float8),
        like.new_empty_strided((rows, ceil_div(features, BLOCK)), (1, align(rows, 4)), dtype=float32),
        like.new_empty((features, columns), dtype=float8),
        like.new_empty_strided((features, columns // BLOCK), (1, align(features, 4)), dtype=float32),
        like.new_empty((groups + 1,), dtype=torch.int32),
    )


def check_vector(name: str, value: Tensor, dtype: torch.dtype, length: int | None, device: torch.device) -> None:
    """Dtype, shape and device of a vector; length: None for any."""
    if value.dtype is not dtype:
        raise TypeError(f"{name}: expected {str(dtype).removeprefix('torch.')}, got {value.dtype}")
    if value.dim() != 1 or (length is not None and value.shape[0] != length):
        raise ValueError(f"{name}: expected shape ({'R' if length is None else length},), got {tuple(value.shape)}")
    if value.device != device:
        raise ValueError(f"{name}: expected on {device} like the rows, got {value.device}")


def check_groups(group_offsets: Tensor, rows: int, device: torch.device) -> int:
    """Dtype, shape and device of `group_offsets`, and that offsets of padded groups fit int32. Returns E."""
    check_vector("group_offsets", group_offsets, torch.int32, None, device)
    if group_offsets.shape[0] < 2:
        raise ValueError(f"group_offsets: expected shape (E + 1,) with E >= 1, got {tuple(group_offsets.shape)}")
    groups = group_offsets.shape[0] - 1
    check_size(rows, groups)
    return groups


def check_size(rows: int, groups: int) -> None:
    if padded_rows(rows, groups) >= 1 << 31:
        raise ValueError(f"expected fewer than 2**31 rows with every group padded to a multiple of 128, got {rows}")


def check(
    x: Tensor, group_offsets: Tensor | None, tokens: Tensor | None, row_weights: Tensor | None
) -> tuple[int, int]:
    """Dtypes, sizes and devices of the arguments of `quantize_with_transpose`. Returns R and E."""
    if x.dtype not in INPUT_DTYPES:
        raise TypeError(f"x: expected bfloat16, float16 or float32, got {x.dtype}")
    if x.dim() != 2:
        raise ValueError(f"x: expected shape (M, F), got {tuple(x.shape)}")
    rows = x.shape[0]
    if tokens is not None:
        check_vector("tokens", tokens, torch.int32, None, x.device)
        rows = tokens.shape[0]
    if row_weights is not None:
        check_vector("row_weights", row_weights, torch.float32, rows, x.device)
    if group_offsets is not None:
        return rows, check_groups(group_offsets, rows, x.device)
    check_size(rows, 1)
    return rows, 1


def _quantize_with_transpose(
    x: Tensor, group_offsets: Tensor | None, tokens: Tensor | None, row_weights: Tensor | None
) -> Results:
    rows, groups = check(x, group_offsets, tokens, row_weights)
    if not use_cuda(x):
        return transpose_reference.quantize_with_transpose(x, group_offsets, tokens, row_weights)
    from fp8moe.quant import transpose_plan as transpose_cuda

    results = empty_results(x, rows, x.shape[1], groups)
    transpose_cuda.quantize_with_transpose(x, group_offsets, tokens, row_weights, results)
    return results


def _quantize_with_transpose_fake(
    x: Tensor, group_offsets: Tensor | None, tokens: Tensor | None, row_weights: Tensor | None
) -> Results:
    rows, groups = check(x, group_offsets, tokens, row_weights)
    return empty_results(x, rows, x.shape[1], groups)


define(
    "quantize_with_transpose(Tensor x, Tensor? group_offsets, Tensor? tokens, Tensor? row_weights) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _quantize_with_transpose,
    _quantize_with_transpose_fake,
)
