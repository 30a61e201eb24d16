"""GraphDecoder.run, prefixes and chunks with CUDA graphs: the model itself finds the tokens likely that they gave."""

import itertools
import random

import pytest
import torch

from fp8moe.decode import GraphDecoder, NaNLogits
from fp8moe.decode.attention import NAME as FLASH_NAME
from fp8moe.hf import register
from tests import linear_attention_models
from tests.transformers_models import BASE, MLA, left_padded, prompts, random_model

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
MAX_LENGTH = 128
SHAPE = BASE | {"hidden_size": 128, "max_position_embeddings": 256, "initializer_range": 0.05}
MODELS = {
    "mixtral": {"intermediate_size": 128, "num_local_experts": 8, "num_key_value_heads": 2, "sliding_window": 8},
    "qwen3_moe": {"moe_intermediate_size": 128, "num_experts": 8, "num_key_value_heads": 2, "head_dim": 32},
    "gpt_oss": {
        **{"intermediate_size": 128, "num_local_experts": 8, "num_key_value_heads": 2, "head_dim": 64},
        "sliding_window": 8,
    },
    "deepseek_v3": MLA | {"moe_intermediate_size": 128},
}
FLASH = ("mixtral", "qwen3_moe", "gpt_oss")


def make_model(name):
    register()
    own = "eager" if name == "gpt_oss" else "sdpa"  # sdpa has no sinks
    how = dict(dtype=torch.bfloat16, experts_implementation="fp8moe", attn_implementation=own)
    return random_model(name, SHAPE | MODELS[name], **how).to(DEVICE)


@pytest.fixture(scope="module")
def model():
    return make_model("qwen3_moe")


@pytest.fixture(scope="module")
def decoder(model):
    return GraphDecoder(model, batch_sizes=(1, 4, 8), max_length=MAX_LENGTH)


def mixed(count, seed=0, device=DEVICE):
    draw = random.Random(seed)
    for index in range(count):
        length, new = draw.randint(1, 80), draw.randint(1, 40)
        yield {"input_ids": prompts(1, length, seed=index, device=device)[0], "max_new_tokens": new}


def rounds_alike(name):
    """Whether the fused model rounds as the model does. Absorbed attention does not, and tiny models' experts flip."""
    return name != "deepseek_v3"


@torch.no_grad()
def unlikely(model, prompt, new):
    """Count the tokens that are neither the model's own choice nor as good as that but for rounding in 16 bits."""
    tokens = torch.cat([prompt, new]).to(DEVICE)[None, :-1]
    logits = model(input_ids=tokens, use_cache=False).logits[0, len(prompt) - 1 :].float()
    assert logits.isfinite().all()
    chosen = logits.gather(1, new.to(DEVICE)[:, None])[:, 0]
    return int((chosen < logits.amax(1) - 0.15 * logits.std()).sum())


def check_likely(model, prompt, new):
    """One token in ten may be unlikely: an expert of a tiny model, chosen otherwise in a near tie, is a large part."""
    assert unlikely(model, prompt, new) <= max(1, 0.1 * len(new))


@pytest.mark.parametrize("name", MODELS)
def test_requests_get_likely_tokens(name):
    model = make_model(name)
    decoder = GraphDecoder(model, batch_sizes=(1, 4, 8), max_length=MAX_LENGTH, fuse=rounds_alike(name))
    assert decoder.capabilities[:3] == (FLASH_NAME if name in FLASH else None, True, True), decoder.attention
    given = [*mixed(40)]
    found = dict(decoder.run(given))
    count = 0
    for index, request in enumerate(given):
        assert len(found[index]) == request["max_new_tokens"] and found[index].device == request["input_ids"].device
        count += unlikely(model, request["input_ids"], found[index])
    # GPT-OSS, whose own softmax is in bfloat16, had 9 of 1000; Qwen3 3.
    assert count <= 0.02 * sum(map(len, found.values()))


def test_prompts_that_come_alone_and_long_ones(monkeypatch):
    """Alone they have a graph of one row; long ones that come together have none, and share few lengths."""
    monkeypatch.setitem(SHAPE, "max_position_embeddings", 2048)
    model, read = make_model("qwen3_moe"), []
    decoder = GraphDecoder(model, batch_sizes=(64,), max_length=1024)
    step_of = decoder.step_of
    monkeypatch.setattr(decoder, "step_of", lambda size, length: read.append((size, length)) or step_of(size, length))
    for turn in range(4):
        asked = [
            {"input_ids": prompts(1, length, seed=turn + length, device=DEVICE)[0], "max_new_tokens": 9}
            for length in (700 + turn, 730 - turn, 740 - turn)
        ]
        for count in (1, 3):
            for index, tokens in decoder.run(one | {"eos_token_id": ()} for one in asked[:count]):
                check_likely(model, asked[index]["input_ids"], tokens)
    assert read == [(1, 1024), *4 * [(3, 768)]]


def test_a_request_alone_gets_what_generate_gives(model):
    """The same shapes, so the same bits."""
    decoder = GraphDecoder(model, max_length=MAX_LENGTH)
    for how in ({}, {"do_sample": True, "temperature": 0.9, "top_k": 20, "seed": 5}, {"eos_token_id": [*range(30)]}):
        given = [request | how for request in mixed(6, seed=2, device="cpu")]
        found = dict(decoder.run(given))
        for index, request in enumerate(given):
            expected = decoder.generate(**request | {"input_ids": request["input_ids"][None]})
            assert torch.equal(found[index], expected[0, len(request["input_ids"]) :])


