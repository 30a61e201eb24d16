"""Latent attention on a GPU: against float64, outside of what a sequence has, in graphs, twice the same bits."""

import pytest
import torch

from fp8moe.kernels.latent import latent_attention, quantize_latents
from fp8moe.kernels.latent.fp8_latents import dequantize_latents
from tests import latent_cases
from tests.errors import refused
from tests.gpu.checks import captured

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
SIZES = {"value_size": 512, "scale": 576**-0.5}
LENGTHS = {
    "one token": [1],
    "a tile and one more": [64, 65, 63, 1, 0],
    "long and short": [8192, 3, 700, 0, 129],
    "one long": [70000],
    "many": [*range(0, 640, 7)],
    "one for each thread block": [640] * 131,
    "two for each thread block": [300] * 66,
}


def error(found, expected):
    return ((found.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("paged", [False, True], ids=["in a row", "paged"])
@pytest.mark.parametrize(("queries", "heads"), [(1, 16), (1, 20), (1, 128), (2, 16), (3, 40), (16, 8), (5, 1)])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_against_float64(lengths, queries, heads, paged):
    operands = latent_cases.operands(lengths, queries=queries, heads=heads, paged=paged, device=DEVICE)
    q, latents, count, table = operands
    results = [latent_attention(q, latents, count, block_table=table, **SIZES) for _ in range(20)]
    expected = latent_cases.expected(*operands, **SIZES)
    assert results[0].isfinite().all() and results[0].dtype == torch.bfloat16
    assert error(results[0], expected) < 1e-2 if expected.any() else not results[0].any()
    unseen = ~expected.flatten(2).any(-1)
    assert not results[0][unseen].any()
    assert all(torch.equal(results[0], again) for again in results[1:])


@pytest.mark.parametrize("chosen", [None, 100, 2048])
@pytest.mark.parametrize("paged", [False, True], ids=["in a row", "paged"])
@pytest.mark.parametrize(("queries", "heads"), [(1, 16), (1, 20), (1, 128), (2, 16), (3, 40)])
def test_latents_in_fp8(queries, heads, paged, chosen):
    lengths = [8192, 3, 700, 0, 129]
    q, latents, count, table = latent_cases.operands(lengths, queries=queries, heads=heads, paged=paged, device=DEVICE)
    coded = quantize_latents(latents, value_size=512)
    how = dict(SIZES)
    if chosen:
        draw = torch.Generator().manual_seed(chosen)
        every = torch.stack([torch.randperm(8192, generator=draw)[:chosen] for _ in range(5 * queries)])
        how["indices"] = every.view(5, queries, -1).int().to(DEVICE)
    results = [latent_attention(q, coded, count, block_table=table, **how) for _ in range(20)]
    expected = latent_cases.expected(q, dequantize_latents(coded, value_size=512), count, table, **how)
    assert results[0].isfinite().all() and error(results[0], expected) < 1e-2
    assert all(torch.equal(results[0], again) for again in results[1:])


@pytest.mark.parametrize(("queries", "heads"), [(1, 16), (3, 40)])
def test_latents_before_the_first_are_not_seen(queries, heads):
    lengths = [8192, 130, 64, 5, 700]
    q, latents, count, _ = latent_cases.operands(lengths, queries=queries, heads=heads, device=DEVICE)
    begin = torch.tensor([4099, 65, 64, -3, 1], dtype=torch.int32, device=DEVICE)
    for sequence, first in enumerate(begin.tolist()):
        latents[sequence, : max(first, 0)] = torch.nan
    results = [latent_attention(q, latents, count, begin=begin, **SIZES) for _ in range(20)]
    assert error(results[0], latent_cases.expected(q, latents, count, None, begin=begin, **SIZES)) < 1e-2
    assert all(torch.equal(results[0], again) for again in results[1:])


@pytest.mark.parametrize("heads", [16, 128])
def test_lengths_that_change_between_replays(heads):
    lengths = [300, 1, 4000]
    q, latents, count, _ = latent_cases.operands([4096] * 3, heads=heads, device=DEVICE)
    count.copy_(torch.tensor(lengths))
    graph, out = captured(lambda: latent_attention(q, latents, count, **SIZES))
    for lengths in ([300, 1, 4000], [0, 4096, 64], [0, 0, 0], [2**31 - 1, -5, 77], [4096] * 3):
        count.copy_(torch.tensor(lengths, dtype=torch.int32))
        out.fill_(torch.nan)
        graph.replay()
        expected = latent_cases.expected(q, latents, count, None, **SIZES)
        assert error(out, expected) < 1e-2 if expected.any() else not out.any()


def test_large_scores_and_a_nan():
    q, latents, count, _ = latent_cases.operands([500, 90], device=DEVICE)
    expected = latent_cases.expected(100 * q, latents, count, None, **SIZES)
    assert error(latent_attention(100 * q, latents, count, **SIZES), expected) < 1e-2
    latents[0, 77, 3] = torch.nan
    found = latent_attention(q, latents, count, **SIZES)
    assert found[0].isnan().all() and found[1].isfinite().all()


def test_table_and_lengths_out_of_range():
    q, latents, count, table = latent_cases.operands([640, 128], paged=True, device=DEVICE)
    latents.nan_to_num_()
    table[0, 3], table[1] = 2**31 - 1, -7
    count.fill_(2**31 - 1)
    expected = latent_cases.expected(q, latents, count, table, **SIZES)
    assert error(latent_attention(q, latents, count, block_table=table, **SIZES), expected) < 1e-2


@pytest.mark.parametrize("paged", [False, True], ids=["in a row", "paged"])
@pytest.mark.parametrize(("queries", "heads"), [(1, 16), (1, 128), (3, 20), (70, 64)])
@pytest.mark.parametrize("chosen", [1, 64, 100, 2048])
def test_chosen_latents(chosen, queries, heads, paged):
    """Against float64; some indices are none, or out of range; what is not chosen is NaN."""
    lengths = [3000, 130, 0]
    q, latents, count, table = latent_cases.operands(lengths, queries=queries, heads=heads, paged=paged, device=DEVICE)
    draw = torch.Generator().manual_seed(chosen)
    every = torch.stack([torch.randperm(3000, generator=draw)[:chosen] for _ in range(3 * queries)])
    indices = every.view(3, queries, -1).int().to(DEVICE)
    indices[0, :, chosen // 2] = -1
    indices[0, -1, 0] = 2**31 - 1
    how = {"indices": indices, **SIZES}
    results = [latent_attention(q, latents, count, block_table=table, **how) for _ in range(20)]
    expected = latent_cases.expected(q, latents, count, table, **how)
    assert results[0].isfinite().all()
    assert error(results[0], expected) < 1e-2 if expected.any() else not results[0].any()
    assert all(torch.equal(results[0], again) for again in results[1:])


def test_all_chosen_is_all_seen():
    q, latents, count, _ = latent_cases.operands([700, 64], device=DEVICE)
    indices = torch.stack([torch.randperm(700)] * 2).int().to(DEVICE)[:, None]
    chosen = latent_attention(q, latents, count, indices=indices, **SIZES)
    assert error(chosen, latent_attention(q, latents, count, **SIZES).double()) < 1e-2


def test_what_the_kernel_does_not_take_is_refused_by_name():
    q, latents, count, _ = latent_cases.operands([70, 3], device=DEVICE)
    refused(TypeError, "^q: the kernel takes bf", latent_attention, q.half(), latents.half(), count, **SIZES)
    refused(ValueError, "^value_size: the kernel", latent_attention, q, latents, count, value_size=32, scale=0.1)
    odd = torch.empty(latents.numel() + 1, dtype=torch.bfloat16, device=DEVICE)[1:].view_as(latents)
    refused(ValueError, "^latents: expected to start at a multiple of 16", latent_attention, q, odd, count, **SIZES)


def test_nothing_to_read():
    q, latents, count, _ = latent_cases.operands([70, 3], device=DEVICE)
    chosen = torch.zeros(2, 1, 0, dtype=torch.int32, device=DEVICE)
    assert not latent_attention(q, latents, count, indices=chosen, **SIZES).any()
    blocks = latents[:, :64].contiguous()
    assert not latent_attention(q, blocks, count, block_table=chosen[:, 0], **SIZES).any()
    assert not latent_attention(q, latents[:, :0].contiguous(), count, **SIZES).any()
