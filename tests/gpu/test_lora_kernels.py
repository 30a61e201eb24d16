"""Products of LoRA's factors with rows of experts on the GPU against float64."""

from functools import partial

import pytest
import torch

from fp8moe.kernels.experts import lora
from fp8moe.kernels.experts.lora import lora_gradient, lora_shrink
from tests import lora_cases
from tests.errors import relative_error
from tests.lora_cases import exact

pytestmark = pytest.mark.gpu

NAN = float("nan")
TOLERANCE = 2e-3  # rounding to bfloat16 takes 1.7e-3
SIZES = {
    "single rows": [1] * 9,
    "few rows": [3, 0, 7, 8, 0, 9, 2, 5],
    "around the tiles": [63, 64, 65, 1, 31, 32, 33],
    "one has it all": [0, 0, 700, 0],
    "many": [5] * 300,
    "empty": [0, 0, 0],
}
operands = partial(lora_cases.operands, device="cuda")


def poisoned(like, rows=0):
    """With more rows behind it, which no kernel may write."""
    return torch.full((like.shape[0] + rows, *like.shape[1:]), NAN, device="cuda").bfloat16()


@pytest.mark.parametrize("tokens", [None, 37])
@pytest.mark.parametrize("rank", [16, 48])
@pytest.mark.parametrize("width", [8, 136, 768, 2050 // 8 * 8, 7168])
@pytest.mark.parametrize("sizes", SIZES)
def test_products(sizes, width, rank, tokens):
    sizes = SIZES[sizes]
    x, factors, ranks, offsets, index = operands(sizes, width, rank, tokens)
    used = sum(sizes)
    if index is None:
        x[used:] = NAN
    ranks[used:] = NAN
    shrunk, gradient = exact(x, factors, ranks, offsets, index)
    out = poisoned(ranks, 1)
    lora.launch_shrink(x, factors, offsets, index, out[:-1])
    assert out[used:].isnan().all()
    made = poisoned(factors, 1)
    lora.launch_gradient(ranks, x, offsets, index, made[:-1])
    assert made[-1].isnan().all() and not made[:-1][[size == 0 for size in sizes]].any()
    if used:
        assert relative_error(out[:used], shrunk[:used]) <= TOLERANCE
        assert relative_error(made[:-1], gradient) <= TOLERANCE
    again = torch.empty_like(out)
    for _ in range(20):
        lora.launch_shrink(x, factors, offsets, index, again[:-1])
        assert torch.equal(again[:used], out[:used])
        assert torch.equal(lora_gradient(ranks, x, offsets, index), made[:-1])


@pytest.mark.parametrize("tokens", [None, 37])
@pytest.mark.parametrize("sizes", SIZES)
def test_groups_of_few_and_of_many_rows(sizes, tokens):
    """By the operator, whose thread blocks share the groups of few rows."""
    sizes = SIZES[sizes]
    x, factors, ranks, offsets, index = operands(sizes, 264, 16, tokens)
    shrunk, _ = exact(x, factors, ranks, offsets, index)
    used, out = sum(sizes), lora_shrink(x, factors, offsets, index)
    assert out.shape == ranks.shape
    if used:
        assert relative_error(out[:used], shrunk[:used]) <= TOLERANCE
    for _ in range(20):
        assert torch.equal(lora_shrink(x, factors, offsets, index)[:used], out[:used])
