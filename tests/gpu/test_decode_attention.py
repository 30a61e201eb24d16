"""Attention over a static cache against float64 and against the model's own attention."""

import pytest
import torch

from fp8moe.decode import attention
from fp8moe.decode.attention import AttentionMetadataBuilder
from fp8moe.decode.step import Capabilities, Step
from fp8moe.hf import register
from fp8moe.kernels.decoder_ops.decode_attention import DTYPES
from fp8moe.quant.quantize import quantize_1x128
from tests import decode_attention_cases
from tests.transformers_models import BASE, left_padded, prompts, random_model

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.gpu

DEVICE = "cuda"


def operands(batch, key_heads, groups, size, length, dtype, new=1, seed=0):
    """query (B, heads, new, D), key and value (B, key heads, length, D)."""
    generator = torch.Generator(DEVICE).manual_seed(seed)

    def draw(*shape):
        return torch.randn(shape, generator=generator, device=DEVICE, dtype=torch.float32).to(dtype)

    cache = (batch, key_heads, length, size)
    return draw(batch, new, key_heads * groups, size).transpose(1, 2), draw(*cache), draw(*cache)


def reference(query, key, value, begin, columns, window=None, sinks=None):
    """(B, new, heads, D) in float64, a row and head at a time."""
    batch, heads, new, size = query.shape
    groups = heads // key.shape[1]
    out = torch.zeros(batch, new, heads, size, dtype=torch.float64, device=query.device)
    for b in range(batch):
        first, end = int(begin[b]), int(columns[b]) + new
        if first >= end:
            continue
        last = torch.arange(end - new, end, device=query.device)[:, None]
        column = torch.arange(first, end, device=query.device)
        hidden = (column > last) | (False if window is None else column <= last - window)
        for head in range(heads):
            keys, values = (x[b, head // groups, first:end].double() for x in (key, value))
            scores = (query[b, head].double() @ keys.T * size**-0.5).masked_fill(hidden, -torch.inf)
            if sinks is not None:
                scores = torch.cat([scores, sinks[head].double().expand(new, 1)], 1)
            out[b, :, head] = scores.softmax(1).nan_to_num(0)[:, : len(keys)] @ values
    return out


def poison(caches, begin, columns, new):
    """What no query of a row sees has no say."""
    column = torch.arange(caches[0].shape[2], device=DEVICE)
    hidden = (column < begin[:, None]) | (column >= columns[:, None] + new)
    for cache in caches:
        cache.masked_fill_(hidden[:, None, :, None], float("nan"))


def check(query, key, value, begin, columns, window=None, end=None, repeats=20, sinks=None):
    new, size, dtype = query.shape[2], query.shape[3], query.dtype
    expected = reference(query, key, value, begin, columns, window, sinks)
    poison((key, value), begin, columns, new)
    metadata = AttentionMetadataBuilder(begin, columns, key.shape[2]).build(new, key.shape[1], window)
    seen = (key, value) if end is None else (key[:, :, :end], value[:, :, :end])
    how = {"scaling": size**-0.5, "s_aux": sinks}
    results = [attention.attend(None, query, *seen, metadata, **how)[0] for _ in range(repeats)]
    assert results[0].shape == expected.shape and results[0].dtype == dtype
    assert all(torch.equal(result, results[0]) for result in results)
    error = (results[0].double() - expected).norm() / expected.norm()
    assert error <= 4 * torch.finfo(dtype).eps
    assert torch.equal(results[0].isnan(), torch.zeros_like(results[0], dtype=torch.bool))
    return results[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("batch", "key_heads", "groups", "size", "length"),
    [(1, 4, 8, 128, 5000), (3, 2, 1, 64, 257), (5, 1, 7, 40, 100), (2, 3, 4, 256, 640), (64, 2, 8, 128, 300)],
)
def test_a_step_against_float64(batch, key_heads, groups, size, length, dtype):
    query, key, value = operands(batch, key_heads, groups, size, length, dtype)
    generator = torch.Generator(DEVICE).manual_seed(1)
    columns = torch.randint(0, length, (batch,), generator=generator, device=DEVICE)
    begin = (torch.rand(batch, generator=generator, device=DEVICE) * (columns + 1)).long()
    begin[0], columns[0] = 0, length - 1
    begin[-1] = columns[-1]  # a single token
    check(query, key, value, begin, columns)


@pytest.mark.parametrize("window", [1, 7, 64, 10_000])
def test_a_step_with_a_window(window):
    query, key, value = operands(3, 2, 4, 64, 300, torch.bfloat16)
    begin, columns = (torch.tensor(values, device=DEVICE) for values in ([0, 40, 299], [299, 45, 299]))
    check(query, key, value, torch.maximum(begin, columns + 1 - window), columns)
    expected = reference(query, *operands(3, 2, 4, 64, 300, torch.bfloat16)[1:], begin, columns, window)
    query, key, value = operands(3, 2, 4, 64, 300, torch.bfloat16)
    metadata = AttentionMetadataBuilder(begin, columns, 300).build(1, 2, window)
    found = attention.attend(None, query, key, value, metadata, scaling=64**-0.5)[0]
    assert (found.double() - expected).norm() <= 4 * torch.finfo(torch.bfloat16).eps * expected.norm()


SHAPES = [(1, 4, 8, 128), (3, 2, 1, 64), (5, 1, 7, 40), (2, 3, 4, 256)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("batch", "key_heads", "groups", "size"), SHAPES)
@pytest.mark.parametrize("window", [None, 1, 50])
@pytest.mark.parametrize("new", [2, 63, 300])
def test_prompts_against_float64(batch, key_heads, groups, size, dtype, new, window):
    """First chunks with padding on the left, and later ones, in a cache with room after them."""
    length = 700
    query, key, value = operands(batch, key_heads, groups, size, length, dtype, new)
    for first in (0, 129):
        begin = torch.tensor([0, 1, new - 1, first, new + first - 1], device=DEVICE)[:batch]
        columns = torch.full_like(begin, first)
        for end in (None, first + new):
            out = check(query, key.clone(), value.clone(), begin, columns, window, end, repeats=3)
            padded = torch.arange(first, first + new, device=DEVICE) < begin[:, None]
            assert (out[padded] == 0).all(), "padding"


def sinks_of(query, dtype=torch.bfloat16):
    heads = query.shape[1]
    return decode_attention_cases.make_sinks((heads, 1), dtype).to(DEVICE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("window", [None, 1, 128])
@pytest.mark.parametrize("new", [1, 2, 63, 300])
def test_sinks_against_float64(new, window, dtype):
    """Steps and prompts of GPT-OSS's heads: first chunks with padding, and later ones."""
    query, key, value = operands(3, 8, 8, 64, 700, torch.bfloat16, new)
    for first in (0, 129):
        begin = torch.tensor([0, new - 1, first], device=DEVICE)
        columns = torch.full_like(begin, first)
        for end in (None, first + new):
            how = {"window": window, "end": end, "repeats": 3, "sinks": sinks_of(query, dtype)}
            check(query, key.clone(), value.clone(), begin, columns, **how)


def test_whole_prompts_with_sinks():
    """Without sinks they run the causal attention that PyTorch chooses."""
    query, key, value = operands(2, 8, 8, 64, 400, torch.bfloat16, 300)
    begin = columns = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    builder = AttentionMetadataBuilder(begin, columns, 400)
    builder.next_call(before=0)
    metadata, sinks = builder.build(300, 8, None), sinks_of(query)
    assert metadata.before == 0
    found = attention.attend(None, query, key, value, metadata, scaling=0.125, s_aux=sinks)[0]
    expected = reference(query, key, value, begin, columns, None, sinks)
    assert (found.double() - expected).norm() <= 4 * torch.finfo(torch.bfloat16).eps * expected.norm()


def test_rows_of_their_own_columns():
    """After a prefix: chunks that begin in other columns in each row; one row that is padding alone."""
    query, key, value = operands(4, 2, 4, 128, 500, torch.bfloat16, 100)
    begin, columns = (torch.tensor(values, device=DEVICE) for values in ([0, 3, 0, 120], [0, 77, 400, 0]))
    out = check(query, key, value, begin, columns)
    assert (out[3] == 0).all()


def test_long_prompts():
    query, key, value = operands(2, 1, 2, 128, 20_000, torch.bfloat16, 4096)
    check(query, key, value, *(torch.tensor(values, device=DEVICE) for values in ([0, 9000], [9000, 9000])), repeats=3)


@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize("chunk", [None, 6])
def test_a_step_equals_that_with_the_models_own_attention(window, chunk):
    register()
    options = BASE | {"hidden_size": 128, "intermediate_size": 128, "num_local_experts": 4, "num_key_value_heads": 2}
    options |= {"sliding_window": window, "max_position_embeddings": 128}
    how = dict(dtype=torch.bfloat16, experts_implementation="fp8moe", attn_implementation="sdpa")
    model = random_model("mixtral", options, **how).to(DEVICE)
    ids = prompts(3, 20, device=DEVICE)
    mask = left_padded(ids, 5, 0, 13).bool()
    logits = []
    with torch.no_grad():
        for name in (None, attention.NAME):
            capabilities = Capabilities(name, ragged=True, chunked_prefill=chunk is not None)
            step = Step(model, 3, 48, torch.device(DEVICE), capabilities, chunk)
            step.start(3, 20, mask, [], 0)
            found = [step.prefill(ids, mask).float()]
            step.tokens.copy_(ids[:, :1])
            logits.append(found + [step.read().float() for _ in range(5)])
    for own, flash in zip(*logits, strict=True):
        assert not own.isnan().any()
        assert (own - flash).norm() <= 0.15 * own.norm(), "more than rounding, which 16 bits and experts multiply"


# ---- the operator of one new token ----


def one_token(batch, heads, length, dtype, seed=0, window=None):
    operands, new = decode_attention_cases.make(batch, heads, length, dtype, seed, window)
    return operands, new, [decode_attention_cases.moved(value, DEVICE) for value in operands]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sinks", [None, "dtype of q", torch.float32], ids=str)
@pytest.mark.parametrize(("batch", "heads", "length", "window"), decode_attention_cases.SHAPES, ids=str)
def test_one_token_against_float64(batch, heads, length, window, sinks, dtype):
    operands, new, given = one_token(batch, heads, length, dtype, window=window)
    sinks = decode_attention_cases.make_sinks(heads, dtype if sinks == "dtype of q" else sinks)
    expected, keys, values = decode_attention_cases.expected(*operands, new, window, sinks)
    how = {"window": window, "sinks": decode_attention_cases.moved(sinks, DEVICE)}
    new = decode_attention_cases.moved(new, DEVICE)
    torch.full((batch * expected.shape[1],), torch.nan, device=DEVICE, dtype=dtype)  # what torch.empty will return
    results = [decode_attention_cases.attend(*given, new=new, **how, early=i % 2 == 1) for i in range(20)]
    assert (results[0].double().cpu() - expected).norm() <= torch.finfo(dtype).eps * expected.norm()
    assert all(torch.equal(result, results[0]) for result in results)
    for cache, filled in zip(given[1:3], (keys, values), strict=True):
        cache = cache.cpu()
        assert torch.equal(cache.isnan(), filled.isnan())
        assert (cache.nan_to_num(0).double() - filled.nan_to_num(0).double()).norm() <= 1e-3 * filled.nan_to_num(
            0
        ).norm()
    quantized = decode_attention_cases.attend(*given, new=new, **how, quantized=True)
    codes = quantize_1x128(results[0])
    assert torch.equal(quantized.data.view(torch.uint8), codes.data.view(torch.uint8))
    assert torch.equal(quantized.scale, codes.scale)
    kept = decode_attention_cases.attend(*given, **how)  # the queries as they are, the cache as it is now
    cache = given[1].cpu(), given[2].cpu()
    expected, *_ = decode_attention_cases.expected(given[0].cpu(), *cache, *operands[3:], None, window, sinks)
    assert (kept.double().cpu() - expected).norm() <= torch.finfo(dtype).eps * expected.norm()


def test_what_is_not_finite_stays_in_its_head():
    operands, new, given = one_token(3, (8, 4, 128, 128, True), 200, torch.bfloat16)
    new = decode_attention_cases.moved(new, DEVICE)
    sinks = torch.zeros(32, device=DEVICE)
    before = decode_attention_cases.attend(*given, new=new, sinks=sinks)
    given[0][1, 5, 3] = torch.nan
    new.v[2, 1, 7] = torch.inf
    sinks[20] = torch.nan
    after = decode_attention_cases.attend(*given, new=new, sinks=sinks)
    bad = (~after.isfinite()).view(3, 32, 128)
    assert bad[1, 5].all() and bad[2, 8:16, 7].all() and bad[:, 20].all()
    bad[1, 5], bad[2, 8:16, 7], bad[:, 20] = False, False, False
    assert not bad.any()
    same = torch.ones_like(bad)
    same[1, 5], same[2, 8:16], same[:, 20] = False, False, False
    assert torch.equal(before.view_as(bad)[same], after.view_as(bad)[same])


def test_no_keys_give_zero_and_places_outside_are_not_written():
    operands, new, given = one_token(3, (8, 2, 128, 128, True), 100, torch.bfloat16)
    given[4].copy_(torch.tensor([3, 100, -1]))
    given[3].copy_(torch.tensor([4, 100, 0]))
    before = [cache.clone() for cache in given[1:3]]
    new = decode_attention_cases.moved(new, DEVICE)
    for sinks in (None, torch.zeros(16, device=DEVICE), torch.full((16,), -torch.inf, device=DEVICE)):
        assert (decode_attention_cases.attend(*given, new=new, sinks=sinks) == 0).all()
    for cache, old in zip(given[1:3], before, strict=True):
        assert torch.equal(cache.nan_to_num(7), old.nan_to_num(7))


def test_a_sink_of_minus_infinity_changes_no_bit():
    operands, new, given = one_token(4, (8, 8, 64, 64, False), 500, torch.bfloat16, window=128)
    how = {"new": decode_attention_cases.moved(new, DEVICE), "window": 128}
    without = decode_attention_cases.attend(*given, **how)
    sinks = torch.full((64,), -torch.inf, device=DEVICE)
    assert torch.equal(decode_attention_cases.attend(*given, **how, sinks=sinks), without)
    assert (decode_attention_cases.attend(*given, **how, sinks=-sinks) == 0).all()


@pytest.mark.parametrize("window", [None, 128])
def test_one_token_in_a_graph_whose_columns_move_on(window):
    operands, new, given = one_token(4, (8, 4, 128, 128, True), 300, torch.bfloat16)
    how = {"window": window, "sinks": torch.randn(32, device=DEVICE), "quantized": True}
    given[3].zero_()
    given[1].nan_to_num_(0), given[2].nan_to_num_(0)
    given[4].copy_(torch.tensor([0, 15, 100, 250]))
    moving = decode_attention_cases.moved(new, DEVICE)
    decode_attention_cases.attend(*given, new=moving, **how)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode_attention_cases.attend(*given, new=moving, **how, early=True)
    for step in range(20):
        given[4] += 1
        moving.k.normal_(), moving.v.normal_(), given[0].normal_(), how["sinks"].normal_()
        copies = [value.clone() for value in given]
        expected = decode_attention_cases.attend(*copies, new=moving, **how)
        graph.replay()
        assert torch.equal(out.data.view(torch.uint8), expected.data.view(torch.uint8)), step
        assert torch.equal(out.scale, expected.scale) and torch.equal(given[1], copies[1])
