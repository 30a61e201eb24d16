"""The sorting kernel returns what the reference does, whatever the sizes and indices; and the chain of launches."""

import pytest
import torch

from fp8moe.kernels.experts import combine, permute, reference, routing
from fp8moe.kernels.experts.routing import assigned_rows, sort_by_expert
from fp8moe.quant.formats import align, ceil_div
from fp8moe.runtime.launch import current_stream, device_guard

pytestmark = pytest.mark.gpu

DTYPES = (torch.int32, torch.int64)
# tokens, top_k: one block of few warps, of 32, a cluster in one round and in several, on both sides of the limits.
SIZES = (
    *((1, 1), (1, 8), (3, 7), (16, 8), (128, 8), (129, 8), (33, 31), (1, 1024), (1025, 1)),
    *((512, 8), (513, 8), (4097, 1), (1000, 9), (8191, 4), (32768, 1), (8192, 8), (40001, 9)),
)


def random_index(tokens, top_k, num_experts, dtype=torch.int64, seed=0, margin=2):
    """Experts of [-margin, num_experts + margin)."""
    generator = torch.Generator("cuda").manual_seed(seed)
    bounds = -margin, num_experts + margin
    return torch.randint(*bounds, (tokens, top_k), dtype=dtype, generator=generator, device="cuda")


def poison(numel: int) -> None:
    """Leaves freed memory full of ones where the next outputs go."""
    for size in (numel, 1025):
        torch.full((size,), -1, dtype=torch.int32, device="cuda").add_(12345)


def assert_matches(index, num_experts, capacity=None, **window):
    poison(index.numel())
    got = sort_by_expert(index, num_experts, capacity=capacity, **window)
    expected = reference.sort_by_expert(index, num_experts, capacity, **window)
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == torch.int32 and a.is_contiguous() and torch.equal(a, b)


