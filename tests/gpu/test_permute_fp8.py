"""The permutation of quantized tokens writes the bits of the reference to every row that is mapped to, no others."""

import math

import pytest
import torch

from fp8moe.kernels.experts import permute, reference
from fp8moe.kernels.experts.permute import permute_fp8, permute_quantize
from fp8moe.kernels.experts.routing import sort_by_expert
from fp8moe.quant.formats import FP8Tensor, align, ceil_div
from fp8moe.quant.quantize import quantize_1x128
from tests import random_values
from tests.gpu.test_permute import MARK, SIZES, assignments_of, random_rows

pytestmark = pytest.mark.gpu


def random(tokens: int, hidden: int, seed: int = 0) -> FP8Tensor:
    """Quantized tokens with row-major scales, as they come from other GPUs."""
    x = quantize_1x128(random_values.random(tokens, hidden, dtype=torch.bfloat16, device="cuda", seed=seed))
    return FP8Tensor(x.data, x.scale.contiguous())


def write(
    x: FP8Tensor, rows: torch.Tensor, num_rows: int, sparse: bool = False, assigned: bool = True
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Data (num_rows, H), scale (blocks, pitch) and assignments (num_rows,), if `assigned`, as bytes and words.

    Marked where the kernel has not written.
    """
    tokens, hidden = x.data.shape
    k_blocks, pitch, guard = ceil_div(hidden, 128), align(num_rows, 4), 256
    data = torch.full((num_rows * hidden + guard,), MARK, dtype=torch.uint8, device="cuda")
    scale = torch.full((4 * k_blocks * pitch + guard,), MARK, dtype=torch.uint8, device="cuda")
    assignments = torch.full((4 * num_rows + guard,), MARK, dtype=torch.uint8, device="cuda")
    launch = permute.launcher(x.data.get_device(), *x, rows.shape[1], num_rows, sparse=sparse)
    launch(*x, rows, data, scale, assignments if assigned else None)
    assert all((value[-guard:] == MARK).all() for value in (data, scale, assignments))
    scale, assignments = (value[:-guard].view(torch.int32) for value in (scale, assignments))
    return data[:-guard].view(num_rows, hidden), scale.view(k_blocks, pitch), assignments


def assert_matches(x: FP8Tensor, rows: torch.Tensor, num_rows: int) -> None:
    data, scale, assignments = write(x, rows, num_rows)
    assert all(map(torch.equal, write(x, rows, num_rows, sparse=True), (data, scale, assignments)))
    assert torch.equal(assignments, assignments_of(rows, num_rows))
    expected_data, expected_scale = reference.permute_fp8(*x, rows, num_rows)
    used = torch.zeros(num_rows + 1, dtype=torch.bool, device="cuda")
    used[torch.where((rows >= 0) & (rows < num_rows), rows, num_rows).flatten().long()] = True
    used = used[:num_rows]
    assert torch.equal(data[used], expected_data.view(torch.uint8)[used])
    assert (data[~used] == MARK).all()
    by_row = scale[:, :num_rows].t()
    assert torch.equal(by_row[used], expected_scale.contiguous().view(torch.int32)[used])
    assert (by_row[~used].contiguous().view(torch.uint8) == MARK).all()
    assert (scale[:, num_rows:].contiguous().view(torch.uint8) == MARK).all()


@pytest.mark.parametrize("tokens,hidden,top_k", SIZES)
def test_sizes(tokens, hidden, top_k):
    x = random(tokens, hidden)
    for num_rows in (1, tokens * top_k, tokens * top_k + 3):
        assert_matches(x, random_rows(tokens, top_k, num_rows), num_rows)


# Beyond the number of tokens that are read before they are known to have a row; and of what all warps take at a time.
@pytest.mark.parametrize("tokens,hidden", [(1500, 1552), (3000, 7168), (20_000, 528)])
def test_many_tokens(tokens, hidden):
    x = random(tokens, hidden)
    for seed in range(3):
        index = torch.randint(0, 64 << seed, (tokens, 8), device="cuda")  # the more experts, the fewer are local
        assert_matches(x, sort_by_expert(index, 16, first_expert=8).rows, 8 * tokens)
        assert_matches(x, sort_by_expert(index, 16, first_row=50, num_rows=300).rows, 300)
    assert_matches(x, random_rows(tokens, 35, 50000), 50000)


def test_equals_quantizing_while_permuting():
    x = random_values.random(300, 1040, dtype=torch.bfloat16, device="cuda")
    x[3, 5], x[4, 200], x[6, 1023] = math.nan, -math.inf, math.inf
    x[5], x[7] = 0.0, torch.finfo(x.dtype).max
    rows = torch.randperm(1200, device="cuda").int().view(300, 4)
    got, expected = permute_fp8(quantize_1x128(x), rows, 1200), permute_quantize(x, rows, 1200)
    assert torch.equal(got.data.view(torch.uint8), expected.data.view(torch.uint8))
    assert torch.equal(got.scale.contiguous().view(torch.int32), expected.scale.contiguous().view(torch.int32))


def test_rows_out_of_range():
    x = random(3, 256)
    limits = torch.iinfo(torch.int32)
    rows = torch.tensor([[limits.min, limits.max, 5], [-1, 4, 3], [6, 2, -5]], dtype=torch.int32, device="cuda")
    assert_matches(x, rows, 5)
    assert_matches(x, torch.full((3, 3), -1, dtype=torch.int32, device="cuda"), 5)


@pytest.mark.parametrize("tokens,hidden,top_k,num_rows", [(0, 128, 8, 0), (3, 0, 2, 6), (3, 32, 0, 4), (3, 32, 2, 0)])
def test_empty(tokens, hidden, top_k, num_rows):
    rows = torch.zeros(tokens, top_k, dtype=torch.int32, device="cuda")
    data, scale = permute_fp8(random(tokens, hidden), rows, num_rows)
    assert data.shape == (num_rows, hidden) and scale.shape == (num_rows, ceil_div(hidden, 128))


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("tokens,hidden,top_k", [(7, 272, 6), (65, 1040, 33), (3000, 7168, 8)])
def test_assignments_that_are_not_wanted(tokens, hidden, top_k, sparse):
    x, num_rows = random(tokens, hidden), tokens * top_k
    rows = random_rows(tokens, top_k, num_rows)
    *expected, _ = write(x, rows, num_rows, sparse)
    *got, assignments = write(x, rows, num_rows, sparse, assigned=False)
    assert all(map(torch.equal, got, expected)) and (assignments.view(torch.uint8) == MARK).all()


def test_past_two_to_the_31_elements():
    tokens, hidden, top_k = 37_500, 7168, 8
    num_rows = tokens * top_k
    assert num_rows * hidden > 1 << 31
    x = random(tokens, hidden)
    rows = torch.randperm(num_rows, device="cuda").int().view(tokens, top_k)
    data, scale = permute_fp8(x, rows, num_rows)
    for some in (slice(0, 100), slice(tokens // 2, tokens // 2 + 100), slice(tokens - 100, tokens)):
        for k in range(top_k):
            row = rows[some, k].long()
            assert torch.equal(data.view(torch.uint8)[row], x.data.view(torch.uint8)[some])
            assert torch.equal(scale[row], x.scale[some])
