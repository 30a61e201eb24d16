"""Tokens with their routing as rows of one matrix, so that one collective sends all of a token."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fp8moe.quant.formats import FP8Tensor, align

_ALIGNMENT = 16  # bytes at whose multiples the parts of a row begin: where kernels can load them


class Tokens(NamedTuple):
    """What experts need of T tokens: (T, H), quantized 1x128 or not; (T, K) int32 or int64; (T, K)."""

    hidden_states: Tensor | FP8Tensor
    top_k_index: Tensor
    top_k_weights: Tensor


def pack(tokens: Tokens, rows: int) -> Tensor:
    """Tokens as `rows` rows (int64, whatever they mean), the last ones without experts; indices become int32."""
    x, index, weights = tokens
    if index.dtype is torch.int64:
        index = index.clamp(-1, torch.iinfo(torch.int32).max)  # what does not fit is no expert either
    parts = [*(x if isinstance(x, FP8Tensor) else (x,)), index, weights]
    columns = _columns(tokens)
    width = sum(align(count * dtype.itemsize, _ALIGNMENT) for dtype, count in columns)
    out = torch.empty((rows, width // 8), dtype=torch.int64, device=index.device)
    views = _views(out, columns)
    for view, part in zip(views, parts, strict=True):
        view[: len(part)].copy_(part)
    if len(index) < rows:
        out[len(index) :].zero_()
        views[-2][len(index) :] = -1
    return out


def unpack(rows: Tensor, like: Tokens) -> Tokens:
    """The tokens in rows that ranks have packed from tokens like these: views of the rows."""
    *x, index, weights = _views(rows, _columns(like))
    return Tokens(x[0] if len(x) == 1 else FP8Tensor(*x), index, weights)


def _columns(tokens: Tokens) -> list[tuple[torch.dtype, int]]:
    """Dtype and number of the columns of each part."""
    x, index, _ = tokens
    values = x if isinstance(x, FP8Tensor) else (x,)
    routing = [(torch.int32, index.shape[1]), (torch.float32, index.shape[1])]
    return [(value.dtype, value.shape[1]) for value in values] + routing


def _views(rows: Tensor, columns: Sequence[tuple[torch.dtype, int]]) -> list[Tensor]:
    rows, views, begin = rows.view(torch.uint8), [], 0
    for dtype, count in columns:
        nbytes = count * dtype.itemsize
        views.append(rows[:, begin : begin + nbytes].view(dtype))
        begin += align(nbytes, _ALIGNMENT)
    return views
