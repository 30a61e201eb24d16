"""Sums over the ranks that have an expert of a token: reference backend, errors, and the compiled kernels."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8moe.kernels.experts import sum_partials_plan
from fp8moe.kernels.experts.combine import combine, combine_to
from fp8moe.kernels.experts.routing import sort_by_expert
from fp8moe.kernels.experts.sum_partials import sum_partials
from fp8moe.runtime import jit
from fp8moe.runtime.checks import FLOATING
from tests.peer_cases import owners

INDEX_DTYPES = (torch.int32, torch.int64)


def expected(partials, index, ranks, num_experts, out_dtype, residual=None):
    """One rank at a time, in float32."""
    slots = len(partials) // ranks
    out = torch.zeros(len(index), partials.shape[1])
    for token, there in enumerate(owners(index, ranks, num_experts).tolist()):
        for rank in range(ranks):
            if there[rank]:
                out[token] += partials[rank * slots + token]
    return out.to(out_dtype) if residual is None else residual + out.to(out_dtype)


@given(
    ranks=st.integers(1, 8),
    tokens=st.integers(0, 9),
    more=st.integers(0, 2),
    hidden=st.integers(0, 20).map(lambda i: 8 * i),
    top_k=st.integers(0, 9),
    experts=st.integers(0, 4),
    dtypes=st.tuples(st.sampled_from(INDEX_DTYPES), st.sampled_from(FLOATING)),
    added=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_equals_one_at_a_time(ranks, tokens, more, hidden, top_k, experts, dtypes, added, seed):
    generator = torch.Generator().manual_seed(seed)
    index_dtype, out_dtype = dtypes
    index = torch.randint(-3, ranks * experts + 3, (tokens, top_k), generator=generator).to(index_dtype)
    # Nothing is in the places of ranks without an expert of a token, nor behind the tokens.
    partials = torch.full((ranks, tokens + more, hidden), float("nan"))
    there = owners(index, ranks, ranks * experts).t()
    partials[:, :tokens][there] = torch.randn(int(there.sum()), hidden, generator=generator)
    partials = partials.flatten(0, 1)
    residual = torch.randn(tokens, hidden, generator=generator).to(out_dtype) if added else None
    out = sum_partials(partials, index, ranks, ranks * experts, out_dtype, residual)
    assert out.dtype == out_dtype and out.shape == (tokens, hidden) and not out.isnan().any()
    assert torch.equal(out, expected(partials, index, ranks, ranks * experts, out_dtype, residual))


def test_adds_up_what_combine_to_writes():
    ranks, tokens, hidden, each = 3, 4, 16, 5
    index = torch.randint(-4, ranks * each + 4, (ranks * tokens, 2))
    buffers = [torch.full((ranks * tokens, hidden), float("nan")) for _ in range(ranks)]
    weights, total = torch.rand(ranks * tokens, 2), 0
    for rank in range(ranks):
        y = torch.randn(index.numel(), hidden)
        rows = sort_by_expert(index, each, first_expert=rank * each).rows
        combine_to(y, rows, weights, buffers, rank)
        total = total + combine(y, rows, weights, torch.float32)
    own = zip(buffers, index.split(tokens), strict=True)
    out = torch.cat([sum_partials(buffer, part, ranks, ranks * each, torch.bfloat16) for buffer, part in own])
    assert not owners(index, ranks, ranks * each).all() and torch.equal(out, total.bfloat16())


def test_order_of_the_sum():
    # In float32, 2^24 + 1 + 1 is 2^24, and 1 + 1 + 2^24 is not.
    values = torch.tensor([[2.0**24, 1.0], [1.0, 1.0], [1.0, 2.0**24]])  # of each rank, for both tokens
    partials = values.flatten()[:, None].expand(-1, 8)
    index = torch.tensor([[2, 1, 0], [0, 2, 1]])
    assert sum_partials(partials, index, 3, 3, torch.float32)[:, 0].tolist() == [2.0**24, 2.0**24 + 2]


def test_experts_of_each_rank():
    """Both ends of what a rank has, and what lies beside all of them."""
    index = torch.tensor([[0], [2], [3], [5], [6], [8], [9], [-1], [2**32 + 4], [-(2**40)]])
    partials = torch.tensor([1.0, 2.0, 4.0]).repeat_interleave(len(index))[:, None].expand(-1, 8)
    out = sum_partials(partials, index, 3, 9, torch.float32)
    assert out[:, 7].tolist() == [1, 1, 2, 2, 4, 4, 0, 0, 0, 0]


def test_only_what_is_used_leaks():
    partials, index = torch.ones(2, 2, 8), torch.tensor([[0, 1], [0, 0]])
    partials[1, :, 3] = float("nan")
    out = sum_partials(partials.flatten(0, 1), index, 2, 2, torch.bfloat16)
    assert out.isnan().nonzero().tolist() == [[0, 3]]


def test_strided_operands():
    partials, residual = torch.randn(16, 6, 2)[..., 0].t(), torch.randn(16, 3).t()
    index = torch.randint(-1, 5, (4, 3)).t()[:, ::2]
    out = sum_partials(partials, index, 2, 4, torch.float32, residual)
    assert torch.equal(out, expected(partials, index, 2, 4, torch.float32, residual))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(partials=None), TypeError, "^partials: expected a torch.Tensor, got NoneType"),
        (dict(top_k_index=[[1]]), TypeError, "^top_k_index: expected a torch.Tensor, got list"),
        (dict(partials=torch.zeros(8, 16).bfloat16()), TypeError, "^partials: expected float32, got torch.bfloat16"),
        (dict(partials=torch.zeros(8, 12)), ValueError, r"^partials: expected shape \(2 . S, H\) .* multiple of 8"),
        (dict(partials=torch.zeros(7, 16)), ValueError, r"^partials: expected shape \(2 . S, H\) .*got \(7, 16\)"),
        (dict(partials=torch.zeros(8)), ValueError, r"^partials: expected shape .* got \(8,\)"),
        (dict(ranks=2.0), TypeError, "^ranks: expected an int, got float 2.0"),
        (dict(ranks=True), TypeError, "^ranks: expected an int"),
        (dict(ranks=0), ValueError, "^ranks: expected 1 to 8, got 0"),
        (dict(ranks=9), ValueError, "^ranks: expected 1 to 8, got 9"),
        (dict(num_experts=None), TypeError, "^num_experts: expected an int, got NoneType"),
        (
            dict(num_experts=7),
            ValueError,
            "^num_experts: expected a multiple of 2, the ranks, up to 1024 for each, got 7",
        ),
        (
            dict(num_experts=-8),
            ValueError,
            "^num_experts: expected a multiple of 2, the ranks, up to 1024 for each, got -8",
        ),
        (dict(top_k_index=torch.zeros(3, 2)), TypeError, "^top_k_index: expected int32 or int64, got torch.float32"),
        (dict(top_k_index=torch.zeros(3).long()), ValueError, r"^top_k_index: expected shape \(T, K\) .* got \(3,\)"),
        (
            dict(top_k_index=torch.zeros(5, 2).long()),
            ValueError,
            r"^top_k_index: expected shape \(T, K\) with T at most 4, the rows of a rank, got \(5, 2\)",
        ),
        (
            dict(top_k_index=torch.zeros(3, 2, dtype=torch.int64, device="meta")),
            ValueError,
            "^top_k_index: expected on cpu like partials, got meta",
        ),
        (dict(out_dtype=torch.float64), TypeError, "^out_dtype: expected bfloat16, float16 or float32, got"),
        (dict(residual=1.0), TypeError, "^residual: expected a torch.Tensor, got float"),
        (dict(residual=torch.zeros(3, 16)), TypeError, "^residual: expected bfloat16, got torch.float32"),
        (
            dict(residual=torch.zeros(4, 16).bfloat16()),
            ValueError,
            r"^residual: expected shape \(3, 16\), got \(4, 16\)",
        ),
        (
            dict(residual=torch.zeros(3, 16, dtype=torch.bfloat16, device="meta")),
            ValueError,
            "^residual: expected on cpu like partials, got meta",
        ),
    ],
)
def test_errors_name_the_argument(change, error, message):
    good = dict(partials=torch.zeros(8, 16), top_k_index=torch.zeros(3, 2, dtype=torch.int64), ranks=2, num_experts=8)
    with pytest.raises(error, match=message):
        sum_partials(**good | dict(out_dtype=torch.bfloat16) | change)


# ---- kernels ----


@pytest.mark.parametrize(("ranks", "index_dtype"), list(itertools.product((1, 2, 3, 8), INDEX_DTYPES)), ids=str)
def test_every_variant_compiles_without_spills(ranks, index_dtype):
    for hidden, out_dtype in itertools.product((8, 272, 7168), FLOATING):
        report = jit.compile_spec(sum_partials_plan.kernel_spec(hidden, index_dtype, out_dtype, ranks))
        assert report.spill_stores == report.spill_loads == report.stack == report.static_smem == 0
        assert report.registers <= 64  # 32 warps on an SM, as the grid has them
