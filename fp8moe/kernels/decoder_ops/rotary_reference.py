"""What ``rotary`` computes, in plain PyTorch."""

import torch
from torch import Tensor

from fp8moe.kernels.decoder_ops.rms_norm_reference import normalized


def rotary(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    columns: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    copies: int,
) -> Tensor:
    """As ``block.rotary.rotary`` describes it."""
    if q_weight is not None:
        q, k = normalized(q, q_weight, eps), normalized(k, k_weight, eps)
    _write(keys, _rotated(k, cos, sin), columns)
    _write(values, v, columns)
    query = _rotated(q, cos, sin).unflatten(2, (k.shape[2], 1, -1))
    return query.expand(-1, -1, -1, copies, -1, -1).flatten(2, 4).contiguous()


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (B, T, heads, D)."""
    size = cos.shape[-1]
    part, rest = x[..., :size], x[..., size:]
    low, high = part.chunk(2, dim=-1)
    turned = part * cos[:, :, None] + torch.cat([-high, low], dim=-1) * sin[:, :, None]
    return torch.cat([turned, rest], dim=-1)


def _write(cache: Tensor, x: Tensor, columns: Tensor | None) -> None:
    """x (B, T, heads, D) to cache (B, heads, L, D) from each sequence's column on."""
    batch, tokens = x.shape[:2]
    first = torch.zeros(batch, dtype=torch.int64, device=x.device) if columns is None else columns
    places = first[:, None] + torch.arange(tokens, device=x.device)
    sequence, token = ((places >= 0) & (places < cache.shape[2])).nonzero(as_tuple=True)
    cache[sequence, :, places[sequence, token]] = x[sequence, token]
