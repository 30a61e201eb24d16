"""GraphDecoder's tokens as they come: stream, transformers' streamers, stop strings, whose turn it is."""

import contextlib
import gc
import itertools
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

from fp8moe.decode import GraphDecoder, NaNLogits, scheduler
from fp8moe.decode import decoder as decoder_module
from fp8moe.decode.request import StopStrings, Tail
from fp8moe.decode.transfers import Readback
from tests.decode_models import (
    BYTES,
    END,
    PAD,
    PIECES,
    VOCABULARY,
    LateReadback,
    Puts,
    byte_fallback_tokenizer,
    byte_level_tokenizer,
    tiny_mixtral,
)
from tests.transformers_models import left_padded, prompts

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENIZERS = {"byte level": byte_level_tokenizer, "byte fallback": byte_fallback_tokenizer}


@pytest.fixture(scope="module")
def model():
    return tiny_mixtral()


@pytest.fixture(scope="module")
def decoder(model):
    return GraphDecoder(model, batch_sizes=(1, 4), max_length=64)


@pytest.fixture(params=["at once", "late"])
def lag(request, monkeypatch):
    if request.param == "late":
        monkeypatch.setattr(scheduler, "Readback", LateReadback)
    return int(request.param == "late")


def ends_of(free, *places):
    """End tokens that come at these (row, column) of what is generated without them."""
    return [int(free[place]) for place in places]


@pytest.mark.parametrize("how", [{}, {"do_sample": True, "seed": [1, 2, 3]}, {"repetition_penalty": 1.3}])
def test_stream_yields_what_generate_returns(decoder, lag, how):
    ids = prompts(3, 9)
    mask = left_padded(ids, 4, 0, 1)
    expected = decoder.generate(ids, attention_mask=mask, max_new_tokens=20, **how)
    steps = list(decoder.stream(ids, attention_mask=mask, max_new_tokens=20, **how))
    assert len(steps) == 20 and all(step.shape == (3,) and step.dtype == torch.int64 for step in steps)
    assert torch.equal(torch.stack(steps, 1), expected[:, 9:])


@pytest.mark.parametrize("at", [0, 1, 11])
def test_stream_stops_when_all_sequences_have_ended(decoder, lag, monkeypatch, at):
    ids = prompts(3, 9, seed=1)
    free = decoder.generate(ids, max_new_tokens=40)[:, 9:]
    ends = ends_of(free, (0, at), (1, at), (2, at))
    expected = decoder.generate(ids, max_new_tokens=40, eos_token_id=ends, pad_token_id=2)[:, 9:]
    replays, replay = [], decoder.steps[4].replay
    monkeypatch.setattr(decoder.steps[4], "replay", lambda: replays.append(1) or replay())
    steps = list(decoder.stream(ids, max_new_tokens=40, eos_token_id=ends, pad_token_id=2))
    assert torch.equal(torch.stack(steps, 1), expected)
    assert len(replays) == len(steps) - 1 + lag


def test_streamers_get_what_model_generate_gives_them(model, decoder, lag):
    for batch, ends in ((1, None), (1, [9]), (3, None)):
        ids = prompts(batch, 9, seed=batch)
        theirs, ours = Puts(), Puts()
        if ends:
            ends = ends_of(decoder.generate(ids, max_new_tokens=20), (0, 9 + 7))
        how = {"max_new_tokens": 20, "eos_token_id": ends, "pad_token_id": 0}
        expected = model.generate(ids, do_sample=False, streamer=theirs, **how)
        assert torch.equal(decoder.generate(ids, streamer=ours, **how), expected)
        assert ours.ended == 1 and len(ours.values) == len(theirs.values)
        assert all(torch.equal(*pair) for pair in zip(ours.values, theirs.values, strict=True))


def test_text_streamers(decoder, capsys):
    tokenizer = byte_level_tokenizer()
    ids = prompts(1, 9, seed=6)
    tokens = decoder.generate(ids, max_new_tokens=20, streamer=transformers.TextStreamer(tokenizer, skip_prompt=True))
    text = tokenizer.decode(tokens[0, 9:])
    assert capsys.readouterr().out == text + "\n"

    streamer = transformers.TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    with ThreadPoolExecutor(1) as thread:
        call = thread.submit(partial(decoder.generate, ids, max_new_tokens=20, streamer=streamer))
        assert "".join(streamer) == text
        assert torch.equal(call.result(), tokens)

    with pytest.raises(ValueError, match="only supports batch size 1"):
        decoder.generate(prompts(2, 9), max_new_tokens=3, streamer=transformers.TextStreamer(tokenizer))


