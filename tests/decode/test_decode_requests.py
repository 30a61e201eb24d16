"""GraphDecoder.run: each request gets the tokens that generate gives it alone, whatever shares the rows with it."""

import functools
import itertools
import random
import weakref

import numpy as np
import pytest
import torch

from fp8moe.decode import GraphDecoder, NaNLogits, scheduler
from fp8moe.decode.request import parse_one
from fp8moe.decode.transfers import Readback
from tests import linear_attention_models
from tests.decode_models import LateReadback, Puts, byte_level_tokenizer, tiny_mixtral
from tests.tiny_moe_models import MODELS
from tests.transformers_models import prompts

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("one_thread")

MAX_LENGTH = 64
ENDLESS = {"eos_token_id": ()}


@pytest.fixture(scope="module")
def decoder():
    return GraphDecoder(tiny_mixtral(sliding_window=6), batch_sizes=(1, 2, 5), max_length=MAX_LENGTH)


@pytest.fixture(params=[Readback, LateReadback], ids=["at once", "late"])
def readback(request, monkeypatch):
    monkeypatch.setattr(scheduler, "Readback", request.param)


def mixed(count, seed=0):
    """Requests of all kinds: lengths, sampling with a seed of their own, end tokens."""
    draw = random.Random(seed)
    for index in range(count):
        request = {"input_ids": prompts(1, draw.randint(1, 30), seed=index)[0], "max_new_tokens": draw.randint(1, 30)}
        if index % 3 == 1:
            request |= {"do_sample": True, "temperature": 0.8, "top_k": 20, "seed": index, "presence_penalty": 0.5}
        if index % 5 == 4:
            request |= {"eos_token_id": [*range(draw.randint(1, 60))]}
        yield request


ALONE = weakref.WeakKeyDictionary()


def alone(decoder, request):
    """The new tokens of generate, with return_logprobs (tokens, logprobs); each request is generated once."""
    lists = (list, torch.Tensor)
    key = tuple((name, repr(value) if isinstance(value, lists) else value) for name, value in request.items())
    results = ALONE.setdefault(decoder, {})
    if key not in results:
        ids = request["input_ids"]
        found = decoder.generate(**{**request, "input_ids": ids[None]})
        results[key] = (found[0][0, len(ids) :], found[1][0]) if isinstance(found, tuple) else found[0, len(ids) :]
    return results[key]


def check(decoder, given):
    """Returns the new tokens of each request, having made sure that they are those of generate."""
    found = dict(decoder.run(iter(given)))
    assert found.keys() == {*range(len(given))}
    for index, new in found.items():
        assert torch.equal(new, alone(decoder, given[index])), index
    return found


@pytest.mark.parametrize("count", [1, 3, 15])
def test_equals_generate_one_at_a_time(decoder, readback, count):
    check(decoder, [*mixed(count)])


SEVERAL = (
    *("DeepseekV3ForCausalLM", "GptOssForCausalLM", "Qwen3MoeForCausalLM", "Qwen3NextForCausalLM"),
    *("GraniteMoeHybridForCausalLM", "JambaForCausalLM", "Lfm2MoeForCausalLM", "MiMoV2FlashForCausalLM"),
)


@pytest.mark.parametrize("name", [name for name in SEVERAL if name in MODELS])
def test_kinds_of_models(name):
    """Compressed keys, sinks, states of linear attention and of convolutions, windows with other heads."""
    decoder = GraphDecoder(linear_attention_models.build(name), batch_sizes=(3,), max_length=MAX_LENGTH)
    check(decoder, [*mixed(6, seed=1)])


def test_eager_attention():
    model = tiny_mixtral(attn_implementation="eager")
    decoder = GraphDecoder(model, batch_sizes=(3,), max_length=MAX_LENGTH)
    check(decoder, [*mixed(8)])


def test_models_whose_rows_share_a_length_are_refused():
    decoder = GraphDecoder(MODELS["InklingForCausalLM"].build(), batch_sizes=(2,), max_length=32)
    assert not decoder.capabilities.ragged
    with pytest.raises(ValueError, match="^model: the rows of a batch of InklingForCausalLM cannot have lengths of"):
        decoder.run([])


