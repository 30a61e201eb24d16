"""`fp8moe serve`: answers over HTTP are those of generate, whoever else asks, comes and goes; what is wrong is told."""

import asyncio
import json
import os
import re
import shutil
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from queue import SimpleQueue

import pytest
import torch

import fp8moe
from fp8moe import FP8Linear, GroupedExperts
from fp8moe.cli import main
from fp8moe.commands import serve
from fp8moe.decode import GraphDecoder
from fp8moe.weights import quantize_checkpoint
from tests.decode_models import tiny_mixtral
from tests.global_settings import SETTINGS
from tests.tiny_moe_models import MODELS
from tests.tiny_tokenizer import tiny_tokenizer

transformers = pytest.importorskip("transformers")
pytest.importorskip("fastapi", reason="serving needs fp8moe[serve]")
uvicorn = pytest.importorskip("uvicorn", reason="serving needs fp8moe[serve]")
openai = pytest.importorskip("openai", reason="serving needs fp8moe[serve]")

from fp8moe import serving  # noqa: E402
from fp8moe.serving.fields import Asked  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

NAME, MAX_LENGTH, SLOTS = "tiny", 48, 4


def tiny_model():
    return tiny_mixtral(vocab_size=97, eos_token_id=1)


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


@pytest.fixture(scope="module")
def decoder():
    decoder = GraphDecoder(tiny_model(), batch_sizes=(1, SLOTS), max_length=MAX_LENGTH)
    for size in (1, SLOTS):  # from then on it takes no more memory
        assert len([*decoder.run([{"input_ids": torch.tensor([5]), "max_new_tokens": 2}] * size)]) == size
    return decoder


@contextmanager
def running(app):
    """Serve an application; yield its address."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


@pytest.fixture(scope="module")
def manager(decoder):
    return serving.DecoderManager(decoder)


@pytest.fixture(scope="module")
def url(decoder, tokenizer, manager):
    with running(serving.make_app(NAME, decoder.model, tokenizer, manager)) as address:
        yield f"{address}/v1"
    assert not manager._thread.is_alive()


@pytest.fixture(scope="module")
def client(url):
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0)


def expected(decoder, tokenizer, prompt, new, **how):
    """The text of generate's answer."""
    ids = torch.tensor([tokenizer(prompt)["input_ids"]])
    tokens = decoder.generate(ids, max_new_tokens=new, **how)[0, ids.shape[1] :]
    return tokenizer.decode(tokens, skip_special_tokens=True)


def wait_until_idle(manager):
    """The decoder's turn is free, and no client is left."""
    deadline = time.monotonic() + 10
    while manager.open:
        assert time.monotonic() < deadline
    with manager.decoder.turn():
        pass


def test_answers_are_those_of_generate(client, decoder, tokenizer):
    text = expected(decoder, tokenizer, "a red fox", 12)
    messages = [{"role": "user", "content": "a red fox"}]
    completion = client.completions.create(model=NAME, prompt="a red fox", max_tokens=12)
    chat = client.chat.completions.create(model=NAME, messages=messages, max_completion_tokens=12)
    assert completion.choices[0].text == chat.choices[0].message.content == text
    assert completion.usage.prompt_tokens == 9 and completion.usage.completion_tokens == chat.usage.completion_tokens
    how = {"max_tokens": 12, "stream": True, "stream_options": {"include_usage": True}}
    *parts, usage = client.completions.create(model=NAME, prompt="a red fox", **how)
    assert "".join(part.choices[0].text for part in parts) == text and usage.usage == completion.usage
    assert parts[-1].choices[0].finish_reason == completion.choices[0].finish_reason
    parts = [*client.chat.completions.create(model=NAME, messages=messages, max_tokens=12, stream=True)]
    assert "".join(part.choices[0].delta.content or "" for part in parts) == text
    assert [model.id for model in client.models.list()] == [NAME]


