"""RMSNorm, a router's logits and its choice in one: reference, errors, autograd, which kernels, the compiled ones."""

import itertools

import pytest
import torch

from fp8moe.kernels.decoder_ops.norm_route import BLOCKS, Shape, by_one_kernel, kernel_spec, norm_route
from fp8moe.kernels.decoder_ops.rms_norm import rms_norm
from fp8moe.kernels.decoder_ops.router import Form, RoutingRule, by_kernel, logits_threads, route, router_logits
from fp8moe.runtime.checks import FLOATING
from fp8moe.runtime.sm90 import SHARED_LIMIT
from tests.gpu.checks import same_bits
from tests.ptxas import without_spills
from tests.random_values import random
from tests.router_cases import DEEPSEEK, SOFTMAX

EPS = 1e-6
FORM = Form(8, False, False, 1, 1, True)
GROUPED = Form(8, True, True, 8, 4, True)
# experts, H
SIZES = (
    *((128, 2048), (128, 4096), (128, 2880), (64, 7168), (60, 2048), (160, 5120), (512, 2048), (256, 2560)),
    *((8, 4096), (33, 131), (64, 16384), (31, 1001), (40, 12288), (9, 7)),
)


def operands(tokens: int, experts: int, hidden: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """x, norm_weight, weight and residual."""
    shapes = (tokens, hidden), (hidden,), (experts, hidden), (tokens, hidden)
    return [random(*shape, dtype=dtype, spread=1.0, seed=seed) for seed, shape in enumerate(shapes)]


@pytest.mark.parametrize("tokens,experts,hidden", [(1, 128, 256), (5, 7, 33), (16, 513, 24), (90, 8, 136), (0, 4, 8)])
@pytest.mark.parametrize("dtypes", list(itertools.product(FLOATING, FLOATING)), ids=str)
def test_is_the_three_operations(dtypes, tokens, experts, hidden):
    dtype, out_dtype = dtypes
    x, norm_weight, weight, residual = operands(tokens, experts, hidden, dtype)
    for quantized, (form, logits_dtype) in itertools.product((False, True), ((SOFTMAX, dtype), (DEEPSEEK, out_dtype))):
        options = {"residual": residual, "quantized": quantized}
        bias = random(experts, dtype=dtype, spread=1.0, seed=4) if quantized else None
        choice_bias = random(experts, dtype=torch.float32, spread=1.0, seed=5) if form is DEEPSEEK else None
        rule, dtypes = RoutingRule(3, **form), {"logits_dtype": logits_dtype, "dtype": out_dtype}
        got = norm_route(*(x, norm_weight, EPS, weight, rule), bias=bias, choice_bias=choice_bias, **options, **dtypes)
        expected = rms_norm(x, norm_weight, EPS, **options)
        logits = router_logits(expected.values, weight, bias=bias, dtype=logits_dtype)
        chosen = route(logits, rule, bias=choice_bias, dtype=out_dtype, sort=True)
        assert same_bits(got, (expected, chosen))
        assert (got[1].rows is None) == (tokens > 16 or experts > 512)
        assert (got[0].quantized is None) == (not quantized) and got[1].weights.dtype is out_dtype


def test_errors():
    x, norm_weight, weight, residual = operands(4, 8, 16, torch.float32)

    def fails(error, match, **changed):
        given = {"x": x, "norm_weight": norm_weight, "eps": EPS, "weight": weight, "residual": residual}
        given |= {"rule": RoutingRule(2, **SOFTMAX), "logits_dtype": torch.float32, "dtype": torch.float32}
        with pytest.raises(error, match=match):
            norm_route(**given | changed)

    for name in ("x", "norm_weight", "weight", "residual"):
        fails(TypeError, f"^{name}: expected a torch.Tensor, got NoneType", **{name: None})
    for name in ("bias", "choice_bias"):
        fails(TypeError, f"^{name}: expected a torch.Tensor, got int", **{name: 1})
    fails(TypeError, "^eps: expected a number, got bool True", eps=True)
    fails(ValueError, r"^x: expected shape \(T, H\), got \(1, 4, 16\)", x=x[None])
    wide = torch.zeros(1, 32776)
    fails(ValueError, r"^x: .* H up to 32768, got \(1, 32776\)", x=wide, weight=wide)
    fails(TypeError, "^weight: expected float32, got torch.bfloat16", weight=weight.bfloat16())
    fails(ValueError, r"^weight: expected shape \(E, 16\), got \(8, 8\)", weight=weight[:, :8])
    fails(ValueError, r"^weight: expected shape \(E, H\) with E from 1 to 1024, got \(0, 16\)", weight=weight[:0])
    fails(ValueError, r"^norm_weight: expected shape \(16,\), got \(8,\)", norm_weight=norm_weight[:8])
    fails(TypeError, "^residual: expected float32, got torch.float16", residual=residual.half())
    fails(ValueError, r"^residual: expected shape \(4, 16\), got \(3, 16\)", residual=residual[:3])
    fails(TypeError, "^choice_bias: expected float32, got torch.float16", choice_bias=weight[:, 0].half())
    fails(ValueError, r"^choice_bias: expected shape \(8,\), got \(7,\)", choice_bias=weight[:7, 0])
    fails(ValueError, "^top_k: expected 1 to 8 of 8 experts, got 9", rule=RoutingRule(9, **SOFTMAX))
    fails(ValueError, "^score: expected one of", rule=RoutingRule(2, "tanh", True))
    for name in ("logits_dtype", "dtype"):
        match = f"^{name}: expected bfloat16, float16 or float32, got torch.float64"
        fails(TypeError, match, **{name: torch.float64})


def test_backward_raises():
    given = operands(4, 8, 16, torch.float32)
    dtypes = {"logits_dtype": torch.float32, "dtype": torch.float32}
    for i in range(4):
        x, norm_weight, weight, residual = (value.clone().requires_grad_(i == j) for j, value in enumerate(given))
        rule = RoutingRule(2, **SOFTMAX)
        normed, chosen = norm_route(x, norm_weight, EPS, weight, rule, residual=residual, **dtypes)
        for result in (normed.values, normed.sum, chosen.weights):
            with pytest.raises(RuntimeError, match="norm_route has no backward"):
                result.sum().backward()


# ---- kernels ----


def test_few_tokens_are_one_kernel():
    for experts, row_bytes, most in (
        *((128, 4096, 4), (8, 2, 4), (512, 4096, 4), (513, 8, 0), (128, 8192, 4), (64, 16384, 4), (64, 32768, 4)),
        *((60, 32770, 0), (146, 14336, 4), (147, 14336, 0), (0, 4096, 0), (128, 0, 0)),
    ):
        for tokens in range(20):
            assert by_one_kernel(tokens, experts, row_bytes) == (0 < tokens <= most)


@pytest.mark.parametrize("dtype,tokens", [*((torch.bfloat16, 1 << i) for i in range(3)), (torch.float32, 4)], ids=str)
@pytest.mark.parametrize("experts,hidden", SIZES)
def test_every_variant_compiles_without_spills(dtype, tokens, experts, hidden):
    if dtype is torch.float32:
        hidden //= 2
    while not by_one_kernel(tokens, experts, hidden * dtype.itemsize):
        tokens //= 2
    assert by_kernel(tokens, hidden * dtype.itemsize)  # and so router_logits.cu, whose bits it has, takes them all
    form = GROUPED if experts % 8 == 0 and experts > 8 else FORM
    shape = Shape.of(tokens, experts, hidden, dtype)
    assert shape.threads == logits_threads(hidden, dtype)
    report = without_spills(kernel_spec(tokens, experts, hidden, form, (dtype, torch.float32, dtype)))
    assert report.registers * shape.teams * shape.threads <= 65536


def test_shared_memory():
    """What the kernel asserts of its struct, for the largest operands too."""
    for row_bytes, experts in ((8192, 256), (4096, 512), (32768, 64)):
        tokens = max(t for t in range(17) if by_one_kernel(t, experts, row_bytes))
        spec = kernel_spec(tokens, experts, row_bytes // 2, FORM, (torch.bfloat16, torch.float32, torch.float32))
        defines = dict(spec.defines)
        static = without_spills(spec).static_smem
        assert defines["BLOCK_BYTES"] + static <= SHARED_LIMIT and defines["BLOCKS"] == BLOCKS == 8
