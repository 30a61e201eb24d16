"""Operands of latent attention, and checks of their dtypes, shapes and devices.

Values on the device, such as lengths and indices, are not checked: kernels clamp or skip them.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fp8moe.quant.formats import ceil_div
from fp8moe.runtime.checks import FLOATING, check_contiguous, check_device, check_dtype, check_like

BLOCK_TOKENS = 64
"""Latents in a block of a paged cache."""

GROUP = 128
"""Values of a latent in FP8 that share a scale."""


def coded_bytes(width: int, value_size: int) -> int:
    """Return the bytes of a latent in FP8: codes and float32 scales of the value, and the rest in bfloat16."""
    return value_size + 4 * ceil_div(value_size, GROUP) + 2 * (width - value_size)


class LatentOperands(NamedTuple):
    """Operands of `latent_attention`."""

    q: Tensor
    latents: Tensor
    lengths: Tensor
    indices: Tensor | None
    block_table: Tensor | None
    begin: Tensor | None
    value_size: int
    scale: float

    @property
    def coded(self) -> bool:
        """Whether the latents are in FP8."""
        return self.latents.dtype is torch.uint8

    @property
    def limit(self) -> int:
        """The most latents that a sequence can have."""
        return self.latents.shape[1] * (1 if self.block_table is None else self.block_table.shape[1])


def operands(given: LatentOperands) -> None:
    """Check dtypes, shapes and devices."""
    q, latents, lengths, indices, block_table, begin, value_size, _ = given
    check_dtype("q", q, *FLOATING)
    if q.dim() != 4:
        raise ValueError(f"q: expected shape (B, T, heads, R + P), got {tuple(q.shape)}")
    batch, queries, _, width = q.shape
    if not 0 < value_size <= width:
        raise ValueError(f"value_size: expected 1 to {width}, the values of a latent, got {value_size}")
    check_dtype("latents", latents, q.dtype, torch.uint8)
    check_device("latents", latents, q.device, "q")
    size = coded_bytes(width, value_size) if given.coded else width
    first, dimensions = (batch, f"({batch}, L, {size})") if block_table is None else (None, f"(blocks, 64, {size})")
    fits = latents.dim() == 3 and latents.shape[2] == size
    if not fits or (latents.shape[0] != first if block_table is None else latents.shape[1] != BLOCK_TOKENS):
        raise ValueError(f"latents: expected shape {dimensions} to match q, got {tuple(latents.shape)}")
    check_contiguous("latents", latents)
    check_like("lengths", lengths, (torch.int32,), (batch,), q.device, "q")
    if indices is not None:
        check_dtype("indices", indices, torch.int32)
        if indices.dim() != 3 or indices.shape[:2] != (batch, queries):
            raise ValueError(f"indices: expected shape {(batch, queries)} and k, got {tuple(indices.shape)}")
        check_device("indices", indices, q.device, "q")
    if block_table is not None:
        check_dtype("block_table", block_table, torch.int32)
        if block_table.dim() != 2 or block_table.shape[0] != batch:
            raise ValueError(f"block_table: expected shape ({batch}, max_blocks), got {tuple(block_table.shape)}")
        check_device("block_table", block_table, q.device, "q")
    if begin is not None:
        check_like("begin", begin, (torch.int32,), (batch,), q.device, "q")
        if indices is not None or block_table is not None:
            raise ValueError("begin: expected None with indices or a block_table")
