"""The paged cache of indexer keys: layout, reference backend, errors, operator, and the compiled kernels."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8moe.kernels.indexer.mqa_cache import HEAD_DIMS, append_kv, kernel_spec, new_kv_cache, read_kv
from fp8moe.quant.formats import SCALE_FORMATS
from fp8moe.quant.quantize import dequantize, quantize_1x128
from fp8moe.runtime.checks import FLOATING
from tests.errors import refused
from tests.ptxas import without_spills
from tests.random_values import random, some_slots

MARK = 0xAB


def marked_cache(num_blocks: int, head_dim: int) -> torch.Tensor:
    return new_kv_cache(num_blocks, head_dim, device="cpu").fill_(MARK)


def expected(kv_cache: torch.Tensor, k: torch.Tensor, slots: torch.Tensor, scale_format: str) -> torch.Tensor:
    """The cache with one token after the other in its place, byte by byte."""
    num_blocks, head_dim = kv_cache.shape[0], k.shape[1]
    block_bytes = 64 * head_dim + 64 * 4
    memory = bytearray(kv_cache.numpy().tobytes())
    for key, slot in zip(k, slots.tolist(), strict=True):
        if 0 <= slot < 64 * num_blocks:
            data, scale = quantize_1x128(key[None], scale_format=scale_format)
            block, place = divmod(slot, 64)
            start = block * block_bytes + place * head_dim
            memory[start : start + head_dim] = data.view(torch.uint8).numpy().tobytes()
            start = block * block_bytes + 64 * head_dim + place * 4
            memory[start : start + 4] = scale.numpy().tobytes()
    return torch.frombuffer(memory, dtype=torch.uint8).view(kv_cache.shape) if memory else kv_cache


def test_new_cache():
    cache = new_kv_cache(3, 64, device="cpu")
    assert cache.shape == (3, 64, 1, 68) and cache.dtype == torch.uint8 and cache.is_contiguous()
    assert not cache.any()
    assert new_kv_cache(0, 128, device="meta").shape == (0, 64, 1, 132)


@given(
    tokens=st.integers(0, 200),
    num_blocks=st.integers(0, 4),
    head_dim=st.sampled_from(HEAD_DIMS),
    dtype=st.sampled_from(FLOATING),
    scale_format=st.sampled_from(SCALE_FORMATS),
    seed=st.integers(0, 1000),
)
def test_every_byte(tokens, num_blocks, head_dim, dtype, scale_format, seed):
    k, slots = random(tokens, head_dim, dtype=dtype, seed=seed), some_slots(tokens, 64 * num_blocks, seed)
    cache = marked_cache(num_blocks, head_dim)
    wanted = expected(cache, k, slots, scale_format)
    assert append_kv(cache, k, slots, scale_format=scale_format) is None
    assert torch.equal(cache, wanted)


@given(
    tokens=st.integers(0, 100),
    num_blocks=st.integers(0, 3),
    head_dim=st.sampled_from(HEAD_DIMS),
    scale_format=st.sampled_from(SCALE_FORMATS),
    seed=st.integers(0, 1000),
)
def test_reads_what_was_appended(tokens, num_blocks, head_dim, scale_format, seed):
    k, slots = random(tokens, head_dim, seed=seed), some_slots(tokens, 64 * num_blocks, seed)
    cache = marked_cache(num_blocks, head_dim)
    append_kv(cache, k, slots, scale_format=scale_format)
    data, scale = read_kv(cache, slots)
    assert data.shape == (tokens, head_dim) and data.dtype == torch.float8_e4m3fn and data.is_contiguous()
    assert scale.shape == (tokens,) and scale.dtype == torch.float32 and scale.is_contiguous()
    there = (slots >= 0) & (slots < 64 * num_blocks)
    written = quantize_1x128(k, scale_format=scale_format)
    assert torch.equal(data.float(), written.data.float() * there[:, None])
    assert torch.equal(scale, written.scale[:, 0] * there)


def test_sequences_grow_block_by_block():
    block_table, keys = torch.tensor([[4, 1, 3], [0, 2, 5]]), random(2, 150, 32)
    cache = new_kv_cache(6, 32, device="cpu")
    for position in range(150):
        append_kv(cache, keys[:, position], (block_table[:, position // 64] * 64 + position % 64).int())
    position = torch.arange(150)
    for sequence in range(2):
        slots = (block_table[sequence, position // 64] * 64 + position % 64).int()
        data, scale = read_kv(cache, slots)
        assert torch.equal(dequantize((data, scale[:, None])), dequantize(quantize_1x128(keys[sequence])))
    assert torch.equal(read_kv(cache, slots.flip(0)).scale, scale.flip(0))


def test_slots_out_of_range():
    limits = torch.iinfo(torch.int32)
    cache, k = marked_cache(2, 32), random(5, 32)
    slots = torch.tensor([limits.min, limits.max, -1, 128, 127], dtype=torch.int32)
    append_kv(cache, k, slots)
    assert torch.equal(cache, expected(marked_cache(2, 32), k, slots, "float32"))
    append_kv(cache, random(4, 32, seed=1), slots[:4])  # not one of them has a slot
    assert torch.equal(cache, expected(marked_cache(2, 32), k, slots, "float32"))
    read = read_kv(cache, slots)
    assert not read.data[:4].float().any() and not read.scale[:4].any()
    assert read.data[4].float().any() and read.scale[4]


def test_shared_slots_touch_no_other():
    cache, k = marked_cache(2, 64), random(100, 64)
    slots = torch.tensor([70, 5], dtype=torch.int32).repeat(50)
    slots[99] = 7
    append_kv(cache, k, slots)
    wanted = expected(marked_cache(2, 64), k[99:], slots[99:], "float32")
    unshared = torch.tensor([slot for slot in range(128) if slot not in (5, 70)], dtype=torch.int32)
    assert torch.equal(
        read_kv(cache, unshared).data.view(torch.uint8), read_kv(wanted, unshared).data.view(torch.uint8)
    )
    assert torch.equal(read_kv(cache, unshared).scale, read_kv(wanted, unshared).scale)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_stay_in_their_slot(value):
    k, slots = random(9, 128), some_slots(9, 64, seed=2)
    k[4, 77], slots[4] = value, 63
    cache = marked_cache(1, 128)
    append_kv(cache, k, slots)
    assert torch.equal(cache, expected(marked_cache(1, 128), k, slots, "float32"))
    values = read_kv(cache, slots[4:5])
    assert (values.data.float() * values.scale[:, None]).isnan().all()


def test_zero_keys():
    cache = marked_cache(1, 64)
    append_kv(cache, torch.zeros(2, 64), torch.tensor([3, 9], dtype=torch.int32))
    data, scale = read_kv(cache, torch.tensor([9], dtype=torch.int32))
    assert not data.float().any() and scale.item() == pytest.approx(1e-12 / 448, rel=1e-6)


def test_part_of_a_cache():
    cache, k, slots = marked_cache(4, 32), random(3, 32), torch.tensor([63, 64, -1], dtype=torch.int32)
    append_kv(cache[1:3], k, slots)
    assert torch.equal(cache[1:3], expected(marked_cache(2, 32), k, slots, "float32"))
    assert (cache[[0, 3]] == MARK).all()


def test_keys_may_require_gradients():
    cache, k = marked_cache(1, 32), random(2, 32).requires_grad_()
    slots = torch.tensor([1, 0], dtype=torch.int32)
    append_kv(cache, k, slots)
    assert torch.equal(cache, expected(marked_cache(1, 32), k.detach(), slots, "float32"))
    assert not cache.requires_grad and not read_kv(cache, slots).scale.requires_grad


# ---- errors ----


def test_new_cache_errors():
    refused(ValueError, "^num_blocks: expected 0 or more, got -1", new_kv_cache, -1, 64, device="cpu")
    refused(ValueError, r"^head_dim: expected one of \(32, 64, 128\), got 48", new_kv_cache, 1, 48, device="cpu")


def test_errors():
    cache, k, slots = new_kv_cache(2, 64, device="cpu"), torch.zeros(4, 64), torch.zeros(4, dtype=torch.int32)
    for call in (lambda *operands: append_kv(operands[0], k, operands[1]), read_kv):
        for wrong in (cache[..., :52], cache.flatten(2), cache[:, :32], cache.expand(2, 64, 3, 68)):
            refused(ValueError, r"^kv_cache: expected shape \(num_blocks, 64, 1, D \+ 4\) .* got", call, wrong, slots)
        with pytest.raises(ValueError, match="^kv_cache: expected a contiguous tensor, got strides"):
            call(new_kv_cache(2, 128, device="cpu")[..., :68], slots)
        refused(ValueError, r"^slots: expected shape .*, got \(1, 4\)", call, cache, slots[None])
        refused(ValueError, "^slots: expected on cpu like kv_cache, got meta", call, cache, slots.to("meta"))
    for wrong in (k[:, :32], k[0], k[None]):
        refused(ValueError, r"^k: expected shape \(T, 64\) to match the cache, got", append_kv, cache, wrong, slots)
    refused(ValueError, r"^slots: expected shape \(4,\), got \(3,\)", append_kv, cache, k, slots[:3])
    with pytest.raises(ValueError, match="^scale_format: expected one of .*'ue8m0'.*got 'e8m0'"):
        append_kv(cache, k, slots, scale_format="e8m0")
    unaligned = torch.zeros(cache.numel() + 8, dtype=torch.uint8)[8:].view(cache.shape)
    with pytest.raises(ValueError, match="^kv_cache: expected to start at a multiple of 16 bytes, got address"):
        append_kv(unaligned, k, slots)


# ---- kernels ----


@pytest.mark.parametrize("head_dim,dtype,ue8m0", list(itertools.product(HEAD_DIMS, FLOATING, (False, True))))
def test_every_variant_compiles_without_spills(head_dim, dtype, ue8m0):
    report = without_spills(kernel_spec(head_dim, dtype, ue8m0))
    assert report.static_smem == 0
    assert report.registers <= 32  # 64 warps on an SM of 65536 registers
