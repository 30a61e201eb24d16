"""Weights in four bits as the GEMM kernels load them: what arranges them on a GPU against the reference."""

import pytest
import torch

from fp8moe import PackedTensor
from fp8moe.quant.arranged import arrange, as_stored
from tests.quant.test_arranged import NVFP4_SHAPES, SHAPES, drawn, drawn_nvfp4

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("projections", [1, 2])
@pytest.mark.parametrize("shape", SHAPES)
def test_arrange(shape, projections):
    exponents = drawn(*shape)
    weight = torch.randint(0, 256, (*shape[:-1], 16 * shape[-1]), dtype=torch.uint8), exponents
    expected = arrange(PackedTensor(*weight, "mxfp4"), projections)[:2]
    anywhere = []
    for part in weight:
        base = torch.full((part.numel() + 1,), 7, dtype=torch.uint8, device="cuda")
        anywhere.append(base[1:].view(part.shape).copy_(part))
    for there in ([part.cuda() for part in weight], anywhere):
        got = arrange(PackedTensor(*there, "mxfp4"), projections)[:2]
        assert all(torch.equal(part.cpu(), other) for part, other in zip(got, expected, strict=True))
    assert all(torch.equal(part.cpu(), other) for part, other in zip(as_stored(*got)[:2], weight, strict=True))


@pytest.mark.parametrize("projections", [1, 2])
@pytest.mark.parametrize("shape", NVFP4_SHAPES)
def test_arrange_nvfp4(shape, projections):
    stored = drawn_nvfp4(*shape, projections=projections)
    expected = arrange(stored, projections)
    there = PackedTensor(stored.data.cuda(), stored.scale.cuda(), "nvfp4", stored.tensor_scale.cuda())
    got = arrange(there, projections)
    again = as_stored(*got[:2])
    pairs = (got.data, expected.data), (got.scale, expected.scale), (again.data, stored.data)
    for found, wanted in (*pairs, (again.scale, stored.scale)):
        assert torch.equal(found.cpu().view(torch.uint8), wanted.view(torch.uint8))
    assert torch.equal(again.tensor_scale.cpu(), stored.tensor_scale)
