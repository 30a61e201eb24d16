"""Latent attention on the reference backend, its errors, and its kernels as they compile."""

from itertools import product

import pytest
import torch

import fp8moe
from fp8moe.kernels.latent import latent_attention
from fp8moe.kernels.latent.fp8_latents import dequantize_latents
from fp8moe.kernels.latent.sm90 import ROWS, attention_spec, merge_spec, rows_together
from tests import latent_cases
from tests.errors import refused
from tests.ptxas import without_spills

SIZES = {"value_size": 32, "scale": 0.2}


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("queries", [1, 3])
def test_against_float64(queries, paged):
    q, *others = latent_cases.operands([130, 2, 0, 64], queries=queries, heads=5, width=48, paged=paged)
    q, latents, lengths, table = q.float(), others[0].float(), *others[1:]
    found = latent_attention(q, latents, lengths, block_table=table, **SIZES)
    torch.testing.assert_close(
        found.double(), latent_cases.expected(q, latents, lengths, table, **SIZES), atol=1e-5, rtol=1e-5
    )
    assert found.dtype == torch.float32 and (found[2] == 0).all()


@pytest.mark.parametrize("size", [32, 200])
def test_latents_in_fp8(size):
    q, latents, lengths, table = latent_cases.operands([130, 2, 64], queries=2, heads=5, width=size + 16, paged=True)
    coded = fp8moe.quantize_latents(latents.nan_to_num(), value_size=size)
    assert coded.shape == (*latents.shape[:2], size + 4 * (1 + size // 128) + 32) and coded.dtype == torch.uint8
    values = dequantize_latents(coded, value_size=size)
    assert torch.equal(values[..., size:], latents.nan_to_num()[..., size:])
    data, scale = fp8moe.quantize_1x128(latents.nan_to_num()[..., :size].flatten(0, 1).contiguous())
    assert torch.equal(values[..., :size].flatten(0, 1), fp8moe.dequantize(fp8moe.FP8Tensor(data, scale)).bfloat16())
    sizes = {"value_size": size, "scale": 0.2}
    found = latent_attention(q, coded, lengths, block_table=table, **sizes)
    expected = latent_cases.expected(q, values, lengths, table, **sizes)
    torch.testing.assert_close(found.double(), expected, atol=1e-2, rtol=1e-2)


def test_what_cannot_be_quantized_is_refused_by_name():
    x = torch.zeros(3, 48)
    refused(TypeError, "^latents: expected", fp8moe.quantize_latents, x.double(), value_size=32)
    refused(ValueError, "^value_size: expected 1 to 48", fp8moe.quantize_latents, x, value_size=49)
    refused(ValueError, "^value_size: expected a multiple of 4", fp8moe.quantize_latents, x, value_size=30)


def test_latents_before_the_first_are_not_seen():
    q, latents, lengths, _ = latent_cases.operands([130, 2, 0, 64], queries=3, heads=5, width=48)
    begin = torch.tensor([70, 2, 0, -4], dtype=torch.int32)
    latents[0, :70] = torch.nan
    how = {"begin": begin, **SIZES}
    found = latent_attention(q.float(), latents.float(), lengths, **how)
    expected = latent_cases.expected(q.float(), latents.float(), lengths, None, **how)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)


def test_chosen_latents():
    q, latents, lengths, _ = latent_cases.operands([130, 2], queries=2, heads=5, width=48)
    indices = torch.randperm(130)[:40].int().expand(2, 2, 40).clone()
    indices[0, 1, :7] = torch.tensor([-1, 130, 999, -(2**31), 2**31 - 1, 131, -5])
    found = latent_attention(q.float(), latents.float(), lengths, indices=indices, **SIZES)
    expected = latent_cases.expected(q.float(), latents.float(), lengths, None, indices=indices, **SIZES)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)
    everything = torch.randperm(130).int().expand(2, 1, 130)
    one = latent_attention(q[:, 1:].float(), latents.float(), lengths, indices=everything, **SIZES)
    whole = latent_attention(q[:, 1:].float(), latents.float(), lengths, **SIZES)
    torch.testing.assert_close(one, whole, atol=1e-5, rtol=1e-5)


def test_lengths_and_blocks_out_of_range_are_clamped():
    q, latents, _, table = latent_cases.operands([128, 128], paged=True, width=48)
    far = torch.tensor([2**31 - 1, -3], dtype=torch.int32)
    table[0, 0], table[1] = 2**31 - 1, -9
    found = latent_attention(q.float(), latents.nan_to_num().float(), far, block_table=table, **SIZES)
    last = table.clone()
    last[0, 0] = len(latents) - 1
    near = torch.tensor([128, 0], dtype=torch.int32)
    assert torch.equal(
        found, latent_attention(q.float(), latents.nan_to_num().float(), near, block_table=last.clamp(0), **SIZES)
    )


def test_wrong_operands_are_refused_by_name():
    q, latents, lengths, table = latent_cases.operands([70, 3], paged=True, width=48)
    for error, message, change in (
        (TypeError, "^q: expected", {"q": q.double()}),
        (ValueError, r"^q: expected shape \(B, T, heads", {"q": q[0]}),
        (TypeError, "^latents: expected bfloat16 or uint8", {"latents": latents.float()}),
        (ValueError, r"^latents: expected shape \(blocks, 64, 48\)", {"latents": latents[:, :32]}),
        (ValueError, "^latents: expected a contiguous tensor", {"latents": latents[::2]}),
        (ValueError, r"^latents: expected shape \(2, L, 48\)", {"block_table": None}),
        (TypeError, "^lengths: expected int32", {"lengths": lengths.long()}),
        (ValueError, "^value_size: expected 1 to 48", {"value_size": 49}),
        (TypeError, "^indices: expected int32", {"indices": torch.zeros(2, 1, 4)}),
        (ValueError, r"^indices: expected shape \(2, 1\) and k", {"indices": torch.zeros(2, 4).int()}),
        (ValueError, r"^block_table: expected shape \(2, max_blocks\)", {"block_table": table[:1]}),
        (TypeError, "^begin: expected int32", {"begin": lengths.long()}),
        (ValueError, "^begin: expected None with indices or a block_table", {"begin": lengths}),
    ):
        given = {"q": q, "latents": latents, "lengths": lengths, "block_table": table, **SIZES} | change
        refused(error, message, latent_attention, **given)


def test_kernels_compile_without_spills():
    together = {(rows_together(rows, codes), codes) for rows in ROWS for codes in (False, True)}
    for (rows, codes), chosen in product(sorted(together), (False, True)):
        assert not without_spills(attention_spec(chosen, rows, codes)).complaints
    for rows, parts in product(ROWS, (1, 16)):
        assert not without_spills(merge_spec(132, parts, rows)).complaints
