"""The exact transpose of FP8 weights: reference backend, errors, operator, and the compiled kernels."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8moe.quant import transpose
from fp8moe.quant.quantize import dequantize, quantize_128x128
from fp8moe.quant.transpose import transpose_fp8
from tests.ptxas import without_spills


def random(*shape, seed=0):
    """Every code there is, NaN too, and scales that differ."""
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator).view(torch.float8_e4m3fn)
    *lead, n, k = shape
    return data, torch.rand(*lead, -(-n // 128), -(-k // 128), generator=generator)


@given(
    lead=st.lists(st.integers(0, 3), max_size=2),
    n=st.integers(0, 300),
    k=st.integers(0, 300),
    seed=st.integers(0, 1000),
)
def test_bytes_and_scales_change_places(lead, n, k, seed):
    data, scale = random(*lead, n, k, seed=seed)
    t = transpose_fp8((data, scale))
    assert t.data.dtype == torch.float8_e4m3fn and t.data.is_contiguous() and t.scale.is_contiguous()
    assert torch.equal(t.data.view(torch.uint8), data.view(torch.uint8).mT)
    assert torch.equal(t.scale, scale.mT)
    back = transpose_fp8(t)
    assert torch.equal(back.data.view(torch.uint8), data.view(torch.uint8)) and torch.equal(back.scale, scale)


def test_values_are_those_of_the_transposed_weight():
    w = torch.randn(2, 200, 328)
    t = quantize_128x128(w)
    assert torch.equal(dequantize(transpose_fp8(t)), dequantize(t).mT)
    # Quantizing the transpose gives the same tensor: the tiles are the same.
    other = quantize_128x128(w.mT)
    assert torch.equal(transpose_fp8(t).data.float(), other.data.float())
    assert torch.equal(transpose_fp8(t).scale, other.scale)


def test_strided_operands_and_gradients():
    data, scale = random(3, 136, 272)
    wide = torch.zeros(3, 136, 300, dtype=torch.uint8)
    wide[..., :272] = data.view(torch.uint8)
    strided = wide.view(torch.float8_e4m3fn)[..., :272], scale.mT.contiguous().mT
    expected = transpose_fp8((data, scale))
    for t in (transpose_fp8(strided), transpose_fp8((data.requires_grad_(), scale.requires_grad_()))):
        assert torch.equal(t.data.view(torch.uint8), expected.data.view(torch.uint8))
        assert torch.equal(t.scale, expected.scale)
        assert t.data.is_contiguous() and not t.data.requires_grad and not t.scale.requires_grad


def test_errors():
    data, scale = random(136, 272)
    with pytest.raises(ValueError, match=r"^w\.data: expected at least two dimensions, got shape \(136,\)"):
        transpose_fp8((data[:, 0], scale))
    with pytest.raises(ValueError, match=r"^w\.scale: expected shape \(2, 3\), .* got \(136, 3\)"):
        transpose_fp8((data, scale.new_ones(136, 3)))


def test_every_variant_compiles_without_spills():
    for variant in itertools.product((False, True), repeat=2):
        report = without_spills(transpose.fp8_kernel_spec(*variant))
        assert report.static_smem == 128 * 128
        # 6 blocks of 256 threads on an SM of 65536 registers, each with 16 KB of loads in flight.
        assert report.registers <= 40
