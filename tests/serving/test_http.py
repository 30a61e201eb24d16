"""HTTP of `fp8moe serve`: forms of answers, keys and hosts, limits, and the end of the server."""

import base64
import io
import itertools
import json
import re
import socket
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from fp8moe.decode import GraphDecoder
from tests.decode_models import BYTES, END, PIECES, byte_fallback_tokenizer, byte_level_tokenizer, tiny_mixtral
from tests.tiny_tokenizer import tiny_tokenizer

pytest.importorskip("fastapi", reason="serving needs fp8moe[serve]")
uvicorn = pytest.importorskip("uvicorn", reason="serving needs fp8moe[serve]")

from starlette.testclient import TestClient  # noqa: E402

from fp8moe import serving  # noqa: E402
from fp8moe.serving import app as application  # noqa: E402
from fp8moe.serving import server  # noqa: E402
from fp8moe.serving.answers import Text, TokenTexts  # noqa: E402
from fp8moe.serving.fields import Reader  # noqa: E402
from fp8moe.serving.forms import ChatForm, CompletionForm  # noqa: E402
from fp8moe.serving.manager import Piece  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

MAX_LENGTH = 48


@pytest.fixture(scope="module")
def decoder():
    return GraphDecoder(tiny_mixtral(vocab_size=97, eos_token_id=1), batch_sizes=(1, 4), max_length=MAX_LENGTH)


def make_app(decoder, **how):
    return serving.make_app("a/b", decoder.model, tiny_tokenizer(), serving.DecoderManager(decoder), **how)


@pytest.fixture(scope="module")
def client(decoder):
    with TestClient(make_app(decoder), raise_server_exceptions=False) as client:
        yield client


def complete(client, chat=False, **body):
    asked = {"messages": [{"role": "user", "content": "hi"}]} if chat else {"prompt": "hi"}
    return client.post(f"/v1/{'chat/' if chat else ''}completions", json=asked | {"max_tokens": 4} | body)


def events(response):
    """The objects of a stream, which ends as OpenAI's do."""
    *parts, end = response.text.strip().split("\n\n")
    assert end == "data: [DONE]" and response.headers["content-type"].startswith("text/event-stream")
    return [json.loads(part.removeprefix("data: ")) for part in parts]


def answer(decoder, prompt, new=4):
    ids = torch.tensor([tiny_tokenizer()(prompt)["input_ids"]])
    tokens, logprobs = decoder.generate(ids, max_new_tokens=new, return_logprobs=True)
    return tokens[0, ids.shape[1] :].tolist(), logprobs[0].tolist()


def test_several_prompts(client, decoder):
    expected = [tiny_tokenizer().decode(answer(decoder, prompt)[0]) for prompt in ("hi", "a fox", "hi")]
    prompts = ["hi", tiny_tokenizer()("a fox")["input_ids"], "hi"]
    found = complete(client, prompt=prompts).json()
    assert [(choice["index"], choice["text"]) for choice in found["choices"]] == [*enumerate(expected)]
    assert found["usage"] == {"prompt_tokens": 9, "completion_tokens": 12, "total_tokens": 21}
    texts = ["", "", ""]
    *parts, usage = events(complete(client, prompt=prompts, stream=True, stream_options={"include_usage": True}))
    for part in parts:
        texts[part["choices"][0]["index"]] += part["choices"][0]["text"]
    assert texts == expected and usage["choices"] == [] and usage["usage"] == found["usage"]


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(client, decoder, stream):
    tokens, logprobs = answer(decoder, "hi")
    texts = [tiny_tokenizer().decode(tokens[:end]) for end in range(5)]
    strings = [text.removeprefix(before) for before, text in itertools.pairwise(texts)]
    offsets = [sum(map(len, strings[:index])) for index in range(4)]
    how = {"stream": stream, "max_tokens": 4}
    text, chat = complete(client, logprobs=0, **how), complete(client, True, logprobs=True, **how)
    of_text = [part["choices"][0]["logprobs"] for part in (events(text) if stream else [text.json()])]
    of_chat = [part["choices"][0].get("logprobs") for part in (events(chat) if stream else [chat.json()])]
    for name, expected in (("tokens", strings), ("text_offset", offsets)):
        assert [one for part in of_text if part for one in part[name]] == expected
    got = [one for part in of_text if part for one in part["token_logprobs"]]
    assert torch.allclose(torch.tensor(got), torch.tensor(logprobs), atol=1e-5)
    found = [one for part in of_chat if part for one in part["content"]]
    assert [one["token"] for one in found] == strings and [one["logprob"] for one in found] == got
    assert [bytes(one["bytes"]).decode() for one in found] == strings


