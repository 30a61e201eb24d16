"""FP8 tensors with one scale per block, weights in four bits with one per group; constants, and layouts of scales."""

from typing import NamedTuple

import torch
from torch.utils._pytree import _register_namedtuple

BLOCK = 128
"""Elements along one side of a quantization block."""

FP8_MAX = 448.0
"""Largest finite E4M3 value."""

SCALE_FLOOR = 1e-12
"""Lower bound of a block's largest magnitude: a smaller maximum is raised to this value, so that no scale is 0."""

SCALE_DEFINES = (("BLOCK", BLOCK), ("FP8_MAX", f"{FP8_MAX}f"), ("SCALE_FLOOR", f"{SCALE_FLOOR}f"))
"""The macros that cuda/common/block_scale.cuh needs."""

SCALE_FORMATS = ("float32", "ue8m0")

MX_BLOCK = 32
"""Values along K that share a scale in OCP's Microscaling Formats (MX) v1.0, section 5. Divides K of packed weights."""

E2M1 = (*(0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0), *(-0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0))
"""The values of the 16 codes of MXFP4 and NVFP4: OCP Microscaling Formats (MX) v1.0, section 5.3.3."""


class FP8Tensor(NamedTuple):
    """Quantized values and the scale of each block; an element's value is its ``data`` times the scale of its block.

    data: float8_e4m3fn (..., M, K).
    scale: float32, (..., M, ceil(K/128)) for 1x128 blocks, (..., ceil(M/128), ceil(K/128)) for 128x128 blocks, or
        (..., M, 1) for weights with one scale per output channel.
    """

    data: torch.Tensor
    scale: torch.Tensor


# torch.export.save and AOTInductor need this registration for programs that take or return an FP8Tensor.
_register_namedtuple(FP8Tensor, serialized_type_name="fp8moe.FP8Tensor")


class PackedTensor(NamedTuple):
    """A weight (..., N, K) in four bits a value, with one scale for each group of values along K.

    data: uint8 (..., N, K/2); value 2i of a row is in the low four bits of byte i, value 2i + 1 in the high four.
    scale: (..., N, K/group), with the dtype and group of the format.
    format: "mxfp4", "int4" or "nvfp4":
        "mxfp4": E2M1 codes; uint8 scales, exponents of two plus 127 (E8M0), for groups of 32.
        "int4": codes of -8 to 7, two's complement; float32 or bfloat16 scales for groups of 32 or 128.
        "nvfp4": E2M1 codes; float8_e4m3fn scales for groups of 16, times tensor_scale.
    tensor_scale: of "nvfp4" only: float32 (...), or (..., N) with one for each row.

    A value is (code * scale of its group) * tensor_scale. Construction checks nothing: calls do. K is a multiple of 32
    and of the group. Source of E2M1 and E8M0: OCP Microscaling Formats (MX) v1.0, sections 5.3.3 and 5.4.1.
    """

    data: torch.Tensor
    scale: torch.Tensor
    format: str
    tensor_scale: torch.Tensor | None = None


_register_namedtuple(PackedTensor, serialized_type_name="fp8moe.PackedTensor")


class PackedFormat(NamedTuple):
    """What scales a format of `PackedTensor` has: their dtypes, and how many values along K may share one."""

    scale_dtypes: tuple[torch.dtype, ...]
    groups: tuple[int, ...]


PACKED_FORMATS = {
    "mxfp4": PackedFormat((torch.uint8,), (MX_BLOCK,)),
    "int4": PackedFormat((torch.bfloat16, torch.float32), (32, 128)),
    "nvfp4": PackedFormat((torch.float8_e4m3fn,), (16,)),
}


# Operators take weights as (data, scale), FP8 and packed ones alike: dtypes tell the formats apart.


def is_packed(data: torch.Tensor) -> bool:
    """Return whether `data` of a weight has two codes of four bits in each byte."""
    return data.dtype is torch.uint8


def packed_format(scale: torch.Tensor) -> str:
    """Return the format of packed weights with these scales, whose dtype must be one of `PACKED_FORMATS`."""
    return next(name for name, (dtypes, _) in PACKED_FORMATS.items() if scale.dtype in dtypes)


def weight_k(data: torch.Tensor) -> int:
    """Return K of weights (..., N, K), FP8 or packed."""
    return data.shape[-1] * 2 if is_packed(data) else data.shape[-1]


def packed_group(data: torch.Tensor, scale: torch.Tensor) -> int:
    """Return how many values along K share a scale of packed weights that are not empty."""
    return weight_k(data) // scale.shape[-1]


def as_float(scale: torch.Tensor) -> torch.Tensor:
    """Return scales in float32, exactly; uint8 values are exponents of two (E8M0)."""
    if scale.dtype is not torch.uint8:
        return scale.float()
    # By their bits: torch 2.11 does not save exported programs that have a tensor in float8_e8m0fnu.
    bits = torch.where(scale == 0, 1 << 22, scale.int() << 23)  # 2^-127 is no normal number
    return torch.where(scale == 255, 0x7FC00000, bits).view(torch.float32)


def has_channel_scales(data: torch.Tensor, scale: torch.Tensor) -> bool:
    """Return whether FP8 weights (..., N, K) have one scale per output channel: (..., N, 1)."""
    if is_packed(data):
        return False
    n = data.shape[-2]
    return n > 2 and scale.shape[-2:] == (n, 1)  # with N = 1 or 2, block scales can have the shape (..., N, 1), too


def has_block_scales(data: torch.Tensor, scale: torch.Tensor) -> bool:
    """Return whether FP8 data (N, K), N > 1, has one scale per block of 128x128, not one per row and 128 columns."""
    return scale.shape[0] != data.shape[0]


def ceil_div(n: int, divisor: int) -> int:
    """Return n / divisor, rounded up."""
    return (n + divisor - 1) // divisor


def align(n: int, multiple: int) -> int:
    """Return n, rounded up to a multiple of ``multiple``."""
    return ceil_div(n, multiple) * multiple


def padded_rows(rows: int, groups: int) -> int:
    """Return the largest possible number of rows after every group is padded to a multiple of 128 rows.

    rows: number of rows in all groups together, before padding. groups: number of groups.
    """
    minimum = min if type(rows) is type(groups) is int else torch.sym_min  # which takes 3 us
    return (rows + (BLOCK - 1) * minimum(groups, rows)) // BLOCK * BLOCK


def empty_mn_major(shape: tuple[int, ...], *, device: torch.device | str) -> torch.Tensor:
    """Return uninitialized float32 scales (..., M, K blocks), MN-major: last strides (1, align(M, 4)).

    A column (the scales of one K block) is contiguous and starts at a multiple of 16 bytes, as TMA needs.
    """
    *lead, m, k_blocks = shape
    pitch = align(m, 4)
    strides = [1, pitch]
    stride = pitch * k_blocks
    for size in reversed(lead):
        strides.insert(0, stride)
        stride *= size
    return torch.empty_strided(shape, strides, dtype=torch.float32, device=device)


def empty_quantized(like: torch.Tensor, rows: int, columns: int, *, blocks: bool = False) -> FP8Tensor:
    """Return uninitialized data (rows, columns), contiguous, and MN-major scales of 1x128 blocks, or of 128x128 blocks.

    like: a tensor on the device where the results are allocated. blocks: 128x128.
    """
    scales = ceil_div(rows, BLOCK) if blocks else rows
    scale = like.new_empty_strided((scales, ceil_div(columns, BLOCK)), (1, align(scales, 4)), dtype=torch.float32)
    return FP8Tensor(like.new_empty((rows, columns), dtype=torch.float8_e4m3fn), scale)
