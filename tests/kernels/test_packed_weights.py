"""GEMMs and experts with weights in four bits, on the reference backend; and what is refused."""

from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8moe import (
    FP8Tensor,
    PackedTensor,
    batch_invariant,
    dequantize,
    experts,
    experts_masked,
    experts_rows,
    gemm,
    grouped_gemm,
    grouped_gemm_masked,
    linear,
    quantize_1x128,
    quantize_int4,
    quantize_mxfp4,
)
from fp8moe.kernels.activation import Activation
from fp8moe.quant.arranged import arrange
from fp8moe.quant.packed import blocks_of_nvfp4, quantize_nvfp4
from fp8moe.weights.views import _mxfp4
from tests.errors import error_in_its_dtype, refused, relative_error
from tests.gemm_cases import activations, exact, int32, offsets
from tests.random_values import random

pytestmark = pytest.mark.usefixtures("one_thread")
FORMS = {
    "mxfp4": (quantize_mxfp4, 32),
    "int4-32": (lambda w: quantize_int4(w, group=32), 32),
    "int4": (quantize_int4, 128),
    "nvfp4": (quantize_nvfp4, 32),
}
TOLERANCE = {torch.float32: 3e-4, torch.bfloat16: 1.5e-3}


def uneven(*shape, seed=0):
    """Weights whose rows and groups of 32 differ by orders of magnitude, within blocks by 14 binades at most."""
    generator = torch.Generator().manual_seed(seed)
    exponent = torch.randint(-4, 5, (*shape[:-1], shape[-1] // 32), generator=generator)
    return torch.randn(shape, generator=generator) * (2.0**exponent).repeat_interleave(32, -1)


def part(t, expert):
    rest = {} if getattr(t, "tensor_scale", None) is None else {"tensor_scale": t.tensor_scale[expert]}
    return t._replace(data=t.data[expert], scale=t.scale[expert], **rest)


def multiplied(t):
    """The values that GEMMs multiply, which NVFP4 does not have exactly."""
    return FP8Tensor(*blocks_of_nvfp4(*arrange(t)[:2])) if t.format == "nvfp4" else t


def in_blocks(t, matrices=1):
    """Experts in MXFP4 as FP8 ones of the same values, converted as when a checkpoint is loaded, or in NVFP4."""
    if t.format == "nvfp4":
        return blocks_of_nvfp4(*arrange(t, matrices)[:2])
    found = [
        FP8Tensor(*map(torch.cat, zip(*map(_mxfp4, data.chunk(matrices), scale.chunk(matrices)), strict=True)))
        for data, scale in zip(t.data, t.scale, strict=True)
    ]
    return FP8Tensor(*map(torch.stack, zip(*found, strict=True)))


@settings(max_examples=40, deadline=None)
@given(
    form=st.sampled_from(sorted(FORMS)),
    m=st.integers(0, 40),
    n=st.integers(0, 20).map(lambda i: 8 * i),
    groups=st.integers(0, 9),
    out_dtype=st.sampled_from(sorted(TOLERANCE, key=str)),
    biased=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_dense(form, m, n, groups, out_dtype, biased, seed):
    quantizer, group = FORMS[form]
    k = group * groups
    a, b = activations(m, k, seed=seed), quantizer(uneven(n, k, seed=seed))
    bias, c = (torch.randn(n), torch.randn(m, n).to(out_dtype)) if biased else (None, None)
    out = gemm(a, b, bias=bias, c=c, out_dtype=out_dtype)
    expected = exact(a, multiplied(b), bias) + (c.double() if biased else 0)
    assert out.dtype is out_dtype and error_in_its_dtype(out, expected) < TOLERANCE[out_dtype]


@pytest.mark.parametrize("form", FORMS)
def test_groups(form):
    quantizer, _ = FORMS[form]
    bounds = offsets([1, 0, 30, 6], start=2)
    a, b = activations(40, 256), quantizer(uneven(4, 136, 256))
    out = grouped_gemm(a, b, bounds, out=torch.full((40, 136), torch.nan))
    x = torch.randn(4, 9, 256)
    used, masked_a = int32([9, 0, 4, 1]), quantize_1x128(x)
    masked = grouped_gemm_masked(masked_a, b, used, out=torch.full((4, 9, 136), torch.nan))
    for e, (start, end, count) in enumerate(zip(bounds[:-1].tolist(), bounds[1:].tolist(), used.tolist(), strict=True)):
        rows = FP8Tensor(a.data[start:end], a.scale[start:end])
        assert relative_error(out[start:end], exact(rows, multiplied(part(b, e)))) < TOLERANCE[torch.float32]
        rows = FP8Tensor(masked_a.data[e, :count], masked_a.scale[e, :count])
        assert relative_error(masked[e, :count], exact(rows, multiplied(part(b, e)))) < TOLERANCE[torch.float32]
        assert masked[e, count:].isnan().all()
    assert out[:2].isnan().all() and out[39:].isnan().all()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("activation", [Activation(), Activation(limit=2.0, alpha=1.7), Activation.from_key("gelu")])
def test_experts_are_the_steps_that_they_consist_of(form, activation):
    """Sums that are exact may round to another value of E4M3 between the GEMMs: hence the bound."""
    quantizer, _ = FORMS[form]
    up, down = quantizer(uneven(3, 256, 128, seed=1) / 8), quantizer(uneven(3, 128, 128, seed=2))
    x, bounds = torch.randn(11, 128, dtype=torch.bfloat16), offsets([4, 0, 7])
    a = quantize_1x128(x)
    expected = torch.zeros(11, 128, dtype=torch.float64)
    for e in (0, 2):
        rows = slice(int(bounds[e]), int(bounds[e + 1]))
        projected = exact(FP8Tensor(a.data[rows], a.scale[rows]), multiplied(part(up, e))).float()
        expected[rows] = exact(quantize_1x128(activation(projected)), multiplied(part(down, e)))
    out = experts_rows(x, bounds, up, down, activation=activation)
    assert relative_error(out, expected) < 4e-3
    index = torch.tensor([[0, -1]] * 4 + [[2, 5]] * 7)
    weights = torch.rand(11, 2)
    routed = experts(x, index, weights, up, down, activation=activation, out=torch.empty(11, 128))
    assert relative_error(routed, expected * weights[:, :1]) < 4e-3
    masked = experts_masked(quantize_1x128(x[None].repeat(3, 1, 1)), int32([4, 0, 11]), up, down, activation=activation)
    assert torch.equal(masked[0, :4], out[:4]) and torch.equal(masked[2, 4:11], out[4:])


@pytest.mark.parametrize("mode", [batch_invariant, nullcontext])
def test_mxfp4_has_the_bits_of_fp8_blocks(mode):
    up, down = quantize_mxfp4(uneven(3, 192, 160, seed=1)), quantize_mxfp4(uneven(3, 160, 96, seed=2))
    down.data[1, :, 16:32] = 0  # a group of zeros, whatever its scale is
    down.scale[1, :, 1] = 250
    down.data[2], down.scale[2] = 0, 0
    gate_up, blocks, of_down = in_blocks(up, 2), in_blocks(up), in_blocks(down)
    assert torch.equal(dequantize(up), dequantize(blocks)) and torch.equal(dequantize(down), dequantize(of_down))
    x, bounds = random(37, 160, spread=1.0), offsets([5, 0, 32])
    a, index, weights = quantize_1x128(x), torch.randint(-1, 3, (37, 2)), torch.rand(37, 2)
    masked, used = quantize_1x128(random(3, 9, 160)), int32([9, 0, 4])

    def results(up, gate_up, down):
        one = part(up, 2)
        yield gemm(a, one, out_dtype=torch.float32)
        yield gemm(a, one, bias=x[0, :1].expand(192))
        yield grouped_gemm(a, up, bounds)
        yield grouped_gemm_masked(masked, up, used)[0]
        yield experts(x, index, weights, gate_up, down)
        yield experts_rows(x, bounds, gate_up, down)
        yield experts_masked(masked, used, gate_up, down)[2, :4]
        yield experts_rows(x, bounds, gate_up, down, activation=Activation.from_key("gelu"))

    with mode():
        for found, expected in zip(results(up, up, down), results(blocks, gate_up, of_down), strict=True):
            assert expected.isfinite().all() and torch.equal(found, expected)


def test_exponents_of_every_distance():
    """Groups too far apart for E4M3 do not vanish beside each other, and rows have exponents of their own."""
    for distance in (14, 15, 30, 120, 240):
        w = quantize_mxfp4(torch.ones(8, 64))
        w.scale[:, 0] -= min(distance, 120)
        w.scale[:, 1] += max(distance - 120, 0)
        w.scale[1] -= 3
        x = torch.ones(2, 64)
        x[1, 32:] = 0  # the smaller group alone
        out = gemm(quantize_1x128(x), w, out_dtype=torch.float32)
        expected = x @ dequantize(w).T
        assert torch.equal(out[0], expected[0])
        if distance <= 120:
            assert torch.equal(out[1], expected[1])


def test_scales_that_are_nan_touch_their_column_alone():
    a = activations(5, 256)
    for form, (quantizer, _) in FORMS.items():
        b = quantizer(uneven(16, 256))
        clean = gemm(a, b)
        for value in {"mxfp4": (255,), "nvfp4": (torch.nan, -1.0)}.get(form, (torch.nan, torch.inf)):
            b.scale[3, 1] = value
            out = gemm(a, b)
            assert not out[:, 3].isfinite().any()
            out[:, 3] = clean[:, 3]
            assert torch.equal(out, clean)


def test_tensor_scales_of_rows():
    """Gate and up may have one each; where rows of a block differ, their scales are rounded once more."""
    a, bounds, t = activations(9, 160), offsets([4, 5]), quantize_nvfp4(uneven(2, 144, 160))
    for factor, bound in ((torch.ones(2, 1), 2.5e-2), (torch.rand(2, 144) + 0.5, 4e-2)):
        b = t._replace(tensor_scale=t.tensor_scale[:, None] * factor.expand(2, 144))
        out = grouped_gemm(a, b, bounds)
        expected = torch.cat([exact(FP8Tensor(*(x[4 * e : 4 + 5 * e] for x in a)), part(b, e)) for e in range(2)])
        assert relative_error(out, expected) < bound
        assert torch.equal(out, grouped_gemm(a, t, bounds)) == (bound < 3e-2)
    up, down = quantize_nvfp4(uneven(2, 192, 160)), quantize_nvfp4(torch.randn(2, 160, 96))
    up = up._replace(tensor_scale=(up.tensor_scale[:, None] * torch.tensor([[1.0, 3.0]])).repeat_interleave(96, 1))
    gate_up = in_blocks(up, 2)
    scale = gate_up.scale.repeat_interleave(96, 1).repeat_interleave(128, 2)[..., :160]
    assert relative_error(gate_up.data.double() * scale, dequantize(up)) < 2.5e-2
    x = torch.randn(9, 160, dtype=torch.bfloat16)
    assert torch.equal(experts_rows(x, bounds, up, down), experts_rows(x, bounds, gate_up, in_blocks(down)))


def test_bfloat16_and_float32_scales():
    a, b = activations(5, 256), quantize_int4(uneven(16, 256))
    assert torch.equal(gemm(a, b), gemm(a, b._replace(scale=b.scale.float())))


A, B = activations(4, 128), quantize_mxfp4(torch.randn(2, 24, 128))
UP, DOWN = quantize_mxfp4(torch.randn(2, 128, 128)), quantize_mxfp4(torch.randn(2, 128, 64))
BOUNDS = int32([0, 2, 4])


def pair(*shape):
    return PackedTensor(torch.zeros(*shape, dtype=torch.uint8), torch.zeros(*shape[:-1], 1, dtype=torch.uint8), "mxfp4")


def test_what_gemms_refuse():
    nvfp4 = quantize_nvfp4(torch.randn(2, 24, 128))
    for wrong, error, message in (
        (nvfp4._replace(tensor_scale=None), ValueError, r"^b\.tensor_scale: expected a tensor with 'nvfp4', got None"),
        (
            nvfp4._replace(scale=nvfp4.scale[..., :4]),
            ValueError,
            r"^b\.scale: expected shape \(2, 24, 8\), .* \(2, 24, 4\)",
        ),
        (tuple(B[:2]), TypeError, r"^b\.data: expected float8_e4m3fn, or uint8 of a PackedTensor, got torch\.uint8"),
        (tuple(B), TypeError, r"^b: expected an FP8Tensor or a \(data, scale\) pair, got tuple"),
        (B._replace(format="int4"), TypeError, r"^b\.scale: expected bfloat16 or float32, got torch\.uint8"),
        (part(B, 0), ValueError, r"^b\.data: expected shape \(E, N, K\), got \(24, 64\)"),
        (pair(2, 24, 16), ValueError, r"^b\.data: expected shape \(E, N, 64\) to match the K = 128 of a\.data"),
        (pair(2, 24, 24), ValueError, r"^b\.data: K must be a multiple of 32 for weights in four bits, got K = 48"),
        (pair(2, 20, 64)._replace(scale=B.scale[:, :20]), ValueError, r"^b\.data: N must be a multiple of 8"),
        (B._replace(scale=B.scale[..., :3]), ValueError, r"^b\.scale: expected shape \(2, 24, 4\), .* \(2, 24, 3\)"),
    ):
        refused(error, message, grouped_gemm, A, wrong, BOUNDS)
    refused(TypeError, "^a: expected an FP8Tensor", gemm, part(B, 0), part(B, 0))
    refused(TypeError, "^weight: expected an FP8Tensor", linear, torch.randn(4, 128), part(B, 0))
    with pytest.raises(ValueError, match=r"^b\.scale: expected shape \(24, 4\) or \(24, 1\), one scale per row"):
        torch.ops.fp8moe.gemm(*A, B.data[0], torch.ones(24, 2), None, None, False)
    with pytest.raises(TypeError, match=r"^b\.scale: expected uint8, bfloat16 or float32, got torch\.float8_e4m3fn"):
        torch.ops.fp8moe.gemm(*A, *part(nvfp4, 0)[:2], None, None, False)  # as stored, without its tensor scale


def test_what_experts_refuse():
    x, other = torch.randn(4, 128), quantize_mxfp4(torch.randn(2, 128, 96))
    for up, down, error, message in (
        (UP, DOWN._replace(format="nvfp4"), TypeError, r"^down\.scale: expected float8_e4m3fn, got torch\.uint8"),
        (pair(2, 128, 24), DOWN, ValueError, r"^up\.data: K must be a multiple of 32 .* got K = 48"),
        (UP, pair(2, 128, 64), ValueError, r"^down\.scale: expected shape \(2, 128, 4\)"),
        (UP, other, ValueError, r"^down_proj: expected shape \(2, 128, 32\) to match"),
        (other, DOWN, ValueError, r"^rows: expected shape \(R, 96\) to match"),
        (pair(2, 96, 64)._replace(scale=UP.scale[:, :96]), DOWN, ValueError, r"^down_proj: .* \(2, 128, 24\) to match"),
    ):
        refused(error, message, experts_rows, x, BOUNDS, up, down)
    x.requires_grad_()
    out = experts_rows(x, BOUNDS, UP, DOWN)
    refused(RuntimeError, "backward", out.sum().backward)
