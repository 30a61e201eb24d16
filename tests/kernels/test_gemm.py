"""The dense GEMM on the reference backend: semantics, layouts, errors, operators."""

from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8moe.kernels.gemm import api, launch, reference
from fp8moe.kernels.gemm.api import gemm
from fp8moe.kernels.gemm.launch import GemmOperands
from fp8moe.kernels.gemm.reference import to_float32
from fp8moe.quant.checks import mn_major
from fp8moe.quant.formats import empty_mn_major
from fp8moe.runtime import launch as runtime_launch
from fp8moe.runtime.checks import row_major
from tests.backends import on_reference
from tests.errors import error_in_its_dtype, refused
from tests.gemm_cases import exact, operands
from tests.global_settings import matmul_precision

DTYPES = (torch.bfloat16, torch.float32)
TOLERANCE = {torch.float32: 3e-4, torch.bfloat16: 1.5e-3}


def nothing(rows, rows_of_block=1):
    """An operand without columns."""
    return torch.empty(rows, 0, dtype=torch.float8_e4m3fn), torch.empty(-(-rows // rows_of_block), 0)


@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 8, 16), (3, 24, 48), (33, 136, 144), (129, 576, 576), (17, 2112, 256), (64, 128, 1536)]
)
def test_matches_float64(m, n, k, out_dtype):
    a, b = operands(m, n, k)
    out = gemm(a, b, out_dtype=out_dtype)
    assert out.shape == (m, n) and out.dtype == out_dtype and out.is_contiguous()
    assert error_in_its_dtype(out, exact(a, b)) < TOLERANCE[out_dtype]


@settings(max_examples=40, deadline=None)
@given(
    m=st.integers(0, 70),
    n=st.integers(0, 40).map(lambda i: 8 * i),
    k=st.integers(0, 40).map(lambda i: 16 * i),
    bias_dtype=st.sampled_from([None, torch.bfloat16, torch.float16, torch.float32]),
    out_dtype=st.sampled_from(DTYPES),
    scale_format=st.sampled_from(["float32", "ue8m0"]),
    seed=st.integers(0, 1000),
)
def test_any_size(m, n, k, bias_dtype, out_dtype, scale_format, seed):
    if k:
        a, b = operands(m, n, k, seed, scale_format)
    else:
        a, b = nothing(m), nothing(n, 128)
    bias = None if bias_dtype is None else torch.randn(n).to(bias_dtype)
    out = gemm(a, b, bias=bias, out_dtype=out_dtype)
    expected = exact(a, b, bias) if k else torch.zeros(m, n).double() + (0 if bias is None else bias.double())
    assert out.shape == (m, n) and out.dtype == out_dtype
    assert error_in_its_dtype(out, expected) < TOLERANCE[out_dtype]


def test_chunks_of_columns_do_not_show(monkeypatch):
    a, b = operands(33, 264, 272)
    bias = torch.randn(264)
    expected = gemm(a, b, bias=bias, out_dtype=torch.float32)
    monkeypatch.setattr(reference, "_CHUNK", 1)
    assert torch.allclose(gemm(a, b, bias=bias, out_dtype=torch.float32), expected, rtol=1e-5)


def test_scales_meet_their_blocks():
    """Ones everywhere and powers of two as scales: the product is a small sum that can be written down."""
    a_scale = torch.tensor([[1.0, 2.0], [4.0, 8.0]])
    b_scale = torch.tensor([[1.0, 16.0], [64.0, 256.0]])
    ones = torch.ones(136, 144).to(torch.float8_e4m3fn)
    out = gemm((ones[:2], a_scale), (ones, b_scale), out_dtype=torch.float32)
    expected = 128 * a_scale[:, :1] * b_scale[:, 0] + 16 * a_scale[:, 1:] * b_scale[:, 1]
    assert torch.equal(out[:, :128], expected[:, :1].expand(2, 128))
    assert torch.equal(out[:, 128:], expected[:, 1:].expand(2, 8))


def test_bias_is_added_before_rounding():
    a, b = operands(5, 16, 128)
    bias = torch.linspace(-1e3, 1e3, 16)
    in_float32 = gemm(a, b, bias=bias, out_dtype=torch.float32)
    assert torch.equal(gemm(a, b, bias=bias), in_float32.bfloat16())
    assert torch.equal(in_float32, gemm(a, b, out_dtype=torch.float32) + bias)


