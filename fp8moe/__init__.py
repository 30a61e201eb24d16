"""FP8 layers for mixture-of-experts models on PyTorch, with Hopper kernels compiled at run time.

Importing this needs nothing but PyTorch; CUDA libraries are loaded by the first kernel that runs.
"""

from fp8moe.kernels.gemm import gemm, grouped_gemm, grouped_gemm_k, grouped_gemm_masked
from fp8moe.kernels.indexer.mqa_logits import mqa_logits, paged_mqa_logits
from fp8moe.layers import FP8Linear, FP8MQAIndexer, GroupedExperts, replace_linears
from fp8moe.quant import FP8Tensor, dequantize, quantize_1x128, quantize_128x1, quantize_128x128
from fp8moe.runtime.config import batch_invariant

__all__ = [
    "FP8Linear",
    "FP8MQAIndexer",
    "FP8Tensor",
    "GroupedExperts",
    "batch_invariant",
    "dequantize",
    "gemm",
    "grouped_gemm",
    "grouped_gemm_k",
    "grouped_gemm_masked",
    "mqa_logits",
    "paged_mqa_logits",
    "quantize_1x128",
    "quantize_128x1",
    "quantize_128x128",
    "replace_linears",
]
__version__ = "0.1.0"
