"""FP8 E4M3 tensors with one float32 scale per block: the pair of tensors, constants, and the layout of scales."""

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


def has_channel_scales(data: torch.Tensor, scale: torch.Tensor) -> bool:
    """Return whether weights (..., N, K) have one scale per output channel: (..., N, 1)."""
    n = data.shape[-2]
    return n > 2 and scale.shape[-2:] == (n, 1)  # with N = 1 or 2, block scales can have the shape (..., N, 1), too


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
    return (rows + (BLOCK - 1) * torch.sym_min(groups, rows)) // BLOCK * BLOCK


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


def empty_quantized(like: torch.Tensor, rows: int, columns: int) -> FP8Tensor:
    """Return uninitialized data (rows, columns), contiguous, and MN-major scales of 1x128 blocks.

    like: a tensor on the device where the results are allocated.
    """
    scale = like.new_empty_strided((rows, ceil_div(columns, BLOCK)), (1, align(rows, 4)), dtype=torch.float32)
    return FP8Tensor(like.new_empty((rows, columns), dtype=torch.float8_e4m3fn), scale)
