"""The traffic between the ranks of a group: rows (R, C) of any dtype, sent as bytes, and sums in the order of ranks."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from fp8moe.kernels.experts.combine import combine

# PyTorch 2.13 has renamed it.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def all_gather(group: ProcessGroup, rows: Tensor) -> Tensor:
    """The rows of all ranks, (W * R, C); every rank has as many."""
    out = rows.new_empty((dist.get_world_size(group) * rows.shape[0], rows.shape[1]))
    if out.numel():
        _all_gather(_bytes(out), _bytes(rows.contiguous()), group=group)
    return out


def exchange(
    group: ProcessGroup, rows: Tensor, sent: list[int] | None = None, received: list[int] | None = None
) -> Tensor:
    """An all-to-all: rows in the order of the ranks that they go to become rows in the order of those they come from.

    sent, received: how many rows go to each rank and come from each; None for as many to and from all.
    """
    if sent is None:
        out = torch.empty_like(rows, memory_format=torch.contiguous_format)
        if rows.numel():
            dist.all_to_all_single(_bytes(out), _bytes(rows.contiguous()), group=group)
        return out
    out = rows.new_empty((sum(received), rows.shape[1]))
    width = rows.shape[1] * rows.itemsize
    splits = [n * width for n in received], [n * width for n in sent]
    dist.all_to_all_single(_bytes(out), _bytes(rows.contiguous()), *splits, group=group)
    return out


def padded(rows: Tensor, count: int) -> Tensor:
    """The rows themselves, or a copy with `count` of them, the last ones zeros."""
    return rows if len(rows) == count else F.pad(rows, (0, 0, 0, count - len(rows)))


def rows_by_rank(ranks: int, size: int, tokens: int, device: torch.device) -> Tensor:
    """Indices (tokens, ranks) int32 of each token's rows in what `ranks` ranks have sent, `size` rows each."""
    return torch.arange(ranks * size, dtype=torch.int32, device=device).view(ranks, size).t()[:tokens]


def ordered_sum(rows: Tensor, row_index: Tensor, dtype: torch.dtype, residual: Tensor | None = None) -> Tensor:
    """The sum of each token's rows (R, C), in the order of row_index (T, W) int32: (T, C), rounded once."""
    ones = torch.ones(row_index.shape, dtype=torch.float32, device=row_index.device)
    return weighted_sum(rows, row_index, ones, dtype, residual)


def weighted_sum(
    rows: Tensor, row_index: Tensor, weights: Tensor, dtype: torch.dtype, residual: Tensor | None = None
) -> Tensor:
    """`combine` for any number of columns, and float16 too."""
    rows, columns = rows.float() if rows.dtype is torch.float16 else rows, rows.shape[1]
    if columns % 8 == 0:
        return combine(rows, row_index, weights, dtype, residual=residual)
    total = combine(F.pad(rows, (0, -columns % 8)), row_index, weights, dtype)[:, :columns]
    return total.contiguous() if residual is None else residual + total


def _bytes(value: Tensor) -> Tensor:
    # All backends know bytes; few know float8, and not all bfloat16.
    return value.view(torch.uint8).view(-1)
