"""The dense GEMM kernels against float64 over the same quantized operands."""

from functools import partial

import pytest
import torch

from benchmarks.operands import rounded_error
from benchmarks.shapes import DENSE_M, DENSE_SHAPES
from fp8moe.kernels.gemm import tiles
from fp8moe.kernels.gemm.api import gemm
from fp8moe.kernels.gemm.launch import GemmOperands, multiply_with
from fp8moe.quant.formats import FP8Tensor, empty_mn_major
from tests import gemm_cases
from tests.gemm_cases import exact
from tests.gpu.checks import takes_its_result_alone

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
TOLERANCE = {torch.float32: 3e-4, torch.bfloat16: 3e-4}
ROWS = (1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 100, 127, 128, 129, 200, 255, 257, 511, 1000)
WEIGHTS = ((8, 16), (24, 48), (2112, 128), (136, 144), (576, 576), (576, 1536), (136, 7168), (24, 32768))
operands = partial(gemm_cases.operands, spread=4, device=DEVICE)
random_bytes = partial(gemm_cases.random_bytes, device=DEVICE)


def poisoned(m, n, dtype):
    return torch.full((m, n), float("nan"), dtype=dtype, device=DEVICE)


def check(a, b, dtype, bias=None, expected=None):
    out = poisoned(a[0].shape[0], b[0].shape[0], dtype)
    gemm(a, b, bias=bias, out=out)
    expected = exact(a, b, bias) if expected is None else expected
    assert rounded_error(out, expected) <= TOLERANCE[dtype], (out.shape, a[0].shape[1])
    return out


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("n", "k"), WEIGHTS)
def test_odd_sizes(n, k, dtype):
    a, b = operands(max(ROWS), n, k)
    expected = exact(a, b)
    for m in ROWS:
        rows = FP8Tensor(a.data[-m:], empty_mn_major((m, a.scale.shape[1]), device=DEVICE).copy_(a.scale[-m:]))
        check(rows, b, dtype, expected=expected[-m:])


@pytest.mark.parametrize(("n", "k"), DENSE_SHAPES)
def test_benchmark_shapes(n, k):
    a, b = operands(4096, n, k)
    expected = exact(a, b)
    for m in DENSE_M:
        rows = FP8Tensor(a.data[:m], empty_mn_major((m, a.scale.shape[1]), device=DEVICE).copy_(a.scale[:m]))
        out = check(rows, b, torch.bfloat16, expected=expected[:m])
        assert torch.equal(gemm(rows, b), out)


@pytest.mark.parametrize("part", range(4))  # of the configurations, which take minutes to compile
@pytest.mark.parametrize(
    "shape", [(1, 576, 7168), (17, 136, 144), (64, 2112, 1536), (65, 136, 1040), (200, 24, 48), (300, 576, 576)]
)
def test_every_configuration(shape, part):
    a, b = operands(*shape)
    expected = exact(a, b)
    configs = tiles.dense_candidates(*shape, torch.cuda.get_device_properties(0).multi_processor_count)
    assert tiles.choose_dense(*shape, torch.cuda.get_device_properties(0).multi_processor_count) in configs
    errors = {}
    for config in configs[part::4]:
        out = poisoned(*shape[:2], torch.bfloat16)
        multiply_with(config, GemmOperands(*a, *b), out)
        errors[config] = rounded_error(out, expected)
        added = torch.randn_like(out)
        total = added.double() + expected
        multiply_with(config, GemmOperands(*a, *b, c=added), added)
        errors[config, "c"] = rounded_error(added, total)
    # NaN, what an element left unwritten leads to, compares as false.
    assert not {config: value for config, value in errors.items() if not value <= TOLERANCE[torch.bfloat16]}