@pytest.mark.parametrize("dtype", DTYPES)
def test_c_is_added_before_rounding(dtype):
    a, b = operands(5, 16, 128)
    bias, c = torch.linspace(-1e3, 1e3, 16), torch.randn(5, 16).mul(1e3).to(dtype)
    sums = gemm(a, b, bias=bias, out_dtype=torch.float32) + c.float()
    assert torch.equal(gemm(a, b, bias=bias, c=c, out_dtype=dtype), sums.to(dtype))
    out = c.clone()
    assert gemm(a, b, bias=bias, c=out, out=out) is out and torch.equal(out, sums.to(dtype))
    strided = torch.zeros(16, 10, dtype=dtype)[:, ::2].T.copy_(c)
    assert torch.equal(gemm(a, b, bias=bias, c=strided, out_dtype=dtype), sums.to(dtype))


def test_c_of_an_empty_sum():
    a, b = nothing(3), nothing(8, 128)
    c = torch.randn(3, 8)
    assert torch.equal(gemm(a, b, c=c, bias=torch.ones(8), out_dtype=torch.float32), c + 1)


def test_c_that_overlaps_a_part_of_out():
    a, b = operands(5, 16, 128)
    memory = torch.zeros(10, 32)
    out = memory[:5, :16]
    gemm(a, b, c=out, out=out)
    gemm(a, b, c=memory[5:, :16], out=out)
    for c in (memory[1:6, :16], memory[:5, 8:24], memory.view(-1)[: 5 * 16].view(5, 16)):
        refused(ValueError, "^c: expected out itself or memory of its own", gemm, a, b, c=c, out=out)


@pytest.mark.parametrize("precision", ["high", "medium"])
def test_float32_matmul_precision_changes_nothing(precision):
    a, b = operands(65, 136, 272)
    with matmul_precision(precision):
        out = gemm(a, b, out_dtype=torch.float32)
    assert error_in_its_dtype(out, exact(a, b)) < 1e-6


def test_conversion_is_exact_for_every_value():
    data = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    assert torch.equal(to_float32(data).nan_to_num(nan=1e9), data.float().nan_to_num(nan=1e9))


@pytest.mark.parametrize("m", [0, 5])
@pytest.mark.parametrize("n", [0, 24])
def test_out_of_an_empty_problem(m, n):
    a, b = nothing(m), nothing(n, 128)
    out = torch.full((m, n), 7.0)
    assert not gemm(a, b, out=out).any()


# Layouts that the CUDA kernel asks for.


def test_row_major_copies_only_what_tma_cannot_load():
    data = torch.randint(0, 255, (6, 64), dtype=torch.uint8).view(torch.float8_e4m3fn)
    for fine in (data, data[1:], data[:, :32], data[:, 16:48], data[:1]):
        assert row_major(fine) is fine
    single = data.T[:1]  # strides (1, 64): a row of one element steps
    for bad in (data[:, 1:49], data[:, ::2], data.T, data[:1].expand(4, 64), single):
        copy = row_major(bad)
        assert copy is not bad and copy.is_contiguous()
        assert torch.equal(copy.view(torch.uint8), bad.view(torch.uint8))


@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (3, 1), (4, 2), (33, 5)])
def test_mn_major_copies_only_what_tma_cannot_load(shape):
    scale = empty_mn_major(shape, device="cpu").copy_(torch.rand(shape))
    assert mn_major(scale) is scale
    for bad in (scale.contiguous() + 0, torch.cat([scale, scale])[shape[0] :]):
        copy = mn_major(bad)
        assert torch.equal(copy, scale)
        assert copy.stride(1) == (shape[0] + 3) // 4 * 4 and copy.data_ptr() % 16 == 0
        assert shape[0] == 1 or copy.stride(0) == 1


