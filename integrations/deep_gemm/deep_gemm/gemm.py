"""FP8 GEMMs: dense, ``D = C + A @ B.T``; grouped along M, for experts; grouped along K, for weight gradients."""

import functools
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from deep_gemm.settings import get_mk_alignment_for_contiguous_layout
from deep_gemm.utils.layout import float32_scale
from fp8moe.kernels.gemm import gemm, grouped_gemm_k, grouped_gemm_masked
from fp8moe.kernels.gemm.checks import RESULTS
from fp8moe.kernels.gemm.layouts import grouped_gemm_by_layout, grouped_gemm_k_by_sizes
from fp8moe.quant.checks import check_scale, check_vector, fp8_data, fp8_operand
from fp8moe.quant.formats import BLOCK, FP8Tensor, ceil_div
from fp8moe.runtime.checks import check_like, check_tensor

__all__ = [
    "fp8_fp4_gemm_nn",
    "fp8_fp4_gemm_nt",
    "fp8_fp4_gemm_tn",
    "fp8_fp4_gemm_tt",
    "fp8_gemm_nn",
    "fp8_gemm_nt",
    "fp8_gemm_nt_skip_head_mid",
    "fp8_gemm_tn",
    "fp8_gemm_tt",
    "fp8_m_grouped_gemm_nt_masked",
    "gemm_fp8_fp8_bf16_nt",
    "k_grouped_fp8_gemm_nt_contiguous",
    "k_grouped_fp8_gemm_tn_contiguous",
    "m_grouped_fp8_fp4_gemm_nn_contiguous",
    "m_grouped_fp8_fp4_gemm_nt_contiguous",
    "m_grouped_fp8_fp4_gemm_nt_masked",
    "m_grouped_fp8_gemm_nn_contiguous",
    "m_grouped_fp8_gemm_nt_contiguous",
    "m_grouped_fp8_gemm_nt_masked",
    "m_grouped_gemm_fp8_fp8_bf16_nt_contiguous",
    "m_grouped_gemm_fp8_fp8_bf16_nt_masked",
    "wgrad_gemm_fp8_fp8_fp32_nt",
]

P = ParamSpec("P")
R = TypeVar("R")
Operand = tuple[Tensor, Tensor]
Recipe = Sequence[int]

_FP4 = (torch.int8, torch.uint8)


def named(**names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a decorator that replaces fp8moe's argument name before the ":" of an error by DeepGEMM's argument name.

    names: keyword arguments, fp8moe's name of an argument = DeepGEMM's name.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **options: P.kwargs) -> R:
            try:
                return function(*args, **options)
            except (TypeError, ValueError) as error:
                name, colon, rest = str(error).partition(":")
                if not colon or name not in names:
                    raise
                raise type(error)(f"{names[name]}:{rest}") from error

        return call

    return decorate


