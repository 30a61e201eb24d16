"""Tokens to the rows of their experts, quantized on the way or before: reference backend, errors, compiled kernels."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8moe.kernels.experts import permute
from fp8moe.kernels.experts.permute import permute_fp8, permute_quantize
from fp8moe.kernels.experts.routing import sort_by_expert
from fp8moe.quant.formats import FP8Tensor
from fp8moe.quant.quantize import dequantize, quantize_1x128
from fp8moe.runtime.checks import FLOATING
from tests.ptxas import compile_report
from tests.scales import is_mn_major


def assert_rows_hold_their_tokens(t, x, rows):
    """Bits of every row that is mapped to."""
    data, scale = quantize_1x128(x)
    for token, token_rows in enumerate(rows.tolist()):
        for row in token_rows:
            if 0 <= row < t.data.shape[0]:
                assert torch.equal(t.data[row].view(torch.uint8), data[token].view(torch.uint8))
                assert torch.equal(t.scale[row].view(torch.int32), scale[token].view(torch.int32))


@given(
    tokens=st.integers(0, 20),
    blocks=st.integers(0, 20),
    top_k=st.integers(0, 9),
    num_experts=st.integers(1, 12),
    capacity=st.none() | st.integers(0, 9),
    dtype=st.sampled_from(FLOATING),
    seed=st.integers(0, 1000),
)
def test_rows_of_a_routing(tokens, blocks, top_k, num_experts, capacity, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, 16 * blocks, generator=generator).to(dtype)
    index = torch.randint(-2, num_experts + 3, (tokens, top_k), generator=generator)
    rows = sort_by_expert(index, num_experts, capacity=capacity).rows
    num_rows = tokens * top_k if capacity is None else num_experts * capacity
    data, scale = quantize_1x128(x)
    by_row = (permute_fp8((data, form), rows, num_rows) for form in (scale, scale.contiguous()))
    for t in (permute_quantize(x, rows, num_rows), *by_row):
        assert t.data.shape == (num_rows, 16 * blocks) and t.data.dtype == torch.float8_e4m3fn
        assert t.data.is_contiguous() and t.scale.shape == (num_rows, -(-blocks // 8)) and is_mn_major(t.scale)
        assert_rows_hold_their_tokens(t, x, rows)


def test_rows_out_of_range_are_none():
    x = torch.randn(4, 32)
    rows = torch.tensor([[-1, 3], [0, 4], [-(2**31), 2**31 - 1], [2, 5]], dtype=torch.int32)
    for t in (permute_quantize(x, rows, 4), permute_fp8(quantize_1x128(x), rows, 4)):
        assert_rows_hold_their_tokens(t, x, rows)
        assert torch.equal(dequantize(t)[[3, 0, 2]], dequantize(quantize_1x128(x))[[0, 1, 3]])


def test_result_is_detached():
    t = permute_quantize(torch.randn(2, 32).requires_grad_(), torch.zeros(2, 1, dtype=torch.int32), 1)
    assert not t.data.requires_grad and not t.scale.requires_grad


def test_errors():
    x, rows = torch.zeros(4, 160), torch.zeros(4, 2, dtype=torch.int32)
    quantized = FP8Tensor(*quantize_1x128(x))
    with pytest.raises(TypeError, match=r"^x: expected an FP8Tensor or a \(data, scale\) pair"):
        permute_fp8(x, rows, 8)
    with pytest.raises(TypeError, match="^rows: expected a torch.Tensor, got NoneType"):
        permute_fp8(quantized, None, 8)
    with pytest.raises(ValueError, match=r"^x: .* H a multiple of 16, got \(4, 24\)"):
        permute_quantize(x[:, :24], rows, 8)
    with pytest.raises(ValueError, match=r"^x.data: .* H a multiple of 16, got \(4, 24\)"):
        permute_fp8((quantized.data[:, :24], quantized.scale[:, :1]), rows, 8)
    with pytest.raises(ValueError, match=r"^x: expected shape \(T, H\)"):
        permute_quantize(x[None], rows, 8)
    for scale in (quantized.scale[:, :1], quantized.scale[:3]):
        with pytest.raises(ValueError, match=r"^x.scale: expected shape \(4, 2\), one scale per"):
            permute_fp8((quantized.data, scale), rows, 8)
    for permuted, tokens in ((permute_quantize, x), (permute_fp8, quantized)):
        for wrong in (rows[:3], rows[0]):
            with pytest.raises(ValueError, match=r"^rows: expected shape \(4, K\), got"):
                permuted(tokens, wrong, 8)
        for num_rows in (-1, 1 << 31):
            with pytest.raises(ValueError, match=rf"^num_rows: expected 0 to 2\*\*31 - 1, got {num_rows}"):
                permuted(tokens, rows, num_rows)


@pytest.mark.parametrize("dtype", [*FLOATING, torch.float8_e4m3fn])
@pytest.mark.parametrize("hidden", [16, 128, 576, 7168])
def test_every_variant_compiles_without_spills(dtype, hidden):
    report = compile_report(permute.kernel_spec(hidden, dtype))
    assert report.spill_stores == report.spill_loads == report.stack == report.static_smem == 0
    # 48 warps or more on an SM of 65536 registers, each with 1 KB or more of loads in flight, 512 bytes of FP8.
    assert report.registers <= 40
