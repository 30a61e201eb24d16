"""The MQA logits kernels against float64 over the same quantized operands, and what they leave masked or unwritten."""

from functools import partial

import pytest
import torch

from fp8moe.kernels.indexer.mqa_cache import append_kv
from fp8moe.kernels.indexer.mqa_logits import launch, mqa_logits, paged_mqa_logits
from fp8moe.quant.formats import FP8Tensor
from tests import gemm_cases
from tests import mqa_cases as cases
from tests.gpu.checks import captured
from tests.kernels.test_mqa import (  # noqa: F401
    SHAPES,
    check_paged,
    test_a_nan_in_the_cache,
    test_blocks_are_clamped,
    test_empty,
    test_empty_cache,
    test_lengths_are_clamped,
    test_lengths_of_each_query,
    test_overlap_with_unquantized_scores,
    test_paged,
)
from tests.mqa_cases import POISON

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
INF = float("inf")
SIZES = ((1, 1), (1, 64), (2, 63), (7, 130), (65, 257), (33, 1000), (130, 129), (256, 2048), (3, 5000))
int32 = partial(gemm_cases.int32, device=DEVICE)
prefill = partial(cases.prefill, device=DEVICE)
paged = partial(cases.paged, device=DEVICE)


def check_prefill(operands):
    """By key, and in rows from the start of each range on that are shorter than some ranges, and longer than all."""
    keys = operands.kv.data.shape[0]
    cases.check_prefill(launch, operands, keys // 3 + 1, keys + 70)


# Keys in a row.


@pytest.mark.parametrize("kind", cases.RANGES)
@pytest.mark.parametrize(("heads", "head_dim"), SHAPES)
def test_sizes(heads, head_dim, kind):
    for tokens, keys in SIZES:
        check_prefill(prefill(tokens, keys, heads=heads, head_dim=head_dim, kind=kind))


@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 64, 129])
@pytest.mark.parametrize("keys", [1, 8, 65, 255, 256, 257])
def test_small_sizes(tokens, keys):
    check_prefill(prefill(tokens, keys, kind="ragged", seed=tokens + keys))


def test_neighbours_with_ranges_far_apart():
    operands = prefill(40, 9000)
    starts = [0, 8990, 4500, 1, 8999] * 8
    check_prefill(
        operands._replace(starts=int32(starts), ends=int32([start + 1 + s for s, start in enumerate(starts)]))
    )


@pytest.mark.parametrize("kind", ["causal", "packed"])
def test_long_keys(kind):
    check_prefill(prefill(130, 100_001, kind=kind))


@pytest.mark.parametrize(("tokens", "keys"), [(9, 30), (70, 700)])
@pytest.mark.parametrize(("heads", "head_dim"), SHAPES)
def test_a_nan_shows_where_it_matters(heads, head_dim, tokens, keys):
    operands = prefill(tokens, keys, heads=heads, head_dim=head_dim)
    without = mqa_logits(*operands)
    for bad, where in cases.prefill_nans(operands):
        cases.assert_nans(mqa_logits(*bad), without, where)


@pytest.mark.parametrize("value", [INF, -INF])
def test_infinities(value):
    operands = prefill(50, 300)
    without = mqa_logits(*operands)
    operands.kv.scale[290] = operands.weights[7, 3] = value
    out = mqa_logits(*operands)
    of_row, of_column = torch.zeros(2, 50, 300, dtype=torch.bool, device=DEVICE)
    of_row[7], of_column[:, 290] = True, True
    touched = (of_row | of_column) & (without > -INF)
    assert cases.same_bits(out[~touched], without[~touched])
    assert not out[touched].isfinite().any()


# The paged cache.


@pytest.mark.parametrize("batch", [1, 2, 31, 33, 132, 133, 500, 1025, 3000])
def test_number_of_sequences(batch):
    draw = torch.Generator().manual_seed(batch)
    check_paged(paged(torch.randint(0, 200, (batch,), generator=draw).tolist(), heads=32, head_dim=32), 199)