@pytest.mark.parametrize("make", [byte_level_tokenizer, byte_fallback_tokenizer])
def test_logprobs_of_parts_of_characters(make):
    """Their bytes can be joined, and their texts are those of the answer."""
    tokenizer = make()
    first = 3 + len(PIECES)
    grin = [first + BYTES.index(byte) for byte in "😀".encode()]
    ids = [3 + PIECES.index("x"), 3 + PIECES.index(" "), 3 + PIECES.index("é"), *grin, END, 3 + PIECES.index(" st")]
    strings, offsets = ["x", " ", "é", "", "", "", "😀", "<end>", " st"], [0, 1, 2, 3, 3, 3, 3, 4, 4]
    parts = [b"x", b" ", "é".encode(), b"\xf0", b"\x9f", b"\x98", b"\x80", b"<end>", b" st"]
    for step in (1, 2, len(ids)):
        of_text, of_chat = CompletionForm("m", tokenizer, True), ChatForm("m", tokenizer, True)
        pieces = [
            Piece(ids[at : at + step], [-0.5] * len(ids[at : at + step]), None) for at in range(0, len(ids), step)
        ]
        completion = [of_text.change(0, [], piece, None)["logprobs"] for piece in pieces]
        chat = [one for piece in pieces for one in of_chat.change(0, [], piece, None)["logprobs"]["content"]]
        assert [one for part in completion for one in part["tokens"]] == strings
        assert [one for part in completion for one in part["text_offset"]] == offsets
        assert [one["token"] for one in chat] == strings
        assert [bytes(one["bytes"]) for one in chat] == parts


@pytest.mark.parametrize("make", [byte_level_tokenizer, byte_fallback_tokenizer])
def test_bytes_of_a_first_space_and_of_added_tokens(make):
    tokenizer = make()
    tokenizer.add_tokens(["‹é›"])
    texts = TokenTexts(tokenizer, True)
    added = [texts.add(token).data for token in (3 + PIECES.index(" "), tokenizer.convert_tokens_to_ids("‹é›"))]
    assert added == [b" ", "‹é›".encode()]


@pytest.mark.parametrize("chat", [False, True])
def test_routed_experts(client, decoder, chat):
    plain, found = (complete(client, chat, **how).json()["choices"] for how in ({}, {"return_routed_experts": True}))
    routed = [choice.pop("routed_experts") for choice in found]
    assert found == plain
    values = np.load(io.BytesIO(base64.b64decode(routed[0])), allow_pickle=False)
    if not chat:
        ids = torch.tensor([tiny_tokenizer()("hi")["input_ids"]])
        _, routing = decoder.generate(ids, max_new_tokens=4, return_routing=True)
        assert torch.equal(torch.from_numpy(values), routing[0])
    assert values.dtype == np.int16 and values.shape[1:] == (2, 2)
    several = complete(client, prompt=["hi", "a fox"], return_routed_experts=True).json()
    assert len({choice["routed_experts"] for choice in several["choices"]}) == 2
    response = complete(client, chat, return_routed_experts=True, stream=True)
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith("return_routed_experts: a stream does not have them; ask for")


