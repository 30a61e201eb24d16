"""Reference quantizers in plain PyTorch, on any device: they define the results of the CUDA kernels bit for bit.

Per block: ``scale = max(amax, 1e-12) / 448`` and ``data = e4m3(x / scale)``. Both quotients are correctly rounded to
float32; the cast saturates and rounds to nearest even. A NaN makes its whole block NaN; an infinity makes the scale
infinite, so that ``data * scale`` is NaN throughout. No function here synchronizes with a GPU.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8moe.quant.formats import BLOCK, FP8_MAX, SCALE_FLOOR, ceil_div, empty_mn_major, padded_rows


class Results(NamedTuple):
    """R rows quantized, and optionally their transpose quantized, with every group padded to a multiple of 128.

    rows, row_scale: data and scale of the rows. columns, column_scale: data and scale of the transpose. offsets:
    (E + 1,), where each padded group begins in the transpose. The last three are None if only rows are quantized.
    """

    rows: Tensor
    row_scale: Tensor
    columns: Tensor | None = None
    column_scale: Tensor | None = None
    offsets: Tensor | None = None


def quantize_1x128(x: Tensor, ue8m0: bool) -> tuple[Tensor, Tensor]:
    """Quantize x (M, K) to data (M, K) and MN-major scale (M, ceil(K/128))."""
    rows, k = x.shape
    k_blocks = ceil_div(k, BLOCK)
    blocks = _pad(x.float(), rows, k_blocks * BLOCK).view(rows, k_blocks, BLOCK)
    scale = block_scale(blocks.abs().amax(-1), ue8m0)
    data = _cast(blocks / scale[..., None]).view(rows, k_blocks * BLOCK)[:, :k].contiguous()
    return data, empty_mn_major((rows, k_blocks), device=x.device).copy_(scale)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize x (..., K) with one scale per row: data (..., K) and scale (..., 1)."""
    scale = block_scale(x.float().abs().amax(-1, keepdim=True), False)
    return _cast(x.float() / scale), scale


def quantize_128x128(w: Tensor, ue8m0: bool) -> tuple[Tensor, Tensor]:
    """Quantize w (E, N, K) to data (E, N, K) and contiguous scale (E, ceil(N/128), ceil(K/128))."""
    experts, n, k = w.shape
    n_blocks, k_blocks = ceil_div(n, BLOCK), ceil_div(k, BLOCK)
    padded = _pad(w.float(), n_blocks * BLOCK, k_blocks * BLOCK)
    blocks = padded.view(experts, n_blocks, BLOCK, k_blocks, BLOCK)
    scale = block_scale(blocks.abs().amax((-3, -1)), ue8m0)
    data = _cast(blocks / scale[:, :, None, :, None]).view_as(padded)[:, :n, :k].contiguous()
    return data, scale


def quantize_with_transpose(
    x: Tensor, group_offsets: Tensor | None, tokens: Tensor | None, blocks: bool = False
) -> Results:
    """Compute ``quant.transpose.quantize_with_transpose``. Rows outside all groups are quantized too."""
    return both_ways(_rows_of(x, tokens), group_offsets, blocks)