def test_an_answer_without_a_limit_takes_the_room_that_is_left(client, decoder, tokenizer):
    text = expected(decoder, tokenizer, "endless", MAX_LENGTH - 7, eos_token_id=())
    answer = client.completions.create(
        model=NAME, prompt="endless", extra_body={"generation_config": '{"max_new_tokens": 41}'}
    )
    assert answer.choices[0].text == text and answer.choices[0].finish_reason == "length"
    answer = client.completions.create(model=NAME, prompt="endless")
    assert text.startswith(answer.choices[0].text)


def test_the_pad_token_in_a_prompt_is_a_token(client, decoder, tokenizer):
    """Of letters that the tokenizer does not know."""
    ids = torch.tensor([tokenizer("éaé")["input_ids"]])
    assert (ids == decoder.model.generation_config.pad_token_id).sum() == 2
    tokens = decoder.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8)[0, 3:]
    answer = client.completions.create(model=NAME, prompt="éaé", max_tokens=8)
    assert answer.choices[0].text == tokenizer.decode(tokens, skip_special_tokens=True)


@pytest.mark.parametrize("setting", SETTINGS)
def test_settings_change_nothing(tokenizer, setting):
    model = tiny_model()
    with SETTINGS[setting]():
        decoder = GraphDecoder(model, batch_sizes=(1,), max_length=MAX_LENGTH)
        with running(serving.make_app(NAME, decoder.model, tokenizer, serving.DecoderManager(decoder))) as address:
            client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
            answer = client.completions.create(model=NAME, prompt="a red fox", max_tokens=8)
    assert answer.choices[0].text == expected(decoder, tokenizer, "a red fox", 8)


def test_sampling_is_each_requests_own(client, decoder, tokenizer):
    how = {"temperature": 0.8, "top_p": 0.9, "seed": 5}
    generator = torch.get_rng_state()
    first, again = (
        client.completions.create(model=NAME, prompt="dice", max_tokens=12, presence_penalty=0.5, **how)
        for _ in range(2)
    )
    text = expected(decoder, tokenizer, "dice", 12, do_sample=True, presence_penalty=0.5, **how)
    assert first.choices[0].text == again.choices[0].text == text
    assert torch.equal(torch.get_rng_state(), generator), "a seed is nothing to other requests"


def test_stop_strings_end_the_text_and_are_not_in_it(client, decoder, tokenizer):
    text = expected(decoder, tokenizer, "stop it", 12)
    for stop in (text[8:10], ["never", text[6:11]], text[:1]):
        end = min(text.find(string) for string in ([stop] if isinstance(stop, str) else stop) if string in text)
        how = {"model": NAME, "prompt": "stop it", "max_tokens": 12, "stop": stop}
        assert client.completions.create(**how).choices[0].text == text[:end]
        parts = client.completions.create(**how, stream=True)
        assert "".join(part.choices[0].text for part in parts) == text[:end]


def test_many_clients_some_of_which_go(url, decoder, tokenizer, manager):
    """Twelve over four rows: those that stay get what they would get alone, the others the beginning of it."""
    prompts = [chr(97 + index) * (1 + 3 * index) for index in range(12)]
    new = [8 + index % 5 for index in range(12)]

    async def ask(client, index):
        how = {"model": NAME, "prompt": prompts[index], "max_tokens": new[index]}
        if index % 3 == 0:
            call = asyncio.create_task(client.completions.create(**how))
            if index % 2:
                await asyncio.sleep(0.05)
                call.cancel()
                return None
            return (await call).choices[0].text
        parts, text = await client.completions.create(**how, stream=True), ""
        async for part in parts:
            text += part.choices[0].text
            if index % 4 == 1 and len(text) >= 4:
                await parts.close()
                break
        return text

    async def all_together():
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, index) for index in range(12)))

    texts = [expected(decoder, tokenizer, prompt, most) for prompt, most in zip(prompts, new, strict=True)]
    before = decoder.stats()
    got = asyncio.run(all_together())
    wait_until_idle(manager)
    after = decoder.stats()
    assert after.cache_bytes == before.cache_bytes and after.new_tokens - before.new_tokens < sum(new)
    for index, (text, whole) in enumerate(zip(got, texts, strict=True)):
        if index % 4 == 1 and index % 3:
            assert whole.startswith(text)
        elif text is not None:
            assert text == whole, index


