"""GEMMs of FP8 operands, one template: dense, grouped by rows, masked, and grouped along K."""

from fp8moe.kernels.gemm.dense import gemm
from fp8moe.kernels.gemm.grouped import grouped_gemm, grouped_gemm_masked
from fp8moe.kernels.gemm.grouped_k import grouped_gemm_k

__all__ = ["gemm", "grouped_gemm", "grouped_gemm_k", "grouped_gemm_masked"]
