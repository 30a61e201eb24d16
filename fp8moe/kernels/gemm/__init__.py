"""GEMMs of FP8 operands: dense, grouped by rows, masked, and grouped along K."""

from fp8moe.kernels.gemm.api import gemm, grouped_gemm, grouped_gemm_k, grouped_gemm_masked

__all__ = ["gemm", "grouped_gemm", "grouped_gemm_k", "grouped_gemm_masked"]
