"""Quantizers on the reference backend, the layout helpers, the operators, and the compiled kernels' reports."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8moe.quant import formats, quantize
from fp8moe.quant.checks import mn_major
from fp8moe.quant.formats import FP8Tensor
from fp8moe.quant.quantize import dequantize, quantize_1x128, quantize_128x1, quantize_128x128
from tests.errors import refused
from tests.ptxas import without_spills
from tests.random_values import random
from tests.scales import is_mn_major

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FORMATS = formats.SCALE_FORMATS


def blocks_of(x: torch.Tensor, rows: int) -> list[tuple[slice, slice]]:
    """Index of every block of `rows` x 128 of a matrix, row-major."""
    starts = itertools.product(range(0, x.shape[0], rows), range(0, x.shape[1], 128))
    return [(slice(r, r + rows), slice(c, c + 128)) for r, c in starts]


def quantizers():
    return ((quantize_1x128, 1), (quantize_128x128, 128))


# ---- numbers ----


@given(
    m=st.integers(1, 150),
    k=st.integers(1, 300),
    dtype=st.sampled_from(DTYPES),
    scale_format=st.sampled_from(FORMATS),
    magnitude=st.integers(-12, 12),
    seed=st.integers(0, 1000),
)
def test_error_is_half_a_step_of_e4m3(m, k, dtype, scale_format, magnitude, seed):
    x = random(m, k, seed=seed).mul(2.0**magnitude).clamp(-6e4, 6e4).to(dtype)
    for quantizer, rows in quantizers():
        t = quantizer(x, scale_format=scale_format)
        error = (dequantize(t) - x.float()).abs()
        for block, scale in zip(blocks_of(x, rows), t.scale.flatten(), strict=True):
            # Half a step: 2^-4 of the value for E4M3's normal numbers, 2^-10 scales for its subnormal ones.
            bound = torch.maximum(x[block].float().abs() * 2**-4, scale * 2**-10) * (1 + 1e-6)
            assert (error[block] <= bound).all()


@given(m=st.integers(1, 140), k=st.integers(1, 300), scale_format=st.sampled_from(FORMATS), seed=st.integers(0, 1000))
def test_scale_of_each_block(m, k, scale_format, seed):
    x = random(m, k, seed=seed, spread=20.0)
    for quantizer, rows in quantizers():
        t = quantizer(x, scale_format=scale_format)
        for block, scale in zip(blocks_of(x, rows), t.scale.flatten().tolist(), strict=True):
            exact = (x[block].abs().max().clamp(min=1e-12) / 448).item()
            if scale_format == "float32":
                assert scale == exact
            else:
                assert math.frexp(scale)[0] == 0.5
                assert exact <= scale < 2 * exact
            assert t.data[block].float().abs().max() <= 448


def test_float32_scale_uses_the_whole_range():
    x = random(4, 512)
    assert (quantize_1x128(x).data.float().unflatten(1, (4, 128)).abs().amax(-1) == 448).all()


def test_rounds_to_nearest_even():
    # 448 makes the scale 1; then 17 lies between 16 and 18 and 19 between 18 and 20.
    x = torch.zeros(1, 128)
    x[0, :6] = torch.tensor([448.0, 17.0, 19.0, -17.0, 17.01, 2**-10])
    assert quantize_1x128(x).data[0, :6].tolist() == [448.0, 16.0, 20.0, -16.0, 18.0, 0.0]


def test_exact_power_of_two_scale_stays():
    x = torch.full((1, 128), 448.0 * 2**-5)
    assert quantize_1x128(x, scale_format="ue8m0").scale.item() == 2**-5
    x[0, 0] = 448.0 * 2**-5 * (1 + 2**-7)
    assert quantize_1x128(x, scale_format="ue8m0").scale.item() == 2**-4


@pytest.mark.parametrize("dtype", DTYPES)
def test_zero_block(dtype):
    x = torch.zeros(3, 256, dtype=dtype)
    x[1, 200] = 2.0
    for scale_format, floor in (("float32", 1e-12 / 448), ("ue8m0", 2.0**-48)):
        t = quantize_1x128(x, scale_format=scale_format)
        assert t.scale[0, 0].item() == pytest.approx(floor, rel=1e-6)
        assert torch.equal(dequantize(t), x.float())


def test_sign_of_zero_is_kept():
    x = torch.zeros(1, 128)
    x[0, 1] = -0.0
    x[0, 2] = -1e-30
    x[0, 3] = 1.0
    assert quantize_1x128(x).data.view(torch.uint8)[0, :3].tolist() == [0x00, 0x80, 0x80]


@given(
    quantizer=st.sampled_from((quantize_1x128, quantize_128x128)),
    value=st.sampled_from((math.nan, -math.nan, math.inf, -math.inf)),
    dtype=st.sampled_from(DTYPES),
    scale_format=st.sampled_from(FORMATS),
    row=st.integers(0, 139),
    column=st.integers(0, 299),
)
def test_nan_and_infinity_stay_in_their_block(quantizer, value, dtype, scale_format, row, column):
    x = random(140, 300, dtype=dtype, spread=0.5)
    clean = quantizer(x, scale_format=scale_format)
    x[row, column] = value
    t = quantizer(x, scale_format=scale_format)
    rows = dict(((quantize_1x128, 1), (quantize_128x128, 128)))[quantizer]
    hit = torch.zeros(140, 300, dtype=torch.bool)
    hit[row // rows * rows : (row // rows + 1) * rows, column // 128 * 128 : (column // 128 + 1) * 128] = True
    values = dequantize(t)
    assert values[hit].isnan().all()
    assert torch.equal(values[~hit], dequantize(clean)[~hit])
    scale = t.scale[row // rows, column // 128]
    assert scale.isnan() if math.isnan(value) else scale == math.inf


def test_nan_has_one_encoding():
    x = torch.tensor([[-math.nan, 1.0], [-math.inf, 1.0]])
    t = quantize_1x128(x)
    assert t.data.view(torch.uint8).tolist() == [[0x7F, 0x7F], [0x7F, 0x00]]
    assert t.scale.view(torch.int32)[0, 0].item() == 0x7FC00000


@pytest.mark.parametrize("magnitude", [1e-45, 1e-38, 1e-30, 1e-13, 3e38])
@pytest.mark.parametrize("scale_format", FORMATS)
def test_extreme_magnitudes(magnitude, scale_format):
    x = torch.tensor([[magnitude, -magnitude / 2, 0.0] * 43])
    t = quantize_1x128(x, scale_format=scale_format)
    assert t.scale.isfinite().all()
    error = (dequantize(t).double() - x.double()).abs().max().item()
    # Below the floor of 1e-12 the scale no longer shrinks.
    assert error <= max(magnitude * 2**-4, 1e-12 / 448 * 2**-8)


# ---- layouts and shapes ----


@pytest.mark.parametrize("shape", [(7, 300), (1, 16), (5, 576), (2, 3, 5, 257), (300,), (4, 1, 128)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_1x128_layout(shape, dtype):
    x = random(*shape, dtype=dtype)
    data, scale = quantize_1x128(x)
    rows, k_blocks = math.prod(shape[:-1]), -(-shape[-1] // 128)
    assert data.shape == shape and data.dtype == torch.float8_e4m3fn and data.is_contiguous()
    assert scale.shape == (*shape[:-1], k_blocks) and scale.dtype == torch.float32
    assert scale.stride(-1) == -(-rows // 4) * 4
    flat = scale.reshape(rows, k_blocks)
    assert flat.data_ptr() == scale.data_ptr() and is_mn_major(flat)
    expected = quantize_1x128(x.reshape(rows, shape[-1]))
    assert torch.equal(dequantize((data, scale)).flatten(), dequantize(expected).flatten())


@pytest.mark.parametrize("shape", [(128, 128), (1, 1), (200, 300), (3, 130, 64), (2, 2, 129, 257)])
def test_128x128_layout(shape):
    w = random(*shape)
    data, scale = quantize_128x128(w)
    n_blocks, k_blocks = (-(-size // 128) for size in shape[-2:])
    assert data.shape == shape and data.is_contiguous()
    assert scale.shape == (*shape[:-2], n_blocks, k_blocks) and scale.is_contiguous()
    for expert, expert_data, expert_scale in zip(
        w.reshape(-1, *shape[-2:]), data.reshape(-1, *shape[-2:]), scale.reshape(-1, n_blocks, k_blocks), strict=True
    ):
        alone = quantize_128x128(expert)
        assert torch.equal(alone.data.float(), expert_data.float()) and torch.equal(alone.scale, expert_scale)


@pytest.mark.parametrize("shape", [(2, 130, 264), (3, 130, 264), (3, 128, 131), (2, 256, 131), (2, 1, 8)])
@pytest.mark.parametrize("scale_format", ["float32", "ue8m0"])
def test_two_weights_in_one(shape, scale_format, device):
    """Such as gate and up: views that are no contiguous memory."""
    experts, rows, columns = shape
    both = torch.full((experts, 2, rows, columns), 7.0, device=device).to(torch.float8_e4m3fn)
    scales = torch.zeros(experts, 2, -(-rows // 128), -(-columns // 128), device=device)
    weights = random(*shape, device=device), random(*shape, dtype=torch.bfloat16, device=device)
    for half, weight in enumerate(weights):
        out = quantize_128x128(weight, scale_format=scale_format, out=(both[:, half], scales[:, half]))
        assert out.data.data_ptr() == both[:, half].data_ptr() and out.scale.data_ptr() == scales[:, half].data_ptr()
    for half, weight in enumerate(weights):
        expected = quantize_128x128(weight, scale_format=scale_format)
        whole = quantize_128x128(weight, scale_format=scale_format, out=tuple(map(torch.empty_like, expected)))
        for found in (FP8Tensor(both[:, half], scales[:, half]), whole):
            assert torch.equal(found.data.float(), expected.data.float()) and torch.equal(found.scale, expected.scale)


def test_out_that_is_refused():
    w = random(2, 130, 264)
    data, scale = quantize_128x128(w)
    for out, error, match in (
        (data, TypeError, "out: expected an FP8Tensor or a"),
        ((data.float(), scale), TypeError, "out.data: expected float8_e4m3fn"),
        ((data[:, :129], scale), ValueError, "out.data: expected shape"),
        ((data, scale[:, :1]), ValueError, "out.scale: expected shape"),
        ((data, scale.double()), TypeError, "out.scale: expected float32"),
        ((w.view(torch.float8_e4m3fn)[..., :264], scale), ValueError, "out.data: expected memory of its own"),
    ):
        refused(error, match, quantize_128x128, w, out=out)
    with pytest.raises(RuntimeError, match="out= has no automatic differentiation, but out.scale"):
        quantize_128x128(w, out=(data, scale.requires_grad_()))


@pytest.mark.parametrize("k,m", [(300, 7), (128, 1), (1, 5), (129, 64)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_128x1_is_1x128_of_the_transpose(k, m, dtype):
    x = random(k, m, dtype=dtype)
    t, expected = quantize_128x1(x), quantize_1x128(x.t())
    assert t.data.shape == (m, k) and t.data.is_contiguous()
    assert t.scale.stride() == expected.scale.stride() == (1, -(-m // 4) * 4)
    assert torch.equal(t.data.float(), expected.data.float()) and torch.equal(t.scale, expected.scale)


@pytest.mark.parametrize("shape", [(0, 128), (0, 5), (3, 0), (2, 0, 300)])
def test_empty(shape):
    x = torch.empty(shape)
    data, scale = quantize_1x128(x)
    assert data.shape == shape and scale.shape == (*shape[:-1], -(-shape[-1] // 128))
    assert dequantize((data, scale)).shape == shape
    data, scale = quantize_128x128(x)
    assert data.shape == shape and scale.shape == (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))
    assert dequantize((data, scale)).shape == shape
    assert quantize_128x1(torch.empty(shape[-2:])).data.shape == (shape[-1], shape[-2])


@given(shape=st.lists(st.integers(0, 9), min_size=2, max_size=4))
def test_mn_major(shape):
    scale = formats.empty_mn_major(shape, device="cpu")
    m, k_blocks = shape[-2:]
    assert scale.shape == tuple(shape) and scale.stride()[-2:] == (1, -(-m // 4) * 4)
    assert is_mn_major(scale) and (scale.dim() != 2 or mn_major(scale) is scale)
    if scale.numel():
        filled = scale.copy_(torch.arange(scale.numel()).view(shape))
        assert torch.equal(filled.flatten(), torch.arange(scale.numel()).float())  # no two elements share memory
    row_major = torch.randn(shape[-2:])
    converted = mn_major(row_major)
    assert torch.equal(converted, row_major) and is_mn_major(converted)


# ---- dequantize ----


def test_dequantize_takes_row_major_scales_and_pairs():
    x = random(9, 300)
    data, scale = quantize_1x128(x)
    expected = dequantize(FP8Tensor(data, scale))
    assert torch.equal(dequantize((data, scale.contiguous())), expected)
    assert torch.equal(dequantize((data, scale), dtype=torch.bfloat16), expected.bfloat16())


def test_dequantize_errors():
    data, scale = quantize_1x128(random(9, 300))
    refused(TypeError, "t.data.*float8_e4m3fn.*float32", dequantize, (data.float(), scale))
    refused(TypeError, "t.scale.*float32.*float64", dequantize, (data, scale.double()))
    for dtype in (torch.int32, "float32", None, float):
        with pytest.raises(TypeError, match=rf"^dtype: expected a floating dtype, got {dtype!r}$"):
            dequantize((data, scale), dtype=dtype)
    refused(ValueError, r"t.scale.*\(9, 3\).*\(1, 3\).*\(9, 2\)", dequantize, (data, scale[:, :2]))
    refused(ValueError, "t.scale.*meta", dequantize, (data, scale.to("meta")))


# ---- errors ----


@pytest.mark.parametrize("quantizer,name", [(quantize_1x128, "x"), (quantize_128x128, "w"), (quantize_128x1, "x")])
def test_input_errors(quantizer, name):
    for dtype in (torch.float64, torch.int32, torch.bool, torch.float8_e4m3fn):
        with pytest.raises(TypeError, match=f"^{name}: expected bfloat16, float16 or float32, got {dtype}"):
            quantizer(torch.zeros(4, 128).to(dtype))
    refused(TypeError, f"^{name}: expected a torch.Tensor, got list", quantizer, [[1.0]])
    refused(ValueError, f"^{name}: expected", quantizer, torch.tensor(1.0))


def test_rank_errors():
    refused(ValueError, "^w: expected at least 2", quantize_128x128, torch.zeros(128))
    refused(ValueError, r"^x: expected shape \(K, M\), got \(2, 3, 4\)", quantize_128x1, torch.zeros(2, 3, 4))


@pytest.mark.parametrize("quantizer", [quantize_1x128, quantize_128x128])
def test_scale_format_error(quantizer):
    with pytest.raises(ValueError, match="^scale_format: expected one of .*'ue8m0'.*got 'e8m0'"):
        quantizer(torch.zeros(4, 128), scale_format="e8m0")


# ---- operators ----


def test_results_are_detached():
    t = quantize_1x128(random(4, 128).requires_grad_())
    assert not t.data.requires_grad and not t.scale.requires_grad


# ---- kernels ----


@pytest.mark.parametrize("name", ["quantize_1x128", "quantize_128x128", "quantize_128x1"])
@pytest.mark.parametrize("dtype", quantize.FLOATING)
def test_every_variant_compiles_without_spills(name, dtype):
    for ue8m0, vector in itertools.product((False, True), repeat=2):
        if ue8m0 and name == "quantize_128x1":
            continue
        report = without_spills(quantize.kernel_spec(name, dtype, ue8m0, vector))
        assert report.registers <= (128 if vector else 224)
        if vector and dtype != torch.float32:
            # An SM of 65536 registers then holds 1024 threads, with 64 bytes or more of loads in flight each.
            assert report.registers <= 64
