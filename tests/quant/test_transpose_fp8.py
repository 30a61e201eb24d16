"""The exact transpose of FP8 weights: reference backend, errors, operator, and the compiled kernels."""

import gc
import itertools
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8moe import FP8Tensor
from fp8moe.quant import transpose
from fp8moe.quant.quantize import dequantize, quantize_128x128
from fp8moe.quant.transpose import backward_operand, quantize_both_ways, transpose_fp8, transposed_weight
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


# ---- weights quantized both ways ----

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def same_bits(got: FP8Tensor, expected: FP8Tensor) -> bool:
    return torch.equal(got.data.view(torch.uint8), expected.data.view(torch.uint8)) and torch.equal(
        got.scale.view(torch.int32), expected.scale.view(torch.int32)
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(136, 272), (3, 128, 256), (2, 1, 130, 70), (0, 16, 16), (2, 0, 16)])
def test_both_ways_are_quantization_and_transpose(shape, dtype):
    w = torch.randn(shape).to(dtype).requires_grad_()
    found, expected = quantize_both_ways(w), quantize_128x128(w)
    assert same_bits(found, expected) and not found.data.requires_grad
    assert same_bits(transposed_weight(backward_operand(found)), transpose_fp8(expected))
    for value in (*found, *transposed_weight(backward_operand(found))):
        assert value.is_contiguous()


def test_rows_below_have_blocks_of_their_own():
    gate, up = torch.randn(2, 3, 200, 144)
    found = quantize_both_ways(gate, up)
    expected = quantize_128x128(torch.stack([gate, up], 1))
    assert same_bits(found, FP8Tensor(*(part.flatten(1, 2) for part in expected)))
    assert same_bits(transposed_weight(backward_operand(found)), transpose_fp8(found))


def test_the_transpose_is_kept_as_long_as_the_weight():
    w = quantize_both_ways(torch.randn(2, 2, 128, 256))
    kept = backward_operand(w)
    assert backward_operand(w).data.data_ptr() == kept.data.data_ptr() != w.data.data_ptr()
    assert kept.data.shape == w.data.shape and same_bits(FP8Tensor(*(part.contiguous() for part in kept)), w)
    assert transposed_weight(kept).data.data_ptr() == kept.data.data_ptr()
    alias = FP8Tensor(w.data.detach(), w.scale)
    assert backward_operand(alias).data.data_ptr() == kept.data.data_ptr()
    merged = FP8Tensor(w.data.flatten(1, 2), w.scale.flatten(1, 2))
    part, copy = FP8Tensor(w.data[:1], w.scale[:1]), FP8Tensor(w.data.clone(), w.scale)
    for other in (merged, part, copy):
        assert backward_operand(other) is other and same_bits(transposed_weight(other), transpose_fp8(other))
    freed = weakref.ref(kept.data.untyped_storage())
    del merged, part, copy, other, alias, kept
    gc.collect()
    assert freed() is not None
    del w
    gc.collect()
    assert freed() is None


def test_the_transpose_outlives_the_weight():
    w = quantize_both_ways(torch.randn(128, 256))
    kept, freed = backward_operand(w), weakref.ref(w.data.untyped_storage())
    expected = transpose_fp8(w)
    del w
    gc.collect()
    assert freed() is None and same_bits(transposed_weight(kept), expected)


def test_refusals_of_both_ways():
    with pytest.raises(TypeError, match="w: expected bfloat16, float16 or float32"):
        quantize_both_ways(torch.ones(4, 4, dtype=torch.int32))
    with pytest.raises(ValueError, match="w: expected at least 2"):
        quantize_both_ways(torch.ones(4))
    with pytest.raises(ValueError, match="below: expected shape"):
        quantize_both_ways(torch.ones(4, 4), torch.ones(4, 5))
    with pytest.raises(TypeError, match="below: expected float32, got torch.bfloat16"):
        quantize_both_ways(torch.ones(4, 4), torch.ones(4, 4).bfloat16())
