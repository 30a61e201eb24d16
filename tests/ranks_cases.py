"""Operands and exact results for the tests of `kernels.experts.ranks`."""

import torch

from fp8moe.kernels.experts.routing import sort_by_expert


def operands(tokens, num_experts, top_k, r, seed=0, *, device="cpu"):
    """ranks (T, E * r), picked (T * K, r), weights (T, K), index and rows (T, K), some without a row."""
    generator = torch.Generator().manual_seed(seed)
    ranks, picked = (
        torch.randn(count, width, generator=generator).bfloat16()
        for count, width in ((tokens, num_experts * r), (tokens * top_k, r))
    )
    weights = torch.rand(tokens, top_k, generator=generator)
    index = torch.randint(-1, num_experts + 1, (tokens, top_k), generator=generator, dtype=torch.int32)
    rows = sort_by_expert(index, num_experts).rows
    return [value.to(device) for value in (ranks, picked, weights, index, rows)]


def expected_pick(ranks, index, rows, num_experts):
    """`pick_ranks` one by one, zeros in rows that no assignment has."""
    ranks = ranks.unflatten(1, (num_experts, -1))
    out = ranks.new_zeros(rows.numel(), ranks.shape[2])
    for token, (experts, targets) in enumerate(zip(index.tolist(), rows.tolist(), strict=True)):
        for expert, row in zip(experts, targets, strict=True):
            if row >= 0:
                out[row] = ranks[token, expert]
    return out


def expected_spread(picked, weights, index, rows, num_experts):
    """`spread_ranks` one by one, in float64."""
    out = torch.zeros(len(rows), num_experts, picked.shape[1], dtype=torch.float64, device=picked.device)
    for token, (experts, sources) in enumerate(zip(index.tolist(), rows.tolist(), strict=True)):
        for k, (expert, row) in enumerate(zip(experts, sources, strict=True)):
            if row >= 0:
                out[token, expert] += picked[row].double() * (1 if weights is None else weights[token, k].double())
    return out.flatten(1)
