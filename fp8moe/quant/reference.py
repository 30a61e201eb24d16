"""Reference quantizers in plain PyTorch, on any device: they define what the CUDA kernels must return, bit for bit.

Per block: ``scale = max(amax, 1e-12) / 448`` and ``data = e4m3(x / scale)``, both quotients correctly rounded float32,
the cast saturating and to nearest even. A NaN makes its whole block NaN, an infinity the scale infinite, so that
``data * scale`` is NaN throughout. Nothing here waits for a GPU.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8moe.quant.formats import BLOCK, FP8_MAX, SCALE_FLOOR, ceil_div, empty_mn_major, padded_rows


class Results(NamedTuple):
    """Data and scale of R rows; of the transpose, whose groups are padded; and the offsets (E + 1,) of its groups.

    A kernel that quantizes rows alone leaves the last three None.
    """

    rows: Tensor
    row_scale: Tensor
    columns: Tensor | None = None
    column_scale: Tensor | None = None
    offsets: Tensor | None = None


def quantize_1x128(x: Tensor, ue8m0: bool) -> tuple[Tensor, Tensor]:
    """x (M, K) -> data (M, K), MN-major scale (M, ceil(K/128))."""
    rows, k = x.shape
    k_blocks = ceil_div(k, BLOCK)
    blocks = _pad(x.float(), rows, k_blocks * BLOCK).view(rows, k_blocks, BLOCK)
    scale = block_scale(blocks.abs().amax(-1), ue8m0)
    data = _cast(blocks / scale[..., None]).view(rows, k_blocks * BLOCK)[:, :k].contiguous()
    return data, empty_mn_major((rows, k_blocks), device=x.device).copy_(scale)


def quantize_128x128(w: Tensor, ue8m0: bool) -> tuple[Tensor, Tensor]:
    """w (E, N, K) -> data (E, N, K), contiguous scale (E, ceil(N/128), ceil(K/128))."""
    experts, n, k = w.shape
    n_blocks, k_blocks = ceil_div(n, BLOCK), ceil_div(k, BLOCK)
    padded = _pad(w.float(), n_blocks * BLOCK, k_blocks * BLOCK)
    blocks = padded.view(experts, n_blocks, BLOCK, k_blocks, BLOCK)
    scale = block_scale(blocks.abs().amax((-3, -1)), ue8m0)
    data = _cast(blocks / scale[:, :, None, :, None]).view_as(padded)[:, :n, :k].contiguous()
    return data, scale


def quantize_with_transpose(
    x: Tensor, group_offsets: Tensor | None, tokens: Tensor | None, row_weights: Tensor | None
) -> Results:
    """What ``quant.transpose.quantize_with_transpose`` describes; every row is quantized, also those of no group."""
    rows, used = x, None
    if tokens is not None:
        used = (tokens >= 0) & (tokens < x.shape[0])
        rows = gather(x, tokens, used)
    if row_weights is None:
        return both_ways(rows, rows, group_offsets)
    if used is not None:
        row_weights = torch.where(used, row_weights, 0)
    return both_ways(rows, rows.float() * row_weights[:, None], group_offsets)


def both_ways(rows: Tensor, weighted: Tensor, group_offsets: Tensor | None) -> Results:
    """`rows` (R, F) row by row, and `weighted` (R, F) transposed with every group padded."""
    starts, ends, offsets = pad_groups(group_offsets, rows.shape[0], rows.device)
    column = torch.arange(padded_rows(rows.shape[0], len(starts)), device=rows.device)
    group = (torch.searchsorted(offsets, column, right=True) - 1).clamp(max=len(starts) - 1)
    row = starts[group] + column - offsets[group]
    padded = gather(weighted, row, (row < ends[group]) & (column < offsets[-1]))
    return Results(*quantize_1x128(rows, False), *quantize_1x128(padded.t(), False), offsets.int())


def pad_groups(group_offsets: Tensor | None, rows: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """First row and end of each of E groups, and the offsets (E+1,) of the padded groups; None: one group of `rows`."""
    if group_offsets is None:
        group_offsets = torch.arange(2, device=device) * rows
    starts = group_offsets[:-1].long().clamp(0, rows)
    ends = group_offsets[1:].long().clamp(max=rows).maximum(starts)
    sizes = (ends - starts + BLOCK - 1) // BLOCK * BLOCK
    # The sum is more than there are columns only where groups overlap.
    ends_padded = sizes.cumsum(0).clamp(max=padded_rows(rows, len(sizes)))
    return starts, ends, torch.cat([sizes.new_zeros(1), ends_padded])


def gather(x: Tensor, index: Tensor, used: Tensor) -> Tensor:
    """Rows of x (M, F) at `index` (N,), zeros where not `used` (N,)."""
    if not x.shape[0]:
        return x.new_zeros(len(index), x.shape[1])
    return torch.where(used[:, None], x[torch.where(used, index, 0).long()], 0)


def block_scale(amax: Tensor, ue8m0: bool) -> Tensor:
    """Scale of blocks whose largest magnitudes are ``amax`` (float32). Every NaN comes out as 0x7fc00000."""
    # By a tensor: PyTorch divides by a number as a multiplication with its reciprocal on a GPU.
    scale = amax.clamp(min=SCALE_FLOOR) / amax.new_tensor(FP8_MAX)
    if ue8m0:
        scale = up_to_power_of_two(scale)
    return torch.where(amax.isnan(), torch.nan, scale)


def up_to_power_of_two(scale: Tensor) -> Tensor:
    """Positive float32 values rounded up to powers of two."""
    # Adding the full mantissa carries into the exponent unless the mantissa was zero.
    return ((scale.view(torch.int32) + 0x7FFFFF) & ~0x7FFFFF).view(torch.float32)


def _pad(x: Tensor, rows: int, columns: int) -> Tensor:
    """Zeros after the last row and column; contiguous."""
    return F.pad(x, (0, columns - x.shape[-1], 0, rows - x.shape[-2])).contiguous()


def _cast(quotient: Tensor) -> Tensor:
    """Saturating cast to E4M3. Every NaN becomes the positive one (0x7f), as it does in the GPU's instruction."""
    saturated = quotient.clamp(-FP8_MAX, FP8_MAX)
    return torch.where(saturated.isnan(), torch.nan, saturated).to(torch.float8_e4m3fn)
