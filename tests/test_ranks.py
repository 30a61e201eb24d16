"""Ranks of tokens and of rows: reference backend, operators, and the compiled kernels."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8moe.kernels.experts import ranks_plan
from fp8moe.kernels.experts.ranks import pick_ranks, spread_ranks
from fp8moe.runtime import jit
from tests.ranks_cases import expected_pick, expected_spread, operands


@given(
    tokens=st.integers(0, 30),
    num_experts=st.integers(1, 6),
    top_k=st.integers(0, 4),
    r=st.sampled_from([8, 24]),
    weighted=st.booleans(),
    seed=st.integers(0, 99),
)
def test_sums_and_copies(tokens, num_experts, top_k, r, weighted, seed):
    """Assignments to other ranks' experts, and the same expert more than once."""
    ranks, picked, weights, index, rows = operands(tokens, num_experts, top_k, r, seed)
    got, used = pick_ranks(ranks, index, rows, num_experts), rows[rows >= 0].long()
    assert got.shape == picked.shape
    assert torch.equal(got[used], expected_pick(ranks, index, rows, num_experts)[used])
    weights = weights if weighted else None
    got, expected = (f(picked, weights, index, rows, num_experts) for f in (spread_ranks, expected_spread))
    assert got.shape == ranks.shape and got.dtype == torch.bfloat16
    assert (got.double() - expected).norm() <= 4e-3 * expected.norm()


@pytest.mark.parametrize("tokens", [0, 5])
def test_opcheck(tokens):
    ranks, picked, weights, index, rows = operands(tokens, 3, 2, 8)
    rows = torch.arange(rows.numel(), dtype=torch.int32).view(rows.shape)  # without rows of no assignment
    torch.library.opcheck(torch.ops.fp8moe.pick_ranks.default, (ranks, index.clamp(0, 2), rows, 3))
    for given_weights in (None, weights):
        torch.library.opcheck(torch.ops.fp8moe.spread_ranks.default, (picked, given_weights, index, rows, 3))


@pytest.mark.parametrize("name", ["pick_ranks", "spread_ranks"])
@pytest.mark.parametrize("sizes", [(32, 8, 16), (128, 8, 16), (1, 1, 8), (7, 40, 24), (1024, 3, 256)])
def test_every_variant_compiles_without_spills(name, sizes):
    report = jit.compile_spec(ranks_plan.kernel_spec(name, *sizes))
    assert report.spill_stores == report.spill_loads == report.stack == 0
    assert report.registers <= 40
