"""FP8 E4M3 tensors with one float32 scale per block: the pair of tensors, the constants, and the layout of scales."""

from typing import NamedTuple

import torch
from torch.utils._pytree import _register_namedtuple

BLOCK = 128
"""Elements along one side of a quantization block."""

FP8_MAX = 448.0
"""Largest finite E4M3 value."""

SCALE_FLOOR = 1e-12
"""Smallest block maximum that a scale is made from, so that an all-zero block has a finite, non-zero scale."""

SCALE_DEFINES = (("BLOCK", BLOCK), ("FP8_MAX", f"{FP8_MAX}f"), ("SCALE_FLOOR", f"{SCALE_FLOOR}f"))
"""The constants of quantization for CUDA sources: what cuda/block_scale.cuh wants defined."""

SCALE_FORMATS = ("float32", "ue8m0")


class FP8Tensor(NamedTuple):
    """Quantized values and the scale of each block; element value = ``data * scale`` of its block.

    data: float8_e4m3fn (..., M, K).
    scale: float32, (..., M, ceil(K/128)) for 1x128 blocks, (..., ceil(M/128), ceil(K/128)) for 128x128 blocks, or of
        weights (..., M, 1) for output channels.
    """

    data: torch.Tensor
    scale: torch.Tensor


# So that torch.export.save and AOTInductor can write programs that take or return one.
_register_namedtuple(FP8Tensor, serialized_type_name="fp8moe.FP8Tensor")


def has_channel_scales(data: torch.Tensor, scale: torch.Tensor) -> bool:
    """Whether weights (..., N, K) have a scale for each of the N output channels: (..., N, 1)."""
    n = data.shape[-2]
    return n > 2 and scale.shape[-2:] == (n, 1)  # of one row of gate and one of up, each is a block too


def ceil_div(n: int, divisor: int) -> int:
    """n / divisor, rounded up."""
    return (n + divisor - 1) // divisor


def align(n: int, multiple: int) -> int:
    """The least multiple of ``multiple`` that is at least n."""
    return ceil_div(n, multiple) * multiple


def padded_rows(rows: int, groups: int) -> int:
    """A multiple of 128 that holds `rows` rows in `groups` groups, each padded to a multiple of 128, for any sizes."""
    return (rows + (BLOCK - 1) * torch.sym_min(groups, rows)) // BLOCK * BLOCK


def empty_mn_major(shape: tuple[int, ...], *, device: torch.device | str) -> torch.Tensor:
    """Uninitialized float32 scales (..., M, K blocks), MN-major: last strides (1, align(M, 4)).

    One column (the scales of one K block) is contiguous and starts at a multiple of 16 bytes, as TMA needs.
    """
    *lead, m, k_blocks = shape
    pitch = align(m, 4)
    strides = [1, pitch]
    stride = pitch * k_blocks
    for size in reversed(lead):
        strides.insert(0, stride)
        stride *= size
    return torch.empty_strided(shape, strides, dtype=torch.float32, device=device)


def empty_quantized(like: torch.Tensor, rows: int, columns: int) -> FP8Tensor:
    """Uninitialized data (rows, columns), contiguous, and MN-major scale of 1x128 blocks, on the device of `like`."""
    scale = like.new_empty_strided((rows, ceil_div(columns, BLOCK)), (1, align(rows, 4)), dtype=torch.float32)
    return FP8Tensor(like.new_empty((rows, columns), dtype=torch.float8_e4m3fn), scale)
