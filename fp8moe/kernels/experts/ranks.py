"""Between ranks of tokens and of rows, for adapters of experts: the ranks of all experts (T, E * r), and for each row
(R, r) those of its expert.

Operators ``fp8moe::pick_ranks`` and ``fp8moe::spread_ranks``. The host waits for nothing.
"""

import torch
from torch import Tensor

from fp8moe.kernels.experts import ranks_plan
from fp8moe.runtime.backend import use_cuda
from fp8moe.runtime.operators import define


def pick_ranks(ranks: Tensor, index: Tensor, rows: Tensor, num_experts: int) -> Tensor:
    """For each row the ranks that its token has of its expert.

    ranks: (T, E * r) bfloat16, r a multiple of 8. index, rows: (T, K) int32, the expert and the row of each assignment,
    as `sort_by_expert` returns the rows: where one is -1 the index may be anything.
    Returns (T * K, r) bfloat16, uninitialized where no assignment has the row.
    """
    return torch.ops.fp8moe.pick_ranks(ranks, index, rows, num_experts)


def spread_ranks(picked: Tensor, weights: Tensor | None, index: Tensor, rows: Tensor, num_experts: int) -> Tensor:
    """For each token and expert the sum of the rows that the token has there, summed in float32 in their order.

    picked: (T * K, r) bfloat16. weights: (T, K) float32, of the rows; None: ones. index, rows: as for `pick_ranks`.
    Returns (T, E * r) bfloat16, zeros where a token has no row of the expert. Equal inputs give equal bits.
    """
    return torch.ops.fp8moe.spread_ranks(picked, weights, index, rows, num_experts)


def _pick(ranks: Tensor, index: Tensor, rows: Tensor, num_experts: int) -> Tensor:
    out = _pick_fake(ranks, index, rows, num_experts)
    if use_cuda(ranks):
        ranks_plan.pick_ranks(ranks, index, rows, num_experts, out)
        return out
    used = rows.flatten() >= 0
    token = torch.arange(len(rows), device=rows.device).repeat_interleave(rows.shape[1])
    place = (token * num_experts + index.flatten())[used]
    out[rows.flatten()[used]] = ranks.reshape(-1, out.shape[1])[place]
    return out


def _pick_fake(ranks: Tensor, index: Tensor, rows: Tensor, num_experts: int) -> Tensor:
    return ranks.new_empty((rows.shape[0] * rows.shape[1], ranks.shape[1] // num_experts))


def _spread(picked: Tensor, weights: Tensor | None, index: Tensor, rows: Tensor, num_experts: int) -> Tensor:
    if use_cuda(picked):
        out = _spread_fake(picked, weights, index, rows, num_experts)
        ranks_plan.spread_ranks(picked, weights, index, rows, out)
        return out
    values = torch.where(rows[..., None] >= 0, picked.float()[rows.clamp(min=0)], 0)
    if weights is not None:
        values = values * weights[..., None]
    chosen = index[:, None, :] == torch.arange(num_experts, device=index.device)[:, None]  # (T, E, K)
    return (chosen.float() @ values).flatten(1).bfloat16()


def _spread_fake(picked: Tensor, weights: Tensor | None, index: Tensor, rows: Tensor, num_experts: int) -> Tensor:
    return picked.new_empty((rows.shape[0], num_experts * picked.shape[1]))


define("pick_ranks(Tensor ranks, Tensor index, Tensor rows, int num_experts) -> Tensor", _pick, _pick_fake)
define(
    "spread_ranks(Tensor picked, Tensor? weights, Tensor index, Tensor rows, int num_experts) -> Tensor",
    _spread,
    _spread_fake,
)
