"""Keys and values in FP8 on the GPU: the kernels against float64, their bits, long contexts, and whole decoders."""

import pytest
import torch

import fp8moe
from fp8moe.decode import GraphDecoder
from fp8moe.hf import register
from fp8moe.kernels.decoder_ops import fp8_cache
from fp8moe.kernels.decoder_ops.decode_attention import DTYPES, StaticCache, decode_attention
from fp8moe.kernels.decoder_ops.prompt_attention import prompt_attention
from fp8moe.kernels.decoder_ops.rotary import NewTokens, rotary
from fp8moe.quant.formats import FP8Tensor
from fp8moe.quant.quantize import quantize_1x128
from tests import decode_attention_cases, prompt_attention_cases
from tests.decode_attention_cases import FP8_SHAPES, bits, copied, in_fp8, moved
from tests.gpu.test_decode import make_model
from tests.kernels import test_rotary
from tests.transformers_models import left_padded, prompts

pytest.importorskip("transformers")

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
FP8 = torch.float8_e4m3fn
LONG = 131_072
EDGES = [(2, (8, 2, 128, 128, True), length, None) for length in (1, 2, 15, 16, 17, 31, 32, 33, 127, 128, 129, 1023)]
"""Lengths around the ends of tiles, and of the tiles of all warps."""


def one_token(batch, heads, length, dtype=torch.bfloat16, seed=0, window=None):
    """Operands on the CPU and on the GPU, and the new tokens on the CPU."""
    operands, new = decode_attention_cases.make(batch, heads, length, dtype, seed, window)
    operands = in_fp8(*operands)
    return operands, [moved(value, DEVICE) for value in operands], new


def attend(given, **how):
    return decode_attention_cases.attend(*given, **how)


