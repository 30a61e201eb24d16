"""The kernel of RMSNorm: sums and codes with the bits of the reference, values within the rounding of a product."""

import math

import pytest
import torch

from fp8moe import quantize_1x128
from fp8moe.kernels.decoder_ops.rms_norm import Normed, launcher, rms_norm
from fp8moe.quant.formats import ceil_div
from fp8moe.runtime.checks import FLOATING
from fp8moe.runtime.launch import device_guard
from tests import random_values
from tests.backends import on_reference
from tests.errors import relative_error
from tests.gpu.checks import captured, marked, quantized_rows, same_bits, same_every_time, sizes_of_rows

pytestmark = pytest.mark.gpu

EPS = 1e-6
ROWS = (1, 3, 64, 515)
HIDDEN = (8, 24, 64, 128, 131, 136, 264, 576, 2048, 2880, 4096, 5120, 7168, 7, 1001)


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return random_values.random(*shape, dtype=dtype, device="cuda", spread=1.0, seed=seed)


def weights(hidden: int, dtype: torch.dtype) -> torch.Tensor:
    return (1 + 0.3 * random(hidden, dtype=torch.float32, seed=9)).to(dtype)


def write(x, weight, residual, values, quantized) -> Normed:
    """What the kernel writes for x (R, H), to memory marked before; nothing behind it, nor between the scales."""
    (rows, hidden), index = x.shape, x.get_device()
    given = [residual is not None, values, quantized, quantized]
    with device_guard(index), marked(x.nbytes, x.nbytes, *sizes_of_rows(rows, hidden)) as memory:
        launch = launcher(index, rows, hidden, x.stride(0), EPS, x.dtype)
        launch(x, residual, weight, *(part if wanted else None for part, wanted in zip(memory, given, strict=True)))
    total, norm = (part.view(x.dtype).view(rows, hidden) for part in memory[:2])
    codes = quantized_rows(*memory[2:], rows, hidden) if quantized else None
    return Normed(None if residual is None else total, norm if values else None, codes)


