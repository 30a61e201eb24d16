"""Grouped GEMMs along K, for weight gradients."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from fp8moe.integrations.deep_gemm.operands import Recipe, by_rows, fp8, named, transposed, write_sum
from fp8moe.kernels.gemm import grouped_gemm_k
from fp8moe.kernels.gemm.layouts import grouped_gemm_k_flat
from fp8moe.quant.checks import check_vector
from fp8moe.quant.formats import BLOCK, FP8Tensor
from fp8moe.runtime.checks import check_tensor

Pair = tuple[Tensor, Tensor]


@named(out="d", sizes="ks_tensor")
def k_grouped_fp8_gemm_nt_contiguous(
    a: Pair,
    b: Pair,
    d: Tensor,
    ks: Sequence[int] | None,
    ks_tensor: Tensor,
    c: Tensor | None = None,
    recipe: Recipe = (1, 1, 128),
    compiled_dims: str = "mn",
) -> None:
    """``d[e] = c[e] + a_e @ b_e.T`` of dequantized operands for every group e along K; without c, the product alone.

    a: data (M * K,) float8_e4m3fn, the matrices (M, ks[e]) of all groups, row-major, one behind the other; scale
        (M, K/128) float32, or (K/128, M). b: likewise with N, a multiple of 8.
    d: (E, M, N) float32, or bfloat16 without c; contiguous. c: like d; d itself, or memory of its own.
    ks: the size of each group, multiples of 128, K together; checked where it is there, and read nowhere else.
    ks_tensor: the same, int32 (E,) on the device.

    Raises as `fp8_gemm_nt`; ValueError for other ks.
    """
    _check_groups(d, ks_tensor, recipe)
    _, m, n = d.shape
    a, b = _with_rows(fp8("a", a), m), _with_rows(fp8("b", b), n)
    _check_sizes(ks, len(ks_tensor), a.scale.shape[-1] * BLOCK)
    write_sum(lambda out, add: grouped_gemm_k_flat(a, b, ks_tensor, out, accumulate=add), c, d)


@named(out="d")
def k_grouped_fp8_gemm_tn_contiguous(
    a: Pair,
    b: Pair,
    d: Tensor,
    ks: Sequence[int] | None,
    ks_tensor: Tensor,
    c: Tensor | None = None,
    recipe: Recipe = (1, 1, 128),
    compiled_dims: str = "mn",
) -> None:
    """`k_grouped_fp8_gemm_nt_contiguous` of operands that are one matrix of all groups, from `per_channel_cast_to_fp8`.

    a: data (K, M), scale (K/128, M); b: data (K, N), scale (K/128, N). On Hopper the data is K-major: transposed views.
    """
    _check_groups(d, ks_tensor, recipe)
    a, b = fp8("a", transposed("a", a)), fp8("b", transposed("b", b))
    _check_sizes(ks, len(ks_tensor), a.data.shape[-1])
    offsets = pad(ks_tensor.cumsum(0, dtype=torch.int32), (1, 0))
    write_sum(lambda out, add: grouped_gemm_k(a, b, offsets, out=out, accumulate=add), c, d)


def _check_groups(d: Tensor, ks_tensor: Tensor, recipe: Recipe) -> None:
    if not by_rows(recipe):
        raise NotImplementedError(f"recipe: expected (1, 1, 128) of groups along K, got {recipe}")
    check_tensor("ks_tensor", ks_tensor)
    check_tensor("d", d)
    check_vector("ks_tensor", ks_tensor, torch.int32, None, d.device)
    if d.dim() != 3:
        raise ValueError(f"d: expected shape (E, M, N), got {tuple(d.shape)}")


def _with_rows(operand: FP8Tensor, rows: int) -> FP8Tensor:
    """The operand with its scale as (rows, K blocks)."""
    data, scale = operand
    turned = scale.dim() == 2 and scale.shape[1] == rows and (scale.shape[0] != rows or scale.stride(1) == 1)
    return FP8Tensor(data, scale.t() if turned else scale)


def _check_sizes(ks: Sequence[int] | None, groups: int, k: int) -> None:
    if ks is None:
        return
    if len(ks) != groups or sum(ks) != k or any(size < 0 or size % BLOCK for size in ks):
        expected = f"{groups} multiples of {BLOCK}, as many as ks_tensor has, and K = {k} together"
        raise ValueError(f"ks: expected {expected}, got {list(ks)}")
