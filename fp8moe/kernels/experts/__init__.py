"""Operators of an experts layer: its forward, its training, and the steps before, between and after its two GEMMs."""

from fp8moe.kernels.experts.backward import experts_training
from fp8moe.kernels.experts.operator import experts_of_rows, experts_of_tokens, experts_partial, send_rows
from fp8moe.kernels.experts.permute import permute_fp8, permute_quantize
from fp8moe.kernels.experts.routing import sort_by_expert

__all__ = [
    "experts_of_rows",
    "experts_of_tokens",
    "experts_partial",
    "experts_training",
    "permute_fp8",
    "permute_quantize",
    "send_rows",
    "sort_by_expert",
]
