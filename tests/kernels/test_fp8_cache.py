"""A cache in FP8: what `rotary` and `decode_attention` write to it, and attention over it; the compiled kernels."""

import pytest
import torch

import fp8moe
from fp8moe.kernels.decoder_ops import fp8_cache, rotary
from fp8moe.kernels.decoder_ops.decode_attention import AttentionHeads, FixedSplitHeads, kernel_spec
from fp8moe.kernels.decoder_ops.prompt_attention import prompt_attention
from fp8moe.quant.formats import FP8Tensor
from fp8moe.quant.quantize import quantize_1x128
from tests import decode_attention_cases
from tests.decode_attention_cases import FP8_SHAPES, bits, copied, in_fp8
from tests.kernels import test_rotary
from tests.ptxas import without_spills


def attend(operands, **how):
    return decode_attention_cases.attend(*operands, **how)


@pytest.mark.parametrize("size", [16, 64, 128])
def test_a_head_is_quantized_as_a_block(size):
    x = torch.randn(2, 3, 5, size).bfloat16()
    x[0, 0, 0], x[0, 0, 1] = 0, 1e-20
    x[1, 2, 3, 4], x[1, 2, 4, 0] = torch.nan, -torch.inf
    found, expected = fp8_cache.quantized(x), quantize_1x128(x)
    assert found.scale.shape == (2, 3, 5, 1) and found.scale.dtype == torch.float32
    assert torch.equal(found.data.view(torch.uint8), expected.data.view(torch.uint8))
    assert torch.equal(found.scale.nan_to_num(7), expected.scale.nan_to_num(7))
    whole = x[1, 0].float()
    assert (
        (fp8_cache.quantized(x).data[1, 0].float() * found.scale[1, 0] - whole).abs() <= whole.abs() / 16 + 1e-3
    ).all()


