"""FP8 quantization: scale formats and layouts, quantizers of activations and weights, dequantization."""