HI = [{"role": "user", "content": "x"}]
BAD = [
    ({"prompt": "x" * 200}, "prompt: 200 tokens of prompt and 1 new ones are more than max_length, 48"),
    ({"prompt": "x", "max_tokens": 100}, "max_tokens: 1 tokens of prompt and 100 new ones are more than"),
    (
        {"prompt": "x", "extra_body": {"generation_config": '{"max_new_tokens": 0}'}},
        "generation_config.max_new_tokens: e",
    ),
    ({"messages": HI, "max_completion_tokens": 100}, "max_completion_tokens: "),
    ({"messages": [{"role": "user", "content": "x" * 60}]}, "messages: 60 tokens of prompt and 1 new ones"),
    ({"prompt": {}}, "prompt: expected a string, a list of tokens, or a list of these, got {}"),
    ({"prompt": ""}, "prompt: expected one or more tokens, got []"),
    ({"prompt": [5, 97]}, "prompt: expected tokens between 0 and 96, got 97"),
    ({"prompt": [5, 2**63]}, "prompt: expected one or more tokens, got [5, 9223372036854775808]"),
    (
        {"prompt": "x", "extra_body": {"stop_token_ids": [97]}},
        "stop_token_ids: expected tokens between 0 and 96, got [",
    ),
    ({"prompt": "x", "temperature": -1.0}, "temperature: it should be greater than or equal to 0, got -1"),
    ({"prompt": "x", "n": 2}, "n: it should be less than or equal to 1, got 2"),
    ({"prompt": "x", "logprobs": 1}, "logprobs: it should be less than or equal to 0, got 1"),
    ({"prompt": "x", "stop": 5}, "stop: it should be a valid"),
    ({"prompt": "x", "extra_body": {"beams": 3}}, "beams: not a field that is served"),
    ({"prompt": "x", "extra_body": {"generation_config": '{"num_beams": 3}'}}, "generation_config.num_beams: 3 is not"),
    ({"messages": []}, "messages: List should have at least 1 item"),
    ({"messages": [{"content": "x"}]}, "messages.0.role: Field required"),
]


@pytest.mark.parametrize("stream", [False, True])
def test_bad_requests_are_told_what_is_wrong(client, stream):
    for given, message in BAD:
        create = client.chat.completions.create if "messages" in given else client.completions.create
        with pytest.raises(openai.BadRequestError) as refused:
            create(**{"model": NAME, "stream": stream} | given)
        assert refused.value.body["message"].startswith(message), given
    with pytest.raises(openai.BadRequestError, match="body: it should be an object, got \\[1\\]"):
        client.post("/completions", cast_to=object, body=[1])
    with pytest.raises(openai.NotFoundError, match="model: 'gpt' is not served here; the model is 'tiny'"):
        client.completions.create(model="gpt", prompt="x")


