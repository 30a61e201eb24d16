"""The grouped GEMM kernels against float64 over the same quantized operands."""

from functools import partial
from itertools import product

import pytest
import torch

from benchmarks.operands import rounded_error
from fp8moe.kernels.activation import Activation
from fp8moe.kernels.experts.swiglu import swiglu_quantize
from fp8moe.kernels.gemm.api import (
    gemm,
    grouped_gemm,
    grouped_gemm_masked,
    grouped_gemm_swiglu,
    grouped_gemm_swiglu_keeping,
)
from fp8moe.quant.formats import FP8Tensor, empty_mn_major
from fp8moe.quant.quantize import quantize_1x128, quantize_128x128
from tests import gemm_cases
from tests.backends import on_reference
from tests.errors import relative_error
from tests.gemm_cases import GROUPS_ERROR, check_groups, exact
from tests.gpu.checks import takes_its_result_alone
from tests.kernels.test_grouped import test_empty, test_offsets_are_clamped  # noqa: F401

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
NAN = float("nan")
DTYPES = (torch.bfloat16, torch.float32)
WEIGHTS = ((8, 16), (24, 48), (136, 144), (576, 576), (2112, 128), (136, 7168), (24, 32768))
# Rows of each group: the kernels' tiles are 8 to 256 rows high.
GROUPS = {
    "single rows": [1] * 9,
    "few rows": [3, 0, 7, 8, 0, 9, 2, 5],
    "even": [64] * 6,
    "odd": [31, 33, 65, 127, 129, 200],
    "one has it all": [0, 0, 700, 0],
    "skewed": [1, 500, 0, 2, 3, 1, 0, 130],
    "empty": [0, 0, 0],
}
ACTIVATIONS = {"plain": Activation(), "limit": Activation(limit=2.0), "alpha": Activation(limit=2.0, alpha=1.702)}
activations = partial(gemm_cases.activations, spread=4, device=DEVICE)
weights = partial(gemm_cases.weights, device=DEVICE)
gate_up_weights = partial(gemm_cases.gate_up_weights, seed=1, device=DEVICE)
random_bytes = partial(gemm_cases.random_bytes, device=DEVICE)
int32 = partial(gemm_cases.int32, device=DEVICE)
offsets = partial(gemm_cases.offsets, device=DEVICE)


def slices(group_offsets):
    values = group_offsets.tolist()
    return [slice(*pair) for pair in zip(values, values[1:], strict=False)]


def flat(t):
    """Data and scales of the masked layout over all rows."""
    return FP8Tensor(t.data.flatten(0, 1), t.scale.reshape(-1, t.scale.shape[-1]))


def poisoned(*shape, dtype=torch.bfloat16):
    return torch.full(shape, NAN, dtype=dtype, device=DEVICE)


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize(("n", "k"), WEIGHTS)
def test_odd_sizes(n, k, groups):
    sizes = GROUPS[groups]
    m = 3 + sum(sizes) + 5
    a, b = activations(m, k), weights(len(sizes), n, k)
    group_offsets = offsets(sizes, start=3)
    for dtype in DTYPES:
        out = poisoned(m, n, dtype=dtype)
        assert grouped_gemm(a, b, group_offsets, out=out) is out
        check_groups(out, a, b, slices(group_offsets))


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize(("n", "k"), [*WEIGHTS, (4096, 7168)])
def test_products_of_low_rank_are_added(n, k, groups):
    """Rounded once, nothing of other groups or behind the last row; the same bits every time."""
    sizes = GROUPS[groups]
    m = 3 + sum(sizes) + 5
    a, b = activations(m, k), weights(len(sizes), n, k)
    group_offsets = offsets(sizes, start=3)
    generator = torch.Generator(DEVICE).manual_seed(0)
    for dtype, rank in product(DTYPES, (16, 80)):
        ranks, factors = (
            torch.randn(*shape, rank, generator=generator, device=DEVICE).bfloat16()
            for shape in ((m,), (len(sizes), n))
        )
        ranks[:3] = ranks[m - 5 :] = NAN
        results = [poisoned(m, n, dtype=dtype) for _ in range(20)]
        for out in results:
            torch.ops.fp8moe.grouped_gemm_out(*a, *b, group_offsets, out, None, ranks, factors, None)
        assert all(torch.equal(out.nan_to_num(), results[0].nan_to_num()) for out in results)
        outside = torch.ones(m, dtype=torch.bool, device=DEVICE)
        for expert, rows in enumerate(slices(group_offsets)):
            outside[rows] = False
            if rows.start < rows.stop:
                x, w = FP8Tensor(a[0][rows], a[1][rows]), FP8Tensor(b[0][expert], b[1][expert])
                added = ranks[rows].double() @ factors[expert].double().T
                error = rounded_error(results[0][rows], exact(x, w) + added)
                assert error <= GROUPS_ERROR, (expert, rows, error)
        assert results[0][outside].isnan().all()


