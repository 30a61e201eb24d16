"""Products of LoRA's factors with rows of experts: to their ranks, ``lora_shrink``, and ``lora_gradient`` of factors.

Operands are bfloat16, sums float32, results rounded to bfloat16. Operators ``fp8moe::lora_shrink`` and
``fp8moe::lora_gradient``. From ranks to outputs the FP8 GEMMs add the product (`kernels.gemm.grouped.grouped_rows`).
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from fp8moe.kernels.experts import lora_plan
from fp8moe.runtime.backend import use_cuda
from fp8moe.runtime.checks import check_dtype, check_like
from fp8moe.runtime.operator import define


def lora_shrink(x: Tensor, factors: Tensor, group_offsets: Tensor, tokens: Tensor | None = None) -> Tensor:
    """``x[rows of e] @ factors[e].T``: LoRA, arXiv:2106.09685, by groups as in Punica, arXiv:2310.18547, section 4.

    x: (R, K) bfloat16, or with tokens (T, K), of which row i of R is ``x[tokens[i]]``. K a multiple of 8.
    factors: (E, r, K) bfloat16, r a multiple of 16.
    group_offsets: (E + 1,) int32, where the groups begin in ascending order, all within the R rows.
    tokens: (R,) int32.
    Returns (R, r) bfloat16; rows of no group are uninitialized. Equal inputs give equal bits.

    Raises ValueError for a wrong shape or device, TypeError for a wrong dtype.
    """
    return torch.ops.fp8moe.lora_shrink(x, factors, group_offsets, tokens)


def lora_gradient(ranks: Tensor, x: Tensor, group_offsets: Tensor, tokens: Tensor | None = None) -> Tensor:
    """``ranks[rows of e].T @ x[rows of e]``, (E, r, N) bfloat16, zeros for a group without rows.

    ranks: (R, r) bfloat16, r a multiple of 16. x: (R, N) bfloat16, or with tokens (T, N); N a multiple of 8.
    The others, errors and bits are those of `lora_shrink`.
    """
    return torch.ops.fp8moe.lora_gradient(ranks, x, group_offsets, tokens)


def _check(x: Tensor, rank: int, group_offsets: Tensor, experts: int, tokens: Tensor | None) -> int:
    """What both products take; returns R."""
    check_dtype("x", x, torch.bfloat16)
    if rank % 16 or not rank:
        raise ValueError(f"expected a multiple of 16 ranks (pad with zeros), got {rank}")
    if x.shape[1] % 8:
        raise ValueError(f"x: expected a multiple of 8 columns (pad with zeros), got {x.shape[1]}")
    check_like("group_offsets", group_offsets, (torch.int32,), (experts + 1,), x.device, "x")
    if tokens is None:
        return x.shape[0]
    check_like("tokens", tokens, (torch.int32,), tuple(tokens.shape[:1]), x.device, "x")
    return tokens.shape[0]


def _groups(group_offsets: Tensor) -> Iterator[tuple[int, slice]]:
    """Each group that has rows, and these."""
    offsets = group_offsets.tolist()
    for group, (start, end) in enumerate(zip(offsets, offsets[1:], strict=False)):
        if start < end:
            yield group, slice(start, end)


def _source(x: Tensor, tokens: Tensor | None, rows: slice) -> Tensor:
    return (x[rows] if tokens is None else x[tokens[rows]]).float()


def _shrink(x: Tensor, factors: Tensor, group_offsets: Tensor, tokens: Tensor | None) -> Tensor:
    out = _shrink_fake(x, factors, group_offsets, tokens)
    if use_cuda(x):
        lora_plan.lora_shrink(x, factors, group_offsets, tokens, out)
        return out
    with torch.autocast(x.device.type, enabled=False):
        for group, rows in _groups(group_offsets):
            out[rows] = (_source(x, tokens, rows) @ factors[group].float().T).bfloat16()
    return out


def _shrink_fake(x: Tensor, factors: Tensor, group_offsets: Tensor, tokens: Tensor | None) -> Tensor:
    experts, rank = factors.shape[:2]
    check_like("factors", factors, (torch.bfloat16,), (experts, rank, x.shape[1]), x.device, "x")
    return x.new_empty((_check(x, rank, group_offsets, experts, tokens), rank))


def _gradient(ranks: Tensor, x: Tensor, group_offsets: Tensor, tokens: Tensor | None) -> Tensor:
    out = _gradient_fake(ranks, x, group_offsets, tokens)
    if use_cuda(x):
        lora_plan.lora_gradient(ranks, x, group_offsets, tokens, out)
        return out
    out.zero_()
    with torch.autocast(x.device.type, enabled=False):
        for group, rows in _groups(group_offsets):
            out[group] = (ranks[rows].float().T @ _source(x, tokens, rows)).bfloat16()
    return out


def _gradient_fake(ranks: Tensor, x: Tensor, group_offsets: Tensor, tokens: Tensor | None) -> Tensor:
    experts, rank = group_offsets.shape[0] - 1, ranks.shape[1]
    rows = _check(x, rank, group_offsets, experts, tokens)
    check_like("ranks", ranks, (torch.bfloat16,), (rows, rank), x.device, "x")
    return x.new_empty((experts, rank, x.shape[1]))


define("lora_shrink(Tensor x, Tensor factors, Tensor group_offsets, Tensor? tokens) -> Tensor", _shrink, _shrink_fake)
define(
    "lora_gradient(Tensor ranks, Tensor x, Tensor group_offsets, Tensor? tokens) -> Tensor", _gradient, _gradient_fake
)