def test_a_decoder_that_fails_is_told_and_ends_nothing_else(decoder, tokenizer, monkeypatch):
    manager = serving.DecoderManager(decoder)
    with running(serving.make_app(NAME, decoder.model, tokenizer, manager)) as address:
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
        monkeypatch.setattr(decoder.steps[1], "replay", lambda: 1 // 0)
        parts = client.completions.create(model=NAME, prompt="a", max_tokens=5, stream=True)
        with pytest.raises(openai.APIError) as failed:
            list(parts)
        assert failed.value.body["message"] == "the decoder has failed: integer division or modulo by zero"
        with pytest.raises(openai.InternalServerError, match="the decoder has failed") as failed:
            client.completions.create(model=NAME, prompt="a")
        assert failed.value.status_code == 503
        with pytest.raises(urllib.error.HTTPError, match="503"):
            urllib.request.urlopen(f"{address}/health")


def test_what_runs_at_the_end_is_cancelled(decoder, tokenizer):
    """uvicorn gives answers a second; then the stream ends, and so does the decoder's thread."""
    manager = serving.DecoderManager(decoder)
    replay = decoder.steps[1].replay
    decoder.steps[1].replay = lambda: time.sleep(0.05) or replay()
    with running(serving.make_app(NAME, decoder.model, tokenizer, manager)) as address:
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
        how = {"extra_body": {"generation_config": '{"max_new_tokens": 47}'}}
        next(iter(client.completions.create(model=NAME, prompt="a", stream=True, **how)))
    del decoder.steps[1].replay
    assert not manager._thread.is_alive() and not manager.open
    wait_until_idle(manager)


def test_a_stop_that_comes_with_a_request(decoder, tokenizer, monkeypatch):
    """The thread takes the word to stop from the queue of requests, and ends all the same."""
    manager, stopping = serving.DecoderManager(decoder), threading.Event()

    class Gone(SimpleQueue):
        def qsize(self):  # the thread looks here just before it takes requests
            if not stopping.is_set():
                stopping.set()
                manager._stopping = True
                manager._inbox.put(None)
            return super().qsize()

    monkeypatch.setattr(manager, "_gone", Gone())

    async def ask():
        asked = Asked([[5]], {"max_new_tokens": 4}, decoder.model.generation_config, [], None, None, *[False] * 3)
        manager._submit(manager.start([5], asked, tokenizer))
        await asyncio.to_thread(manager._thread.join, 20)

    asyncio.run(ask())
    assert stopping.is_set() and not manager._thread.is_alive()


def test_models_without_a_decoder(tokenizer, decoder, monkeypatch):
    few = transformers.ContinuousBatchingConfig(num_blocks=8, block_size=32, max_batch_tokens=64)
    model = tiny_model()
    monkeypatch.setattr(  # else it takes all memory
        model, "init_continuous_batching", partial(model.init_continuous_batching, continuous_batching_config=few)
    )
    with running(serving.make_app(NAME, model, tokenizer, None, max_length=MAX_LENGTH)) as address:
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
        answer = client.completions.create(model=NAME, prompt="paged", max_tokens=8)
        assert answer.choices[0].text == expected(decoder, tokenizer, "paged", 8)
        with pytest.raises(openai.BadRequestError, match="top_p: this model is served with the settings of its gener"):
            client.completions.create(model=NAME, prompt="paged", max_tokens=8, top_p=0.5)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    tiny_model().save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


def test_the_command(directory, capsys, monkeypatch, request):
    """It says where it is, answers, and ends at Ctrl-C."""
    announce, got = serve._announce, []

    def ask(url):
        client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
        got.append(client.completions.create(model=str(directory), prompt="a", max_tokens=3).usage.completion_tokens)
        os.kill(os.getpid(), signal.SIGINT)

    def announce_and_ask(options, name, port, decoder):
        announce(options, name, port, decoder)
        threading.Thread(target=ask, args=[f"http://127.0.0.1:{port}/v1"]).start()

    monkeypatch.setattr(serve, "_announce", announce_and_ask)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # shells let what is in the background ignore it
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    assert main(["serve", str(directory), "--port", "0", "--slots", "3", "--max-length", "32", "--json"]) == 130
    output = capsys.readouterr()
    facts = json.loads(output.out)
    assert facts == {
        **{"model": str(directory), "url": facts["url"], "runs": "GraphDecoder"},
        **{"slots": 3, "max_length": 32},
    }
    assert got == [3] and output.err == "fp8moe serve: interrupted\n"


def test_what_cannot_be_served(directory, tmp_path, monkeypatch):
    def refusal(*arguments, model=directory):
        with pytest.raises(SystemExit) as stopped:
            main(["serve", str(model), "--port", "0", *arguments])
        return stopped.value.code

    assert refusal("--max-length", "9999") == "fp8moe serve: --max-length 9999: the model has 128 positions"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert re.match(rf"fp8moe serve: .*Address already in use.*{port}", refusal("--port", port))
    config = transformers.T5Config(vocab_size=97, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4)
    transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    assert refusal(model=tmp_path).startswith("fp8moe serve: model: expected a causal language model, got T5For")
    monkeypatch.setattr(serve, "PACKAGES", ("transformers", "no_such_package"))
    assert refusal() == (
        "fp8moe serve: no_such_package: not installed, and needed to serve: pip install 'fp8moe[serve]'"
    )


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"min_new_tokens": 5}, "min_new_tokens: GraphDecoder does not apply 5, so a request that sets nothing"),
        ({"eos_token_id": [1, 97]}, "eos_token_id: expected tokens between 0 and 96, got [1, 97]"),
        ({"repetition_penalty": -2.0}, "repetition_penalty: expected "),
        ({"do_sample": True, "typical_p": 0.5}, "typical_p: GraphDecoder does not apply 0.5, so"),
    ],
)
def test_settings_with_which_requests_without_their_own_would_be_refused(directory, tmp_path, setting, message):
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").write_text(json.dumps(setting))
    with pytest.raises(SystemExit) as stopped:
        main(["serve", str(tmp_path), "--port", "0", "--slots", "1", "--max-length", "32"])
    assert stopped.value.code.startswith(f"fp8moe serve: generation_config.{message}")


