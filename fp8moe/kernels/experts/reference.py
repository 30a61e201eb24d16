"""Routing, permutation and combination in plain PyTorch, on any device: they define what the CUDA kernels return.

None waits for a GPU. Arguments are checked by the callers.
"""

import torch
from torch import Tensor

from fp8moe.quant import reference
from fp8moe.quant.formats import BLOCK, ceil_div, empty_mn_major


def sort_by_expert(top_k_index: Tensor, num_experts: int, capacity: int | None) -> tuple[Tensor, Tensor]:
    """top_k_index (T, K) -> groups (E + 1,) or, with a capacity, (E,); rows (T, K); both int32."""
    expert = top_k_index.flatten().long()
    local = (expert >= 0) & (expert < num_experts)
    expert = torch.where(local, expert, num_experts)
    order = expert.sort(stable=True).indices
    row = torch.empty_like(order)
    row[order] = torch.arange(order.numel(), device=order.device)
    counts = row.new_zeros(num_experts + 1).index_add_(0, expert, torch.ones_like(expert))
    offsets = counts.cumsum(0) - counts  # the last one is the number of local assignments
    groups = offsets
    if capacity is not None:
        groups = counts[:-1].clamp(max=capacity)
        rank = row - offsets[expert]
        local &= rank < capacity
        row = expert * capacity + rank
    return groups.int(), torch.where(local, row, -1).int().view(top_k_index.shape)


def permute_quantize(x: Tensor, rows: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """x (T, H), rows (T, K) -> data (num_rows, H), MN-major scale (num_rows, ceil(H/128)).

    A row that nothing maps to holds some token.
    """
    data, scale = reference.quantize_1x128(x, False)
    tokens, top_k = rows.shape
    if tokens * top_k * num_rows == 0:
        return data.new_empty(num_rows, x.shape[1]), empty_mn_major(num_rows, scale.shape[1], device=x.device)
    # Assignments without a row share one past the end.
    target = torch.where(valid_rows(rows, num_rows), rows, num_rows).flatten().long()
    token = torch.arange(tokens, device=x.device).repeat_interleave(top_k)
    source = token.new_zeros(num_rows + 1).scatter_(0, target, token)[:num_rows]
    permuted = data.view(torch.uint8)[source].view(data.dtype)
    out_scale = empty_mn_major(num_rows, ceil_div(x.shape[1], BLOCK), device=x.device)
    return permuted, out_scale.copy_(scale[source])


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


def valid_rows(rows: Tensor, num_rows: int) -> Tensor:
    return (rows >= 0) & (rows < num_rows)
