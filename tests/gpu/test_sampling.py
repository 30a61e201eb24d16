"""The sampling kernel chooses the tokens of the reference, bit by bit, and writes what it writes."""

import pytest
import torch

from fp8moe.kernels.decoder_ops.sampling import SamplingState, reference, sample
from fp8moe.runtime.checks import FLOATING
from tests.kernels.test_sampling import test_a_row_depends_on_nothing_but_itself  # noqa: F401
from tests.sampling_cases import copied, make_state, random_logits, random_state

pytestmark = pytest.mark.gpu

VOCAB = 151_936
# Fewer tokens than threads, one and several rounds of a cluster, whole vectors and not, more than a list holds.
SIZES = (
    *((1, 1), (3, 2), (5, 7), (4, 100), (7, 4099), (9, 32_000), (2, 32_768), (3, 50_257), (64, 5000)),
    *((1, VOCAB), (8, VOCAB), (3, 262_145), (70, 129_280)),
)
FULL = {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.1}
NAN = float("nan")


def assert_matches(logits: torch.Tensor, state: SamplingState) -> None:
    """Tokens and state are equal; logprobs but for the order of a sum."""
    ours, theirs = copied(state), copied(state)
    tokens, logprobs = sample(logits, ours)
    expected_tokens, expected_logprobs = reference(logits, theirs)
    assert torch.equal(tokens, expected_tokens)
    assert torch.allclose(logprobs, expected_logprobs, rtol=2e-6, atol=2e-6, equal_nan=True)
    assert all(map(torch.equal, (*ours[6:],), (*theirs[6:],)))


def assert_all_match(logits: torch.Tensor, **parameters) -> None:
    assert_matches(logits.cuda(), make_state(*logits.shape, device="cuda", **parameters))


@pytest.mark.parametrize("rows,vocab", SIZES)
@pytest.mark.parametrize("dtype", FLOATING)
def test_random_parameters(rows, vocab, dtype):
    for seed, std in enumerate((3.0, 0.5, 12.0)):
        logits = random_logits(rows, vocab, dtype, std=std, seed=seed).cuda()
        assert_matches(logits, random_state(rows, vocab, seed=seed, device="cuda"))


