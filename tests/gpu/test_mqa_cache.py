"""The kernel that appends to the paged cache writes the bytes of the reference, and no others."""

import itertools
import math
from functools import partial

import pytest
import torch

from fp8moe.kernels.indexer import reference
from fp8moe.kernels.indexer.mqa_cache import HEAD_DIMS, append_kv, new_kv_cache, read_kv
from fp8moe.quant.formats import SCALE_FORMATS
from fp8moe.quant.quantize import quantize_1x128
from fp8moe.runtime.checks import FLOATING
from tests import random_values

pytestmark = pytest.mark.gpu

SIZES = ((1, 1), (2, 1), (3, 9), (7, 2), (63, 1), (65, 3), (130, 5), (515, 9), (5000, 90))
MARK = 0xAB
random = partial(random_values.random, device="cuda")
some_slots = partial(random_values.some_slots, device="cuda")


def append(num_blocks: int, k: torch.Tensor, slots: torch.Tensor, scale_format: str = "float32") -> torch.Tensor:
    """A cache marked before, after the kernel, with nothing written on either side of it."""
    size, guard = num_blocks * 64 * (k.shape[1] + 4), 256
    memory = torch.full((guard + size + guard,), MARK, dtype=torch.uint8, device="cuda")
    cache = memory[guard : guard + size].view(num_blocks, 64, 1, k.shape[1] + 4)
    append_kv(cache, k, slots, scale_format=scale_format)
    assert (memory[:guard] == MARK).all() and (memory[guard + size :] == MARK).all()
    return cache


def expected(num_blocks: int, k: torch.Tensor, slots: torch.Tensor, scale_format: str = "float32") -> torch.Tensor:
    cache = new_kv_cache(num_blocks, k.shape[1], device=k.device).fill_(MARK)
    reference.append_kv(cache, k, slots, scale_format == "ue8m0")
    return cache


def assert_matches(num_blocks, k, slots, scale_format="float32"):
    assert torch.equal(append(num_blocks, k, slots, scale_format), expected(num_blocks, k, slots, scale_format))


@pytest.mark.parametrize("tokens,num_blocks", SIZES)
@pytest.mark.parametrize("head_dim,dtype,scale_format", list(itertools.product(HEAD_DIMS, FLOATING, SCALE_FORMATS)))
def test_sizes(tokens, num_blocks, head_dim, dtype, scale_format):
    k, slots = random(tokens, head_dim, dtype=dtype), some_slots(tokens, 64 * num_blocks)
    assert_matches(num_blocks, k, slots, scale_format)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", FLOATING)
def test_bits_of_the_quantizer(head_dim, dtype):
    k = random(640, head_dim, dtype=dtype, spread=40.0)
    k[0], k[1, 3], k[2, 5], k[3, head_dim - 1] = 0.0, math.nan, math.inf, -math.inf
    slots = torch.randperm(640, device="cuda").int()
    for scale_format in SCALE_FORMATS:
        cache = append(10, k, slots, scale_format)
        data, scale = read_kv(cache, slots)
        wanted = quantize_1x128(k, scale_format=scale_format)
        assert torch.equal(data.view(torch.uint8), wanted.data.view(torch.uint8))
        assert torch.equal(scale.view(torch.int32), wanted.scale[:, 0].contiguous().view(torch.int32))
        assert torch.equal(cache.cpu(), expected(10, k.cpu(), slots.cpu(), scale_format))


def test_slots_out_of_range():
    limits = torch.iinfo(torch.int32)
    slots = torch.tensor([limits.min, limits.max, -1, 128, 127, -64, 192], dtype=torch.int32, device="cuda")
    for head_dim in HEAD_DIMS:
        assert_matches(2, random(7, head_dim), slots)
        assert (append(2, random(4, head_dim), slots[:4]) == MARK).all()
        read = read_kv(append(2, random(7, head_dim), slots), slots)
        assert (read.scale != 0).tolist() == [False, False, False, False, True, False, False]


def test_shared_slots_touch_no_other():
    k, slots = random(3000, 128, dtype=torch.bfloat16), torch.full((3000,), 70, dtype=torch.int32, device="cuda")
    slots[1::2], slots[2999] = 5, 7
    cache = append(2, k, slots)
    for shared in (5, 70):
        for start, size in ((shared % 64 * 128, 128), (64 * 128 + shared % 64 * 4, 4)):
            cache[shared // 64].view(-1)[start : start + size] = MARK
    assert torch.equal(cache, expected(2, k[2999:], slots[2999:]))


@pytest.mark.parametrize("tokens,num_blocks", [(0, 2), (3, 0), (0, 0)])
def test_empty(tokens, num_blocks):
    slots = torch.zeros(tokens, dtype=torch.int32, device="cuda")
    assert (append(num_blocks, random(tokens, 64), slots) == MARK).all()
    assert read_kv(new_kv_cache(num_blocks, 64, device="cuda"), slots).data.shape == (tokens, 64)


def test_past_two_to_the_31_elements():
    num_blocks = (1 << 18) + 1
    tokens = num_blocks * 64
    k = torch.empty(tokens, 128, dtype=torch.bfloat16, device="cuda").normal_()
    assert k.numel() > 1 << 31
    slots = torch.arange(tokens, dtype=torch.int32, device="cuda").flip(0)
    cache = new_kv_cache(num_blocks, 128, device="cuda")
    assert cache.numel() > 1 << 31
    append_kv(cache, k, slots)
    middle = tokens // 2 - tokens // 2 % 64
    for start in (0, middle, tokens - 640):
        # Their slots are the last blocks of the cache, some in the middle, the first ones.
        blocks = slice((tokens - start - 640) // 64, (tokens - start) // 64)
        some = slice(start, start + 640)
        assert torch.equal(cache[blocks], expected(10, k[some], slots[some] - blocks.start * 64))
