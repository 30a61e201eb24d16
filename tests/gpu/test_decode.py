"""GraphDecoder with CUDA graphs: tokens equal to those of the uncaptured model, whatever the prompts."""

import gc
from functools import partial

import pytest
import torch

from fp8moe.integrations.decode import GraphDecoder, attention
from fp8moe.integrations.transformers import register
from tests import linear_attention_models, transformers_models
from tests.transformers_models import BASE, MLA, left_padded, random_model

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
MAX_LENGTH = 64
SHAPE = BASE | {"hidden_size": 128, "max_position_embeddings": 128, "initializer_range": 0.2}
WIDE_MLA = MLA | {"moe_intermediate_size": 128}
MODELS = {
    "mixtral": {"intermediate_size": 128, "num_local_experts": 8, "num_key_value_heads": 2, "sliding_window": 8},
    "qwen3_moe": {"moe_intermediate_size": 128, "num_experts": 8, "num_key_value_heads": 2, "head_dim": 32},
    "deepseek_v3": WIDE_MLA,
    "deepseek_v32": WIDE_MLA | {"index_topk": 16, "index_head_dim": 32, "index_n_heads": 16},
}
FLASH = ("mixtral", "qwen3_moe")  # the others have keys and values of two sizes
prompts = partial(transformers_models.prompts, device=DEVICE)


def make_model(name, experts="fp8moe"):
    register()
    how = dict(dtype=torch.bfloat16, experts_implementation=experts, attn_implementation="sdpa")
    return random_model(name, SHAPE | MODELS[name], **how).to(DEVICE)


@pytest.fixture(scope="module")
def model():
    return make_model("qwen3_moe")


@pytest.fixture(scope="module")
def decoder(model):
    return GraphDecoder(model, batch_sizes=(1, 3), max_length=MAX_LENGTH)


@torch.no_grad()
def greedy(model, ids, count, mask=None):
    """Token by token without a graph, in a static cache of the same length: the same kernels on the same shapes."""
    name = attention.NAME if model.config.model_type in FLASH else None
    batch, length = ids.shape
    cache = transformers.StaticCache(config=model.config, max_cache_len=MAX_LENGTH)
    for i, layer in enumerate(cache.layers):
        if getattr(layer, "is_sliding", False):
            cache.layers[i] = transformers.cache_utils.StaticLayer(max_cache_len=MAX_LENGTH)
    positions = torch.arange(length, device=DEVICE).expand(batch, length)
    seen = torch.ones(batch, MAX_LENGTH, dtype=torch.bool, device=DEVICE)
    if mask is not None:
        seen[:, :length] = mask.bool()
        positions = (mask.cumsum(1) - 1).clamp(min=0)
    arguments = {"attention_mask": mask, "logits_to_keep": 1}
    tokens, new = ids, []
    for _ in range(count):
        with attention.used_by(model, name if new else None):
            logits = model(
                input_ids=tokens, position_ids=positions, past_key_values=cache, use_cache=True, **arguments
            ).logits
        tokens, positions = logits[:, -1:].argmax(-1), positions[:, -1:] + 1
        arguments = {"attention_mask": seen}
        new.append(tokens)
    return torch.cat([ids, *new], dim=1)


@pytest.mark.parametrize("name", MODELS)
def test_equals_the_uncaptured_model(name):
    model = make_model(name)
    decoder = GraphDecoder(model, batch_sizes=(1, 3), max_length=MAX_LENGTH)
    assert decoder.captured and all(step.graph is not None for step in decoder._steps.values())
    assert (decoder.attention == "flash") == (name in FLASH), decoder.attention
    for seed, (batch, length) in enumerate([(1, 7), (3, 20), (1, 33), (3, 1), (1, 7)]):
        ids = prompts(batch, length, seed)
        assert torch.equal(decoder.generate(ids, max_new_tokens=24), greedy(model, ids, 24))
    ids = prompts(3, 20, 9)
    mask = torch.ones_like(ids)
    mask[0, :5] = mask[2, :13] = 0
    assert torch.equal(decoder.generate(ids, attention_mask=mask, max_new_tokens=24), greedy(model, ids, 24, mask))


def test_a_smaller_batch_is_padded(model, decoder):
    ids = prompts(2, 11, 0)
    expected = greedy(model, ids[[0, 1, 0]], 24)[:2]
    assert torch.equal(decoder.generate(ids, max_new_tokens=24), expected)


def test_without_a_graph(model, decoder):
    plain = GraphDecoder(model, batch_sizes=(1, 3), max_length=MAX_LENGTH, capture=False)
    assert not plain.captured
    for batch in (1, 2, 3):
        ids = prompts(batch, 9, batch)
        assert torch.equal(plain.generate(ids, max_new_tokens=24), decoder.generate(ids, max_new_tokens=24))


