"""Attention of prompts on the kernels: float64; the same bits in prompts of any length, batch and tile, and decoded."""

import pytest
import torch

import fp8moe
from fp8moe.kernels.decoder_ops import prompt_attention as module
from fp8moe.kernels.decoder_ops.decode_attention import DTYPES
from fp8moe.kernels.decoder_ops.prompt_attention import FEW, PromptTile
from fp8moe.kernels.decoder_ops.rotary import NewTokens, rotary
from fp8moe.quant.quantize import quantize_1x128
from tests import decode_attention_cases
from tests import prompt_attention_cases as cases
from tests.contracts import memory_of_nan
from tests.gpu.checks import captured, same_every_time

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
QWEN = (8, 4, 128)
POSITIONS = (0, 1, 7, 14, 15, 16, 17, 31, 32, 47, 48, 62, 63, 64, 65, 80, 127, 128, 191, 200, 255, 256, 300, 319, 320)
POSITIONS += (447, 511, 512, 513, 543, 600, 1000, 1023, 1024, 1500, 2047, 2048, 2049, 3000, 3333, 4000, 4094, 4095)
ENDS = (1, 2, 9, 64, 65, 300, 513, 1024, 2500, 4096)


def made(lengths, heads=QWEN, dtype=torch.bfloat16, **how):
    return cases.moved(cases.make(lengths, heads, dtype, **how), DEVICE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", cases.HEADS, ids=str)
@pytest.mark.parametrize("window", [None, 1, 100])
def test_against_float64(heads, window, dtype):
    operands = cases.make([1, 70, 17, 300], heads, dtype)
    expected, sums = cases.expected(*operands, window)
    given = cases.moved(operands, DEVICE)
    with memory_of_nan():
        out, logsumexp = same_every_time(lambda: cases.attend(*given, window=window))
    assert (out.double().cpu() - expected).norm() <= 1.5 * torch.finfo(dtype).eps * expected.norm()
    assert (logsumexp.cpu() - sums).abs().max() <= 1e-4


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", cases.HEADS, ids=str)
@pytest.mark.parametrize("window", [None, 1, 70, 1000])
def test_the_bits_of_a_token_in_a_prompt_and_decoded(heads, window, dtype):
    q, keys, values, sequences = made([4096], heads, dtype, spread=2)
    out, logsumexp = cases.attend(q, keys, values, sequences, window=window)
    assert out.isfinite().all()
    for rows in (slice(None), slice(None, None, 3), slice(1, None, 9)):  # of batches, which have clusters of their own
        cases.assert_decoded_alike(q, keys, values, out, POSITIONS[rows], window)
    cases.assert_chunks_alike(q, keys, values, out, logsumexp, ENDS, 37, window)


@pytest.mark.parametrize("tile", [FEW, PromptTile(1, 1, 1), PromptTile(2, 2, 1), PromptTile(8, 1, 1)], ids=str)
@pytest.mark.parametrize("heads", [QWEN, (3, 1, 80), (1, 2, 16)], ids=str)
def test_every_tile_has_the_same_bits(heads, tile, monkeypatch):
    operands = made([700, 1, 33], heads)
    for window in (None, 50):
        expected = cases.attend(*operands, window=window, most_queries=700)
        with monkeypatch.context() as patch:
            patch.setattr(module, "tile_of", lambda *_: tile)
            found = cases.attend(*operands, window=window, most_queries=701 + tile.warps)  # a plan of its own
        assert all(map(cases.same, found, expected))


def test_batches_of_any_size():
    """Up to 64 sequences of up to 600 tokens, packed and each alone; every last token decoded with all others."""
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(1, 600, (64,), generator=generator).tolist()
    q, keys, values, sequences = made(lengths)
    out, logsumexp = cases.attend(q, keys, values, sequences, most_queries=600)
    ends = sequences[0].tolist()
    last = torch.tensor(lengths, device=DEVICE) - 1
    begin = torch.arange(64, device=DEVICE) % 7 * 5
    cache = [torch.full((64, 4, 640, 128), torch.nan, dtype=q.dtype, device=DEVICE) for _ in range(2)]
    for b, length in enumerate(lengths):
        part, first = slice(ends[b], ends[b + 1]), int(begin[b])
        one, sums = cases.attend(q[part], keys[part], values[part], cases.sequences_of([length]).to(DEVICE))
        assert cases.same(one, out[part]) and cases.same(sums, logsumexp[:, part]), length
        for cached, x in zip(cache, (keys, values), strict=True):
            cached[b, :, first : first + length] = x[part].transpose(0, 1)
    rows = sequences[0, 1:].long() - 1
    for count in (1, 2, 5, 8, 17, 64):
        with fp8moe.batch_invariant():
            operands = q[rows[:count]], cache[0][:count], cache[1][:count], begin[:count], (begin + last)[:count]
            found = same_every_time(lambda operands=operands: decode_attention_cases.attend(*operands))
        assert cases.same(found.view(count, 32, 128), out[rows[:count]]), count


def test_a_static_cache_of_padded_rows():
    """As GraphDecoder has it: the first queries of a row are padding, its keys a view of the cache by strides."""
    lengths, new, length = [300, 17, 1, 256], 300, 333
    q, keys, values, sequences = made(lengths)
    out, _ = cases.attend(q, keys, values, sequences)
    cache = torch.full((2, 4, 4, length, 128), torch.nan, dtype=q.dtype, device=DEVICE)
    rows = torch.full((4, new, 32, 128), torch.nan, dtype=q.dtype, device=DEVICE)
    for b, (first, end) in enumerate(zip(sequences[0].tolist(), sequences[0, 1:].tolist(), strict=False)):
        rows[b, new - lengths[b] :] = q[first:end]
        for which, x in enumerate((keys, values)):
            cache[which, b, :, new - lengths[b] : new] = x[first:end].transpose(0, 1)
    shape, strides = (4 * 4 * length - 3 * length, 4, 128), (128, length * 128, 1)
    place = torch.arange(5)
    begin = torch.tensor([*(new - count for count in lengths), 0])
    description = torch.stack([place * new, place * 4 * length + begin, torch.tensor([*lengths, 0])]).int().to(DEVICE)
    views = [x.as_strided(shape, strides) for x in cache]
    found, sums = cases.attend(rows.view(-1, 32, 128), *views, description, most_queries=new)
    for b, (first, end) in enumerate(zip(sequences[0].tolist(), sequences[0, 1:].tolist(), strict=False)):
        of_row = found.view(4, new, 32, 128)[b]
        assert cases.same(of_row[new - lengths[b] :], out[first:end])
        assert (of_row[: new - lengths[b]] == 0).all()
    assert sums.view(32, 4, new)[:, 2, :-1].isposinf().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 30])
