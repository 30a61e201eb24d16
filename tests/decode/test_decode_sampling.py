"""Sampling arguments of GraphDecoder: what they become, whose samples depend on what, penalties, logprobs."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fp8moe.decode import GraphDecoder, NaNLogits
from fp8moe.decode.sampling import Sampling, empty_state, parse_sampling, write
from tests.decode_models import Puts, tiny_mixtral
from tests.transformers_models import left_padded, prompts

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("one_thread")

NOTHING = SimpleNamespace()
QWEN = SimpleNamespace(do_sample=True, temperature=0.7, top_k=20, top_p=0.8, min_p=None, repetition_penalty=1.05)


@pytest.fixture(scope="module")
def model():
    return tiny_mixtral()


@pytest.fixture(scope="module")
def decoder(model):
    return GraphDecoder(model, batch_sizes=(1, 4), max_length=48)


def f32(value):
    return torch.tensor(value, dtype=torch.float32).item()


def test_without_sampling_only_penalties_come_from_the_configuration():
    own = Sampling(repetition_penalty=f32(1.05))
    assert parse_sampling({}, QWEN, 3) == [own] * 3
    assert parse_sampling({"do_sample": False, "temperature": None, "seed": 5}, QWEN, 1) == [own]
    config = SimpleNamespace(presence_penalty=1.5)
    assert parse_sampling({}, config, 1) == [Sampling()], "transformers knows no such penalty"
    penalties = {"repetition_penalty": 1.5, "presence_penalty": -0.5}
    assert parse_sampling(penalties, QWEN, 1) == [Sampling(**penalties)]
    assert parse_sampling({"temperature": 0, "top_k": 1, "top_p": 1, "min_p": 0}, NOTHING, 1) == [Sampling()]


@pytest.mark.parametrize(
    "setting",
    [
        {"suppress_tokens": [5]},
        {"begin_suppress_tokens": [5]},
        {"bad_words_ids": [[5]]},
        {"sequence_bias": {(5,): -1.0}},
        {"forced_eos_token_id": 5},
        {"min_length": 20},
        {"min_new_tokens": 3},
        {"no_repeat_ngram_size": 2},
        {"num_beams": 2},
        {"num_return_sequences": True},
        {"guidance_scale": 2.0},
        {"token_healing": True},
        {"max_time": 1.0},
    ],
    ids=lambda setting: next(iter(setting)),
)
def test_settings_of_the_configuration_that_are_not_applied_are_refused(setting):
    model = tiny_mixtral()
    decoder, ids = GraphDecoder(model, max_length=16), prompts(1, 4, seed=1)
    model.generation_config = transformers.GenerationConfig(**setting)
    name = next(iter(setting))
    with pytest.raises(ValueError, match=rf"^generation_config\.{name}: GraphDecoder does not apply "):
        decoder.generate(ids, max_new_tokens=2)
    with pytest.raises(ValueError, match=rf"^generation_config\.{name}"):
        decoder.stream(ids, max_new_tokens=2)
    ((_, refused),) = decoder.run([{"input_ids": ids[0], "max_new_tokens": 2}])
    assert isinstance(refused, ValueError) and name in str(refused)


def test_what_is_not_given_comes_from_the_configuration():
    given = {"do_sample": True, "top_p": 0.5, "seed": 3}
    expected = Sampling(f32(0.7), 20, 0.5, 0.0, f32(1.05), 0.0, 3)
    assert parse_sampling(given, QWEN, 2) == [expected] * 2
    assert parse_sampling({"do_sample": True, "seed": 3}, NOTHING, 1) == [Sampling(temperature=1.0, seed=3)]
    off = SimpleNamespace(top_k=0, top_p=1.0, temperature=1.0)
    assert parse_sampling({"do_sample": True, "seed": 3}, off, 1) == [Sampling(temperature=1.0, seed=3)]


def test_values_of_any_kind():
    given = {"temperature": np.float32(0.5), "top_k": torch.tensor(3), "top_p": torch.tensor([0.25]), "min_p": 0}
    found = parse_sampling({"do_sample": True, "seed": np.int64(-1)} | given, NOTHING, 1)
    assert found == [Sampling(0.5, 3, 0.25, 0.0, seed=-1)]
    assert parse_sampling({"do_sample": True, "top_k": 10**12, "seed": 1}, NOTHING, 1)[0].top_k == 2**31 - 1


@pytest.mark.parametrize("temperature", [0, 0.0, 1e-6, 1e-300])
def test_a_temperature_near_zero_is_greedy(temperature):
    assert parse_sampling({"do_sample": True, "temperature": temperature, "seed": 0}, NOTHING, 1) == [Sampling()]


@pytest.mark.parametrize("seeds", [[7, 8, 9], (7, 8, 9), torch.tensor([7, 8, 9]), np.array([7, 8, 9], dtype=np.uint8)])
def test_a_seed_for_each_sequence(seeds):
    assert [one.seed for one in parse_sampling({"do_sample": True, "seed": seeds}, NOTHING, 3)] == [7, 8, 9]


def test_seeds_are_drawn_from_the_default_generator_when_sampling():
    torch.manual_seed(3)
    first = parse_sampling({"do_sample": True}, NOTHING, 4)
    second = parse_sampling({"do_sample": True}, NOTHING, 4)
    assert len({one.seed for one in first + second}) == 8
    torch.manual_seed(3)
    assert parse_sampling({"do_sample": True}, NOTHING, 4) == first
    torch.manual_seed(3)
    parse_sampling({}, NOTHING, 4)
    parse_sampling({"do_sample": True, "seed": 1}, NOTHING, 4)
    assert parse_sampling({"do_sample": True}, NOTHING, 4) == first, "greedy calls draw nothing"


@pytest.mark.parametrize(
    ("arguments", "exception", "message"),
    [
        ({"do_sample": 1}, TypeError, "^do_sample: expected True or False, got int 1"),
        ({"do_sample": None}, TypeError, "^do_sample: expected True or False, got NoneType None"),
        ({"temperature": "hot"}, TypeError, "^temperature: expected a number, got str 'hot'"),
        ({"temperature": True}, TypeError, "^temperature: expected a number, got bool True"),
        ({"temperature": [0.5, 0.7]}, TypeError, r"^temperature: expected a number, got list \[0\.5, 0\.7\]"),
        ({"temperature": torch.ones(2)}, TypeError, "^temperature: expected a number, got a torch.float32 tensor"),
        ({"temperature": torch.tensor(1j)}, TypeError, "^temperature: expected a number, got a torch.complex64"),
        ({"temperature": -0.1}, ValueError, r"^temperature: expected a finite number of at least 0, got -0\.1"),
        ({"temperature": float("nan")}, ValueError, "^temperature: expected a finite number of at least 0, got nan"),
        ({"temperature": 1e39}, ValueError, r"^temperature: expected a finite number of at least 0, got 1e\+39"),
        ({"top_k": 0}, ValueError, "^top_k: expected at least 1, got 0"),
        ({"top_k": 2.5}, TypeError, r"^top_k: expected an integer, got float 2\.5"),
        ({"top_p": 0}, ValueError, "^top_p: expected a number above 0 and at most 1, got 0"),
        ({"top_p": 1e-46}, ValueError, "^top_p: expected a number above 0 and at most 1, got 1e-46"),
        ({"top_p": 1.5}, ValueError, r"^top_p: expected a number above 0 and at most 1, got 1\.5"),
        ({"min_p": -0.5}, ValueError, r"^min_p: expected a number from 0 to 1, got -0\.5"),
        ({"min_p": 2}, ValueError, "^min_p: expected a number from 0 to 1, got 2"),
        ({"repetition_penalty": 0}, ValueError, "^repetition_penalty: expected a finite number above 0, got 0"),
        ({"presence_penalty": float("inf")}, ValueError, "^presence_penalty: expected a finite number, got inf"),
        ({"seed": 1.5}, TypeError, r"^seed: expected an integer, got float 1\.5"),
        ({"seed": [1, 2]}, ValueError, "^seed: expected an integer, or one for each of 3 sequences, got 2"),
        ({"seed": 2**63}, ValueError, f"^seed: expected an integer of 64 bits, got {2**63}"),
        ({"do_sample": False, "temperature": 0.7}, ValueError, r"^temperature: 0\.7 has no effect without sampling; "),
        ({"do_sample": False, "top_k": 20}, ValueError, "^top_k: 20 has no effect without sampling; pass do_sample=T"),
        ({"do_sample": False, "top_p": 0.9}, ValueError, r"^top_p: 0\.9 has no effect without sampling"),
        ({"do_sample": False, "min_p": 0.1}, ValueError, r"^min_p: 0\.1 has no effect without sampling"),
        ({"do_sample": False, "seed": "x"}, TypeError, "^seed: expected an integer, got str 'x'"),
    ],
)
def test_bad_arguments(arguments, exception, message):
    with pytest.raises(exception, match=message):
        parse_sampling({"do_sample": True} | arguments, NOTHING, 3)


def test_a_bad_configuration_is_named():
    with pytest.raises(ValueError, match=r"^generation_config\.top_p: expected a number above 0 and at most 1, got 2"):
        parse_sampling({"do_sample": True}, SimpleNamespace(top_p=2), 1)
    assert parse_sampling({"do_sample": True, "top_p": 0.5, "seed": 1}, SimpleNamespace(top_p=2), 1)[0].top_p == 0.5


def test_a_row_of_the_state():
    state = empty_state(3, 10, torch.device("cpu"))
    untouched = [tensor.clone() for tensor in state]
    sampling = Sampling(0.5, 4, 0.75, 0.125, 1.5, -2.0, -(2**63))
    mask = torch.tensor([False, True, True, True, True])
    state.step.fill_(9)
    state.seen[1].fill_(3)
    write(state, 1, sampling, torch.tensor([2, 4, 12, 4, 7]), mask)
    assert [float(tensor[1]) for tensor in state[:6]] == [0.5, 4.0, 0.75, 0.125, 1.5, -2.0]
    assert state.seed[1] == -(2**63) and state.step.tolist() == [9, 0, 9]
    assert state.seen.tolist() == [[0] * 10, [0, 0, 0, 0, 1, 0, 0, 1, 0, 0], [0] * 10], "12 has no logits"
    for row in (0, 2):
        assert all(torch.equal(now[row], then[row]) for now, then in zip(state[:7], untouched[:7], strict=True))
    write(state, 1, Sampling(), torch.tensor([3]))
    assert all(torch.equal(now, then) for now, then in zip(state[:7], untouched[:7], strict=True))
    assert state.seen[1].nonzero().tolist() == [[3]]


@pytest.mark.parametrize("penalty", [1.3, 0.8])
def test_repetition_penalty_equals_transformers(model, decoder, penalty):
    ids = prompts(3, 9, seed=2)
    free = decoder.generate(ids, max_new_tokens=30)
    expected = model.generate(ids, do_sample=False, max_new_tokens=30, repetition_penalty=penalty)
    found = decoder.generate(ids, max_new_tokens=30, repetition_penalty=penalty)
    assert torch.equal(found, expected) and not torch.equal(found, free)


class Presence(transformers.LogitsProcessor):
    def __init__(self, penalty, length):
        self.penalty, self.length = penalty, length

    def __call__(self, input_ids, scores):
        seen = torch.zeros_like(scores).scatter_(1, input_ids[:, self.length :], 1.0)
        return scores - self.penalty * seen


@pytest.mark.parametrize("repetition", [None, 1.2])
def test_presence_penalty_is_subtracted_for_tokens_of_the_answer(model, decoder, repetition):
    """In transformers' place for one's own processors: after the repetition penalty."""
    ids = prompts(3, 9, seed=3)
    expected = model.generate(
        ids,
        **{"do_sample": False, "max_new_tokens": 30, "repetition_penalty": repetition},
        logits_processor=[Presence(1.5, ids.shape[1])],
    )
    found = decoder.generate(ids, max_new_tokens=30, presence_penalty=1.5, repetition_penalty=repetition)
    without = decoder.generate(ids, max_new_tokens=30, repetition_penalty=repetition)
    assert torch.equal(found, expected) and not torch.equal(found, without)


def test_padding_is_no_part_of_the_prompt(decoder):
    """A short prompt gets the same penalties alone and padded."""
    ids = prompts(2, 12, seed=4)
    mask = left_padded(ids, 5, 0)
    ids[0, :5] = decoder.generate(ids[:1, 5:], max_new_tokens=1)[0, -1]
    how = {"max_new_tokens": 20, "repetition_penalty": 1.5}
    alone = decoder.generate(ids[:1, 5:], **how)[:, 7:]
    assert torch.equal(decoder.generate(ids, attention_mask=mask, **how)[:1, 12:], alone)


HOW = {"max_new_tokens": 24, "do_sample": True, "temperature": 0.8, "top_k": 40, "top_p": 0.95}


def test_samples_depend_on_seed_and_prompt_alone(decoder):
    ids = prompts(4, 9, seed=5)
    together = decoder.generate(ids, seed=[5, 6, 7, 8], **HOW)
    for row, seed in enumerate([5, 6, 7, 8]):
        assert torch.equal(decoder.generate(ids[row : row + 1], seed=seed, **HOW), together[row : row + 1])
    assert torch.equal(decoder.generate(ids.flip(0), seed=[8, 7, 6, 5], **HOW), together.flip(0))
    assert torch.equal(decoder.generate(ids, seed=[5, 6, 7, 8], **HOW), together)
    others = decoder.generate(ids, seed=[15, 16, 17, 18], **HOW)
    assert not any(torch.equal(*rows) for rows in zip(others, together, strict=True))


def test_one_seed_for_all_sequences(decoder):
    ids = prompts(1, 9, seed=6).expand(3, 9)
    same = decoder.generate(ids, seed=11, **HOW)
    assert torch.equal(same[0], same[1]) and torch.equal(same[0], same[2])
    different = decoder.generate(ids, seed=[11, 12, 13], **HOW)
    assert torch.equal(different[0], same[0]) and len({tuple(row) for row in different.tolist()}) == 3


def test_without_a_seed_manual_seed_repeats(decoder):
    ids = prompts(2, 9, seed=7)
    torch.manual_seed(1)
    first, second = decoder.generate(ids, **HOW), decoder.generate(ids, **HOW)
    torch.manual_seed(1)
    assert torch.equal(decoder.generate(ids, **HOW), first) and not torch.equal(first, second)


def test_sampling_that_is_greedy(decoder):
    ids = prompts(3, 9, seed=8)
    greedy = decoder.generate(ids, max_new_tokens=24)
    for arguments in ({"top_k": 1}, {"temperature": 1e-6}, {"top_p": 1e-6}, {"min_p": 1.0}):
        assert torch.equal(decoder.generate(ids, max_new_tokens=24, do_sample=True, seed=1, **arguments), greedy)


def test_sampling_takes_the_models_generation_config():
    model = tiny_mixtral()
    decoder = GraphDecoder(model, batch_sizes=(2,), max_length=48)
    ids = prompts(2, 9, seed=9)
    greedy = decoder.generate(ids, max_new_tokens=24)
    penalized = decoder.generate(ids, max_new_tokens=24, repetition_penalty=1.2)
    model.generation_config.update(do_sample=True, temperature=0.6, top_k=30, top_p=0.9, repetition_penalty=1.2)
    given = {"temperature": 0.6, "top_k": 30, "top_p": 0.9, "repetition_penalty": 1.2}
    found = decoder.generate(ids, max_new_tokens=24, do_sample=True, seed=2)
    assert torch.equal(decoder.generate(ids, max_new_tokens=24), penalized), (
        "do_sample is an argument, a penalty is none"
    )
    assert not torch.equal(penalized, greedy)
    model.generation_config = transformers.GenerationConfig()
    assert torch.equal(found, decoder.generate(ids, max_new_tokens=24, do_sample=True, seed=2, **given))
    assert not torch.equal(found, decoder.generate(ids, max_new_tokens=24, do_sample=True, seed=2))


def test_draws_are_distributed_as_the_model_says(model):
    """4096 draws of one token, against the softmax of the 6 largest logits at a temperature of 2."""
    decoder = GraphDecoder(model, batch_sizes=(1024,), max_length=12)
    ids = prompts(1, 9, seed=10)
    with torch.no_grad():
        top = (model(ids).logits[0, -1] / 2).topk(6)
    seeds = torch.arange(4096).split(1024)
    how = {"max_new_tokens": 1, "do_sample": True, "temperature": 2.0, "top_k": 6}
    drawn = torch.cat([decoder.generate(ids.expand(1024, 9), seed=some, **how)[:, -1] for some in seeds])
    counts = (drawn[:, None] == top.indices).sum(0)
    assert counts.sum() == 4096
    expected = 4096 * top.values.softmax(0)
    assert ((counts - expected) ** 2 / expected).sum() < 20.5  # chi-square with 5 degrees of freedom: p = 0.001


@pytest.mark.parametrize("how", [{}, {"repetition_penalty": 1.4}, {"do_sample": True, "temperature": 0.5, "seed": 4}])
def test_logprobs_are_those_of_a_forward_pass(model, decoder, how):
    ids = prompts(3, 9, seed=11)
    tokens, logprobs = decoder.generate(ids, max_new_tokens=20, return_logprobs=True, **how)
    assert torch.equal(tokens, decoder.generate(ids, max_new_tokens=20, **how))
    with torch.no_grad():
        expected = model(tokens).logits[:, 8:-1].log_softmax(-1).gather(2, tokens[:, 9:, None])[..., 0]
    assert logprobs.shape == (3, 20) and logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs, expected, atol=1e-4, rtol=1e-4)


def test_logprobs_are_0_after_the_end(decoder):
    ids = prompts(3, 9, seed=12)
    free, all_logprobs = decoder.generate(ids, max_new_tokens=20, return_logprobs=True)
    ends = [int(free[0, 12]), int(free[1, 17])]
    tokens, logprobs = decoder.generate(ids, max_new_tokens=20, return_logprobs=True, eos_token_id=ends, pad_token_id=0)
    assert logprobs.shape == (3, tokens.shape[1] - 9)
    for row in range(3):
        new = free[row, 9:].tolist()
        length = min(new.index(end) + 1 if end in new else 20 for end in ends)
        torch.testing.assert_close(logprobs[row, :length], all_logprobs[row, :length])
        assert not logprobs[row, length:].any() and not tokens[row, 9 + length :].any()


def test_nan_ends_its_own_sequence():
    model = tiny_mixtral()
    decoder = GraphDecoder(model, batch_sizes=(4,), max_length=48)
    ids = prompts(3, 9, seed=13)
    free, logprobs = decoder.generate(ids, max_new_tokens=20, return_logprobs=True)
    new = free[:, 9:].tolist()
    # The first token of sequence 1 that the others do not have: what comes after it is NaN.
    at, poison = next((at, token) for at, token in enumerate(new[1]) if token not in new[0] + new[2] + ids.tolist()[1])
    with torch.no_grad():
        model.model.embed_tokens.weight[poison] = torch.nan
    for arguments in ({}, {"return_logprobs": True}, {"streamer": Puts()}):
        with pytest.raises(NaNLogits, match=r"^model: its logits became NaN in sequences \[1\], ") as error:
            decoder.generate(ids, max_new_tokens=20, pad_token_id=2, **arguments)
        expected = free.clone()
        expected[1, 9 + at + 1 :] = 2
        assert error.value.rows == [1] and torch.equal(error.value.tokens, expected)
        if "return_logprobs" in arguments:
            logprobs[1, at + 1 :] = 0
            torch.testing.assert_close(error.value.logprobs, logprobs)
        else:
            assert error.value.logprobs is None
    steps = []
    with pytest.raises(NaNLogits):
        steps.extend(decoder.stream(ids, max_new_tokens=20, pad_token_id=2))
    assert torch.equal(torch.stack(steps, 1), expected[:, 9:])


def test_nan_in_all_sequences_ends_the_call():
    model = tiny_mixtral()
    decoder = GraphDecoder(model, batch_sizes=(2,), max_length=48)
    with torch.no_grad():
        model.model.embed_tokens.weight.fill_(torch.nan)
    puts = Puts()
    with pytest.raises(NaNLogits, match=r"sequences \[0, 1\]") as error:
        decoder.generate(prompts(2, 9), max_new_tokens=20, streamer=puts)
    assert torch.equal(error.value.tokens, prompts(2, 9))
    assert len(puts.values) == 1 and puts.ended == 1, "the prompts"
