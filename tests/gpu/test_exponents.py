"""Exponents of MXFP4 weights in the order in which the GEMM kernels load them: the kernel against the reference."""

import pytest
import torch

from fp8moe.quant.exponents import arrange, stored
from tests.quant.test_exponents import SHAPES, drawn

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("projections", [1, 2])
@pytest.mark.parametrize("shape", SHAPES)
def test_arrange(shape, projections):
    exponents = drawn(*shape)
    expected = arrange(exponents, projections)
    base = torch.full((exponents.numel() + 1,), 7, dtype=torch.uint8, device="cuda")
    anywhere = base[1:].view(exponents.shape).copy_(exponents)
    for there in (exponents.cuda(), anywhere):
        got = arrange(there, projections)
        assert torch.equal(got.cpu(), expected)
    n, groups = shape[-2:]
    assert torch.equal(stored(got, n, 32 * groups, projections).cpu(), exponents)
