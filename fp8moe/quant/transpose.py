"""Quantize activations and output gradients both ways in one pass: row by row, and transposed for weight gradients.

A weight gradient ``dY.T @ X`` sums over tokens, so its operands need blocks of 128 tokens along K, beside the blocks of
128 features that forward and input gradient need: DeepSeek-V3, arXiv:2412.19437, section 3.3.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fp8moe.quant import transpose_plan, transpose_reference
from fp8moe.quant.checks import check_rows
from fp8moe.quant.formats import BLOCK, FP8Tensor, align, ceil_div, padded_rows
from fp8moe.quant.transpose_reference import Results
from fp8moe.runtime.autograd import detached
from fp8moe.runtime.backend import use_cuda
from fp8moe.runtime.checks import check_tensor
from fp8moe.runtime.operator import define


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
    x: Tensor, group_offsets: Tensor | None = None, *, tokens: Tensor | None = None, row_weights: Tensor | None = None
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
    row_weights = row_weights if row_weights is None else detached(row_weights)
    return transposed(torch.ops.fp8moe.quantize_with_transpose(detached(x), group_offsets, tokens, row_weights))


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


def _quantize_with_transpose(
    x: Tensor, group_offsets: Tensor | None, tokens: Tensor | None, row_weights: Tensor | None
) -> Results:
    rows, groups = check_rows(x, group_offsets, tokens, row_weights)
    if not use_cuda(x):
        return transpose_reference.quantize_with_transpose(x, group_offsets, tokens, row_weights)
    results = empty_results(x, rows, x.shape[1], groups)
    transpose_plan.quantize_with_transpose(x, group_offsets, tokens, row_weights, results)
    return results


def _quantize_with_transpose_fake(
    x: Tensor, group_offsets: Tensor | None, tokens: Tensor | None, row_weights: Tensor | None
) -> Results:
    rows, groups = check_rows(x, group_offsets, tokens, row_weights)
    return empty_results(x, rows, x.shape[1], groups)


define(
    "quantize_with_transpose(Tensor x, Tensor? group_offsets, Tensor? tokens, Tensor? row_weights) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _quantize_with_transpose,
    _quantize_with_transpose_fake,
)
