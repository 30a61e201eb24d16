"""GraphDecoder's return_routing: the experts that a forward over the same tokens takes, as record_routing has them."""

import random
from types import SimpleNamespace

import pytest
import torch

from fp8moe import hf
from fp8moe.decode import GraphDecoder, NaNLogits, attention, scheduler
from fp8moe.decode import decoder as decoder_module
from fp8moe.decode import request as request_module
from fp8moe.decode.step import Step, positions_of
from fp8moe.decode.transfers import Readback
from tests import linear_attention_models
from tests.decode_models import LateReadback, byte_level_tokenizer, kernels_in_float32, tiny_mixtral
from tests.tiny_moe_models import MODELS
from tests.transformers_models import left_padded, prompts

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("one_thread")

ENDLESS = {"eos_token_id": (), "return_routing": True}
NAMES = (
    *("Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM", "GptOssForCausalLM", "MixtralForCausalLM", "OlmoeForCausalLM"),
    *("LongcatFlashForCausalLM", "ZayaForCausalLM", "DbrxForCausalLM", "Qwen3NextForCausalLM", "InklingForCausalLM"),
)


@pytest.fixture(scope="module")
def model():
    return tiny_mixtral()


@pytest.fixture(scope="module")
def decoder(model):
    return GraphDecoder(model, batch_sizes=(1, 2, 4), max_length=64)


@pytest.fixture(params=[Readback, LateReadback], ids=["at once", "late"])
def readback(request, monkeypatch):
    for module in (scheduler, request_module):
        monkeypatch.setattr(module, "Readback", request.param)


@torch.no_grad()
def recorded(model, read, mask=None):
    """The routing of a forward over the tokens that a decoder has read, its logits and its arguments.

    mask: that of the prompts.
    """
    shown = torch.ones_like(read)
    if mask is not None:
        shown[:, : mask.shape[1]] = mask
    how = {"attention_mask": shown, "position_ids": positions_of(shown)}
    with hf.record_routing(model) as found:
        logits = model(read, **how).logits
    return found.routing, logits, how


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("name", [name for name in NAMES if name in MODELS])
def test_equals_a_forward_and_is_replayed(name, fuse):
    model = linear_attention_models.build(name)
    decoder = GraphDecoder(model, batch_sizes=(1, 4), max_length=40, fuse=fuse)
    ids = prompts(3, 9)
    mask = left_padded(ids, *((4, 0, 1) if decoder.capabilities.ragged else (0, 0, 0)))
    how = dict(attention_mask=mask, max_new_tokens=8, do_sample=True, seed=3, return_logprobs=True) | ENDLESS
    tokens, logprobs, routing = decoder.generate(ids, **how)
    assert all(map(torch.equal, decoder.generate(ids, **how | {"return_routing": False}), (tokens, logprobs)))
    read = tokens[:, :-1]
    optimized = hf.optimize(model) if fuse else None
    expected, logits, forward = recorded(model, read, mask)
    assert routing.dtype is torch.int16 and torch.equal(routing, expected)
    if optimized is not None:
        optimized.restore()
        _, logits, _ = recorded(model, read, mask)
    with torch.no_grad(), hf.replay_routing(model, routing):
        assert torch.equal(model(read, **forward).logits, logits)


def test_behind_the_end_of_a_sequence(decoder, readback):
    ids = prompts(3, 9)
    mask = left_padded(ids, 4, 0, 1)
    free, routing = decoder.generate(ids, attention_mask=mask, max_new_tokens=12, **ENDLESS)
    how = {"eos_token_id": [int(free[0, 9 + 2]), int(free[1, 9 + 6])], "pad_token_id": 0, "return_routing": True}
    tokens, ended = decoder.generate(ids, attention_mask=mask, max_new_tokens=12, **how)
    new = (free[:, 9:, None] == torch.tensor(how["eos_token_id"])).any(-1).int().argmax(1) + 1
    lasts = torch.where((free[:, 9:, None] == torch.tensor(how["eos_token_id"])).any(-1).any(1), new, 12)
    assert ended.shape[1] == tokens.shape[1] - 1 == 9 + lasts.max() - 1
    behind = torch.arange(ended.shape[1]) >= 9 + lasts[:, None] - 1
    assert behind.any() and torch.equal(ended, routing[:, : ended.shape[1]].masked_fill(behind[..., None, None], -1))
    with hf.replay_routing(decoder.model, ended):
        decoder.model(tokens[:, :-1])


