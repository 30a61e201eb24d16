"""Fields of requests to `fp8moe serve`: each is applied, or refused by name; none is left out."""

import json

import pytest

from fp8moe.decode.request import UNSERVED
from tests.decode_models import tiny_mixtral
from tests.tiny_tokenizer import tiny_tokenizer

pytest.importorskip("fastapi", reason="serving needs fp8moe[serve]")
openai = pytest.importorskip("openai", reason="serving needs fp8moe[serve]")

from openai.types import completion_create_params as of_completions  # noqa: E402
from openai.types.chat import completion_create_params as of_chats  # noqa: E402

from fp8moe.serving.fields import Reader, UnknownModel  # noqa: E402

HI = {"messages": [{"role": "user", "content": "hi"}]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.arguments.x }}"
    "{% endfor %}|{% endfor %}{{ tools or '' }}{{ documents or '' }}{{ reasoning_effort }}{{ enable_thinking }}"
    "{% if add_generation_prompt %}>{% endif %}"
)


@pytest.fixture(scope="module")
def reader():
    return make_reader()


def make_reader(max_length=64, own_settings=True, **config):
    model, tokenizer = tiny_mixtral(vocab_size=97, eos_token_id=1), tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    for name, value in config.items():
        setattr(model.generation_config, name, value)
    return Reader("m", model, tokenizer, max_length, own_settings)


def read(reader, chat=False, **body):
    return reader.read(json.dumps((HI if chat else {"prompt": "hi"}) | body).encode(), chat)


def options(reader, **body):
    """What a completion's options are beyond those of an empty one."""
    plain = read(reader).options
    return {name: value for name, value in read(reader, **body).options.items() if value != plain.get(name)}


APPLIED = {
    "max_tokens": (3, {"max_new_tokens": 3}),
    "temperature": (0.5, {"do_sample": True, "temperature": 0.5}),
    "top_p": (0.5, {"do_sample": True, "top_p": 0.5}),
    "top_k": (7, {"do_sample": True, "top_k": 7}),
    "min_p": (0.25, {"do_sample": True, "min_p": 0.25}),
    "repetition_penalty": (1.5, {"repetition_penalty": 1.5}),
    "presence_penalty": (0.5, {"presence_penalty": 0.5}),
    "seed": (3, {"seed": 3}),
    "stop": (["a", "b"], {"stop_strings": ["a", "b"]}),
    "stop_token_ids": ([5], {"eos_token_id": [1, 5]}),
    "ignore_eos": (True, {"eos_token_id": []}),
    "logprobs": (0, {"return_logprobs": True}),
    "return_routed_experts": (True, {"return_routing": True}),
    "generation_config": ('{"max_new_tokens": 9, "stop_strings": "x"}', {"max_new_tokens": 9, "stop_strings": "x"}),
}
"""Fields of completions that become options of the decoder."""

CHAT = {
    "max_completion_tokens": (3, lambda asked: asked.options["max_new_tokens"] == 3),
    "logprobs": (True, lambda asked: asked.options["return_logprobs"]),
    "tools": ([TOOL], lambda asked: "'name': 'f'" in asked.text and asked.tools == [TOOL]),
    "documents": ([{"text": "d"}], lambda asked: "'text': 'd'" in asked.text),
    "reasoning_effort": ("high", lambda asked: "high" in asked.text),
    "chat_template_kwargs": ({"enable_thinking": False}, lambda asked: "False" in asked.text),
    "add_generation_prompt": (False, lambda asked: not asked.text.endswith(">")),
    "continue_final_message": (True, lambda asked: asked.text == "user:hi"),
    "stream": (True, lambda asked: asked.stream),
    "skip_special_tokens": (False, lambda asked: not asked.skip_special_tokens),
}
OTHERS = {"model", "messages", "prompt", "stream_options", "tool_choice", "add_special_tokens"}  # tested by themselves

NEUTRAL = {
    **{"n": (1, 2), "best_of": (1, 2), "frequency_penalty": (0.0, 0.5), "min_tokens": (0, 1), "length_penalty": (1, 2)},
    **{"echo": (False, True), "suffix": ("", "x"), "logit_bias": ({}, {"5": 1}), "use_beam_search": (False, True)},
    **{"include_stop_str_in_output": (False, True), "spaces_between_special_tokens": (True, False)},
    **{"response_format": ({"type": "text"}, {"type": "json_object"}), "top_logprobs": (0, 5), "store": (False, True)},
    **{"parallel_tool_calls": (True, False), "modalities": (["text"], ["audio"]), "verbosity": ("medium", "low")},
    **{"service_tier": ("auto", "priority"), "audio": ({}, {"voice": "a"}), "functions": ([], [TOOL])},
    "function_call": ("auto", {"name": "f"}),
}
"""Fields with a value that changes no answer, and one that would."""
LABELS = {"user", "request_id", "priority", "metadata", "safety_identifier"}
LABELS |= {"prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"}
OF_VLLM = {"prompt_logprobs", "bad_words", "allowed_token_ids", "truncate_prompt_tokens", "guided_json", "guided_regex"}
OF_VLLM |= {"structured_outputs", "chat_template", "mm_processor_kwargs", "logits_processors", "return_token_ids"}
OF_SGLANG = {"regex", "ebnf", "json_schema", "no_stop_trim", "lora_path", "session_params", "separate_reasoning"}


