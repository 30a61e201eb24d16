"""GEMMs of two matrices: ``D = C + A @ B.T``."""

import torch
from torch import Tensor

from fp8moe.integrations.deep_gemm.operands import Recipe, by_rows, fp8, named, transposed, write_sum
from fp8moe.kernels.gemm import gemm, grouped_gemm_k
from fp8moe.runtime.checks import check_tensor

Pair = tuple[Tensor, Tensor]


@named(out="d", out_dtype="d")
def fp8_gemm_nt(
    a: Pair,
    b: Pair,
    d: Tensor,
    c: Tensor | None = None,
    recipe: Recipe | None = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
    recipe_a: Recipe | None = None,
    recipe_b: Recipe | None = None,
) -> None:
    """``d = c + a @ b.T`` of dequantized operands, or ``a @ b.T`` without c, summed in float32.

    a: data (M, K) float8_e4m3fn, scale (M, ceil(K/128)) float32, in any strides; fastest MN-major, as
        `get_mn_major_tma_aligned_tensor` returns it. Or int32, four exponents each.
    b: data (N, K), scale (ceil(N/128), ceil(K/128)); with recipe (1, 1, 128) scale (N, K/128), K a multiple of 128.
    d: (M, N) bfloat16 or float32, written. c: like d; d itself, or memory of its own.
    recipe: blocks of the scales; None is (1, 128, 128). recipe_a, recipe_b: (1, 128) and that of b, in its place.
    compiled_dims, disable_ue8m0_cast: no effect: N and K are compiled in, and scales are never cast on Hopper.

    Raises NotImplementedError for FP4, data that is not K-major and other recipes, TypeError or ValueError as `gemm`.
    """
    a, b = fp8("a", a), fp8("b", b)
    if by_rows(recipe, recipe_a, recipe_b):
        _check_matrix(d)
        # Made on the device: all of K in one group.
        whole = torch.arange(2, dtype=torch.int32, device=d.device).mul_(a.data.shape[-1])
        write_sum(lambda out, add: grouped_gemm_k(a, b, whole, out=out.unsqueeze(0), accumulate=add), c, d)
    else:
        gemm(a, b, c=c, out=d)


def fp8_gemm_nn(a: Pair, b: Pair, d: Tensor, c: Tensor | None = None, *args, **options) -> None:
    """`fp8_gemm_nt` with b (K, N), which is K-major as a transposed view only."""
    fp8_gemm_nt(a, transposed("b", b), d, c, *args, **options)


def fp8_gemm_tn(a: Pair, b: Pair, d: Tensor, c: Tensor | None = None, *args, **options) -> None:
    """`fp8_gemm_nt` with a (K, M) and b (K, N), which are K-major as transposed views only."""
    fp8_gemm_nt(transposed("a", a), transposed("b", b), d, c, *args, **options)


def fp8_gemm_tt(a: Pair, b: Pair, d: Tensor, c: Tensor | None = None, *args, **options) -> None:
    """`fp8_gemm_nt` with a (K, M), which is K-major as a transposed view only."""
    fp8_gemm_nt(transposed("a", a), b, d, c, *args, **options)


def gemm_fp8_fp8_bf16_nt(lhs: Pair, rhs: Pair, out: Tensor) -> None:
    """`fp8_gemm_nt` by its name of 2025."""
    fp8_gemm_nt(lhs, rhs, out)


def wgrad_gemm_fp8_fp8_fp32_nt(lhs: Pair, rhs: Pair, out: Tensor) -> None:
    """``out += lhs @ rhs.T`` for float32 out; both scales 1x128: `fp8_gemm_nt` with recipe (1, 1, 128) and c = d."""
    fp8_gemm_nt(lhs, rhs, out, c=out, recipe=(1, 1, 128))


def _check_matrix(d: Tensor) -> None:
    check_tensor("d", d)
    if d.dim() != 2:
        raise ValueError(f"d: expected shape (M, N), got {tuple(d.shape)}")


# Of FP8 operands these are the same.
fp8_fp4_gemm_nt = fp8_gemm_nt
fp8_fp4_gemm_nn = fp8_gemm_nn
fp8_fp4_gemm_tn = fp8_gemm_tn
fp8_fp4_gemm_tt = fp8_gemm_tt
