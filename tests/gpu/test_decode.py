"""GraphDecoder with CUDA graphs: tokens equal to those of the uncaptured model, whatever the prompts."""

import gc
from functools import partial

import pytest
import torch

from fp8moe.decode import GraphDecoder, NaNLogits, attention
from fp8moe.decode.cache import CachePosition, static_cache
from fp8moe.hf import patches, record_routing, register
from tests import linear_attention_models, transformers_models
from tests.decode_models import Puts, byte_level_tokenizer
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
    "gpt_oss": {
        **{"intermediate_size": 128, "num_local_experts": 8, "num_key_value_heads": 2, "head_dim": 64},
        "sliding_window": 8,
    },
    "deepseek_v3": WIDE_MLA,
    "deepseek_v32": WIDE_MLA | {"index_topk": 16, "index_head_dim": 32, "index_n_heads": 16},
}
FLASH = ("mixtral", "qwen3_moe", "gpt_oss")  # the others have keys and values of two sizes
# Absorbed attention rounds otherwise than these models, and a tiny model's experts flip.
ABSORBED = ("deepseek_v3", "deepseek_v32")
prompts = partial(transformers_models.prompts, device=DEVICE)


def make_model(name, experts="fp8moe"):
    register()
    own = "eager" if name == "gpt_oss" else "sdpa"  # sdpa has no sinks
    how = dict(dtype=torch.bfloat16, experts_implementation=experts, attn_implementation=own)
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
    patches.take_offsets_of_rows()
    batch, length = ids.shape
    position = CachePosition(batch, torch.device(DEVICE), ragged=True)
    cache = static_cache(model.config, MAX_LENGTH, position)
    begin = torch.zeros_like(position.columns)
    positions = torch.arange(length, device=DEVICE).expand(batch, length)
    seen = torch.ones(batch, MAX_LENGTH, dtype=torch.bool, device=DEVICE)
    if mask is not None:
        begin += (mask == 0).sum(1)
        seen[:, :length] = mask.bool()
        positions = (mask.cumsum(1) - 1).clamp(min=0)
    builder = attention.AttentionMetadataBuilder(begin, position.columns, MAX_LENGTH)
    arguments = {"attention_mask": mask, "logits_to_keep": 1}
    position.next_call(length, 0, length)
    tokens, new = ids, []
    for _ in range(count):
        builder.next_call()
        with attention.used_by(model, name, builder):
            logits = model(
                input_ids=tokens, position_ids=positions, past_key_values=cache, use_cache=True, **arguments
            ).logits
        position.columns += tokens.shape[1]
        position.next_call()
        tokens, positions = logits[:, -1:].argmax(-1), positions[:, -1:] + 1
        arguments = {"attention_mask": seen}
        new.append(tokens)
    return torch.cat([ids, *new], dim=1)


@pytest.mark.parametrize("name", MODELS)
def test_equals_the_uncaptured_model(name):
    model = make_model(name)
    decoder = GraphDecoder(model, batch_sizes=(1, 3), max_length=MAX_LENGTH, fuse=name not in ABSORBED)
    assert decoder.captured and all(step.graph is not None for step in decoder.steps.values())
    assert (decoder.attention == "flash") == (name in FLASH), decoder.attention
    for seed, (batch, length) in enumerate([(1, 7), (3, 20), (1, 33), (3, 1), (1, 7)]):
        ids = prompts(batch, length, seed)
        assert torch.equal(decoder.generate(ids, max_new_tokens=24), greedy(model, ids, 24))
    ids = prompts(3, 20, 9)
    mask = torch.ones_like(ids)
    mask[0, :5] = mask[2, :13] = 0
    assert torch.equal(decoder.generate(ids, attention_mask=mask, max_new_tokens=24), greedy(model, ids, 24, mask))


