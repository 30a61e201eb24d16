"""What ``merge_splits`` computes, in plain PyTorch."""

import torch
from torch import Tensor

from fp8moe.quant.quantize import quantize_1x128


def merge_splits(
    parts: Tensor, lse: Tensor, counts: Tensor, quantized: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """As ``block.merge_splits`` describes it."""
    none = (counts <= 0)[..., None]
    lse = lse.float().masked_fill(none, -torch.inf)
    largest = lse.amax(2, keepdim=True)
    weights = torch.exp(lse - largest).masked_fill(none, 0)
    total = weights.sum(2, keepdim=True)
    weights = torch.where(total == 0, 0, weights / total)[..., None]
    sums = (parts.float().masked_fill(none[..., None], 0) * weights).sum(2)
    values = sums.to(parts.dtype).flatten(1)
    return (None, *quantize_1x128(values)) if quantized else (values, None, None)
