"""The kernel that sums over ranks returns the bits of the reference, and reads only ranks with an expert of a token."""

import itertools

import pytest
import torch

from fp8moe.kernels.experts import combine_plan, reference, sum_partials_plan
from fp8moe.kernels.experts.peer_table import no_meeting
from fp8moe.kernels.experts.sum_partials import sum_partials
from fp8moe.runtime.checks import FLOATING
from fp8moe.runtime.launch import current_stream, device_guard
from tests.peer_cases import MARK

pytestmark = pytest.mark.gpu

INDEX_DTYPES = (torch.int32, torch.int64)
EACH = 5  # experts of a rank
# tokens, slots, hidden, top_k
SIZES = (
    *((1, 1, 7168, 8), (1, 3, 8, 1), (2, 2, 128, 3), (7, 9, 264, 6), (33, 33, 576, 40)),
    *((65, 70, 1048, 33), (130, 130, 48, 64), (515, 520, 2056, 2)),
)


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").to(dtype)


def random_index(tokens, top_k, ranks, dtype=torch.int64, seed=0):
    """Of few experts, so that most tokens have none on some rank; some of no expert, and all of one token."""
    generator = torch.Generator("cuda").manual_seed(seed)
    bounds = -EACH, ranks * EACH + EACH
    index = torch.randint(*bounds, (tokens, 1), generator=generator, device="cuda")
    index = index + torch.randint(-2, 3, (tokens, top_k), generator=generator, device="cuda")
    index[tokens // 2 : tokens // 2 + 1] = -1
    return index.to(dtype)


def random_partials(index, slots, hidden, ranks, seed=0):
    """NaN where nothing is to be read."""
    tokens = len(index)
    partials = torch.full((ranks, slots, hidden), float("nan"), device="cuda")
    there = reference.owners(index, ranks, ranks * EACH).t()[..., None]
    partials[:, :tokens] = torch.where(there, random(ranks, tokens, hidden, seed=seed), partials[:, :tokens])
    return partials.flatten(0, 1)


def operands(tokens, slots, hidden, top_k, ranks, index_dtype=torch.int64, seed=0):
    index = random_index(tokens, top_k, ranks, index_dtype, seed)
    return random_partials(index, slots, hidden, ranks, seed), index


def write(partials, index, ranks, out_dtype, residual=None):
    """The result (T, H) of the kernel, in memory marked before and with nothing written behind it."""
    (rows, hidden), (tokens, top_k) = partials.shape, index.shape
    size, guard = tokens * hidden * out_dtype.itemsize, 256
    out = torch.full((size + guard,), MARK, dtype=torch.uint8, device="cuda")
    device = partials.get_device()
    with device_guard(device):
        sizes = tokens, rows // ranks, top_k
        plan = sum_partials_plan.plan(sizes, hidden, index.dtype, out_dtype, ranks, EACH, device)
        added = 0 if residual is None else residual.data_ptr()
        plan.launch(current_stream(device), partials.data_ptr(), index.data_ptr(), added, out.data_ptr())
    assert (out[size:] == MARK).all()
    return out[:size].view(out_dtype).view(tokens, hidden)


def assert_matches(partials, index, ranks, out_dtype, residual=None):
    out = write(partials, index, ranks, out_dtype, residual)
    expected = reference.sum_partials(partials, index, ranks, ranks * EACH, out_dtype, residual)
    assert out.dtype == expected.dtype and not out.isnan().any() and torch.equal(out, expected)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("out_dtype", FLOATING)
def test_sizes(out_dtype, ranks):
    for (tokens, slots, hidden, top_k), index_dtype in zip(SIZES, itertools.cycle(INDEX_DTYPES)):
        partials, index = operands(tokens, slots, hidden, top_k, ranks, index_dtype, seed=ranks)
        assert_matches(partials, index, ranks, out_dtype)
        assert_matches(partials, index, ranks, out_dtype, random(tokens, hidden, dtype=out_dtype, seed=9))


@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("out_dtype", FLOATING)
def test_more_tokens_than_warps(out_dtype, ranks):
    for tokens, hidden, top_k in ((3000, 7168, 8), (30_000, 264, 40)):
        partials, index = operands(tokens, tokens + 1, hidden, top_k, ranks)
        assert_matches(partials, index, ranks, out_dtype)
        assert_matches(partials, index, ranks, out_dtype, random(tokens, hidden, dtype=out_dtype, seed=9))


def test_equals_the_reference_on_the_cpu():
    partials, index = operands(40, 43, 1000, 2, 3)
    for out_dtype in FLOATING:
        residual = random(40, 1000, dtype=out_dtype, seed=9)
        got = sum_partials(partials, index, 3, 3 * EACH, out_dtype, residual)
        on_cpu = sum_partials(partials.cpu(), index.cpu(), 3, 3 * EACH, out_dtype, residual.cpu())
        assert torch.equal(got.cpu(), on_cpu)


def test_order_of_the_sum():
    # In float32, 2^24 + 1 + 1 is 2^24, and 1 + 1 + 2^24 is not.
    values = torch.tensor([[2.0**24, 1.0], [1.0, 1.0], [1.0, 2.0**24]], device="cuda")  # of each rank, for both tokens
    index = torch.tensor([[2 * EACH, EACH, 0], [0, 2 * EACH, EACH]], device="cuda")
    out = sum_partials(values.flatten()[:, None].expand(-1, 8), index, 3, 3 * EACH, torch.float32)
    assert out[:, 0].tolist() == [2.0**24, 2.0**24 + 2]


@pytest.mark.parametrize("index_dtype", INDEX_DTYPES)
def test_experts_of_each_rank(index_dtype):
    """Both ends of what a rank has, and what lies beside all of them."""
    limits = torch.iinfo(index_dtype)
    values = [0, 4, 5, 9, 10, 14, 15, -1, limits.max, limits.min]
    values += [2**32 + 4, -(2**40)] if index_dtype is torch.int64 else []
    index = torch.tensor(values, dtype=index_dtype, device="cuda")[:, None]
    partials = torch.tensor([1.0, 2.0, 4.0], device="cuda").repeat_interleave(len(index))[:, None].expand(-1, 8)
    out = sum_partials(partials, index, 3, 3 * EACH, torch.float32)
    assert out[:, 7].tolist() == [1, 1, 2, 2, 4, 4] + [0] * (len(values) - 6)


def test_values_that_are_no_numbers():
    partials, index = operands(20, 20, 264, 3, 2)
    index[:10] = torch.tensor([0, EACH, -1], device="cuda")
    partials[:10] = partials[20:30] = 1
    for token, (one, other) in enumerate(
        ((float("nan"), 1.0), (float("inf"), -float("inf")), (7e4, 0.0), (3e38, 3e38))
    ):
        partials[token, 5], partials[20 + token, 5] = one, other
    for out_dtype in FLOATING:
        out = write(partials, index, 2, out_dtype)
        expected = reference.sum_partials(partials, index, 2, 2 * EACH, out_dtype, None)
        assert out.isnan().nonzero().tolist() == [[0, 5], [1, 5]] and torch.equal(out.isnan(), expected.isnan())
        assert torch.equal(out.nan_to_num(), expected.nan_to_num())


def test_operands_in_any_layout():
    wide, index = operands(50, 50, 608, 8, 2)
    residual = random(608, 50, dtype=torch.bfloat16).t()
    for partials in (wide, wide[:, :576], wide[:, 4:204], wide[:, 1:401], wide.t().contiguous().t()):
        for routing in (index, index[:, ::2], index.t().contiguous().t()):
            # A part of a token's experts may be on fewer ranks, so that what was NaN stays unread.
            added = residual[:, : partials.shape[1]]
            torch.full((50 * 608 * 2,), MARK, dtype=torch.uint8, device="cuda")
            got = sum_partials(partials, routing, 2, 2 * EACH, torch.bfloat16, added)
            expected = reference.sum_partials(partials, routing, 2, 2 * EACH, torch.bfloat16, added)
            assert not got.isnan().any() and torch.equal(got, expected)


@pytest.mark.parametrize(("tokens", "slots", "hidden", "top_k"), [(0, 3, 128, 8), (0, 0, 128, 8), (3, 3, 0, 2)])
def test_empty(tokens, slots, hidden, top_k):
    index = torch.zeros(tokens, top_k, dtype=torch.int64, device="cuda")
    out = sum_partials(random(2 * slots, hidden), index, 2, 2 * EACH, torch.bfloat16)
    assert out.shape == (tokens, hidden) and out.dtype is torch.bfloat16


@pytest.mark.parametrize(("top_k", "each"), [(0, EACH), (4, 0)])
def test_no_rank_at_all(top_k, each):
    index = torch.zeros(6, top_k, dtype=torch.int64, device="cuda")
    partials, residual = torch.full((12, 264), float("nan"), device="cuda"), random(6, 264, dtype=torch.bfloat16)
    for added, expected in ((None, torch.zeros_like(residual)), (residual, residual)):
        torch.full((6 * 264 * 2,), MARK, dtype=torch.uint8, device="cuda")
        assert torch.equal(sum_partials(partials, index, 2, 2 * each, torch.bfloat16, added), expected)


def test_same_bits_every_time():
    partials, index = operands(700, 700, 1040, 8, 4)
    first = write(partials, index, 4, torch.bfloat16)
    for _ in range(20):
        assert torch.equal(write(partials, index, 4, torch.bfloat16), first)


def test_cuda_graph_with_changed_input():
    (partials, index), residual = operands(77, 80, 1040, 3, 4), random(77, 1040, dtype=torch.bfloat16)

    def summed():
        return sum_partials(partials, index, 4, 4 * EACH, torch.bfloat16, residual)

    summed()  # compiled before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = summed()
    for seed in range(1, 4):
        for value, new in zip((partials, index), operands(77, 80, 1040, 3, 4, seed=seed), strict=True):
            value.copy_(new)
        residual.copy_(random(77, 1040, seed=seed))
        out.fill_(float("nan"))
        graph.replay()
        expected = reference.sum_partials(partials, index, 4, 4 * EACH, torch.bfloat16, residual)
        assert not out.isnan().any() and torch.equal(out, expected)


@pytest.mark.parametrize(("tokens", "hidden"), [(2, 7168), (66, 576), (3000, 2056)])
def test_started_before_the_sums_are_there(tokens, hidden):
    """Behind `combine_to`, each started before the one ahead has ended, over the same memory many times."""
    ranks, slots, top_k, device = 2, tokens // 2, 3, torch.cuda.current_device()
    inputs = []
    for seed in range(20):
        index = random_index(tokens, top_k, ranks, seed=seed)
        rows = torch.arange(tokens * top_k, dtype=torch.int32, device="cuda").view(tokens, top_k)
        # Of the second rank's experts; the sums of the first are there.
        here = (index >= EACH) & (index < 2 * EACH)
        inputs.append((index, torch.where(here, rows, -1), random(tokens * top_k, hidden, seed=seed)))
    weights = torch.rand(tokens, top_k, device="cuda")
    buffers, results = [torch.full((tokens, hidden), float("nan"), device="cuda") for _ in range(ranks)], []
    for buffer in buffers:
        buffer[:slots] = random(slots, hidden, seed=99)
    outs = [torch.empty(slots, hidden, dtype=torch.bfloat16, device="cuda") for _ in range(ranks)]
    with device_guard(device):
        dtypes = (torch.float32,) * 3
        options = {"peers": ranks, "to_all": False, "pdl": True}
        combine = combine_plan.plan(tokens, hidden, top_k, tokens * top_k, *dtypes, device, **options)
        form = (hidden, torch.int64, torch.bfloat16, ranks, EACH, device)
        add_up = sum_partials_plan.plan((slots, slots, top_k), *form, pdl=True)
    stream = current_stream(device)
    places = [buffer[slots:].data_ptr() for buffer in buffers]
    for index, rows, y in inputs:
        addresses = (value.data_ptr() for value in (y, rows, weights))
        combine.launch(stream, *addresses, 0, 0, 0, *places, *no_meeting(ranks))
        for buffer, own, out in zip(buffers, index.split(slots), outs, strict=True):
            add_up.launch(stream, buffer.data_ptr(), own.data_ptr(), 0, out.data_ptr())
        results.append([out.clone() for out in outs])
    for (index, rows, y), result in zip(inputs, results, strict=True):
        sums = reference.combine(y, rows, weights, torch.float32)
        for out, buffer, own, second in zip(result, buffers, index.split(slots), sums.split(slots), strict=True):
            partials = torch.cat((buffer[:slots], second))
            assert torch.equal(out, reference.sum_partials(partials, own, ranks, ranks * EACH, torch.bfloat16, None))


def test_past_two_to_the_31_elements():
    tokens, hidden, ranks = 50_000, 7168, 8
    assert ranks * tokens * hidden > 1 << 31
    partials = torch.empty(ranks * tokens, hidden, device="cuda").normal_()
    index = random_index(tokens, 8, ranks)
    out = sum_partials(partials, index, ranks, ranks * EACH, torch.bfloat16)
    for some in (slice(0, 100), slice(tokens // 2, tokens // 2 + 100), slice(tokens - 100, tokens)):
        parts = partials.view(ranks, tokens, hidden)[:, some].flatten(0, 1)
        expected = reference.sum_partials(parts, index[some], ranks, ranks * EACH, torch.bfloat16, None)
        assert torch.equal(out[some], expected)
    del partials, out
    partials = torch.ones((1 << 28) + 1, 8, device="cuda")
    index = torch.zeros(len(partials), 1, dtype=torch.int32, device="cuda")
    out = sum_partials(partials, index, 1, 1, torch.bfloat16)
    assert out.numel() > 1 << 31 and (out == 1).all()
