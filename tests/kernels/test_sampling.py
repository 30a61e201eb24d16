"""Sampling: the reference against transformers' processors and their distributions, rows that mean nothing, errors,
operator, and the compiled kernels."""

import itertools

import pytest
import torch

from fp8moe.kernels.decoder_ops import sampling as reference
from fp8moe.kernels.decoder_ops.sampling import SamplingState, sample
from fp8moe.runtime.checks import FLOATING
from tests.errors import refused
from tests.ptxas import without_spills
from tests.sampling_cases import copied, make_state, random_logits, random_state

DRAWS = 10_000
NAN = float("nan")


def warped(logits, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """Scores (B, V) as model.generate has them before it draws."""
    transformers = pytest.importorskip("transformers")
    scores = logits.float()
    if temperature != 1.0:
        scores = transformers.TemperatureLogitsWarper(temperature)(None, scores)
    if top_k:
        scores = transformers.TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1.0:
        scores = transformers.TopPLogitsWarper(top_p)(None, scores)
    if min_p:
        scores = transformers.MinPLogitsWarper(min_p)(None, scores)
    return scores


def kept(logits, **parameters):
    state = make_state(*logits.shape, **parameters)
    scaled = logits.float() / state.temperature[:, None]
    return reference.kept(scaled, scaled.amax(1, keepdim=True), state)


def assert_keeps_as_transformers(logits, **parameters):
    """The same values, and as many of equal ones: which of these top_p keeps, transformers' sort leaves open."""
    scaled = logits.float() / parameters.get("temperature", 1.0)
    ours = torch.where(kept(logits, **parameters), scaled, -torch.inf)
    assert torch.equal(ours.sort(1).values, warped(logits, **parameters).sort(1).values), parameters


def assert_distributed(tokens, probabilities):
    """Pearson's chi-square of draws, within 5 standard deviations; nothing of probability 0 was drawn."""
    counts = torch.bincount(tokens, minlength=len(probabilities)).double()
    expected = probabilities.double() * len(tokens)
    assert not counts[expected == 0].any()
    rare = expected < 5
    groups = [torch.cat((values[~rare], values[rare].sum()[None])) for values in (counts, expected)]
    counts, expected = (values[groups[1] > 0] for values in groups)
    freedom = len(counts) - 1
    assert ((counts - expected).square() / expected).sum() < freedom + 5 * (2 * freedom) ** 0.5 + 5


# ---- as transformers ----


@pytest.mark.parametrize(
    "parameters",
    [
        *({}, {"temperature": 0.6}, {"temperature": 1.7}, {"top_k": 5}, {"top_p": 0.6}, {"min_p": 0.1}),
        {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
        {"temperature": 1.5, "top_k": 30, "top_p": 0.9, "min_p": 0.05},
    ],
)
def test_distribution(parameters):
    logits = random_logits(1, 61, torch.float32, std=2.0)
    probabilities = warped(logits, **parameters).softmax(1)[0]
    by_seed = make_state(DRAWS, 61, **parameters)
    assert_distributed(sample(logits.expand(DRAWS, -1), by_seed).tokens, probabilities)


def test_distribution_over_the_steps_of_a_sequence():
    logits = random_logits(1, 61, torch.float32, std=2.0)
    state = make_state(DRAWS, 61, seed=12, step=range(DRAWS))
    assert_distributed(sample(logits.expand(DRAWS, -1), state).tokens, logits.softmax(1)[0])


@pytest.mark.parametrize("vocab,dtype", [(1, torch.float32), (7, torch.bfloat16), (301, torch.float16)])
def test_distribution_of_equal_logits(vocab, dtype):
    logits = torch.full((1, vocab), -3.0, dtype=dtype).expand(DRAWS, -1)
    assert_distributed(sample(logits, make_state(DRAWS, vocab)).tokens, torch.full((vocab,), 1 / vocab))


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1, 2, 13, 1000, 5003])
def test_what_is_kept(vocab, dtype, temperature):
    logits = random_logits(40, vocab, dtype)  # in bfloat16 many are equal
    choices = {"top_k": (1, 3, 20, 999, 10_000), "top_p": (0.05, 0.5, 0.8, 0.95, 0.999), "min_p": (0.001, 0.1, 0.9)}
    for name, values in choices.items():
        for value in values:
            assert_keeps_as_transformers(logits, temperature=temperature, **{name: value})
    for top_k, top_p, min_p in itertools.product((2, 50), (0.3, 0.9), (0.0, 0.05)):
        parameters = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
        assert_keeps_as_transformers(logits, **parameters)