def test_logprobs_penalties_and_padding(decoder, readback):
    ids = prompts(1, 12)[0]
    given = [
        {"input_ids": ids, "max_new_tokens": 9, "return_logprobs": True, "repetition_penalty": 1.3},
        {"input_ids": torch.cat([torch.zeros(4, dtype=torch.int64), ids]), "max_new_tokens": 9},
        {"input_ids": ids, "attention_mask": (torch.arange(12) >= 5).long(), "max_new_tokens": np.int64(9)},
        {"input_ids": ids.int(), "max_new_tokens": torch.tensor(1)},
    ]
    found = dict(decoder.run(given))
    new, logprobs = found[0]
    expected, expected_logprobs = alone(decoder, given[0])
    assert torch.equal(new, expected) and logprobs.dtype == torch.float32
    assert torch.allclose(logprobs, expected_logprobs, atol=1e-5)
    assert torch.equal(found[1], alone(decoder, {"input_ids": ids, "max_new_tokens": 9}))
    assert torch.equal(found[2], alone(decoder, {"input_ids": ids[5:], "max_new_tokens": 9}))
    assert torch.equal(found[3], found[1][:1])


def test_stop_strings(decoder, readback):
    tokenizer = byte_level_tokenizer()
    given = [*mixed(12, seed=3)]
    texts = [tokenizer.decode(alone(decoder, request)) for request in given]
    for request, text in zip(given, texts, strict=True):
        middle = len(text) // 2
        request |= {"stop_strings": [text[middle : middle + 2] or "never"], "tokenizer": tokenizer}
    given[5] = given[5] | {"max_new_tokens": 1}
    found = check(decoder, given)
    assert any(len(found[index]) < request["max_new_tokens"] for index, request in enumerate(given))


def test_prefixes(decoder):
    prefixes = [None, decoder.prefix(prompts(1, 11, 1)), decoder.prefix(prompts(1, 3, 2)[0])]
    given = [request | {"prefix": prefixes[index % 3]} for index, request in enumerate(mixed(12))]
    check(decoder, [request | {"max_new_tokens": min(20, request["max_new_tokens"])} for request in given])


def test_tokens_that_the_model_does_not_have_stop_no_other_request(decoder):
    given = [{"input_ids": ids, "max_new_tokens": 4} for ids in (prompts(1, 5)[0], torch.tensor([3, -1]))]
    found = dict(decoder.run(given))
    assert torch.equal(found[0], alone(decoder, given[0]))
    assert str(found[1]) == "input_ids: expected tokens between 0 and 127, got -1"
    with pytest.raises(ValueError, match="^input_ids: expected tokens between 0 and 127, got 128"):
        decoder.generate(torch.tensor([[3, 128]]), max_new_tokens=4)


def test_stop_strings_may_begin_in_a_prefix(decoder):
    tokenizer = byte_level_tokenizer()
    beginning, prompt = (torch.tensor(tokenizer.convert_tokens_to_ids(pieces)) for pieces in (["x", "st"], ["o"]))
    request = {"input_ids": prompt, "max_new_tokens": 9, "prefix": decoder.prefix(beginning)}
    first = alone(decoder, request)[:1]
    request |= {"stop_strings": "sto" + tokenizer.decode(first), "tokenizer": tokenizer}
    assert [new.tolist() for _, new in decoder.run([request])] == [first.tolist()]
    assert torch.equal(alone(decoder, request), first)


def test_prompts_of_different_lengths_after_a_prefix_of_states():
    """They are read one length at a time."""
    model = linear_attention_models.build("Qwen3NextForCausalLM")
    decoder = GraphDecoder(model, batch_sizes=(4,), max_length=MAX_LENGTH)
    prefix = decoder.prefix(prompts(1, 11, 1))
    given = [{"input_ids": prompts(1, 3 + index % 3, seed=index)[0], "max_new_tokens": 6} for index in range(8)]
    given = [request | {"prefix": prefix} for request in given]
    for index, new in [*decoder.run(given)]:
        assert torch.equal(new, alone(decoder, given[index])), index