@pytest.mark.parametrize("lens", [[100, 100_000], [100_000] + [100] * 40 + [0, 65_536], [0] * 63 + [70_000]])
@pytest.mark.parametrize("next_n", [1, 3])
def test_uneven_contexts(lens, next_n):
    check_paged(paged(lens, next_n=next_n), 100_032)


# Streams, graphs, memory.


@pytest.mark.parametrize("next_n", [1, 2])
def test_graph_replays_with_growing_contexts(next_n):
    batch, max_context_len = 5, 5000
    operands = paged([max_context_len] * batch, next_n=next_n)
    operands.context_lens.zero_()
    k, slots = torch.zeros(batch * next_n, 128, device=DEVICE), int32([-1] * (batch * next_n))

    def run():
        append_kv(operands.kv_cache, k, slots)
        return paged_mqa_logits(*operands, max_context_len=max_context_len)

    graph, out = captured(run)
    new = torch.arange(next_n, device=DEVICE)
    for step, growth in enumerate((1, 63, 64, 65, 1000, 3000)):
        operands.context_lens.add_(growth + torch.arange(batch, device=DEVICE) * step)
        token = operands.context_lens[:, None].long() - next_n + new  # the last ones, where there are as many
        slot = operands.block_table.gather(1, token.clamp(min=0) // 64) * 64 + token % 64
        slots.copy_(slot.where(token >= 0, -1).flatten())
        k.normal_(generator=cases.generator(DEVICE, step))
        out.fill_(POISON)
        before = operands.kv_cache.clone()
        graph.replay()
        assert not torch.equal(operands.kv_cache, before)
        cases.assert_matches(out, cases.exact_paged(operands, max_context_len))


# Past 2**31 elements.


def assert_rows_match(operands, out, rows):
    cases.assert_matches(out[rows], cases.exact_prefill(operands, rows))


def test_more_logits():
    tokens, keys = 32_800, 65_536
    assert tokens * keys > 1 << 31
    operands = prefill(tokens, keys, heads=32, head_dim=32)
    out = mqa_logits(*operands)
    for first in (0, tokens // 2, tokens - 3):
        assert_rows_match(operands, out, slice(first, first + 3))
    assert torch.equal((out > -INF).sum(1), operands.ends.long())


def test_more_paged_logits():
    batch, length = 2060, 1 << 20
    assert batch * length > 1 << 31
    lens = [100] * batch
    lens[batch // 2] = lens[-1] = length
    operands = paged(lens, heads=32, head_dim=32)
    out = paged_mqa_logits(*operands, max_context_len=length)
    for sequences in (range(2), range(batch // 2 - 1, batch // 2 + 1), range(batch - 2, batch)):
        cases.assert_matches(out[sequences.start : sequences.stop], cases.exact_paged(operands, length, sequences))
    assert torch.equal((out > -INF).sum(1), operands.context_lens.long())


def test_more_bytes_of_cache():
    num_blocks = 260_000
    operands = paged([60_000, 100, 5000], next_n=2)
    table = torch.randint(254_300, num_blocks, operands.block_table.shape, device=DEVICE, dtype=torch.int32)
    operands = operands._replace(kv_cache=cases.random_cache(num_blocks, 128, device=DEVICE), block_table=table)
    assert 254_300 * operands.kv_cache[0].numel() > 1 << 31
    check_paged(operands, 60_000)


def test_more_keys():
    tokens, keys, last = 3, 16_800_000, 20_000
    assert keys * 128 > 1 << 31
    operands = prefill(tokens, keys)
    out = mqa_logits(*operands)
    (data, scale), ends = operands.kv, operands.ends - (keys - last)
    window = operands._replace(kv=FP8Tensor(data[-last:], scale[-last:]), ends=ends)
    cases.assert_matches(out[:, -last:], cases.exact_prefill(window))
    window = operands._replace(kv=FP8Tensor(data[:last], scale[:last]))
    cases.assert_matches(out[:, :last], cases.exact_prefill(window))


def test_more_queries():
    tokens, keys = 265_000, 65
    operands = prefill(tokens, keys, kind="ragged")
    assert operands.q.numel() > 1 << 31
    out = mqa_logits(*operands)
    for first in (0, tokens // 2, tokens - 50):
        assert_rows_match(operands, out, slice(first, first + 50))
