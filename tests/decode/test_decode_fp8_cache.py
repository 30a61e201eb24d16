"""GraphDecoder with keys and values in FP8, on the reference backend."""

import pytest
import torch

import fp8moe
from fp8moe.decode import GraphDecoder, cache
from fp8moe.kernels.decoder_ops import fp8_cache
from fp8moe.layers import replace_linears
from tests import on_policy_cases
from tests.decode_models import NEW, forced_logits, fp8moe_attention_on_cpu, tiny_gpt_oss, tiny_mixtral
from tests.transformers_models import left_padded, prompts

pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("one_thread")

FP8 = torch.float8_e4m3fn
BUILD = {
    "qwen3_moe": lambda: on_policy_cases.build("qwen3_moe"),
    "llama": lambda: on_policy_cases.build("llama"),
    "gpt_oss": lambda: tiny_gpt_oss(dtype=torch.bfloat16),
}


@pytest.fixture(scope="module", params=BUILD)
def model(request):
    return BUILD[request.param]()


@pytest.fixture
def flash_on_cpu(monkeypatch):
    """Let caches of the model's dtype be read by fp8moe's attention, too."""
    fp8moe_attention_on_cpu(monkeypatch)


def loss(logits, ids):
    """The mean loss of the last tokens of ids, given the logits from before the first of them on."""
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, -logits.shape[1] + 1 :].flatten())


@pytest.mark.parametrize("fuse", [True, False])
def test_logits_are_close_to_those_of_the_models_dtype(model, flash_on_cpu, fuse):
    ids = prompts(3, 40, seed=1)
    mask = left_padded(ids[:, :-NEW], 0, 9, 2).bool()
    own, fp8 = (
        GraphDecoder(model, batch_sizes=(4,), max_length=64, fuse=fuse, prefill_chunk=chunk, cache_dtype=dtype)
        for dtype, chunk in ((None, None), (FP8, 7))
    )
    assert fp8.attention == "flash" and bool(fp8.fused) == fuse
    expected = forced_logits(own, ids, mask)
    found = forced_logits(fp8, ids, mask)
    assert not torch.equal(found, expected)
    # Rounding flips the experts of tiny random models now and then, so not each token is compared.
    error = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert error.median() <= 0.1, error
    assert abs(loss(found, ids) / loss(expected, ids) - 1) <= 0.01


def test_layers_without_a_window_are_in_fp8(model):
    decoder = GraphDecoder(model, batch_sizes=(2,), max_length=32, cache_dtype=FP8)
    decoder.generate(prompts(2, 5), max_new_tokens=3)
    heads, size = model.config.num_key_value_heads, model.config.head_dim
    kinds = getattr(model.config, "layer_types", None) or ["full_attention"] * len(decoder.steps[2].cache.layers)
    expected = 0
    for kind, layer in zip(kinds, decoder.steps[2].cache.layers, strict=True):
        windowed = kind == "sliding_attention"
        assert layer.keys.shape == layer.values.shape == (2, heads, 32, size)
        assert layer.keys.dtype == layer.values.dtype == (torch.bfloat16 if windowed else FP8)
        if not windowed:
            assert layer.key_scales.shape == layer.value_scales.shape == (2, heads, 32, 1)
            read = layer.key_scales[:, :, :7]
            assert read.dtype == torch.float32 and (read > 0).all() and (layer.key_scales[:, :, 8:] == 0).all()
        expected += 2 * 2 * heads * 32 * (2 * size if windowed else size + 4)
    assert decoder.stats().cache_bytes == expected


def converting(monkeypatch):
    """Let caches of the model's dtype hold what a cache in FP8 would."""
    layer = cache._own_layers()["StaticLayer"]
    monkeypatch.setattr(layer, "write", lambda self, target, states: self.position.write(target, 2, converted(states)))


def converted(states):
    data, scale = fp8_cache.quantized(states)
    return data.to(states.dtype).mul_(scale)


@pytest.mark.parametrize("kind", ["qwen3_moe", "llama"])
def test_batch_invariant_bits_are_those_of_a_converted_cache(kind, monkeypatch):
    model = BUILD[kind]()
    ids = prompts(2, 80, seed=2)
    mask = left_padded(ids[:, :-NEW], 0, 5).bool()
    with fp8moe.batch_invariant():
        how = {"batch_sizes": (2,), "max_length": 90, "fuse": False}
        found = forced_logits(GraphDecoder(model, **how, cache_dtype=FP8), ids, mask)
        fused = GraphDecoder(model, batch_sizes=(2,), max_length=90, cache_dtype=FP8)
        assert fused.fused and torch.equal(forced_logits(fused, ids, mask), forced_logits(fused, ids, mask))
        own = forced_logits(GraphDecoder(model, **how), ids, mask)
        converting(monkeypatch)
        assert torch.equal(found, forced_logits(GraphDecoder(model, **how), ids, mask))
        assert not torch.equal(found, own)


