"""Layouts of scales."""

import torch

from fp8moe.quant.formats import align


def is_mn_major(scale: torch.Tensor) -> bool:
    """Whether ``scale`` (..., M, K blocks) lies in memory as `empty_mn_major` lays it out, size-1 dims aside."""
    m, k_blocks = scale.shape[-2:]
    return (m <= 1 or scale.stride(-2) == 1) and (k_blocks <= 1 or scale.stride(-1) == align(m, 4))