@pytest.mark.parametrize("tokens,top_k", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_sizes(tokens, top_k, dtype):
    for num_experts in (8, 256, 384):
        index = random_index(tokens, top_k, num_experts, dtype)
        assert_matches(index, num_experts)
        for capacity in (0, 1, tokens, ceil_div(tokens * top_k, num_experts)):
            assert_matches(index, num_experts, capacity)


@pytest.mark.parametrize("num_experts", [1, 2, 31, 32, 33, 64, 65, 127, 128, 129, 255, 256, 257, 512, 513, 1023, 1024])
@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_of_experts(num_experts, dtype):
    for tokens in (1, 100, 600, 3000):
        index = random_index(tokens, 8, num_experts, dtype, margin=num_experts // 4)
        assert_matches(index, num_experts)
        assert_matches(index, num_experts, 17)


@pytest.mark.parametrize("tokens", [1, 100, 600, 9000])
@pytest.mark.parametrize("dtype", DTYPES)
def test_first_expert_and_window_of_rows(tokens, dtype):
    for num_experts, first_expert in ((1, 255), (32, 0), (32, 64), (128, 100)):
        index = random_index(tokens, 8, 256, dtype)
        assert_matches(index, num_experts, first_expert=first_expert)
        assert_matches(index, num_experts, 17, first_expert=first_expert)
        used = tokens * num_experts // 32
        for first_row, num_rows in (
            (0, used // 2),
            (used // 3, used // 3),
            (max(used - 1, 0), 5),
            (8 * tokens, 7),
            (3, None),
        ):
            window = {"first_row": first_row, "num_rows": num_rows}
            assert_matches(index, num_experts, first_expert=first_expert, **window)


@pytest.mark.parametrize("tokens", [1, 5000])
def test_limits_of_first_expert_and_index(tokens):
    values = (-(1 << 31), -1, 0, (1 << 31) - 3, (1 << 31) - 2, (1 << 31) - 1)
    for dtype in DTYPES:
        index = torch.tensor(values, dtype=dtype, device="cuda").expand(tokens, -1).contiguous()
        for first_expert in (0, 1, (1 << 31) - 3):
            assert_matches(index, 2, first_expert=first_expert)
    wide = torch.tensor([[1 << 32, -(1 << 40), (1 << 32) + 7, torch.iinfo(torch.int64).min, 7]], device="cuda")
    assert_matches(wide.expand(tokens, -1).contiguous(), 3, first_expert=6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 8), (5, 0), (0, 0)])
def test_empty(shape, dtype):
    index = torch.empty(shape, dtype=dtype, device="cuda")
    assert_matches(index, 300)
    assert_matches(index, 300, 5)


@pytest.mark.parametrize("tokens", [3, 700, 9000])
def test_uneven(tokens):
    for fill in (0, 255, -1, 256):
        index = torch.full((tokens, 8), fill, device="cuda")
        assert_matches(index, 256)
        assert_matches(index, 256, 100)
    index = torch.arange(tokens, device="cuda")[:, None].expand(-1, 8)  # no expert at all from the 257th token on
    assert_matches(index, 256)
    assert_matches(index % 256, 256)
    assert_matches(index * 8 // tokens, 8)  # sorted already
    assert_matches(7 - index * 8 // tokens, 8)


def test_index_outside_of_32_bits_is_of_no_expert():
    limits = torch.iinfo(torch.int64)
    values = (1 << 32, (1 << 32) + 1, -(1 << 32), (1 << 31) + 1, limits.max, limits.min, 1, 0)
    for tokens in (1, 1000):
        index = torch.tensor(values, device="cuda").expand(tokens, -1).contiguous()
        assert_matches(index, 2)
        assert_matches(index, 2, 5)
    limits = torch.iinfo(torch.int32)
    assert_matches(torch.tensor([[limits.max, limits.min, 1]], dtype=torch.int32, device="cuda"), 2)


@pytest.mark.parametrize("tokens,hidden", [(1, 7168), (5, 576), (700, 1040), (3000, 2064)])
def test_chain_over_memory_of_the_caller(tokens, hidden):
    """Sort, permute and combine, each started before the one ahead has ended, over one buffer and many times over."""
    num_experts, top_k, guard = 24, 8, 256
    num_rows = tokens * top_k
    index, pitch, k_blocks = torch.cuda.current_device(), align(num_rows, 4), ceil_div(hidden, 128)
    sizes = 4 * (num_experts + 2), 4 * num_rows, num_rows * hidden, 4 * pitch * k_blocks, 2 * tokens * hidden
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + align(size + guard, 256))
    buffer = torch.full((starts[-1],), 0xAB, dtype=torch.uint8, device="cuda")
    groups, rows, data, scale, out = (
        buffer[start : start + size].view(dtype)
        for start, size, dtype in zip(
            starts, sizes, (torch.int32, torch.int32, torch.float8_e4m3fn, torch.float32, torch.bfloat16), strict=False
        )
    )
    y = torch.randn(num_rows, hidden, dtype=torch.bfloat16, device="cuda")
    weights = torch.rand(tokens, top_k, device="cuda")
    inputs = [
        (random_index(tokens, top_k, num_experts, seed=seed), torch.randn(tokens, hidden, device="cuda").bfloat16())
        for seed in range(20)
    ]
    with device_guard(index):
        sort = routing.launcher(index, inputs[0][0], num_experts, None, pdl=True)
        move = permute.launcher(index, inputs[0][1], None, top_k, num_rows, pdl=True)
        dtypes = combine.Dtypes(torch.bfloat16, torch.float32, torch.bfloat16)
        add = combine.launcher(index, tokens, hidden, top_k, num_rows, dtypes, pdl=True)
    stream = current_stream(index)
    addresses = {name: value.data_ptr() for name, value in (("rows", rows), ("data", data), ("scale", scale))}
    results = []
    for top_k_index, x in inputs:
        for _ in range(3):
            sort.launch(stream, top_k_index.data_ptr(), groups.data_ptr(), addresses["rows"])
            move.launch(stream, x.data_ptr(), *addresses.values(), 0)
            add.launch(stream, y.data_ptr(), addresses["rows"], weights.data_ptr(), 0, 0, 0, out.data_ptr())
        results.append(buffer.clone())
    for (top_k_index, x), result in zip(inputs, results, strict=True):
        views = [result[start : start + size] for start, size in zip(starts, sizes, strict=False)]
        expected_groups, expected_rows = reference.sort_by_expert(top_k_index, num_experts, None)
        assert torch.equal(views[0].view(torch.int32), torch.nn.functional.pad(expected_groups, (0, 1)))
        assert torch.equal(views[1].view(torch.int32), expected_rows.flatten())
        used = int(expected_groups[-1])
        expected_data, expected_scale = reference.permute_quantize(x, expected_rows, num_rows)
        got_scale = views[3].view(torch.float32).view(k_blocks, pitch)
        assert torch.equal(views[2].view(num_rows, hidden)[:used], expected_data[:used].view(torch.uint8))
        assert torch.equal(got_scale[:, :used], expected_scale[:used].t())
        expected = reference.combine(y, expected_rows, weights, torch.bfloat16)
        assert torch.equal(views[4].view(torch.bfloat16).view(tokens, hidden), expected)
        for start, size, end in zip(starts, sizes, starts[1:], strict=False):
            assert (result[start + size : end] == 0xAB).all()


# ---- what each row is of ----


@pytest.mark.parametrize("tokens,top_k", [(1, 1), (1, 8), (3, 7), (129, 8), (1000, 9), (8192, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_assigned_rows(tokens, top_k, dtype):
    index = random_index(tokens, top_k, 16)
    weights = torch.randn(tokens, 2 * top_k, device="cuda").to(dtype)[:, ::2]  # strided
    weights[0, 0] = float("nan")
    for first_row in (0, 5):
        for num_rows in (0, 1, tokens, tokens * top_k, 2 * tokens * top_k + 3):
            sorted = sort_by_expert(index, 16, first_row=first_row, num_rows=num_rows)
            expected = reference.assigned_rows(*sorted, weights, num_rows)
            for _ in range(20):
                poison(num_rows)
                for got, wanted in zip(assigned_rows(sorted, weights, num_rows), expected, strict=True):
                    assert got.dtype == wanted.dtype and torch.equal(got.view(torch.int32), wanted.view(torch.int32))


def test_assigned_rows_without_assignments():
    for shape in ((0, 8), (5, 0)):
        sorted = sort_by_expert(torch.empty(shape, dtype=torch.int64, device="cuda"), 4)
        tokens, weights = assigned_rows(sorted, torch.empty(shape, device="cuda"), 6)
        assert tokens.tolist() == [-1] * 6 and weights.tolist() == [0] * 6


def test_assigned_rows_in_a_graph():
    index, weights = random_index(300, 8, 16), torch.randn(300, 8, device="cuda")
    found = []

    def run():
        sorted = sort_by_expert(index, 16)
        found[:] = *sorted, *assigned_rows(sorted, weights, 2400)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for seed in range(3):
        index.copy_(random_index(300, 8, 16, seed=seed + 1))
        weights.normal_()
        graph.replay()
        groups, rows, *got = found
        for value, wanted in zip(got, reference.assigned_rows(groups, rows, weights, 2400), strict=True):
            assert torch.equal(value, wanted)
