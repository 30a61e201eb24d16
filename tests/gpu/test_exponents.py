"""Exponents of MXFP4 weights in the order in which the GEMM kernels load them."""

import pytest
import torch
from torch.nn.functional import pad

from fp8moe.kernels.gemm.exponents import arranged, words
from fp8moe.quant.formats import ceil_div

pytestmark = pytest.mark.gpu


def expected(exponents, projections):
    experts, n, groups = exponents.shape
    size, blocks = n // projections, ceil_div(groups, 4)
    rows = ceil_div(size, 128)
    whole = pad(
        exponents.int().view(experts, projections, size, groups), (0, 4 * blocks - groups, 0, 128 * rows - size)
    )
    whole = whole.view(experts, projections, rows, 128, blocks, 4)
    numbers = whole.where(whole < 255, 0)
    largest = numbers.amax((3, 5), keepdim=True)
    below = (largest - whole).where(whole < 255, 255).flatten(2, 3)[:, :, :size].flatten(1, 2)  # experts, n, blocks, 4
    out = torch.zeros(experts, blocks, words(n, projections), 4, dtype=torch.uint8)
    out[:, :, :n] = below.transpose(1, 2).to(torch.uint8)
    out[:, :, n : n + projections * rows, 0] = largest.view(experts, -1, blocks).transpose(1, 2).to(torch.uint8)
    return out


@pytest.mark.parametrize("projections", [1, 2])
@pytest.mark.parametrize(
    ("experts", "n", "groups"), [(1, 2, 1), (3, 136, 5), (2, 392, 90), (5, 1536, 64), (1, 256, 36)]
)
def test_arranged(experts, n, groups, projections):
    exponents = torch.randint(0, 256, (experts, n, groups), dtype=torch.uint8)
    exponents[:, ::7] = torch.randint(100, 110, exponents[:, ::7].shape, dtype=torch.uint8)
    got = arranged(exponents.cuda(), projections).cpu()
    assert torch.equal(got, expected(exponents, projections))
