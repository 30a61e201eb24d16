"""The transposing quantizer in plain PyTorch, on any device: it defines what the CUDA kernel must return, bit for bit.

Nothing here waits for a GPU. Arguments are checked by the callers.
"""

import torch
from torch import Tensor

from fp8moe.quant import reference
from fp8moe.quant.formats import BLOCK, padded_rows

Results = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""Data and scale of the rows, data and scale of the columns, padded offsets."""


def quantize_with_transpose(
    x: Tensor, group_offsets: Tensor | None, tokens: Tensor | None, row_weights: Tensor | None
) -> Results:
    """What ``quant.transpose.quantize_with_transpose`` describes; every row is quantized, also those of no group."""
    rows, used = x, None
    if tokens is not None:
        used = (tokens >= 0) & (tokens < x.shape[0])
        rows = gather(x, tokens, used)
    if row_weights is None:
        return quantize(rows, rows, group_offsets)
    if used is not None:
        row_weights = torch.where(used, row_weights, 0)
    return quantize(rows, rows.float() * row_weights[:, None], group_offsets)


def quantize(rows: Tensor, weighted: Tensor, group_offsets: Tensor | None) -> Results:
    """`rows` (R, F) row by row, and `weighted` (R, F) transposed with every group padded."""
    starts, ends, offsets = pad_groups(group_offsets, rows.shape[0], rows.device)
    column = torch.arange(padded_rows(rows.shape[0], len(starts)), device=rows.device)
    group = (torch.searchsorted(offsets, column, right=True) - 1).clamp(max=len(starts) - 1)
    row = starts[group] + column - offsets[group]
    padded = gather(weighted, row, (row < ends[group]) & (column < offsets[-1]))
    return *reference.quantize_1x128(rows, False), *reference.quantize_1x128(padded.t(), False), offsets.int()


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
