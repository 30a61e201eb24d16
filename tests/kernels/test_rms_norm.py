"""RMSNorm with a residual and quantization: reference backend, errors, autograd, operator, the compiled kernels."""

import itertools
import math

import pytest
import torch

from fp8moe import quantize_1x128
from fp8moe.kernels.decoder_ops.rms_norm import kernel_spec, rms_norm, row_threads
from fp8moe.runtime.checks import FLOATING
from tests.errors import refused
from tests.ptxas import without_spills
from tests.random_values import random

EPS = 1e-6
SHAPES = ((1, 2048), (5, 7), (3, 4, 136), (0, 64), (2, 0, 16), (300,), (2, 3, 1))
ROUNDINGS = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-24}  # half a unit in the last place
VARIANTS = list(itertools.product(FLOATING, (8, 64, 128, 131, 576, 2048, 7168, 32768)))


def weights(hidden: int, dtype: torch.dtype) -> torch.Tensor:
    return (1 + 0.3 * torch.randn(hidden)).to(dtype)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", FLOATING)
def test_values(shape, dtype):
    x, residual = random(*shape, dtype=dtype, spread=1.0), random(*shape, dtype=dtype, spread=1.0, seed=1)
    weight = weights(shape[-1], dtype)
    for added in (None, residual):
        normed = rms_norm(x, weight, EPS, residual=added)
        total = x if added is None else x + added
        assert normed.sum is None if added is None else torch.equal(normed.sum, total)
        exact = total.double() * (total.double().square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()
        assert normed.values.dtype is dtype and normed.values.shape == shape and normed.quantized is None
        # Two roundings, and the float32 operations before them.
        smallest = torch.finfo(dtype).smallest_normal
        limit = exact.abs() * (2 * ROUNDINGS[dtype] + 1e-6) + smallest * ROUNDINGS[dtype] * weight.abs().double() * 4
        assert ((normed.values.double() - exact).abs() <= limit).all()


@pytest.mark.parametrize("dtype", FLOATING)
def test_is_the_module_of_transformers(dtype):
    pytest.importorskip("transformers")
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm

    module = Qwen3MoeRMSNorm(136, eps=1e-5).to(dtype).requires_grad_(False)
    module.weight.copy_(weights(136, dtype))
    x = random(9, 136, dtype=dtype)
    assert torch.equal(rms_norm(x, module.weight, 1e-5).values, module(x))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", FLOATING)
def test_quantized_is_that_of_the_values(shape, dtype):
    x, residual, weight = random(*shape, dtype=dtype), random(*shape, dtype=dtype, seed=1), weights(shape[-1], dtype)
    normed = rms_norm(x, weight, EPS, residual=residual, quantized=True)
    expected = quantize_1x128(normed.values)
    assert torch.equal(normed.quantized.data.view(torch.uint8), expected.data.view(torch.uint8))
    assert torch.equal(normed.quantized.scale, expected.scale)
    assert normed.quantized.scale.stride() == expected.scale.stride()
    alone = rms_norm(x, weight, EPS, residual=residual, values=False, quantized=True)
    assert alone.values is None and torch.equal(alone.sum, normed.sum)
    assert torch.equal(alone.quantized.data.view(torch.uint8), expected.data.view(torch.uint8))


def test_nan_and_infinity_stay_in_their_rows():
    x = torch.randn(4, 256, dtype=torch.bfloat16)
    expected = rms_norm(x, weights(256, x.dtype).fill_(1), EPS, quantized=True)
    x[1, 3], x[2, 200] = math.nan, math.inf
    normed = rms_norm(x, weights(256, x.dtype).fill_(1), EPS, quantized=True)
    assert normed.values[1].isnan().all() and normed.quantized.scale[1].isnan().all()
    # Infinity over infinity is NaN, everything else over infinity 0.
    assert normed.values[2].isnan().nonzero().flatten().tolist() == [200]
    assert normed.quantized.scale[2].isnan().tolist() == [False, True]
    for row in (0, 3):
        assert torch.equal(normed.values[row], expected.values[row])
        assert torch.equal(normed.quantized.scale[row], expected.quantized.scale[row])


# ---- errors ----


def test_errors():
    x, weight = torch.zeros(4, 16), torch.ones(16)
    for wrong in ([0.0], None):
        refused(TypeError, "^x: expected a torch.Tensor, got", rms_norm, wrong, weight, EPS)
        refused(TypeError, "^weight: expected a torch.Tensor, got", rms_norm, x, wrong, EPS)
    refused(TypeError, "^residual: expected a torch.Tensor, got int 1", rms_norm, x, weight, EPS, residual=1)
    for wrong in ("1e-6", True, None):
        refused(TypeError, "^eps: expected a number, got", rms_norm, x, weight, wrong)
    with pytest.raises(TypeError, match="^x: expected bfloat16, float16 or float32, got torch.float64"):
        rms_norm(x.double(), weight, EPS)
    refused(ValueError, r"^x: expected shape \(..., H\) .* got \(\)", rms_norm, x[0, 0], weight, EPS)
    with pytest.raises(ValueError, match=r"^x: .* H up to 32768, got \(1, 32776\)"):
        rms_norm(torch.zeros(1, 32776), torch.zeros(32776), EPS)
    with pytest.raises(ValueError, match=r"^x: .* fewer than 2\*\*31 rows .* got \(2147483648, 16\)"):
        rms_norm(x[:1].expand(1 << 31, -1), weight, EPS)
    refused(TypeError, "^weight: expected float32, got torch.bfloat16", rms_norm, x, weight.bfloat16(), EPS)
    refused(ValueError, r"^weight: expected shape \(16,\), got \(8,\)", rms_norm, x, weight[:8], EPS)
    refused(TypeError, "^residual: expected float32, got torch.float16", rms_norm, x, weight, EPS, residual=x.half())
    refused(ValueError, r"^residual: expected shape \(4, 16\), got \(3, 16\)", rms_norm, x, weight, EPS, residual=x[:3])
    with pytest.raises(ValueError, match="^values: expected True where quantized is False, got False"):
        rms_norm(x, weight, EPS, values=False)


def test_backward_raises():
    operands = torch.randn(4, 16), torch.ones(16), torch.randn(4, 16)
    for i in range(3):
        x, weight, residual = (value.clone().requires_grad_(i == j) for j, value in enumerate(operands))
        normed = rms_norm(x, weight, EPS, residual=residual, quantized=True)
        assert torch.equal(normed.values, rms_norm(*operands[:2], EPS, residual=operands[2]).values)
        for result in (normed.values, normed.sum):
            with pytest.raises(RuntimeError, match="rms_norm has no backward"):
                result.sum().backward()


# ---- operator ----


# ---- kernels ----


def test_threads_of_a_row():
    for row_bytes in (*range(1, 3000), 4096, 14336, 28672, 65536, 131072):
        threads, vectors = row_threads(row_bytes), -(-row_bytes // 16)
        if vectors <= 32:
            assert vectors <= threads < 2 * vectors and threads.bit_count() == 1
        else:
            assert threads % 32 == 0 and threads <= 1024 and threads * 8 >= vectors
    assert [row_threads(2 * hidden) for hidden in (2048, 4096, 7168, 32768)] == [256, 256, 224, 512]


@pytest.mark.parametrize("dtype,hidden", VARIANTS, ids=str)
def test_every_variant_compiles_without_spills(dtype, hidden):
    spec = kernel_spec(hidden, dtype)
    report = without_spills(spec)
    assert report.registers * dict(spec.defines)["THREADS"] <= 65536
    if hidden == 2048:
        assert report.registers <= 32  # as many rows in flight as an SM holds threads for
