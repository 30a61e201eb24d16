"""Weights in four bits: quantizers against a search of all codes, dequantization, and what is refused."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8moe import FP8Tensor, PackedTensor, dequantize, quantize_int4, quantize_mxfp4
from fp8moe.quant.formats import as_float
from tests.errors import refused
from tests.global_settings import SETTINGS
from tests.random_values import random

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)  # of the codes without their sign
INT4 = torch.arange(-8, 8, dtype=torch.float64)
DTYPES = st.sampled_from((torch.bfloat16, torch.float16, torch.float32))
QUANTIZERS = {
    "mxfp4": (quantize_mxfp4, 32),
    "int4-32": (lambda w: quantize_int4(w, group=32), 32),
    "int4": (quantize_int4, 128),
}


def weights(rows, columns, dtype, exponent, seed, ties):
    """Values about 2^exponent; ties: halves of steps of E2M1, and of INT4 if a group has a 7."""
    x = random(rows, columns, seed=seed, spread=1.0)
    if ties:
        x = (4 * x).round().clamp(-28, 28) / 4
        x[:, ::32] = 7.0
    limit = torch.finfo(dtype).max
    return (x.double() * 2.0**exponent).clamp(-limit, limit).to(dtype)


def codes_of(t):
    return torch.stack((t.data % 16, t.data // 16), -1).flatten(-2)


def nearest(values, among):
    """The index of the nearest, which is even where two are equally near."""
    distance = (values[..., None] - among).abs()
    even = torch.arange(len(among)) % 2 == 0
    return ((distance == distance.amin(-1, keepdim=True)) * (1 + even.int())).argmax(-1)


def spread_out(scale, columns):
    return scale.repeat_interleave(columns // scale.shape[-1], -1)


CASE = dict(
    rows=st.integers(1, 4),
    groups=st.integers(1, 4),
    dtype=DTYPES,
    exponent=st.integers(-20, 12),
    seed=st.integers(0, 1000),
    ties=st.booleans(),
)


@settings(max_examples=40, deadline=None)
@given(**CASE)
def test_mxfp4_takes_the_nearest_codes(rows, groups, dtype, exponent, seed, ties):
    w = weights(rows, 32 * groups, dtype, exponent, seed, ties)
    t = quantize_mxfp4(w)
    assert t.format == "mxfp4" and t.tensor_scale is None and t.scale.shape == (rows, groups)
    for scale, amax in zip(t.scale.flatten().tolist(), w.unflatten(1, (-1, 32)).abs().amax(-1).flatten(), strict=True):
        assert scale == (math.frexp(amax.item())[1] - 1 - 2 + 127 if amax else 0)
    ratio = w.double() / spread_out(2.0 ** (t.scale.double() - 127), 32 * groups)
    assert torch.equal(codes_of(t).long(), nearest(ratio.abs(), E2M1) + 8 * w.signbit())


@settings(max_examples=40, deadline=None)
@given(group=st.sampled_from((32, 128)), **CASE)
def test_int4_takes_the_nearest_codes(group, rows, groups, dtype, exponent, seed, ties):
    w = weights(rows, group * groups, dtype, exponent, seed, ties)
    t = quantize_int4(w, group=group)
    assert t.format == "int4" and t.tensor_scale is None and t.scale.shape == (rows, groups)
    amax = w.float().unflatten(1, (-1, group)).abs().amax(-1)
    assert torch.equal(t.scale, (amax / 7).clamp(min=2.0**-126).bfloat16())
    ratio = w.float() / spread_out(t.scale.float(), group * groups)
    signed = codes_of(t).long()
    signed = torch.where(signed > 7, signed - 16, signed)
    assert torch.equal(signed, nearest(ratio.double(), INT4) - 8) and signed.min() >= -7


@pytest.mark.parametrize("form", QUANTIZERS)
@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf, -math.inf])
def test_nan_and_infinity_stay_in_their_group(form, value):
    quantizer, group = QUANTIZERS[form]
    w = random(2, 6, 384, dtype=torch.bfloat16)
    clean = dequantize(quantizer(w))
    w[1, 3, 130] = value
    t = quantizer(w)
    hit = torch.zeros(w.shape, dtype=torch.bool)
    hit[1, 3, 128 : 128 + group] = True
    values = dequantize(t)
    assert values[hit].isnan().all() and torch.equal(values[~hit], clean[~hit])
    assert not codes_of(t)[hit].any()
    assert t.scale[1, 3, 128 // group] == 255 if form == "mxfp4" else t.scale[1, 3, 128 // group].isnan()


@pytest.mark.parametrize("form", QUANTIZERS)
def test_extreme_magnitudes(form):
    quantizer, group = QUANTIZERS[form]
    for magnitude in (0.0, 1e-45, 1e-40, 1e-38, 1e-30, 3.3e38):
        w = torch.linspace(-1, 1, group).mul(magnitude)[None]
        t = quantizer(w)
        values = dequantize(t)
        assert values.isfinite().all()
        largest_error = magnitude * (1 / 4 if form == "mxfp4" else 1 / 14 * (1 + 2**-8))  # 8 becomes 6; half a step
        assert (values.double() - w.double()).abs().max() <= max(largest_error, 2.0**-127)
        if not magnitude:
            assert not (t.data & 0x77).any()


def test_every_exponent():
    """Subnormal 2^-127 and NaN among them."""
    scale = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(as_float(scale)[:255].double(), 2.0 ** (torch.arange(255).double() - 127))
    assert as_float(scale)[255].isnan()


def test_values_of_every_code():
    data = torch.arange(256, dtype=torch.uint8).view(4, 64)  # four rows of K = 128
    low, high = codes_of(PackedTensor(data, data, "")).long().unflatten(1, (-1, 2)).unbind(-1)
    assert torch.equal(low + 16 * high, data.long())
    code = torch.stack((low, high), -1).flatten(-2)
    e2m1 = torch.where(code > 7, -1.0, 1.0) * E2M1[code % 8]
    int4 = (code + 8) % 16 - 8

    powers = torch.tensor([0, 1, 127, 200], dtype=torch.uint8)[:, None].repeat(1, 4)
    expected = e2m1 * 2.0 ** (spread_out(powers, 128).double() - 127)
    assert torch.equal(dequantize(PackedTensor(data, powers, "mxfp4"), dtype=torch.float64), expected)
    assert dequantize(PackedTensor(data, powers.fill_(255), "mxfp4")).isnan().all()

    for groups, dtype in ((1, torch.bfloat16), (4, torch.float32)):
        scale = random(4, groups, dtype=dtype)
        found = dequantize(PackedTensor(data, scale, "int4"))
        assert torch.equal(found, int4 * spread_out(scale.float(), 128))
        assert dequantize(PackedTensor(data, scale, "int4"), dtype=torch.bfloat16).dtype is torch.bfloat16

    scale = random(4, 8, spread=1.0).to(torch.float8_e4m3fn)
    for tensor_scale in (torch.tensor(0.3), torch.rand(4)):
        product = e2m1.float() * spread_out(scale.float(), 128)
        product = product * (tensor_scale[:, None] if tensor_scale.dim() else tensor_scale)
        assert torch.equal(dequantize(PackedTensor(data, scale, "nvfp4", tensor_scale)), product)
    stacked = PackedTensor(data.view(2, 2, 64), scale.view(2, 2, 8), "nvfp4", torch.tensor([1.0, 2.0]))
    both = dequantize(stacked)
    each = [dequantize(PackedTensor(*(part[i] for part in stacked[:2]), "nvfp4", stacked[3][i])) for i in range(2)]
    assert torch.equal(both, torch.stack(each))


@pytest.mark.parametrize("setting", ["default float64", "default bfloat16", "default device meta", "inference mode"])
def test_settings_of_the_process_do_not_matter(setting):
    w = random(2, 8, 256).requires_grad_()
    expected = [(t := quantizer(w), dequantize(t)) for quantizer, _ in QUANTIZERS.values()]
    with SETTINGS[setting]():
        found = [(t := quantizer(w), dequantize(t)) for quantizer, _ in QUANTIZERS.values()]
    for (one, values), (other, wanted) in zip(found, expected, strict=True):
        assert not one.scale.requires_grad and one.format == other.format
        for got, before in zip((*one[:2], values), (*other[:2], wanted), strict=True):
            assert got.dtype is before.dtype and torch.equal(got, before)


def test_sizes():
    for shape in ((0, 128), (3, 0), (2, 0, 64), (2, 3, 4, 32)):
        t = quantize_mxfp4(torch.ones(shape))
        assert t.data.shape == (*shape[:-1], shape[-1] // 2) and t.scale.shape == (*shape[:-1], shape[-1] // 32)
        assert torch.equal(dequantize(t), torch.ones(shape))


def test_what_is_refused():
    w = torch.randn(4, 128)
    refused(TypeError, "^w: expected bfloat16, float16 or float32, got torch.float64", quantize_mxfp4, w.double())
    refused(TypeError, "^w: expected bfloat16, float16 or float32, got torch.int32", quantize_int4, w.int())
    refused(ValueError, r"^w: .* K a multiple of 32, got \(4, 48\)", quantize_mxfp4, w[:, :48])
    refused(ValueError, r"^w: .* K a multiple of 128, got \(4, 64\)", quantize_int4, w[:, :64])
    refused(ValueError, r"^w: expected shape \(..., N, K\)", quantize_mxfp4, w[0])
    refused(ValueError, r"^group: expected one of \(32, 128\), got 64", quantize_int4, w, group=64)
    refused(TypeError, "^group: expected an int, got float", quantize_int4, w, group=32.0)

    t, scale = quantize_mxfp4(w), torch.ones(4, 8).to(torch.float8_e4m3fn)
    nvfp4 = PackedTensor(t.data, scale, "nvfp4", torch.ones(()))
    for wrong, error, message in (
        (t._replace(data=None), TypeError, r"^t\.data: expected a torch\.Tensor, got NoneType"),
        (t._replace(scale=1.0), TypeError, r"^t\.scale: expected a torch\.Tensor, got float"),
        (t._replace(format="mxfp6"), ValueError, r"^t\.format: expected one of \('mxfp4', .* got 'mxfp6'"),
        (t._replace(data=t.data.int()), TypeError, r"^t\.data: expected uint8, got torch\.int32"),
        (t._replace(data=t.data[0]), ValueError, r"^t\.data: expected shape \(\.\.\., N, K/2\), got \(64,\)"),
        (t._replace(data=t.data[:, :24]), ValueError, r"^t\.data: K must be a multiple of 32 .* got K = 48"),
        (t._replace(scale=t.scale.float()), TypeError, r"^t\.scale: expected uint8, got torch\.float32"),
        (t._replace(format="int4"), TypeError, r"^t\.scale: expected bfloat16 or float32, got torch\.uint8"),
        (t._replace(scale=t.scale[:3]), ValueError, r"^t\.scale: expected shape \(4, 4\), .* got \(3, 4\)"),
        (t._replace(scale=t.scale.to("meta")), ValueError, r"^t\.scale: expected on cpu like the data, got meta"),
        (t._replace(tensor_scale=torch.ones(())), ValueError, r"^t\.tensor_scale: expected None with 'mxfp4', got a"),
        (
            PackedTensor(t.data, torch.ones(4, 2), "int4"),
            ValueError,
            r"^t\.scale: .* \(4, 4\) or \(4, 1\), .* \(4, 2\)",
        ),
        (nvfp4._replace(tensor_scale=None), ValueError, r"^t\.tensor_scale: expected a tensor with 'nvfp4', got None"),
        (nvfp4._replace(tensor_scale=torch.ones(2)), ValueError, r"^t\.tensor_scale: expected shape \(\) or \(4,\)"),
        (nvfp4._replace(tensor_scale=torch.ones(4).half()), TypeError, r"^t\.tensor_scale: expected float32, got"),
    ):
        refused(error, message, dequantize, wrong)
    refused(TypeError, r"^t\.data: expected float8_e4m3fn, got torch\.uint8", dequantize, FP8Tensor(t.data, w))
    refused(TypeError, "^dtype: expected a floating dtype", dequantize, t, dtype=torch.int8)