@pytest.mark.parametrize("steps_to_end", [1, 8, 9, 20])
def test_stops_at_the_end_token(model, decoder, steps_to_end):
    ids = prompts(3, 9, 4)
    free = decoder.generate(ids, max_new_tokens=40)[:, 9:].tolist()
    ends = sorted({row[steps_to_end] for row in free})
    out = decoder.generate(ids, max_new_tokens=40, eos_token_id=ends, pad_token_id=1)[:, 9:].tolist()
    lengths = [next(i for i, token in enumerate(row) if token in ends) + 1 for row in free]
    assert out == [row[:length] + [1] * (max(lengths) - length) for row, length in zip(free, lengths, strict=True)]


def test_same_tokens_every_time_and_from_another_stream(model, decoder):
    ids = prompts(3, 9, 5)
    expected = decoder.generate(ids, max_new_tokens=24)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        again = decoder.generate(ids, max_new_tokens=24)
    torch.cuda.synchronize()
    assert torch.equal(again, expected)
    assert torch.equal(decoder.generate(ids.cpu(), max_new_tokens=24), expected.cpu())


def test_changed_weights_are_noticed():
    model = make_model("mixtral")
    decoder = GraphDecoder(model, max_length=MAX_LENGTH)
    ids = prompts(1, 9, 6)
    decoder.generate(ids, max_new_tokens=4)
    with torch.no_grad():
        model.model.layers[0].mlp.experts.down_proj.mul_(2)
    with pytest.raises(RuntimeError, match="moved or changed since the capture"):
        decoder.generate(ids, max_new_tokens=4)
    again = GraphDecoder(model, max_length=MAX_LENGTH)
    assert torch.equal(again.generate(ids, max_new_tokens=24), greedy(model, ids, 24))


def test_eager_experts_are_refused():
    with pytest.raises(ValueError, match=r"model\.layers\.0\.mlp\.experts runs the experts implementation 'eager'"):
        GraphDecoder(make_model("qwen3_moe", experts="eager"), max_length=MAX_LENGTH)


def test_other_experts_can_be_captured():
    model = make_model("qwen3_moe", experts="batched_mm")
    decoder = GraphDecoder(model, batch_sizes=(3,), max_length=MAX_LENGTH)
    ids = prompts(3, 9, 7)
    assert torch.equal(decoder.generate(ids, max_new_tokens=24), greedy(model, ids, 24))


@pytest.mark.parametrize("name", linear_attention_models.NAMES)
def test_linear_attention(name):
    model = linear_attention_models.build(name, experts_implementation="batched_mm").to(DEVICE)  # Inkling2 has no sdpa
    if name in linear_attention_models.READ_ON_THE_HOST:
        with pytest.raises(ValueError, match="cannot be captured, it reads values on the host"):
            GraphDecoder(model, max_length=MAX_LENGTH)
        return
    decoder = GraphDecoder(model, batch_sizes=(1, 3), max_length=MAX_LENGTH)
    assert all(step.graph is not None for step in decoder._steps.values())
    for batch, length, padding in linear_attention_models.PROMPTS:
        ids = prompts(batch, length, length)
        mask = left_padded(ids, *padding)
        expected = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=16)
        assert torch.equal(decoder.generate(ids, attention_mask=mask, max_new_tokens=16), expected)


def test_linear_attention_with_fp8_experts():
    register()
    how = dict(dtype=torch.bfloat16, experts_implementation="fp8moe", attn_implementation="sdpa")
    model = linear_attention_models.build("Qwen3NextForCausalLM", **how).to(DEVICE)
    plain, decoder = (
        GraphDecoder(model, batch_sizes=(1, 3), max_length=MAX_LENGTH, capture=capture) for capture in (False, True)
    )
    for batch, length in ((1, 1), (3, 12), (2, 7), (1, 30)):
        ids = prompts(batch, length, length)
        assert torch.equal(decoder.generate(ids, max_new_tokens=24), plain.generate(ids, max_new_tokens=24))


def test_a_step_that_waits_for_the_gpu_is_refused():
    with pytest.raises(
        ValueError, match=r"LlamaForCausalLM cannot be captured, .* \(aten\._local_scalar_dense\.default\)"
    ):
        model = random_model("llama", SHAPE | {"intermediate_size": 128}).to(DEVICE)
        model.model.norm.register_forward_hook(lambda module, args, output: output if output.max() < 1e9 else None)
        GraphDecoder(model, max_length=MAX_LENGTH)


def test_deleting_frees_the_memory(model):
    def memory():
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    def use():
        decoder = GraphDecoder(model, batch_sizes=(1, 3), max_length=30_000)
        decoder.generate(prompts(1, 9, 8), max_new_tokens=4)
        return memory()

    use()
    before = memory()
    assert use() > before + 50e6
    assert memory() <= before + 4e6
