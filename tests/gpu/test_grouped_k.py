"""The k-grouped GEMM kernel against float64 over the same quantized operands."""

import math
from functools import partial

import pytest
import torch

from fp8moe.kernels.gemm.api import grouped_gemm_k
from fp8moe.kernels.gemm.launch import run_along_k
from fp8moe.kernels.gemm.tiles import GROUPED_K_TILES
from fp8moe.quant.formats import FP8Tensor
from fp8moe.quant.quantize import quantize_128x1
from fp8moe.quant.transpose import quantize_with_transpose
from tests import gemm_cases
from tests.errors import relative_error
from tests.gemm_cases import exact_along_k
from tests.gpu.checks import memory_of

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
NAN = float("nan")
TOLERANCE = 3e-4
# Columns of each group in blocks of 128.
GROUPS = {
    "one": [9],
    "one block each": [1] * 7,
    "odd": [3, 1, 0, 5, 2],
    "one has it all": [0, 0, 40, 0],
    "empty": [0, 0, 0],
    "many": [i % 3 for i in range(200)],
}
SIZES = ((1, 8), (8, 16), (63, 72), (136, 104), (257, 96), (1000, 520), (128, 2056))  # M, N
int32 = partial(gemm_cases.int32, device=DEVICE)
offsets = partial(gemm_cases.offsets, unit=128, device=DEVICE)


def operand(rows, blocks, seed, block_scales=False):
    generator = torch.Generator(DEVICE).manual_seed(seed)
    x = torch.randn(128 * blocks, rows, device=DEVICE, generator=generator)
    x *= torch.rand(1, rows, device=DEVICE, generator=generator).mul(4).exp()
    return quantize_with_transpose(x, blocks=True).columns if block_scales else quantize_128x1(x)


@pytest.mark.parametrize("blocks", GROUPS)
@pytest.mark.parametrize("size", SIZES)
def test_against_float64(blocks, size):
    blocks = GROUPS[blocks]
    k, group_offsets = 2 + sum(blocks) + 1, offsets(blocks, start=2)
    a = operand(size[0], k, 0)
    operands = {block_scales: operand(size[1], k, 1, block_scales) for block_scales in (False, True)}
    exact_results = {name: exact_along_k(a, b, group_offsets) for name, b in operands.items()}
    for cfg in GROUPED_K_TILES:
        exact, call = exact_results[cfg.block_scales], (a, operands[cfg.block_scales], group_offsets)
        out = torch.full((len(blocks), *size), NAN, device=DEVICE)
        run_along_k(*call, out, False, cfg)
        assert relative_error(out, exact) <= TOLERANCE
        rounded = torch.full_like(out, NAN, dtype=torch.bfloat16)
        run_along_k(*call, rounded, False, cfg)
        assert torch.equal(rounded, out.bfloat16())
        total = torch.randn(out.shape, device=DEVICE)
        sums = total.double() + exact
        run_along_k(*call, total, True, cfg)
        assert relative_error(total, sums) <= TOLERANCE


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("sizes", [(128, 64), (130, 62)])
def test_several_results_take_the_rows_of_a(sizes, accumulate):
    """Scales of the second one's rows begin at a multiple of 16 bytes, or behind 130 rows of the first at none."""
    a, b, group_offsets = operand(192, 8, 0), operand(136, 8, 1), offsets((3, 0, 5))
    outs = [torch.randn(3, size, 136, device=DEVICE) for size in sizes]
    expected = torch.cat(outs, 1)
    grouped_gemm_k(a, b, group_offsets, out=expected, accumulate=accumulate)
    grouped_gemm_k(a, b, group_offsets, out=outs, accumulate=accumulate)
    assert relative_error(torch.cat(outs, 1), expected.double()) < 1e-6


@pytest.mark.parametrize("block_scales", [False, True])
def test_large_result(block_scales):
    """More than 2^31 bytes, more tiles than blocks."""
    blocks = [1, 3, 0, 2, 1, 1, 2, 1]
    group_offsets = offsets(blocks)
    a, b = operand(8192, sum(blocks), 0), operand(8192 + 104, sum(blocks), 1, block_scales)
    out = grouped_gemm_k(a, b, group_offsets)
    rows = torch.arange(0, 8192, 97, device=DEVICE)
    exact = exact_along_k(FP8Tensor(a.data[rows], a.scale[rows]), b, group_offsets)
    assert relative_error(out[:, rows], exact) <= TOLERANCE


@pytest.mark.parametrize("block_scales", [False, True])
def test_values_that_are_not_finite_stay_in_their_row_and_column(block_scales):
    grad, x = torch.randn(512, 300, device=DEVICE), torch.randn(512, 264, device=DEVICE)
    grad[3, 5], x[140, 130], x[400, 7] = NAN, math.inf, NAN
    groups = offsets([2, 2])
    a, b = quantize_128x1(grad), quantize_with_transpose(x, blocks=block_scales).columns
    expected = torch.zeros(2, 300, 264, dtype=torch.bool, device=DEVICE)
    expected[0, 5], expected[0, :, 130], expected[1, :, 7] = True, True, True
    for cfg in GROUPED_K_TILES:
        if cfg.block_scales == block_scales:
            out = torch.zeros(expected.shape, device=DEVICE)
            run_along_k(a, b, groups, out, False, cfg)
            assert torch.equal(~out.isfinite(), expected)


@pytest.mark.parametrize("block_scales", [False, True])
def test_repeats_have_equal_bits(block_scales):
    a, b, groups = operand(1000, 40, 0), operand(520, 40, 1, block_scales), offsets([9, 0, 30, 1])
    first = grouped_gemm_k(a, b, groups)
    for _ in range(20):
        assert torch.equal(grouped_gemm_k(a, b, groups), first)


@pytest.mark.parametrize("block_scales", [False, True])
def test_misaligned_group_is_nan_and_offsets_stay_in_bounds(block_scales):
    a, b = operand(136, 4, 0), operand(104, 4, 1, block_scales)
    out = grouped_gemm_k(a, b, int32([0, 100, 256, 512]))
    assert out[:2].isnan().all() and out[2].isfinite().all()
    for values in ([-(2**31), 2**31 - 1], [512, 0, 512], [-128, 128, 9999 * 128], [2**31 - 128, -128, 256]):
        out = grouped_gemm_k(a, b, int32(values))
        exact = exact_along_k(a, b, int32([min(max(value, 0), 512) for value in values]))
        for e, aligned in enumerate(values[i] % 128 == 0 and values[i + 1] % 128 == 0 for i in range(len(exact))):
            if aligned and values[e] <= values[e + 1]:
                assert relative_error(out[e], exact[e]) <= TOLERANCE


def test_memory_of_a_call_is_its_result():
    a, b, group_offsets = operand(512, 8, 0), operand(512, 8, 1), offsets([3, 5])
    out = grouped_gemm_k(a, b, group_offsets)
    assert memory_of(lambda: grouped_gemm_k(a, b, group_offsets, out=out))[1] == 0