@named(out="d", out_dtype="d")
def fp8_gemm_nt(
    a: Operand,
    b: Operand,
    d: Tensor,
    c: Tensor | None = None,
    recipe: Recipe | None = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
    recipe_a: Recipe | None = None,
    recipe_b: Recipe | None = None,
) -> None:
    """Write ``c + a @ b.T`` to d, or ``a @ b.T`` without c, for dequantized a and b. Sums are in float32.

    a: data (M, K) float8_e4m3fn and scale (M, ceil(K/128)) float32, in any strides. An MN-major scale is fastest, as
        `get_mn_major_tma_aligned_tensor` returns it. The scale may also be int32, with four exponents per value.
    b: data (N, K), scale (ceil(N/128), ceil(K/128)); with recipe (1, 1, 128) scale (N, K/128), K a multiple of 128.
    d: (M, N) bfloat16 or float32. c: like d; either d itself, or memory apart from d.
    recipe: (rows per scale block of a, rows per scale block of b, 128); None is (1, 128, 128). recipe_a, recipe_b: in
        place of recipe, the blocks of a, (1, 128), and of b, (128, 128) or (1, 128).
    compiled_dims, disable_ue8m0_cast: no effect: N and K are compiled in, and scales are never cast on Hopper.

    Raises NotImplementedError for FP4, data that is not K-major and other recipes; TypeError or ValueError like
    `fp8moe.gemm`.
    """
    a, b = _fp8("a", a), _fp8("b", b)
    if _by_rows(recipe, recipe_a, recipe_b):
        check_tensor("d", d)
        if d.dim() != 2:
            raise ValueError(f"d: expected shape (M, N), got {tuple(d.shape)}")
        if b.data.dim() == 2:  # grouped_gemm_k takes scales of blocks as well
            check_scale("b.scale", b.scale, (b.data.shape[0], b.data.shape[1] // BLOCK), d.device)
        k = max(a.data.shape[-1], 1)
        whole = torch.arange(0, k + 1, k, dtype=torch.int32, device=d.device)  # offsets along K of a single group
        _write_sum(lambda out, add: grouped_gemm_k(a, b, whole, out=out.unsqueeze(0), accumulate=add), c, d)
    else:
        gemm(a, b, c=c, out=d)


def fp8_gemm_nn(a: Operand, b: Operand, d: Tensor, c: Tensor | None = None, *args, **options) -> None:
    """Compute `fp8_gemm_nt` with b (K, N), which must be a transposed view, as data must be K-major."""
    fp8_gemm_nt(a, _transposed("b", b), d, c, *args, **options)


def fp8_gemm_tn(a: Operand, b: Operand, d: Tensor, c: Tensor | None = None, *args, **options) -> None:
    """Compute `fp8_gemm_nt` with a (K, M) and b (K, N), which must be transposed views, as data must be K-major."""
    fp8_gemm_nt(_transposed("a", a), _transposed("b", b), d, c, *args, **options)


def fp8_gemm_tt(a: Operand, b: Operand, d: Tensor, c: Tensor | None = None, *args, **options) -> None:
    """Compute `fp8_gemm_nt` with a (K, M), which must be a transposed view, as data must be K-major."""
    fp8_gemm_nt(_transposed("a", a), b, d, c, *args, **options)


def fp8_gemm_nt_skip_head_mid(
    a: Operand,
    b: Operand,
    d: Tensor,
    head_splits: Sequence[int],
    recipe: Recipe | None = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
) -> None:
    """Write ``a @ b.T`` to the left and right columns of each head of d; the middle columns are left alone.

    b: heads * (left + right) rows. d: (M, heads * (left + mid + right)) bfloat16 or float32. head_splits: (left, mid,
        right), columns per head. Other arguments: as for `fp8_gemm_nt`. The product is computed separately and copied.

    Raises like `fp8_gemm_nt`; ValueError for head_splits that do not divide the rows of b or columns of d.
    """
    a, b = _fp8("a", a), _fp8("b", b)
    check_tensor("d", d)
    n = b.data.shape[0]
    left, mid, right = head_splits if len(head_splits) == 3 else (0, 0, 0)
    if min(left, mid, right) < 0 or not left + right or n % (left + right):
        expected = f"(left, mid, right) columns of a head, left + right of which divide the {n} rows of b"
        raise ValueError(f"head_splits: expected {expected}, got {tuple(head_splits)}")
    heads = n // (left + right)
    check_like("d", d, RESULTS, (a.data.shape[0], heads * sum(head_splits)), a.data.device, "a")
    product = torch.empty((d.shape[0], n), dtype=d.dtype, device=d.device)
    fp8_gemm_nt(a, b, product, recipe=recipe)
    found, wanted = product.unflatten(1, (heads, left + right)), d.unflatten(1, (heads, left + mid + right))
    wanted[..., :left].copy_(found[..., :left])
    wanted[..., left + mid :].copy_(found[..., left:])


def gemm_fp8_fp8_bf16_nt(lhs: Operand, rhs: Operand, out: Tensor) -> None:
    """Compute `fp8_gemm_nt`, under an older name, from DeepGEMM of 2025."""
    fp8_gemm_nt(lhs, rhs, out)


def wgrad_gemm_fp8_fp8_fp32_nt(lhs: Operand, rhs: Operand, out: Tensor) -> None:
    """Add ``lhs @ rhs.T`` to float32 out, with 1x128 scales in both: `fp8_gemm_nt` with recipe (1, 1, 128), c = d."""
    fp8_gemm_nt(lhs, rhs, out, c=out, recipe=(1, 1, 128))


@named(out="d", layout="grouped_layout", expected_m="expected_m_for_psum_layout")
def m_grouped_fp8_gemm_nt_contiguous(
    a: Operand,
    b: Operand,
    d: Tensor,
    grouped_layout: Tensor,
    recipe: Recipe | None = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
    use_psum_layout: bool = False,
    expected_m_for_psum_layout: int | None = None,
    recipe_a: Recipe | None = None,
    recipe_b: Recipe | None = None,
    ensure_zero_padding: bool = False,
) -> None:
    """Write ``a[i] @ b[group of i].T`` of dequantized operands to d[i] for every row i that has a group.

    a: data (M, K) float8_e4m3fn with scale (M, ceil(K/128)); b: data (E, N, K) with scale (E, ceil(N/128),
        ceil(K/128)); scales as for `fp8_gemm_nt`.
    d: (M, N) bfloat16 or float32. Rows without a group are undefined; a row without a group that lies between rows of
        one group is overwritten.
    grouped_layout: int32 on the GPU; the CPU never reads it. Either (M,), the group of each row, -1 for none: the rows
        of a group must be adjacent, groups may come in any order. Or, with use_psum_layout, (E,), the row where each
        group ends; a group begins where the previous one ends, rounded up to a multiple of
        `get_mk_alignment_for_contiguous_layout`.
    expected_m_for_psum_layout: the approximate number of rows per group; only the speed depends on it.
    ensure_zero_padding: fill d with zeros first, so that rows between and after groups are zero.

    Raises like `fp8_gemm_nt`.
    """
    _check_weights_by_blocks(recipe, recipe_a, recipe_b)
    a, b = _fp8("a", a), _fp8("b", b)
    check_tensor("grouped_layout", grouped_layout)
    alignment = get_mk_alignment_for_contiguous_layout()
    expected_m = expected_m_for_psum_layout
    if expected_m is None:
        rows, groups = a.data.shape[0], b.data.shape[0]
        # Subtract the most padding rows that the groups can have.
        expected_m = max(rows - groups * (alignment - 1), ceil_div(rows, alignment), groups) // max(groups, 1)
    if ensure_zero_padding:
        check_tensor("d", d)
        d.zero_()
    used = alignment if use_psum_layout else None
    grouped_gemm_by_layout(a, b, grouped_layout, d, alignment=used, expected_m=expected_m)


def m_grouped_fp8_gemm_nn_contiguous(
    a: Operand, b: Operand, d: Tensor, grouped_layout: Tensor, *args, **options
) -> None:
    """Compute `m_grouped_fp8_gemm_nt_contiguous` with b (E, K, N), which must be a transposed view, K-major."""
    m_grouped_fp8_gemm_nt_contiguous(a, _transposed("b", b), d, grouped_layout, *args, **options)


@named(out="d")
def m_grouped_fp8_gemm_nt_masked(
    a: Operand,
    b: Operand,
    d: Tensor,
    masked_m: Tensor,
    expected_m: int,
    recipe: Recipe | None = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
    recipe_a: Recipe | None = None,
    recipe_b: Recipe | None = None,
) -> None:
    """Write ``a[e, :masked_m[e]] @ b[e].T`` of dequantized operands to d[e, :masked_m[e]] for every group e.

    a: data (E, max_m, K) with scale (E, max_m, ceil(K/128)), in any strides; fastest in those of `quantize_1x128`.
    b: as for `m_grouped_fp8_gemm_nt_contiguous`. d: (E, max_m, N) bfloat16 or float32; other rows are left alone.
    masked_m: int32 (E,) on the GPU; the CPU never reads it. expected_m: approximate rows per group; affects only speed.
    """
    _check_weights_by_blocks(recipe, recipe_a, recipe_b)
    grouped_gemm_masked(_fp8("a", a), _fp8("b", b), masked_m, expected_m=expected_m, out=d)


def m_grouped_gemm_fp8_fp8_bf16_nt_contiguous(lhs: Operand, rhs: Operand, out: Tensor, m_indices: Tensor) -> None:
    """Compute `m_grouped_fp8_gemm_nt_contiguous`, under an older name, from DeepGEMM of 2025."""
    m_grouped_fp8_gemm_nt_contiguous(lhs, rhs, out, m_indices)


def m_grouped_gemm_fp8_fp8_bf16_nt_masked(
    lhs: Operand, rhs: Operand, out: Tensor, masked_m: Tensor, expected_m: int
) -> None:
    """Compute `m_grouped_fp8_gemm_nt_masked`, under an older name, from DeepGEMM of 2025."""
    m_grouped_fp8_gemm_nt_masked(lhs, rhs, out, masked_m, expected_m)


@named(out="d", sizes="ks_tensor")
def k_grouped_fp8_gemm_nt_contiguous(
    a: Operand,
    b: Operand,
    d: Tensor,
    ks: Sequence[int] | None,
    ks_tensor: Tensor,
    c: Tensor | None = None,
    recipe: Recipe = (1, 1, 128),
    compiled_dims: str = "mn",
    use_psum_layout: bool = False,
) -> None:
    """Write ``c[e] + a_e @ b_e.T``, or the product alone without c, to d[e] for every group e of columns along K.

    a: data (M * K,) float8_e4m3fn, the row-major matrices (M, ks[e]) of all groups, concatenated; scale (M, K/128)
        float32, or (K/128, M). b: likewise with N, a multiple of 8.
    d: (E, M, N) float32, or bfloat16 without c; contiguous. c: like d; either d itself, or memory apart from d.
    ks: None, or the sizes of the groups, multiples of 128 with the sum K; these are checked but not used.
    ks_tensor: the same sizes, int32 (E,) on the GPU. With use_psum_layout, the positions along K where groups end, not
        necessarily multiples of 128; a group begins where the previous one ends, rounded up to a multiple of
        `get_mk_alignment_for_contiguous_layout`, and the data of both operands must be zero between the groups, as
        casts of zeros are. ks is then ignored.

    Raises like `fp8_gemm_nt`; ValueError for wrong ks; NotImplementedError with use_psum_layout if the alignment is
    not a multiple of 128.
    """
    _check_groups(d, ks_tensor, recipe)
    _, m, n = d.shape
    a, b = _with_rows("a", a, m), _with_rows("b", b, n)
    sizes = _sizes(ks, ks_tensor, a.scale.shape[-1] * BLOCK, use_psum_layout)
    _write_sum(lambda out, add: grouped_gemm_k_by_sizes(a, b, sizes, out, accumulate=add), c, d)


@named(out="d")
def k_grouped_fp8_gemm_tn_contiguous(
    a: Operand,
    b: Operand,
    d: Tensor,
    ks: Sequence[int] | None,
    ks_tensor: Tensor,
    c: Tensor | None = None,
    recipe: Recipe = (1, 1, 128),
    compiled_dims: str = "mn",
    use_psum_layout: bool = False,
) -> None:
    """Compute `k_grouped_fp8_gemm_nt_contiguous` for operands as `per_channel_cast_to_fp8` returns them.

    a: data (K, M), scale (K/128, M). b: data (K, N), scale (K/128, N). The data must be K-major: transposed views.
    """
    _check_groups(d, ks_tensor, recipe)
    a, b = _fp8("a", a, by_columns=True), _fp8("b", b, by_columns=True)
    sizes = _sizes(ks, ks_tensor, a.data.shape[0], use_psum_layout)
    _write_sum(lambda out, add: grouped_gemm_k_by_sizes(a, b, sizes, out, accumulate=add), c, d)


# DeepGEMM's names of functions that take FP8 or FP4 operands; for FP8 operands they are the functions above.
fp8_fp4_gemm_nt = fp8_gemm_nt
fp8_fp4_gemm_nn = fp8_gemm_nn
fp8_fp4_gemm_tn = fp8_gemm_tn
fp8_fp4_gemm_tt = fp8_gemm_tt
m_grouped_fp8_fp4_gemm_nt_contiguous = m_grouped_fp8_gemm_nt_contiguous
m_grouped_fp8_fp4_gemm_nn_contiguous = m_grouped_fp8_gemm_nn_contiguous
m_grouped_fp8_fp4_gemm_nt_masked = m_grouped_fp8_gemm_nt_masked
fp8_m_grouped_gemm_nt_masked = m_grouped_fp8_gemm_nt_masked  # an older name of the same function


def _check_groups(d: Tensor, ks_tensor: Tensor, recipe: Recipe) -> None:
    if not _by_rows(recipe):
        raise NotImplementedError(f"recipe: expected (1, 1, 128) of groups along K, got {recipe}")
    check_tensor("ks_tensor", ks_tensor)
    check_tensor("d", d)
    check_vector("ks_tensor", ks_tensor, torch.int32, None, d.device)
    if d.dim() != 3:
        raise ValueError(f"d: expected shape (E, M, N), got {tuple(d.shape)}")


def _with_rows(name: str, operand: Operand, rows: int) -> FP8Tensor:
    """Return an operand with data (rows * K,) as an FP8Tensor, its scale transposed to (rows, K blocks) if needed."""
    data, scale = _fp8(name, operand)
    fp8_data(f"{name}.data", data, "(rows * K)")
    turned = scale.dim() == 2 and scale.shape[1] == rows and (scale.shape[0] != rows or scale.stride(1) == 1)
    return FP8Tensor(data, scale.t() if turned else scale)


def _sizes(ks: Sequence[int] | None, ks_tensor: Tensor, k: int, psum: bool) -> Tensor:
    """Return the sizes of the groups along K, int32 (E,) on the GPU.

    ks: None, or the same sizes, which are checked and must add up to ``k``. psum: whether ks_tensor holds the ends of
    groups rather than their sizes.
    """
    if psum:
        alignment = get_mk_alignment_for_contiguous_layout()
        if alignment % BLOCK:
            raise NotImplementedError(f"use_psum_layout: expected an alignment of {BLOCK} along K, got {alignment}")
        ends = ks_tensor - ks_tensor % -alignment  # rounded up to where the next group begins
        sizes = ends.clone()
        sizes[1:] -= ends[:-1]
        return sizes
    groups = len(ks_tensor)
    if ks is not None and (len(ks) != groups or sum(ks) != k or any(size < 0 or size % BLOCK for size in ks)):
        expected = f"{groups} multiples of {BLOCK}, as many as ks_tensor has, and K = {k} together"
        raise ValueError(f"ks: expected {expected}, got {list(ks)}")
    return ks_tensor


def _fp8(name: str, operand: Operand, *, by_columns: bool = False) -> FP8Tensor:
    """Return the operand ``(data, scale)`` as an FP8Tensor with float32 scales, detached from autograd.

    by_columns: whether K is the first dimension. Raises NotImplementedError for FP4 values and for data that is not
    K-major, which DeepGEMM's Hopper kernels do not support either.
    """
    data, scale = fp8_operand(name, operand)
    if data.dtype in _FP4:
        raise NotImplementedError(f"{name}: expected float8_e4m3fn, as Hopper has no kernel for FP4, got {data.dtype}")
    strides, axis = data.stride(), 0 if by_columns else -1
    if by_columns and len(strides) != 2:
        raise ValueError(f"{name}.data: expected shape (K, columns), got {tuple(data.shape)}")
    if strides and strides[axis] != 1 and data.shape[axis] > 1:
        expected = "K-major data, the only layout that Hopper multiplies in FP8"
        raise NotImplementedError(f"{name}: expected {expected}, got strides {strides}")
    if data.requires_grad or scale.requires_grad:
        data, scale = data.detach(), scale.detach()
    if scale.dtype is not torch.float32:
        k = data.shape[axis] if strides else 0
        scale = float32_scale(name, scale.mT, k).mT if by_columns else float32_scale(name, scale, k)
    return FP8Tensor(data, scale)


def _transposed(name: str, operand: Operand) -> Operand:
    """Return the operand with rows and columns of data and scale exchanged, as views."""
    data, scale = fp8_operand(name, operand)
    return data.mT, scale.mT


def _by_rows(recipe: Recipe | None, recipe_a: Recipe | None = None, recipe_b: Recipe | None = None) -> bool:
    """Return True for the recipe (1, 1, 128), 1x128 scales in both operands; False for (1, 128, 128).

    With (1, 128, 128), or None, b has 128x128 scales. recipe_a, recipe_b: the block sizes of each operand, in place of
    recipe. Raises NotImplementedError for other recipes.
    """
    if recipe_a is not None or recipe_b is not None:
        (rows_a, *k_a), (rows_b, *k_b) = recipe_a or (1, BLOCK), recipe_b or (BLOCK, BLOCK)
        if k_a != k_b:
            raise NotImplementedError(f"recipe_a, recipe_b: expected blocks of {BLOCK} along K, got {k_a} and {k_b}")
        recipe = (rows_a, rows_b, *k_b)
    if recipe is None or tuple(recipe) == (1, 128, 128):
        return False
    if tuple(recipe) == (1, 1, 128):
        return True
    raise NotImplementedError(f"recipe: expected (1, 128, 128) or (1, 1, 128), those of Hopper, got {tuple(recipe)}")


def _check_weights_by_blocks(*recipes: Recipe | None) -> None:
    """Raise NotImplementedError for any recipe other than (1, 128, 128)."""
    if _by_rows(*recipes):
        raise NotImplementedError("recipe: expected (1, 128, 128) of grouped weights, got (1, 1, 128)")


def check_addend(c: Tensor | None, d: Tensor) -> None:
    check_tensor("d", d)
    if c is not None:
        check_like("c", c, (d.dtype,), d.shape, d.device, "d")


def _write_sum(product: Callable[[Tensor, bool], object], c: Tensor | None, d: Tensor) -> None:
    """Write c plus a product to d. product: function (out, accumulate) that writes the product to out or adds it."""
    check_addend(c, d)
    if c is None or c is d or (c.data_ptr() == d.data_ptr() and c.stride() == d.stride()):
        product(d, c is not None)
    else:
        sums = torch.empty(d.shape, dtype=torch.float32, device=d.device)
        product(sums, False)
        torch.add(sums, c, out=d)
