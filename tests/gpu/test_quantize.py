"""The quantization kernels return the bits of the reference, whatever the dtype, shape, strides and values."""

import math
from functools import partial

import pytest
import torch

from fp8moe.quant import quantize, reference
from fp8moe.quant.formats import ceil_div
from fp8moe.quant.quantize import quantize_1x128, quantize_128x1, quantize_128x128
from fp8moe.runtime.launch import current_stream, device_guard
from tests import random_values
from tests.gpu.checks import marked, quantized_rows, sizes_of_rows
from tests.quant.test_quantize import test_two_weights_in_one  # noqa: F401

pytestmark = pytest.mark.gpu

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FORMATS = ("float32", "ue8m0")
SIZES = ((1, 128), (1, 7168), (7, 300), (8, 16), (64, 576), (65, 1), (130, 257), (131, 1032), (513, 2052), (1000, 4095))
random = partial(random_values.random, device="cuda")


def assert_same_bits(got, expected):
    for a, b, bits in zip(got, expected, (torch.uint8, torch.int32), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        assert torch.equal(a.contiguous().view(bits), b.contiguous().view(bits))


def reference_1x128(x, scale_format="float32"):
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    data, scale = reference.quantize_1x128(rows, scale_format == "ue8m0")
    return data.view(x.shape), scale.reshape(*x.shape[:-1], scale.shape[-1])


def reference_128x128(w, scale_format="float32"):
    data, scale = reference.quantize_128x128(w.reshape(math.prod(w.shape[:-2]), *w.shape[-2:]), scale_format == "ue8m0")
    return data.view(w.shape), scale.view(*w.shape[:-2], *scale.shape[-2:])


def assert_all_match(x):
    """Every quantizer and scale format on x (..., K)."""
    for scale_format in FORMATS:
        assert_same_bits(quantize_1x128(x, scale_format=scale_format), reference_1x128(x, scale_format))
        if x.dim() > 1:
            assert_same_bits(quantize_128x128(x, scale_format=scale_format), reference_128x128(x, scale_format))
    if x.dim() == 2:
        assert_same_bits(quantize_128x1(x), reference_1x128(x.t()))


def poison(numel: int) -> None:
    """Leaves freed memory full of ones where the next outputs go."""
    for size in (numel, 4 * numel):
        torch.full((size,), 255, dtype=torch.uint8, device="cuda")


@pytest.mark.parametrize("m,k", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_sizes(m, k, dtype):
    x = random(m, k, dtype=dtype)
    poison(x.numel())
    assert_all_match(x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_the_reference_on_the_cpu(dtype):
    x = random(130, 1000, dtype=dtype)
    x[3, 5], x[4, 200], x[5] = math.nan, -math.inf, 0.0
    for scale_format in FORMATS:
        got = quantize_1x128(x, scale_format=scale_format)
        assert_same_bits([t.cpu() for t in got], quantize_1x128(x.cpu(), scale_format=scale_format))
        got = quantize_128x128(x, scale_format=scale_format)
        assert_same_bits([t.cpu() for t in got], quantize_128x128(x.cpu(), scale_format=scale_format))
    assert_same_bits([t.cpu() for t in quantize_128x1(x)], quantize_128x1(x.cpu()))


@pytest.mark.parametrize("dtype", DTYPES)
def test_leading_dimensions_and_layout(dtype):
    x = random(2, 3, 130, 392, dtype=dtype)
    assert_all_match(x)
    assert_all_match(x[0, 0, 0])
    data, scale = quantize_1x128(x)
    assert data.is_contiguous() and scale.stride() == (390, 130, 1, 780)
    data, scale = quantize_128x128(x)
    assert data.is_contiguous() and scale.is_contiguous()
    assert quantize_128x1(x[0, 0]).scale.stride() == (1, 392)


@pytest.mark.parametrize("m", [0, 1, 3])
@pytest.mark.parametrize("k", [0, 1])
def test_empty_and_single(m, k):
    assert_all_match(random(m, k))


@pytest.mark.parametrize("dtype", DTYPES)
def test_values(dtype):
    tiny, largest = torch.finfo(dtype).smallest_normal, torch.finfo(dtype).max
    for magnitude in (tiny / 8, tiny, 1e-30, 1e-12, 1e-6, 1.0, 448.0, largest / 8):
        x = random(140, 300, spread=0.5).clamp(-8, 8).double().mul(magnitude).to(dtype)
        assert_all_match(x)
    assert_all_match(torch.full((9, 300), largest, dtype=dtype, device="cuda"))
    assert_all_match(torch.zeros(9, 300, dtype=dtype, device="cuda").neg())
    assert_all_match(random(140, 300, dtype=dtype, spread=40.0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity(dtype, value):
    x = random(300, 400, dtype=dtype, spread=0.5)
    x[0, 0] = x[127, 127] = x[128, 255] = x[299, 399] = x[17, 300] = value
    x[5, :128] = value
    assert_all_match(x)
    x.fill_(value)
    assert_all_match(x)


def test_every_bit_pattern_of_16_bits():
    bits = torch.arange(1 << 16, dtype=torch.int32, device="cuda").to(torch.int16)
    for dtype in (torch.bfloat16, torch.float16):
        x = bits.view(dtype).view(-1, 128)  # NaN and infinity only in their own blocks
        assert_all_match(x)
        assert_all_match(x.t().contiguous())


def test_quotients_round_as_the_division_does():
    # Every mantissa of a block's maximum, hence every scale that exists up to a power of two; the rest of the block are
    # the float32 values next to the midpoints of E4M3, where the last bit of the quotient decides.
    midpoints = torch.cat((torch.arange(17, 32, 2) * 8.0, torch.arange(1, 16, 2) * 2.0**-10)).cuda()
    offsets = torch.arange(-3, 4, dtype=torch.int32, device="cuda")
    chunk = 1 << 18
    for start in range(0, 1 << 23, chunk):
        amax = torch.arange(start, start + chunk, dtype=torch.int32, device="cuda").add(0x3F800000).view(torch.float32)
        near = (amax[:, None] / 448 * midpoints).view(torch.int32)[..., None] + offsets
        x = torch.cat((near.view(torch.float32).flatten(1), amax[:, None].expand(-1, 16)), 1)
        assert_same_bits(quantize_1x128(x), reference.quantize_1x128(x, False))


def test_into_memory_of_the_caller():
    for m, k in ((1, 7168), (5, 576), (67, 200)):
        x = random(m, k, dtype=torch.bfloat16)
        index = x.get_device()
        with device_guard(index), marked(*sizes_of_rows(m, k)) as memory:
            launcher = quantize.launcher(index, "quantize_1x128", x, quantize.has_vector_rows(x))
            launcher.launch(current_stream(index), x.data_ptr(), *(part.data_ptr() for part in memory))
        assert_same_bits(quantized_rows(*memory, m, k), reference.quantize_1x128(x, False))


@pytest.mark.parametrize("rows,columns", [((1 << 19) + 13, 4096), (130, (1 << 24) + 256)])
def test_past_two_to_the_31_elements(rows, columns):
    x = torch.empty(rows, columns, dtype=torch.bfloat16, device="cuda")
    # Random bits, of which one cleared and two set leave numbers from 2^-31 to 2.
    x.view(torch.int16).random_(-(1 << 15), 1 << 15).bitwise_and_(~0x4000).bitwise_or_(0x3000)
    assert x.numel() > 1 << 31
    row_step = max(1, (1 << 26) // columns) // 128 * 128 or 128
    column_step = min(columns, (1 << 26) // row_step // 128 * 128)
    windows = [
        (slice(r, r + row_step), slice(c, c + column_step))
        for r in (*range(0, rows, row_step)[:2], *range(0, rows, row_step)[-2:])
        for c in (*range(0, columns, column_step)[:2], *range(0, columns, column_step)[-2:])
    ]

    def scale_window(window, row_block):
        r, c = window
        return slice(r.start // row_block, ceil_div(min(r.stop, rows), row_block)), slice(
            c.start // 128, ceil_div(min(c.stop, columns), 128)
        )

    data, scale = quantize_1x128(x)
    for window in windows:
        assert_same_bits((data[window], scale[scale_window(window, 1)]), reference_1x128(x[window]))
    del data, scale
    data, scale = quantize_128x128(x)
    for window in windows:
        assert_same_bits((data[window], scale[scale_window(window, 128)]), reference_128x128(x[window]))
    del data, scale
    data, scale = quantize_128x1(x)
    for r, c in windows:
        k_blocks = scale_window((r, c), 128)[0]
        assert_same_bits((data[c, r], scale[c, k_blocks]), reference_1x128(x[r, c].t()))