def byte_tokenizer():
    """A tokenizer with a token for each byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(letters)}, merges=[]))
    letters.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    letters.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters)
    tokenizer.chat_template = "{{ '<|im_start|>assistant\\n' }}"
    return tokenizer


@pytest.mark.parametrize("step", [1, 7, 500])
@pytest.mark.parametrize(
    ("stop", "reasoning", "content", "calls"),
    [([], "soé", "fine", 1), ("ne", "soé", "fi", 0), ("oé<", "s", "", 0), (["never", "x"], "soé", "fine", 0)],
)
def test_reasoning_and_tool_calls(decoder, monkeypatch, step, stop, reasoning, content, calls):
    """Of a model with Qwen3's response template, whose tokens come one by one or together; stop strings cut both."""
    tokenizer = byte_tokenizer()
    said = '<think>soé</think>fine <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
    ids = tokenizer(said)["input_ids"]
    monkeypatch.setattr(decoder.model.config, "model_type", "qwen3_moe")
    body = json.dumps({"messages": [{"role": "user", "content": ""}], "stop": stop}).encode()
    text = Text(Reader("m", decoder.model, tokenizer, 400, True).read(body, True), decoder.model, tokenizer)
    parts = [
        part
        for start in range(0, len(ids), step)
        for part in text.read(ids[start : start + step], start + step >= len(ids))
    ]
    told = {kind: [part.value for part in parts if part.kind == kind] for kind in ("reasoning_content", "content")}
    assert ("".join(told["reasoning_content"]), "".join(told["content"]).strip()) == (reasoning, content)
    assert [part.value["function"] for part in parts if part.kind == "tool_calls"] == (
        [{"name": "f", "arguments": '{"x": 1}'}] * calls
    )


def test_an_incomplete_character_is_shown_at_the_end(decoder):
    tokenizer = byte_tokenizer()
    asked = Reader("m", decoder.model, tokenizer, 400, True).read(b'{"prompt": "x"}', False)
    text, ids = Text(asked, decoder.model, tokenizer), tokenizer("aé")["input_ids"]
    assert [[part.value for part in text.read([one], one == ids[1])] for one in ids[:2]] == [["a"], ["\ufffd"]]


def test_invalid_characters_are_shown(decoder):
    """Where bytes in a row are decoded together, they would change text in front of them."""
    tokenizer = byte_fallback_tokenizer()
    said = ["<0x0A>", "<0xF0>", "<0x9F>", "a", "▁st", "<0xC3>", "<0xA9>", "<0xF0>"]
    ids = tokenizer.convert_tokens_to_ids(said)
    for step in (1, 3, len(ids)):
        asked = Reader("m", decoder.model, tokenizer, 400, True).read(b'{"prompt": "x"}', False)
        text = Text(asked, decoder.model, tokenizer)
        parts = [
            part.value
            for start in range(0, len(ids), step)
            for part in text.read(ids[start : start + step], start + step >= len(ids))
        ]
        assert "".join(parts) == "\n\ufffd\ufffda sté\ufffd"


def test_whatever_ends_a_stream_is_told(client, monkeypatch):
    monkeypatch.setattr(Text, "read", lambda *how: {}["nothing"])
    assert events(complete(client, stream=True))[-1]["error"]["message"] == "KeyError: 'nothing'"


def test_models_by_name(client):
    assert [one["id"] for one in client.get("/v1/models").json()["data"]] == ["a/b"]
    assert client.get("/v1/models/a/b").json()["id"] == "a/b"
    assert client.get("/v1/models/b").status_code == 404


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/v1/nothing", 404), ("GET", "/v1/completions", 405), ("PUT", "/", 404)]
)
def test_wrong_paths_get_errors_of_the_api(client, method, path, status):
    response = client.request(method, path)
    assert response.status_code == status
    assert response.json()["error"].keys() == {"message", "type", "param", "code"}


def test_keys_and_hosts(decoder):
    with TestClient(make_app(decoder, api_key="some key", hosts={"testserver", "::1"})) as client:
        assert complete(client).status_code == 401
        for key in ("", "Bearer", "Bearer some", "some key", "bearer some key "):
            assert client.get("/v1/models", headers={"Authorization": key}).status_code == 401
        client.headers["Authorization"] = "Bearer some key"
        assert complete(client).status_code == 200
        for host in ("testserver:80", "[::1]:8000", "TestServer"):
            assert client.get("/health", headers={"Host": host}).status_code == 200
        for host in ("evil.example", "testserver.evil.example", ""):
            refused = client.get("/health", headers={"Host": host})
            assert refused.status_code == 403 and refused.json()["error"]["message"].startswith("Host: ")