@pytest.mark.parametrize("name", MODELS)
def test_routing_is_recorded_in_graphs(name):
    model = make_model(name)
    decoder = GraphDecoder(model, batch_sizes=(1, 3), max_length=MAX_LENGTH, fuse=name not in ABSORBED)
    step, ids = decoder.steps[3], prompts(3, 20, 9)
    mask = left_padded(ids, 5, 0, 13)
    how = {"attention_mask": mask, "max_new_tokens": 24, "eos_token_id": ()}
    expected = decoder.generate(ids, **how)
    assert step.recording_graph is None and step.routing is None
    found = [decoder.generate(ids, return_routing=True, **how) for _ in range(4)]  # the graphs are captured meanwhile
    assert step.recording_graph is not None
    assert all(torch.equal(tokens, expected) and torch.equal(routing, found[0][1]) for tokens, routing in found)
    tokens, routing = found[0]
    assert routing.is_cuda and torch.equal((routing == -1).all(-1).all(-1)[:, :20], mask == 0)
    read, shown = tokens[:, :-1], torch.ones_like(tokens[:, :-1])
    shown[:, :20] = mask
    with torch.no_grad(), record_routing(model) as recorded:
        model(read, attention_mask=shown)
    assert (recorded.routing == routing)[shown.bool()].float().mean() > 0.8  # experts flip in near ties
    steps = [*decoder.stream(ids, return_routing=True, **how)]
    assert torch.equal(torch.stack([step for step, _ in steps], 1), tokens[:, 20:])
    assert torch.equal(torch.cat([piece for _, piece in steps], 1), routing)
    asked = [{"input_ids": row.cpu(), "max_new_tokens": 5 + index} for index, row in enumerate(prompts(7, 9, 3))]
    plain = dict(decoder.run(asked))
    for index, (new, experts) in decoder.run([one | {"return_routing": True} for one in asked]):
        assert torch.equal(new, plain[index])
        assert experts.shape[0] == 9 + len(new) - 1 and not experts.is_cuda and (experts >= 0).all()
    assert torch.equal(decoder.generate(ids, **how), expected)


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


SAMPLING = {"do_sample": True, "temperature": 0.8, "top_k": 40, "top_p": 0.95, "presence_penalty": 0.5}


def test_sampling_in_the_graph_equals_sampling_without(model, decoder):
    """With parameters that change from call to call, which are read at each replay."""
    plain = GraphDecoder(model, batch_sizes=(1, 3), max_length=MAX_LENGTH, capture=False)
    ids = prompts(3, 9, 10)
    found = []
    for how in (SAMPLING, SAMPLING | {"temperature": 0.4, "top_k": 5}, {"repetition_penalty": 1.4}, {}, SAMPLING):
        how = {"max_new_tokens": 40, "return_logprobs": True} | how | {"seed": [4, 5, 6]}
        tokens, logprobs = decoder.generate(ids, **how)
        expected, expected_logprobs = plain.generate(ids, **how)
        assert torch.equal(tokens, expected) and torch.equal(logprobs, expected_logprobs)
        found.append(tokens)
    assert torch.equal(found[0], found[4])
    assert not any(torch.equal(*pair) for pair in zip(found[:3], found[1:4], strict=True))


def test_a_sample_does_not_depend_on_its_row(decoder):
    ids = prompts(3, 9, 11)
    expected = decoder.generate(ids, max_new_tokens=40, seed=[4, 5, 6], **SAMPLING)
    found = decoder.generate(ids[[2, 0, 1]], max_new_tokens=40, seed=[6, 4, 5], **SAMPLING)
    assert torch.equal(found, expected[[2, 0, 1]])


@pytest.mark.parametrize("how", [{}, SAMPLING | {"seed": 3}])
def test_stream_and_streamers(decoder, how):
    ids = prompts(3, 9, 12)
    expected = decoder.generate(ids, max_new_tokens=30, **how)[:, 9:]
    for given in (ids, ids.cpu()):
        steps = list(decoder.stream(given, max_new_tokens=30, **how))
        assert all(step.device == given.device for step in steps)
        assert torch.equal(torch.stack(steps, 1).to(DEVICE), expected)
    puts = Puts()
    assert torch.equal(decoder.generate(ids, max_new_tokens=30, streamer=puts, **how)[:, 9:], expected)
    assert puts.ended == 1 and torch.equal(puts.values[0], ids.cpu())
    assert torch.equal(torch.stack(puts.values[1:], 1), expected.cpu())


@pytest.mark.parametrize("steps_to_end", [0, 1, 8, 20])
def test_stream_stops_one_step_after_the_end(decoder, monkeypatch, steps_to_end):
    ids = prompts(3, 9, 4)
    free = decoder.generate(ids, max_new_tokens=40)[:, 9:]
    how = {"max_new_tokens": 40, "eos_token_id": free[:, steps_to_end], "pad_token_id": 1}
    expected = decoder.generate(ids, **how)[:, 9:]
    replays, replay = [], decoder.steps[3].replay
    monkeypatch.setattr(decoder.steps[3], "replay", lambda: replays.append(1) or replay())
    steps = list(decoder.stream(ids, **how))
    assert torch.equal(torch.stack(steps, 1), expected)
    assert len(replays) == len(steps)


