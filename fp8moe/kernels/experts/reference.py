"""Routing, permutation and combination in plain PyTorch, on any device: they define what the CUDA kernels return."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fp8moe.quant import reference
from fp8moe.quant.formats import empty_mn_major


def sort_by_expert(
    top_k_index: Tensor,
    num_experts: int,
    capacity: int | None,
    first_expert: int = 0,
    first_row: int = 0,
    num_rows: int | None = None,
) -> tuple[Tensor, Tensor]:
    """top_k_index (T, K) -> groups (E + 1,) or, with a capacity, (E,); rows (T, K); both int32."""
    expert = top_k_index.flatten().long()
    local = (expert >= first_expert) & (expert < first_expert + num_experts)
    expert = torch.where(local, expert - first_expert, num_experts)
    order = expert.sort(stable=True).indices
    row = torch.empty_like(order)
    row[order] = torch.arange(order.numel(), device=order.device)
    counts = row.new_zeros(num_experts + 1).index_add_(0, expert, torch.ones_like(expert))
    offsets = counts.cumsum(0) - counts  # the last one is the number of local assignments
    if capacity is None:
        num_rows = row.numel() if num_rows is None else num_rows
        groups, row = (offsets - first_row).clamp(0, num_rows), row - first_row
        local &= valid_rows(row, num_rows)
    else:
        groups = counts[:-1].clamp(max=capacity)
        rank = row - offsets[expert]
        local &= rank < capacity
        row = expert * capacity + rank
    return groups.int(), torch.where(local, row, -1).int().view(top_k_index.shape)


def permute_quantize(x: Tensor, rows: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """x (T, H), rows (T, K) -> data (num_rows, H), MN-major scale (num_rows, ceil(H/128)).

    A row that nothing maps to holds some token.
    """
    return permute_fp8(*reference.quantize_1x128(x, False), rows, num_rows)


def permute_fp8(data: Tensor, scale: Tensor, rows: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Permute quantized tokens: data (T, H), scale (T, ceil(H/128))."""
    out_scale = empty_mn_major((num_rows, scale.shape[1]), device=data.device)
    tokens, top_k = rows.shape
    if tokens * top_k * num_rows == 0:
        return data.new_empty(num_rows, data.shape[1]), out_scale
    source = assignments_of(rows, num_rows).clamp(min=0) // top_k
    return data.view(torch.uint8)[source].view(data.dtype), out_scale.copy_(scale[source])


def combine(y: Tensor, rows: Tensor, weights: Tensor, out_dtype: torch.dtype, residual: Tensor | None = None) -> Tensor:
    """y (num_rows, H), rows and weights (T, K), residual (T, H) or None -> (T, H).

    Products and sums are float32, each rounded, k ascending.
    """
    num_rows, hidden = y.shape
    tokens, top_k = rows.shape
    total = torch.zeros(tokens, hidden, dtype=torch.float32, device=y.device)
    if num_rows:
        valid = valid_rows(rows, num_rows)
        row = torch.where(valid, rows, 0).long()
        for k in range(top_k):
            product = weights[:, k, None].float() * y[row[:, k]].float()
            total = torch.where(valid[:, k, None], total + product, total)
    return total.to(out_dtype) if residual is None else residual + total.to(out_dtype)


def dispatch(
    x: Tensor, index: Tensor, buffers: Sequence[tuple[Tensor, Tensor, Tensor]], rank: int, num_experts: int
) -> None:
    """Write x (N, H) and index (N, K) to the slots of `rank` in the buffers, which `Received` describes."""
    slots = buffers[0][0].shape[0] // len(buffers)
    end = rank * slots + x.shape[0]
    own, free = slice(rank * slots, end), slice(end, (rank + 1) * slots)
    values = reference.quantize_1x128(x, False)
    wanted = owners(index, len(buffers), num_experts)
    index = torch.where(index == index.int(), index, -1)
    for peer, (*parts, experts) in enumerate(buffers):
        for part, value in zip(parts, values, strict=True):
            part, value = (v.view(torch.uint8) if v.itemsize == 1 else v for v in (part[own], value))
            part.copy_(torch.where(wanted[:, peer, None].to(part.device), value.to(part.device), part))
        experts[own].copy_(index)
        experts[free] = -1


def owners(index: Tensor, ranks: int, num_experts: int) -> Tensor:
    """Return whether each rank has an expert of each token: index (T, K) -> (T, W) bool."""
    first = torch.arange(ranks, device=index.device)[:, None] * (num_experts // ranks)
    inside = (index[:, None] >= first) & (index[:, None] < first + num_experts // ranks)
    return inside.any(-1)


def assignments_of(rows: Tensor, count: int) -> Tensor:
    """The inverse of rows (T, K), (count,) int32: the assignment t * K + k that has each row, or -1."""
    # Assignments without a row share one past the end.
    target = torch.where(valid_rows(rows, count), rows, count).flatten().long()
    index = torch.arange(rows.numel(), dtype=torch.int32, device=rows.device)
    return index.new_full((count + 1,), -1).scatter_(0, target, index)[:count].clone()


def valid_rows(rows: Tensor, num_rows: int) -> Tensor:
    return (rows >= 0) & (rows < num_rows)
