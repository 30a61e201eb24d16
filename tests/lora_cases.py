"""Operands and exact results for the tests of `kernels.experts.lora`."""

import torch


def operands(sizes, width, rank, tokens=None, seed=0, *, rest=3, device="cpu"):
    """x, factors (E, r, width), ranks (R, r), offsets (E + 1,) and the tokens of the R rows, all random.

    tokens: how many rows x has, from which the R rows are gathered; None: it has R, and there are no tokens. rest: rows
    of no group, behind the last; their tokens are -1, as in `assignments_of`.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = sum(sizes) + rest

    def random(*shape):
        return torch.randn(*shape, generator=generator).bfloat16()

    x, factors, ranks = random(tokens or rows, width), random(len(sizes), rank, width), random(rows, rank)
    offsets = torch.tensor([0, *sizes]).cumsum(0).int()
    index = None
    if tokens is not None:
        index = torch.randint(0, tokens, (rows,), generator=generator, dtype=torch.int32)
        index[sum(sizes) :] = -1
    return [value if value is None else value.to(device) for value in (x, factors, ranks, offsets, index)]


def exact(x, factors, ranks, offsets, tokens):
    """`lora_shrink`, zeros in rows of no group, and `lora_gradient` in float64."""
    rows = (x if tokens is None else x[tokens.clamp(min=0)]).double()
    shrunk = torch.zeros(len(rows), factors.shape[1], dtype=torch.float64, device=x.device)
    gradient = torch.zeros_like(factors, dtype=torch.float64)
    bounds = offsets.tolist()
    for e, (start, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        shrunk[start:end] = rows[start:end] @ factors[e].double().T
        gradient[e] = ranks[start:end].double().T @ rows[start:end]
    return shrunk, gradient
