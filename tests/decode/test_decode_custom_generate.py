"""``model.generate(custom_generate=decoder)``: transformers' arguments, results and what is refused."""

from functools import partial

import pytest
import torch

from fp8moe.decode import GraphDecoder
from tests.decode_models import Puts, byte_level_tokenizer, tiny_mixtral
from tests.tiny_moe_models import MODELS
from tests.transformers_models import left_padded, prompts

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def model():
    return tiny_mixtral()


@pytest.fixture(scope="module")
def decoder(model):
    return GraphDecoder(model, batch_sizes=(1, 4), max_length=64)


@pytest.mark.parametrize(
    "how",
    [
        {"max_new_tokens": 12},
        {"max_length": 20},
        {},
        {"max_new_tokens": 12, "repetition_penalty": 1.3},
        {"max_new_tokens": 12, "top_k": 3, "temperature": 0.2},
        {"max_new_tokens": 30, "eos_token_id": [5, 17, 40, 77, 90], "pad_token_id": 2},
        {"generation_config": transformers.GenerationConfig(max_new_tokens=7, eos_token_id=9)},
        {"max_new_tokens": 12, "use_cache": True, "return_dict_in_generate": False},
        {"max_new_tokens": 12, "prompt_lookup_num_tokens": None, "min_p": 0.1},
    ],
)
def test_equals_model_generate(model, decoder, how):
    for batch, padding in ((1, [0]), (3, [4, 0, 6])):
        ids = prompts(batch, 12, seed=batch)
        mask = left_padded(ids, *padding)
        if "repetition_penalty" in how:
            mask = torch.ones_like(ids)  # transformers 5.17 counts padding as tokens of the prompt
        expected = model.generate(ids, attention_mask=mask, do_sample=False, **how)
        found = model.generate(ids, attention_mask=mask, do_sample=False, custom_generate=decoder, **how)
        assert torch.equal(found, expected)


def test_a_prompt_that_has_pad_tokens(model, decoder):
    ids = prompts(1, 12)
    ids[0, :3] = ids[0, 7] = 0
    for mask in (None, torch.ones_like(ids)):
        how = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 12}
        assert torch.equal(model.generate(ids, custom_generate=decoder, **how), model.generate(ids, **how))


@pytest.mark.parametrize("name", ["Gemma4ForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration"])
def test_prompts_without_images_of_models_that_take_them(name):
    model, ids = MODELS[name].build(), prompts(2, 6)
    decoder = GraphDecoder(model, batch_sizes=(2,), max_length=16, fuse=False)
    how = {"attention_mask": left_padded(ids, 2, 0), "do_sample": False, "max_new_tokens": 4}
    assert torch.equal(model.generate(ids, custom_generate=decoder, **how), model.generate(ids, **how))


def test_sampling():
    model = tiny_mixtral()
    decoder = GraphDecoder(model, batch_sizes=(4,), max_length=64)
    ids = prompts(3, 12)
    how = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "seed": [1, 2, 3]}
    expected = decoder.generate(ids, max_new_tokens=16, repetition_penalty=1.1, presence_penalty=0.5, **how)
    call = partial(model.generate, ids, max_new_tokens=16, custom_generate=decoder, presence_penalty=0.5)
    assert torch.equal(call(repetition_penalty=1.1, **how), expected)
    model.generation_config.update(top_p=0.9, repetition_penalty=1.1, min_p=0.01)
    del how["top_p"], how["min_p"]
    assert torch.equal(call(**how), expected), "the model's configuration"
    model.generation_config.update(top_k=5)
    assert torch.equal(call(**(how | {"top_k": 0})), call(**(how | {"top_k": 128}))), "0 is off for transformers"


def test_logprobs_and_dictionaries(model, decoder):
    ids = prompts(2, 12)
    expected, logprobs = decoder.generate(ids, max_new_tokens=8, return_logprobs=True)
    call = partial(model.generate, ids, max_new_tokens=8, do_sample=False, custom_generate=decoder)
    output = call(return_dict_in_generate=True)
    assert type(output) is transformers.generation.GenerateDecoderOnlyOutput
    assert torch.equal(output.sequences, expected)
    tokens, found = call(return_logprobs=True)
    assert torch.equal(tokens, expected) and torch.equal(found, logprobs)
    output, found = call(return_logprobs=True, return_dict_in_generate=True)
    assert torch.equal(output.sequences, expected) and torch.equal(found, logprobs)


