"""Scales as DeepGEMM lays them out, and from their packed form to float32."""

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

_PER_WORD = 4  # exponents of packed scales

_E8M0 = torch.float8_e8m0fnu


def get_tma_aligned_size(x: int, element_size: int) -> int:
    """The least number of elements of so many bytes that is at least x and fills multiples of 16 bytes."""
    return align(x, 16 // element_size)


def get_mn_major_tma_aligned_tensor(sf: Tensor) -> Tensor:
    """``sf`` (M, K blocks) or (E, M, K blocks) float32 stored MN-major: last strides (1, align(M, 4)).

    The very tensor where it lies so already, otherwise a copy. TypeError for another dtype, ValueError for another
    rank.
    """
    check_dtype("sf", sf, torch.float32)
    if sf.dim() not in (2, 3):
        raise ValueError(f"sf: expected shape (M, K blocks) or (E, M, K blocks), got {tuple(sf.shape)}")
    return sf if _lies_mn_major(sf) else empty_mn_major(sf.shape, device=sf.device).copy_(sf)


get_col_major_tma_aligned_tensor = get_mn_major_tma_aligned_tensor  # the name of 2025


def get_mn_major_tma_aligned_packed_ue8m0_tensor(sf: Tensor) -> Tensor:
    """``sf`` as for `get_mn_major_tma_aligned_tensor`, rounded up to powers of two: int32 (..., M, ceil(K blocks / 4)).

    Each int32 holds the exponents of four K blocks, the first in the lowest byte. Strides (..., 1, align(M, 4)).
    """
    check_dtype("sf", sf, torch.float32)
    exponents = (up_to_power_of_two(sf.contiguous()).view(torch.int32) >> 23).to(torch.uint8)
    words = pad(exponents, (0, -sf.shape[-1] % _PER_WORD)).view(torch.int32)
    return empty_mn_major(words.shape, device=sf.device).view(torch.int32).copy_(words)


def get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor(*args: object, **options: object) -> Tensor:
    """Raise NotImplementedError: packed scales of groups along K are of SM100; Hopper's are float32."""
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
    """Scales as the kernels load them without a copy; the very tensor where it lies so already.

    sf: float32 ((num_groups,) ceil(mn / rows of a block), ceil(k / 128)), or int32 with four exponents each, packed.
    recipe: (rows of a block of a, of b, 128), of which is_sfa chooses one, or (rows of a block, 128). Blocks of one row
        come MN-major, see `get_mn_major_tma_aligned_tensor`, those of 128 rows contiguous.
    disable_ue8m0_cast: no effect: scales of Hopper are never cast.

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
    """``sf`` itself where it is float32; packed exponents, or float8_e8m0fnu, as float32. k: of the data."""
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
