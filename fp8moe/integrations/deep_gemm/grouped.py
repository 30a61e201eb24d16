"""Grouped GEMMs along M, a weight matrix for each group of rows: contiguous and masked layouts."""

from torch import Tensor

from fp8moe.integrations.deep_gemm.operands import Recipe, fp8, named, transposed, weights_by_blocks
from fp8moe.integrations.deep_gemm.settings import get_mk_alignment_for_contiguous_layout
from fp8moe.kernels.gemm import grouped_gemm_masked
from fp8moe.kernels.gemm.layouts import grouped_gemm_by_layout
from fp8moe.quant.formats import ceil_div
from fp8moe.runtime.checks import check_tensor

Pair = tuple[Tensor, Tensor]


@named(out="d", layout="grouped_layout", expected_m="expected_m_for_psum_layout")
def m_grouped_fp8_gemm_nt_contiguous(
    a: Pair,
    b: Pair,
    d: Tensor,
    grouped_layout: Tensor,
    recipe: Recipe | None = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
    use_psum_layout: bool = False,
    expected_m_for_psum_layout: int | None = None,
    recipe_a: Recipe | None = None,
    recipe_b: Recipe | None = None,
) -> None:
    """``d[i] = a[i] @ b[group of i].T`` of dequantized operands for every row i that has a group.

    a: data (M, K) float8_e4m3fn with scale (M, ceil(K/128)); b: data (E, N, K) with scale (E, ceil(N/128),
        ceil(K/128)); scales as for `fp8_gemm_nt`.
    d: (M, N) bfloat16 or float32. Rows of no group are undefined in it: those among a group's rows are written.
    grouped_layout: int32 on the device, read there only. (M,), the group of each row, -1 for none: a group's rows lie
        together, anywhere, and groups come in any order. With use_psum_layout (E,), where each group ends; it begins at
        the next multiple of `get_mk_alignment_for_contiguous_layout` behind the end before it.
    expected_m_for_psum_layout: about how many rows a group has; only the speed depends on it.

    Raises as `fp8_gemm_nt`.
    """
    weights_by_blocks(recipe, recipe_a, recipe_b)
    a, b = fp8("a", a), fp8("b", b)
    check_tensor("grouped_layout", grouped_layout)
    alignment = get_mk_alignment_for_contiguous_layout()
    expected_m = expected_m_for_psum_layout
    if expected_m is None:
        rows, groups = a.data.shape[0], b.data.shape[0]
        # Without what padding a group can have at most.
        expected_m = max(rows - groups * (alignment - 1), ceil_div(rows, alignment), groups) // max(groups, 1)
    used = alignment if use_psum_layout else None
    grouped_gemm_by_layout(a, b, grouped_layout, d, alignment=used, expected_m=expected_m)


def m_grouped_fp8_gemm_nn_contiguous(a: Pair, b: Pair, d: Tensor, grouped_layout: Tensor, *args, **options) -> None:
    """`m_grouped_fp8_gemm_nt_contiguous` with b (E, K, N), which is K-major as a transposed view only."""
    m_grouped_fp8_gemm_nt_contiguous(a, transposed("b", b), d, grouped_layout, *args, **options)


@named(out="d")
def m_grouped_fp8_gemm_nt_masked(
    a: Pair,
    b: Pair,
    d: Tensor,
    masked_m: Tensor,
    expected_m: int,
    recipe: Recipe | None = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
    recipe_a: Recipe | None = None,
    recipe_b: Recipe | None = None,
) -> None:
    """``d[e, :masked_m[e]] = a[e, :masked_m[e]] @ b[e].T`` of dequantized operands for every group e.

    a: data (E, max_m, K) with scale (E, max_m, ceil(K/128)), in any strides; fastest as `quantize_1x128` writes them.
    b: as for `m_grouped_fp8_gemm_nt_contiguous`. d: (E, max_m, N) bfloat16 or float32; other rows are left alone.
    masked_m: int32 (E,) on the device, read there only. expected_m: about how many rows a group has, for the speed.
    """
    weights_by_blocks(recipe, recipe_a, recipe_b)
    grouped_gemm_masked(fp8("a", a), fp8("b", b), masked_m, expected_m=expected_m, out=d)


def m_grouped_gemm_fp8_fp8_bf16_nt_contiguous(lhs: Pair, rhs: Pair, out: Tensor, m_indices: Tensor) -> None:
    """`m_grouped_fp8_gemm_nt_contiguous` by its name of 2025."""
    m_grouped_fp8_gemm_nt_contiguous(lhs, rhs, out, m_indices)


def m_grouped_gemm_fp8_fp8_bf16_nt_masked(lhs: Pair, rhs: Pair, out: Tensor, masked_m: Tensor, expected_m: int) -> None:
    """`m_grouped_fp8_gemm_nt_masked` by its name of 2025."""
    m_grouped_fp8_gemm_nt_masked(lhs, rhs, out, masked_m, expected_m)


# Of FP8 operands these are the same.
m_grouped_fp8_fp4_gemm_nt_contiguous = m_grouped_fp8_gemm_nt_contiguous
m_grouped_fp8_fp4_gemm_nn_contiguous = m_grouped_fp8_gemm_nn_contiguous
m_grouped_fp8_fp4_gemm_nt_masked = m_grouped_fp8_gemm_nt_masked
fp8_m_grouped_gemm_nt_masked = m_grouped_fp8_gemm_nt_masked  # an older name
