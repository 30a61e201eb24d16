"""transformers' FP8 linears, of its integration finegrained_fp8: which of them fp8moe runs, and whether it does."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fp8moe.quant.formats import BLOCK


def refusal(weight: Tensor, block_size: Sequence[int] | None, activation_scale: Tensor | None) -> str | None:
    """Why a linear of transformers in FP8 stays with it, or None for one that runs on fp8moe."""
    if weight.dtype is not torch.float8_e4m3fn:
        return f"weights in {weight.dtype}; fp8moe runs torch.float8_e4m3fn"
    if activation_scale is not None:
        return "static activation scales; fp8moe runs dynamic ones"
    if block_size is None or tuple(block_size) != (BLOCK, BLOCK):
        return f"weight blocks {block_size}; fp8moe runs blocks of {BLOCK}x{BLOCK}"
    return None


def is_routed() -> bool:
    """Whether `register` has put fp8moe in the place of transformers' function."""
    from transformers.integrations import finegrained_fp8

    return hasattr(finegrained_fp8.fp8_linear, "_fp8moe")
