"""The older path of `fp8moe.kernels.gemm.tiles.describe_dense`, which stays valid."""

from fp8moe.kernels.gemm.tiles import describe_dense as describe

__all__ = ["describe"]