def test_a_streamer_that_fails_is_ended_and_frees_the_decoder(decoder):
    for fail_at in (0, 1, 4):
        puts = Puts(fail_at)
        with pytest.raises(OSError, match="the reader went away"):
            decoder.generate(prompts(1, 9), max_new_tokens=20, streamer=puts)
        assert puts.ended == 1 and len(puts.values) == fail_at
    decoder.generate(prompts(1, 9), max_new_tokens=2)


@pytest.mark.parametrize("leave", ["break", "close", "forget"])
def test_leaving_a_stream_frees_the_decoder(decoder, lag, leave):
    ids = prompts(2, 9, seed=2)
    expected = decoder.generate(ids, max_new_tokens=20)
    steps = decoder.stream(ids, max_new_tokens=20)
    found = [next(steps) for _ in range(5)]
    if leave == "close":
        steps.close()
    elif leave == "break":
        for _ in steps:
            break
        steps.close()
    else:
        del steps
        gc.collect()
    assert torch.equal(torch.stack(found, 1), expected[:, 9:14])
    assert torch.equal(decoder.generate(ids, max_new_tokens=20), expected)


def test_a_thread_cannot_wait_for_its_own_stream(decoder):
    ids = prompts(2, 9, seed=3)
    expected = decoder.generate(ids, max_new_tokens=10)
    steps = decoder.stream(ids, max_new_tokens=10)
    first = next(steps)
    for call in (
        partial(decoder.generate, ids, max_new_tokens=3),
        partial(next, decoder.stream(ids, max_new_tokens=3)),
        decoder.close,
    ):
        with pytest.raises(RuntimeError, match="^the decoder is at work: this thread has a stream"):
            call()
    with ThreadPoolExecutor(1) as thread:
        other = thread.submit(decoder.generate, ids, max_new_tokens=10)
        rest = list(steps)
        assert torch.equal(other.result(), expected), "another thread waits for its turn"
    assert torch.equal(torch.stack([first, *rest], 1), expected[:, 9:])


def interrupted(call, number, files):
    """Call with a KeyboardInterrupt at the line that is the n-th to run in these files; return whether there is one."""
    seen = 0

    def trace(frame, event, argument):
        nonlocal seen
        if frame.f_code.co_filename not in files:
            return None
        seen += event == "line"
        if event == "line" and seen == number:
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return seen >= number


def autocasts():
    """How many contexts of torch.autocast this thread is in, and one more."""
    depth = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return depth


@pytest.fixture
def no_more_autocasts():
    """Closes contexts of torch.autocast that an interrupt between two of Python's instructions has left open.

    In one of them PyTorch would keep bfloat16 copies of the weights of whatever trains under autocast later.
    """
    before = autocasts()
    yield
    while autocasts() > before:
        torch.autocast_decrement_nesting()


def test_an_interrupt_at_any_line_leaves_no_turn_behind(decoder, no_more_autocasts):
    """Another thread gets its turn."""

    def turn():
        with decoder.turn():
            pass

    def stream():
        steps = decoder.stream(prompts(1, 3), max_new_tokens=9)
        next(steps)
        steps.close()

    with ThreadPoolExecutor(1) as thread:
        for call, files in (
            (turn, [decoder_module.__file__, contextlib.__file__]),
            (stream, [decoder_module.__file__]),
        ):
            for number in itertools.count(1):
                if not interrupted(call, number, files):
                    break
                thread.submit(turn).result(timeout=30)
            assert number > 25
    assert decoder.generate(prompts(1, 9), max_new_tokens=2).shape == (1, 11)


def test_a_stream_can_end_in_another_thread(decoder):
    steps = decoder.stream(prompts(1, 9), max_new_tokens=10)
    next(steps)
    thread = threading.Thread(target=steps.close)
    thread.start()
    thread.join()
    decoder.generate(prompts(1, 9), max_new_tokens=2)