def test_a_checkpoint_in_fp8_stays_in_fp8(directory, tmp_path):
    quantize_checkpoint(directory, tmp_path / "fp8")
    tiny_tokenizer().save_pretrained(tmp_path / "fp8")
    model, _ = serve.load(tmp_path / "fp8", "cpu")
    assert {type(module) for module in model.modules()} >= {GroupedExperts, FP8Linear}
    assert serve.make_decoder(model, 2, None).max_length == model.config.max_position_embeddings


def test_keys_and_values_in_fp8():
    decoder = serve.make_decoder(tiny_model().bfloat16(), 2, 32, "fp8")
    ids = torch.arange(3, 9)
    ((_, tokens),) = decoder.run([{"input_ids": ids, "max_new_tokens": 4, "eos_token_id": ()}])
    assert len(tokens) == 4 and decoder.capabilities.cache_dtype is torch.float8_e4m3fn
    refused = {
        "^--cache-dtype fp8: MixtralForCausalLM is in torch.float32": tiny_model(),
        "^--cache-dtype fp8: model: layer 0 keeps a Static": MODELS["Llama4ForCausalLM"].build().bfloat16(),
    }
    for message, model in refused.items():
        with pytest.raises(ValueError, match=message):
            serve.make_decoder(model, 2, 32, "fp8")
    with pytest.raises(SystemExit):
        main(["serve", "a model", "--cache-dtype", "int4"])


def test_the_output_layer_in_fp8():
    model = tiny_mixtral()
    assert serve.make_decoder(model, 2, 32, output_dtype="fp8").capabilities.output is not None
    model.lm_head = FP8Linear.from_linear(model.lm_head)
    with pytest.raises(
        ValueError, match="^--output-dtype fp8: the output layer of MixtralForCausalLM is in FP8 already"
    ):
        serve.make_decoder(model, 2, 32, output_dtype="fp8")
    with pytest.raises(SystemExit):
        main(["serve", "a model", "--output-dtype", "int4"])


def test_models_that_nothing_serves():
    model = MODELS["Llama4ForCausalLM"].build()

    def init(generation_config):  # transformers 5.17 finds out later
        raise ValueError("Invalid layer type: chunked_attention")

    model.init_continuous_batching = init
    with pytest.raises(
        ValueError, match="^model: layer 0 keeps a Static.*; nor does transformers' continuous batching"
    ):
        serve.make_decoder(model, 2, None)
    with fp8moe.batch_invariant(), pytest.raises(ValueError, match="cannot be batch invariant, as it is without flash"):
        serve.make_decoder(tiny_model(), 2, 32)


def test_what_256_clients_got():
    found = json.loads((Path(__file__).parents[2] / "validation" / "serve.json").read_text())
    assert found["clients"] == 256 and found["requests"] == sum(found["kinds"].values()) == 3000
    assert found["wrong"] == [] and found["wrong_count"] == found["answers_left"] == 0 and found["alive"]
    assert found["growth"] <= 0.02 and found["longest_halt_ms"] <= 3 * found["longest_forward_ms"]
