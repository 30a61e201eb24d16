"""What ``rms_norm`` computes, in plain PyTorch."""

import torch
from torch import Tensor


def normalized(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``weight * x / sqrt(mean(x**2) + eps)`` over the last dimension, rounded as transformers' modules do."""
    values = x.float()
    return weight * (values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