def test_a_stream_checks_its_arguments_at_once(decoder):
    ids = prompts(1, 9)
    with pytest.raises(ValueError, match="^return_logprobs: stream yields no logprobs; generate returns them"):
        decoder.stream(ids, max_new_tokens=3, return_logprobs=True)
    with pytest.raises(ValueError, match="^max_new_tokens: expected at least 1, got 0"):
        decoder.stream(ids, max_new_tokens=0)
    with pytest.raises(TypeError, match="unexpected keyword argument 'num_beams'"):
        decoder.stream(ids, max_new_tokens=3, num_beams=2)
    with pytest.raises(TypeError, match="missing a required argument: 'max_new_tokens'"):
        decoder.stream(ids)
    decoder.generate(ids, max_new_tokens=2)


def test_grad_and_inference_mode_of_the_caller_stay(decoder):
    with torch.inference_mode():
        steps = decoder.stream(prompts(1, 9), max_new_tokens=3)
        assert not next(steps).is_inference()
    for _ in steps:
        assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


def generated_text(decoder, tokenizer, row, **how):
    tokens = decoder.generate(prompts(3, 9, seed=4), max_new_tokens=30, **how)[row, 9:].tolist()
    return tokens, StopStrings("x", tokenizer).text(tokens)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_stop_strings_end_sequences_as_in_transformers(model, decoder, monkeypatch, name):
    tokenizer = TOKENIZERS[name]()
    ids = prompts(3, 9, seed=4)
    stopped = 0
    for row, begin in ((0, 3), (0, 18), (1, 11), (2, 3), (2, 18)):
        tokens, text = generated_text(decoder, tokenizer, row)
        strings = [text[begin : begin + 1 + row], text[begin + 4 : begin + 9]]
        how = {"max_new_tokens": 30, "eos_token_id": END, "pad_token_id": PAD, "tokenizer": tokenizer}
        expected = model.generate(ids, do_sample=False, stop_strings=strings, **how)
        stopped += expected.shape[1] < 39 or bool((expected[:, -1] == PAD).any())
        for readback in (Readback, LateReadback):
            monkeypatch.setattr(scheduler, "Readback", readback)
            assert torch.equal(decoder.generate(ids, stop_strings=strings, **how), expected), strings
            steps = list(decoder.stream(ids, stop_strings=strings, **how))
            assert torch.equal(torch.stack(steps, 1), expected[:, 9:])
    assert stopped >= 4


def test_stop_strings_with_sampling_and_logprobs(decoder, lag):
    tokenizer = byte_level_tokenizer()
    ids, how = prompts(3, 9, seed=4), {"do_sample": True, "seed": 3, "max_new_tokens": 30}
    free, logprobs = decoder.generate(ids, return_logprobs=True, **how)
    words = tokenizer.convert_ids_to_tokens(free[0, 9:].tolist())
    stop = tokenizer.convert_tokens_to_string(words[6:9])
    found, cut = decoder.generate(
        ids, return_logprobs=True, stop_strings=stop, tokenizer=tokenizer, pad_token_id=PAD, **how
    )
    assert torch.equal(found[0, :18], free[0, :18]) and not found[0, 18:].any() and not cut[0, 9:].any()
    torch.testing.assert_close(cut[0, :9], logprobs[0, :9])


def test_nan_after_a_stop_string_is_no_matter(lag):
    """The GPU may have begun a step more."""
    model, tokenizer, ids = tiny_mixtral(), byte_level_tokenizer(), prompts(1, 9, seed=4)
    decoder = GraphDecoder(model, max_length=64)
    free = decoder.generate(ids, max_new_tokens=12)
    last = int(free[0, -1])
    assert last not in free[0, :-1]
    with torch.no_grad():
        model.model.embed_tokens.weight[last] = torch.nan
    with pytest.raises(NaNLogits):
        decoder.generate(ids, max_new_tokens=30)
    stop = tokenizer.decode(free[0, -2:])
    assert torch.equal(decoder.generate(ids, max_new_tokens=30, stop_strings=stop, tokenizer=tokenizer), free)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_stop_strings_equal_transformers_criteria(name):
    """Random tokens, strings and prompts; those of several bytes, in parts too."""
    tokenizer = TOKENIZERS[name]()
    generator = torch.Generator().manual_seed(0)
    strings = ["stop", "op s", "é", "x€", "topper", "s t", "oo", "Ã"]
    hits = 0
    for some in (strings[:1], strings[1:3], strings[3:6], strings):
        criteria = transformers.StopStringCriteria(tokenizer, some)
        stop = StopStrings(some, tokenizer)
        for _ in range(40):
            tokens = torch.randint(3, 30, (24,), generator=generator)
            tail = Tail(stop, tokens[:4].tolist())
            for end in range(5, 25):
                expected = bool(criteria(tokens[None, :end], None))
                assert tail.ends_with(int(tokens[end - 1])) == expected, (some, tokens[:end])
                hits += expected
    assert hits > 100