def test_no_field_is_left_out(reader):
    """Those of OpenAI's two requests, of vLLM and of SGLang: applied, neutral, a label, or refused by name."""
    known = APPLIED.keys() | CHAT.keys() | NEUTRAL.keys() | OTHERS | LABELS
    for chat, of in ((False, of_completions), (True, of_chats)):
        for name in {*of.CompletionCreateParamsBase.__annotations__, *OF_VLLM, *OF_SGLANG} - known:
            with pytest.raises(ValueError, match=f"^{name}: not a field that is served"):
                read(reader, chat, **{name: 1})
    assert known >= set(of_completions.CompletionCreateParamsBase.__annotations__)


@pytest.mark.parametrize("name", APPLIED)
def test_options_of_the_decoder(reader, name):
    value, expected = APPLIED[name]
    assert options(reader, **{name: value}) == expected
    assert options(reader, **{name: None}) == {}


@pytest.mark.parametrize("name", CHAT)
def test_chats(reader, name):
    value, holds = CHAT[name]
    assert holds(read(reader, chat=True, **{name: value}))
    assert not holds(read(reader, chat=True, **{name: None}))


@pytest.mark.parametrize("name", NEUTRAL)
def test_fields_that_are_not_served(reader, name):
    neutral, asks = NEUTRAL[name]
    chat = name not in of_completions.CompletionCreateParamsBase.__annotations__
    for value in (neutral, None):
        assert read(reader, chat, **{name: value}) == read(reader, chat)
    with pytest.raises(ValueError, match=f"^{name}"):
        read(reader, chat, **{name: asks})


def test_sampling_is_on_where_it_is_asked_for(reader):
    assert options(reader, temperature=0, top_p=0.5, top_k=5) == {}
    assert options(reader, top_p=1, top_k=-1, min_p=0) == {}
    assert options(reader, generation_config='{"top_k": 5}') == {}, "as by transformers, where sampling is off"
    assert options(reader, generation_config='{"top_k": 5, "do_sample": true}') == {"do_sample": True, "top_k": 5}
    sampled = make_reader(do_sample=True, top_k=20, top_p=0.9)
    assert read(sampled).options["do_sample"] and not read(sampled, temperature=0).options["do_sample"]
    asked = read(sampled, top_k=-1)
    assert asked.config.top_k is None and asked.config.top_p == 0.9 and "top_k" not in asked.options


def test_settings_without_effect_in_a_generation_config(reader):
    """Clients may write out all settings, also those whose default transformers does not keep in a config."""
    for name, neutral in UNSERVED.items():
        for value in neutral:
            asked = json.dumps({name: value})
            assert read(reader, generation_config=asked).options == read(reader).options, asked


def test_a_value_without_effect_does_not_hide_what_the_model_asks_for():
    reader = make_reader(no_repeat_ngram_size=3)
    assert read(reader, generation_config='{"no_repeat_ngram_size": 3}').config.no_repeat_ngram_size == 3
    with pytest.raises(ValueError, match="generation_config.no_repeat_ngram_size: 0 is not served"):
        read(reader, generation_config='{"no_repeat_ngram_size": 0}')


def test_prompts(reader):
    assert read(reader, prompt=["hi", "a"]).prompts == [[74, 75], [67]]
    assert read(reader, prompt=[5, 6]).prompts == [[5, 6]]
    assert read(reader, prompt=[[5], [6, 7], "a"]).prompts == [[5], [6, 7], [67]]
    for wrong in ([], [[]], "", None, [5, "a"], [True], [5.0], 3, {}, ["a"] * 129, [5] * 65, "a" * 400):
        with pytest.raises(ValueError, match="^prompt: "):
            read(reader, prompt=wrong)