REFUSED = [
    ({"input_ids": prompts(1, 40)[0], "max_new_tokens": 25}, "^max_new_tokens: 40 tokens of prompt and 25 new ones"),
    ({"input_ids": prompts(1, 4), "max_new_tokens": 3}, r"^input_ids: expected one prompt of shape \(length,\)"),
    ({"input_ids": [3, 4], "max_new_tokens": 3}, "^input_ids: expected one prompt"),
    ({"input_ids": prompts(1, 4)[0], "max_new_tokens": 0}, "^max_new_tokens: expected at least 1, got 0"),
    ({"input_ids": prompts(1, 4)[0]}, "missing a required argument: 'max_new_tokens'"),
    ({"input_ids": prompts(1, 4)[0], "max_new_tokens": 3, "beams": 2}, "unexpected keyword argument 'beams'"),
    ({"input_ids": prompts(1, 4)[0], "max_new_tokens": 3, "streamer": print}, "^streamer: expected put and end"),
    ({"input_ids": torch.tensor([5, 0, 7]), "max_new_tokens": 3, "pad_token_id": 0}, "^attention_mask: .* left only"),
    ({"input_ids": prompts(1, 4)[0], "max_new_tokens": 3, "top_k": 3}, "^top_k: 3 has no effect without sampling"),
    (prompts(1, 4)[0], "^requests: expected dicts of generate's arguments, got"),
    (None, "^requests: expected dicts of generate's arguments, got NoneType"),
]


