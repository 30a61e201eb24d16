"""Attention from its parts: reference backend, errors, autograd, operators, and the compiled kernels."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8moe import quantize_1x128
from fp8moe.kernels.decoder_ops.merge_splits import kernel_spec, merge_splits
from fp8moe.runtime.checks import FLOATING
from tests.ptxas import compile_report


def attention_in_parts(batch, key_heads, splits, shared, size, *, length=40, dtype=torch.float32, seed=0):
    """parts, lse and counts of random queries, keys and values, and the whole attention (B, heads * D) in float64."""
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(batch, key_heads, shared, size, generator=generator, dtype=torch.float64)
    keys, values = torch.randn(2, batch, key_heads, length, size, generator=generator, dtype=torch.float64)
    lengths = torch.randint(1, length + 1, (batch,), generator=generator)
    part = -(-length // splits)
    parts = torch.zeros(batch, key_heads, splits, shared, size, dtype=torch.float64)
    lse = torch.full((batch, key_heads, splits, shared), torch.inf, dtype=torch.float64)
    counts = torch.zeros(batch, key_heads, splits, dtype=torch.int32)
    whole = torch.zeros(batch, key_heads, shared, size, dtype=torch.float64)
    for b, end in enumerate(lengths.tolist()):
        scores = query[b] @ keys[b].mT
        whole[b] = scores[..., :end].softmax(-1) @ values[b, :, :end]
        for s in range(splits):
            some = slice(s * part, min(end, s * part + part))
            if some.start < some.stop:
                parts[b, :, s] = scores[..., some].softmax(-1) @ values[b, :, some]
                lse[b, :, s] = scores[..., some].logsumexp(-1)
                counts[b, :, s] = some.stop - some.start
    return parts.to(dtype), lse.float(), counts, whole.flatten(1)


@given(
    batch=st.integers(1, 3),
    key_heads=st.integers(1, 3),
    splits=st.integers(1, 9),
    shared=st.integers(1, 4),
    size=st.sampled_from((8, 24, 64, 128)),
    seed=st.integers(0, 100),
)
def test_equals_the_whole_attention(batch, key_heads, splits, shared, size, seed):
    parts, lse, counts, whole = attention_in_parts(batch, key_heads, splits, shared, size, seed=seed)
    out = merge_splits(parts, lse, counts, quantized=False)
    assert (out - whole).norm() <= 1e-5 * whole.norm()


@pytest.mark.parametrize("dtype", FLOATING)
def test_quantized_as_the_values(dtype):
    parts, lse, counts, _ = attention_in_parts(3, 2, 5, 3, 40, dtype=dtype)
    values = merge_splits(parts, lse, counts, quantized=False)
    got, expected = merge_splits(parts, lse, counts, quantized=True), quantize_1x128(values)
    assert values.dtype is dtype and torch.equal(got.data.view(torch.uint8), expected.data.view(torch.uint8))
    assert torch.equal(got.scale, expected.scale) and got.scale.stride() == expected.scale.stride()


def test_parts_without_keys_are_not_read_and_no_keys_give_zero():
    parts, lse, counts, whole = attention_in_parts(2, 1, 4, 2, 16)
    parts[counts == 0], lse[counts == 0] = torch.nan, torch.nan
    counts[1] = 0
    out = merge_splits(parts, lse, counts, quantized=False)
    assert (out[0] - whole[0]).norm() <= 1e-5 * whole[0].norm() and (out[1] == 0).all()


def test_nan_stays_in_its_head():
    parts, lse, counts, _ = attention_in_parts(2, 2, 3, 2, 16)
    counts[:] = 1
    lse[:] = 0.5
    parts[0, 1, 2, 1] = torch.nan
    lse[1, 0, 1, 0] = torch.inf  # what flash attention returns where a score is NaN
    nan = merge_splits(parts, lse, counts, quantized=False).view(2, 2, 2, 16).isnan().all(-1)
    assert nan.nonzero().tolist() == [[0, 1, 1], [1, 0, 0]]


def test_errors():
    parts, lse, counts, _ = attention_in_parts(2, 2, 3, 2, 16)
    names = ("parts", "lse", "counts")
    for i, name in enumerate(names):
        operands = [parts, lse, counts]
        operands[i] = 1
        with pytest.raises(TypeError, match=f"^{name}: expected a torch.Tensor, got int 1"):
            merge_splits(*operands, quantized=False)
    with pytest.raises(ValueError, match=r"^parts: expected shape \(B, key heads, splits, G, D\)"):
        merge_splits(parts[..., :4], lse, counts, quantized=True)
    with pytest.raises(TypeError, match="^lse: expected float32, got torch.float64"):
        merge_splits(parts, lse.double(), counts, quantized=True)
    with pytest.raises(ValueError, match=r"^counts: expected shape \(2, 2, 3\), got \(2, 2, 1\)"):
        merge_splits(parts, lse, counts[..., :1], quantized=True)


@pytest.mark.parametrize("quantized", [False, True])
def test_backward_raises(quantized):
    parts, lse, counts, _ = attention_in_parts(2, 2, 3, 2, 16)
    out = merge_splits(parts.requires_grad_(), lse, counts, quantized=quantized)
    with pytest.raises(RuntimeError, match="merge_splits has no backward"):
        (out.scale if quantized else out).sum().backward()


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_every_variant_compiles_without_spills(dtype):
    for heads in ((32, 4, 128), (14, 2, 64), (96, 8, 128), (8, 2, 256), (6, 3, 80)):
        report = compile_report(kernel_spec(*heads, dtype))
        assert report.spill_stores == report.spill_loads == report.stack == 0
        assert report.registers <= 64


SHAPES = list(itertools.product((1, 3), ((4, 33, 8, 128), (2, 1, 7, 64), (3, 9, 1, 80), (1, 212, 4, 256))))
"""batch; key heads, splits, heads of each, values"""
