"""What FP8Linear is tested against on both backends."""

import torch

from fp8moe.quant.quantize import dequantize, quantize_1x128

FEW = 64


def exact(layer, x):
    """The layer in float64 over the quantized operands, rounded to the dtype of x."""
    rows = dequantize(quantize_1x128(x.reshape(-1, x.shape[-1])), dtype=torch.float64)
    out = rows @ dequantize((layer.weight, layer.weight_scale_inv), dtype=torch.float64).T
    if layer.bias is not None:
        out += layer.bias.double()
    return out.view(*x.shape[:-1], layer.out_features).to(x.dtype)


def close(actual, expected):
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    actual, expected, dtype = actual.double(), expected.double(), actual.dtype
    limit = (3e-4 if dtype == torch.float32 else 1.5e-3) * expected.norm()
    if dtype == torch.bfloat16 and 0 < expected.numel() < FEW:
        # One of few values may be all that counts, and round to the other side of a tie of bfloat16.
        limit = max(limit, 2**-7 * expected.abs().max())
    assert (actual - expected).norm() <= limit