@pytest.mark.parametrize("heads", [QWEN, (1, 4, 64), (3, 1, 40)], ids=str)
def test_what_is_not_seen_changes_no_bit(heads, window, dtype):
    """Neither what is not finite nor what is large, in keys and values, behind a query or before its window."""
    q, keys, values, sequences = made([330], heads, dtype)
    out, logsumexp = cases.attend(q, keys, values, sequences, window=window)
    for bad in (torch.nan, torch.inf, torch.finfo(dtype).max, -torch.finfo(dtype).max / 2):
        for place in (0, 15, 16, 63, 64, 130, 200, 320, 329):
            for x in (keys, values):
                changed = x.clone()
                changed[place] = bad
                given = [changed if x is y else y for y in (keys, values)]
                found, sums = cases.attend(q, *given, sequences, window=window)
                clear = torch.ones(330, dtype=torch.bool, device=DEVICE)
                clear[place : None if window is None else place + window] = False
                assert cases.same(found[clear], out[clear]), (bad, place)
                assert cases.same(sums[:, clear], logsumexp[:, clear]), (bad, place)
                if not torch.tensor(bad).isfinite() and x is values:
                    assert not found[~clear].isfinite().any()


def test_what_is_not_finite_is_seen_alike():
    """Infinite values and queries give the same infinities and NaN in a prompt and decoded."""
    q, keys, values, sequences = made([200])
    values[3, 1, 5], values[100, 2, 7], values[150, 3] = torch.inf, -torch.inf, torch.nan
    keys[60, 0, 9], q[120, 31, 2] = torch.inf, torch.nan
    out, _ = cases.attend(q, keys, values, sequences)
    positions = [*range(0, 200, 11), 99, 100, 120, 150, 199]
    found = cases.decoded(q, keys, values, positions)
    assert torch.equal(found.isnan(), out[positions].isnan())
    assert cases.same(found.nan_to_num(7), out[positions].nan_to_num(7)) and out.isinf().any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("batch", "heads", "length", "window"), decode_attention_cases.SHAPES, ids=str)
