"""The choice of the highest index scores on a GPU: the same columns as the reference backend's, in graphs, twice."""

import pytest
import torch

from fp8moe import mqa_top_k
from fp8moe.kernels.indexer import reference
from fp8moe.kernels.indexer.checks import Chosen
from tests.gpu.checks import captured

pytestmark = pytest.mark.gpu

DEVICE = "cuda"


def scores(kind, rows, columns):
    logits = torch.randn(rows, columns, generator=torch.Generator().manual_seed(columns)).to(DEVICE)
    place = torch.arange(columns, device=DEVICE)
    match kind:
        case "zeros":
            logits.zero_()[:, ::3] = -0.0
        case "few values":
            logits = logits.mul(2).round()
        case "rising":
            logits = place.float().expand(rows, -1).contiguous()
        case "falling":
            logits = -place.float().expand(rows, -1).contiguous()
        case "not numbers":
            logits[:, ::5], logits[:, 1::7] = torch.nan, -torch.nan
        case "infinite":
            logits[:, ::5], logits[:, 1::3] = torch.inf, -torch.inf
    return logits


@pytest.mark.parametrize("kind", ["normal", "zeros", "few values", "rising", "falling", "not numbers", "infinite"])
@pytest.mark.parametrize("top_k", [1, 64, 2048])
@pytest.mark.parametrize(
    ("rows", "columns"), [(1, 1), (3, 7), (7, 2047), (4, 2049), (3, 8191), (3, 8193), (300, 5000), (5, 70001)]
)
def test_the_same_columns(rows, columns, top_k, kind):
    logits = scores(kind, rows, columns)
    draw = torch.Generator().manual_seed(top_k)
    starts = torch.randint(-3, max(columns // 3, 1), (rows,), generator=draw, dtype=torch.int32).to(DEVICE)
    ends = torch.randint(columns // 2, columns + 9, (rows,), generator=draw, dtype=torch.int32).to(DEVICE)
    for ranges in ((None, None), (starts, ends)):
        results = [mqa_top_k(logits, top_k=top_k, starts=ranges[0], ends=ranges[1]) for _ in range(20)]
        assert torch.equal(results[0], reference.mqa_top_k(Chosen(logits, top_k, *ranges)))
        assert all(torch.equal(results[0], again) for again in results[1:])


def test_what_lies_outside_of_a_range_is_not_chosen():
    logits = torch.full((9, 5000), torch.nan, device=DEVICE)
    ends = torch.arange(9, dtype=torch.int32, device=DEVICE) * 600
    for row, end in enumerate(ends.tolist()):
        logits[row, :end] = torch.randn(end)
    found = mqa_top_k(logits, top_k=700, ends=ends)
    assert (found < ends[:, None]).all() and ((found >= 0).sum(1) == ends.clamp(max=700)).all()


def test_rows_at_any_distance_and_more_than_the_kernel_takes():
    logits = torch.randn(6, 5001, device=DEVICE)
    for part in (logits[:, 1:], logits[::2, 3:4003], logits.T):
        for top_k in (5, 2049):
            expected = reference.mqa_top_k(Chosen(part, top_k, None, None))
            assert torch.equal(mqa_top_k(part, top_k=top_k), expected)


def test_ranges_that_change_between_replays():
    logits = torch.randn(5, 9000, device=DEVICE)
    starts, ends = (torch.zeros(5, dtype=torch.int32, device=DEVICE) for _ in range(2))
    graph, out = captured(lambda: mqa_top_k(logits, top_k=2048, starts=starts, ends=ends))
    for start, end in ((0, 9000), (700, 701), (3, 3), (-5, 2**31 - 1), (2**31 - 1, -7)):
        starts.fill_(start), ends.fill_(end), logits.normal_(), out.fill_(-9)
        graph.replay()
        assert torch.equal(out, reference.mqa_top_k(Chosen(logits, 2048, starts, ends)))
