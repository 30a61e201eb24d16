"""Attention of prompts, summed in the order of decode steps: float64, equal bits, gradients, errors, variants."""

import pytest
import torch

import fp8moe
from fp8moe.kernels.decoder_ops import prompt_attention as module
from fp8moe.kernels.decoder_ops.decode_attention import FixedSplitHeads
from fp8moe.kernels.decoder_ops.decode_attention import kernel_spec as decode_spec
from fp8moe.kernels.decoder_ops.prompt_attention import FEW, kernel_spec, prompt_attention, tile_of
from tests import decode_attention_cases
from tests import prompt_attention_cases as cases
from tests.ptxas import without_spills

DTYPES = (torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [(1, 2, 16), (3, 1, 80), (7, 1, 40)], ids=str)
@pytest.mark.parametrize("window", [None, 50])
def test_against_float64(heads, window, dtype):
    operands = cases.make([1, 70, 17, 130], heads, dtype)
    out, logsumexp = cases.attend(*operands, window=window)
    expected, sums = cases.expected(*operands, window)
    assert (out.double() - expected).norm() <= 1.5 * torch.finfo(dtype).eps * expected.norm()
    assert (logsumexp - sums).abs().max() <= 1e-5


@pytest.mark.parametrize("heads", [(1, 2, 16), (3, 1, 48)], ids=str)
@pytest.mark.parametrize("window", [None, 70])
def test_the_bits_of_a_token_in_a_prompt_and_decoded(heads, window):
    q, keys, values, sequences = cases.make([200], heads, spread=2)
    out, logsumexp = cases.attend(q, keys, values, sequences, window=window)
    cases.assert_decoded_alike(q, keys, values, out, (0, 1, 15, 16, 63, 64, 100, 127, 128, 199), window)
    cases.assert_chunks_alike(q, keys, values, out, logsumexp, (1, 17, 64, 130, 200), 9, window)


def test_what_is_not_seen_changes_no_bit():
    q, keys, values, sequences = cases.make([100], (2, 2, 16))
    out, logsumexp = cases.attend(q, keys, values, sequences)
    for bad in (torch.nan, torch.inf, -torch.inf):
        for x in (keys, values):
            changed = x.clone()
            changed[70, 1, 3] = bad
            given = [changed if x is y else y for y in (keys, values)]
            found, sums = cases.attend(q, *given, sequences)
            assert cases.same(found[:70], out[:70]) and cases.same(sums[:, :70], logsumexp[:, :70])
            assert cases.same(found[70:, :2], out[70:, :2]), "the other key head"
            assert x is keys or not found[70:, 2:, 3].isfinite().any()


def test_batch_invariant_steps_against_float64():
    for batch, heads, length, window in decode_attention_cases.SHAPES[:6]:
        window = window and min(window, 60)
        operands, new = decode_attention_cases.make(min(batch, 5), heads, min(length, 90), window=window)
        for sinks in (None, torch.float32):
            sinks = decode_attention_cases.make_sinks(heads, sinks)
            expected, *_ = decode_attention_cases.expected(*operands, new, window, sinks)
            with fp8moe.batch_invariant():
                out = decode_attention_cases.attend(*operands, new=new, window=window, sinks=sinks)
            assert (out.double() - expected).norm() <= 4e-3 * expected.norm()


@pytest.mark.parametrize("window", [None, 30])
def test_gradients(window):
    lengths, heads = [40, 1, 75], (2, 2, 16)
    q, keys, values, sequences = cases.make(lengths, heads, seed=3)
    given = [x.detach().requires_grad_() for x in (q, keys, values)]
    exact = [x.detach().double().requires_grad_() for x in (q, keys, values)]
    out, logsumexp = cases.attend(*given, sequences, window=window)
    assert out.requires_grad and not logsumexp.requires_grad
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(4)).bfloat16()
    out.backward(grad)
    place, owner = torch.arange(len(q)), torch.arange(3).repeat_interleave(torch.tensor(lengths))
    seen = (place[:, None] >= place) & (owner[:, None] == owner)
    if window is not None:
        seen &= place > place[:, None] - window
    repeated = [x.repeat_interleave(2, 1) for x in exact[1:]]
    scores = torch.einsum("qhd,khd->hqk", exact[0], repeated[0]) * 16**-0.5
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    torch.einsum("hqk,khd->qhd", weights, repeated[1]).backward(grad.double())
    for ours, theirs in zip(given, exact, strict=True):
        assert (ours.grad - theirs.grad).norm() <= 5e-3 * theirs.grad.norm()


