"""Index scores of sparse attention."""

import torch
from torch import Tensor

from fp8moe.integrations.deep_gemm.operands import named
from fp8moe.kernels.indexer.checks import BLOCK_TOKENS
from fp8moe.kernels.indexer.mqa_logits import mqa_logits, paged_mqa_logits
from fp8moe.runtime.autograd import detached
from fp8moe.runtime.checks import check_tensor

Query = tuple[Tensor, Tensor | None]


@named(starts="cu_seq_len_k_start", ends="cu_seq_len_k_end")
def fp8_mqa_logits(
    q: Tensor,
    kv: tuple[Tensor, Tensor],
    weights: Tensor,
    cu_seq_len_k_start: Tensor,
    cu_seq_len_k_end: Tensor,
    clean_logits: bool = True,
) -> Tensor:
    """`fp8moe.mqa_logits`: (S, T) float32; clean_logits writes -inf outside of the ranges, which are undefined without.

    q (S, H, D) float8_e4m3fn, kv data (T, D) with scale (T,), weights (S, H) float32, starts and ends (S,) int32.
    """
    ranges = cu_seq_len_k_start, cu_seq_len_k_end
    return mqa_logits(q, kv, detached(weights), *ranges, fill_masked=clean_logits)


def fp8_paged_mqa_logits(
    q: Tensor,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    schedule_meta: Tensor | None,
    max_context_len: int,
    clean_logits: bool = False,
) -> Tensor:
    """`fp8moe.paged_mqa_logits`: (B * next_n, max_context_len) float32.

    q (B, next_n, H, D) float8_e4m3fn, kv_cache (num_blocks, 64, 1, D + 4) uint8, weights (B * next_n, H) float32,
    context_lens (B,) or (B, next_n), block_table (B, max_blocks) int32. clean_logits: as for `fp8_mqa_logits`.
    schedule_meta: not read; the kernel shares its work out on the device.
    """
    options = {"max_context_len": max_context_len, "fill_masked": clean_logits}
    return paged_mqa_logits(q, kv_cache, detached(weights), context_lens, block_table, **options)


def get_paged_mqa_logits_metadata(context_lens: Tensor, block_size: int, num_sms: int) -> Tensor:
    """What `fp8_paged_mqa_logits` wants as schedule_meta: int32 (num_sms + 1, 2) on the device, as DeepGEMM's is.

    It holds zeros: no schedule is made ahead of the call.
    """
    check_tensor("context_lens", context_lens)
    if block_size != BLOCK_TOKENS:
        raise NotImplementedError(f"block_size: expected {BLOCK_TOKENS}, that of the cache on Hopper, got {block_size}")
    return torch.zeros((num_sms + 1, 2), dtype=torch.int32, device=context_lens.device)


def fp8_fp4_mqa_logits(q: Query, *args, **options) -> Tensor:
    """`fp8_mqa_logits` for q as the pair (FP8 values, None)."""
    return fp8_mqa_logits(_values(q), *args, **options)


def fp8_fp4_paged_mqa_logits(q: Query, *args, **options) -> Tensor:
    """`fp8_paged_mqa_logits` for q as the pair (FP8 values, None)."""
    return fp8_paged_mqa_logits(_values(q), *args, **options)


def _values(q: Query) -> Tensor:
    if not isinstance(q, tuple | list) or len(q) != 2:
        raise TypeError(f"q: expected a pair of FP8 values and None, got {type(q).__name__}")
    values, scale = q
    if scale is not None:
        raise NotImplementedError("q: FP4 values, which have scales, have no kernel on Hopper; expected (FP8, None)")
    return values
