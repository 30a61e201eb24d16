"""RMSNorm and a router's logits in one: reference backend, errors, autograd, which kernels, and the compiled ones."""

import itertools

import pytest
import torch

from fp8moe import batch_invariant
from fp8moe.kernels.decoder_ops.norm_logits import by_one_kernel, kernel_spec, norm_logits
from fp8moe.kernels.decoder_ops.rms_norm import rms_norm
from fp8moe.kernels.decoder_ops.router import by_kernel, logits_block, logits_threads, router_logits
from fp8moe.runtime.checks import FLOATING
from tests.errors import error_in_its_dtype
from tests.ptxas import without_spills
from tests.random_values import random

EPS = 1e-6
SMS = 132
VARIANTS = ((160, 7), (512, 131), (128, 576), (128, 2048), (1024, 2048), (256, 4096), (1024, 5120), (256, 7168))


def operands(tokens: int, experts: int, hidden: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """x, norm_weight, weight and residual."""
    shapes = (tokens, hidden), (hidden,), (experts, hidden), (tokens, hidden)
    return [random(*shape, dtype=dtype, spread=1.0, seed=seed) for seed, shape in enumerate(shapes)]


@pytest.mark.parametrize("tokens,experts,hidden", [(1, 128, 256), (5, 7, 33), (90, 8, 136), (0, 4, 8), (3, 1, 1)])
@pytest.mark.parametrize("dtypes", list(itertools.product(FLOATING, FLOATING)), ids=str)
def test_is_the_two_operations(dtypes, tokens, experts, hidden):
    dtype, out_dtype = dtypes
    x, norm_weight, weight, residual = operands(tokens, experts, hidden, dtype)
    for quantized in (False, True):
        options = {"residual": residual, "quantized": quantized}
        bias = random(experts, dtype=dtype, spread=1.0, seed=4) if quantized else None
        normed, logits = norm_logits(x, norm_weight, EPS, weight, bias=bias, **options, dtype=out_dtype)
        expected = rms_norm(x, norm_weight, EPS, **options)
        assert torch.equal(normed.sum, expected.sum) and torch.equal(normed.values, expected.values)
        if quantized:
            for got, other in zip(normed.quantized, expected.quantized, strict=True):
                assert torch.equal(got.float(), other.float()) and got.stride() == other.stride()
        else:
            assert normed.quantized is None
        assert logits.dtype is out_dtype
        assert torch.equal(logits, router_logits(expected.values, weight, bias=bias, dtype=out_dtype))
        limit = 1e-6 if out_dtype is torch.float32 else 1e-3
        product = normed.values.double() @ weight.double().t() + (0 if bias is None else bias.double())
        assert error_in_its_dtype(logits, product) < limit


def test_errors():
    x, norm_weight, weight, residual = operands(4, 8, 16, torch.float32)

    def fails(error, match, **changed):
        given = {"x": x, "norm_weight": norm_weight, "eps": EPS, "weight": weight, "residual": residual}
        with pytest.raises(error, match=match):
            norm_logits(**given | {"dtype": torch.float32} | changed)

    for name in ("x", "norm_weight", "weight", "residual"):
        fails(TypeError, f"^{name}: expected a torch.Tensor, got NoneType", **{name: None})
    fails(TypeError, "^eps: expected a number, got bool True", eps=True)
    fails(ValueError, r"^x: expected shape \(T, H\), got \(1, 4, 16\)", x=x[None])
    wide = torch.zeros(1, 32776)
    fails(ValueError, r"^x: .* H up to 32768, got \(1, 32776\)", x=wide, weight=wide)
    fails(TypeError, "^weight: expected float32, got torch.bfloat16", weight=weight.bfloat16())
    fails(ValueError, r"^weight: expected shape \(E, 16\), got \(8, 8\)", weight=weight[:, :8])
    fails(ValueError, r"^norm_weight: expected shape \(16,\), got \(8,\)", norm_weight=norm_weight[:8])
    fails(TypeError, "^residual: expected float32, got torch.float16", residual=residual.half())
    fails(ValueError, r"^residual: expected shape \(4, 16\), got \(3, 16\)", residual=residual[:3])
    fails(TypeError, "^dtype: expected bfloat16, float16 or float32, got torch.float64", dtype=torch.float64)


def test_backward_raises():
    given = operands(4, 8, 16, torch.float32)
    for i in range(4):
        x, norm_weight, weight, residual = (value.clone().requires_grad_(i == j) for j, value in enumerate(given))
        normed, logits = norm_logits(x, norm_weight, EPS, weight, residual=residual, dtype=torch.float32)
        for result in (normed.values, normed.sum, logits):
            with pytest.raises(RuntimeError, match="norm_logits has no backward"):
                result.sum().backward()


# ---- kernels ----


def test_few_tokens_are_one_kernel():
    for experts, row_bytes, most in (
        *((128, 4096, 2), (8, 2, 2), (5000, 8192, 2), (256, 14336, 1), (128, 16384, 1), (128, 16386, 0)),
        *((0, 4096, 0), (128, 0, 0)),
    ):
        for tokens in range(10):
            one = by_one_kernel(tokens, experts, row_bytes)
            assert one == (0 < tokens <= most)
            # Bits are those of the router's own kernel, which takes all tokens at once.
            assert not one or (by_kernel(tokens, row_bytes) and tokens <= logits_block(tokens, experts, SMS)[1])
            with batch_invariant():
                assert not by_one_kernel(tokens, experts, row_bytes)


@pytest.mark.parametrize("dtype,tokens", [(torch.bfloat16, 1), (torch.float16, 2), (torch.float32, 2)], ids=str)
@pytest.mark.parametrize("experts,hidden", VARIANTS)
def test_every_variant_compiles_without_spills(dtype, tokens, experts, hidden):
    if not by_one_kernel(tokens, experts, hidden * dtype.itemsize):
        tokens = 1
    spec = kernel_spec(logits_block(tokens, experts, SMS), experts, hidden, dtype, torch.float32)
    assert without_spills(spec).registers * logits_threads(hidden, dtype) <= 65536
