"""DeepGEMM's functions for the index scores (MQA logits) of sparse attention."""

import torch
from torch import Tensor

from deep_gemm.gemm import named
from fp8moe.kernels.indexer.checks import BLOCK_TOKENS, Prefill, row_length
from fp8moe.kernels.indexer.mqa_logits import paged_mqa_logits, scores
from fp8moe.quant.checks import fp8_operand
from fp8moe.quant.formats import align
from fp8moe.runtime.autograd import detached, recorded
from fp8moe.runtime.checks import check_tensor

__all__ = [
    "fp8_fp4_mqa_logits",
    "fp8_fp4_paged_mqa_logits",
    "fp8_mqa_logits",
    "fp8_paged_mqa_logits",
    "get_paged_mqa_logits_metadata",
]

Query = tuple[Tensor, Tensor | None]

_PITCH_BYTES = 1024  # rows of scores begin at multiples of this many bytes, as in DeepGEMM; top-k kernels rely on it


@named(starts="cu_seq_len_k_start", ends="cu_seq_len_k_end")
def fp8_mqa_logits(
    q: Tensor,
    kv: tuple[Tensor, Tensor],
    weights: Tensor,
    cu_seq_len_k_start: Tensor,
    cu_seq_len_k_end: Tensor,
    clean_logits: bool | int = True,
    max_seqlen_k: int = 0,
    logits_dtype: torch.dtype = torch.float32,
    schedule_meta: Tensor | None = None,
) -> Tensor:
    """Compute `fp8moe.mqa_logits`; return scores (S, T) in logits_dtype, with rows a multiple of 1 KB apart.

    q: (S, H, D) float8_e4m3fn. kv: data (T, D) with scale (T,). weights: (S, H) float32. cu_seq_len_k_start and
    cu_seq_len_k_end: (S,) int32, the range of keys that each query sees.
    clean_logits: whether scores outside of the ranges are -inf rather than undefined. An int is taken as max_seqlen_k,
        with clean_logits False: DeepGEMM's newest signature has max_seqlen_k in this position.
    max_seqlen_k: 0, or at least the length of the longest range. If it is not 0, scores are (S, max_seqlen_k), and each
        row begins with the first key of the query's range.
    logits_dtype: float32, or bfloat16, to which a further kernel rounds the scores. schedule_meta: ignored.

    Raises NotImplementedError for another logits_dtype.
    """
    if not isinstance(clean_logits, bool):
        clean_logits, max_seqlen_k = False, clean_logits
    row_length("max_seqlen_k", max_seqlen_k)
    pitch = _pitch(logits_dtype)
    for name, value in (("q", q), ("weights", weights), ("starts", cu_seq_len_k_start), ("ends", cu_seq_len_k_end)):
        check_tensor(name, value)
    keys, scale = fp8_operand("kv", kv)
    values = q, keys, scale, weights, cu_seq_len_k_start, cu_seq_len_k_end
    if recorded(*values):
        values = tuple(value.detach() for value in values)
    columns = max_seqlen_k or (keys.shape[0] if keys.dim() else 0)
    operands = Prefill(*values, align(columns, pitch), max_seqlen_k > 0, clean_logits)
    return _finished(scores(operands), logits_dtype, columns)


def fp8_paged_mqa_logits(
    q: Tensor,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    schedule_meta: Tensor | None,
    max_context_len: int,
    clean_logits: bool = False,
    logits_dtype: torch.dtype = torch.float32,
    indices: Tensor | None = None,
) -> Tensor:
    """Compute `fp8moe.paged_mqa_logits`; return scores (B * next_n, max_context_len) in logits_dtype.

    q: (B, next_n, H, D) float8_e4m3fn. kv_cache: (num_blocks, 64, 1, D + 4) uint8. weights: (B * next_n, H) float32.
    context_lens: (B,) or (B, next_n) int32. block_table: (B, max_blocks) int32. clean_logits (a bool), logits_dtype and
    the distance between rows: as for `fp8_mqa_logits`. schedule_meta: ignored; the kernel schedules work on the GPU.

    Raises NotImplementedError if ``indices`` is given: Hopper has no kernel that takes ``indices``.
    """
    pitch = _pitch(logits_dtype)
    _check_indices(indices)
    row_length("max_context_len", max_context_len)
    options = {"max_context_len": align(max_context_len, pitch), "fill_masked": clean_logits}
    logits = paged_mqa_logits(q, kv_cache, detached(weights), context_lens, block_table, **options)
    return _finished(logits, logits_dtype, max_context_len)


def get_paged_mqa_logits_metadata(
    context_lens: Tensor, block_size: int, num_sms: int, indices: Tensor | None = None
) -> Tensor:
    """Return a placeholder to pass as schedule_meta: int32 zeros with DeepGEMM's shape, (num_sms + 1, 2).

    `fp8_paged_mqa_logits` needs no schedule. Raises NotImplementedError for a block_size other than 64, and if
    ``indices`` is given.
    """
    check_tensor("context_lens", context_lens)
    _check_indices(indices)
    if block_size != BLOCK_TOKENS:
        raise NotImplementedError(f"block_size: expected {BLOCK_TOKENS}, that of the cache on Hopper, got {block_size}")
    return torch.zeros((num_sms + 1, 2), dtype=torch.int32, device=context_lens.device)


def fp8_fp4_mqa_logits(q: Query, *args, **options) -> Tensor:
    """Compute `fp8_mqa_logits` for q given as the pair (FP8 values, None)."""
    return fp8_mqa_logits(_values(q), *args, **options)


def fp8_fp4_paged_mqa_logits(q: Query, *args, **options) -> Tensor:
    """Compute `fp8_paged_mqa_logits` for q given as the pair (FP8 values, None)."""
    return fp8_paged_mqa_logits(_values(q), *args, **options)


def _values(q: Query) -> Tensor:
    if not isinstance(q, tuple | list) or len(q) != 2:
        raise TypeError(f"q: expected a pair of FP8 values and None, got {type(q).__name__}")
    values, scale = q
    if scale is not None:
        raise NotImplementedError("q: FP4 values, which have scales, have no kernel on Hopper; expected (FP8, None)")
    return values


def _pitch(logits_dtype: torch.dtype) -> int:
    """Return how many scores in logits_dtype fill `_PITCH_BYTES`: rows are padded to a multiple of this number.

    Raises NotImplementedError for a dtype other than float32 and bfloat16.
    """
    if logits_dtype not in (torch.float32, torch.bfloat16):
        raise NotImplementedError(f"logits_dtype: expected float32 or bfloat16, got {logits_dtype}")
    return _PITCH_BYTES // logits_dtype.itemsize


def _finished(logits: Tensor, dtype: torch.dtype, columns: int) -> Tensor:
    """Return the logits in `dtype`, without padding after the first `columns` columns."""
    if logits.dtype is not dtype:
        logits = logits.to(dtype)
    return logits if logits.shape[1] == columns else logits[:, :columns]


def _check_indices(indices: Tensor | None) -> None:
    if indices is not None:
        raise NotImplementedError("indices: sequences with different numbers of queries have no kernel on Hopper")
