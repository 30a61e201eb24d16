"""Cases of the index scores' benchmark: operands, work, and calls whose results are checked against float64."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks import operands
from fp8moe import FP8Tensor, paged_mqa_logits, quantize_1x128
from fp8moe.kernels.indexer.mqa_cache import BLOCK_TOKENS, append_kv, new_kv_cache, read_kv

MAX_ERROR = 1e-3


class Batch(NamedTuple):
    """One decoding step over contexts of so many tokens, with logits for max_context_len."""

    contexts: tuple[int, ...]
    next_n: int
    heads: int
    head_dim: int
    max_context_len: int
    fill_masked: bool = True

    @property
    def visible(self) -> list[int]:
        """How many tokens each query sees."""
        return [context - self.next_n + 1 + j for context in self.contexts for j in range(self.next_n)]


class Prepared(NamedTuple):
    """A call to time, and the error of its result."""

    call: Callable[[], Tensor]
    error: float


def paged_work(batch: Batch) -> tuple[int, int]:
    """Operations and bytes of one decoding step: keys with their scales and queries read once, logits written once."""
    rows, pairs = len(batch.visible), sum(batch.visible)
    logits = rows * batch.max_context_len if batch.fill_masked else pairs
    keys = sum(batch.contexts) * (batch.head_dim + 4)
    return 2 * batch.heads * batch.head_dim * pairs, keys + 4 * logits + rows * batch.heads * batch.head_dim


def scores(q: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
    """Index scores (T,) of one query: q (heads, D), keys (T, D), weights (heads,), in their dtype."""
    return weights @ (q @ keys.t()).relu()


def check(out: Tensor, visible: Tensor, expected: Mapping[int, Tensor], fill_masked: bool) -> float:
    """Error of some rows of logits (rows, columns), of which row r may see the first visible[r] columns.

    expected: what some rows have there. RuntimeError if an entry that is seen is not finite, or one that is not seen is
    not -inf although `fill_masked`.
    """
    seen = torch.arange(out.shape[1], device=out.device) < visible[:, None]
    if not (out.isfinite() | ~seen).all():
        raise RuntimeError("logits that a query sees are not finite")
    if fill_masked and not (out.isneginf() | seen).all():
        raise RuntimeError("logits that a query does not see are not -inf")
    actual = torch.cat([out[row, : len(values)] for row, values in expected.items()])
    error = operands.relative_error(actual, torch.cat(list(expected.values())))
    if not error <= MAX_ERROR:
        raise RuntimeError(f"relative error {error:.2e}, must be <= {MAX_ERROR}")
    return error


def quantized_queries(*shape: int, device: str) -> tuple[Tensor, Tensor]:
    """Random normal queries (..., heads, D) as e4m3, and weights (rows, heads) that hold their scales."""
    q = quantize_1x128(torch.randn(shape, device=device, dtype=torch.bfloat16))
    weights = torch.randn(shape[:-1], device=device) * q.scale[..., 0]
    return q.data, weights.view(-1, shape[-2])


def quantized_keys(keys: Tensor) -> FP8Tensor:
    """Keys (T, D) as e4m3 with one scale each, (T,)."""
    data, scale = quantize_1x128(keys)
    return FP8Tensor(data, scale[:, 0])


def filled_cache(num_blocks: int, head_dim: int, *, device: str = "cuda") -> Tensor:
    """A cache of random normal keys, all of its blocks full."""
    cache = new_kv_cache(num_blocks, head_dim, device=device)
    keys = torch.randn(BLOCK_TOKENS * num_blocks, head_dim, device=device, dtype=torch.bfloat16)
    append_kv(cache, keys, torch.arange(len(keys), dtype=torch.int32, device=device))
    return cache


def blocks_of(context: int) -> int:
    return -(-context // BLOCK_TOKENS)


def block_table(batch: Batch, num_blocks: int, *, device: str = "cuda") -> Tensor:
    """Blocks (batch, max_blocks) int32 of each context, all different and in random order; 0 past the end of one."""
    free = torch.randperm(num_blocks, dtype=torch.int32)
    table = torch.zeros(len(batch.contexts), blocks_of(batch.max_context_len), dtype=torch.int32)
    first = 0
    for row, context in zip(table, batch.contexts, strict=True):
        count = blocks_of(context)
        row[:count] = free[first : first + count]
        first += count
    return table.to(device)


def prepare_paged(batch: Batch, cache: Tensor) -> Prepared:
    """The call over contexts in `cache`. RuntimeError if the result is wrong."""
    device, next_n = cache.device, batch.next_n
    q, weights = quantized_queries(len(batch.contexts), next_n, batch.heads, batch.head_dim, device=device)
    context_lens = torch.tensor(batch.contexts, dtype=torch.int32, device=device)
    table = block_table(batch, len(cache), device=device)
    exact = {}
    for request in {0, len(batch.contexts) - 1}:
        positions = torch.arange(batch.contexts[request], device=device)
        slots = table[request, positions // BLOCK_TOKENS] * BLOCK_TOKENS + positions.int() % BLOCK_TOKENS
        keys = read_kv(cache, slots)
        for j in range(next_n):
            row = request * next_n + j
            score = scores(q[request, j].double(), keys.data.double(), weights[row].double()) * keys.scale.double()
            exact[row] = score[: batch.visible[row]]
    options = {"max_context_len": batch.max_context_len, "fill_masked": batch.fill_masked}
    call = partial(paged_mqa_logits, q, cache, weights, context_lens, table, **options)
    return Prepared(call, check(call(), torch.tensor(batch.visible, device=device), exact, batch.fill_masked))


def prepare_append(tokens: int, per_block: int, head_dim: int, *, device: str = "cuda") -> Callable[[], None]:
    """The call that appends keys, per_block to each of shuffled blocks. RuntimeError unless the bits are right."""
    blocks = torch.randperm(-(-tokens // per_block), device=device)
    slots = (BLOCK_TOKENS * blocks[:, None] + torch.arange(per_block, device=device)).flatten()[:tokens].int()
    cache = new_kv_cache(len(blocks), head_dim, device=device)
    keys = torch.randn(tokens, head_dim, device=device, dtype=torch.bfloat16)
    call = partial(append_kv, cache, keys, slots)
    call()
    stored, expected = read_kv(cache, slots), quantized_keys(keys)
    if not torch.equal(stored.scale, expected.scale) or not torch.equal(
        stored.data.view(torch.uint8), expected.data.view(torch.uint8)
    ):
        raise RuntimeError(f"append_kv, {tokens} tokens: the cache has other bits than quantize_1x128")
    return call