def test_what_the_cuda_kernel_is_given(monkeypatch):
    """Whatever layouts come in: what TMA can load, and a bias dtype that the kernel reads."""
    a, b = operands(33, 24, 272)
    given = []
    monkeypatch.setattr(api, "use_cuda", lambda *tensors: True)
    monkeypatch.setattr(launch, "find", lambda *arguments, **options: None)
    monkeypatch.setattr(launch, "dense", lambda *arguments, **options: None)
    monkeypatch.setattr(launch, "run", lambda found, *arguments: given.append(arguments))
    bias = torch.arange(24, dtype=torch.float16)
    gemm(a, b, bias=bias)
    gemm(
        (a.data.T.contiguous().T, a.scale.contiguous()), (b.data.T.contiguous().T, b.scale.T.contiguous().T), bias=bias
    )
    assert all(value is like for value, like in zip(given[0][0][:4], (*a, *b), strict=True))
    for call, out in given:
        for value, like in zip(call[:4], (*a, *b), strict=True):
            assert torch.equal(value.float(), like.float()) and value.stride() == like.stride()
        assert call.bias.dtype == torch.float32 and torch.equal(call.bias, bias.float())
        assert call.c is None and out.shape == (33, 24)
    gemm(a, b, c=torch.ones(24, 33, dtype=torch.bfloat16).T)
    assert given[-1][0].c.is_contiguous()


def test_a_plan_is_for_operands_like_those_it_was_made_for(monkeypatch):
    monkeypatch.setattr(runtime_launch, "_plans", {})
    monkeypatch.setattr(runtime_launch, "device_guard", lambda index: nullcontext())
    monkeypatch.setattr(launch.dense, "_build", lambda *arguments, **options: object())
    (a, a_scale), (b, b_scale) = operands(8, 24, 144)
    bias = torch.zeros(24, dtype=torch.bfloat16)
    c = torch.zeros(8, 24, dtype=torch.bfloat16)
    call = GemmOperands(a, a_scale, b, b_scale, bias, c)

    def find(out_dtype=torch.bfloat16, **changed):
        return launch.find(launch.dense, call._replace(**changed), out_dtype, False)

    assert find() is None
    plan = launch.dense(a.get_device(), call, torch.bfloat16, False)
    assert find(a=a.clone(), bias=torch.ones_like(bias)) is plan

    def odd(data):  # same layout, but not at a multiple of 16 bytes
        memory = torch.zeros(data.nbytes + 8, dtype=torch.uint8)[8:].view(data.dtype)
        return memory.as_strided(data.shape, data.stride())

    different = dict(
        a=(odd(a), a[:7], a.view(torch.uint8), a.T.contiguous().T),
        a_scale=(odd(a_scale), a_scale.contiguous(), a_scale.double(), a_scale[:, :1]),
        b=(odd(b), b[:16], torch.zeros(24, 160).to(b.dtype)[:, :144]),
        b_scale=(torch.zeros(1, 4)[:, ::2], b_scale[:, :1], b_scale.half()),
        bias=(None, bias.float(), bias[:16], torch.zeros(48, dtype=torch.bfloat16)[::2]),
        c=(None, odd(c), c.float(), c[:7], torch.zeros(8, 48, dtype=torch.bfloat16)[:, :24]),
        groups=(torch.zeros(2, dtype=torch.int32),),
        out_dtype=(torch.float32,),
    )
    for name, values in different.items():
        for value in values:
            assert find(**{name: value}) is None, (name, value)
    assert on_reference(find) is None


# Bad input.


A, B = operands(32, 24, 144)


def fp8(*shape):
    return torch.zeros(shape, dtype=torch.float8_e4m3fn)