def test_a_stream_from_changing_streams_of_the_caller(decoder):
    ids = prompts(3, 9, 13)
    expected = decoder.generate(ids, max_new_tokens=30)[:, 9:]
    torch.cuda.synchronize()
    found, steps = [], decoder.stream(ids, max_new_tokens=30)
    for number in range(30):
        with torch.cuda.stream(torch.cuda.Stream()) if number % 3 else torch.cuda.stream(None):
            found.append(next(steps) + 0)  # a yielded tensor is ready on every stream
            torch.cuda.current_stream().synchronize()
    assert torch.equal(torch.stack(found, 1), expected) and next(steps, None) is None


def test_leaving_a_stream_frees_the_decoder(decoder):
    ids = prompts(3, 9, 14)
    expected = decoder.generate(ids, max_new_tokens=30)
    for _ in range(3):
        steps = decoder.stream(ids, max_new_tokens=30)
        next(steps), next(steps)
        with pytest.raises(RuntimeError, match="this thread has a stream"):
            decoder.generate(ids, max_new_tokens=2)
        steps.close()
        assert torch.equal(decoder.generate(ids, max_new_tokens=30), expected)


def test_stop_strings(decoder):
    tokenizer = byte_level_tokenizer()
    ids = prompts(3, 9, 15)
    free = decoder.generate(ids, max_new_tokens=40)
    words = tokenizer.convert_ids_to_tokens(free[1, 9:].tolist())
    texts = [tokenizer.convert_tokens_to_string(words[first : first + 3]) for first in range(30)]
    whole = [first for first, text in enumerate(texts) if "\N{REPLACEMENT CHARACTER}" not in text]
    for first in whole[:2] + whole[-1:]:
        stop = texts[first]
        how = {"max_new_tokens": 40, "stop_strings": stop, "tokenizer": tokenizer, "pad_token_id": 0}
        criteria = transformers.StopStringCriteria(tokenizer, stop)
        lengths = [
            next((end for end in range(1, 41) if criteria(row[None, : 9 + end], None)), 40) for row in free.cpu()
        ]
        expected = free[:, : 9 + max(lengths)].clone()
        for row, length in enumerate(lengths):
            expected[row, 9 + length :] = 0
        assert lengths[1] <= first + 3
        assert torch.equal(decoder.generate(ids, **how), expected)
        assert torch.equal(torch.stack(list(decoder.stream(ids, **how)), 1), expected[:, 9:])


def test_nan_ends_its_own_sequence():
    model = make_model("mixtral")
    decoder = GraphDecoder(model, batch_sizes=(3,), max_length=MAX_LENGTH)
    ids = prompts(3, 9, 16)
    free = decoder.generate(ids, max_new_tokens=30)
    new = free[:, 9:].tolist()
    probed = torch.linspace(32, 96, 11).long()  # what a constructor reads
    others = {*new[0], *new[2], *ids.flatten().tolist(), *probed.tolist()}
    at, poison = next((at, token) for at, token in enumerate(new[1]) if token not in others)
    with torch.no_grad():
        model.model.embed_tokens.weight[poison] = torch.nan
    decoder = GraphDecoder(model, batch_sizes=(3,), max_length=MAX_LENGTH)
    with pytest.raises(NaNLogits, match=r"in sequences \[1\]") as error:
        decoder.generate(ids, max_new_tokens=30, pad_token_id=2)
    free[1, 9 + at + 1 :] = 2
    assert torch.equal(error.value.tokens, free)


def test_custom_generate(model, decoder):
    ids = prompts(3, 9, 17)
    expected = decoder.generate(ids, max_new_tokens=30)
    assert torch.equal(model.generate(ids, max_new_tokens=30, do_sample=False, custom_generate=decoder), expected)


def test_stats(model):
    decoder = GraphDecoder(model, batch_sizes=(1, 3), max_length=MAX_LENGTH)
    config = model.config
    row = config.num_key_value_heads * MAX_LENGTH * config.head_dim * 2
    before = decoder.stats()
    assert before.cache_bytes == 2 * config.num_hidden_layers * 4 * row and before.graph_bytes > 0
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    decoder.generate(prompts(3, 9, 18), max_new_tokens=40)
    end.record()
    stats = decoder.stats()
    end.synchronize()
    assert (stats.calls, stats.new_tokens, stats.steps) == (1, 120, 39)
    seconds = stats.time_to_first_token + 117 / stats.tokens_per_second
    assert 0.5 < seconds / (begin.elapsed_time(end) / 1e3) < 1.01
    decoder.close()
    assert decoder.stats().graph_bytes == 0 and decoder.stats().new_tokens == 120


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
    assert all(step.graph is not None for step in decoder.steps.values())
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
