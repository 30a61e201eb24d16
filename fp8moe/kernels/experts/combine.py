"""Weighted sum of each token's rows: ``combine``, and the operator ``fp8moe::combine`` behind it."""

import torch
from torch import Tensor

from fp8moe.kernels.experts import checks, combine_plan, reference
from fp8moe.runtime import autograd
from fp8moe.runtime.backend import use_cuda
from fp8moe.runtime.checks import check_tensor
from fp8moe.runtime.operator import define


def combine(
    y: Tensor, rows: Tensor, weights: Tensor, out_dtype: torch.dtype, *, residual: Tensor | None = None
) -> Tensor:
    """``out[t] = sum over k of weights[t, k] * y[rows[t, k]]`` in float32, k ascending, rounded once to the result.

    y: (num_rows, H) bfloat16 or float32, any strides; H a multiple of 8, num_rows < 2**31.
    rows: (T, K) int32, as `sort_by_expert` returns them. An assignment whose row is outside [0, num_rows) adds nothing
        and is not read, nor is any row that none maps to: a NaN there stays there.
    weights: (T, K) bfloat16, float16 or float32.
    out_dtype: bfloat16, float16 or float32.
    residual: (T, H) of out_dtype, to which the rounded sum is added, or None.
    Returns (T, H). Equal inputs give equal bits. There is no backward: calling it raises RuntimeError.

    Raises TypeError for a wrong type or dtype, ValueError for a wrong rank, size or device.
    """
    for name, value in (("y", y), ("rows", rows), ("weights", weights)):
        check_tensor(name, value)
    if residual is not None:
        check_tensor("residual", residual)
    return autograd.run(_combine_op, "fp8moe.kernels.experts.combine", y, rows, weights, out_dtype, residual)


def _combine(
    y: Tensor, rows: Tensor, weights: Tensor, out_dtype: torch.dtype, residual: Tensor | None = None
) -> Tensor:
    checks.combine(y, rows, weights, out_dtype, residual)
    backend = combine_plan if use_cuda(y) else reference
    return backend.combine(y, rows, weights, out_dtype, residual)


def _combine_fake(
    y: Tensor, rows: Tensor, weights: Tensor, out_dtype: torch.dtype, residual: Tensor | None = None
) -> Tensor:
    checks.combine(y, rows, weights, out_dtype, residual)
    return y.new_empty((rows.shape[0], y.shape[1]), dtype=out_dtype)


_combine_op = define(
    "combine(Tensor y, Tensor rows, Tensor weights, ScalarType out_dtype, Tensor? residual=None) -> Tensor",
    _combine,
    _combine_fake,
    forward_only=True,
)