BAD = {
    "a is a triple": (dict(a=(1, 2, 3)), TypeError, r"^a: expected an FP8Tensor"),
    "a e5m2": (dict(a=(A.data.float().to(torch.float8_e5m2), A.scale)), TypeError, r"^a\.data: .* got .*float8_e5m2"),
    "inner sizes": (dict(b=(fp8(24, 128), B.scale)), ValueError, r"^b\.data: expected shape \(N, 144\).*\(24, 128\)"),
    "K": (dict(a=(fp8(32, 8), A.scale), b=(fp8(24, 8), B.scale)), ValueError, r"multiple of 16 .* got K = 8"),
    "N": (dict(b=(fp8(20, 144), B.scale)), ValueError, r"^b\.data: N must be a multiple of 8 .* got N = 20"),
    "swapped": (dict(a=B, b=A), ValueError, r"^a, b: expected activations and then weights, .* swap the two"),
    "a scale shape": (dict(a=(A.data, A.scale[:, :1])), ValueError, r"^a\.scale: expected shape \(32, 2\).*\(32, 1\)"),
    "b scale shape": (dict(b=(B.data, A.scale)), ValueError, r"^b\.scale: expected shape \(1, 2\).* got \(32, 2\)"),
    "bias shape": (dict(bias=torch.zeros(32)), ValueError, r"^bias: expected shape \(24,\), got \(32,\)"),
    "c dtype": (dict(c=torch.zeros(32, 24)), TypeError, r"^c: expected bfloat16, got torch.float32"),
    "c and out": (
        dict(c=torch.zeros(32, 24).bfloat16(), out=torch.zeros(32, 24)),
        TypeError,
        r"^c: expected float32, got torch.bfloat16",
    ),
    "c shape": (dict(c=torch.zeros(24, 32).bfloat16()), ValueError, r"^c: expected shape \(32, 24\), got \(24, 32\)"),
    "out_dtype": (dict(out_dtype=torch.float16), TypeError, r"^out_dtype: expected .* got torch.float16"),
    "out_dtype type": (dict(out_dtype="float32"), TypeError, r"^out_dtype: expected .* got float32"),
    "out contradicted": (
        dict(out=torch.zeros(32, 24, dtype=torch.bfloat16), out_dtype=torch.float32),
        TypeError,
        r"^out_dtype: torch.float32 contradicts out, a torch.bfloat16 tensor",
    ),
    "out shape": (dict(out=torch.zeros(24, 32)), ValueError, r"^out: expected shape \(32, 24\), got \(24, 32\)"),
    "out transposed": (dict(out=torch.zeros(24, 32).T), ValueError, r"^out: expected row-major, .* got \(1, 32\)"),
    "out rows": (dict(out=torch.zeros(32, 25)[:, :24]), ValueError, r"^out: .* a multiple of 4 .* got \(25, 1\)"),
    "out expanded": (dict(out=torch.zeros(24).expand(32, 24)), ValueError, r"^out: expected row-major, .*\(0, 1\)"),
    "out address": (
        dict(out=torch.zeros(32, 32)[:, 1:25]),
        ValueError,
        r"^out: expected to start at a multiple of 16 bytes",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case):
    arguments, exception, message = BAD[case]
    refused(exception, message, gemm, **{"a": A, "b": B} | arguments)


@pytest.mark.parametrize("name", ["a.data", "a.scale", "b.data", "b.scale", "bias"])
def test_out_that_overlaps_an_operand(name):
    memory = torch.zeros(1 << 16, dtype=torch.uint8)

    def place(like, offset):
        return memory[offset : offset + like.nbytes].view(like.dtype).view(like.shape)

    values = {"a.data": A.data, "a.scale": A.scale, "b.data": B.data, "b.scale": B.scale, "bias": torch.zeros(24)}
    out = place(torch.empty(32, 24), 8192)
    last_byte = 8192 + out.nbytes - 16
    for offset, overlaps in ((last_byte, True), (last_byte + 16, False)):
        placed = values | {name: place(values[name], offset).copy_(values[name])}
        a, b = (placed["a.data"], placed["a.scale"]), (placed["b.data"], placed["b.scale"])
        if overlaps:
            refused(ValueError, rf"^out: .* overlaps {name}", gemm, a, b, bias=placed["bias"], out=out)
        else:
            gemm(a, b, bias=placed["bias"], out=out)


# Operators.


def test_backward_says_that_there_is_none():
    a, b = operands(5, 24, 144)
    bias = torch.zeros(24, requires_grad=True)
    out = gemm(a, b, bias=bias)
    with pytest.raises(RuntimeError, match=r"fp8moe\.gemm has no backward"):
        out.sum().backward()
    with torch.no_grad():
        assert not gemm(a, b, bias=bias).requires_grad
    refused(RuntimeError, "out= has no automatic differentiation", gemm, a, b, bias=bias, out=torch.empty(5, 24))
