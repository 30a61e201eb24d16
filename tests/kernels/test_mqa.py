"""The MQA logits on the reference backend: semantics, ranges, the paged cache, operators, errors."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8moe.kernels.indexer import reference
from fp8moe.kernels.indexer.mqa_cache import append_kv, new_kv_cache, read_kv
from fp8moe.kernels.indexer.mqa_logits import launch_paged, mqa_logits, paged_mqa_logits
from fp8moe.quant.formats import FP8Tensor
from fp8moe.quant.quantize import quantize_1x128
from tests import mqa_cases as cases
from tests.errors import refused
from tests.gemm_cases import int32
from tests.mqa_cases import INT32, POISON

pytestmark = pytest.mark.usefixtures("one_thread")

INF = float("inf")
SHAPES = [(heads, head_dim) for heads in cases.NUM_HEADS for head_dim in cases.HEAD_DIMS]


# Keys in a row.


def test_one_entry():
    q = torch.zeros(1, 32, 32)
    q[0, 0, :2], q[0, 1, 1], q[0, 2, 0] = torch.tensor([1.0, 2.0]), 3.0, -4.0
    k = torch.zeros(2, 32)
    k[0, :2], k[1, :2] = torch.tensor([5.0, -2.0]), torch.tensor([0.5, 1.0])
    weights = torch.zeros(1, 32)
    weights[0, :3] = torch.tensor([1.0, -2.0, 8.0])
    kv = FP8Tensor(k.to(torch.float8_e4m3fn), torch.tensor([10.0, 2.0]))
    out = mqa_logits(q.to(torch.float8_e4m3fn), kv, weights, int32([0]), int32([2]))
    # Key 0: the heads give 1, -6 and -20, of which the first is left. Key 1: 2.5, 3 and -2.
    assert out.tolist() == [[10.0, 2 * (2.5 - 6.0)]]


@pytest.mark.parametrize("kind", cases.RANGES)
@pytest.mark.parametrize(("heads", "head_dim"), SHAPES)
def test_ranges(heads, head_dim, kind):
    operands = cases.prefill(37, 90, heads=heads, head_dim=head_dim, kind=kind)
    exact = cases.exact_prefill(operands)
    out = mqa_logits(*operands)
    assert out.is_contiguous()
    cases.assert_matches(out, exact)
    cases.check_prefill(reference.mqa_logits, operands, 1, 50, 90, 130)
    out = mqa_logits(*operands, max_range=50)
    assert out.is_contiguous()
    cases.assert_matches(out, cases.from_starts(exact, operands.starts, 50))


bounds = st.one_of(st.integers(-5, 45), st.sampled_from([INT32.min, INT32.max]))


@given(keys=st.integers(1, 40), each=st.lists(st.tuples(bounds, bounds), min_size=1, max_size=9))
def test_any_ranges(keys, each):
    operands = cases.prefill(len(each), keys, heads=32, head_dim=32)
    starts, ends = zip(*each, strict=True)
    operands = operands._replace(starts=int32(starts), ends=int32(ends))
    exact = cases.exact_prefill(operands)
    cases.assert_matches(mqa_logits(*operands), exact)
    cases.assert_matches(mqa_logits(*operands, max_range=7), cases.from_starts(exact, operands.starts, 7))


def test_chunks_of_queries(monkeypatch):
    operands = cases.prefill(21, 50, kind="ragged")
    exact = cases.exact_prefill(operands)
    for chunk in (1, 64 * 50 * 4):
        monkeypatch.setattr(reference, "_CHUNK", chunk)
        cases.assert_matches(mqa_logits(*operands), exact)
        cases.assert_matches(mqa_logits(*operands, max_range=9), cases.from_starts(exact, operands.starts, 9))


@pytest.mark.parametrize(("tokens", "keys"), [(0, 5), (5, 0), (0, 0)])
def test_empty(tokens, keys, device):
    operands = cases.prefill(tokens, keys, heads=32, head_dim=64, kind="full", device=device)
    for fill_masked in (True, False):
        out = mqa_logits(*operands, fill_masked=fill_masked)
        assert out.shape == (tokens, keys) and out.dtype == torch.float32
    assert mqa_logits(*operands, max_range=0).shape == (tokens, 0)
    out = mqa_logits(*operands, max_range=7)
    assert out.shape == (tokens, 7) and (keys or out.isneginf().all())


def test_unmasked_result():
    operands = cases.prefill(9, 20, kind="ragged")
    out, seen = mqa_logits(*operands, fill_masked=False), mqa_logits(*operands) != -INF
    assert out.shape == (9, 20) and torch.equal(out[seen], mqa_logits(*operands)[seen])


def test_overlap_with_unquantized_scores(device):
    sizes = {"cpu": (8, 2048, 256), "cuda": (32, 16384, 2048)}[device]
    assert cases.overlap(*sizes, mqa_logits, device=device) >= 0.93


# The paged cache.

WRITE = {"cpu": reference.paged_mqa_logits, "cuda": launch_paged}
LENGTHS = {
    "cpu": [0, 1, 64, 63, 65, 130, 3, 200],
    "cuda": [0, 1, 63, 64, 65, 100, 127, 128, 129, 500, 1000, 2049, 3, 0, 257],
}
LONGEST = {"cpu": (1, 150, 256, 300), "cuda": (1, 100, 2049, 2112, 3001)}


def check_paged(operands, max_context_len):
    """The result of a call, and what is written with and without -inf."""
    exact = cases.exact_paged(operands, max_context_len)
    out = paged_mqa_logits(*operands, max_context_len=max_context_len)
    assert out.is_contiguous()
    cases.assert_matches(out, exact)
    for fill_masked, masked in ((True, -INF), (False, POISON)):
        out = cases.write_paged(WRITE[out.device.type], operands, max_context_len, fill_masked=fill_masked)
        cases.assert_matches(out, exact, masked=masked)


@pytest.mark.parametrize("next_n", [1, 2, 3, 4])
@pytest.mark.parametrize(("heads", "head_dim"), SHAPES)
def test_paged(heads, head_dim, next_n, device):
    operands = cases.paged(LENGTHS[device], next_n=next_n, heads=heads, head_dim=head_dim, device=device)
    for max_context_len in LONGEST[device]:
        check_paged(operands, max_context_len)


@pytest.mark.parametrize("next_n", [1, 2, 3, 4])
def test_lengths_of_each_query(next_n, device):
    draw = torch.Generator().manual_seed(next_n)
    for lens in (
        torch.randint(-3, 600, (20, next_n), generator=draw).tolist(),
        [row[:next_n] for row in ([0, 70, 3, 9], [128, 0, 129, 1], [-1, INT32.min, 64, 0], [1, 2, 3, 4])],
    ):
        check_paged(cases.paged(lens, next_n=next_n, device=device), 600)
    # The rule for one length a sequence, spelled out.
    one = cases.paged([70, 2, 0, 300], next_n=next_n, device=device)
    spelled = int32([[length - next_n + 1 + j for j in range(next_n)] for length in (70, 2, 0, 300)], device)
    out = paged_mqa_logits(*one, max_context_len=300)
    assert cases.same_bits(paged_mqa_logits(*one._replace(context_lens=spelled), max_context_len=300), out)


@pytest.mark.parametrize("next_n", [1, 4])
@pytest.mark.parametrize("max_context_len", [100, 128, 200])
def test_lengths_are_clamped(max_context_len, next_n, device):
    lens = [INT32.min, INT32.max, -1, 128, 129, 130, 131, 132, 101, INT32.min + 2, INT32.max - 2]
    for each in (lens, [[length] * next_n for length in lens]):
        operands = cases.paged(each, next_n=next_n, max_blocks=2, device=device)
        check_paged(operands, max_context_len)
        out = paged_mqa_logits(*operands, max_context_len=max_context_len)
        assert (out[next_n : 2 * next_n, : min(max_context_len, 128)] > -INF).all()  # of INT32.max


def test_blocks_are_clamped(device):
    for next_n in (1, 2):
        operands = cases.paged([300, 200, 64], next_n=next_n, device=device)
        num_blocks = operands.kv_cache.shape[0]
        operands.block_table[0] = int32([-1, num_blocks, INT32.min, INT32.max, 1], device)
        operands.block_table[1, 2] = -7
        assert int(operands.block_table.max()) > num_blocks
        check_paged(operands, 320)


@pytest.mark.parametrize("part", ["batch", "num_blocks", "max_blocks", "max_context_len"])
def test_empty_cache(part, device):
    lens, max_blocks = [] if part == "batch" else [70, 100], 0 if part == "max_blocks" else 2
    operands = cases.paged(lens, next_n=2, max_blocks=max_blocks, device=device)
    if part == "num_blocks":
        operands = operands._replace(kv_cache=operands.kv_cache[:0])
    max_context_len = 0 if part == "max_context_len" else 90
    torch.full((4 * 90,), POISON, device=device)  # what the result would hold, were it not written
    out = paged_mqa_logits(*operands, max_context_len=max_context_len)
    assert out.shape == (2 * len(operands.q), max_context_len) and (out == -INF).all()


@pytest.mark.parametrize("next_n", [1, 2, 4])
def test_a_nan_in_the_cache(next_n, device):
    lens = [{"cpu": 100, "cuda": 1000}[device], 90, 130]
    operands = cases.paged(lens, next_n=next_n, device=device)
    table, longest = operands.block_table, max(lens)
    without = paged_mqa_logits(*operands, max_context_len=longest)
    sequence = torch.arange(3 * next_n, device=device)[:, None] // next_n
    column = torch.arange(longest, device=device)
    unused = sorted(set(range(len(operands.kv_cache))) - set(table.flatten().tolist()))[0]
    # In use, behind what the first of two queries sees, behind the context, in a block of nobody.
    behind = ((0, lens[0] - 1), (0, lens[0] + 1), (1, 89), (1, 91), (2, 131), (2, 0), (None, 0))
    for (b, token), scale in itertools.product(((0, 70), *behind), (False, True)):
        block = unused if b is None else int(table[b, token // 64])
        kv_cache = cases.with_nan_key(operands.kv_cache, block, token % 64, scale=scale)
        out = paged_mqa_logits(*operands._replace(kv_cache=kv_cache), max_context_len=longest)
        where = (sequence == (-1 if b is None else b)) & (column == token) & (without > -INF)
        assert torch.equal(out.isnan(), where) and where.any() == (b is not None and token < lens[b])
        assert cases.same_bits(out[~where], without[~where])


def test_the_same_as_keys_in_a_row():
    operands = cases.paged([150, 64], next_n=2)
    out = paged_mqa_logits(*operands, max_context_len=150)
    for b, context in enumerate((150, 64)):
        token = torch.arange(context)
        slots = operands.block_table[b].long()[token // 64] * 64 + token % 64
        rows = slice(2 * b, 2 * b + 2)
        expected = mqa_logits(
            *(operands.q[b], read_kv(operands.kv_cache, slots.int()), operands.weights[rows]),
            *(int32([0, 0]), int32([context - 1, context])),
        )
        assert torch.allclose(out[rows, :context], expected, rtol=1e-5, atol=1e-4)


def test_append_then_score():
    k, cache = torch.randn(100, 128), new_kv_cache(5, 128, device="cpu")
    table = int32([[3, 1], [4, 0]])
    for first, last in ((0, 33), (33, 34), (34, 100)):  # of two sequences, whose keys differ by their sign
        token = torch.arange(first, last)
        for b, sign in ((0, 1), (1, -1)):
            append_kv(cache, sign * k[first:last], table[b][token // 64] * 64 + token.int() % 64)
    q, weights = cases.random_fp8(2, 1, 64, 128), cases.random_weights(2, 64)
    out = paged_mqa_logits(q, cache, weights, int32([100, 100]), table, max_context_len=100)
    for row, sign in ((0, 1), (1, -1)):
        data, scale = quantize_1x128(sign * k)
        exact = cases.scores(q[row], FP8Tensor(data, scale[:, 0]), weights[row : row + 1])
        cases.assert_matches(out[row : row + 1], exact)


# Errors.

PREFILL, PAGED = cases.prefill(6, 10, heads=32, head_dim=64), cases.paged([70, 3], next_n=2, heads=32, head_dim=64)


def fp8(*shape):
    return torch.zeros(shape, dtype=torch.float8_e4m3fn)


def uint8(*shape):
    return torch.zeros(shape, dtype=torch.uint8)


BAD_PREFILL = {
    "row type": (dict(max_range=9.0), TypeError, r"^max_range: expected an int, got float"),
    "row length": (dict(max_range=-1), ValueError, r"^max_range: expected 0 to 2\*\*31 - 1 tokens, got -1"),
    "heads": (dict(q=fp8(6, 16, 64)), ValueError, r"^q: expected .* H 32 or 64 .*, got \(6, 16, 64\)"),
    "head width": (dict(q=fp8(6, 32, 96)), ValueError, r"^q: expected .* D 32, 64 or 128, got \(6, 32, 96\)"),
    "kv width": (
        dict(kv=(fp8(10, 32), PREFILL.kv.scale)),
        ValueError,
        r"^kv\.data: expected shape \(T, 64\) to match q .*, got \(10, 32\)",
    ),
    "too many keys": (
        dict(kv=(fp8(1, 64).expand(1 << 31, 64), torch.zeros(1).expand(1 << 31))),
        ValueError,
        r"^kv\.data: expected .* T < 2\*\*31",
    ),
    "scale shape": (
        dict(kv=(PREFILL.kv.data, PREFILL.kv.scale[:, None])),
        ValueError,
        r"^kv\.scale: expected shape \(T,\) = \(10,\), got \(10, 1\)",
    ),
    "weights shape": (
        dict(weights=PREFILL.weights[:5]),
        ValueError,
        r"^weights: expected shape \(S, H\) = \(6, 32\), got \(5, 32\)",
    ),
    "ends shape": (dict(ends=PREFILL.ends[1:]), ValueError, r"^ends: expected shape \(S,\) = \(6,\), got \(5,\)"),
}
BAD_PAGED = {
    "q rank": (dict(q=PREFILL.q), ValueError, r"^q: expected shape \(B, next_n, H, D\) .*, got \(6, 32, 64\)"),
    "next_n": (dict(q=fp8(2, 5, 32, 64)), ValueError, r"^q: expected 1 to 4 queries a sequence, got next_n = 5"),
    "no next_n": (dict(q=fp8(2, 0, 32, 64)), ValueError, r"^q: expected 1 to 4 queries .* next_n = 0"),
    "cache shape": (
        dict(kv_cache=uint8(5, 32, 1, 68)),
        ValueError,
        r"^kv_cache: expected shape .* got \(5, 32, 1, 68\)",
    ),
    "cache width": (dict(kv_cache=uint8(5, 64, 1, 132)), ValueError, r"^kv_cache: .* 64 bytes to match q .*, 132\)"),
    "cache strides": (dict(kv_cache=uint8(10, 64, 1, 68)[::2]), ValueError, r"^kv_cache: expected .*contiguous"),
    "cache address": (
        dict(kv_cache=uint8(64 * 68 + 4)[4:].view(1, 64, 1, 68)),
        ValueError,
        r"^kv_cache: expected to start at a multiple of 16 bytes",
    ),
    "weights shape": (
        dict(weights=PAGED.weights.view(2, 2, 32)),
        ValueError,
        r"^weights: expected shape \(B \* next_n, H\) = \(4, 32\), got \(2, 2, 32\)",
    ),
    "lens shape": (dict(context_lens=int32([1])), ValueError, r"^context_lens: expected shape \(B,\) = \(2,\), got"),
    "lens of queries": (
        dict(context_lens=int32([[1], [2]])),
        ValueError,
        r"^context_lens: expected shape \(B, next_n\) = \(2, 2\), got \(2, 1\)",
    ),
    "table shape": (
        dict(block_table=PAGED.block_table[:1]),
        ValueError,
        r"^block_table: expected shape \(B, max_blocks\) = \(2, 2\), got \(1, 2\)",
    ),
    "length type": (dict(max_context_len=9.0), TypeError, r"^max_context_len: expected an int, got float"),
    "length bool": (dict(max_context_len=True), TypeError, r"^max_context_len: expected an int, got bool"),
    "length": (dict(max_context_len=-1), ValueError, r"^max_context_len: expected 0 to 2\*\*31 - 1 tokens, got -1"),
    "long": (dict(max_context_len=1 << 31), ValueError, r"^max_context_len: expected 0 to .* got 2147483648"),
}


@pytest.mark.parametrize("case", BAD_PREFILL)
def test_errors(case):
    changed, error, message = BAD_PREFILL[case]
    refused(error, message, mqa_logits, **PREFILL._asdict() | changed)


@pytest.mark.parametrize("case", BAD_PAGED)
def test_paged_errors(case):
    changed, error, message = BAD_PAGED[case]
    refused(error, message, paged_mqa_logits, **PAGED._asdict() | dict(max_context_len=100) | changed)


def test_backward_raises():
    for name, run, operands in (
        ("mqa_logits", mqa_logits, PREFILL),
        ("paged_mqa_logits", lambda *call: paged_mqa_logits(*call, max_context_len=80), PAGED),
    ):
        out = run(*operands._replace(weights=operands.weights.clone().requires_grad_()))
        assert torch.equal(out, run(*operands))
        with pytest.raises(RuntimeError, match=f"fp8moe.{name} has no backward"):
            out.clamp(min=0).sum().backward()


def test_autocast_changes_nothing():
    operands = cases.prefill(30, 40, heads=32, head_dim=64)
    q, kv, *rest = operands
    expected = mqa_logits(q, kv, *rest)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(mqa_logits(q, kv, *rest), expected)