def test_requests_that_are_refused_stop_nothing(decoder):
    good = [*mixed(len(REFUSED))]
    given = [*itertools.chain(*zip(good, (wrong for wrong, _ in REFUSED), strict=True))]
    found = dict(decoder.run(given))
    for index, request in enumerate(given):
        if index % 2 == 0:
            assert torch.equal(found[index], alone(decoder, request))
        else:
            assert type(found[index]) is ValueError
            with pytest.raises(ValueError, match=REFUSED[index // 2][1]):
                raise found[index]


@functools.cache
def two_rows(name):
    model = linear_attention_models.build(name)
    model.generation_config.eos_token_id = None
    return model, GraphDecoder(model, batch_sizes=(2,), max_length=MAX_LENGTH)


@pytest.mark.parametrize("name", ["MixtralForCausalLM", "Qwen3NextForCausalLM"])
def test_nan_ends_its_own_sequence(name, readback, monkeypatch):
    """Also one in a row that others take after it."""
    (model, decoder), poisoned = two_rows(name), 100
    given = [request for request in mixed(9) if not (request["input_ids"] == poisoned).any()]
    expected = [alone(decoder, request) for request in given]
    clean = [not (new == poisoned).any() for new in expected]
    weight = model.get_input_embeddings().weight
    monkeypatch.setattr(weight, "data", weight.data.index_fill(0, torch.tensor([poisoned]), torch.nan))
    bad = {"input_ids": torch.tensor([5, poisoned, 7]), "max_new_tokens": 20}
    found = dict(decoder.run([bad, given[0], bad, *given[1:]]))
    for index in (0, 2):
        assert isinstance(found[index], NaNLogits) and len(found[index].tokens) == 0
    for new, index, is_clean in zip(expected, [1, *range(3, len(found))], clean, strict=True):
        if is_clean:
            assert torch.equal(found[index], new), index
    assert sum(clean) > 3


def test_lazy_and_endless_requests(decoder):
    taken = []

    def endless():
        for index in itertools.count():
            taken.append(index)
            yield {"input_ids": prompts(1, 1 + index % 20, seed=index)[0], "max_new_tokens": 1 + index % 7}

    found = [*itertools.islice(decoder.run(endless()), 20)]
    assert len(found) == 20 and len(taken) <= 20 + 3 * 5
    assert decoder.generate(prompts(1, 5), max_new_tokens=3).shape == (1, 8), "the rows are free again"


def test_closing_early_frees_the_rows(decoder):
    running = decoder.run(mixed(20))
    next(running)
    with pytest.raises(RuntimeError, match="the decoder is at work"):
        decoder.generate(prompts(1, 5), max_new_tokens=3)
    running.close()
    assert torch.equal(dict(decoder.run(mixed(3)))[2], alone(decoder, [*mixed(3)][2]))


def test_an_error_of_the_iterable_frees_the_rows(decoder):
    def failing():
        yield from mixed(7)
        raise OSError("the reader went away")

    with pytest.raises(OSError, match="went away"):
        [*decoder.run(failing())]
    assert decoder.generate(prompts(1, 5), max_new_tokens=3).shape == (1, 8)


def test_rows_are_not_left_idle(decoder, monkeypatch):
    """20 answers of 10 tokens in 5 rows: four rounds and little more; then fewer rows as fewer are left."""
    replays = []
    for size, step in decoder.steps.items():
        monkeypatch.setattr(step, "replay", lambda size=size, replay=step.replay: replays.append(size) or replay())
    given = [{"input_ids": prompts(1, 5 + index % 3, seed=index)[0], "max_new_tokens": 10} for index in range(20)]
    assert len(dict(decoder.run(given))) == 20
    assert len(replays) <= 4 * 9 + 4
    replays.clear()
    given = [{"input_ids": prompts(1, 5)[0], "max_new_tokens": new} for new in (30, 20, 9, 9, 9)]
    found = dict(decoder.run(given))
    assert [replays.count(size) for size in (5, 2, 1)] == [8, 11, 10]
    assert torch.equal(found[0], alone(decoder, given[0])) and torch.equal(found[1], alone(decoder, given[1]))


def test_newcomers_are_read_together_where_their_lengths_are_similar(decoder, monkeypatch):
    read, step_of = [], decoder.step_of
    monkeypatch.setattr(decoder, "step_of", lambda size, length: read.append((size, length)) or step_of(size, length))
    given = [{"input_ids": prompts(1, length)[0], "max_new_tokens": 2} for length in (40, 10, 38, 12, 30)]
    assert len(dict(decoder.run(given))) == 5
    assert read == [(5, 40)]  # so few columns cost nothing
    read.clear()
    monkeypatch.setattr(scheduler, "FEW_TOKENS", 0)
    assert len(dict(decoder.run(given))) == 5
    assert read == [(3, 40), (2, 12)]


def test_streamers_get_the_prompt_and_each_token(decoder, readback):
    tokenizer = byte_level_tokenizer()
    given = [*mixed(9, seed=5)]
    given[4] |= {"stop_strings": ["o", "t"], "tokenizer": tokenizer}
    streamers = [Puts() if index % 4 else None for index in range(len(given))]
    found = dict(decoder.run([request | {"streamer": puts} for request, puts in zip(given, streamers, strict=True)]))
    for index, (request, puts) in enumerate(zip(given, streamers, strict=True)):
        assert torch.equal(found[index], alone(decoder, request)), index
        if puts is not None:
            prompt, *tokens = puts.values
            assert torch.equal(prompt, request["input_ids"][None]) and torch.equal(torch.cat(tokens), found[index])
            assert puts.ended == 1


def test_a_streamer_that_fails_ends_all_streams_and_frees_the_rows(decoder):
    given, streamers = [*mixed(9)], [Puts(fail_at=3), *(Puts() for _ in range(8))]
    given[0] |= {"max_new_tokens": 9, "eos_token_id": ()}
    with pytest.raises(OSError, match="the reader went away"):
        [*decoder.run(request | {"streamer": puts} for request, puts in zip(given, streamers, strict=True))]
    assert all(puts.ended == 1 for puts in streamers if puts.values)
    assert decoder.generate(prompts(1, 5), max_new_tokens=3).shape == (1, 8)


@torch.no_grad()
def test_requests_that_join_and_are_cancelled(decoder, readback, monkeypatch):
    """They go on in a step with a row for each, and then in a smaller one again."""
    replays = []
    for size, step in decoder.steps.items():
        monkeypatch.setattr(step, "replay", lambda size=size, replay=step.replay: replays.append(size) or replay())
    given = [request | {"max_new_tokens": 20, "eos_token_id": ()} for request in mixed(8, seed=7)]
    expected = [alone(decoder, request) for request in given]
    replays.clear()
    streamers = [Puts() for _ in given]
    pairs = enumerate(zip(given, streamers, strict=True))
    joining = [parse_one(decoder, request | {"streamer": puts}, index) for index, (request, puts) in pairs]
    rows = scheduler.Scheduler(decoder)
    found = {}
    rows.add(joining[0])
    for _ in range(5):  # its prompt, then four tokens
        found |= {key: result for key, result, _ in rows.advance()}
    for request in joining[1:]:
        rows.add(request)
    for _ in range(4):
        found |= {key: result for key, result, _ in rows.advance()}
    joining[1].cancelled = joining[7].cancelled = True  # one in a row, one that waits for one
    while rows.busy:
        found |= {key: result for key, result, _ in rows.advance()}
    rows.close()
    assert sorted(found) == [0, *range(2, 7)]
    for index, new in found.items():
        assert torch.equal(new, expected[index]) and torch.equal(torch.cat(streamers[index].values[1:]), new)
    seen = torch.cat(streamers[1].values[1:])
    assert 2 <= len(seen) <= 5 and torch.equal(seen, expected[1][: len(seen)])
    assert not streamers[7].values and [puts.ended for puts in streamers] == [1] * 8
    assert [size for size, _ in itertools.groupby(replays)] == [1, 5, 2, 1] and replays[:4] == [1] * 4


@torch.no_grad()
def advance(rows, found, times=None):
    """Advance a scheduler, or until it is idle, and add its news to `found`: lists by key."""
    for _ in itertools.count() if times is None else range(times):
        if not rows.busy:
            break
        for key, value, _ in rows.advance():
            found.setdefault(key, []).append(value)


def test_a_request_takes_the_only_free_row_soon_however_many_wait():
    decoder = GraphDecoder(tiny_mixtral(), batch_sizes=(16,), max_length=MAX_LENGTH)
    new = [50] * 15 + [2] * 3
    given = [{"input_ids": prompts(1, 5, seed=n)[0], "max_new_tokens": m} | ENDLESS for n, m in enumerate(new)]
    rows, found = scheduler.Scheduler(decoder), {}
    for index, request in enumerate(given):
        rows.add(parse_one(decoder, request, index))
        if index == 14:
            advance(rows, found, 3)
    advance(rows, found, scheduler.MOST_EMPTY_STEPS + 6)
    assert sorted(found) == [15]
    advance(rows, found)
    rows.close()
    assert sorted(found) == [*range(18)]
    assert all(torch.equal(found[index][0], alone(decoder, given[index])) for index in (0, 14, 15, 16, 17))


@pytest.mark.parametrize("chunk", [None, 7])
@pytest.mark.parametrize("name", ["Qwen3NextForCausalLM", "JambaForCausalLM"])
def test_long_prompts_are_read_between_the_steps_of_a_stream(name, chunk, monkeypatch):
    """A model that reads a prompt in one piece only keeps that."""
    monkeypatch.setattr(scheduler, "CPU_PIECE_TOKENS", 9)
    model = linear_attention_models.build(name)
    decoder = GraphDecoder(model, batch_sizes=(4,), max_length=MAX_LENGTH, prefill_chunk=chunk)
    given = [
        {"input_ids": prompts(1, length, seed=length)[0], "max_new_tokens": new} | ENDLESS
        for length, new in ((3, 25), (40, 5), (30, 4), (50, 9))
    ]
    expected = [alone(decoder, request) for request in given]
    requests = [parse_one(decoder, request, index) for index, request in enumerate(given)]
    requests[0].stepwise = True
    forwards, found, rows = [], {}, scheduler.Scheduler(decoder)
    hook = model.register_forward_pre_hook(
        lambda module, args, kwargs: forwards.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    try:
        for index, request in enumerate(requests):
            rows.add(request)
            if index == 0:
                advance(rows, found, 4)
        while requests[3] in rows.waiting:
            advance(rows, found, 1)
        requests[3].cancelled = True  # while its prompt is read
        advance(rows, found)
    finally:
        hook.remove()
    rows.close()
    assert sorted(found) == [0, 1, 2]
    assert torch.equal(torch.cat(found[0][:-1]), expected[0])
    assert all(torch.equal(found[index][-1], expected[index]) for index in range(3))
    begun = forwards[4:]
    if decoder.capabilities.chunked_prefill:
        assert sum(begun) > 70 and max(begun) == (chunk or 9)
        assert forwards.count(1) == 24, "no prompt of the others had a last piece of one token, nor a step of its own"
    assert not any(one > 1 and two > 1 for one, two in itertools.pairwise(begun[: begun.index(1, 20)]))


def test_reasons_and_logprobs_of_each_step(decoder, readback):
    """An end token and a stop string count where they are the last token allowed, too."""
    tokenizer = byte_level_tokenizer()
    base = {"input_ids": prompts(1, 9, seed=4)[0], "max_new_tokens": 12, "return_logprobs": True} | ENDLESS
    tokens, logprobs = alone(decoder, base)
    end = int(tokens[7])
    first = tokens.tolist().index(end) + 1
    stop = {"stop_strings": tokenizer.decode(tokens[4:6]), "tokenizer": tokenizer}
    stopped = len(alone(decoder, base | stop)[0])
    cases = [
        (base, 12, "length"),
        (base | {"eos_token_id": end}, first, "stop"),
        (base | {"eos_token_id": end, "max_new_tokens": first}, first, "stop"),
        (base | {"eos_token_id": end, "max_new_tokens": first - 1}, first - 1, "length"),
        (base | stop, stopped, "stop"),
        (base | stop | {"max_new_tokens": stopped}, stopped, "stop"),
        (base | {"max_new_tokens": 1}, 1, "length"),
    ]
    requests, found = {}, {}
    rows = scheduler.Scheduler(decoder)
    for index, stepwise in itertools.product(range(len(cases)), (False, True)):
        request = requests[index, stepwise] = parse_one(decoder, cases[index][0], (index, stepwise))
        request.stepwise = stepwise
        rows.add(request)
    advance(rows, found)
    rows.close()
    for (index, stepwise), news in found.items():
        _, count, reason = cases[index]
        assert requests[index, stepwise].finish_reasons == [reason], index
        *steps, last = news
        assert len(steps) == (count if stepwise else 0)
        for values in [last] + ([tuple(map(torch.cat, zip(*steps, strict=True)))] if stepwise else []):
            assert torch.equal(values[0], tokens[:count]) and torch.allclose(values[1], logprobs[:count], atol=1e-5)
    assert decoder.generate(base["input_ids"][None], max_new_tokens=2).shape == (1, 11)


def test_stop_strings_of_a_server_do_not_begin_in_the_prompt(decoder):
    tokenizer = byte_level_tokenizer()
    request = {"input_ids": torch.tensor(tokenizer.convert_tokens_to_ids(["x", "st", "o"])), "max_new_tokens": 9}
    request |= ENDLESS
    tokens = alone(decoder, request)
    request |= {"stop_strings": ["sto" + tokenizer.decode(tokens[:1])], "tokenizer": tokenizer}
    lengths = []
    for more, strings in (({}, ()), ({"stops_in_answer": True}, ()), ({"stops_in_answer": True}, tokens[1:3])):
        strings = [*request["stop_strings"], *([tokenizer.decode(strings)] if len(strings) else [])]
        rows, found = scheduler.Scheduler(decoder), {}
        rows.add(parse_one(decoder, request | {"stop_strings": strings}, 0, **more))
        advance(rows, found)
        lengths.append(len(found[0][0]))
        assert torch.equal(found[0][0], tokens[: lengths[-1]])
    assert lengths == [1, 9, 3]


def test_progress(decoder, capsys):
    seen = []
    assert len([*decoder.run([*mixed(4)], progress=lambda done, total: seen.append((done, total)))]) == 4
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]
    seen.clear()
    assert len([*decoder.run(mixed(2), progress=lambda *counts: seen.append(counts))]) == 2
    assert seen == [(1, None), (2, None)]
    assert capsys.readouterr().err == ""
    for given in ([*mixed(4)], mixed(4)):
        assert len([*decoder.run(given, progress=True)]) == 4
        assert "4/" in capsys.readouterr().err
    assert len([*decoder.run(mixed(2), progress=False)]) == 2


def test_stats_count_a_run(decoder):
    before = decoder.stats()
    new = sum(len(tokens) for _, tokens in decoder.run(mixed(6)))
    after = decoder.stats()
    assert (after.calls - before.calls, after.new_tokens - before.new_tokens) == (1, new)
    assert after.steps > before.steps


@pytest.mark.parametrize(
    ("arguments", "exception", "message"),
    [
        ({"requests": None}, TypeError, "^requests: expected an iterable of dicts .* got NoneType"),
        ({"requests": {"input_ids": prompts(1, 3)[0]}}, TypeError, "^requests: expected an iterable .* got dict"),
        ({"requests": prompts(1, 3)}, TypeError, "^requests: expected an iterable of dicts"),
        ({"requests": [], "progress": "yes"}, TypeError, "^progress: expected True, False, None or a callable, got"),
    ],
)
def test_bad_calls(decoder, arguments, exception, message):
    with pytest.raises(exception, match=message):
        decoder.run(**arguments)


def test_no_requests(decoder):
    assert [*decoder.run([])] == []
    assert decoder.capabilities.ragged and decoder.capabilities.chunked_prefill
