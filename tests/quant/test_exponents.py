"""Exponents of MXFP4 weights in the order in which the GEMM kernels load them, and back."""

import itertools

import pytest
import torch

from fp8moe.quant.exponents import arrange, arranged_shape, as_stored, projections_of, stored

SHAPES = [(1, 2, 1), (3, 136, 5), (2, 392, 90), (5, 1536, 64), (256, 36), (0, 8, 4), (2, 0, 4)]


def drawn(*shape):
    """Exponents that differ little, of some rows much, among them NaN (255)."""
    exponents = torch.randint(100, 110, shape, dtype=torch.uint8)
    exponents[..., ::7, :] = torch.randint(0, 256, exponents[..., ::7, :].shape, dtype=torch.uint8)
    return exponents


@pytest.mark.parametrize("projections", [1, 2])
@pytest.mark.parametrize("shape", SHAPES)
def test_arranged_exponents_are_the_stored_ones_again(shape, projections):
    exponents = drawn(*shape)
    n, groups = shape[-2:]
    made = arrange(exponents, projections)
    assert made.shape == (*shape[:-2], *arranged_shape(n, 32 * groups, projections))
    assert torch.equal(stored(made, n, 32 * groups, projections), exponents)
    data = torch.empty(*shape[:-1], 16 * groups, dtype=torch.uint8)
    assert projections_of(data, made) == projections and projections_of(data, exponents) == 0
    assert torch.equal(as_stored(data, made), exponents) and as_stored(data, exponents) is exponents


def test_words():
    """For each feature how far it is below the block's largest, then the largest, by blocks along K."""
    exponents = drawn(1, 300, 6)
    exponents[0, 7, 5], exponents[0, 129] = 255, 255
    words = arrange(exponents)[0].view(2, -1, 4).int()
    for block, rows in itertools.product(range(2), range(3)):
        here = exponents[0, 128 * rows : 128 * rows + 128, 4 * block : 4 * block + 4].int()
        largest = here[here < 255].max()
        assert words[block, 300 + rows].tolist() == [largest, 0, 0, 0]
        expected = torch.where(here < 255, largest - here, 255)
        assert torch.equal(words[block, 128 * rows : 128 * rows + 128][: len(here), : here.shape[1]], expected)
    assert words.shape == (2, 304, 4) and not words[:, 303].any()
