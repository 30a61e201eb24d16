"""Short prompts from graphs. Here a graph is a stand-in that runs again what it has captured, on the same tensors."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from fp8moe.decode import GraphDecoder, prefill
from fp8moe.decode import decoder as decoder_module
from fp8moe.decode.prefill import COLUMNS, MOST_GRAPH_TOKENS, ShortPrompts, _Graph, pad_to, shared_columns
from fp8moe.decode.step import Step
from tests.decode_models import VOCABULARY, tiny_mixtral
from tests.transformers_models import prompts

pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("one_thread")

MAX_LENGTH = 128


class Recorded(ShortPrompts):
    """replays: how often the graph of each number of columns has run."""

    def __init__(self, size, chunk=None):
        super().__init__(size, chunk, None, None)
        self.replays = {}

    def _capture(self, tokens, eagerly):
        columns, tokens = tokens.shape[1], tokens.clone()
        logits = torch.empty(len(tokens), VOCABULARY)

        def replay():
            self.replays[columns] = self.replays.get(columns, 0) + 1
            logits.copy_(eagerly(tokens))

        return _Graph(SimpleNamespace(replay=replay, reset=lambda: None), tokens, logits)


@pytest.fixture
def decoders(monkeypatch):
    model = tiny_mixtral()
    plain = GraphDecoder(model, batch_sizes=(1, 16), max_length=MAX_LENGTH)
    graphed = GraphDecoder(model, batch_sizes=(1, 16), max_length=MAX_LENGTH)
    for step in graphed.steps.values():
        step.short_prompts = Recorded(step.size)
    graphed._pool = (0, 0)
    # With the mask that attention takes on a CPU, transformers asks whether it hides anything.
    monkeypatch.setattr(prefill, "HostReads", lambda device: nullcontext(SimpleNamespace(operations=[])))
    monkeypatch.setattr(decoder_module, "capture_stream", lambda device: None)
    monkeypatch.setattr(Step, "takes_padding", True)
    monkeypatch.setattr(decoder_module.torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(
        Step, "keep_short_prompts", lambda self, stream, pool: setattr(self, "short_prompts", Recorded(self.size))
    )
    return plain, graphed


@pytest.mark.parametrize("length", [1, 15, 16, 17, 33])
def test_prompts_of_one_size_come_from_its_graph(decoders, length):
    plain, graphed = decoders
    columns = next(columns for columns in COLUMNS if columns >= length)
    for seed in range(4):
        ids = prompts(1, length, seed=seed)
        expected = plain.generate(ids, max_new_tokens=6, eos_token_id=())
        assert torch.equal(graphed.generate(ids, max_new_tokens=6, eos_token_id=()), expected)
    assert graphed.steps[1].short_prompts.replays == {columns: 2}  # not the first two


def test_lengths_of_one_batch(decoders):
    plain, graphed = decoders
    for seed in range(3):
        ids = prompts(5, 20, seed=seed)
        mask = torch.arange(20) >= torch.tensor([0, 7, 19, 3, 0])[:, None]
        options = dict(attention_mask=mask.long(), max_new_tokens=8, eos_token_id=())
        assert torch.equal(graphed.generate(ids, **options), plain.generate(ids, **options))
    assert graphed.steps[16].short_prompts.replays == {32: 1}


def test_a_prompt_that_padding_would_leave_no_room(decoders):
    plain, graphed = decoders
    ids = prompts(1, 70)
    options = dict(max_new_tokens=MAX_LENGTH - 70, eos_token_id=())
    for _ in range(3):
        assert torch.equal(graphed.generate(ids, **options), plain.generate(ids, **options))
    assert not graphed.steps[1].short_prompts.replays


def test_graphs_that_record_routing(decoders):
    plain, graphed = decoders
    options = dict(max_new_tokens=6, eos_token_id=(), return_routing=True)
    for seed in range(6):
        ids = prompts(1, 13, seed=seed)
        expected = plain.generate(ids, **options)
        if seed % 2:
            assert torch.equal(graphed.generate(ids, **options | {"return_routing": False}), expected[0])
        else:
            assert all(map(torch.equal, graphed.generate(ids, **options), expected))
    assert graphed.steps[1].short_prompts.replays == {16: 2}  # not the first two of either kind


def test_requests_share_a_reader(decoders):
    plain, graphed = decoders
    how = {"eos_token_id": (), "return_routing": True}
    asked = [
        {"input_ids": prompts(1, 5 + index % 40, seed=index)[0], "max_new_tokens": 3 + index % 7, **how}
        for index in range(60)
    ]
    expected, found = (dict(decoder.run(asked)) for decoder in (plain, graphed))
    assert expected.keys() == found.keys()
    assert all(all(map(torch.equal, found[index], result)) for index, result in expected.items())
    several = graphed._readers.pop(graphed.newcomers)
    assert several.size == 2 and sum(several.short_prompts.replays.values()) > 3


def test_a_prompt_that_comes_alone_has_a_reader_of_one_row(decoders):
    plain, graphed = decoders
    asked = [{"input_ids": prompts(1, 20, seed=seed)[0], "max_new_tokens": 5, "eos_token_id": ()} for seed in range(4)]
    for index in range(4):  # nobody else waits
        ((_, expected),), ((_, found),) = plain.run(asked[index : index + 1]), graphed.run(asked[index : index + 1])
        assert torch.equal(found, expected)
    assert {size: step.short_prompts.replays for size, step in graphed._readers.items()} == {1: {32: 2}}
    assert graphed.reader(2, 20).size == 2 and graphed.reader(3, 20) is None and plain.reader(1, 20) is None
    assert graphed.reader(1, MAX_LENGTH + 1) is None
    graphed.close()
    assert not graphed._readers


@pytest.mark.parametrize("alone", [False, True])
def test_prompts_without_a_graph_are_padded_to_few_lengths(monkeypatch, alone):
    decoder = GraphDecoder(tiny_mixtral(), batch_sizes=(1, 4), max_length=MAX_LENGTH)
    how = {"max_new_tokens": 6, "eos_token_id": (), "return_routing": True}
    asked = [prompts(1, length)[0] for length in (*range(33, 49), MAX_LENGTH - 6)]
    prefix = decoder.prefix(prompts(1, 10))

    def answers():
        if alone:
            found = [decoder.generate(one[None], **how) for one in asked]
            return [*found, decoder.generate(asked[0][None], **how, prefix=prefix)]
        requests = [{"input_ids": one} | how for one in asked]
        found = dict(decoder.run([*requests, requests[0] | {"prefix": prefix}]))
        return [found[index] for index in range(len(found))]

    expected, read, pieces = answers(), [], Step.pieces
    monkeypatch.setattr(Step, "shares_shapes", True)
    monkeypatch.setattr(
        Step, "pieces", lambda self, tokens, *others: read.append(tokens.shape[1]) or pieces(self, tokens, *others)
    )
    assert all(all(map(torch.equal, one, other)) for one, other in zip(answers(), expected, strict=True))
    # The last prompt has no room for padding, and the one after a prefix gets none.
    assert {*read} == {48, MAX_LENGTH - 6, 33}


@pytest.mark.parametrize("change", ["on a CPU", "in chunks", "without padding"])
def test_prompts_that_keep_their_lengths(monkeypatch, change):
    step = GraphDecoder(tiny_mixtral(), batch_sizes=(1,), max_length=MAX_LENGTH).steps[1]
    monkeypatch.setattr(step, "columns", SimpleNamespace(is_cuda=change != "on a CPU"))
    monkeypatch.setattr(step, "takes_padding", change != "without padding", raising=False)
    monkeypatch.setattr(step, "prefill_chunk", 64 if change == "in chunks" else None)
    assert not step.shares_shapes
    tokens = prompts(1, 33)
    assert step.fit(tokens, None, MAX_LENGTH) == (tokens, None)


def test_few_lengths():
    padded = {length: shared_columns(length) for length in range(1, 10000)}
    assert all(length <= columns <= max(length * 1.125, 16 + length) for length, columns in padded.items())
    assert padded[16] == 16 and padded[1084] == 1152 and padded[2049] == 2304 and padded[4096] == 4096
    assert all(padded[columns] == columns for columns in padded.values() if columns in padded)
    assert len({columns for columns in padded.values() if 1024 < columns <= 2048}) == 8


def test_what_reads_values_on_the_host_is_not_captured():
    short = Recorded(1)

    def reads(tokens):
        return torch.full((1, 99), float(tokens.sum()))

    tokens = torch.arange(16)[None]
    for _ in range(2):
        assert short.read(tokens, reads)[0, 0] == 120
    # Nor is it asked again, and nothing is padded for it.
    assert not short.replays and not short.columns and short.columns_of(16) is None


def test_columns_that_have_a_graph():
    def most(size, chunk=None):
        return max(ShortPrompts(size, chunk, None, None).columns, default=0)

    assert most(1) == max(COLUMNS) == MOST_GRAPH_TOKENS
    assert (most(8), most(MOST_GRAPH_TOKENS)) == (512, 0)
    assert ShortPrompts(8, None, None, None).columns_of(100) == 128
    tokens, mask = pad_to(128, torch.ones(2, 100, dtype=torch.int64), None)
    assert tokens.shape == mask.shape == (2, 128) and mask.sum() == 200 and mask[:, 28:].all()
    assert (most(1, 100), most(1, 8)) == (96, 0)  # prompts that are read in chunks have none