def test_end_tokens_and_refused_requests(model, decoder):
    free = dict(decoder.run(mixed(20)))
    ends = {index: int(new[len(new) // 2]) for index, new in free.items()}
    given = [request | {"eos_token_id": ends[index]} for index, request in enumerate(mixed(20))]
    given[7] = given[7] | {"max_new_tokens": MAX_LENGTH}
    for index, new in decoder.run(given):
        if index == 7:
            assert isinstance(new, ValueError) and "more than max_length" in str(new)
            continue
        assert int(new[-1]) == ends[index] or len(new) == given[index]["max_new_tokens"]
        assert not (new[:-1] == ends[index]).any()
        check_likely(model, given[index]["input_ids"], new)


def test_nan_ends_its_own_sequence():
    model = make_model("qwen3_moe")
    poisoned = 100  # not among the probe's tokens
    with torch.no_grad():
        model.get_input_embeddings().weight[poisoned] = torch.nan
    decoder = GraphDecoder(model, batch_sizes=(4,), max_length=MAX_LENGTH)
    bad = {"input_ids": torch.tensor([5, poisoned, 7], device=DEVICE), "max_new_tokens": 20}
    good = [request for request in mixed(24) if not (request["input_ids"] == poisoned).any()]
    given = [bad, *good[:3], bad, *good[3:], bad]
    served = 0
    for index, new in [*decoder.run(given)]:
        if given[index] is bad:
            assert isinstance(new, NaNLogits) and len(new.tokens) == 0
        elif isinstance(new, NaNLogits):
            assert new.tokens[-1] == poisoned
        else:
            check_likely(model, given[index]["input_ids"], new)
            served += 1
    assert served >= 5


def test_closing_early_frees_the_rows(decoder):
    ids = prompts(3, 9, device=DEVICE)
    expected = decoder.generate(ids, max_new_tokens=20)
    running = decoder.run(mixed(10_000))
    assert len([*itertools.islice(running, 5)]) == 5
    running.close()
    assert torch.equal(decoder.generate(ids, max_new_tokens=20), expected)


def test_another_stream_and_a_caller_that_changes_it(decoder, model):
    given = [*mixed(12)]
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        running = decoder.run(given)
        found = dict(itertools.islice(running, 3))
    found |= dict(running)
    torch.cuda.synchronize()
    for index, request in enumerate(given):
        check_likely(model, request["input_ids"], found[index])


@pytest.mark.parametrize("name", ["Qwen3NextForCausalLM", "GraniteMoeHybridForCausalLM", "Lfm2MoeForCausalLM"])
def test_states_of_linear_attention(name):
    """In float32, where tokens are equal."""
    model = linear_attention_models.build(name, experts_implementation="batched_mm").to(DEVICE)
    decoder = GraphDecoder(model, batch_sizes=(1, 4), max_length=MAX_LENGTH)
    assert decoder.capabilities.ragged
    given = [*mixed(12, seed=4)]
    for index, new in [*decoder.run(given)]:
        ids = given[index]["input_ids"][None]
        expected = model.generate(ids, do_sample=False, max_new_tokens=given[index]["max_new_tokens"])
        assert torch.equal(new, expected[0, ids.shape[1] :])


@pytest.mark.parametrize("name", MODELS)
def test_prefixes(name):
    model = make_model(name)
    decoder = GraphDecoder(model, batch_sizes=(4,), max_length=MAX_LENGTH, fuse=rounds_alike(name))
    beginning, ids = prompts(1, 40, 1, DEVICE)[0], prompts(4, 20, 2, DEVICE)
    mask = left_padded(ids, 0, 7, 19, 12)
    prefix = decoder.prefix(beginning)
    for shown in (None, mask):
        out = decoder.generate(ids, attention_mask=shown, prefix=prefix, max_new_tokens=20)
        for row in range(4):
            own = ids[row] if shown is None else ids[row][shown[row].bool()]
            check_likely(model, torch.cat([beginning, own]), out[row, 20:])
    given = [request | {"prefix": prefix if index % 2 else None} for index, request in enumerate(mixed(12))]
    given = [request | {"max_new_tokens": min(8, request["max_new_tokens"])} for request in given]
    for index, new in [*decoder.run(given)]:
        own = given[index]["input_ids"]
        check_likely(model, torch.cat([beginning, own]) if index % 2 else own, new)


@pytest.mark.parametrize("name", MODELS)
def test_chunks(name):
    model = make_model(name)
    ids = prompts(3, 90, 3, DEVICE)
    mask = left_padded(ids, 0, 33, 70)
    for chunk in (7, 32):
        decoder = GraphDecoder(model, batch_sizes=(3,), max_length=MAX_LENGTH, prefill_chunk=chunk)
        out = decoder.generate(ids, attention_mask=mask, max_new_tokens=20)
        for row in range(3):
            check_likely(model, ids[row][mask[row].bool()], out[row, 90:])


def test_memory_of_a_long_prompt_is_that_of_a_chunk(model):
    """The prompt's own keys and values are in the cache before."""

    def peak(length):
        decoder = GraphDecoder(model, max_length=40_000, prefill_chunk=1024)
        decoder.generate(prompts(1, 8, device=DEVICE), max_new_tokens=2)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        decoder.generate(prompts(1, length, device=DEVICE), max_new_tokens=2)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    assert peak(32_768) <= 1.5 * peak(4096)