def test_what_is_kept_of_equal_logits():
    logits = torch.tensor([[1.0, 2.0, 2.0, 0.0, 2.0, 2.0]])
    assert kept(logits, top_k=2).int().tolist() == [[0, 1, 1, 0, 1, 1]]
    for top_p, expected in ((0.1, [0, 0, 0, 0, 0, 1]), (0.4, [0, 0, 0, 0, 1, 1]), (0.9, [1, 1, 1, 0, 1, 1])):
        assert kept(logits, top_p=top_p).int().tolist() == [expected]
        assert_keeps_as_transformers(logits, top_p=top_p)
    assert kept(logits, top_p=0.0).int().tolist() == [[0, 0, 0, 0, 0, 1]]
    assert kept(logits, min_p=1.0).int().tolist() == [[0, 1, 1, 0, 1, 1]]
    zeros = torch.tensor([[-1.0, -0.0, 0.0, -0.0]])
    assert kept(zeros, top_k=1).int().tolist() == [[0, 1, 1, 1]]


@pytest.mark.parametrize("penalty", [0.8, 1.3])
def test_repetition_penalty(penalty):
    transformers = pytest.importorskip("transformers")
    logits = random_logits(30, 200, torch.float32)
    ids = torch.randint(0, 200, (30, 25))
    expected = transformers.RepetitionPenaltyLogitsProcessor(penalty)(ids, logits)
    seen = torch.zeros(30, 200, dtype=torch.uint8)
    seen.scatter_(1, ids[:, :12], reference.IN_PROMPT)
    seen.scatter_(1, ids[:, 12:], reference.GENERATED)
    state = make_state(30, 200, seen=seen, repetition_penalty=penalty)
    assert torch.equal(sample(logits, copied(state)._replace(temperature=torch.zeros(30))).tokens, expected.argmax(1))
    assert torch.equal(sample(logits, copied(state)).tokens, sample(expected, make_state(30, 200)).tokens)
    plain = sample(logits, make_state(30, 200, temperature=0.0)).tokens
    assert not torch.equal(plain, expected.argmax(1))


def test_presence_penalty_is_of_generated_tokens_and_after_the_other():
    logits = torch.tensor([[4.0, 3.5, 3.0, -9.0]]).repeat(5, 1)
    seen = torch.tensor([[0, 0, 0, 0], [1, 1, 0, 0], [2, 0, 0, 0], [3, 2, 0, 0], [3, 0, 0, 0]], dtype=torch.uint8)
    state = make_state(5, 4, seen=seen, temperature=0.0, presence_penalty=0.75)
    assert sample(logits, state).tokens.tolist() == [0, 0, 1, 0, 1]
    # 4 / 2 - 0.75 < 1.5; before the division it would be 1.625.
    state = make_state(
        1, 2, seen=torch.tensor([[2, 0]], dtype=torch.uint8), temperature=0.0, repetition_penalty=2.0
    )._replace(presence_penalty=torch.tensor([0.75]))
    assert sample(torch.tensor([[4.0, 1.5]]), state).tokens.tolist() == [1]


# ---- greedy, state, independence ----


@pytest.mark.parametrize("dtype", FLOATING)
def test_greedy_is_the_first_of_the_largest(dtype):
    logits = random_logits(50, 333, dtype, std=0.02 if dtype == torch.bfloat16 else 4.0)
    for greedy in ({"temperature": 0.0}, {"top_k": 1}, {"temperature": 1e-38}, {"temperature": 0.0, "top_p": 0.5}):
        assert torch.equal(sample(logits, make_state(50, 333, **greedy)).tokens, logits.argmax(1))
    assert sample(torch.tensor([[-1.0, -0.0, 0.0]]), make_state(1, 3, top_k=1)).tokens.tolist() == [1]


def test_a_temperature_that_takes_logits_beyond_float32_is_greedy():
    for sign in (1.0, -1.0):
        logits = sign * torch.tensor([[50.0, 20.0, 50.0, 40.0]])
        state = make_state(1, 4, temperature=1e-38)
        assert sample(logits, state).tokens.tolist() == [0 if sign > 0 else 1]


def test_tokens_are_marked_and_steps_counted():
    logits, state = random_logits(20, 77, torch.bfloat16), random_state(20, 77)
    before = copied(state)
    for drawn in range(1, 4):
        seen = state.seen.clone()
        tokens = sample(logits, state).tokens
        seen[torch.arange(20), tokens] |= reference.GENERATED
        assert torch.equal(state.seen, seen) and torch.equal(state.step, before.step + drawn)
    assert all(map(torch.equal, state[:7], before[:7]))


