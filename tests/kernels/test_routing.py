"""Sorting assignments by expert: the semantics on the reference backend, the operator, and the compiled kernels."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8moe.kernels.experts import routing
from fp8moe.kernels.experts.checks import MAX_EXPERTS
from fp8moe.kernels.experts.routing import assigned_rows, sort_by_expert
from tests.ptxas import compile_report

DTYPES = (torch.int32, torch.int64)


def expected(
    index: torch.Tensor, num_experts: int, capacity: int | None, first_expert: int = 0
) -> tuple[list[int], list[list[int]]]:
    """Groups and rows, one assignment at a time."""
    flat = index.flatten().tolist()
    members = [[i for i, expert in enumerate(flat) if expert == first_expert + e] for e in range(num_experts)]
    rows, groups, start = [-1] * len(flat), [0], 0
    for e, found in enumerate(members):
        kept = found if capacity is None else found[:capacity]
        first = start if capacity is None else e * capacity
        for rank, assignment in enumerate(kept):
            rows[assignment] = first + rank
        start += len(kept)
        groups.append(start)
    if capacity is not None:
        groups = [len(found[:capacity]) for found in members]
    tokens, top_k = index.shape
    return groups, [rows[t * top_k : (t + 1) * top_k] for t in range(tokens)]


@given(
    tokens=st.integers(0, 40),
    top_k=st.integers(0, 9),
    num_experts=st.integers(1, 12),
    capacity=st.none() | st.integers(0, 9),
    first_expert=st.integers(0, 5),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 1000),
)
def test_equals_one_at_a_time(tokens, top_k, num_experts, capacity, first_expert, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    index = torch.randint(-2, first_expert + num_experts + 3, (tokens, top_k), dtype=dtype, generator=generator)
    routing = sort_by_expert(index, num_experts, capacity=capacity, first_expert=first_expert)
    groups, rows = expected(index, num_experts, capacity, first_expert)
    assert routing.groups.dtype == routing.rows.dtype == torch.int32
    assert routing.groups.tolist() == groups
    assert routing.rows.tolist() == rows
    assert routing.rows.shape == index.shape


@given(
    tokens=st.integers(0, 20),
    num_experts=st.integers(1, 12),
    first_row=st.integers(0, 70),
    num_rows=st.none() | st.integers(0, 70),
    seed=st.integers(0, 1000),
)
def test_window_is_a_part_of_all_rows(tokens, num_experts, first_row, num_rows, seed):
    index = torch.randint(-2, num_experts + 3, (tokens, 3), generator=torch.Generator().manual_seed(seed))
    all_groups, all_rows = sort_by_expert(index, num_experts)
    groups, rows = sort_by_expert(index, num_experts, first_row=first_row, num_rows=num_rows)
    length = 3 * tokens if num_rows is None else num_rows
    assert groups.tolist() == [min(max(start - first_row, 0), length) for start in all_groups.tolist()]
    inside = (all_rows >= first_row) & (all_rows < first_row + length)
    assert torch.equal(rows, torch.where(inside, all_rows - first_row, -1))
    # Each row of the window has its place among the groups of experts.
    for expert, (start, end) in enumerate(zip(groups.tolist(), groups.tolist()[1:], strict=False)):
        assert sorted(rows[(index == expert) & (rows >= 0)].tolist()) == list(range(start, end))


@given(
    tokens=st.integers(0, 20),
    num_experts=st.integers(1, 12),
    num_rows=st.integers(0, 70),
    dtype=st.sampled_from((torch.float32, torch.bfloat16, torch.float16)),
    seed=st.integers(0, 1000),
)
def test_assigned_rows_one_at_a_time(tokens, num_experts, num_rows, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    index = torch.randint(-2, num_experts + 3, (tokens, 3), generator=generator)
    weights = torch.randn(tokens, 3, generator=generator).to(dtype).requires_grad_()
    if tokens:
        weights.data[0] = torch.tensor([math.nan, math.inf, -0.0])
    sorted = sort_by_expert(index, num_experts, num_rows=num_rows)
    expected_tokens, expected_weights = [-1] * num_rows, [0.0] * num_rows
    for token, places in enumerate(sorted.rows.tolist()):
        for k, row in enumerate(places):
            if row >= 0:
                expected_tokens[row], expected_weights[row] = token, weights[token, k].item()
    found = assigned_rows(sorted, weights, num_rows)
    assert found.tokens.dtype == torch.int32 and found.tokens.tolist() == expected_tokens
    assert found.weights.dtype == torch.float32 and not found.weights.requires_grad
    assert torch.equal(found.weights.nan_to_num(7.0), torch.tensor(expected_weights).view(num_rows).nan_to_num(7.0))


def test_refused_weights_of_rows():
    sorted = sort_by_expert(torch.zeros(4, 2, dtype=torch.int64), 3)
    with pytest.raises(ValueError, match="weights"):
        assigned_rows(sorted, torch.zeros(4, 3), 8)
    with pytest.raises(TypeError, match="weights"):
        assigned_rows(sorted, torch.zeros(4, 2, dtype=torch.int32), 8)


@given(tokens=st.integers(1, 60), num_experts=st.integers(1, MAX_EXPERTS), seed=st.integers(0, 1000))
def test_rows_are_a_permutation(tokens, num_experts, seed):
    index = torch.randint(0, num_experts, (tokens, 8), generator=torch.Generator().manual_seed(seed))
    groups, rows = sort_by_expert(index, num_experts)
    assert sorted(rows.flatten().tolist()) == list(range(8 * tokens))
    assert groups[0] == 0 and groups[-1] == 8 * tokens and (groups.diff() >= 0).all()
    for e in index.unique().tolist():
        assert rows[index == e].tolist() == list(range(groups[e], groups[e + 1]))


def test_index_outside_of_32_bits_is_of_no_expert():
    index = torch.tensor([[0, 2**32], [2**32 + 1, -(2**40)], [-(2**63), 2**63 - 1]])
    groups, rows = sort_by_expert(index, 2)
    assert groups.tolist() == [0, 1, 1]
    assert rows.tolist() == [[0, -1], [-1, -1], [-1, -1]]


# ---- errors ----


def test_errors():
    index = torch.zeros(4, 2, dtype=torch.int64)
    with pytest.raises(TypeError, match="^top_k_index: expected a torch.Tensor, got list"):
        sort_by_expert([[0]], 4)
    for dtype in (torch.float32, torch.int16, torch.uint8, torch.bool):
        with pytest.raises(TypeError, match=f"^top_k_index: expected int32 or int64, got {dtype}"):
            sort_by_expert(index.to(dtype), 4)
    with pytest.raises(ValueError, match=r"^top_k_index: expected shape \(T, K\).*got \(4,\)"):
        sort_by_expert(index[:, 0], 4)
    with pytest.raises(ValueError, match=r"^top_k_index: .* < 2\*\*31, got \(2147483648, 1\)"):
        sort_by_expert(index[:1, :1].expand(1 << 31, 1), 4)
    for num_experts in (0, -1, MAX_EXPERTS + 1):
        with pytest.raises(ValueError, match=f"^num_experts: expected 1 to 1024, got {num_experts}"):
            sort_by_expert(index, num_experts)
    for capacity in (-1, 1 << 29):
        with pytest.raises(ValueError, match=rf"^capacity: expected 0 <= 4 \* capacity < 2\*\*31, got {capacity}"):
            sort_by_expert(index, 4, capacity=capacity)
    for first_expert in (-1, (1 << 31) - 4):
        with pytest.raises(ValueError, match=rf"^first_expert: .* < 2\*\*31 - 4, got {first_expert}"):
            sort_by_expert(index, 4, first_expert=first_expert)
    for name in ("first_row", "num_rows"):
        for value in (-1, 1 << 31):
            with pytest.raises(ValueError, match=rf"^{name}: expected 0 to 2\*\*31 - 1, got {value}"):
                sort_by_expert(index, 4, **{name: value})
        with pytest.raises(ValueError, match="^capacity: expected None with a window of rows, got 3 with first_row"):
            sort_by_expert(index, 4, capacity=3, **{name: 1})


# ---- operator ----


# ---- kernels ----


@given(assignments=st.integers(0, 10000) | st.integers(0, (1 << 31) - 1), num_experts=st.integers(1, MAX_EXPERTS))
def test_variant_holds_the_problem(assignments, num_experts):
    shape = routing.KernelShape.of(assignments, num_experts)
    counters, warps, cluster = shape
    assert counters & (counters - 1) == 0 and 32 <= counters <= 1024
    assert num_experts <= counters <= max(32, 2 * num_experts - 1)
    assert counters <= 32 * warps <= 1024
    assert cluster == (1 if assignments <= 4096 else 8)
    assert cluster > 1 or assignments <= 128 * warps
    # The counts, and three tables with one entry per expert or per warp.
    assert shape.shared_bytes + 2 * 4 * counters + 4 * 32 <= 227 << 10


@pytest.mark.parametrize("masked", [False, True])
def test_variants_compile_without_spills(masked):
    shapes = {routing.KernelShape.of(r, e) for r in (8, 1024, 4096, 4097) for e in (1, 64, 128, 256, 512, 1024)}
    assert {counters for counters, _, _ in shapes} == {32, 64, 128, 256, 512, 1024}
    for turn, shape in enumerate(sorted(shapes)):
        report = compile_report(routing.kernel_spec(shape, DTYPES[(turn + masked) % 2], masked))
        assert report.spill_stores == report.spill_loads == report.stack == 0
        assert report.registers * shape.warps * 32 <= 65536