@pytest.mark.parametrize("way", ["stream", "prefix", "run", "custom_generate"])
def test_ways_to_generate(model, way):
    decoder = GraphDecoder(model, batch_sizes=(1, 2), max_length=64, cache_dtype=FP8)
    ids = prompts(1, 20, seed=3)
    tokens = decoder.generate(ids, max_new_tokens=NEW, eos_token_id=())
    if way == "stream":
        found = torch.cat([*decoder.stream(ids, max_new_tokens=NEW, eos_token_id=())])
        assert torch.equal(found, tokens[0, 20:])
    elif way == "run":
        asked = [{"input_ids": row, "max_new_tokens": NEW, "eos_token_id": ()} for row in (ids[0], prompts(1, 3)[0])]
        assert torch.equal(dict(decoder.run(asked * 2))[2][:2], tokens[0, 20:22])
    elif way == "prefix":
        prefix = decoder.prefix(ids[:, :11])
        kept = [layer.keys.dtype for layer in prefix._cache.layers]
        assert kept == [layer.keys.dtype for layer in decoder.steps[1].cache.layers] and FP8 in kept
        found = decoder.generate(ids[:, 11:], max_new_tokens=NEW, eos_token_id=(), prefix=prefix)
        assert torch.equal(found[0, :11], tokens[0, 11:22])
    else:
        found = model.generate(ids, max_new_tokens=NEW, eos_token_id=None, do_sample=False, custom_generate=decoder)
        assert torch.equal(found, tokens)


def test_a_refit_reaches_the_decoder():
    model, other = (replace_linears_of(BUILD["llama"](), scale) for scale in (1.0, 1.5))
    decoder = GraphDecoder(model, max_length=48, cache_dtype=FP8)
    ids = prompts(1, 12)
    before = decoder.generate(ids, max_new_tokens=NEW, return_logprobs=True)
    fp8moe.refit(model, other)
    after = decoder.generate(ids, max_new_tokens=NEW, return_logprobs=True)
    fresh = GraphDecoder(other, max_length=48, cache_dtype=FP8).generate(ids, max_new_tokens=NEW, return_logprobs=True)
    assert torch.equal(after[0], fresh[0]) and torch.equal(after[1], fresh[1])
    assert not torch.equal(after[1], before[1])


def replace_linears_of(model, scale):
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.v_proj.weight.mul_(scale)
    replace_linears(model)
    return model


def test_what_is_refused():
    model = BUILD["llama"]()
    refused = {
        "^cache_dtype: expected None or torch.float8_e4m3fn, got str 'fp8'": (TypeError, model, "fp8"),
        "^cache_dtype: expected None or torch.float8_e4m3fn, got torch.float8_e5m2": (
            ValueError,
            model,
            torch.float8_e5m2,
        ),
        "^cache_dtype: MixtralForCausalLM is in torch.float32": (ValueError, tiny_mixtral(), FP8),
        "^cache_dtype: MixtralForCausalLM has no layer for FP8.*sliding window": (
            *(ValueError, tiny_mixtral(sliding_window=6).bfloat16(), FP8),
        ),
        "^cache_dtype: LlamaForCausalLM cannot keep .*heads of 8 values in FP8, which is no multiple of 16": (
            *(ValueError, on_policy_cases.build("llama", sizes={"head_dim": 8}), FP8),
        ),
    }
    for message, (error, of, dtype) in refused.items():
        with pytest.raises(error, match=message):
            GraphDecoder(of, max_length=16, cache_dtype=dtype)


def test_a_long_needle_is_found():
    """A key among 4096 random ones that holds nearly all of the weight, wherever it is."""
    from fp8moe.kernels.decoder_ops.decode_attention import StaticCache, decode_attention

    length, size = 4096, 128
    q = torch.randn(1, 4, size).bfloat16()
    for place in (0, 1777, length - 1):
        keys, values = (torch.randn(1, 1, length, size).bfloat16() for _ in range(2))
        keys[0, 0, place] = q[0, 0] * (16 * size**0.5 / q[0, 0].float().square().sum())
        begin, columns = torch.zeros(1, dtype=torch.int64), torch.tensor([length - 1])
        found = [
            decode_attention(q, StaticCache(*(cached(x) for x in (keys, values)), begin, columns))[0, :size].float()
            for cached in (torch.clone, fp8_cache.quantized)
        ]
        for out in found:
            assert torch.cosine_similarity(out, values[0, 0, place].float(), 0) > 0.95
