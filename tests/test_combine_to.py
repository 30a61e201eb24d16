"""Weighted sums to the buffers of several ranks: reference backend, errors, and the compiled kernels."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8moe.kernels.experts import combine_plan
from fp8moe.kernels.experts.combine import combine, combine_to
from fp8moe.runtime import jit
from fp8moe.runtime.checks import FLOATING

Y_DTYPES = (torch.bfloat16, torch.float32)
OLD = -1e30  # what a place held before


def operands(tokens, hidden, top_k, num_rows, dtypes=(torch.bfloat16, torch.float32), seed=0):
    generator = torch.Generator().manual_seed(seed)
    y = torch.randn(num_rows, hidden, generator=generator).to(dtypes[0])
    rows = torch.randint(-2, num_rows + 2, (tokens, top_k), dtype=torch.int32, generator=generator)
    return y, rows, torch.randn(tokens, top_k, generator=generator).to(dtypes[1])


@given(
    ranks=st.integers(2, 8),
    tokens=st.integers(0, 5),
    hidden=st.integers(1, 20).map(lambda i: 8 * i),
    top_k=st.integers(0, 3),
    dtypes=st.tuples(st.sampled_from(Y_DTYPES), st.sampled_from(FLOATING)),
    to_all=st.booleans(),
    added=st.booleans(),
)
def test_sums_of_all_ranks_arrive(ranks, tokens, hidden, top_k, dtypes, to_all, added):
    count = tokens if to_all else ranks * tokens
    buffers = [torch.full((ranks * tokens, hidden), OLD) for _ in range(ranks)]
    sums = []
    for rank in range(ranks):
        y, rows, weights = operands(count, hidden, top_k, 9, dtypes, seed=rank)
        partial = torch.randn(count, hidden) if added else None
        written = combine(y, rows, weights, torch.float32, residual=partial)
        for token, places in enumerate(rows.tolist()):
            if not added and not any(0 <= row < 9 for row in places):
                written[token] = OLD
        sums.append(written)
        combine_to(y, rows, weights, buffers, rank, to_all=to_all, partial=partial)
    for owner, buffer in enumerate(buffers):
        own = slice(None) if to_all else slice(owner * tokens, (owner + 1) * tokens)
        assert torch.equal(buffer, torch.cat([part[own] for part in sums]))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(y=None), TypeError, "^y: expected a torch.Tensor, got NoneType"),
        (dict(y=torch.zeros(9, 12)), ValueError, "^y: expected shape .* multiple of 8"),
        (dict(rows=torch.zeros(4, 3)), TypeError, "^rows: expected int32"),
        (dict(partial=torch.zeros(4, 8)), ValueError, "^partial: expected shape .4, 16."),
        (dict(buffers=[]), ValueError, "^buffers: expected those of 2 to 8 ranks, got 0"),
        (dict(buffers=[torch.zeros(4, 16)], rank=0), ValueError, "^buffers: expected those of 2 to 8 ranks, got 1"),
        (dict(buffers=[torch.zeros(4, 16)] * 9), ValueError, "^buffers: expected those of 2 to 8 ranks, got 9"),
        (
            dict(buffers=[torch.zeros(4, 16)] * 3),
            ValueError,
            "^rows: expected as many tokens of each of 3 ranks, got 4",
        ),
        (dict(buffers=[torch.zeros(8, 16)] * 2), ValueError, r"^buffers\[0\]: expected shape .4, 16., got .8, 16."),
        (dict(to_all=True), ValueError, r"^buffers\[0\]: expected shape .8, 16., got .4, 16."),
        (dict(buffers=[torch.zeros(4, 16).bfloat16()] * 2), TypeError, r"^buffers\[0\]: expected float32"),
        (dict(buffers=[torch.zeros(16, 4).t()] * 2), ValueError, r"^buffers\[0\]: expected contiguous"),
        (dict(rank=2), ValueError, "^rank: expected 0 to 1"),
    ],
)
def test_errors_name_the_argument_and_write_nothing(change, error, message):
    y, rows, weights = operands(4, 16, 3, 9)
    arguments = dict(y=y, rows=rows, weights=weights, buffers=[torch.zeros(4, 16)] * 2, rank=1) | change
    with pytest.raises(error, match=message):
        combine_to(**arguments)
    assert not any(buffer.any() for buffer in arguments["buffers"])


# ---- kernels ----


@pytest.mark.parametrize(("peers", "to_all"), list(itertools.product((2, 8), (False, True))))
def test_every_variant_compiles_without_spills(peers, to_all):
    for hidden, y_dtype, weight_dtype in itertools.product((8, 7168), Y_DTYPES, FLOATING):
        spec = combine_plan.kernel_spec(hidden, y_dtype, weight_dtype, torch.float32, peers, to_all)
        report = jit.compile_spec(spec)
        assert report.spill_stores == report.spill_loads == report.stack == 0
        assert report.registers <= 80  # 24 warps or more on an SM: it waits for NVLink, not for memory