def test_logprobs_are_those_of_the_logits_as_they_came():
    for dtype in FLOATING:
        logits, state = random_logits(20, 77, dtype), random_state(20, 77)
        tokens, logprobs = sample(logits, state)
        assert logprobs.dtype == torch.float32 and tokens.dtype == torch.int64
        expected = logits.double().log_softmax(1).gather(1, tokens[:, None])[:, 0]
        assert torch.allclose(logprobs.double(), expected, atol=1e-6)


def test_a_row_depends_on_nothing_but_itself(device):
    vocab, dtype = {"cpu": (501, torch.float16), "cuda": (20_000, torch.bfloat16)}[device]
    logits, state = random_logits(64, vocab, dtype).to(device), random_state(64, vocab, device=device)
    tokens, logprobs = sample(logits, copied(state))
    order = torch.randperm(64, device=device)
    shuffled = sample(logits[order], SamplingState(*(value[order] for value in state)))
    assert torch.equal(shuffled.tokens, tokens[order]) and torch.equal(shuffled.logprobs, logprobs[order])
    for row in range(64):
        alone = sample(logits[row : row + 1], SamplingState(*(value[row : row + 1].clone() for value in state)))
        assert alone.tokens == tokens[row] and (device == "cpu" or alone.logprobs == logprobs[row])


def test_noise_differs_by_seed_step_and_token():
    noise = reference.gumbel_noise(torch.tensor([5, 5, 6, 5 + 2**32, 5]), torch.tensor([1, 2, 1, 1, 1 + 2**32]), 1001)
    assert len(noise.flatten().unique()) > 0.999 * noise.numel()
    assert torch.equal(
        noise[:, :13], reference.gumbel_noise(*torch.tensor([[5, 5, 6, 5 + 2**32, 5], [1, 2, 1, 1, 1 + 2**32]]), 13)
    )
    assert abs(noise.mean() - 0.5772) < 0.05 and abs(noise.var() - 1.6449) < 0.15


def test_tokens_at_minus_infinity_are_not_chosen():
    logits = torch.full((40, 30), -torch.inf)
    logits[:, [3, 17]] = 1.0
    for parameters in ({}, {"top_k": 10}, {"top_p": 0.99}, {"top_k": 25, "top_p": 0.9, "min_p": 0.1}):
        assert set(sample(logits, make_state(40, 30, **parameters)).tokens.tolist()) == {3, 17}
    logits[:, 3] = -torch.inf
    tokens, logprobs = sample(logits, make_state(40, 30, top_k=5, top_p=0.5))
    assert (tokens == 17).all() and (logprobs == 0).all()


# ---- rows that mean nothing ----


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_rows_without_a_distribution(temperature):
    logits = random_logits(9, 40, torch.bfloat16)
    expected = sample(logits, make_state(9, 40, temperature=temperature))
    wrong = [1, 3, 4, 8]
    logits[1, 7], logits[3, 39], logits[8, 0] = NAN, torch.inf, -NAN
    logits[4] = -torch.inf
    state = make_state(9, 40, temperature=temperature)
    tokens, logprobs = sample(logits, state)
    right = [0, 2, 5, 6, 7]
    assert (tokens[wrong] == -1).all() and logprobs[wrong].isnan().all()
    assert torch.equal(tokens[right], expected.tokens[right]) and torch.equal(logprobs[right], expected.logprobs[right])
    assert not state.seen[wrong].any() and not state.step[wrong].any() and (state.step[right] == 1).all()


@pytest.mark.parametrize(
    "name,values",
    [
        ("temperature", (-0.5, NAN, torch.inf)),
        ("top_k", (-1,)),
        ("top_p", (-0.1, 1.1, NAN)),
        ("min_p", (-0.1, 1.1, NAN)),
        ("repetition_penalty", (0.0, -1.0, NAN, torch.inf)),
        ("presence_penalty", (NAN, torch.inf, -torch.inf)),
    ],
)
def test_rows_with_parameters_out_of_range(name, values):
    rows = len(values) + 1
    logits = random_logits(rows, 40, torch.float32)
    usual = make_state(rows, 40, temperature=0.9)
    state = usual._replace(**{name: torch.tensor([*values, getattr(usual, name)[0]], dtype=getattr(usual, name).dtype)})
    tokens, logprobs = sample(logits, state)
    assert (tokens[:-1] == -1).all() and logprobs[:-1].isnan().all() and not state.step[:-1].any()
    assert tokens[-1] >= 0 and state.step[-1] == 1