WRONG = [
    (b"", "body: "),
    (b"\xff", "body: "),
    (b"[1]", "body: "),
    (b'{"prompt": "\\ud800"}', "body: "),
    (b'{"prompt": "x", "temperature": NaN}', "temperature: "),
    (b'{"prompt": "x", "temperature": 1e999}', "temperature: "),
    (b'{"prompt": "x", "max_tokens": 1' + b"0" * 1000 + b"}", "max_tokens: "),
    (b'{"prompt": "x", "max_tokens": true}', "max_tokens: "),
    (b'{"prompt": "x", "seed": 9223372036854775808}', "seed: "),
    (b'{"prompt": "x", "stream": 1}', "stream: "),
    (b'{"prompt": "x", "stream_options": {"include_usage": true}}', "stream_options: "),
    (b'{"prompt": "x", "stream": true, "stream_options": {"x": 1}}', "stream_options.x: "),
    (b'{"prompt": "x", "generation_config": "5"}', "generation_config: "),
    (b'{"prompt": "x", "generation_config": "{\\"num_beams\\": 2}"}', "generation_config.num_beams: 2 is not served"),
    (b'{"prompt": "x", "generation_config": "{\\"stop_strings\\": 5}"}', "generation_config.stop_strings: it should"),
    (b'{"prompt": "x", "generation_config": "{\\"temperature\\": \\"x\\"}"}', "generation_config.temperature: it sh"),
    (b'{"prompt": "x", "generation_config": "{\\"do_sample\\": \\"x\\"}"}', "generation_config.do_sample: it should"),
    (b'{"prompt": "x", "generation_config": "{\\"no_such\\": 2}"}', "generation_config.no_such: 2 is not served"),
    (b'{"prompt": "x", "stop": ""}', "stop: "),
    (b'{"prompt": "x", "stop": ' + json.dumps(["a"] * 17).encode() + b"}", "stop: "),
    (b'{"prompt": ' + b"[" * 100_000 + b"}", "body: "),
]


@pytest.mark.parametrize("body, message", WRONG)
def test_bodies_that_are_wrong(reader, body, message):
    with pytest.raises(ValueError) as refused:
        reader.read(body, chat=False)
    assert str(refused.value).startswith(message) and len(str(refused.value)) < 300


def user(content, **more):
    return [{"role": "user", "content": content, **more}]


def test_messages(reader):
    assert read(reader, True, messages=user([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])).text == (
        "user:a b|>"
    )
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": "y"}'}}
    said = [{"role": "assistant", "content": "so", "tool_calls": [call]}, {"role": "tool", "content": "z"}]
    assert read(reader, True, messages=said).text == "assistant:soy|tool:z|>", "content stays beside tool calls"
    assert "f" not in read(reader, True, tools=[TOOL], tool_choice="none").text
    for messages, message in (
        ([], "messages: "),
        (user(5), "messages.0.content: "),
        (user([{"type": "image_url", "image_url": {"url": "x"}}]), "messages.0.content."),
        ([{"content": "x"}], "messages.0.role: "),
        (user("x", audio={"id": "x"}), "messages.0.audio: "),
        (user("x", beams=3), "messages.0.beams: not a field"),
        (user("x", tool_calls=[{"function": {"name": "f", "arguments": "{"}}]), "messages.0.tool_calls.0.function."),
        (user("x" * 500), "messages: longer than 64 tokens"),
        (user("") * 400, "messages: longer than 64 tokens"),
    ):
        with pytest.raises(ValueError) as refused:
            read(reader, True, messages=messages)
        assert str(refused.value).startswith(message), refused.value


def test_templates_take_variables_alone(reader):
    for name in ("chat_template", "padding", "max_length", "truncation", "tokenizer_kwargs", "tools", "tokenize"):
        with pytest.raises(ValueError, match=f"^chat_template_kwargs.{name}: not a variable"):
            read(reader, True, chat_template_kwargs={name: 5})
    plain = make_reader()
    plain._tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    for more in ({"tools": [TOOL]}, {"reasoning_effort": "low"}):
        with pytest.raises(ValueError, match=f"^{[*more][0]}: the chat template of this model"):
            read(plain, True, **more)
    plain._tokenizer.chat_template = "{{ raise_exception('no') }}"
    with pytest.raises(ValueError, match=r"^messages: the chat template cannot take them \(no\)"):
        read(plain, True)


def test_models_by_name(reader):
    assert read(reader, model="m").prompts
    with pytest.raises(UnknownModel, match="^model: 'other' is not served here; the model is 'm'"):
        read(reader, model="other")


def test_an_engine_with_one_setting_for_all():
    """What requests to transformers' continuous batching may say."""
    fixed = make_reader(own_settings=False)
    assert read(fixed, max_tokens=3, stream=True).options["max_new_tokens"] == 3
    for name, (value, _) in APPLIED.items():
        if name not in ("max_tokens", "logprobs"):
            with pytest.raises(ValueError, match=f"^{name}: this model is served with the settings of its gener"):
                read(fixed, **{name: value})
