"""Trains Megatron-Core's experts and linears in FP8 on fp8moe's kernels: ``in_fp8(spec)`` changes a layer spec."""

from fp8moe_megatron.experts import FP8Experts
from fp8moe_megatron.layer import FP8MoELayer
from fp8moe_megatron.linears import FP8ColumnParallelLinear, FP8RowParallelLinear
from fp8moe_megatron.spec import in_fp8

__version__ = "0.1.0"
__all__ = ["FP8ColumnParallelLinear", "FP8Experts", "FP8MoELayer", "FP8RowParallelLinear", "in_fp8"]
