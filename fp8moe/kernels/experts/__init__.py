"""Operators of an experts layer: its forward, its training, and the steps before, between and after its two GEMMs.

An assignment is a pair (token, k): one token sent to the k-th of its K experts. Assignments are sorted by expert; the
row of an assignment is its position in that order. GEMM 1 is the gate and up projection, GEMM 2 the down projection.
"""

from fp8moe.kernels.activation import Activation
from fp8moe.kernels.experts.backward import experts_training
from fp8moe.kernels.experts.operator import experts_of_rows, experts_of_tokens, experts_partial, send_rows
from fp8moe.kernels.experts.permute import permute_fp8, permute_quantize
from fp8moe.kernels.experts.routing import sort_by_expert

__all__ = [
    "Activation",
    "experts_of_rows",
    "experts_of_tokens",
    "experts_partial",
    "experts_training",
    "permute_fp8",
    "permute_quantize",
    "send_rows",
    "sort_by_expert",
]
