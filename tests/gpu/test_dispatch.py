"""The dispatching kernel writes the bits of the reference to the slots of one rank in buffers, and nothing else."""

import pytest
import torch

from fp8moe.kernels.experts import reference
from fp8moe.kernels.experts.dispatch import dispatch, launcher
from fp8moe.runtime.checks import FLOATING
from fp8moe.runtime.launch import current_stream, device_guard
from fp8moe.runtime.peer_table import SIGNALS_BYTES, meeting
from tests import peer_cases
from tests.gpu.checks import captured, same_every_time
from tests.peer_cases import as_bytes

pytestmark = pytest.mark.gpu

INDEX_DTYPES = (torch.int32, torch.int64)
EACH = 37  # experts of a rank: few tokens have one on all ranks, some on none
# tokens, slots, hidden, top_k
SIZES = (
    (1, 1, 7168, 8),
    (0, 3, 272, 2),
    (1, 4, 16, 1),
    (7, 7, 272, 6),
    (33, 40, 576, 40),
    (130, 131, 48, 64),
    (515, 520, 2064, 8),
)


def new_buffers(ranks, slots, hidden, top_k):
    return [peer_cases.new_received(ranks * slots, hidden, top_k, device="cuda") for _ in range(ranks)]


def random_tokens(*arguments, **options):
    return peer_cases.random_tokens(*arguments, **options, device="cuda")


def assert_equal(buffers, expected):
    for buffer, other in zip(buffers, expected, strict=True):
        assert all(map(torch.equal, as_bytes(buffer), as_bytes(other)))