def test_metrics(client):
    def value(name):
        return float(re.search(rf"^{re.escape(name)} (\S+)$", client.get("/metrics").text, re.MULTILINE)[1])

    names = ["fp8moe_prompt_tokens_total", "fp8moe_generated_tokens_total", "fp8moe_answer_seconds_count"]
    before = [value(name) for name in names]
    complete(client)
    complete(client, stream=True)
    assert [value(name) - old for name, old in zip(names, before, strict=True)] == [4, 8, 2]
    assert value('fp8moe_requests_total{status="200"}') > 2 and value("fp8moe_steps_total") > 4
    assert value("fp8moe_answers_running") == value("fp8moe_answers_waiting") == 0


def test_bodies_that_are_too_large_or_late(client, monkeypatch):
    refused = client.post("/v1/completions", content=b"[" * (5 << 20))
    assert refused.status_code == 413 and "the most of a request" in refused.json()["error"]["message"]
    monkeypatch.setattr(application, "SECONDS_TO_READ", 0.05)
    slow = Reader._encode
    monkeypatch.setattr(Reader, "_encode", lambda *how: time.sleep(0.2) or slow(*how))
    late = complete(client)
    assert late.status_code == 400 and late.json()["error"]["message"].startswith("body: reading the prompt took more")


@contextmanager
def served(decoder, app=None, manager=None):
    """Serve as the command does; yield the port and what ends the server."""
    listener = socket.create_server(("127.0.0.1", 0))
    manager = manager or serving.DecoderManager(decoder)
    app = app or serving.make_app("m", decoder.model, tiny_tokenizer(), manager)
    config = uvicorn.Config(app, http=server._Protocol, log_level="critical", timeout_graceful_shutdown=5)
    running = server._Server(config, manager)
    thread = threading.Thread(target=running.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield listener.getsockname()[1], running
    finally:
        running.should_exit = True
        thread.join()
        listener.close()


def test_half_of_a_request_is_not_waited_for(decoder, monkeypatch):
    monkeypatch.setattr(server, "SECONDS_TO_ASK", 0.3)
    monkeypatch.setattr(application, "SECONDS_TO_SEND", 0.3)
    with served(decoder) as (port, _):
        for sent, expected in (
            (b"", b""),
            (b"POST /v1/completions HT", b""),
            (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 90\r\n\r\n{", b"HTTP/1.1 408"),
        ):
            with socket.create_connection(("127.0.0.1", port), timeout=5) as client:
                client.sendall(sent)
                assert client.recv(1000).startswith(expected) if expected else client.recv(1000) == b""
        with socket.create_connection(("127.0.0.1", port), timeout=5) as client:
            for _ in range(2):  # a connection that asks in time stays
                client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
                while not client.recv(1000).endswith(b"{}"):
                    pass
                time.sleep(0.2)


def test_whole_answers_get_an_error_of_the_api_at_the_end(decoder, monkeypatch):
    monkeypatch.setattr(server, "SECONDS_TO_FINISH", 0.2)
    replay = decoder.steps[1].replay
    monkeypatch.setattr(decoder.steps[1], "replay", lambda: time.sleep(0.1) or replay())
    with served(decoder) as (port, running):
        threading.Timer(0.5, lambda: setattr(running, "should_exit", True)).start()
        body = json.dumps({"prompt": "hi", "max_tokens": 40, "ignore_eos": True}).encode()
        with pytest.raises(urllib.error.HTTPError) as failed:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/completions", body, timeout=10)
        assert failed.value.code == 503
        assert json.load(failed.value)["error"]["message"] == "the server is shutting down"


def test_others_are_answered_while_a_prompt_is_read(decoder, monkeypatch):
    encode, reading = Reader._encode, threading.Event()
    monkeypatch.setattr(Reader, "_encode", lambda *how: reading.set() or time.sleep(0.5) or encode(*how))
    with served(decoder) as (port, _), ThreadPoolExecutor() as pool:
        address, body = f"http://127.0.0.1:{port}", json.dumps({"prompt": "hi", "max_tokens": 1}).encode()
        slow = pool.submit(lambda: urllib.request.urlopen(f"{address}/v1/completions", body).status)
        assert reading.wait(5)
        urllib.request.urlopen(f"{address}/health")
        assert not slow.done() and slow.result() == 200
