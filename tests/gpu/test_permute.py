"""The two permutations write the bits of the reference to every row that is mapped to, and nothing else."""

import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from fp8moe.kernels.experts import permute, reference
from fp8moe.kernels.experts.permute import permute_fp8, permute_quantize
from fp8moe.kernels.experts.routing import sort_by_expert
from fp8moe.quant.formats import align, ceil_div
from fp8moe.quant.quantize import quantize_1x128
from fp8moe.runtime.checks import FLOATING
from tests import random_values
from tests.gpu.checks import MARK, marked, sizes_of_rows

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
DTYPES = (*FLOATING, torch.float8_e4m3fn)
INT32 = torch.iinfo(torch.int32)


class Tokens(NamedTuple):
    """With row-major scales, as they come from other GPUs, where they are quantized."""

    data: Tensor
    scale: Tensor | None

    @classmethod
    def random(cls, tokens: int, hidden: int, dtype: torch.dtype = torch.bfloat16) -> "Tokens":
        if dtype in FLOATING:
            return cls(random_values.random(tokens, hidden, dtype=dtype, device="cuda"), None)
        data, scale = quantize_1x128(random_values.random(tokens, hidden, dtype=torch.bfloat16, device="cuda"))
        return cls(data, scale.contiguous())

    def some(self, rows: slice) -> "Tokens":
        return Tokens(*(value if value is None else value[rows] for value in self))

    def permuted(self, rows: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
        if self.scale is None:
            return permute_quantize(self.data, rows, num_rows)
        return permute_fp8((self.data, self.scale), rows, num_rows)

    def expected(self, rows: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
        if self.scale is None:
            return reference.permute_quantize(self.data, rows, num_rows)
        return reference.permute_fp8(self.data, self.scale, rows, num_rows)


def random_rows(tokens: int, top_k: int, num_rows: int) -> Tensor:
    """Different rows, in part outside of [0, num_rows), and a token without any."""
    generator = torch.Generator("cuda").manual_seed(0)
    pool = torch.randperm(2 * max(tokens * top_k, num_rows), generator=generator, device="cuda")
    rows = pool[: tokens * top_k].view(tokens, top_k).int() - num_rows // 4
    rows[tokens // 2 : tokens // 2 + 1] = -1
    return rows


def write(
    x: Tokens, rows: Tensor, num_rows: int, sparse: bool = False, assigned: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Data (num_rows, H), scale (blocks, pitch) and assignments (num_rows,), if `assigned`, as bytes and words.

    Marked where the kernel has not written.
    """
    hidden = x.data.shape[1]
    launch = permute.launcher(x.data.get_device(), *x, rows.shape[1], num_rows, sparse=sparse)
    operands = (value for value in x if value is not None)
    with marked(*sizes_of_rows(num_rows, hidden), 4 * num_rows) as (data, scale, assignments):
        launch(*operands, rows, data, scale, assignments if assigned else None)
    scale, assignments = (value.view(torch.int32) for value in (scale, assignments))
    return data.view(num_rows, hidden), scale.view(-1, align(num_rows, 4)), assignments


def assignments_of(rows: Tensor, num_rows: int) -> Tensor:
    """t * K + k of each row, the mark of one that has none."""
    found = torch.full((4 * num_rows,), MARK, dtype=torch.uint8, device="cuda").view(torch.int32)
    some = reference.valid_rows(rows, num_rows).flatten()
    found[rows.flatten()[some].long()] = torch.arange(rows.numel(), dtype=torch.int32, device="cuda")[some]
    return found


def assert_matches(x: Tokens, rows: Tensor, num_rows: int) -> None:
    data, scale, assignments = write(x, rows, num_rows)
    assert all(map(torch.equal, write(x, rows, num_rows, sparse=True), (data, scale, assignments)))
    assert torch.equal(assignments, assignments_of(rows, num_rows))
    expected_data, expected_scale = x.expected(rows, num_rows)
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
@pytest.mark.parametrize("dtype", DTYPES)
def test_sizes(tokens, hidden, top_k, dtype):
    x = Tokens.random(tokens, hidden, dtype)
    for num_rows in (1, tokens * top_k, tokens * top_k + 3):
        assert_matches(x, random_rows(tokens, top_k, num_rows), num_rows)


# Beyond the number of tokens that are read before they are known to have a row; and of what all warps take at a time.
@pytest.mark.parametrize("tokens,hidden", [(1500, 1552), (3000, 7168), (20_000, 528)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_many_tokens(tokens, hidden, dtype):
    x = Tokens.random(tokens, hidden, dtype)
    for seed in range(3):
        index = torch.randint(0, 64 << seed, (tokens, 8), device="cuda")  # the more experts, the fewer are local
        assert_matches(x, sort_by_expert(index, 16, first_expert=8).rows, 8 * tokens)
        assert_matches(x, sort_by_expert(index, 16, capacity=100).rows, 1600)
        assert_matches(x, sort_by_expert(index, 16, first_row=50, num_rows=300).rows, 300)
    assert_matches(x, random_rows(tokens, 35, 50000), 50000)


@pytest.mark.parametrize("dtype", FLOATING)
def test_values(dtype):
    x = Tokens.random(40, 1024, dtype)
    x.data[3, 5], x.data[4, 200], x.data[6, 1023] = math.nan, -math.inf, math.inf
    x.data[5], x.data[7] = 0.0, torch.finfo(dtype).max
    x.data[8] *= 1e-6
    rows = torch.randperm(160, device="cuda").int().view(40, 4)
    assert_matches(x, rows, 160)
    got, expected = permute_fp8(quantize_1x128(x.data), rows, 160), permute_quantize(x.data, rows, 160)
    assert torch.equal(got.data.view(torch.uint8), expected.data.view(torch.uint8))
    assert torch.equal(got.scale.contiguous().view(torch.int32), expected.scale.contiguous().view(torch.int32))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_out_of_range(dtype):
    x = Tokens.random(3, 256, dtype)
    rows = torch.tensor([[INT32.min, INT32.max, 5], [-1, 4, 3], [6, 2, -5]], dtype=torch.int32, device="cuda")
    assert_matches(x, rows, 5)
    assert_matches(x, torch.full((3, 3), -1, dtype=torch.int32, device="cuda"), 5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens,hidden,top_k,num_rows", [(0, 128, 8, 0), (3, 0, 2, 6), (3, 32, 0, 4), (3, 32, 2, 0)])
def test_empty(tokens, hidden, top_k, num_rows, dtype):
    rows = torch.zeros(tokens, top_k, dtype=torch.int32, device="cuda")
    data, scale = Tokens.random(tokens, hidden, dtype).permuted(rows, num_rows)
    assert data.shape == (num_rows, hidden) and scale.shape == (num_rows, ceil_div(hidden, 128))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("tokens,hidden,top_k", [(7, 272, 6), (65, 1040, 33), (3000, 7168, 8)])
def test_assignments_that_are_not_wanted(tokens, hidden, top_k, sparse, dtype):
    x, num_rows = Tokens.random(tokens, hidden, dtype), tokens * top_k
    rows = random_rows(tokens, top_k, num_rows)
    *expected, _ = write(x, rows, num_rows, sparse)
    *got, assignments = write(x, rows, num_rows, sparse, assigned=False)
    assert all(map(torch.equal, got, expected)) and (assignments.view(torch.uint8) == MARK).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_past_two_to_the_31_elements(dtype):
    tokens, hidden, top_k = 37_500, 7168, 8
    num_rows = tokens * top_k
    assert num_rows * hidden > 1 << 31
    x = Tokens.random(tokens, hidden, dtype)
    rows = torch.randperm(num_rows, device="cuda").int().view(tokens, top_k)
    data, scale = x.permuted(rows, num_rows)
    in_turn = torch.arange(100, dtype=torch.int32, device="cuda")[:, None]
    for some in (slice(0, 100), slice(tokens // 2, tokens // 2 + 100), slice(tokens - 100, tokens)):
        expected_data, expected_scale = x.some(some).expected(in_turn, 100)
        for k in range(top_k):
            row = rows[some, k].long()
            assert torch.equal(data.view(torch.uint8)[row], expected_data.view(torch.uint8))
            assert torch.equal(scale[row], expected_scale)
