"""Index scores and the paged cache in plain PyTorch, on any device: these define the results of the CUDA kernels."""

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8moe.kernels.gemm.reference import products, to_float32
from fp8moe.kernels.indexer.checks import Chosen, Paged, Prefill
from fp8moe.quant.formats import ceil_div
from fp8moe.quant.reference import quantize_1x128

_CHUNK = 1 << 23  # dot products (of a query head with a key) that are kept in memory at a time
_INF = float("inf")


def mqa_logits(operands: Prefill, out: Tensor) -> None:
    """Compute ``mqa_logits`` into ``out`` (S, columns) float32, any strides, without waiting for a GPU.

    Products are exact, see `products`; all sums are in float32. Queries are processed in chunks, so that temporary
    memory is a float32 copy of the keys plus tens of MB, or more if a single query needs more.
    """
    q, kv, kv_scale, weights, starts, ends, _, from_starts, fill_masked = operands
    keys = to_float32(kv).t()
    columns = torch.arange(out.shape[1], device=q.device)
    tokens, heads = kv.shape[0], q.shape[1]
    starts, ends = starts.clamp(0, tokens), ends.clamp(0, tokens)
    chunk = max(1, _CHUNK // max(1, heads * tokens))
    for first in range(0, q.shape[0], chunk):
        rows = slice(first, first + chunk)
        scores = products(to_float32(q[rows]).flatten(0, 1), keys).relu_().unflatten(0, (-1, heads))
        logits = scores.mul_(weights[rows, :, None]).sum(1).mul_(kv_scale)
        token = starts[rows, None] + columns if from_starts else columns.expand(len(logits), -1)
        seen = (token >= starts[rows, None]) & (token < ends[rows, None])
        found = logits.gather(1, token.clamp(max=tokens - 1))
        out[rows] = torch.where(seen, found, -_INF if fill_masked else out[rows])


def paged_mqa_logits(operands: Paged, out: Tensor) -> None:
    """Compute ``paged_mqa_logits`` into ``out`` (B * next_n, max_context_len) float32.

    Sequences are computed one by one; the host waits for their context lengths.
    """
    q, kv_cache, weights, context_lens, block_table, _, fill_masked = operands
    batch, next_n = q.shape[:2]
    num_blocks, block_tokens = kv_cache.shape[:2]
    data, scale = split(kv_cache)
    longest = min(out.shape[1], block_tokens * block_table.shape[1]) if num_blocks else 0
    ends = tokens_seen(context_lens, next_n).clamp(0, longest)
    for b, context in enumerate(ends.amax(1).tolist()):
        rows = slice(b * next_n, (b + 1) * next_n)
        blocks = block_table[b, : ceil_div(context, block_tokens)].long().clamp(0, num_blocks - 1)
        kv, kv_scale = (part[blocks].flatten(0, 1)[:context] for part in (data, scale))
        kv, starts = kv.view(torch.float8_e4m3fn), torch.zeros_like(ends[b])
        sequence = Prefill(q[b], kv, kv_scale, weights[rows], starts, ends[b], fill_masked=fill_masked)
        mqa_logits(sequence, out[rows, :context])
        if fill_masked:
            out[rows, context:] = -_INF


def mqa_top_k(operands: Chosen) -> Tensor:
    """Compute ``mqa_top_k`` by two stable sorts of each row: by score, then by whether the range has the column."""
    logits, top_k, starts, ends = operands
    rows, columns = logits.shape
    column = torch.arange(columns, device=logits.device)
    first = torch.zeros(rows, 1, dtype=torch.int64, device=logits.device)
    first = first if starts is None else starts[:, None].long().clamp(0, columns)
    last = torch.full_like(first, columns) if ends is None else ends[:, None].long().clamp(0, columns)
    seen = (column >= first) & (column < last)
    logits = torch.where(logits.isnan(), torch.nan, logits)  # whose sign would matter to sorts on a GPU
    order = logits.masked_fill(~seen, -_INF).sort(dim=1, descending=True, stable=True).indices
    there, place = seen.gather(1, order).sort(dim=1, descending=True, stable=True)
    found = (order.gather(1, place) - first).masked_fill(~there, -1)[:, :top_k].int()
    return F.pad(found, (0, top_k - found.shape[1]), value=-1)


def tokens_seen(context_lens: Tensor, next_n: int) -> Tensor:
    """Return the number of cached tokens that each query sees, (B, next_n) int64, not clamped.

    context_lens: (B, next_n), which is returned as int64; or (B,), the number of tokens that the last of next_n queries
    sees, each earlier query seeing one token less.
    """
    if context_lens.dim() == 2:
        return context_lens.long()
    return context_lens[:, None].long() + torch.arange(1 - next_n, 1, device=context_lens.device)


def split(kv_cache: Tensor) -> tuple[Tensor, Tensor]:
    """Return views of a cache (num_blocks, 64, 1, D + 4): keys (num_blocks, 64, D) uint8, scales (num_blocks, 64)."""
    num_blocks, tokens, _, width = kv_cache.shape
    blocks = kv_cache.view(num_blocks, tokens * width)
    data, scale = blocks.split((tokens * (width - 4), tokens * 4), dim=1)
    return data.unflatten(1, (tokens, width - 4)), scale.view(torch.float32)


def append_kv(kv_cache: Tensor, k: Tensor, slots: Tensor, ue8m0: bool) -> None:
    """Quantize keys k (T, D), one scale per key, and write them to slots (T,) of the cache."""
    num_slots = kv_cache.shape[0] * kv_cache.shape[1]
    if k.shape[0] == 0 or num_slots == 0:
        return
    data, scale = quantize_1x128(k, ue8m0)
    valid = _valid_slots(slots, num_slots)
    # Filtering by valid slots would wait for the GPU. Instead, a token with an invalid slot repeats the write of the
    # first token with a valid slot; if no slot is valid, slot 0 is rewritten with its own contents.
    token = torch.where(valid, torch.arange(len(slots), device=slots.device), valid.int().argmax())
    place = tuple(_places(torch.where(valid, slots, 0)[token], kv_cache.shape[1]))
    some = valid.any()
    for target, values in zip(split(kv_cache), (data.view(torch.uint8), scale[:, 0]), strict=True):
        target[place] = torch.where(some, values[token], target[place])


def read_kv(kv_cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Return data (T, D) and scale (T,) of the keys in slots (T,); zeros for slots outside of the cache."""
    data, scale = split(kv_cache)
    num_slots = kv_cache.shape[0] * kv_cache.shape[1]
    if num_slots == 0:
        data, scale = data.new_zeros(len(slots), data.shape[2]), scale.new_zeros(len(slots))
    else:
        valid = _valid_slots(slots, num_slots)
        place = tuple(_places(torch.where(valid, slots, 0), kv_cache.shape[1]))
        data, scale = torch.where(valid[:, None], data[place], 0), torch.where(valid, scale[place], 0)
    return data.view(torch.float8_e4m3fn), scale


def _valid_slots(slots: Tensor, num_slots: int) -> Tensor:
    return (slots >= 0) & (slots < num_slots)


def _places(slots: Tensor, block_tokens: int) -> tuple[Tensor, Tensor]:
    """Return the block of each valid slot, and its index within the block."""
    slots = slots.long()
    return slots // block_tokens, slots % block_tokens