@pytest.mark.parametrize("name", TOKENIZERS)
def test_stop_strings_among_characters_of_several_tokens(name):
    """Also behind such a character, and in a prompt in front of one, where they end nothing."""
    tokenizer = TOKENIZERS[name]()
    generator = torch.Generator().manual_seed(0)
    of_byte = {byte: 3 + len(PIECES) + index for index, byte in enumerate(BYTES)}
    hits = 0
    for stop in ("\n", "\n\n", "é\n", "😀", "\n😀é"):
        criteria = transformers.StopStringCriteria(tokenizer, stop)
        for _ in range(40):
            text = "".join("\né€😀"[index] for index in torch.randint(0, 4, (9,), generator=generator))
            tokens = [of_byte[byte] for byte in text.encode()]
            tail = Tail(StopStrings(stop, tokenizer), tokens[:4])
            for end in range(5, len(tokens) + 1):
                expected = bool(criteria(torch.tensor([tokens[:end]]), None))
                assert tail.ends_with(tokens[end - 1]) == expected, (stop, text, end)
                hits += expected
    assert hits > 100


def test_stop_strings_of_the_generation_config():
    tokenizer, model = byte_level_tokenizer(), tiny_mixtral()
    decoder, ids = GraphDecoder(model, max_length=48), prompts(1, 9)
    answer = decoder.generate(ids, max_new_tokens=20)[0, 9:]
    strings = [tokenizer.decode(answer)[6:9]]
    model.generation_config.stop_strings = strings
    expected = model.generate(ids, do_sample=False, max_new_tokens=20, tokenizer=tokenizer)
    assert expected.shape[1] < 29
    assert torch.equal(decoder.generate(ids, max_new_tokens=20, tokenizer=tokenizer), expected)
    with pytest.raises(ValueError, match="^stop_strings: they need tokenizer="):
        decoder.generate(ids, max_new_tokens=20)


def test_stop_strings_need_a_tokenizer_and_padding(decoder):
    tokenizer = byte_level_tokenizer()
    cases = [
        ({"stop_strings": "x"}, ValueError, "^stop_strings: they need tokenizer=, the tokenizer of the model"),
        ({"stop_strings": "x", "tokenizer": 3}, TypeError, "^tokenizer: expected a tokenizer of transformers, got int"),
        ({"stop_strings": 3, "tokenizer": tokenizer}, TypeError, "^stop_strings: expected a string or .*, got int 3"),
        ({"stop_strings": ["x", None], "tokenizer": tokenizer}, TypeError, "^stop_strings: .*, got NoneType None"),
        ({"stop_strings": [], "tokenizer": tokenizer}, ValueError, r"^stop_strings: expected one or more .*, got \[\]"),
        ({"stop_strings": ["x", ""], "tokenizer": tokenizer}, ValueError, "^stop_strings: .* none of them empty"),
        ({"streamer": "print"}, TypeError, "^streamer: expected put and end, .* got str 'print'"),
    ]
    for arguments, exception, message in cases:
        with pytest.raises(exception, match=message):
            decoder.generate(prompts(1, 9), max_new_tokens=3, **arguments)
    model = tiny_mixtral(pad_token_id=None)
    unpadded = GraphDecoder(model, batch_sizes=(2,), max_length=20)
    how = {"max_new_tokens": 3, "stop_strings": "x", "tokenizer": tokenizer}
    with pytest.raises(ValueError, match="^stop_strings: in a batch they need pad_token_id"):
        unpadded.generate(prompts(2, 9), **how)
    assert unpadded.generate(prompts(1, 9), **how).shape[0] == 1


def test_vocabulary_of_the_tokenizers():
    for make in TOKENIZERS.values():
        assert len(make()) == VOCABULARY