def units_apart(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """How many numbers of their dtype lie between them."""
    integers = {2: torch.int16, 4: torch.int32}[one.itemsize]
    bits = [value.view(integers).long() for value in (one, other)]
    low = torch.iinfo(integers).min
    ordered = [torch.where(value < 0, low - value, value) for value in bits]
    return (ordered[0] - ordered[1]).abs()


def assert_matches(x, weight, residual, values, quantized):
    got = write(x, weight, residual, values, quantized)
    if residual is not None:
        assert torch.equal(got.sum, x + residual)
    full = write(x, weight, residual, True, False).values
    if values:
        assert torch.equal(got.values, full)
    expected = on_reference(rms_norm, x, weight, EPS, residual=residual).values
    # The factor of a row may differ in its last bits, and so may the two roundings after it; seldom for 16-bit types.
    apart = units_apart(full, expected)
    if x.dtype is torch.float32:
        assert relative_error(full, expected) < 1e-6
    else:
        assert apart.max() <= 2
        assert x.numel() < 1000 or (apart > 0).float().mean() < 3e-3
    if quantized:
        assert same_bits(got.quantized, quantize_1x128(full))


@pytest.mark.parametrize("hidden", HIDDEN)
@pytest.mark.parametrize("dtype", FLOATING)
def test_sizes(hidden, dtype):
    weight = weights(hidden, dtype)
    for rows in ROWS:
        x, residual = random(rows, hidden, dtype=dtype), random(rows, hidden, dtype=dtype, seed=1)
        for added in (None, residual):
            for values, quantized in ((True, False), (False, True), (True, True)):
                assert_matches(x, weight, added, values, quantized)


@pytest.mark.parametrize("hidden", [8192, 16384, 32768])
@pytest.mark.parametrize("dtype", FLOATING)
def test_long_rows(hidden, dtype):
    x = random(5, hidden, dtype=dtype)
    assert_matches(x, weights(hidden, dtype), x.flip(0), True, True)


@pytest.mark.parametrize("dtype", FLOATING)
def test_against_float64(dtype):
    x, weight = random(40, 2048, dtype=dtype), weights(2048, dtype)
    exact = x.double() * (x.double().square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()
    rounding = torch.finfo(dtype).eps / 2
    got = rms_norm(x, weight, EPS).values
    smallest = torch.finfo(dtype).smallest_normal
    assert ((got.double() - exact).abs() <= exact.abs() * (2 * rounding + 1e-6) + 8 * smallest * rounding).all()


@pytest.mark.parametrize("hidden", [128, 136, 1001, 2048, 7168])
@pytest.mark.parametrize("dtype", FLOATING)
def test_nan_and_infinity_stay_in_their_rows(hidden, dtype):
    x, weight = random(9, hidden, dtype=dtype), weights(hidden, dtype)
    clean = write(x, weight, None, True, True)
    x[1, 3], x[4, hidden - 1], x[7, 5], x[8] = math.nan, math.inf, -math.inf, 0.0
    got = write(x, weight, None, True, True)
    assert got.values[1].isnan().all() and got.quantized.scale[1].isnan().all()
    assert got.values[4].isnan().nonzero().flatten().tolist() == [hidden - 1]
    assert got.values[7].isnan().nonzero().flatten().tolist() == [5]
    assert (got.values[8] == 0).all()
    assert same_bits(got.quantized, quantize_1x128(got.values))
    untouched = [0, 2, 3, 5, 6]
    assert torch.equal(got.values[untouched], clean.values[untouched])
    assert torch.equal(got.quantized.scale[untouched], clean.quantized.scale[untouched])


def test_squares_that_vanish():
    """Without eps the factor is infinite: what is past the end of a row must not turn into NaN."""
    x = torch.full((3, 1000), 1e-30, device="cuda")
    normed = rms_norm(x, torch.ones(1000, device="cuda"), 0.0, quantized=True)
    assert normed.values.isinf().all()
    assert same_bits(normed.quantized, quantize_1x128(normed.values))


@pytest.mark.parametrize("shape", [(0, 128), (2, 0, 64), (3, 0)], ids=str)
def test_empty(shape):
    x = torch.zeros(shape, dtype=torch.bfloat16, device="cuda")
    normed = rms_norm(x, x.new_ones(shape[-1]), EPS, residual=x, quantized=True)
    assert normed.sum.shape == normed.values.shape == normed.quantized.data.shape == shape
    assert normed.quantized.scale.shape == (*shape[:-1], ceil_div(shape[-1], 128))


def test_bits_of_a_row_do_not_depend_on_others():
    x, residual, weight = (random(700, 2048, dtype=torch.bfloat16, seed=i) for i in range(3))
    whole = same_every_time(lambda: write(x, weight[0], residual, True, True))
    alone = write(x[300:301], weight[0], residual[300:301], True, True)
    assert torch.equal(alone.values[0], whole.values[300])


def test_cuda_graph_with_changed_input():
    """Two norms in a chain: the second starts early and must wait for the first."""
    x, residual = random(33, 2048, dtype=torch.bfloat16), random(33, 2048, dtype=torch.bfloat16, seed=1)
    weight = weights(2048, x.dtype)

    def chain():
        first = rms_norm(x, weight, EPS, residual=residual)
        return rms_norm(first.values, weight, EPS, residual=first.sum, quantized=True)

    graph, results = captured(chain)
    for seed in range(3):
        x.copy_(random(33, 2048, dtype=x.dtype, seed=10 + seed))
        weight.copy_(random(2048, dtype=x.dtype, seed=20 + seed))
        graph.replay()
        assert same_bits(results, chain())
        first = on_reference(rms_norm, x, weight, EPS, residual=residual)
        second = on_reference(rms_norm, first.values, weight, EPS, residual=first.sum)
        assert relative_error(results.values, second.values) < 1e-3


def test_past_two_to_the_31_elements():
    hidden, some = 7168, 50
    rows = (1 << 31) // hidden + 2 * some
    x = torch.empty(rows, hidden, dtype=torch.bfloat16, device="cuda").normal_()
    weight = weights(hidden, x.dtype)
    normed = rms_norm(x, weight, EPS, quantized=True)
    for part in (slice(0, some), slice(rows - some, rows)):
        expected = rms_norm(x[part], weight, EPS, quantized=True)
        (data, scale), values = normed.quantized, normed.values[part]
        assert same_bits((values, (data[part], scale[part])), (expected.values, expected.quantized))
