"""The choice of the highest index scores: against a plain sort of Python, columns out of range, NaN, the kernel."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8moe import mqa_top_k
from fp8moe.kernels.indexer.top_k import kernel_spec
from tests.errors import refused
from tests.gemm_cases import int32
from tests.ptxas import without_spills

SCORES = st.sampled_from([0.0, -0.0, 1.0, 1.5, -2.0, math.inf, -math.inf, math.nan, 3e-39])


def expected(row: list[float], top_k: int, start: int, end: int) -> list[int]:
    start, end = max(min(start, len(row)), 0), max(min(end, len(row)), 0)
    order = sorted(range(start, end), key=lambda column: (not math.isnan(row[column]), -row[column], column))
    found = [column - start for column in order][:top_k]
    return found + [-1] * (top_k - len(found))


@given(
    rows=st.lists(st.lists(SCORES, min_size=9, max_size=9), max_size=4),
    top_k=st.integers(1, 12),
    start=st.integers(-3, 12),
    end=st.integers(-3, 12),
)
def test_against_a_sort(rows, top_k, start, end):
    logits = torch.tensor(rows, dtype=torch.float32).view(-1, 9)
    starts, ends = (torch.full((len(rows),), bound, dtype=torch.int32) for bound in (start, end))
    found = mqa_top_k(logits, top_k=top_k, starts=starts, ends=ends)
    assert found.dtype == torch.int32
    assert found.tolist() == [expected(row, top_k, start, end) for row in rows]


def test_ranges_are_whole_rows_by_default():
    logits = torch.randn(5, 70)
    assert torch.equal(mqa_top_k(logits, top_k=9), logits.topk(9).indices.int())
    assert torch.equal(mqa_top_k(logits, top_k=70, ends=int32([3] * 5))[:, 3:], int32([[-1] * 67] * 5))
    assert torch.equal(mqa_top_k(logits.T.contiguous().T, top_k=9), mqa_top_k(logits, top_k=9))


def test_nothing_to_choose_from():
    assert torch.equal(mqa_top_k(torch.empty(2, 0), top_k=3), int32([[-1] * 3] * 2))
    assert mqa_top_k(torch.empty(0, 7), top_k=3).shape == (0, 3)


def test_scores_with_gradients():
    logits = torch.randn(2, 9, requires_grad=True)
    assert not mqa_top_k(logits, top_k=3).requires_grad


@pytest.mark.parametrize(
    ("error", "message", "change"),
    [
        (ValueError, "^top_k: expected", {"top_k": 0}),
        (TypeError, "^logits: ", {"logits": torch.randn(2, 9).half()}),
        (ValueError, r"^logits: expected shape \(S, T\)", {"logits": torch.randn(9)}),
        (ValueError, r"^starts: expected shape", {"starts": int32([0])}),
        (TypeError, "^ends: ", {"ends": torch.tensor([1, 2])}),
    ],
)
def test_errors(error, message, change):
    refused(error, message, mqa_top_k, **({"logits": torch.randn(2, 9), "top_k": 3} | change))


def test_kernel_compiles_without_spills():
    assert without_spills(kernel_spec()).registers <= 64  # two thread blocks on an SM