def quantize_columns(x: Tensor, group_offsets: Tensor | None, tokens: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ``quant.transpose.quantize_columns``: data, scale and offsets."""
    return by_columns(_rows_of(x, tokens), group_offsets, blocks=True)


def _rows_of(x: Tensor, tokens: Tensor | None) -> Tensor:
    """Return x, or its rows at `tokens` (R,), zeros where there is no such row."""
    return x if tokens is None else gather(x, tokens, (tokens >= 0) & (tokens < x.shape[0]))


def both_ways(rows: Tensor, group_offsets: Tensor | None, blocks: bool = False) -> Results:
    """Quantize `rows` (R, F), and their transpose as `by_columns` does."""
    return Results(*quantize_1x128(rows, False), *by_columns(rows, group_offsets, blocks))


def by_columns(x: Tensor, group_offsets: Tensor | None, blocks: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize the transpose of x (R, F) with every group padded to a multiple of 128: data, scale and offsets.

    blocks: in blocks of 128x128, not of 1x128.
    """
    starts, ends, offsets = pad_groups(group_offsets, x.shape[0], x.device)
    column = torch.arange(padded_rows(x.shape[0], len(starts)), device=x.device)
    group = (torch.searchsorted(offsets, column, right=True) - 1).clamp(max=len(starts) - 1)
    row = starts[group] + column - offsets[group]
    padded = gather(x, row, (row < ends[group]) & (column < offsets[-1]))
    return *(quantize_finite(padded.t()) if blocks else quantize_1x128(padded.t(), False)), offsets.int()


def quantize_finite(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize x (N, K) in blocks of 128x128, whose scales are those of their finite values; others become NaN.

    Returns data (N, K) and MN-major scale (ceil(N/128), ceil(K/128)).
    """
    x = x.contiguous()
    finite = x.isfinite()
    (data,), (scale,) = quantize_128x128(torch.where(finite, x, 0)[None], False)
    data = torch.where(finite, data.view(torch.uint8), 0x7F).view(data.dtype)
    return data, empty_mn_major(scale.shape, device=x.device).copy_(scale)


def pad_groups(group_offsets: Tensor | None, rows: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return first row (E,) and end (E,) of each group, and offsets (E+1,) of groups padded to multiples of 128.

    group_offsets: None for one group of all rows.
    """
    if group_offsets is None:
        group_offsets = torch.arange(2, device=device) * rows
    starts = group_offsets[:-1].long().clamp(0, rows)
    ends = group_offsets[1:].long().clamp(max=rows).maximum(starts)
    sizes = (ends - starts + BLOCK - 1) // BLOCK * BLOCK
    # The clamp matters only if groups overlap: then their padded sizes may sum to more than the number of columns.
    ends_padded = sizes.cumsum(0).clamp(max=padded_rows(rows, len(sizes)))
    return starts, ends, torch.cat([sizes.new_zeros(1), ends_padded])


def gather(x: Tensor, index: Tensor, used: Tensor) -> Tensor:
    """Return the rows of x (M, F) at `index` (N,), zeros where `used` (N,) is false."""
    if not x.shape[0]:
        return x.new_zeros(len(index), x.shape[1])
    return torch.where(used[:, None], x[torch.where(used, index, 0).long()], 0)


def block_scale(amax: Tensor, ue8m0: bool) -> Tensor:
    """Return the scales of blocks from their largest magnitudes ``amax`` (float32). Any NaN becomes NaN 0x7fc00000."""
    # Divide by a tensor, because on a GPU PyTorch replaces division by a number with multiplication by a reciprocal.
    scale = amax.clamp(min=SCALE_FLOOR) / amax.new_full((), FP8_MAX)
    if ue8m0:
        scale = up_to_power_of_two(scale)
    return torch.where(amax.isnan(), torch.nan, scale)


def up_to_power_of_two(scale: Tensor) -> Tensor:
    """Round positive float32 values up to powers of two."""
    # Adding the full mantissa carries into the exponent unless the mantissa was zero.
    return ((scale.view(torch.int32) + 0x7FFFFF) & ~0x7FFFFF).view(torch.float32)


def _pad(x: Tensor, rows: int, columns: int) -> Tensor:
    """Return x (..., M, F) padded with zeros to (..., rows, columns), contiguous."""
    return F.pad(x, (0, columns - x.shape[-1], 0, rows - x.shape[-2])).contiguous()


def _cast(quotient: Tensor) -> Tensor:
    """Cast to E4M3, saturating. Any NaN becomes the byte 0x7f, as with the GPU's conversion instruction."""
    saturated = quotient.clamp(-FP8_MAX, FP8_MAX)
    return torch.where(saturated.isnan(), torch.nan, saturated).to(torch.float8_e4m3fn)