def test_invariant_steps_against_float64(batch, heads, length, window, dtype):
    """With sinks, new tokens and quantized results; the queries as they are have the bits of those that it rotates."""
    operands, new = decode_attention_cases.make(batch, heads, length, dtype, window=window)
    sinks = decode_attention_cases.make_sinks(heads, torch.float32)
    expected, *_ = decode_attention_cases.expected(*operands, new, window, sinks)
    given = [decode_attention_cases.moved(value, DEVICE) for value in operands]
    new = decode_attention_cases.moved(new, DEVICE)
    how = {"window": window, "sinks": sinks.to(DEVICE)}
    torch.full((batch * expected.shape[1],), torch.nan, device=DEVICE, dtype=dtype)  # what torch.empty will return
    with fp8moe.batch_invariant():
        results = [decode_attention_cases.attend(*given, new=new, **how, early=i % 2 == 1) for i in range(20)]
        assert (results[0].double().cpu() - expected).norm() <= torch.finfo(dtype).eps * expected.norm()
        assert all(cases.same(result, results[0]) for result in results)
        quantized = decode_attention_cases.attend(*given, new=new, **how, quantized=True)
        codes = quantize_1x128(results[0])
        assert cases.same(quantized.data.view(torch.uint8), codes.data.view(torch.uint8))
        assert torch.equal(quantized.scale, codes.scale)
        tokens = NewTokens(*(x[:, None] for x in new[:4]), *new[4:])
        turned = rotary(given[0][:, None], tokens, *given[1:3], columns=given[4])[:, 0]
        assert cases.same(decode_attention_cases.attend(turned, *given[1:], **how), results[0])


def test_no_keys_give_zero_and_places_outside_are_not_written():
    operands, new = decode_attention_cases.make(3, (8, 2, 128, 128, True), 100)
    given = [decode_attention_cases.moved(value, DEVICE) for value in operands]
    given[4].copy_(torch.tensor([3, 100, -1]))
    given[3].copy_(torch.tensor([4, 100, 0]))
    before = [cache.clone() for cache in given[1:3]]
    with fp8moe.batch_invariant():
        assert (decode_attention_cases.attend(*given, new=decode_attention_cases.moved(new, DEVICE)) == 0).all()
    for cache, old in zip(given[1:3], before, strict=True):
        assert torch.equal(cache.nan_to_num(7), old.nan_to_num(7))


def test_in_a_graph_with_sequences_that_change():
    q, keys, values, sequences = made([100, 200])
    graph, results = captured(lambda: cases.attend(q, keys, values, sequences, most_queries=300))
    for lengths in ([1, 299], [150, 150], [300, 0]):
        sequences.copy_(cases.sequences_of(lengths))
        q.normal_()
        graph.replay()
        expected = cases.attend(q.clone(), keys, values, sequences, most_queries=300)
        assert all(map(cases.same, results, expected))


@pytest.mark.parametrize("window", [None, 64])
@pytest.mark.parametrize("heads", [QWEN, (1, 4, 64), (4, 1, 256), (3, 2, 80)], ids=str)
def test_gradients(heads, window):
    """Those of the reference, with the same bits in every run."""
    operands = cases.make([130, 1, 400, 64], heads)
    grad = torch.randn(operands[0].shape, generator=torch.Generator().manual_seed(1)).bfloat16()

    def gradients(device):
        leaves = [x.detach().to(device).requires_grad_() for x in operands[:3]]
        out, _ = cases.attend(*leaves, operands[3].to(device), window=window, most_queries=400)
        out.backward(grad.to(device))
        return [leaf.grad for leaf in leaves]

    found = same_every_time(lambda: gradients(DEVICE))
    assert not torch.are_deterministic_algorithms_enabled()
    for ours, expected in zip(found, gradients("cpu"), strict=True):
        assert (ours.cpu().float() - expected.float()).norm() <= 1e-2 * expected.float().norm()