@pytest.mark.parametrize("bias_dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("m", [3, 200])
def test_bias(m, dtype, bias_dtype):
    a, b = operands(m, 136, 576)
    bias = (torch.randn(136, device=DEVICE) * 1000).to(bias_dtype)
    out = check(a, b, dtype, bias)
    assert torch.equal(gemm(a, b, bias=bias.repeat_interleave(2)[::2], out_dtype=dtype), out)


@pytest.mark.parametrize("bias_dtype", [None, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("m", "n", "k"), [(3, 136, 576), (70, 264, 272), (200, 136, 576), (1000, 2112, 1536)])
def test_c(m, n, k, dtype, bias_dtype):
    a, b = operands(m, n, k)
    product = exact(a, b)
    bias = None if bias_dtype is None else (torch.randn(n, device=DEVICE) * product.std()).to(bias_dtype)
    parent = torch.randn(m + 3, n + 64, device=DEVICE).mul_(product.std()).to(dtype)
    around = parent.clone()
    c = parent[2 : m + 2, 32 : n + 32]
    expected = product + c.double() + (0 if bias is None else bias.double())
    out = gemm(a, b, bias=bias, c=c, out=poisoned(m, n, dtype))
    assert rounded_error(out, expected) <= TOLERANCE[dtype]
    assert torch.equal(parent, around)
    for _ in range(20):
        assert torch.equal(gemm(a, b, bias=bias, c=c, out_dtype=dtype), out)
    assert torch.equal(gemm(a, b, bias=bias, c=c.t().contiguous().t(), out_dtype=dtype), out)
    assert gemm(a, b, bias=bias, c=c, out=c) is c and torch.equal(c, out)
    c.copy_(around[2 : m + 2, 32 : n + 32])
    assert torch.equal(parent, around), "in place, nothing else is written"


@pytest.mark.parametrize("m", [0, 5])
@pytest.mark.parametrize("n", [0, 24])
@pytest.mark.parametrize("k", [0, 48])
def test_empty(m, n, k):
    a = (random_bytes(m, k), torch.ones(m, -(-k // 128), device=DEVICE))
    b = (random_bytes(n, k), torch.ones(-(-n // 128), -(-k // 128), device=DEVICE))
    bias = torch.arange(float(n), device=DEVICE)
    out = gemm(a, b, bias=bias, out=poisoned(m, n, torch.float32))
    assert out.shape == (m, n)
    if m and n:
        assert rounded_error(out, a[0].double() @ b[0].double().T + bias) <= (3e-4 if k else 0)
    if k == 0:
        assert not gemm(a, b).any()


@pytest.mark.parametrize("m", [5, 70, 300])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_out_writes_its_elements_only(m, dtype):
    a, b = operands(m, 136, 272)
    parent = torch.full((m + 9, 256), 7.0, dtype=dtype, device=DEVICE)
    out = parent[4 : m + 4, 64:200]
    out.fill_(float("nan"))
    gemm(a, b, out=out)
    assert torch.equal(out, gemm(a, b, out_dtype=dtype))
    out.fill_(7)
    assert (parent == 7).all()


@pytest.mark.parametrize("m", [1, 64, 128, 4096])
def test_memory_of_a_call_is_its_result(m):
    takes_its_result_alone(partial(gemm, *operands(m, 2112, 7168)))


@pytest.mark.parametrize(("m", "n", "k"), [(70000, 32768, 128), (3, 300032, 7168), (300003, 8, 7168)])
def test_more_than_2_31_elements(m, n, k):
    """A result, weights and activations past 2^31 elements."""
    a = FP8Tensor(random_bytes(m, k), empty_mn_major((m, k // 128), device=DEVICE).uniform_(0.5, 2))
    b = FP8Tensor(random_bytes(n, k), torch.rand(-(-n // 128), k // 128, device=DEVICE) + 0.5)
    out = poisoned(m, n, torch.bfloat16)
    gemm(a, b, out=out)
    rows = torch.tensor(sorted({0, m // 3, m // 2, m - 2, m - 1}), device=DEVICE)
    sample = FP8Tensor(a.data.view(torch.uint8)[rows].view(a.data.dtype), a.scale[rows])
    for start in range(0, n, 32768):
        columns = slice(start, start + 32768)
        block = FP8Tensor(b.data[columns], b.scale[start // 128 : start // 128 + 256])
        assert rounded_error(out[rows, columns], exact(sample, block)) <= TOLERANCE[torch.bfloat16]
    assert sum(part.isnan().sum() for part in out.split(4096)) == 0