def requests_of_all_kinds(count):
    draw = random.Random(0)
    for index in range(count):
        ids = prompts(1, draw.randint(1, 20), seed=index)[0]
        request = {"input_ids": ids, "max_new_tokens": draw.randint(1, 20), "return_routing": index % 4 != 3}
        if index % 3 == 1:
            request |= {"do_sample": True, "seed": index, "return_logprobs": True}
        if index % 5 == 4:
            request |= {"eos_token_id": [*range(draw.randint(1, 60))]}
        yield request


def test_more_requests_than_rows(model, decoder, readback):
    given = [*requests_of_all_kinds(14)]
    for index, found in decoder.run(iter(given)):
        request = given[index]
        if not request["return_routing"]:
            assert isinstance(found, tuple) == ("return_logprobs" in request) and (len(found) == 2 or found.ndim == 1)
            continue
        whole = torch.cat([request["input_ids"], found[0]])[None]
        assert len(found) == 2 + ("return_logprobs" in request)
        assert torch.equal(found[-1], recorded(model, whole[:, :-1])[0][0]), index


def test_padding_of_a_request(model, decoder):
    ids, mask = prompts(1, 9)[0], (torch.arange(9) >= 4).long()
    request = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 5} | ENDLESS
    ((_, (tokens, routing)),) = decoder.run([request])
    prefix = prompts(1, 7, seed=3)[0]
    ((_, (after, joined)),) = decoder.run([request | {"prefix": decoder.prefix(prefix)}])
    for new, found, before in ((tokens, routing, prefix[:0]), (after, joined, prefix)):
        read = torch.cat([before, ids, new])[None, :-1]
        shown = torch.cat([torch.ones_like(before), mask])[None]
        assert torch.equal(found, recorded(model, read, shown)[0][0])


@pytest.mark.parametrize("how", [{}, {"stop": 3}])
def test_a_stream_yields_it_piece_by_piece(decoder, readback, how):
    ids = prompts(3, 9, seed=2)
    options = {"attention_mask": left_padded(ids, 4, 0, 1), "max_new_tokens": 12, "return_routing": True}
    free = decoder.generate(ids, **options)[0][:, 9:]
    options |= {"eos_token_id": [int(free[1, 5]), int(free[0, 8])], "pad_token_id": 0}
    if how:
        tokenizer = byte_level_tokenizer()
        options |= {"stop_strings": tokenizer.decode(free[2, 3:6]), "tokenizer": tokenizer}
    tokens, routing = decoder.generate(ids, **options)
    steps = [*decoder.stream(ids, **options)]
    assert [piece.shape[1] for _, piece in steps] == [9] + [1] * (len(steps) - 1)
    assert torch.equal(torch.stack([step for step, _ in steps], 1), tokens[:, 9:])
    assert torch.equal(torch.cat([piece for _, piece in steps], 1), routing)


@pytest.mark.parametrize("chunk", [None, 4])
@pytest.mark.parametrize("length", [1, 5, 14])
def test_a_prefix_is_a_part_of_it(model, length, chunk):
    decoder = GraphDecoder(model, batch_sizes=(4,), max_length=64, prefill_chunk=chunk)
    prefix, ids = prompts(1, length, seed=1), prompts(3, 9)
    handle = decoder.prefix(prefix)
    assert handle._routing is None
    for padding in ((0, 0, 0), (4, 0, 7)):
        mask = left_padded(ids, *padding)
        tokens, routing = decoder.generate(ids, attention_mask=mask, prefix=handle, max_new_tokens=6, **ENDLESS)
        before = prefix.expand(3, -1)
        read, shown = torch.cat([before, tokens[:, :-1]], 1), torch.cat([torch.ones_like(before), mask], 1)
        assert torch.equal(routing, recorded(model, read, shown)[0])
    streamed = [
        piece for _, piece in decoder.stream(ids, attention_mask=mask, prefix=handle, max_new_tokens=6, **ENDLESS)
    ]
    assert torch.equal(torch.cat(streamed, 1), routing)


