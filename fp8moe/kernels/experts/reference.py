"""Sorting, permuting and combining in plain PyTorch, on any device: these define the results of the CUDA kernels."""

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
    """Compute `routing.sort_by_expert`, with equal arguments: return groups and rows.

    top_k_index (T, K) -> groups int32 (E + 1,), or (E,) with a capacity; rows int32 (T, K).
    """
    expert = top_k_index.flatten().long()
    local = (expert >= first_expert) & (expert < first_expert + num_experts)
    expert = torch.where(local, expert - first_expert, num_experts)
    order = expert.sort(stable=True).indices
    row = torch.empty_like(order)
    row[order] = torch.arange(order.numel(), device=order.device)
    counts = row.new_zeros(num_experts + 1).index_add_(0, expert, torch.ones_like(expert))
    offsets = counts.cumsum(0) - counts  # offsets[num_experts] is the number of assignments to experts on this rank
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
    """Quantize tokens 1x128, and copy each token to its rows; a row without an assignment gets an arbitrary token.

    x (T, H), rows (T, K) -> data (num_rows, H), MN-major scale (num_rows, ceil(H/128)).
    """
    return permute_fp8(*reference.quantize_1x128(x, False), rows, num_rows)


def permute_fp8(data: Tensor, scale: Tensor, rows: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Copy quantized tokens to their rows: data (T, H), scale (T, ceil(H/128)), rows (T, K)."""
    out_scale = empty_mn_major((num_rows, scale.shape[1]), device=data.device)
    tokens, top_k = rows.shape
    if tokens * top_k * num_rows == 0:
        return data.new_empty(num_rows, data.shape[1]), out_scale
    source = assignments_of(rows, num_rows).clamp(min=0) // top_k
    return data.view(torch.uint8)[source].view(data.dtype), out_scale.copy_(scale[source])


def combine(y: Tensor, rows: Tensor, weights: Tensor, out_dtype: torch.dtype, residual: Tensor | None = None) -> Tensor:
    """Return each token's weighted sum of its rows, plus its residual if there is one.

    y (num_rows, H), rows and weights (T, K), residual (T, H) or None -> (T, H). Products are added in the order of k;
    each product and each sum is rounded to float32.
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
    """Quantize x (N, H) and write it and index (N, K) to the slots of sender `rank` in every peer's `Received`."""
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
    """Return which ranks hold an expert of each token: index (T, K) -> bool (T, W), W = ranks."""
    first = torch.arange(ranks, device=index.device)[:, None] * (num_experts // ranks)
    inside = (index[:, None] >= first) & (index[:, None] < first + num_experts // ranks)
    return inside.any(-1)


def assignments_of(rows: Tensor, count: int) -> Tensor:
    """Invert rows (T, K): return int32 (count,), the assignment t * K + k of each row below `count`, or -1."""
    # Assignments without a row all write to an extra row past the end, which is cut off.
    target = torch.where(valid_rows(rows, count), rows, count).flatten().long()
    index = torch.arange(rows.numel(), dtype=torch.int32, device=rows.device)
    return index.new_full((count + 1,), -1).scatter_(0, target, index)[:count].clone()


def assigned_rows(groups: Tensor, rows: Tensor, weights: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    if not rows.numel():
        return rows.new_full((num_rows,), -1), weights.new_zeros(num_rows, dtype=torch.float32)
    assignments = assignments_of(rows, num_rows)
    picked = weights.flatten().index_select(0, assignments.clamp(min=0)).float()
    tokens = assignments.div(rows.shape[1], rounding_mode="floor").to(torch.int32)
    return tokens, torch.where(assignments >= 0, picked, 0)


def valid_rows(rows: Tensor, num_rows: int) -> Tensor:
    return (rows >= 0) & (rows < num_rows)