@pytest.mark.parametrize("rows", [0, 1, 8, 100])
@pytest.mark.parametrize("experts", [1, 2, 33, 256, 512])
def test_number_of_experts(experts, rows):
    """Of every size from none to twice the mean."""
    sizes = torch.randint(0, 2 * rows + 1, (experts,), generator=torch.Generator().manual_seed(experts)).tolist()
    a, b = activations(sum(sizes), 272), weights(experts, 136, 272)
    group_offsets = offsets(sizes)
    out = poisoned(sum(sizes), 136)
    grouped_gemm(a, b, group_offsets, out=out)
    check_groups(out, a, b, slices(group_offsets))


@pytest.mark.parametrize("sizes", [[512] * 4, [64, 0, 1, 77], [1500, 20, 3, 0]], ids=["even", "small", "skewed"])
@pytest.mark.parametrize(("n", "k"), [(4096, 7168), (7168, 2048)])
def test_benchmark_shapes(n, k, sizes):
    a, b = activations(sum(sizes), k), weights(len(sizes), n, k)
    out = poisoned(sum(sizes), n)
    grouped_gemm(a, b, offsets(sizes), out=out)
    check_groups(out, a, b, slices(offsets(sizes)))
    masked_m, max_m = int32([min(size, 512) for size in sizes]), 512
    places = activations(len(sizes), max_m, k)
    out = poisoned(len(sizes), max_m, n)
    grouped_gemm_masked(places, b, masked_m, expected_m=sum(sizes) // len(sizes), out=out)
    used = [slice(e * max_m, e * max_m + size) for e, size in enumerate(masked_m.tolist())]
    check_groups(out.flatten(0, 1), flat(places), b, used)


@pytest.mark.parametrize("expected_m", [None, 0, 1, 50, 100_000])
@pytest.mark.parametrize("max_m", [1, 5, 8, 64, 200])
@pytest.mark.parametrize(("n", "k"), [(136, 144), (576, 1536)])
def test_masked(n, k, max_m, expected_m):
    masked_m = [max_m, 0, max_m // 2, 1, -7, max_m + 1, 2**31 - 1, -(2**31)]
    a, b = activations(len(masked_m), max_m, k), weights(len(masked_m), n, k)
    used = [slice(e * max_m, e * max_m + min(max(size, 0), max_m)) for e, size in enumerate(masked_m)]
    for dtype in DTYPES:
        out = poisoned(len(masked_m), max_m, n, dtype=dtype)
        assert grouped_gemm_masked(a, b, int32(masked_m), expected_m=expected_m, out=out) is out
        check_groups(out.flatten(0, 1), flat(a), b, used)


def test_offsets_that_mean_nothing_stay_in_bounds():
    """Whatever they are: values may be garbage, the memory around the result may not."""
    generator = torch.Generator().manual_seed(0)
    a, b = activations(100, 144), weights(16, 24, 144)
    for _ in range(20):
        parent = poisoned(300, 24)
        group_offsets = torch.randint(-300, 500, (17,), generator=generator, dtype=torch.int32).to(DEVICE)
        grouped_gemm(a, b, group_offsets, out=parent[100:200])
        assert parent[:100].isnan().all() and parent[200:].isnan().all()


def test_one_group_has_the_error_of_the_dense_gemm():
    a, b = activations(200, 576), weights(1, 136, 576)
    dense = gemm(a, FP8Tensor(b.data[0], b.scale[0]))
    grouped = grouped_gemm(a, b, int32([0, 200]))
    assert relative_error(grouped, dense) <= 1e-3


@pytest.mark.parametrize("sizes", [[1, 2, 3], [70, 1, 200]])
def test_out_writes_its_elements_only(sizes):
    m = sum(sizes)
    a, b = activations(m, 272), weights(3, 136, 272)
    for dtype in DTYPES:
        parent = torch.full((m + 9, 256), 7.0, dtype=dtype, device=DEVICE)
        out = parent[4 : m + 4, 64:200]
        out.fill_(NAN)
        grouped_gemm(a, b, offsets(sizes), out=out)
        check_groups(out, a, b, slices(offsets(sizes)))
        out.fill_(7)
        assert (parent == 7).all()


# GEMM 1 of an experts layer: the same codes as the reference's, but for values at the edge of two.


def same_codes(actual, expected):
    """The sums of tensor cores have 14 bits: few values next to a tie round to the other side, and any may be off by
    a little of the largest in its block, which for one near zero is many steps of E4M3."""
    assert torch.allclose(actual.scale, expected.scale, rtol=2e-3)
    values, likely = actual.data.double(), expected.data.double()
    little = 448 * 2e-3
    step = torch.maximum(values.abs(), likely.abs()).clamp(min=2**-6).log2().floor().exp2() / 8
    difference = (values - likely).abs()
    assert (difference <= step + little).all()
    assert (difference > little).double().mean() <= max(0.02, 16 / difference.numel())


def swiglu_operands(m, experts, size, k=272):
    """Products of about one, where SwiGLU is neither zero nor at its limits, which would magnify what sums lose."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    x = torch.randn(m, k, device=DEVICE, generator=generator) * torch.rand(m, 1, device=DEVICE, generator=generator)
    w = torch.randn(2 * experts, size, k, device=DEVICE, generator=generator).mul(0.1)
    data, scale = quantize_128x128(w)
    return quantize_1x128(x), FP8Tensor(data.view(experts, 2 * size, k), scale.view(experts, -1, scale.shape[-1]))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("size", [16, 96, 128, 208, 512])
@pytest.mark.parametrize("groups", ["single rows", "few rows", "odd", "skewed"])
def test_swiglu(groups, size, activation):
    sizes = GROUPS[groups]
    m = 3 + sum(sizes) + 5
    a, gate_up = swiglu_operands(m, len(sizes), size)
    options = dict(activation=ACTIVATIONS[activation])
    group_offsets = offsets(sizes, start=3)
    out = grouped_gemm_swiglu(a, gate_up, group_offsets, **options)
    assert out.data.shape == (m, size) and out.scale.stride() == (1, -(-m // 4) * 4)
    rows = slice(3, 3 + sum(sizes))
    expected = on_reference(grouped_gemm_swiglu, a, gate_up, group_offsets, **options)
    same_codes(FP8Tensor(out.data[rows], out.scale[rows]), FP8Tensor(expected.data[rows], expected.scale[rows]))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("size", [16, 128, 208, 512])
@pytest.mark.parametrize("groups", ["single rows", "few rows", "odd", "skewed"])
def test_swiglu_keeping_gate_and_up(groups, size, activation):
    """The bits of the quantizer of bfloat16, of what is kept; what is kept is the plain product but for its order."""
    sizes, activation = GROUPS[groups], ACTIVATIONS[activation]
    m = 3 + sum(sizes) + 5
    a, gate_up = swiglu_operands(m, len(sizes), size)
    group_offsets, rows = offsets(sizes, start=3), slice(3, 3 + sum(sizes))
    out, projected = grouped_gemm_swiglu_keeping(a, gate_up, group_offsets, activation=activation)
    _, exact = on_reference(grouped_gemm_swiglu_keeping, a, gate_up, group_offsets, activation=activation)
    assert relative_error(projected[rows], exact[rows]) <= 4e-3
    halves = projected.unflatten(1, (2, size))
    whole = torch.nn.functional.pad(halves, (0, -size % 128)).flatten(1)  # the quantizer takes whole blocks
    h = swiglu_quantize(whole, group_offsets, activation=activation).rows
    assert torch.equal(out.data[rows].view(torch.uint8), h.data[rows, :size].view(torch.uint8))
    assert torch.equal(out.scale[rows], h.scale[rows])


@pytest.mark.parametrize("max_m", [1, 8, 40])
def test_swiglu_of_the_masked_layout(max_m):
    masked_m = [max_m, 0, max_m // 2, max_m + 5, -1, 1]
    a, gate_up = swiglu_operands(6 * max_m, 6, 208)
    options = dict(activation=Activation(limit=2.0), max_m=max_m)
    out = grouped_gemm_swiglu(a, gate_up, int32(masked_m), **options)
    expected = on_reference(grouped_gemm_swiglu, a, gate_up, int32(masked_m), **options)
    for e, size in enumerate(masked_m):
        rows = slice(e * max_m, e * max_m + min(max(size, 0), max_m))
        if rows.start < rows.stop:
            same_codes(FP8Tensor(out.data[rows], out.scale[rows]), FP8Tensor(expected.data[rows], expected.scale[rows]))


@pytest.mark.parametrize("sizes", [[1, 3, 0, 8], [16, 9, 30, 2], [200, 0, 128, 65], [5] * 40], ids=str)
@pytest.mark.parametrize("bad", [None, NAN, float("inf")])
def test_swiglu_is_quantized_with_the_bits_of_the_quantizer(sizes, bad):
    """Sums of small integers are exact however they are split, and a sigmoid of 30 and more is 1: so is SwiGLU."""
    m, size, k, experts = sum(sizes), 256, 512, len(sizes)
    draw = partial(torch.randint, device=DEVICE)
    powers = partial(torch.full, fill_value=2.0, device=DEVICE)
    a_scale = empty_mn_major((m, k // 128), device=DEVICE)
    a_scale.copy_(powers((m, k // 128)).pow_(draw(0, 4, (m, k // 128))))
    if bad is not None:
        a_scale[m // 2, 1] = bad
    a = FP8Tensor(draw(1, 3, (m, k)).to(torch.float8_e4m3fn), a_scale)
    weights = torch.cat([draw(0, 2, (experts, size, k)), draw(-2, 3, (experts, size, k))], 1)
    b_scale = powers((experts, 2 * size // 128, k // 128)).pow_(draw(0, 3, (experts, 2 * size // 128, k // 128)))
    b = FP8Tensor(weights.to(torch.float8_e4m3fn), b_scale)
    group_offsets = offsets(sizes)
    gate, up = grouped_gemm(a, b, group_offsets, out=poisoned(m, 2 * size, dtype=torch.float32)).chunk(2, dim=1)
    assert bad is not None or gate.min() >= 30
    expected = quantize_1x128(gate * up)
    actual = grouped_gemm_swiglu(a, b, group_offsets, activation=Activation())
    assert torch.equal(actual.data.view(torch.uint8), expected.data.view(torch.uint8))
    assert torch.equal(actual.scale.view(torch.int32), expected.scale.view(torch.int32))


# Streams, graphs, memory.


def test_memory_of_a_call_is_its_result():
    a, b = activations(512, 1536), weights(8, 2112, 1536)
    takes_its_result_alone(partial(grouped_gemm, a, b, offsets([64] * 8)))


@pytest.mark.parametrize(
    ("experts", "m", "n", "k"), [(300, 600, 1024, 7168), (2, 70000, 32768, 128), (3, 300003, 8, 7168)]
)
def test_more_than_2_31_elements(experts, m, n, k):
    """Weights, a result and activations past 2^31 elements: the rows at every expert's borders."""
    a = FP8Tensor(random_bytes(m, k), empty_mn_major((m, k // 128), device=DEVICE).uniform_(0.5, 2))
    b = FP8Tensor(random_bytes(experts, n, k), torch.rand(experts, -(-n // 128), k // 128, device=DEVICE) + 0.5)
    size = m // experts
    group_offsets = offsets([size] * experts)
    out = poisoned(m, n)
    grouped_gemm(a, b, group_offsets, out=out)
    for expert in {0, experts // 2, experts - 2, experts - 1}:
        rows = torch.tensor([expert * size, expert * size + size - 1], device=DEVICE)
        sample = FP8Tensor(a.data.view(torch.uint8)[rows].view(a.data.dtype), a.scale[rows])
        check_groups(
            out[rows], sample, FP8Tensor(b.data[expert : expert + 1], b.scale[expert : expert + 1]), [slice(0, 2)]
        )
    assert sum(part.isnan().sum() for part in out[: size * experts].split(4096)) == 0
