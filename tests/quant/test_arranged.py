"""MXFP4 weights as the GEMM kernels load them, and back."""

import itertools

import pytest
import torch

from fp8moe.quant import arranged
from fp8moe.quant.arranged import arrange, arranged_codes, arranged_exponents, as_stored, projections_of

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
    made = arrange(data, exponents, projections)
    assert made.data.shape == data.shape
    assert made.scale.shape == (*shape[:-2], *arranged.arranged_shape(n, 32 * groups, projections))
    assert projections_of(*made) == projections and projections_of(data, exponents) == 0
    assert all(map(torch.equal, as_stored(*made), (data, exponents)))
    assert as_stored(data, exponents).data is data and as_stored(data, exponents).scale is exponents


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
