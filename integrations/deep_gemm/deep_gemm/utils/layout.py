"""Conversions of scales to DeepGEMM's layouts, and of packed scales to float32."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from deep_gemm.settings import (
    get_mk_alignment_for_contiguous_layout,
    set_mk_alignment_for_contiguous_layout,
)
from fp8moe.quant.formats import BLOCK, align, ceil_div, empty_mn_major
from fp8moe.quant.reference import up_to_power_of_two
from fp8moe.runtime.checks import check_dtype

__all__ = [
    "get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor",
    "get_mk_alignment_for_contiguous_layout",
    "get_mn_major_tma_aligned_packed_ue8m0_tensor",
    "get_mn_major_tma_aligned_tensor",
    "get_tma_aligned_size",
    "set_mk_alignment_for_contiguous_layout",
    "transform_sf_into_required_layout",
]

_PER_WORD = 4  # number of exponents in an int32 of packed scales

_E8M0 = torch.float8_e8m0fnu


def get_tma_aligned_size(x: int, element_size: int) -> int:
    """Round a number of elements, x, up until they fill a multiple of 16 bytes. element_size: bytes per element."""
    return align(x, 16 // element_size)


def get_mn_major_tma_aligned_tensor(sf: Tensor) -> Tensor:
    """Return ``sf`` (M, K blocks) or (E, M, K blocks) float32 stored MN-major, with last strides (1, align(M, 4)).

    Returns sf itself if it has this layout, otherwise a copy. Raises TypeError for another dtype, ValueError for
    another number of dimensions.
    """
    check_dtype("sf", sf, torch.float32)
    if sf.dim() not in (2, 3):
        raise ValueError(f"sf: expected shape (M, K blocks) or (E, M, K blocks), got {tuple(sf.shape)}")
    return sf if _lies_mn_major(sf) else empty_mn_major(sf.shape, device=sf.device).copy_(sf)


get_col_major_tma_aligned_tensor = get_mn_major_tma_aligned_tensor  # the name in DeepGEMM of 2025


def get_mn_major_tma_aligned_packed_ue8m0_tensor(sf: Tensor) -> Tensor:
    """Round scales up to powers of two and pack their exponents: return int32 (..., M, ceil(K blocks / 4)).

    sf: as for `get_mn_major_tma_aligned_tensor`. Each int32 holds the exponents of four K blocks, the first in the
    lowest byte. Strides (..., 1, align(M, 4)).
    """
    check_dtype("sf", sf, torch.float32)
    exponents = (up_to_power_of_two(sf.contiguous()).view(torch.int32) >> 23).to(torch.uint8)
    words = pad(exponents, (0, -sf.shape[-1] % _PER_WORD)).view(torch.int32)
    return empty_mn_major(words.shape, device=sf.device).view(torch.int32).copy_(words)


def get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor(*args: object, **options: object) -> Tensor:
    """Raise NotImplementedError: only SM100 has packed scales of groups along K; Hopper's are float32."""
    raise NotImplementedError(
        "get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor: scales of groups along K are float32 on Hopper"
    )


def transform_sf_into_required_layout(
    sf: Tensor,
    mn: int,
    k: int,
    recipe: tuple[int, ...],
    num_groups: int | None = None,
    is_sfa: bool = False,
    disable_ue8m0_cast: bool = False,
) -> Tensor:
    """Return scales in the layout that the kernels load without a copy; sf itself if it has this layout.

    sf: float32 ((num_groups,) ceil(mn / rows of a block), ceil(k / 128)), or packed int32 with four exponents each.
    recipe: (block rows of sf, 128), or (block rows of a, block rows of b, 128); is_sfa then says if sf scales a or b.
        1x128 scales become MN-major, see `get_mn_major_tma_aligned_tensor`; 128x128 scales become contiguous.
    disable_ue8m0_cast: no effect: scales are never cast on Hopper.

    Raises NotImplementedError for blocks that Hopper has no kernels for, ValueError for another shape.
    """
    *rows, block_k = recipe
    rows = rows[0 if is_sfa else -1]
    if block_k != BLOCK or rows not in (1, BLOCK):
        raise NotImplementedError(f"recipe: expected blocks of 1x128 or 128x128 on Hopper, got {rows}x{block_k}")
    packed = sf.dtype is torch.int32
    blocks = ceil_div(k, BLOCK * _PER_WORD if packed else BLOCK)
    shape = (*(() if num_groups is None else (num_groups,)), ceil_div(mn, rows), blocks)
    if sf.shape != shape:
        raise ValueError(f"sf: expected shape {shape} for mn = {mn}, k = {k}, got {tuple(sf.shape)}")
    if rows != 1:
        return sf.contiguous()
    if packed:
        return sf if _lies_mn_major(sf) else empty_mn_major(shape, device=sf.device).view(torch.int32).copy_(sf)
    return get_mn_major_tma_aligned_tensor(sf)


def float32_scale(name: str, sf: Tensor, k: int) -> Tensor:
    """Return scales in float32, from float32, float8_e8m0fnu or packed exponents. k: the data's size along K."""
    if sf.dtype is torch.int32:
        blocks = ceil_div(k, BLOCK)
        if sf.shape[-1] != ceil_div(blocks, _PER_WORD):
            expected = f"{ceil_div(blocks, _PER_WORD)} int32 of four exponents for K = {k}"
            raise ValueError(f"{name}.scale: expected {expected}, got shape {tuple(sf.shape)}")
        return sf.contiguous().view(torch.uint8)[..., :blocks].view(_E8M0).float()
    return sf.float() if sf.dtype is _E8M0 else sf


def _lies_mn_major(sf: Tensor) -> bool:
    pitch = align(sf.shape[-2], 4)
    return sf.stride() == (sf.shape[-1] * pitch, 1, pitch)[-sf.dim() :]
