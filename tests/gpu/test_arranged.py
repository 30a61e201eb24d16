"""MXFP4 weights as the GEMM kernels load them: the kernels that arrange them against the reference."""

import pytest
import torch

from fp8moe.quant.arranged import arrange, as_stored
from tests.quant.test_arranged import SHAPES, drawn

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("projections", [1, 2])
@pytest.mark.parametrize("shape", SHAPES)
def test_arrange(shape, projections):
    exponents = drawn(*shape)
    weight = torch.randint(0, 256, (*shape[:-1], 16 * shape[-1]), dtype=torch.uint8), exponents
    expected = arrange(*weight, projections)
    anywhere = []
    for part in weight:
        base = torch.full((part.numel() + 1,), 7, dtype=torch.uint8, device="cuda")
        anywhere.append(base[1:].view(part.shape).copy_(part))
    for there in ([part.cuda() for part in weight], anywhere):
        got = arrange(*there, projections)
        assert all(torch.equal(part.cpu(), other) for part, other in zip(got, expected, strict=True))
    assert all(torch.equal(part.cpu(), other) for part, other in zip(as_stored(*got), weight, strict=True))