@pytest.mark.parametrize("form", [(8, 2, 128, 64, True), (4, 4, 64, 64, False), (6, 2, 256, 256, True)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rotary_writes_what_it_would_write_quantized(form, dtype):
    (*given, keys, values), columns, weights = test_rotary.operands(3, 4, form, dtype)
    columns[0], columns[1] = -2, 5  # some tokens have no place
    caches = [fp8_cache.quantized(cache) for cache in (keys, values)]
    query = test_rotary.run(*given, *caches, columns, **weights)
    assert torch.equal(query, test_rotary.run(*given, keys, values, columns, **weights))
    for cache, expected in zip(caches, (keys, values), strict=True):
        assert torch.equal(bits(cache), bits(fp8_cache.quantized(expected)))


@pytest.mark.parametrize(("batch", "heads", "length", "window"), FP8_SHAPES, ids=str)
@pytest.mark.parametrize("appends", [False, True])
@pytest.mark.parametrize("sinks", [None, torch.bfloat16, torch.float32], ids=str)
def test_one_token_against_float64(batch, heads, length, window, appends, sinks):
    window = window and min(window, 60)
    operands, new = decode_attention_cases.make(min(batch, 5), heads, min(length, 90), window=window)
    operands = in_fp8(*operands)
    if not appends:
        _, *cache = decode_attention_cases.expected(*operands, new)
        operands, new = (operands[0], *cache, *operands[3:]), None
    how = {"new": new, "window": window, "sinks": decode_attention_cases.make_sinks(heads, sinks)}
    expected, *caches = decode_attention_cases.expected(*operands, **how)
    out = attend(operands, **how)
    assert (out.double() - expected).norm() <= 4e-3 * expected.norm()
    for cache, filled in zip(operands[1:3], caches, strict=True):
        assert torch.equal(bits(cache), bits(filled))
    codes = quantize_1x128(out)
    quantized = attend(operands, **how, quantized=True)
    assert torch.equal(quantized.data.view(torch.uint8), codes.data.view(torch.uint8))


def test_a_new_token_sees_itself_as_it_is_cached():
    """So the step that appends has the result of one that finds the token in the cache."""
    operands, new = decode_attention_cases.make(4, (3, 2, 64, 64, False), 40)
    operands = in_fp8(*operands)
    tokens = rotary.NewTokens(*(x[:, None] for x in new[:4]), *new[4:])
    keys, values = (copied(cache) for cache in operands[1:3])
    query = rotary.rotary(operands[0][:, None], tokens, keys, values, columns=operands[4])[:, 0]
    assert torch.equal(attend(operands, new=new), attend((query, keys, values, *operands[3:])))
    only = operands[1].data.shape[0] - 1  # `make`: the last row has one key, its own
    value = FP8Tensor(*(part[only, :, operands[4][only]] for part in operands[2]))
    alone = (value.data.float() * value.scale).bfloat16().repeat_interleave(3, 0)
    assert torch.equal(attend(operands, new=new)[only], alone.flatten())


@pytest.mark.parametrize(("batch", "heads", "length", "window"), FP8_SHAPES[:5], ids=str)
def test_batch_invariant_bits_are_those_of_a_converted_cache(batch, heads, length, window):
    """And those of `prompt_attention`, which reads the cache converted."""
    operands, new = decode_attention_cases.make(min(batch, 4), heads, min(length, 150), window=window)
    q, keys, values, begin, columns = operands = in_fp8(*operands)
    _, keys, values = decode_attention_cases.expected(*operands, new)
    converted = [fp8_cache.dequantized(cache, q.dtype) for cache in (keys, values)]
    with fp8moe.batch_invariant():
        out = attend((q, keys, values, begin, columns), window=window)
        assert torch.equal(out, attend((q, *converted, begin, columns), window=window))
    for b in range(len(q)):
        count = int(columns[b] + 1 - begin[b])
        rows = [cache[b, :, begin[b] : columns[b] + 1].transpose(0, 1) for cache in converted]
        sequences = torch.tensor([[0, 1], [0, count], [count, 0]], dtype=torch.int32)
        prompt, _ = prompt_attention(q[b, None], *rows, sequences, most_queries=1, window=window)
        assert torch.equal(prompt.flatten(), out[b])


def test_what_is_not_finite_stays_in_its_head():
    operands, new = decode_attention_cases.make(3, (4, 2, 64, 64, True), 30)
    operands = in_fp8(*operands)
    before = attend((operands[0], *map(copied, operands[1:3]), *operands[3:]), new=new).view(3, 8, 64)
    new.v[0, 1, 7], new.k[2, 0, 3] = torch.inf, torch.nan
    after = attend(operands, new=new).view(3, 8, 64)
    bad = torch.zeros(3, 8, dtype=torch.bool)
    bad[0, 4:], bad[2, :4] = True, True
    assert after[bad].isnan().all(), "a head has one scale"
    assert torch.equal(after[~bad], before[~bad])


def test_no_keys_give_zero_and_places_outside_are_not_written():
    operands, new = decode_attention_cases.make(3, (2, 2, 16, 16, True), 8)
    q, keys, values, begin, columns = operands = in_fp8(*operands)
    columns[:], begin[:] = torch.tensor([3, 8, -1]), torch.tensor([4, 8, 0])
    before = copied(keys), copied(values)
    assert (attend(operands, new=new) == 0).all()
    for cache, old in zip((keys, values), before, strict=True):
        for part, old_part in zip(cache, old, strict=True):
            old_part[0, :, 3] = part[0, :, 3]
        assert torch.equal(bits(cache), bits(old))


def test_errors():
    operands, new = decode_attention_cases.make(2, (2, 2, 16, 16, True), 8)
    q, keys, values, *places = in_fp8(*operands)

    def message(error, pattern, keys=keys, values=values, **how):
        with pytest.raises(error, match=pattern):
            attend((q, keys, values, *places), **how)

    as_bytes, flat = keys.data.view(torch.uint8), keys.scale[..., 0]
    message(TypeError, "^values: expected an FP8Tensor if keys are one", values=operands[2])
    message(TypeError, "^keys.scale: expected a torch.Tensor, got None", keys=FP8Tensor(keys.data, None))
    message(TypeError, "^keys: expected float8_e4m3fn, got torch.uint8", keys=FP8Tensor(as_bytes, keys.scale))
    halved = FP8Tensor(values.data, values.scale.bfloat16())
    message(TypeError, "^values.scale: expected float32, got torch.bfloat16", values=halved)
    message(ValueError, r"^keys.scale: expected shape \(2, 2, 8, 1\), got \(2, 2, 8\)", keys=FP8Tensor(keys.data, flat))
    turned = FP8Tensor(keys.data.mT.contiguous().mT, keys.scale)
    message(ValueError, "^keys: expected a contiguous tensor", keys=turned)
    operands, new = decode_attention_cases.make(2, (2, 2, 24, 16, True), 8)
    needed = "^keys: FP8 needs q in bfloat16 or float16 and heads of a multiple of 16 values, got "
    with pytest.raises(ValueError, match=f"{needed}torch.bfloat16 and 24"):
        attend(in_fp8(*operands), new=new)
    given, _, _ = test_rotary.operands(1, 2, (2, 2, 16, 16, False))
    caches = map(fp8_cache.quantized, given[5:])
    with pytest.raises(ValueError, match=f"{needed}torch.float32 and 16"):
        test_rotary.run(*given[:5], *caches)


def test_variants_compile_without_spills():
    shapes = sorted({heads for _, heads, *_ in FP8_SHAPES})
    for kind in (AttentionHeads, FixedSplitHeads):
        for group, key_heads, size, rotated, norm in shapes:
            for new, cluster in ((1, 1), (1, 8), (0, 1)):
                heads = kind(group, key_heads, size, rotated if new else None, bool(norm and new), fp8=True)
                without_spills(kernel_spec(torch.bfloat16, heads, cluster))
        without_spills(kernel_spec(torch.float16, kind(8, 4, 128, 128, True, fp8=True), 8))
    for heads, key_heads, size, rotated, norm in test_rotary.FORMS:
        for dtype, many in ((torch.bfloat16, False), (torch.bfloat16, True), (torch.float16, True)):
            form = rotary.RotaryHeads(heads, key_heads, size, rotated, norm, fp8=True)
            without_spills(rotary.kernel_spec(dtype, form, many))


def test_tiles_of_codes_take_as_much_shared_memory_as_others():
    """So that as many thread blocks share an SM."""
    for size in (64, 128, 256):
        heads = AttentionHeads(8, 4, size, size, True)
        other = heads._replace(fp8=True)
        assert other.stages(1) == heads.stages(1)
        assert other.smem(3, 1) <= 1.07 * heads.smem(3, 1)
