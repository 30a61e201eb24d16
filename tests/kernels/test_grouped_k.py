"""grouped_gemm_k on the reference backend, its checks, and the compiled variants of its kernel."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8moe.kernels.gemm.api import grouped_gemm_k
from fp8moe.kernels.gemm.source import grouped_k_spec
from fp8moe.kernels.gemm.tiles import GROUPED_K_TILES, choose_grouped_k
from fp8moe.quant.formats import FP8Tensor
from fp8moe.quant.quantize import quantize_128x1, quantize_128x128
from fp8moe.quant.transpose import quantize_with_transpose
from fp8moe.runtime.sm90 import REGISTERS_PER_SM, SHARED_LIMIT
from tests import gemm_cases
from tests.errors import refused, relative_error
from tests.gemm_cases import exact_along_k, int32
from tests.ptxas import without_spills

TOLERANCE = 3e-4


offsets = partial(gemm_cases.offsets, unit=128)


def operand(rows, k, seed, blocks=False):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(k, rows, generator=generator) * torch.rand(k, 1, generator=generator).mul(4).exp()
    return quantize_128x128(x.t()) if blocks else quantize_128x1(x)


@given(
    blocks=st.lists(st.integers(0, 3), min_size=1, max_size=5),
    start=st.integers(0, 2),
    rest=st.integers(0, 2),
    m=st.integers(1, 40),
    n=st.integers(1, 18).map(lambda i: 8 * i),
    of_blocks=st.booleans(),
)
def test_products_of_each_group(blocks, start, rest, m, n, of_blocks):
    k = 128 * (start + sum(blocks) + rest)
    a, b, group_offsets = operand(m, k, 0), operand(n, k, 1, of_blocks), offsets(blocks, start)
    out = grouped_gemm_k(a, b, group_offsets)
    exact = exact_along_k(a, b, group_offsets)
    assert out.shape == (len(blocks), m, n) and out.dtype == torch.float32
    assert relative_error(out, exact) <= TOLERANCE
    assert not any(out[e].any() for e, size in enumerate(blocks) if size == 0)
    rounded = torch.empty_like(out, dtype=torch.bfloat16)
    assert torch.equal(grouped_gemm_k(a, b, group_offsets, out=rounded), out.bfloat16())
    before = torch.randn(out.shape)
    total = before.clone()
    assert grouped_gemm_k(a, b, group_offsets, out=total, accumulate=True) is total
    assert relative_error(total, exact + before) <= TOLERANCE
    poisoned = torch.full_like(out, float("nan"))
    assert torch.equal(grouped_gemm_k(a, b, group_offsets, out=poisoned), out)


@pytest.mark.parametrize("sizes", [(20, 20), (8, 1, 31), (40,)])
@pytest.mark.parametrize("accumulate", [False, True])
def test_several_results_take_the_rows_of_a(sizes, accumulate):
    a, b, group_offsets = operand(40, 512, 0), operand(24, 512, 1), offsets((1, 0, 2), 1)
    outs = [torch.randn(3, size, 24) for size in sizes]
    expected = torch.cat(outs, 1)
    grouped_gemm_k(a, b, group_offsets, out=expected, accumulate=accumulate)
    found = grouped_gemm_k(a, b, group_offsets, out=outs, accumulate=accumulate)
    assert all(one is other for one, other in zip(found, outs, strict=True))
    assert relative_error(torch.cat(found, 1), expected.double()) < 1e-6


def test_several_results_that_are_refused():
    a, b, group_offsets = operand(40, 512, 0), operand(24, 512, 1), offsets((1, 0, 2), 1)
    for shapes in (((3, 20, 24), (3, 19, 24)), ((3, 20, 24), (20, 24)), ()):
        outs = [torch.zeros(shape) for shape in shapes]
        with pytest.raises(ValueError, match=r"out: expected \(E, M_i, N\) with the rows of a \(40, 512\) together"):
            grouped_gemm_k(a, b, group_offsets, out=outs)
    outs = [torch.zeros(3, 20, 24), torch.zeros(3, 20, 32)]
    refused(ValueError, "out: expected shape", grouped_gemm_k, a, b, group_offsets, out=outs)
    assert not outs[0].any()
    refused(TypeError, "out: expected a torch.Tensor", grouped_gemm_k, a, b, group_offsets, out=[outs[0], None])


def test_one_group_is_the_weight_gradient_of_a_linear_layer():
    x, grad = torch.randn(256, 48), torch.randn(256, 32)
    gradient = grouped_gemm_k(quantize_128x1(grad), quantize_128x1(x), int32([0, 256]))[0]
    assert relative_error(gradient, grad.double().T @ x.double()) <= 6e-2


def test_values_that_are_not_finite_stay_in_their_row_and_column():
    grad, x = torch.randn(256, 16), torch.randn(256, 136)
    grad[3, 5], x[140, 130], x[200, 7] = float("nan"), float("inf"), float("nan")
    a, (_, b, group_offsets) = quantize_128x1(grad), quantize_with_transpose(x, blocks=True)
    bad = ~grouped_gemm_k(a, b, group_offsets)[0].isfinite()
    expected = torch.zeros(16, 136, dtype=torch.bool)
    expected[5], expected[:, 130], expected[:, 7] = True, True, True
    assert torch.equal(bad, expected)


def test_offsets_that_mean_nothing():
    a, b = operand(8, 256, 0), operand(8, 256, 1)
    out = grouped_gemm_k(a, b, int32([-128, 128, 0, 9999 * 128]))
    assert relative_error(out[0], exact_along_k(a, b, int32([0, 128]))[0]) <= TOLERANCE
    assert not out[1].any()
    assert relative_error(out[2], exact_along_k(a, b, int32([0, 256]))[0]) <= TOLERANCE


@pytest.mark.parametrize("accumulate", [False, True])
def test_offsets_that_are_refused_write_nothing(accumulate):
    a, b, out = operand(8, 256, 0), operand(8, 256, 1), torch.ones(2, 8, 8)
    with pytest.raises(ValueError, match="got group 1 at 128:200"):
        grouped_gemm_k(a, b, int32([0, 128, 200]), out=out, accumulate=accumulate)
    assert torch.equal(out, torch.ones(2, 8, 8))


def test_no_columns_and_no_groups():
    a, b = operand(8, 0, 0), operand(16, 0, 1)
    assert torch.equal(grouped_gemm_k(a, b, int32([0, 0])), torch.zeros(1, 8, 16))
    ones = torch.ones(1, 8, 16)
    assert torch.equal(grouped_gemm_k(a, b, int32([0, 0]), out=ones, accumulate=True), torch.ones(1, 8, 16))
    assert grouped_gemm_k(a, b, int32([0])).shape == (0, 8, 16)


A, B, OFFSETS = operand(8, 256, 0), operand(16, 256, 1), int32([0, 128, 256])
BAD = {
    "b.data: expected shape": dict(b=operand(16, 128, 1)),
    "K must be a multiple of 128": dict(
        a=FP8Tensor(A.data[:, :144], A.scale), b=FP8Tensor(B.data[:, :144], B.scale), group_offsets=int32([0, 0])
    ),
    "N must be a multiple of 8": dict(b=FP8Tensor(B.data[:12], B.scale[:12])),
    "a.scale: expected shape": dict(a=FP8Tensor(A.data, A.scale[:, :1])),
    r"b.scale: expected shape \(1, 2\)": dict(b=FP8Tensor(B.data, B.scale[:8])),
    r"b.scale: expected shape \(16, 2\)": dict(b=FP8Tensor(B.data, B.scale[:, :1])),
    r"group_offsets: expected shape \(E \+ 1,\)": dict(group_offsets=OFFSETS[None]),
    "group_offsets: expected multiples of 128, got group 0 at 0:100": dict(group_offsets=int32([0, 100, 256])),
    "accumulate: expected out": dict(accumulate=True),
    "out: expected shape": dict(out=torch.empty(2, 16, 8)),
    "out: expected a contiguous tensor": dict(out=torch.empty(2, 16, 8).mT),
}
WRONG_TYPES = {
    "out: expected float32 or bfloat16": dict(out=torch.empty(2, 8, 16, dtype=torch.float16)),
    "out: expected float32, got": dict(out=torch.empty(2, 8, 16, dtype=torch.bfloat16), accumulate=True),
}


@pytest.mark.parametrize(
    ("kind", "message", "change"),
    [(ValueError, *item) for item in BAD.items()] + [(TypeError, *item) for item in WRONG_TYPES.items()],
)
def test_bad_input(kind, message, change):
    call = {"a": A, "b": B, "group_offsets": OFFSETS} | change
    refused(kind, message, grouped_gemm_k, call.pop("a"), call.pop("b"), call.pop("group_offsets"), **call)


def test_out_that_overlaps_an_operand():
    memory = torch.zeros(1 << 14, dtype=torch.uint8)
    a = FP8Tensor(memory[: 8 * 256].view(8, 256).view(torch.float8_e4m3fn), A.scale)
    with pytest.raises(ValueError, match="overlaps a.data"):
        grouped_gemm_k(a, B, OFFSETS, out=memory[: 2 * 8 * 16 * 4].view(torch.float32).view(2, 8, 16))


def test_there_is_no_backward():
    scale = A.scale.clone().requires_grad_()
    out = grouped_gemm_k((A.data, scale), B, OFFSETS)
    with pytest.raises(RuntimeError, match=r"fp8moe\.grouped_gemm_k"):
        out.sum().backward()


@pytest.mark.parametrize(
    ("groups", "m", "n", "tile", "block_scales"),
    [
        (4, 4096, 7168, (256, 96), False),
        (16, 7168, 2048, (256, 96), False),
        (1, 4096, 7168, (256, 112), False),
        (1, 512, 512, (128, 96), False),
        (1, 8, 8, (128, 96), False),
        (32, 4096, 7168, (256, 128), True),
        (128, 1536, 2048, (256, 128), True),
        (1, 512, 512, (128, 128), True),
    ],
)
def test_choice(groups, m, n, tile, block_scales):
    chosen = choose_grouped_k(groups, m, n, 132, block_scales)
    assert (chosen.block_m, chosen.block_n) == tile


@pytest.mark.parametrize("cfg", GROUPED_K_TILES, ids=str)
@pytest.mark.parametrize("n", [136, 7168])
@pytest.mark.parametrize(
    ("dtype", "accumulate"), [(torch.float32, False), (torch.float32, True), (torch.bfloat16, False)]
)
def test_every_variant_keeps_to_its_registers(cfg, n, dtype, accumulate):
    assert cfg.shared_bytes <= SHARED_LIMIT
    report = without_spills(grouped_k_spec(cfg, n, out_float32=dtype == torch.float32, accumulate=accumulate))
    assert not report.complaints
    assert report.registers <= REGISTERS_PER_SM // cfg.threads
