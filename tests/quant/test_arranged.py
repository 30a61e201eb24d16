"""MXFP4 and NVFP4 weights as the GEMM kernels load them, and back."""

import itertools
import math

import pytest
import torch

from fp8moe import PackedTensor, dequantize
from fp8moe.quant import arranged
from fp8moe.quant.arranged import arrange, arranged_codes, arranged_exponents, as_stored, projections_of
from fp8moe.quant.packed import blocks_of_nvfp4, quantize_nvfp4

NVFP4_SHAPES = [(1, 2, 2), (3, 136, 10), (2, 392, 180), (5, 1536, 64), (256, 36), (0, 8, 4), (2, 0, 4)]
SHAPES = [(1, 2, 1), (3, 136, 5), (2, 392, 90), (5, 1536, 64), (256, 36), (0, 8, 4), (2, 0, 4)]


def drawn(*shape):
    """Exponents that differ little, of some rows by up to 30, among them NaN (255)."""
    exponents = torch.randint(100, 110, shape, dtype=torch.uint8)
    exponents[..., ::7, :] = torch.randint(90, 121, exponents[..., ::7, :].shape, dtype=torch.uint8)
    exponents[..., ::11, ::3] = 255
    return exponents


@pytest.mark.parametrize("projections", [1, 2])
@pytest.mark.parametrize("shape", SHAPES)
def test_arranged_weights_are_the_stored_ones_again(shape, projections):
    exponents = drawn(*shape)
    n, groups = shape[-2:]
    data = torch.randint(0, 256, (*shape[:-1], 16 * groups), dtype=torch.uint8)
    stored = PackedTensor(data, exponents, "mxfp4")
    made = arrange(stored, projections)
    assert made.data.shape == data.shape
    assert made.scale.shape == (*shape[:-2], *arranged.arranged_shape(n, 32 * groups, projections))
    assert projections_of(*made[:2]) == projections and projections_of(data, exponents) == 0
    again = as_stored(*made[:2])
    assert again.format == "mxfp4" and all(map(torch.equal, again[:2], (data, exponents)))
    assert as_stored(data, exponents).data is data and as_stored(data, exponents).scale is exponents


def drawn_nvfp4(*shape, projections=1):
    """All codes, and all scales that are not negative, subnormal ones and NaN among them; shape: of 16-value groups."""
    scale = torch.randint(0, 128, shape, dtype=torch.uint8)
    scale[..., ::5, :] = torch.randint(90, 110, scale[..., ::5, :].shape, dtype=torch.uint8)
    data = torch.randint(0, 256, (*shape[:-1], 8 * shape[-1]), dtype=torch.uint8)
    tensor_scale = torch.rand((*shape[:-2], projections) if projections > 1 else shape[:-2])
    return PackedTensor(data, scale.view(torch.float8_e4m3fn), "nvfp4", tensor_scale)


@pytest.mark.parametrize("projections", [1, 2])
@pytest.mark.parametrize("shape", NVFP4_SHAPES)
def test_arranged_nvfp4_is_the_stored_one_again(shape, projections):
    stored = drawn_nvfp4(*shape, projections=projections)
    made = arrange(stored, projections)
    n, k = shape[-2], 16 * shape[-1]
    assert made.tensor_scale is None and made.scale.dtype is torch.float8_e4m3fn
    assert made.scale.shape == (*shape[:-2], *arranged.arranged_shape(n, k, projections, "nvfp4"))
    assert projections_of(*made[:2]) == projections and projections_of(*stored[:2]) == 0
    again = as_stored(*made[:2])
    assert torch.equal(again.data, stored.data) and torch.equal(again.tensor_scale, stored.tensor_scale)
    assert torch.equal(again.scale.view(torch.uint8), stored.scale.view(torch.uint8))


def test_what_kernels_multiply_in_nvfp4():
    """Each code times the mantissa of its scale, rounded to E4M3 beside the largest exponent of 128x128."""
    stored = drawn_nvfp4(2, 300, 12)
    stored.scale[0, 3, 5] = -1.0
    stored.scale[1, :128, :8] = 0
    values, scale = blocks_of_nvfp4(*arrange(stored)[:2])
    codes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    for e, block, rows in itertools.product(range(2), range(2), range(3)):
        at = e, slice(128 * rows, 128 * rows + 128), slice(8 * block, 8 * block + 8)
        group = stored.scale[at].float()
        group[group < 0] = math.nan
        largest = math.floor(math.log2(group.nan_to_num(0).max())) if group.nan_to_num(0).any() else -127
        factor = scale[e, rows, block].double()
        assert factor == 0 or factor == 2.0 ** (largest - 5) * stored.tensor_scale[e].double() or largest == -127
        data = stored.data[e, at[1], 64 * block : 64 * block + 64].int()
        value = codes[torch.stack((data & 15, data >> 4), -1).flatten(-2)].unflatten(-1, (-1, 16))
        expected = (value * (group / 2.0 ** (largest - 5))[..., None]).flatten(-2).to(torch.float8_e4m3fn).float()
        found = values[e, at[1], 128 * block : 128 * block + 128].float()
        assert torch.equal(found.nan_to_num(7e7), expected.nan_to_num(7e7))


def test_nvfp4_of_weights():
    w = torch.randn(3, 64, 160) * torch.tensor([1e-4, 1.0, 300.0])[:, None, None]
    w[1, 5] = 0
    t = quantize_nvfp4(w)
    assert t.scale.dtype is torch.float8_e4m3fn and t.tensor_scale.shape == (3,)
    error = (dequantize(t) - w).norm(dim=(1, 2)) / w.norm(dim=(1, 2))
    assert (error < 0.1).all() and not dequantize(t)[1, 5].any() and not dequantize(quantize_nvfp4(0 * w)).any()


def test_codes():
    """Eight values in a word, whose low bits and signs lie apart."""
    codes = torch.randint(0, 16, (3, 64), dtype=torch.uint8)
    words = arranged_codes(codes[:, ::2] | codes[:, 1::2] << 4).view(torch.int32).view(3, 2, 4)
    for row, group, q, j in itertools.product(range(3), range(2), range(4), range(4)):
        word, values = int(words[row, group, q]) & 0xFFFFFFFF, codes[row, 32 * group :]
        for value, low, sign in (
            (values[4 * q + j], 4 * j, 8 * j + 7),
            (values[16 + 4 * q + j], 16 + 4 * j, 8 * j + 3),
        ):
            assert word >> low & 7 == int(value) & 7 and word >> sign & 1 == int(value) >> 3


def test_exponents():
    """For each feature 8 times how far it is below the block's largest, then the largest, by blocks along K."""
    exponents = drawn(1, 300, 6)
    exponents[0, 7, 5], exponents[0, 129], exponents[0, 8, 1] = 255, 255, 3
    words = arranged_exponents(exponents)[0].view(2, -1, 4).int()
    for block, rows in itertools.product(range(2), range(3)):
        here = exponents[0, 128 * rows : 128 * rows + 128, 4 * block : 4 * block + 4].int()
        largest = here[here < 255].max()
        assert words[block, 300 + rows].tolist() == [largest, 0, 0, 0]
        expected = 8 * torch.where(here < 255, (largest - here).clamp(max=30), 31)
        assert torch.equal(words[block, 128 * rows : 128 * rows + 128][: len(here), : here.shape[1]], expected)
    assert words.shape == (2, 304, 4) and not words[:, 303].any()