@pytest.mark.parametrize("dtype", FLOATING)
def test_each_parameter_alone(dtype):
    logits = random_logits(3, 40_000, dtype)
    assert_all_match(logits)
    for temperature in (0.0, 1e-38, 1e-6, 0.01, 0.3, 1.7, 100.0, 3e38):
        assert_all_match(logits, temperature=temperature)
    for top_k in (1, 2, 3, 20, 500, 4095, 4096, 4097, 39_999, 40_000, 2**31 - 1):
        assert_all_match(logits, top_k=top_k)
    for top_p in (0.0, 1e-9, 0.1, 0.5, 0.9, 0.99, 0.9999, 1 - 2**-24):
        assert_all_match(logits, top_p=top_p)
    for min_p in (1e-30, 1e-6, 0.01, 0.5, 1.0):
        assert_all_match(logits, min_p=min_p)
    for seed in (-1, -(2**63), 2**63 - 1, 2**32):
        assert_all_match(logits, seed=seed, step=abs(seed) // 3)


@pytest.mark.parametrize("vocab", [5, 4097, 100_000])
def test_equal_logits(vocab):
    """Ties at every threshold, and more candidates than a list holds."""
    levels = torch.randint(0, 3, (12, vocab), generator=torch.Generator().manual_seed(0))
    for logits in (torch.zeros(12, vocab), levels.float(), -levels.float(), torch.where(levels == 0, 0.0, -0.0)):
        for parameters in ({}, {"top_k": 3}, {"top_k": vocab // 2}, {"min_p": 0.5}, {"temperature": 0.0}):
            assert_all_match(logits, **parameters)
        for top_p in (1e-6, 0.1, 0.4, 0.77, 0.999):
            assert_all_match(logits, top_p=top_p)
            assert_all_match(logits, top_p=top_p, top_k=max(vocab // 3, 2), temperature=0.8)


def test_neighbouring_logits():
    """Thresholds between floats that differ in the last bit, also of denormal numbers, before and after a division."""
    steps = torch.arange(-3000, 3000, dtype=torch.int32)
    for middle in (1.0, -1.0, 17.3, -250.0, 1e-30, 1e-38, -1e-39, 3e38):
        bits = torch.tensor([middle]).view(torch.int32) + steps[torch.randperm(len(steps))]
        logits = bits.view(torch.float32).expand(4, -1)
        for temperature in (1.0, 0.7, 1.3, 3.0, 1e-3):
            for parameters in ({"top_k": 2}, {"top_k": 1000}, {"top_p": 0.3}, {"top_k": 5000, "top_p": 0.9}):
                assert_all_match(logits, temperature=temperature, **parameters)


def test_spread_logits():
    """Over all of float32, most of them without mass."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (6, 60_000), generator=generator).int()
    logits = bits.view(torch.float32).nan_to_num(1.0, 2.0, -torch.inf)
    for parameters in ({}, {"top_k": 50}, {"top_p": 0.9}, {"temperature": 0.0}, {"temperature": 1e30, "top_k": 30_000}):
        assert_all_match(logits, **parameters)
        assert_all_match(logits / 1e37, **parameters)


@pytest.mark.parametrize("vocab", [3000, 151_936])
def test_rows_without_a_distribution(vocab):
    logits = random_logits(16, vocab, torch.bfloat16)
    logits[1, vocab - 1], logits[3, 7], logits[8, 0], logits[9, 5] = NAN, torch.inf, -NAN, -torch.inf
    logits[4] = -torch.inf
    logits[5, : vocab - 1] = -torch.inf
    for parameters in ({}, {"temperature": 0.0}, FULL):
        assert_all_match(logits, **parameters)
    state = make_state(16, vocab, device="cuda", **FULL)
    tokens = sample(logits.cuda(), state).tokens
    assert (tokens == -1).nonzero().flatten().tolist() == [1, 3, 4, 8]


def test_parameters_out_of_range():
    wrong = {
        "temperature": (-0.5, NAN, torch.inf),
        "top_k": (-1, -(2**31)),
        "top_p": (-0.1, 1.1, NAN),
        "min_p": (-0.1, 1.1, NAN),
        "repetition_penalty": (0.0, -1.0, NAN, torch.inf),
        "presence_penalty": (NAN, torch.inf, -torch.inf),
    }
    logits = random_logits(2, 5000, torch.float32).cuda()
    for name, values in wrong.items():
        for value in values:
            state = make_state(2, 5000, device="cuda", temperature=0.9)
            getattr(state, name)[1] = value
            assert_matches(logits, state)
            assert sample(logits, state).tokens[1] == -1


def test_penalties_beyond_float32():
    seen = torch.full((3, 2000), 3, dtype=torch.uint8)
    logits = random_logits(3, 2000, torch.float32) * 1e37
    for penalty in (1e-3, 1e3, 1e38, 1e-45):
        assert_all_match(logits, seen=seen, repetition_penalty=penalty)
        assert_all_match(logits, seen=seen, presence_penalty=penalty, temperature=0.0)


def test_equals_the_reference_on_the_cpu():
    logits, state = random_logits(20, 10_000, torch.bfloat16), random_state(20, 10_000)
    on_gpu = SamplingState(*(value.cuda() for value in state))
    for _ in range(3):
        assert torch.equal(sample(logits.cuda(), on_gpu).tokens.cpu(), sample(logits, state).tokens)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(on_gpu, state, strict=True))


def test_many_launches_one_after_the_other():
    """Each starts before the one ahead has ended, and reads the marks and the step that it wrote."""
    logits, state = random_logits(8, 70_000, torch.bfloat16, std=1.0).cuda(), random_state(8, 70_000, device="cuda")
    expected_state = copied(state)
    results = [sample(logits, state).tokens for _ in range(40)]
    for tokens in results:
        assert torch.equal(tokens, reference(logits, expected_state)[0])
    assert all(map(torch.equal, state, expected_state))


def test_past_two_to_the_31_elements():
    rows, vocab = 15_000, VOCAB
    logits = torch.zeros(1, vocab, dtype=torch.bfloat16, device="cuda").expand(rows, -1)
    assert rows * vocab > 1 << 31
    seen = torch.zeros(rows, vocab, dtype=torch.uint8, device="cuda")
    state = make_state(rows, 1, device="cuda", top_k=5)._replace(seen=seen)
    tokens = sample(logits, state).tokens
    some = torch.tensor([0, 1, rows // 2, rows - 2, rows - 1], device="cuda")
    few = make_state(5, vocab, device="cuda", top_k=5, seed=some.tolist())
    assert torch.equal(tokens[some], reference(logits[some], few)[0])
    assert torch.equal(seen[some], few.seen) and (state.step == 1).all()
