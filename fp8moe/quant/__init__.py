"""FP8 quantization: scale formats and layouts, quantizers of activations and weights, dequantization, transposition."""

from fp8moe.quant.formats import FP8Tensor, PackedTensor
from fp8moe.quant.packed import quantize_int4, quantize_mxfp4
from fp8moe.quant.quantize import dequantize, quantize_1x128, quantize_128x1, quantize_128x128
from fp8moe.quant.transpose import quantize_with_transpose, transpose_fp8

__all__ = [
    "FP8Tensor",
    "PackedTensor",
    "dequantize",
    "quantize_1x128",
    "quantize_128x1",
    "quantize_128x128",
    "quantize_int4",
    "quantize_mxfp4",
    "quantize_with_transpose",
    "transpose_fp8",
]
