"""The permuting quantizer writes the bits of the reference to every row that is mapped to, and nothing else."""

import math
from functools import partial

import pytest
import torch

from fp8moe.kernels.experts import permute, reference
from fp8moe.kernels.experts.permute import permute_quantize
from fp8moe.kernels.experts.routing import sort_by_expert
from fp8moe.quant.formats import align, ceil_div
from fp8moe.runtime.checks import FLOATING
from tests import random_values

pytestmark = pytest.mark.gpu

SIZES = (
    (1, 7168, 8),
    (1, 16, 1),
    (2, 128, 3),
    (7, 272, 6),
    (33, 576, 4),
    (65, 1040, 33),
    (130, 48, 64),
    (515, 2064, 8),
)
MARK = 0xAB
random = partial(random_values.random, dtype=torch.bfloat16, device="cuda")


def random_rows(tokens: int, top_k: int, num_rows: int, seed: int = 0) -> torch.Tensor:
    """Different rows, in part outside of [0, num_rows), and a token without any."""
    generator = torch.Generator("cuda").manual_seed(seed)
    pool = torch.randperm(2 * max(tokens * top_k, num_rows), generator=generator, device="cuda")
    rows = pool[: tokens * top_k].view(tokens, top_k).int() - num_rows // 4
    rows[tokens // 2 : tokens // 2 + 1] = -1
    return rows


def write(
    x: torch.Tensor, rows: torch.Tensor, num_rows: int, sparse: bool = False, assigned: bool = True
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Data (num_rows, H), scale (blocks, pitch) and assignments (num_rows,), if `assigned`, as bytes and words.

    Marked where the kernel has not written.
    """
    tokens, hidden = x.shape
    k_blocks, pitch, guard = ceil_div(hidden, 128), align(num_rows, 4), 256
    data = torch.full((num_rows * hidden + guard,), MARK, dtype=torch.uint8, device="cuda")
    scale = torch.full((4 * k_blocks * pitch + guard,), MARK, dtype=torch.uint8, device="cuda")
    assignments = torch.full((4 * num_rows + guard,), MARK, dtype=torch.uint8, device="cuda")
    launch = permute.launcher(x.get_device(), x, None, rows.shape[1], num_rows, sparse=sparse)
    launch(x, rows, data, scale, assignments if assigned else None)
    assert all((value[-guard:] == MARK).all() for value in (data, scale, assignments))
    scale, assignments = (value[:-guard].view(torch.int32) for value in (scale, assignments))
    return data[:-guard].view(num_rows, hidden), scale.view(k_blocks, pitch), assignments


def assignments_of(rows: torch.Tensor, num_rows: int) -> torch.Tensor:
    """t * K + k of each row, the mark of one that has none."""
    found = torch.full((4 * num_rows,), MARK, dtype=torch.uint8, device="cuda").view(torch.int32)
    some = reference.valid_rows(rows, num_rows).flatten()
    found[rows.flatten()[some].long()] = torch.arange(rows.numel(), dtype=torch.int32, device="cuda")[some]
    return found


def assert_matches(x: torch.Tensor, rows: torch.Tensor, num_rows: int) -> None:
    data, scale, assignments = write(x, rows, num_rows)
    assert all(map(torch.equal, write(x, rows, num_rows, sparse=True), (data, scale, assignments)))
    assert torch.equal(assignments, assignments_of(rows, num_rows))
    expected_data, expected_scale = reference.permute_quantize(x, rows, num_rows)
    used = torch.zeros(num_rows + 1, dtype=torch.bool, device="cuda")
    used[torch.where((rows >= 0) & (rows < num_rows), rows, num_rows).flatten().long()] = True
    used = used[:num_rows]
    assert torch.equal(data[used], expected_data.view(torch.uint8)[used])
    assert (data[~used] == MARK).all()
    assert torch.equal(scale[:, :num_rows].t()[used], expected_scale.contiguous().view(torch.int32)[used])
    untouched = scale.clone()
    untouched[:, :num_rows][:, used] = 0
    untouched = untouched[untouched != 0]
    assert (untouched.view(torch.uint8) == MARK).all() and untouched.numel() == scale.shape[0] * int(
        scale.shape[1] - used.sum()
    )


@pytest.mark.parametrize("tokens,hidden,top_k", SIZES)
@pytest.mark.parametrize("dtype", FLOATING)
def test_sizes(tokens, hidden, top_k, dtype):
    x = random(tokens, hidden, dtype=dtype)
    for num_rows in (1, tokens * top_k, tokens * top_k + 3):
        assert_matches(x, random_rows(tokens, top_k, num_rows), num_rows)


# Beyond the number of tokens that are read before they are known to have a row; and of what all warps take at a time.
@pytest.mark.parametrize("tokens,hidden", [(1500, 1552), (3000, 7168), (20_000, 528)])
@pytest.mark.parametrize("dtype", FLOATING)
def test_many_tokens(tokens, hidden, dtype):
    x = random(tokens, hidden, dtype=dtype)
    for seed in range(3):
        index = torch.randint(0, 64 << seed, (tokens, 8), device="cuda")  # the more experts, the fewer are local
        rows = sort_by_expert(index, 16).rows
        assert_matches(x, rows, 8 * tokens)
        assert_matches(x, sort_by_expert(index, 16, capacity=100).rows, 1600)
    assert_matches(x, random_rows(tokens, 35, 50000), 50000)


@pytest.mark.parametrize("dtype", FLOATING)
def test_values(dtype):
    x = random(40, 1024, dtype=dtype)
    x[3, 5], x[4, 200], x[6, 1023] = math.nan, -math.inf, math.inf
    x[5], x[7] = 0.0, torch.finfo(dtype).max
    x[8] *= 1e-6
    assert_matches(x, torch.randperm(160, device="cuda").int().view(40, 4), 160)


def test_rows_out_of_range():
    x = random(3, 256)
    limits = torch.iinfo(torch.int32)
    rows = torch.tensor([[limits.min, limits.max, 5], [-1, 4, 3], [6, 2, -5]], dtype=torch.int32, device="cuda")
    assert_matches(x, rows, 5)
    assert_matches(x, torch.full((3, 3), -1, dtype=torch.int32, device="cuda"), 5)


@pytest.mark.parametrize("tokens,hidden,top_k,num_rows", [(0, 128, 8, 0), (3, 0, 2, 6), (3, 32, 0, 4), (3, 32, 2, 0)])
def test_empty(tokens, hidden, top_k, num_rows):
    rows = torch.zeros(tokens, top_k, dtype=torch.int32, device="cuda")
    data, scale = permute_quantize(random(tokens, hidden), rows, num_rows)
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
    data, scale = permute_quantize(x, rows, num_rows)
    for some in (slice(0, 100), slice(tokens // 2, tokens // 2 + 100), slice(tokens - 100, tokens)):
        expected_data, expected_scale = reference.permute_quantize(
            x[some], torch.arange(100, dtype=torch.int32, device="cuda")[:, None], 100
        )
        for k in range(top_k):
            row = rows[some, k].long()
            assert torch.equal(data.view(torch.uint8)[row], expected_data.view(torch.uint8))
            assert torch.equal(scale[row], expected_scale)
