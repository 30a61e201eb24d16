"""Casts to FP8 with block scales, in the formats that the GEMMs take."""

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
    """Quantize x (M, K) 1x128; return data (M, K) float8_e4m3fn and scale (M, ceil(K/128)) float32.

    x: bfloat16, float16 or float32. The scale is MN-major, as the GEMMs load it. use_ue8m0: scales are powers of two.
    use_packed_ue8m0: scales are powers of two, returned as int32 (M, ceil(K/512)) with four exponents per value.
    gran_k: must be 128.
    """
    _check_block(gran_k)
    data, scale = quantize_1x128(x, scale_format=_scale_format(use_ue8m0 or use_packed_ue8m0))
    return data, get_mn_major_tma_aligned_packed_ue8m0_tensor(scale) if use_packed_ue8m0 else scale


def per_block_cast_to_fp8(x: Tensor, use_ue8m0: bool = False, gran_k: int = BLOCK) -> tuple[Tensor, Tensor]:
    """Quantize x (..., N, K) in 128x128 blocks; return data and scale (..., ceil(N/128), ceil(K/128)), contiguous."""
    _check_block(gran_k)
    return tuple(quantize_128x128(x, scale_format=_scale_format(use_ue8m0)))


def per_channel_cast_to_fp8(x: Tensor, use_ue8m0: bool = False, gran_k: int = BLOCK) -> tuple[Tensor, Tensor]:
    """Quantize x (K, M) 128x1; return data (K, M) float8_e4m3fn and scale (ceil(K/128), M) float32.

    Both are transposed views of contiguous (M, K) and (M, ceil(K/128)), so that they are K-major operands of a GEMM.
    """
    _check_block(gran_k)
    columns = quantize_1x128(x.t(), scale_format="ue8m0") if use_ue8m0 else quantize_128x1(x)
    return tuple(part.t() for part in columns)


def per_custom_dims_cast_to_fp8(x: Tensor, dims: Sequence[int], use_ue8m0: bool = False) -> tuple[Tensor, Tensor]:
    """Quantize x with one scale for each index of the dimensions `dims`; return data (like x) and scale float32.

    The scale has the sizes of these dimensions. For keys x (T, D), dims (0,) gives the scale (T,) that `fp8_mqa_logits`
    takes.
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
