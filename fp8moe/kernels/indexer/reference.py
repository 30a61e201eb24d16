"""The MQA logits in plain PyTorch, on any device: they define what the CUDA kernels compute."""

import torch
from torch import Tensor

from fp8moe.kernels.gemm.reference import products, to_float32
from fp8moe.kernels.indexer import mqa_cache_reference
from fp8moe.quant.formats import ceil_div

_CHUNK = 1 << 23  # products of one head of a query with a key, at a time
_INF = float("inf")


def mqa_logits(
    q: Tensor,
    kv: Tensor,
    kv_scale: Tensor,
    weights: Tensor,
    starts: Tensor,
    ends: Tensor,
    out: Tensor,
    *,
    fill_masked: bool,
) -> None:
    """Write the logits of ``kernels.mqa.mqa_logits`` to ``out`` (S, T) float32, any strides. Waits for no GPU.

    E4M3 values are exact in TF32 and bfloat16, so the products are exact whatever
    ``torch.set_float32_matmul_precision`` says; all sums are in float32. Queries are taken in chunks: memory beside
    the result is a float32 copy of the keys and tens of MB, or what one query takes where that is more.
    """
    keys = to_float32(kv).t()
    columns = torch.arange(kv.shape[0], device=q.device)
    heads = q.shape[1]
    chunk = max(1, _CHUNK // max(1, heads * kv.shape[0]))
    for first in range(0, q.shape[0], chunk):
        rows = slice(first, first + chunk)
        scores = products(to_float32(q[rows]).flatten(0, 1), keys).relu_().unflatten(0, (-1, heads))
        logits = scores.mul_(weights[rows, :, None]).sum(1).mul_(kv_scale)
        seen = (columns >= starts[rows, None]) & (columns < ends[rows, None])
        out[rows] = torch.where(seen, logits, -_INF if fill_masked else out[rows])


def paged_mqa_logits(
    q: Tensor,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    out: Tensor,
    *,
    fill_masked: bool,
) -> None:
    """Write the logits of ``kernels.mqa.paged_mqa_logits`` to ``out`` (B * next_n, max_context_len) float32.

    One sequence at a time, as much of its context as it has: on a GPU this waits for the context lengths.
    """
    batch, next_n = q.shape[:2]
    num_blocks, block_tokens = kv_cache.shape[:2]
    data, scale = mqa_cache_reference.split(kv_cache)
    longest = min(out.shape[1], block_tokens * block_table.shape[1]) if num_blocks else 0
    ends = tokens_seen(context_lens, next_n).clamp(0, longest)
    for b, context in enumerate(ends.amax(1).tolist()):
        rows = slice(b * next_n, (b + 1) * next_n)
        blocks = block_table[b, : ceil_div(context, block_tokens)].long().clamp(0, num_blocks - 1)
        kv, kv_scale = (part[blocks].flatten(0, 1)[:context] for part in (data, scale))
        mqa_logits(
            *(q[b], kv.view(torch.float8_e4m3fn), kv_scale, weights[rows]),
            *(torch.zeros_like(ends[b]), ends[b], out[rows, :context]),
            fill_masked=fill_masked,
        )
        if fill_masked:
            out[rows, context:] = -_INF


def tokens_seen(context_lens: Tensor, next_n: int) -> Tensor:
    """How many cached tokens each query sees, (B, next_n) int64, before it is clamped.

    context_lens: (B, next_n), just that; or (B,), the length for the last of the next_n queries: each one before it
    sees one token less.
    """
    if context_lens.dim() == 2:
        return context_lens.long()
    return context_lens[:, None].long() + torch.arange(1 - next_n, 1, device=context_lens.device)
