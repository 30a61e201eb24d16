"""The combining kernel writes the sums of the reference to the buffers of ranks, bit for bit, and nothing else."""

import itertools

import pytest
import torch

from fp8moe.kernels.experts import combine_plan, reference
from fp8moe.kernels.experts.combine import combine_to
from fp8moe.kernels.experts.peer_table import SIGNALS_BYTES, meeting
from fp8moe.runtime.checks import FLOATING
from fp8moe.runtime.launch import current_stream, device_guard
from tests.peer_cases import marked

pytestmark = pytest.mark.gpu

Y_DTYPES = (torch.bfloat16, torch.float32)
SIZES = ((1, 7168, 8), (1, 8, 1), (2, 128, 3), (7, 264, 6), (33, 576, 9), (65, 1048, 33), (130, 48, 64), (515, 2056, 8))


def operands(tokens, hidden, top_k, dtypes=(torch.bfloat16, torch.float32), seed=0):
    """Rows of which some are out of range, and a token without any."""
    generator = torch.Generator("cuda").manual_seed(seed)
    count = tokens * top_k
    y = torch.randn(count, hidden, generator=generator, device="cuda").to(dtypes[0])
    bounds = -count // 4 - 1, count + count // 4 + 1
    rows = torch.randint(*bounds, (tokens, top_k), dtype=torch.int32, generator=generator, device="cuda")
    rows[tokens // 2] = -1
    return y, rows, torch.randn(tokens, top_k, generator=generator, device="cuda").to(dtypes[1])


def new_buffers(ranks, tokens, hidden):
    return [marked(tokens, hidden, dtype=torch.float32, device="cuda") for _ in range(ranks)]


def assert_equal(buffers, expected):
    assert all(torch.equal(*(x.view(torch.int32) for x in pair)) for pair in zip(buffers, expected, strict=True))


def assert_matches(values, ranks, rank, to_all, partial=None):
    tokens, hidden = len(values[1]), values[0].shape[1]
    count = tokens * ranks if to_all else tokens
    buffers, expected = (new_buffers(ranks, count, hidden) for _ in range(2))
    combine_to(*values, buffers, rank, to_all=to_all, partial=partial)
    reference.combine_to(*values, expected, rank, to_all, partial)
    assert_equal(buffers, expected)


@pytest.mark.parametrize(("ranks", "to_all"), list(itertools.product((2, 4, 8), (False, True))))
@pytest.mark.parametrize(("tokens", "hidden", "top_k"), SIZES)
def test_sizes(tokens, hidden, top_k, ranks, to_all):
    tokens = tokens if to_all else tokens * ranks
    for rank, y_dtype in itertools.product({0, ranks - 1}, Y_DTYPES):
        values = operands(tokens, hidden, top_k, (y_dtype, FLOATING[rank % 3]), seed=rank)
        assert_matches(values, ranks, rank, to_all)
        assert_matches(values, ranks, rank, to_all, torch.randn(tokens, hidden, device="cuda"))


@pytest.mark.parametrize(("ranks", "to_all"), [(2, False), (8, False), (2, True)])
@pytest.mark.parametrize("y_dtype", Y_DTYPES)
def test_more_tokens_than_warps(y_dtype, ranks, to_all):
    for tokens, hidden, top_k in ((3000, 7168, 8), (2000, 1040, 40)):
        values = operands(tokens, hidden, top_k, (y_dtype, torch.float32), seed=ranks)
        values[1][torch.rand(tokens, device="cuda") < 0.5] = -1  # half of the tokens have no row
        assert_matches(values, ranks, 1, to_all)
        assert_matches(values, ranks, 1, to_all, torch.randn(tokens, hidden, device="cuda"))


@pytest.mark.parametrize("to_all", [False, True])
def test_tokens_without_a_row_are_left_alone(to_all):
    values = operands(40, 264, 8)
    values[1].fill_(-1)
    buffers, marked_ones = (new_buffers(4, 160 if to_all else 40, 264) for _ in range(2))
    combine_to(*values, buffers, 2, to_all=to_all)
    assert_equal(buffers, marked_ones)
    partial = torch.randn(40, 264, device="cuda")
    combine_to(*values, buffers, 2, to_all=to_all, partial=partial)
    parts = [partial] * 4 if to_all else partial.split(10)
    for buffer, part in zip(buffers, parts, strict=True):
        assert torch.equal(buffer[2 * len(part) :][: len(part)], part)


@pytest.mark.parametrize("to_all", [False, True])
def test_unused_values_do_not_leak(to_all):
    y, rows, weights = operands(100, 520, 8)
    used = torch.zeros(len(y), dtype=torch.bool, device="cuda")
    used[rows[(rows >= 0) & (rows < len(y))].long()] = True
    assert not used.all()
    y[~used] = float("nan")
    assert_matches((y, rows, weights), 4, 1, to_all)
    buffers = new_buffers(4, 400 if to_all else 100, 520)
    combine_to(y, rows, weights, buffers, 1, to_all=to_all)
    own = slice(100, 200) if to_all else slice(25, 50)
    assert all(buffer[own].isfinite().all() for buffer in buffers)


def test_strided_operands():
    y, rows, weights = operands(40, 304, 8)
    partial = torch.randn(304, 40, device="cuda").t()
    for values in ((y[:, 4:204], rows.t().contiguous().t(), weights[:, :8]), (y[3:], rows[:, ::2], weights[:, 1::2])):
        assert_matches(values, 2, 1, False, partial[:, : values[0].shape[1]])


def test_same_bits_every_time():
    values = operands(700, 1040, 8)
    first = new_buffers(2, 700, 1040)
    combine_to(*values, first, 0)
    for _ in range(20):
        buffers = new_buffers(2, 700, 1040)
        combine_to(*values, buffers, 0)
        assert_equal(buffers, first)


@pytest.mark.parametrize("to_all", [False, True])
def test_cuda_graph_with_changed_input(to_all):
    values = operands(76, 1040, 8)
    buffers, expected = (new_buffers(2, 152 if to_all else 76, 1040) for _ in range(2))
    combine_to(*values, buffers, 1, to_all=to_all)  # compiled before the capture
    reference.combine_to(*values, expected, 1, to_all, None)  # what is not written stays
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        combine_to(*values, buffers, 1, to_all=to_all)
    for seed in range(1, 4):
        for value, new in zip(values, operands(76, 1040, 8, seed=seed), strict=True):
            value.copy_(new)
        graph.replay()
        reference.combine_to(*values, expected, 1, to_all, None)
        assert_equal(buffers, expected)


@pytest.mark.parametrize("to_all", [False, True])
@pytest.mark.parametrize(("tokens", "sparse"), [(2, False), (64, True), (2000, False), (10_000, True)])
def test_meeting(tokens, sparse, to_all):
    """The other ranks have come already, so that a rank alone passes; each time it tells all of them."""
    ranks, rank, hidden = 2, 1, 1040
    y, rows, weights = operands(tokens, hidden, 8)
    each = tokens if to_all else tokens // ranks
    buffers, expected = (new_buffers(ranks, ranks * each, hidden) for _ in range(2))
    reference.combine_to(y, rows, weights, expected, rank, to_all, None)
    signals = torch.zeros(ranks, SIGNALS_BYTES // 4, dtype=torch.int32, device="cuda")
    index = torch.cuda.current_device()
    with device_guard(index):
        dtypes = y.dtype, weights.dtype, torch.float32
        options = {"peers": ranks, "to_all": to_all, "sparse": sparse}
        plan = combine_plan.plan(tokens, hidden, 8, len(y), *dtypes, index, **options)
        for meetings in range(1, 21):
            signals[rank, 0] = meetings
            addresses = (value.data_ptr() for value in (y, rows, weights))
            outs = (buffer[rank * each :].data_ptr() for buffer in buffers)
            words = meeting([row.data_ptr() for row in signals], rank)
            plan.launch(current_stream(index), *addresses, 0, 0, 0, *outs, *words)
            assert signals[:, rank].tolist() == [meetings] * ranks and signals[rank, 8:].tolist() == [meetings, 0]
            assert_equal(buffers, expected)
