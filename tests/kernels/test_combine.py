"""Weighted sums of the rows of a token: reference backend, errors, autograd, operator, and the compiled kernels."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8moe.kernels.experts.combine import Dtypes, combine, joins_norm, kernel_spec, norm_kernel_spec
from fp8moe.kernels.experts.routing import sort_by_expert
from fp8moe.runtime.checks import FLOATING
from tests.ptxas import compile_report

Y_DTYPES = (torch.bfloat16, torch.float32)


def expected(y: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """One assignment at a time, in float32."""
    out = torch.zeros(rows.shape[0], y.shape[1])
    for t, token_rows in enumerate(rows.tolist()):
        for k, row in enumerate(token_rows):
            if 0 <= row < y.shape[0]:
                out[t] += weights[t, k].float() * y[row].float()
    return out.to(out_dtype)


@given(
    tokens=st.integers(0, 20),
    hidden=st.integers(0, 20).map(lambda i: 8 * i),
    top_k=st.integers(0, 9),
    num_rows=st.integers(0, 50),
    dtypes=st.tuples(st.sampled_from(Y_DTYPES), st.sampled_from(FLOATING), st.sampled_from(FLOATING)),
    seed=st.integers(0, 1000),
)
def test_equals_one_at_a_time(tokens, hidden, top_k, num_rows, dtypes, seed):
    generator = torch.Generator().manual_seed(seed)
    y_dtype, weight_dtype, out_dtype = dtypes
    y = torch.randn(num_rows, hidden, generator=generator).to(y_dtype)
    rows = torch.randint(-2, num_rows + 2, (tokens, top_k), dtype=torch.int32, generator=generator)
    weights = torch.randn(tokens, top_k, generator=generator).to(weight_dtype)
    out = combine(y, rows, weights, out_dtype)
    assert out.dtype == out_dtype and out.shape == (tokens, hidden)
    assert torch.equal(out, expected(y, rows, weights, out_dtype))


def test_undoes_the_sort():
    x, index = torch.randn(9, 16), torch.randint(0, 5, (9, 4))
    rows = sort_by_expert(index, 5).rows
    y = torch.empty(36, 16)
    y[rows.flatten().long()] = x.repeat_interleave(4, 0)
    assert torch.equal(combine(y, rows, torch.full((9, 4), 0.25), torch.float32), x)


def test_order_of_the_sum():
    # In float32, 2^24 + 1 + 1 is 2^24, and 1 + 1 + 2^24 is not.
    y = torch.tensor([[2.0**24] * 8, [1.0] * 8])
    rows = torch.tensor([[0, 1, 1], [1, 1, 0]], dtype=torch.int32)
    assert combine(y, rows, torch.ones(2, 3), torch.float32)[:, 0].tolist() == [2.0**24, 2.0**24 + 2]


def test_unused_values_do_not_leak():
    y = torch.randn(6, 16)
    y[[0, 3, 5]] = float("nan")
    rows = torch.tensor([[1, -1], [6, 2], [-1, -1], [4, -(2**31)]], dtype=torch.int32)
    weights = torch.ones(4, 2)
    weights[0, 1] = weights[2, 0] = float("nan")  # of assignments without a row
    out = combine(y, rows, weights, torch.float32)
    assert torch.equal(out, torch.stack((y[1], y[2], torch.zeros(16), y[4])))
    rows[2, 1] = 3
    assert combine(y, rows, weights, torch.float32)[2].isnan().all()


# ---- errors ----


def test_errors():
    y, rows, weights = torch.zeros(8, 16), torch.zeros(4, 2, dtype=torch.int32), torch.zeros(4, 2)
    dtype = torch.bfloat16
    for i, name in enumerate(("y", "rows", "weights")):
        operands = [y, rows, weights]
        operands[i] = 1
        with pytest.raises(TypeError, match=f"^{name}: expected a torch.Tensor, got int 1"):
            combine(*operands, dtype)
    with pytest.raises(TypeError, match="^y: expected bfloat16 or float32, got torch.float16"):
        combine(y.half(), rows, weights, dtype)
    for wrong in (y[:, :12], y[0]):
        with pytest.raises(ValueError, match="^y: expected shape .* H a multiple of 8, got"):
            combine(wrong, rows, weights, dtype)
    with pytest.raises(TypeError, match="^rows: expected int32, got torch.int64"):
        combine(y, rows.long(), weights, dtype)
    with pytest.raises(ValueError, match=r"^rows: expected shape \(T, K\), got \(8,\)"):
        combine(y, rows.flatten(), weights, dtype)
    with pytest.raises(TypeError, match="^weights: expected bfloat16, float16 or float32, got torch.float64"):
        combine(y, rows, weights.double(), dtype)
    with pytest.raises(ValueError, match=r"^weights: expected shape \(4, 2\) like rows, got \(4, 1\)"):
        combine(y, rows, weights[:, :1], dtype)
    with pytest.raises(TypeError, match="^out_dtype: expected bfloat16, float16 or float32, got torch.float64"):
        combine(y, rows, weights, torch.float64)


def test_backward_raises():
    y, rows, weights = torch.randn(8, 16), torch.zeros(4, 2, dtype=torch.int32), torch.randn(4, 2)
    for operands in ((y.clone().requires_grad_(), rows, weights), (y, rows, weights.clone().requires_grad_())):
        out = combine(*operands, torch.float32)
        assert torch.equal(out, combine(y, rows, weights, torch.float32))
        with pytest.raises(RuntimeError, match="combine has no backward"):
            out.sum().backward()


# ---- kernels ----


@pytest.mark.parametrize("turn,dtypes", list(enumerate(itertools.product(Y_DTYPES, FLOATING, FLOATING))), ids=str)
def test_variants_compile_without_spills(turn, dtypes):
    """Rows in any order, or in that of the assignments: all pairs of dtypes, sizes and orders."""
    for i, index_dtype in enumerate((None, torch.int32, torch.int64)):
        hidden = (8, 576, 7168)[(turn + i) % 3]
        report = compile_report(kernel_spec(hidden, Dtypes(*dtypes, index_dtype)))
        assert report.spill_stores == report.spill_loads == report.stack == report.static_smem == 0
        # 32 warps or more on an SM of 65536 registers, each with 4 KB of loads in flight.
        assert report.registers <= 64


@pytest.mark.parametrize("dtype", Y_DTYPES)
@pytest.mark.parametrize("hidden", [16, 144, 576, 2048, 2880, 5120, 7168, 8192, 16384])
def test_every_variant_with_a_norm_compiles_without_spills(hidden, dtype):
    dtypes = Dtypes(dtype, torch.float32, dtype)
    if not joins_norm(1, hidden, dtypes):
        assert hidden * dtype.itemsize > 32 << 10
        return
    spec = norm_kernel_spec(hidden, dtypes)
    report = compile_report(spec)
    assert report.spill_stores == report.spill_loads == report.stack == 0
    assert report.registers * dict(spec.defines)["ROW_THREADS"] <= 65536


def test_what_is_normalized_besides():
    same, other = Dtypes(torch.bfloat16, torch.float32, torch.bfloat16), torch.float16
    for tokens, hidden, dtypes, joins in (
        *((1, 2048, same, True), (64, 16384, same, True), (65, 2048, same, False), (1, 16392, same, False)),
        *((0, 2048, same, False), (1, 2048, same._replace(y=torch.float32, out=other), False)),
        (1, 2048, same._replace(index=torch.int64), False),
    ):
        assert joins_norm(tokens, hidden, dtypes) == joins