def assert_matches(tokens, slots, ranks, rank):
    """In memory that was marked before."""
    (_, hidden), top_k = tokens[0].shape, tokens[1].shape[1]
    buffers, expected = (new_buffers(ranks, slots, hidden, top_k) for _ in range(2))
    dispatch(*tokens, buffers, rank, ranks * EACH)
    reference.dispatch(*tokens, expected, rank, ranks * EACH)
    assert_equal(buffers, expected)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_sizes(sizes, dtype, ranks):
    count, slots, hidden, top_k = sizes
    for rank in {0, ranks // 2, ranks - 1}:
        dtypes = dtype, INDEX_DTYPES[rank % 2]
        assert_matches(random_tokens(count, hidden, top_k, dtypes, seed=rank), slots, ranks, rank)


@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize(("count", "slots"), [(3000, 3001), (5, 3000)])
def test_more_tokens_than_warps(count, slots, ranks):
    assert_matches(random_tokens(count, 7168, 8, seed=ranks), slots, ranks, ranks - 1)


@pytest.mark.parametrize("each", [0, 8, 300])
def test_numbers_of_experts(each):
    """None, few, and so many that all tokens are the first rank's."""
    tokens, ranks = random_tokens(60, 272, 8), 4
    buffers, expected = (new_buffers(ranks, 60, 272, 8) for _ in range(2))
    dispatch(*tokens, buffers, 2, ranks * each)
    reference.dispatch(*tokens, expected, 2, ranks * each)
    assert_equal(buffers, expected)
    written = [bool((buffer.data.view(torch.uint8) != peer_cases.MARK).any()) for buffer in buffers]
    assert written == {0: [False] * 4, 8: [True] * 4, 300: [True] + [False] * 3}[each]


def test_equals_the_reference_on_the_cpu():
    tokens = random_tokens(40, 1040, 8)
    buffers, expected = new_buffers(2, 40, 1040, 8), [peer_cases.new_received(80, 1040, 8) for _ in range(2)]
    dispatch(*tokens, buffers, 1, 2 * EACH)
    dispatch(*(value.cpu() for value in tokens), expected, 1, 2 * EACH)
    assert_equal([[part.cpu() for part in buffer] for buffer in buffers], expected)


@pytest.mark.parametrize("dtype", FLOATING)
def test_values_that_are_no_numbers(dtype):
    x, index = random_tokens(9, 576, 4, (dtype, torch.int64))
    for row, value in enumerate((float("nan"), float("inf"), -float("inf"), 0.0, -0.0)):
        x[row, 130 * row] = value
    x[5:7] = 0
    index %= 2 * EACH  # all tokens go somewhere, but for one
    index[7] = torch.tensor([2**31, -(2**31) - 1, 2**40, -(2**31)], device="cuda")
    assert_matches((x, index), 9, 2, 1)


def test_operands_in_any_layout():
    wide, index = random_tokens(50, 600, 8)
    for x in (wide[:, :576], wide[:, 8:584], wide[:, 1:33], wide.t()[:576].t(), wide[:1, :592].expand(50, -1)):
        for strided in (index[:, ::2], index.t().contiguous().t()[:, 1::2]):
            assert_matches((x, strided), 51, 2, 0)


def test_same_bits_every_time():
    tokens = random_tokens(700, 1040, 8)

    def run():
        buffers = new_buffers(4, 700, 1040, 8)
        dispatch(*tokens, buffers, 3, 4 * EACH)
        return buffers

    same_every_time(run)


def test_cuda_graph_with_changed_input():
    tokens = random_tokens(77, 1040, 8)
    buffers, expected = (new_buffers(2, 77, 1040, 8) for _ in range(2))
    graph, _ = captured(lambda: dispatch(*tokens, buffers, 0, 2 * EACH))
    reference.dispatch(*tokens, expected, 0, 2 * EACH)  # what is not written stays
    for seed in range(1, 4):
        for value, new in zip(tokens, random_tokens(77, 1040, 8, seed=seed), strict=True):
            value.copy_(new)
        graph.replay()
        reference.dispatch(*tokens, expected, 0, 2 * EACH)
        assert_equal(buffers, expected)


@pytest.mark.parametrize("count", [1, 64, 6000])
def test_meeting(count):
    """The other ranks have come already, so that a rank alone passes; each time it tells all of them."""
    ranks, rank = 4, 2
    tokens = random_tokens(count, 1040, 8)
    buffers, expected = (new_buffers(ranks, count, 1040, 8) for _ in range(2))
    reference.dispatch(*tokens, expected, rank, ranks * EACH)
    signals = torch.zeros(ranks, SIGNALS_BYTES // 4, dtype=torch.int32, device="cuda")
    index = torch.cuda.current_device()
    launch = launcher(index, *tokens, count, ranks, EACH).launch
    with device_guard(index):
        for meetings in range(1, 21):
            # One is a meeting ahead, as peers may be.
            signals[rank, :ranks] = torch.tensor([meetings, meetings + 1, meetings - 1, meetings], device="cuda")
            addresses = (value.data_ptr() for value in tokens)
            slots = (part[rank * count :].data_ptr() for buffer in buffers for part in buffer)
            words = meeting([row.data_ptr() for row in signals], rank)
            launch(current_stream(index), *addresses, *slots, *words)
            told = signals[:, rank].tolist()
            assert told == [meetings] * ranks and signals[rank, 8:].tolist() == [meetings, 0]
            assert_equal(buffers, expected)
    assert not signals[[0, 1, 3]][:, [0, 1, 3, 4, 5, 6, 7, 8, 9]].any()


def test_past_two_to_the_31_elements():
    tokens = random_tokens(150_000, 7168, 1)
    buffers = new_buffers(2, 150_000, 7168, 1)
    assert buffers[0].data.numel() > 1 << 31
    dispatch(*tokens, buffers, 1, 296)
    for some in (slice(0, 100), slice(75_000, 75_100), slice(149_900, 150_000)):
        expected = new_buffers(2, 100, 7168, 1)
        reference.dispatch(*(value[some] for value in tokens), expected, 1, 296)
        own = slice(150_000 + some.start, 150_000 + some.stop)
        assert_equal(
            [[part[own] for part in buffer] for buffer in buffers],
            [[part[100:] for part in buffer] for buffer in expected],
        )