def test_penalties_beyond_float32():
    logits, seen = torch.tensor([[3e38, 1.0]]), torch.tensor([[2, 0]], dtype=torch.uint8)
    for penalty in ({"repetition_penalty": 1e-3}, {"presence_penalty": -3e38}):
        assert sample(logits, make_state(1, 2, seen=seen.clone(), **penalty)).tokens.tolist() == [-1]
    assert sample(logits, make_state(1, 2, seen=seen.clone(), repetition_penalty=2.0)).tokens.tolist() == [0]


# ---- exact functions ----


def test_philox_known_answers():
    """From the kat_vectors of Random123, the authors' library."""
    for counter, key, expected in (
        ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ):
        words = reference.philox(tuple(map(torch.tensor, counter)), tuple(map(torch.tensor, key)))
        assert tuple(map(int, words)) == expected


def test_exp_and_log():
    x = -85 * torch.rand(100_000)
    assert (reference.exp(x) / x.double().exp() - 1).abs().max() < 1e-7
    assert reference.exp(torch.zeros(1)) == 1
    ends = reference.exp(torch.tensor([reference.MIN_EXPONENT, -200.0, -torch.inf]))
    assert (ends == ends[0]).all() and ends[0] * 2**reference.MASS_BITS < 1
    x = (170 * torch.rand(100_000) - 85).exp()
    expected = x.double().log()
    assert ((reference.log(x) - expected).abs() <= 1e-7 * expected.abs()).all()


def test_noise_is_exact_at_the_ends(monkeypatch):
    """Its largest values, which rare tokens need, are as fine as its smallest."""
    words = (0, 1, 2, 1 << 29, (1 << 30) - 1, 1 << 30, 1 << 31, (1 << 32) - 2, (1 << 32) - 1)
    parts = tuple(torch.tensor([words[i::4] + (0,) * (3 - len(words[i::4]))]) for i in range(4))
    monkeypatch.setattr(reference, "philox", lambda counter, key: parts)
    noise = reference.gumbel_noise(torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), len(words))
    rest = (torch.tensor(words).double() + 0.5) / 2.0**32
    assert torch.allclose(noise[0].double(), -(-torch.log1p(-rest)).log(), rtol=2e-7, atol=2e-7)


# ---- errors ----


def test_errors():
    logits, state = random_logits(4, 10, torch.float32), make_state(4, 10)
    refused(TypeError, "^logits: expected a torch.Tensor, got int 1", sample, 1, state)
    refused(TypeError, "^state: expected a SamplingState, got tuple", sample, logits, tuple(state))
    for wrong in (logits[0], logits[:, :0], logits[None]):
        refused(ValueError, r"^logits: expected shape \(B, V\) with V from 1 to 2\*\*31 - 1, got", sample, wrong, state)
    for name in SamplingState._fields:
        value = getattr(state, name)
        with pytest.raises(TypeError, match=f"^state.{name}: expected a torch.Tensor, got NoneType"):
            sample(logits, state._replace(**{name: None}))
        with pytest.raises(ValueError, match=f"^state.{name}: expected shape .*, got"):
            sample(logits, state._replace(**{name: value[:3]}))
        with pytest.raises(ValueError, match=f"^state.{name}: expected on cpu like logits, got meta"):
            sample(logits, state._replace(**{name: value.to("meta")}))
        strided = torch.stack((value, value), -1)[..., 0]
        with pytest.raises(ValueError, match=f"^state.{name}: expected a contiguous tensor, got strides"):
            sample(logits, state._replace(**{name: strided}))
    assert not state.step.any() and not state.seen.any()


def test_nothing_is_recorded_for_autograd():
    logits = random_logits(4, 10, torch.float32).requires_grad_()
    assert not sample(logits, make_state(4, 10)).logprobs.requires_grad
    with pytest.raises(RuntimeError, match="no derivative under torch.func"):
        torch.func.grad(lambda x: sample(x, make_state(4, 10)).logprobs.sum())(logits.detach())


# ---- kernels ----


@pytest.mark.parametrize("vector", [False, True])
@pytest.mark.parametrize("dtype", FLOATING)
def test_every_variant_compiles_without_spills(dtype, vector):
    report = without_spills(reference.kernel_spec(dtype, vector))
    # Two thread blocks on an SM, or one for rows that do not begin at multiples of 16 bytes.
    assert report.registers <= (64 if vector else 128) and report.static_smem <= 48 << 10