def test_no_double_backward():
    q, keys, values, sequences = cases.make([5], (1, 1, 16))
    q.requires_grad_()
    (grad,) = torch.autograd.grad(cases.attend(q, keys, values, sequences)[0].float().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="no double backward"):
        grad.sum().backward()


def test_errors():
    q, keys, values, sequences = cases.make([5], (2, 2, 16))
    given = {"q": q, "keys": keys, "values": values, "sequences": sequences, "most_queries": 5}

    def message(error, pattern, **changes):
        with pytest.raises(error, match=pattern):
            prompt_attention(**given | changes)

    for name in ("q", "keys", "values", "sequences"):
        message(TypeError, f"^{name}: expected a torch.Tensor, got int 1", **{name: 1})
    message(TypeError, "^q: expected bfloat16 or float16, got torch.float32", q=q.float())
    message(ValueError, r"^q: expected shape \(T, heads, D\), D a multiple of 8 up to 256", q=q[..., :12])
    message(ValueError, r"^keys: expected shape \(rows, key heads, 16\) for 3 query heads", q=q[:, :3])
    message(TypeError, "^keys: expected bfloat16, got torch.float16", keys=keys.half())
    message(ValueError, r"^values: expected shape \(5, 2, 16\), got \(4, 2, 16\)", values=values[:4])
    message(TypeError, "^sequences: expected int32, got torch.int64", sequences=sequences.long())
    message(ValueError, r"^sequences: expected shape \(3, B \+ 1\)", sequences=sequences[:2])
    message(ValueError, "^window: expected at least 1, got 0", window=0)
    message(TypeError, "^most_queries: expected an int, got float 1.5", most_queries=1.5)
    message(ValueError, "^most_keys: expected at least 0, got -1", most_keys=-1)


def test_tiles_fill_the_gpu():
    rows = [tile_of(128, tokens * 8, 4 * batch, 132).rows for batch, tokens in ((1, 1), (1, 128), (1, 512), (16, 1024))]
    assert rows == [64, 64, 128, 128]
    assert tile_of(256, 10_000, 64, 132).rows == 128


def test_prompts_compile_without_spills():
    variants = [*((torch.bfloat16, heads) for heads in cases.HEADS), (torch.float16, (8, 4, 128))]
    for dtype, (group, key_heads, size) in variants:
        for tile in (tile_of(size, 10_000, 64 * key_heads, 132), FEW):
            report = without_spills(kernel_spec(dtype, size, group, tile))
            assert report.registers * tile.warps * 32 * tile.blocks <= 65536


def test_steps_compile_without_spills():
    shapes = {heads for _, heads, *_ in decode_attention_cases.SHAPES} | {(16, 1, 256, 256, True)}
    for heads in sorted(shapes, key=str):
        for cluster in (1, 8):
            without_spills(decode_spec(torch.bfloat16, FixedSplitHeads(*heads), cluster))
    group, key_heads, size, *_ = heads
    without_spills(decode_spec(torch.float16, FixedSplitHeads(group, key_heads, size, None, False), 2))


def test_shared_memory_lets_two_blocks_share_an_sm():
    heads = FixedSplitHeads(8, 4, 128, 128, True)
    assert [heads.stages(cluster) for cluster in (1, 2, 8)] == [5, 8, 8]
    assert 2 * (heads.smem(5, 1) + 1024) <= 228 * 1024
    assert 2 * (module.PromptTile(4, 2, 2).smem(128) + 1024) <= 228 * 1024
