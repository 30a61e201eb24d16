"""Products of LoRA's factors with rows of experts: to their ranks, ``lora_shrink``, and ``lora_gradient`` of factors.

Operands are bfloat16, sums float32, results rounded to bfloat16. Operators ``fp8moe::lora_shrink`` and
``fp8moe::lora_gradient``. From ranks to outputs the FP8 GEMMs add the product (`kernels.gemm.grouped.grouped_rows`).
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from fp8moe.kernels.experts import lora_plan
from fp8moe.runtime.backend import use_cuda
from fp8moe.runtime.operators import define


def lora_shrink(x: Tensor, factors: Tensor, group_offsets: Tensor, tokens: Tensor | None = None) -> Tensor:
    """``x[rows of e] @ factors[e].T``: LoRA, arXiv:2106.09685, by groups as in Punica, arXiv:2310.18547, section 4.

    x: (R, K) bfloat16, or with tokens (T, K), of which row i of R is ``x[tokens[i]]``. K a multiple of 8.
    factors: (E, r, K) bfloat16, r a multiple of 16.
    group_offsets: (E + 1,) int32, where the groups begin in ascending order, all within the R rows.
    tokens: (R,) int32.
    Returns (R, r) bfloat16; rows of no group are uninitialized. Equal inputs give equal bits.

    Raises ValueError for a wrong shape, TypeError for a wrong dtype.
    """
    return torch.ops.fp8moe.lora_shrink(x, factors, group_offsets, tokens)


def lora_gradient(ranks: Tensor, x: Tensor, group_offsets: Tensor, tokens: Tensor | None = None) -> Tensor:
    """``ranks[rows of e].T @ x[rows of e]``, (E, r, N) bfloat16, zeros for a group without rows.

    ranks: (R, r) bfloat16, r a multiple of 16. x: (R, N) bfloat16, or with tokens (T, N); N a multiple of 8.
    The others, errors and bits are those of `lora_shrink`.
    """
    return torch.ops.fp8moe.lora_gradient(ranks, x, group_offsets, tokens)


def _check(rank: int, width: int, tokens: Tensor | None, **operands: Tensor) -> None:
    for name, value in operands.items():
        if value.dtype is not torch.bfloat16:
            raise TypeError(f"{name}: expected torch.bfloat16, got {value.dtype}")
    if rank % 16 or not rank:
        raise ValueError(f"expected a multiple of 16 ranks (pad with zeros), got {rank}")
    if width % 8:
        raise ValueError(f"x: expected a multiple of 8 columns (pad with zeros), got {width}")
    if tokens is not None and tokens.dtype is not torch.int32:
        raise TypeError(f"tokens: expected torch.int32, got {tokens.dtype}")


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
    experts, ranks, width = factors.shape
    _check(ranks, width, tokens, x=x, factors=factors)
    if x.shape[1] != width or group_offsets.shape != (experts + 1,):
        sizes = f"{tuple(x.shape)}, {tuple(factors.shape)} and {tuple(group_offsets.shape)}"
        raise ValueError(f"x, factors, group_offsets: expected (R, K), (E, r, K) and (E + 1,), got {sizes}")
    return x.new_empty(((x if tokens is None else tokens).shape[0], ranks))


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
    _check(ranks.shape[1], x.shape[1], tokens, ranks=ranks, x=x)
    rows = (x if tokens is None else tokens).shape[0]
    if ranks.shape[0] != rows:
        raise ValueError(f"ranks: expected {rows} rows as many as there are of x, got {ranks.shape[0]}")
    return x.new_empty((group_offsets.shape[0] - 1, ranks.shape[1], x.shape[1]))


define("lora_shrink(Tensor x, Tensor factors, Tensor group_offsets, Tensor? tokens) -> Tensor", _shrink, _shrink_fake)
define(
    "lora_gradient(Tensor ranks, Tensor x, Tensor group_offsets, Tensor? tokens) -> Tensor", _gradient, _gradient_fake
)
