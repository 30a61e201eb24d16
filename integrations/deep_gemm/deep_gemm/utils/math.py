"""Casts to FP8 with a scale for each block, as the GEMMs take them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from deep_gemm.utils.layout import get_mn_major_tma_aligned_packed_ue8m0_tensor
from fp8moe.quant.formats import BLOCK, FP8_MAX, align, ceil_div
from fp8moe.quant.quantize import quantize_1x128, quantize_128x1, quantize_128x128
from fp8moe.quant.reference import block_scale
from fp8moe.quant.reference import up_to_power_of_two as ceil_to_ue8m0

__all__ = [
    "align",
    "cast_back_from_fp4",
    "ceil_div",
    "ceil_to_ue8m0",
    "per_block_cast_to_fp8",
    "per_channel_cast_to_fp8",
    "per_custom_dims_cast_to_fp8",
    "per_token_cast_to_fp8",
]


def per_token_cast_to_fp8(
    x: Tensor, use_ue8m0: bool = False, gran_k: int = BLOCK, use_packed_ue8m0: bool = False
) -> tuple[Tensor, Tensor]:
    """Data (M, K) float8_e4m3fn and scale (M, ceil(K/128)) float32 of x (M, K) bfloat16, float16 or float32.

    The scale is MN-major, as the GEMMs load it. use_ue8m0: scales are powers of two. use_packed_ue8m0: and come as
    int32 (M, ceil(K/512)), four exponents each. gran_k: 128, the only one that Hopper has kernels for.
    """
    _check_block(gran_k)
    data, scale = quantize_1x128(x, scale_format=_scale_format(use_ue8m0 or use_packed_ue8m0))
    return data, get_mn_major_tma_aligned_packed_ue8m0_tensor(scale) if use_packed_ue8m0 else scale


def per_block_cast_to_fp8(x: Tensor, use_ue8m0: bool = False, gran_k: int = BLOCK) -> tuple[Tensor, Tensor]:
    """Data (..., N, K) float8_e4m3fn and scale (..., ceil(N/128), ceil(K/128)) float32 of x; both contiguous."""
    _check_block(gran_k)
    return tuple(quantize_128x128(x, scale_format=_scale_format(use_ue8m0)))


def per_channel_cast_to_fp8(x: Tensor, use_ue8m0: bool = False, gran_k: int = BLOCK) -> tuple[Tensor, Tensor]:
    """Data (K, M) float8_e4m3fn and scale (ceil(K/128), M) float32 of x (K, M), one for each 128 rows of a column.

    Both are views of what lies in memory as (M, K) and (M, ceil(K/128)): operands whose K runs along the rows of x.
    """
    _check_block(gran_k)
    columns = quantize_1x128(x.t(), scale_format="ue8m0") if use_ue8m0 else quantize_128x1(x)
    return tuple(part.t() for part in columns)


def per_custom_dims_cast_to_fp8(x: Tensor, dims: Sequence[int], use_ue8m0: bool = False) -> tuple[Tensor, Tensor]:
    """Data float8_e4m3fn like x, and scale float32 with one value for each index of x in `dims`, of these sizes.

    With dims (0,) those of the keys of `fp8_mqa_logits`: x (T, D), scale (T,).
    """
    kept = {dim % x.dim() for dim in dims}
    x = x.float()
    scale = block_scale(x.abs().amax([dim for dim in range(x.dim()) if dim not in kept], keepdim=True), use_ue8m0)
    data = (x / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return data, scale.view([x.shape[dim] for dim in sorted(kept)])


def cast_back_from_fp4(*args: object, **options: object) -> Tensor:
    """Raise NotImplementedError: Hopper has no kernels for FP4."""
    raise NotImplementedError("cast_back_from_fp4: Hopper has no kernels for FP4")


def _check_block(gran_k: int) -> None:
    if gran_k != BLOCK:
        raise NotImplementedError(f"gran_k: expected {BLOCK}, the blocks of Hopper's kernels, got {gran_k}")


def _scale_format(use_ue8m0: bool) -> str:
    return "ue8m0" if use_ue8m0 else "float32"
