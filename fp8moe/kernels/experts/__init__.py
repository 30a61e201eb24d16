"""The operators of an experts layer: forward, training, and the steps between the GEMMs.

Functions that share a module's name are not handed out here: combine.combine.
"""

from fp8moe.kernels.experts.forward import experts
from fp8moe.kernels.experts.partial import experts_partial
from fp8moe.kernels.experts.permute import permute_fp8, permute_quantize
from fp8moe.kernels.experts.routing import sort_by_expert
from fp8moe.kernels.experts.rows import experts_rows
from fp8moe.kernels.experts.training import experts_training

__all__ = [
    "experts",
    "experts_partial",
    "experts_rows",
    "experts_training",
    "permute_fp8",
    "permute_quantize",
    "sort_by_expert",
]
