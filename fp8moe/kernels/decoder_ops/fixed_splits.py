"""Attention that sums over keys in one order, in plain PyTorch: the reference of ``fixed_splits.cuh``.

A split holds 64 keys, counted from the first token of their sequence. Each split has a softmax of its own; the results
of splits are merged one after the other. Every sum is a tree of elementwise additions, whose order follows from the
size of a head and of a split alone. So the result of a query does not depend on other queries, nor on their number.
"""

from typing import NamedTuple

import torch
from torch import Tensor

SPLIT = 64  # keys in a split
_ROWS = 32  # queries of a key head that are computed at a time, to bound memory


class Attended(NamedTuple):
    """Results of queries before they are normalized.

    sums: (T, heads, D) float32, of values with weights e^(score - largest). largest, total: (T, heads) float32, of the
    scores, and the sums of the weights; minus infinity and 0 for a query that sees no keys. dtype: of the queries.
    """

    sums: Tensor
    largest: Tensor
    total: Tensor
    dtype: torch.dtype

    def output(self, sinks: Tensor | None = None) -> Tensor:
        """Return the attention (T, heads, D) in the dtype of the queries; zeros for a query that sees no keys.

        sinks: (heads,), logits that take part in the softmax with a value of zero.
        """
        total = self.total if sinks is None else self.total + _exp(sinks.float() - self.largest)
        inverse = torch.where(self.total == 0, 0, 1 / total)
        return (self.sums * inverse[..., None]).to(self.dtype)

    def logsumexp(self) -> Tensor:
        """Return the logarithms of the sums of e^score, (heads, T) float32; infinity for a query that sees no keys."""
        return torch.where(self.total == 0, torch.inf, self.largest + self.total.log()).T


def attend(q: Tensor, keys: Tensor, values: Tensor, position: int, window: int | None, scale: float) -> Attended:
    """Attend causally with the queries of one sequence to its keys.

    q: (T, heads, D), a query for each of the positions from `position` on, which may be negative. keys, values: (n, key
    heads, D), those of positions 0 to n - 1. heads is a multiple of key heads. A query sees the keys up to its own
    position, at most the last `window` of them.
    """
    tokens, heads, size = q.shape
    key_heads = keys.shape[1]
    group = heads // key_heads
    rows = q.float().view(tokens, key_heads, group, size).transpose(0, 1).reshape(key_heads, tokens * group, size)
    positions = (position + torch.arange(tokens, device=q.device)).repeat_interleave(group)
    padded = -len(keys) % SPLIT
    keys, values = (torch.nn.functional.pad(x.transpose(0, 1), (0, 0, 0, padded)) for x in (keys, values))
    found: list[list[Tensor]] = [[], [], []]
    for head in range(key_heads):
        parts = [
            _attend_rows(part, keys[head], values[head], where, window, scale)
            for part, where in zip(rows[head].split(_ROWS), positions.split(_ROWS), strict=True)
        ]
        for whole, pieces in zip(found, zip(*parts, strict=True), strict=True):
            whole.append(torch.cat(pieces).unflatten(0, (tokens, group)))
    return Attended(*(torch.cat(whole, 1) for whole in found), q.dtype)


def _attend_rows(
    q: Tensor, keys: Tensor, values: Tensor, positions: Tensor, window: int | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return sums (R, D), largest and total (R,) of rows q (R, D) float32. keys, values: (n, D), n a multiple of 64."""
    sums, largest, total = torch.zeros_like(q), q.new_full(q.shape[:1], -torch.inf), q.new_zeros(q.shape[:1])
    last = int(positions.max())
    first = 0 if window is None else max(int(positions.min()) - window + 1, 0)
    for start in range(first // SPLIT * SPLIT, min(last + 1, len(keys)), SPLIT):
        place = start + torch.arange(SPLIT, device=q.device)
        seen = place <= positions[:, None]
        if window is not None:
            seen &= place > positions[:, None] - window
        split_keys, split_values = (x[start : start + SPLIT].float() for x in (keys, values))
        scores = (_sum(q[:, None] * split_keys, -1) * scale).masked_fill(~seen, -torch.inf)
        most = scores.amax(-1)
        weights = _exp(scores - _shift(most)[:, None])
        rounded = weights.to(values.dtype).float()[..., None]
        of_split = _sum(rounded * torch.where(seen[..., None], split_values, 0), 1)
        now = torch.maximum(largest, most)
        before, split = _exp(largest - _shift(now)), _exp(most - _shift(now))
        sums = sums * before[:, None] + of_split * split[:, None]
        largest, total = now, total * before + _sum(weights, -1) * split
    return sums, largest, total


def _shift(largest: Tensor) -> Tensor:
    return torch.where(largest == -torch.inf, 0, largest)


def _exp(x: Tensor) -> Tensor:
    """Return e^x, computed in float64 and rounded: vectorized and scalar code may differ in the last bit of float64."""
    return x.double().exp().float()


def _sum(x: Tensor, dim: int) -> Tensor:
    """Sum over a dimension by elementwise additions: halves as long as they are equal, then one by one."""
    while x.shape[dim] % 2 == 0:
        one, other = x.chunk(2, dim)
        x = one + other
    first, *others = x.unbind(dim)
    for other in others:
        first = first + other
    return first
