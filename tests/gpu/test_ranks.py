"""Ranks of tokens and of rows on the GPU, one by one against float64."""

import pytest
import torch

from fp8moe.kernels.experts import ranks_plan
from fp8moe.kernels.experts.ranks import pick_ranks, spread_ranks
from tests.ranks_cases import expected_pick, expected_spread, operands
from tests.waiting import no_waiting

pytestmark = pytest.mark.gpu

SIZES = [(1, 1, 1, 8), (37, 5, 3, 24), (70, 128, 8, 16), (300, 32, 2, 64), (9, 3, 40, 8), (50, 1000, 4, 8)]


@pytest.mark.parametrize("sizes", SIZES)
def test_picked_and_nothing_else_written(sizes):
    ranks, picked, _, index, rows = operands(*sizes, device="cuda")
    out = torch.full((picked.shape[0] + 1, picked.shape[1]), torch.nan, device="cuda").bfloat16()
    ranks_plan.pick_ranks(ranks, index, rows, sizes[1], out[:-1])
    used = rows[rows >= 0].long()
    assert torch.equal(out[used], expected_pick(ranks, index, rows, sizes[1])[used])
    outside = torch.ones(len(out), dtype=torch.bool, device="cuda")
    outside[used] = False
    assert out[outside].isnan().all()
    assert torch.equal(pick_ranks(ranks, index, rows, sizes[1])[used], out[used])


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
def test_sums_over_all_that_was_there(sizes, weighted):
    ranks, picked, weights, index, rows = operands(*sizes, device="cuda")
    unused = torch.ones(len(picked), dtype=torch.bool, device="cuda")
    unused[rows[rows >= 0].long()] = False
    picked[unused] = torch.nan  # rows of no assignment are not read
    weights = weights if weighted else None
    out = torch.full((len(ranks) + 1, ranks.shape[1]), torch.nan, device="cuda").bfloat16()
    ranks_plan.spread_ranks(picked, weights, index, rows, out[:-1])
    expected = expected_spread(picked, weights, index, rows, sizes[1])
    assert (out[:-1].double() - expected).norm() <= 4e-3 * expected.norm()
    assert not out[:-1][expected == 0].any() and out[-1].isnan().all()
    for _ in range(10):
        assert torch.equal(spread_ranks(picked, weights, index, rows, sizes[1]), out[:-1])


def test_operands_in_any_layout():
    ranks, picked, weights, index, rows = operands(37, 5, 4, 16, device="cuda")
    used, others = rows[rows >= 0].long(), index.t().contiguous().t()
    got, want = pick_ranks(ranks.t().contiguous().t(), others, rows, 5), pick_ranks(ranks, index, rows, 5)
    assert torch.equal(got[used], want[used])
    memory = torch.empty(picked.numel() + 1, device="cuda").bfloat16()[1:].view_as(picked).copy_(picked)
    arguments = weights.t().contiguous().t(), others, rows, 5
    assert torch.equal(spread_ranks(memory, *arguments), spread_ranks(picked, weights, index, rows, 5))


@pytest.mark.parametrize(("tokens", "top_k"), [(0, 2), (3, 0)])
def test_nothing_to_do(tokens, top_k):
    ranks, picked, weights, index, rows = operands(tokens, 4, top_k, 8, device="cuda")
    assert pick_ranks(ranks, index, rows, 4).shape == picked.shape
    assert not spread_ranks(picked, weights, index, rows, 4).any()


def test_the_host_does_not_wait():
    ranks, picked, weights, index, rows = operands(70, 8, 2, 16, device="cuda")
    pick_ranks(ranks, index, rows, 8), spread_ranks(picked, weights, index, rows, 8)  # compiled
    with no_waiting():
        pick_ranks(ranks, index, rows, 8), spread_ranks(picked, weights, index, rows, 8)
