"""The reference computes the same whatever PyTorch's global settings are: default dtype and device, TF32, autocast."""

import pytest
import torch

from fp8moe import (
    FP8Linear,
    dequantize,
    gemm,
    grouped_gemm,
    grouped_gemm_k,
    mqa_logits,
    quantize_1x128,
    quantize_128x1,
    quantize_128x128,
    quantize_int4,
    quantize_mxfp4,
)
from fp8moe.kernels.gemm import reference
from tests import experts_training_reference, linear_training_reference
from tests.errors import relative_error
from tests.experts_cases import VARIANTS, inputs, make_trained
from tests.gemm_cases import activations, int32, weights
from tests.global_settings import default_dtype, matmul_precision
from tests.mqa_cases import random_fp8, random_scale, random_weights


def quantizers():
    x = torch.randn(300, 272)
    return lambda: [*quantize_1x128(x), *quantize_128x1(x), *quantize_128x128(x), dequantize(quantize_1x128(x))]


def gemms():
    a, b, offsets = activations(300, 272), weights(2, 136, 272), int32([0, 100, 300])
    dense, out = (b.data[0], b.scale[0]), torch.empty(300, 136)
    x, packed = activations(20, 160), [quantize_mxfp4(w := torch.randn(136, 160)), quantize_int4(w, group=32)]
    return lambda: [
        *(gemm(a, dense, out_dtype=torch.float32), grouped_gemm(a, b, offsets, out=out)),
        *(gemm(x, weight) for weight in packed),
    ]


def weight_gradients():
    a, b = quantize_128x1(torch.randn(384, 40)), quantize_128x1(torch.randn(384, 72))
    offsets, total = int32([0, 128, 384]), torch.randn(2, 40, 72)
    return lambda: [grouped_gemm_k(a, b, offsets), grouped_gemm_k(a, b, offsets, out=total.clone(), accumulate=True)]


def index_scores():
    q, kv = random_fp8(9, 32, 64), (random_fp8(70, 64, seed=1), random_scale(70))
    scores, starts, ends = random_weights(9, 32), int32([0] * 9), int32([70] * 9)
    return lambda: [mqa_logits(q, kv, scores, starts, ends)]


def linear():
    layer = FP8Linear(272, 136, dtype=torch.float32, master_dtype=torch.float32)
    x, grad = torch.randn(200, 272), torch.randn(200, 136)

    def run():
        out, grads = linear_training_reference.gradients(layer, x, grad, layer.parameters())
        return [out, *grads]

    return run


def experts(variant):
    layer = make_trained(**VARIANTS[variant])
    operands = inputs(dtype=torch.float32)

    def run():
        out, grads = experts_training_reference.backward(layer, *operands)
        return [out, *grads.values()]

    return run


CASES = {
    "quantizers": quantizers,
    "gemms": gemms,
    "weight gradients": weight_gradients,
    "index scores": index_scores,
    "linear": linear,
    "swiglu experts": lambda: experts("plain"),
    "gelu experts": lambda: experts("gelu"),
}


SETTINGS = {
    **{f"default {dtype}": lambda dtype=dtype: default_dtype(dtype) for dtype in (torch.float64, torch.bfloat16)},
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "default device": lambda: torch.device("meta"),
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("case", CASES)
def test_equal_bits(case, setting):
    run = CASES[case]()
    expected = run()
    reference._values.cache_clear()
    with SETTINGS[setting]():
        actual = run()
    for one, other in zip(actual, expected, strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)


@pytest.mark.parametrize("precision", ["high", "medium"])
@pytest.mark.parametrize("case", CASES)
def test_float32_matmul_precision(case, precision):
    """Only the order of sums depends on it, which in a layer may move a value to the next one of E4M3."""
    run = CASES[case]()
    expected = run()
    with matmul_precision(precision):
        actual = run()
    tolerance = 1e-4 if case.endswith("experts") else 1e-6
    for one, other in zip(actual, expected, strict=True):
        assert relative_error(one, other) <= tolerance