def poison(batch, heads, dtype):
    """Fill what torch.empty will return for a result with NaN."""
    torch.full((batch, heads[0] * heads[1] * heads[2]), torch.nan, device=DEVICE, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sinks", [None, "dtype of q", torch.float32], ids=str)
@pytest.mark.parametrize(("batch", "heads", "length", "window"), [*FP8_SHAPES, *EDGES], ids=str)
def test_one_token_against_float64(batch, heads, length, window, sinks, dtype):
    operands, given, new = one_token(batch, heads, length, dtype, window=window)
    sinks = decode_attention_cases.make_sinks(heads, dtype if sinks == "dtype of q" else sinks)
    how = {"window": window, "sinks": moved(sinks, DEVICE)}
    # Repeats have equal bits; the first of them appends the new token, and the others write it again.
    poison(batch, heads, dtype)
    results = [attend(given, new=moved(new, DEVICE), **how, early=i % 2 == 1) for i in range(20)]
    assert all(torch.equal(result, results[0]) for result in results) and not results[0].isnan().any()
    quantized, codes = attend(given, new=moved(new, DEVICE), **how, quantized=True), quantize_1x128(results[0])
    assert torch.equal(quantized.data.view(torch.uint8), codes.data.view(torch.uint8))
    assert torch.equal(quantized.scale, codes.scale)
    # What was appended: norms may differ in the last bit from the CPU's, which may round a code otherwise.
    expected, *caches = decode_attention_cases.expected(*operands, new, window, sinks)
    for cache, filled in zip(given[1:3], caches, strict=True):
        got, wanted = (decode_attention_cases.exact(moved(x, "cpu")) for x in (cache, filled))
        assert torch.equal(got.isnan(), wanted.isnan())
        assert (got.nan_to_num(0) - wanted.nan_to_num(0)).norm() <= 1e-2 * wanted.nan_to_num(0).norm()
    assert torch.equal(bits(given[2]), bits(caches[1])), "values have neither norm nor rotation"
    assert (results[0].double().cpu() - expected).norm() <= 8e-3 * expected.norm()
    # With the queries as they are and the cache as it is now, nothing but the attention differs.
    kept = attend(given, **how)
    cache = [moved(x, "cpu") for x in given[1:3]]
    expected, *_ = decode_attention_cases.expected(operands[0], *cache, *operands[3:], None, window, sinks)
    assert (kept.double().cpu() - expected).norm() <= torch.finfo(dtype).eps * expected.norm()


@pytest.mark.parametrize("form", [*test_rotary.FORMS, (6, 3, 80, 80, False)], ids=str)
@pytest.mark.parametrize(("batch", "tokens"), [(1, 1), (3, 5), (2, 300)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rotary_writes_what_it_would_write_quantized(form, batch, tokens, dtype):
    (*given, keys, values), columns, weights = test_rotary.operands(batch, tokens, form, dtype)
    columns[0] = -tokens // 2  # some tokens have no place
    caches = [fp8_cache.quantized(cache) for cache in (keys, values)]
    given, caches, others = ([moved(x, DEVICE) for x in part] for part in (given, caches, (keys, values)))
    weights = {name: moved(value, DEVICE) for name, value in weights.items()}
    columns = columns.to(DEVICE)
    query = test_rotary.run(*given, *caches, columns, **weights)
    assert torch.equal(query, test_rotary.run(*given, *others, columns, **weights))
    for cache, written in zip(caches, others, strict=True):
        assert torch.equal(bits(cache), bits(fp8_cache.quantized(written.cpu())))


@pytest.mark.parametrize("norm", [False, True])
def test_a_step_appends_what_a_prompt_would(norm):
    _, given, new = one_token(5, (8, 4, 128, 64, norm), 300)
    new, others = moved(new, DEVICE), [copied(cache) for cache in given[1:3]]
    attend(given, new=new)
    tokens = NewTokens(*(x[:, None] for x in new[:4]), *new[4:])
    rotary(given[0][:, None], tokens, *others, columns=given[4])
    for cache, other in zip(given[1:3], others, strict=True):
        assert torch.equal(bits(cache), bits(other))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("batch", "heads", "length", "window"), [*FP8_SHAPES, *EDGES], ids=str)
def test_batch_invariant_bits_are_those_of_a_converted_cache(batch, heads, length, window, dtype):
    """The kernel that converts tiles, those of 16 bits over a converted cache, and that of prompts agree bit by bit."""
    _, given, new = one_token(batch, heads, length, dtype, window=window)
    with fp8moe.batch_invariant():
        results = [attend(given, new=moved(new, DEVICE), window=window, early=i % 2 == 1) for i in range(5)]
        assert all(torch.equal(result, results[0]) for result in results)
        out = attend(given, window=window)
        q, keys, values, begin, columns = given
        converted = [fp8_cache.dequantized(cache, dtype) for cache in (keys, values)]
        assert torch.equal(out, attend((q, *converted, begin, columns), window=window))
        alone = [part[-1:] for part in (q, begin, columns)]
        last = [FP8Tensor(*(part[-1:] for part in cache)) for cache in (keys, values)]
        assert torch.equal(attend((alone[0], *last, *alone[1:]), window=window)[0], out[-1]), "the row is alone"
    for b in range(min(batch, 3)):
        count = int(columns[b] + 1 - begin[b])
        rows = [cache[b, :, begin[b] : columns[b] + 1].transpose(0, 1) for cache in converted]
        sequences = torch.tensor([[0, 1], [0, count], [count, 0]], dtype=torch.int32, device=DEVICE)
        prompt, _ = prompt_attention(q[b, None], *rows, sequences, most_queries=1, window=window)
        assert prompt_attention_cases.same(prompt.flatten(), out[b])


@pytest.mark.parametrize("invariant", [False, True])
def test_what_is_not_finite_stays_in_its_head(invariant):
    _, given, new = one_token(3, (8, 4, 128, 128, True), 200)
    new = moved(new, DEVICE)
    with fp8moe.batch_invariant(invariant):
        before = attend((given[0], *map(copied, given[1:3]), *given[3:]), new=new).view(3, 32, 128)
        given[0][1, 5, 3] = torch.nan
        new.v[2, 1, 7], new.k[0, 3, 0] = torch.inf, torch.nan
        given[2].scale[1, 2, given[4][1] - 1] = torch.inf if given[4][1] > given[3][1] else torch.nan
        after = attend(given, new=new).view(3, 32, 128)
    bad = torch.zeros(3, 32, dtype=torch.bool, device=DEVICE)
    bad[1, 5], bad[2, 8:16], bad[0, 24:] = True, True, True
    if given[4][1] > given[3][1]:
        bad[1, 16:24] = True
    assert not after[bad].isfinite().any(), "a head has one scale"
    assert torch.equal(after[~bad], before[~bad])


@pytest.mark.parametrize("factor", [1e-30, 1e-6, 1e4, 1e30])
@pytest.mark.parametrize("large", ["queries", "values"])
def test_magnitudes_that_float16_does_not_hold(factor, large):
    (q, keys, values, begin, columns), _, _ = one_token(4, (8, 2, 128, 128, False), 100)
    if large == "queries":
        q, keys = (q.double() * factor).bfloat16(), keys._replace(scale=(keys.scale.double() / factor).float())
    else:
        values = values._replace(scale=(values.scale.double() * factor).float())
    operands = q, keys, values, begin, columns - 1  # the new token is not in the cache
    expected, *_ = decode_attention_cases.expected(*operands, None)
    found = attend([moved(x, DEVICE) for x in operands]).double().cpu()
    seen = columns - 1 >= begin
    assert seen.any() and (found[~seen] == 0).all()
    assert (found - expected)[seen].norm() <= 8e-3 * expected[seen].norm()


def test_values_of_very_different_magnitudes():
    """One value that is 1000 times as large as the others and has hardly any weight leaves them as exact."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 8, 128, generator=generator).bfloat16()
    keys, values = (torch.randn(1, 1, 5000, 128, generator=generator).bfloat16() for _ in range(2))
    for place in (0, 2500, 4999):
        large, away = values.clone(), keys.clone()
        large[0, 0, place] *= 1000
        away[0, 0, place] = -3 * q.mean(1) / q.mean(1).norm() * 128**0.5
        places = torch.zeros(1, dtype=torch.int64), torch.tensor([4999])
        operands = q, fp8_cache.quantized(away), fp8_cache.quantized(large), *places
        expected, *_ = decode_attention_cases.expected(*operands, None)
        found = attend([moved(x, DEVICE) for x in operands]).double().cpu()
        assert (found - expected).norm() <= 8e-3 * expected.norm()


def test_no_keys_give_zero_and_places_outside_are_not_written():
    for invariant in (False, True):
        _, given, new = one_token(3, (8, 2, 128, 128, True), 100)
        given[4].copy_(torch.tensor([3, 100, -1]))
        given[3].copy_(torch.tensor([4, 100, 0]))
        before = [copied(cache) for cache in given[1:3]]
        with fp8moe.batch_invariant(invariant):
            assert (attend(given, new=moved(new, DEVICE)) == 0).all()
        for cache, old in zip(given[1:3], before, strict=True):
            for part, old_part in zip(cache, old, strict=True):
                old_part[0, :, 3] = part[0, :, 3]  # within the cache, before the first key
            assert torch.equal(bits(cache), bits(old))


@pytest.mark.parametrize("invariant", [False, True])
def test_one_token_in_a_graph_whose_columns_move_on(invariant):
    _, given, new = one_token(4, (8, 4, 128, 128, True), 300)
    for cache in given[1:3]:
        cache.data.copy_(torch.randn(cache.data.shape, device=DEVICE).to(FP8)), cache.scale.fill_(0.5)
    given[3].zero_()
    given[4].copy_(torch.tensor([0, 15, 100, 250]))
    new = moved(new, DEVICE)
    with fp8moe.batch_invariant(invariant):
        attend(given, new=new, quantized=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = attend(given, new=new, quantized=True, early=True)
        for step in range(40):
            given[4] += 1
            new.k.normal_(), new.v.normal_(), given[0].normal_()
            caches = [copied(cache) for cache in given[1:3]]
            expected = attend((given[0].clone(), *caches, *given[3:]), new=new, quantized=True)
            graph.replay()
            assert torch.equal(out.data.view(torch.uint8), expected.data.view(torch.uint8)), step
            assert torch.equal(out.scale, expected.scale)
            assert all(torch.equal(bits(cache), bits(other)) for cache, other in zip(given[1:3], caches, strict=True))


def test_more_than_two_to_the_31_elements():
    """The last sequence begins behind 2^31 codes."""
    batch, tokens = 40, 1 << 17  # 40 * 4 * 2^17 * 128 codes
    shape = batch, 4, tokens, 128
    keys, values = (
        FP8Tensor(torch.zeros(shape, dtype=FP8, device=DEVICE), torch.ones((*shape[:3], 1), device=DEVICE))
        for _ in range(2)
    )
    q = torch.randn(batch, 32, 128, device=DEVICE).bfloat16()
    columns = torch.full((batch,), tokens - 1, device=DEVICE)
    rows = torch.randn(2, 1, 4, 100, 128, device=DEVICE).bfloat16()
    for cache, new in zip((keys, values), rows, strict=True):
        for target, part in zip(cache, fp8_cache.quantized(new), strict=True):
            target[-1:, :, -100:] = part
    begin = columns - 99
    found = attend((q, keys, values, begin, columns))
    small = [FP8Tensor(*(part[-1:, :, -100:].contiguous() for part in cache)) for cache in (keys, values)]
    zero = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    expected, *_ = decode_attention_cases.expected(
        q[-1:].cpu(), *(moved(x, "cpu") for x in small), *(x.cpu() for x in (zero, zero + 99)), None
    )
    assert (found[-1:].double().cpu() - expected).norm() <= 8e-3 * expected.norm()


@pytest.mark.parametrize("place", [0, 1, 12_345, 65_537, 100_003, LONG - 2, LONG - 1])
def test_a_needle_among_131072_keys(place):
    """A key that takes part of the weight is found wherever it is, as with a bfloat16 cache, and by as much."""
    generator = torch.Generator(DEVICE).manual_seed(place)

    def normal(*shape):
        return torch.randn(shape, generator=generator, device=DEVICE).bfloat16()

    heads, size = 8, 128
    q, keys, values = normal(1, heads, size), normal(1, 1, LONG, size), normal(1, 1, LONG, size)
    places = torch.zeros(1, dtype=torch.int64, device=DEVICE), torch.tensor([LONG - 1], device=DEVICE)
    scores = torch.einsum("hd,kd->hk", q[0].float(), keys[0, 0].float()) * size**-0.5
    others = scores.logsumexp(1)[0].item()  # of the keys that the needle of head 0 is among
    needle = values[0, 0, place].double()
    for more in (
        -1.0,
        0.0,
        1.0,
        3.0,
        6.0,
    ):  # the needle's score over that: about 27%, 50%, 73%, 95%, 99.8% of the weight
        keys[0, 0, place] = (
            q[0, 0].float() * ((others + more) * size**0.5 / q[0, 0].float().square().sum())
        ).bfloat16()
        shares = []
        for cached in (torch.clone, fp8_cache.quantized):
            out = decode_attention(q, StaticCache(cached(keys), cached(values), *places))[0, :size].double()
            shares.append(float(out @ needle / needle.square().sum()))
        own, fp8 = shares
        assert abs(own - 1 / (1 + 2.718281828**-more)) <= 0.05
        assert abs(fp8 - own) <= 0.05, (more, own, fp8)


# ---- whole decoders ----


def tokens_of(decoder, ids, mask=None, **how):
    return decoder.generate(ids, attention_mask=mask, max_new_tokens=12, eos_token_id=(), return_logprobs=True, **how)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("fuse", [True, False])
def test_a_decoder_equals_its_uncaptured_steps(name, fuse):
    model = make_model(name)
    how = {"batch_sizes": (1, 3), "max_length": 64, "cache_dtype": FP8, "fuse": fuse}
    captured, eager = GraphDecoder(model, **how), GraphDecoder(model, **how, capture=False)
    assert captured.attention == "flash" and captured.captured and bool(captured.fused) == fuse
    layers = captured.steps[3].cache.layers
    assert FP8 in {layer.keys.dtype for layer in layers}
    assert (torch.bfloat16 in {layer.keys.dtype for layer in layers}) == (name == "gpt_oss")
    # None of these lengths has a graph for its prefill, which then has the same shapes in both decoders.
    for length, pads in ((7, None), (20, (5, 0, 13)), (33, None)):
        ids = prompts(3, length, seed=length, device=DEVICE)
        mask = None if pads is None else left_padded(ids, *pads).bool()
        for got, wanted in zip(
            *(steps_after(decoder.steps[3], ids, mask) for decoder in (captured, eager)), strict=True
        ):
            assert torch.equal(got, wanted)


@torch.no_grad()
def steps_after(step, ids, mask):
    """The tokens of a prefill and of some steps, and their log probabilities."""
    step.start(len(ids), ids.shape[1], mask, [], 0)
    step.accept(step.prefill(ids, mask))
    for _ in range(12):
        step.replay()
    assert (step.count == 13).all()
    return step.generated[:, :13].clone(), step.logprobs[:, :13].clone()


def test_logprobs_are_close_to_those_of_a_bfloat16_cache():
    """The mean loss of the same text, which is decoded token by token; rounding may flip a tiny model's experts."""
    model = make_model("qwen3_moe")
    ids = prompts(3, 60, seed=1, device=DEVICE)
    losses = []
    for dtype in (None, FP8):
        step = GraphDecoder(model, batch_sizes=(3,), max_length=64, cache_dtype=dtype).steps[3]
        with torch.no_grad():
            step.start(3, 8, None, [], 0)
            logits = [step.prefill(ids[:, :8], None)]
            for token in ids[:, 8:].split(1, 1):
                step.tokens.copy_(token)
                logits.append(step.read())
        found = torch.stack(logits[:-1], 1).float()
        losses.append(torch.nn.functional.cross_entropy(found.flatten(0, 1), ids[:, 8:].flatten()).item())
    assert abs(losses[1] / losses[0] - 1) <= 1e-2 and losses[0] != losses[1]


def test_batch_invariant_prompts_chunks_prefixes_and_requests():
    """A token has the same bits in whole prompts, chunks, after a prefix, beside others, and decoded."""
    register()
    model = make_model("qwen3_moe")
    with fp8moe.batch_invariant():
        how = {"max_length": 256, "cache_dtype": FP8}
        decoder = GraphDecoder(model, batch_sizes=(1, 2), **how)
        ids = prompts(1, 140, seed=2, device=DEVICE)
        tokens, logprobs = tokens_of(decoder, ids)
        for chunk in (7, 64):
            found = tokens_of(GraphDecoder(model, **how, prefill_chunk=chunk), ids)
            assert torch.equal(found[0], tokens) and torch.equal(found[1], logprobs), chunk
        prefix = decoder.prefix(ids[:, :50])
        found = tokens_of(decoder, ids[:, 50:], prefix=prefix)
        assert torch.equal(found[0], tokens[:, 50:]) and torch.equal(found[1], logprobs)
        longer = tokens_of(decoder, tokens[:, :146])
        assert torch.equal(longer[0][:, :152], tokens) and torch.equal(longer[1][:, :6], logprobs[:, 6:])
        asked = {"max_new_tokens": 12, "eos_token_id": (), "return_logprobs": True}
        requests = [{"input_ids": row, **asked} for row in (prompts(1, 9, device=DEVICE)[0], ids[0])]
        new, bits_of = dict(decoder.run(requests))[1]
        assert torch.equal(new, tokens[0, 140:]) and torch.equal(bits_of, logprobs[0])


def test_a_cache_takes_about_half_of_the_memory():
    model = make_model("qwen3_moe")
    own, fp8 = (GraphDecoder(model, max_length=4096, cache_dtype=dtype).stats().cache_bytes for dtype in (None, FP8))
    size = model.config.head_dim
    assert fp8 / own == pytest.approx((size + 4) / (2 * size))