def test_streamers(model, decoder):
    ids = prompts(1, 12)
    theirs, ours = Puts(), Puts()
    how = {"do_sample": False, "max_new_tokens": 8}
    model.generate(ids, streamer=theirs, **how)
    model.generate(ids, custom_generate=partial(decoder, streamer=ours), **how)
    assert ours.ended == 1 and len(ours.values) == len(theirs.values) == 9
    assert all(torch.equal(*pair) for pair in zip(ours.values, theirs.values, strict=True))
    for bound in (decoder, partial(decoder, streamer=ours)):
        with pytest.raises(ValueError, match="^streamer: model.generate does not pass it on; give it to the decoder"):
            model.generate(ids, streamer=theirs, custom_generate=bound, **how)


def test_stop_strings(model, decoder):
    tokenizer = byte_level_tokenizer()
    ids = prompts(1, 12)
    text = tokenizer.decode(model.generate(ids, do_sample=False, max_new_tokens=20)[0, 12:])
    how = {"do_sample": False, "max_new_tokens": 20, "stop_strings": [text[8:12]]}
    expected = model.generate(ids, tokenizer=tokenizer, **how)
    assert expected.shape[1] < 32
    assert torch.equal(model.generate(ids, custom_generate=partial(decoder, tokenizer=tokenizer), **how), expected)
    with pytest.raises(ValueError, match="tokenizer"):
        model.generate(ids, tokenizer=tokenizer, custom_generate=decoder, **how)


class Nothing(transformers.LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores


class Never(transformers.StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return torch.zeros(len(input_ids), dtype=torch.bool)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"num_beams": 2}, "^custom_generate: GraphDecoder serves greedy search and sampling, not beam_search"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "^custom_generate: .* not contrastive_search"),
        ({"num_return_sequences": 2, "do_sample": True}, "^num_return_sequences: GraphDecoder returns one, got 2"),
        ({"output_scores": True}, "^output_scores: GraphDecoder returns tokens"),
        ({"output_hidden_states": True}, "^output_hidden_states: GraphDecoder returns tokens"),
        ({"no_repeat_ngram_size": 2}, "^logits_processor: GraphDecoder does not apply NoRepeatNGramLogitsProcessor"),
        ({"do_sample": True, "typical_p": 0.5}, "^logits_processor: GraphDecoder does not apply TypicalLogitsWarper"),
        ({"suppress_tokens": [4]}, "^logits_processor: .* SuppressTokensLogitsProcessor"),
        ({"logits_processor": [Nothing()]}, "^logits_processor: GraphDecoder does not apply Nothing"),
        (
            {"logits_processor": [transformers.RepetitionPenaltyLogitsProcessor(1.5)]},
            "^logits_processor: GraphDecoder does not apply RepetitionPenaltyLogitsProcessor",
        ),
        ({"stopping_criteria": [Never()]}, "^stopping_criteria: GraphDecoder does not apply Never"),
        ({"max_time": 1.0}, "^stopping_criteria: GraphDecoder does not apply MaxTimeCriteria"),
        ({"position_ids": torch.arange(3, 12)[None]}, "^position_ids: GraphDecoder counts the tokens .* from 0"),
        ({"max_new_tokens": 60}, "^max_new_tokens: 9 tokens of prompt and 60 new ones are more than max_length, 64"),
        ({"output_router_logits": True}, "^output_router_logits: GraphDecoder does not pass it to the model"),
    ],
)
def test_what_is_refused(model, decoder, how, message):
    with pytest.raises(ValueError, match=message):
        model.generate(prompts(1, 9), **({"max_new_tokens": 4} | how), custom_generate=decoder)


def test_a_filled_cache_is_refused(model, decoder):
    ids = prompts(1, 9)
    past = model(ids[:, :5], use_cache=True).past_key_values
    with pytest.raises(ValueError, match="^(past_key_values|cache): GraphDecoder begins with an empty cache"):
        model.generate(ids, past_key_values=past, max_new_tokens=4, custom_generate=decoder)


def test_embeddings_are_refused(model, decoder):
    with pytest.raises(ValueError, match="^inputs_embeds: GraphDecoder does not pass it to the model"):
        model.generate(inputs_embeds=torch.randn(1, 5, 64), max_new_tokens=4, custom_generate=decoder)


def test_another_model_is_refused(decoder):
    with pytest.raises(ValueError, match="^custom_generate: this decoder was made for another MixtralForCausalLM"):
        tiny_mixtral().generate(prompts(1, 9), max_new_tokens=4, custom_generate=decoder)