def test_where_kernels_read_the_cache(monkeypatch):
    """Padding is moved behind the prompts then."""
    kernels_in_float32(monkeypatch)
    model = tiny_mixtral(head_dim=64)
    find = decoder_module.find_capabilities
    monkeypatch.setattr(
        decoder_module,
        "find_capabilities",
        lambda model, device, captured, flash, *others: find(model, device, captured, attention.NAME, *others),
    )
    decoder = GraphDecoder(model, batch_sizes=(4,), max_length=64)
    assert decoder.attention == "flash"
    ids = prompts(3, 9)
    for mask in (left_padded(ids, 4, 0, 8), None):
        tokens, routing = decoder.generate(ids, attention_mask=mask, max_new_tokens=8, **ENDLESS)
        assert torch.equal(routing, recorded(model, tokens[:, :-1], mask)[0])
    given = [*requests_of_all_kinds(9)]
    for index, found in decoder.run(given):
        if given[index]["return_routing"]:
            whole = torch.cat([given[index]["input_ids"], found[0]])[None]
            assert torch.equal(found[-1], recorded(model, whole[:, :-1])[0][0]), index


def test_only_calls_that_ask_for_it_record(model, monkeypatch):
    """Here a graph is a stand-in that runs the step again."""
    decoder = GraphDecoder(model, batch_sizes=(2,), max_length=64)
    (step,), replays = decoder.steps.values(), []

    def capture(step):
        kind = "plain" if step.recorder is None else "recording"
        return SimpleNamespace(replay=lambda: replays.append(kind) or step.advance(), reset=lambda: None)

    monkeypatch.setattr(Step, "_capture", capture)
    step.graph = capture(step)
    ids = prompts(2, 9)
    expected = decoder.generate(ids, max_new_tokens=5, eos_token_id=())
    assert step.routing is None and step.recording_graph is None and replays == ["plain"] * 4
    for kinds in (["recording"] * 3, ["recording"] * 4):  # the first step loads kernels
        replays.clear()
        assert torch.equal(decoder.generate(ids, max_new_tokens=5, **ENDLESS)[0], expected)
        assert replays == kinds
    before, step.routing[:] = step.routing, -7
    replays.clear()
    assert torch.equal(decoder.generate(ids, max_new_tokens=5, eos_token_id=()), expected)
    assert replays == ["plain"] * 4 and step.routing is before and (before == -7).all()
    decoder.close()
    assert step.recording_graph is None


def test_models_without_known_routers_are_refused_by_name(monkeypatch):
    decoder = GraphDecoder(MODELS["PhimoeForCausalLM"].build(), batch_sizes=(2,), max_length=32)
    ids = prompts(1, 4)
    monkeypatch.setattr(Step, "start", None)
    message = "^model: PhimoeForCausalLM cannot replay or record routing: the router of .*PhimoeExperts"
    for call in (decoder.generate, decoder.stream):
        with pytest.raises(ValueError, match=message):
            call(ids, max_new_tokens=3, return_routing=True)
    ((_, error),) = decoder.run([{"input_ids": ids[0], "max_new_tokens": 3, "return_routing": True}])
    with pytest.raises(ValueError, match=message):
        raise error


def test_nan_logits_have_it(readback):
    model = tiny_mixtral()
    decoder = GraphDecoder(model, batch_sizes=(2,), max_length=64)
    ids = prompts(2, 9)
    tokens, routing = decoder.generate(ids, max_new_tokens=12, **ENDLESS)
    with torch.no_grad():
        model.model.embed_tokens.weight[tokens[0, 9 + 4]] = torch.nan
    with pytest.raises(NaNLogits) as raised:
        decoder.generate(ids, max_new_tokens=12, **ENDLESS)
    error = raised.value
    assert error.rows[0] == 0 and error.logprobs is None
    assert torch.equal(error.routing[0, : 9 + 4], routing[0, : 9 + 4]) and (error.routing[0, 9 + 4 :] == -1).all()


def test_through_model_generate(model, decoder):
    ids = prompts(2, 9)
    expected = decoder.generate(ids, max_new_tokens=5, return_logprobs=True, return_routing=True)
    how = dict(max_new_tokens=5, do_sample=False, custom_generate=decoder, return_routing=True)
    found = model.generate(ids, return_logprobs=True, **how)
    assert all(map(torch.equal, found, expected))
    output, routing = model.generate(ids, return_dict_in_generate=True, **how)
    assert torch.equal(output.sequences, expected[0]) and torch.equal(routing, expected[2])
