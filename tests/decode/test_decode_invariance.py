"""Decoders in batch_invariant(), on the reference backend: a token's bits in prompts, answers and batches."""

import pytest
import torch

import fp8moe
from fp8moe.decode import GraphDecoder
from fp8moe.kernels.decoder_ops.fixed_splits import SPLIT
from fp8moe.layers import GroupedExperts, replace_linears
from tests.decode_models import tiny_gpt_oss, tiny_mixtral
from tests.transformers_models import BASE, left_padded, prompts, random_model

SIZES = {"hidden_size": 64, "max_position_embeddings": 128, "initializer_range": 0.2, "num_key_value_heads": 2}
LENGTH, NEW = 66, 5  # more than a split of keys


@pytest.fixture(autouse=True)
def invariant():
    with fp8moe.batch_invariant():
        yield


def in_fp8(model):
    replace_linears(model)
    for layer in model.model.layers:
        if hasattr(layer.mlp, "experts"):
            layer.mlp.experts = GroupedExperts.from_experts(layer.mlp.experts)
    return model


MODELS = {
    "mixtral in FP8": lambda: in_fp8(tiny_mixtral(head_dim=16).bfloat16()),
    "mixtral with a window": lambda: in_fp8(tiny_mixtral(head_dim=16, sliding_window=9).bfloat16()),
    "llama": lambda: random_model("llama", BASE | SIZES | {"intermediate_size": 96}, dtype=torch.bfloat16),
    "qwen3 in FP8": lambda: in_fp8(
        random_model("qwen3", BASE | SIZES | {"intermediate_size": 96, "head_dim": 32}, dtype=torch.bfloat16)
    ),
}


@pytest.mark.parametrize(
    ("name", "cache_dtype"), [*((name, None) for name in MODELS), ("qwen3 in FP8", torch.float8_e4m3fn)]
)
def test_a_token_has_the_same_bits_in_prompts_and_answers(name, cache_dtype):
    decoder = GraphDecoder(MODELS[name](), batch_sizes=(1, 3), max_length=LENGTH + NEW, cache_dtype=cache_dtype)
    assert decoder.attention == "flash" and LENGTH > SPLIT
    ids = prompts(1, LENGTH - 4)
    whole, logprobs = decoder.generate(ids, max_new_tokens=NEW + 4, return_logprobs=True)
    sampled = decoder.generate(ids, max_new_tokens=NEW + 4, do_sample=True, seed=3, return_logprobs=True)
    for tokens, expected in ((whole, logprobs), sampled):
        # Longer and longer prompts: of the next token, which is forced, only what the model gave it is read.
        for known in (1, 4):
            prompt = tokens[:, : ids.shape[1] + known]
            others = torch.cat([prompt, prompts(2, prompt.shape[1], seed=1)])
            for given, mask in ((prompt, None), (others, left_padded(others, 0, 7, prompt.shape[1] - 1))):
                found = _logprobs_of(decoder, given, mask, tokens[0, prompt.shape[1]])
                assert torch.equal(found, expected[0, known]), known
            padded = torch.cat([torch.zeros(1, 3, dtype=torch.int64), prompt], 1)
            assert torch.equal(_logprobs_of(decoder, padded, left_padded(padded, 3), tokens[0, prompt.shape[1]]), found)


def _logprobs_of(decoder, ids, mask, token):
    """The log probability of a token after row 0."""
    step = decoder.steps[3 if len(ids) > 1 else 1]
    with torch.no_grad():
        step.start(len(ids), ids.shape[1], None if mask is None else mask.bool(), [], 0)
        logits = step.prefill(ids, None if mask is None else mask.bool())
    return logits.float().log_softmax(1)[0, token]


@pytest.mark.parametrize("how", ["chunks", "prefix", "run"])
@pytest.mark.parametrize(
    ("name", "cache_dtype"), [("mixtral with a window", None), ("mixtral in FP8", torch.float8_e4m3fn)]
)
def test_prompts_in_pieces(how, name, cache_dtype):
    model = MODELS[name]()
    kept = {"max_length": LENGTH + NEW, "cache_dtype": cache_dtype}
    decoder = GraphDecoder(model, batch_sizes=(1, 2), **kept)
    ids, options = prompts(1, LENGTH), dict(max_new_tokens=NEW, return_logprobs=True, do_sample=True, seed=1)
    tokens, logprobs = decoder.generate(ids, **options)
    if how == "chunks":
        for chunk in (3, 64):
            other = GraphDecoder(model, **kept, prefill_chunk=chunk)
            found, bits = other.generate(ids, **options)
            assert torch.equal(found, tokens) and torch.equal(bits, logprobs)
    elif how == "prefix":
        prefix = decoder.prefix(ids[:, :20])
        both = torch.cat([ids[:, 20:], prompts(1, LENGTH - 20, seed=2)])
        mask = left_padded(both, 0, 5)
        found, bits = decoder.generate(both, attention_mask=mask, prefix=prefix, **options)
        assert torch.equal(found[0], tokens[0, 20:]) and torch.equal(bits[0], logprobs[0])
    else:
        requests = [{"input_ids": row, **options} for row in (prompts(1, 5)[0], ids[0], prompts(1, 30)[0])]
        found, bits = dict(decoder.run(requests))[1]
        assert torch.equal(found, tokens[0, LENGTH:]) and torch.equal(bits, logprobs[0])


def test_models_that_are_refused():
    with pytest.raises(ValueError, match="GptOssForCausalLM cannot be batch invariant.*attention with sinks"):
        GraphDecoder(tiny_gpt_oss(dtype=torch.bfloat16), max_length=32)
    with pytest.raises(ValueError, match="MixtralForCausalLM cannot be batch invariant.*torch.float32"):
        GraphDecoder(tiny_mixtral(), max_length=32)
