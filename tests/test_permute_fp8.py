"""Quantized tokens to the rows of their experts: reference backend, errors, operator, and the compiled kernels."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8moe.kernels.experts import permute
from fp8moe.kernels.experts.permute import permute_fp8, permute_quantize
from fp8moe.kernels.experts.routing import sort_by_expert
from fp8moe.quant.formats import FP8Tensor
from fp8moe.quant.quantize import dequantize, quantize_1x128
from tests.ptxas import compile_report
from tests.scales import is_mn_major


def assert_equal_where_used(got, expected, rows):
    used = rows[(rows >= 0) & (rows < len(got.data))].long()
    assert torch.equal(got.data.view(torch.uint8)[used], expected.data.view(torch.uint8)[used])
    assert torch.equal(got.scale.view(torch.int32)[used], expected.scale.view(torch.int32)[used])


@given(
    tokens=st.integers(0, 20),
    blocks=st.integers(0, 20),
    top_k=st.integers(0, 9),
    num_experts=st.integers(1, 12),
    seed=st.integers(0, 1000),
)
def test_equals_quantizing_while_permuting(tokens, blocks, top_k, num_experts, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, 16 * blocks, generator=generator)
    index = torch.randint(-2, num_experts + 3, (tokens, top_k), generator=generator)
    rows, num_rows = sort_by_expert(index, num_experts).rows, tokens * top_k
    quantized = quantize_1x128(x)
    expected = permute_quantize(x, rows, num_rows)
    for scale in (quantized.scale, quantized.scale.contiguous()):
        got = permute_fp8((quantized.data, scale), rows, num_rows)
        assert got.data.shape == (num_rows, 16 * blocks) and got.data.dtype == torch.float8_e4m3fn
        assert got.data.is_contiguous() and got.scale.shape == expected.scale.shape and is_mn_major(got.scale)
        assert_equal_where_used(got, expected, rows)


def test_rows_out_of_range_are_none():
    x = quantize_1x128(torch.randn(4, 32))
    rows = torch.tensor([[-1, 3], [0, 4], [-(2**31), 2**31 - 1], [2, 5]], dtype=torch.int32)
    assert torch.equal(dequantize(permute_fp8(x, rows, 4))[[3, 0, 2]], dequantize(x)[[0, 1, 3]])


def test_errors():
    x, rows = FP8Tensor(*quantize_1x128(torch.zeros(4, 160))), torch.zeros(4, 2, dtype=torch.int32)
    with pytest.raises(TypeError, match=r"^x: expected an FP8Tensor or a \(data, scale\) pair"):
        permute_fp8(torch.zeros(4, 32), rows, 8)
    with pytest.raises(TypeError, match="^rows: expected a torch.Tensor, got NoneType"):
        permute_fp8(x, None, 8)
    with pytest.raises(ValueError, match=r"^x.data: .* H a multiple of 16, got \(4, 24\)"):
        permute_fp8((x.data[:, :24], x.scale[:, :1]), rows, 8)
    for scale in (x.scale[:, :1], x.scale[:3]):
        with pytest.raises(ValueError, match=r"^x.scale: expected shape \(4, 2\), one scale per"):
            permute_fp8((x.data, scale), rows, 8)
    with pytest.raises(ValueError, match=r"^rows: expected shape \(4, K\), got"):
        permute_fp8(x, rows[:3], 8)
    with pytest.raises(ValueError, match="^num_rows: expected 0 to .*, got -1"):
        permute_fp8(x, rows, -1)


@pytest.mark.parametrize("hidden", [16, 128, 576, 7168])
def test_every_variant_compiles_without_spills(hidden):
    report = compile_report(permute.kernel_spec(hidden, torch.float8_e4m3fn))
    assert report.spill_stores == report.spill_loads == report.stack == report.static_smem == 0
    # 48 warps or more on an SM of 65536 registers, each with 512 bytes of loads in flight.
    assert report.registers <= 40
