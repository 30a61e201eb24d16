"""Operands of the sparse-attention indexer, and checks of their dtypes, shapes and devices.

The values in tensors, such as key ranges and cache slots, are not checked: kernels clamp them.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fp8moe.quant.checks import check_scale_format
from fp8moe.runtime.checks import FLOATING, check_contiguous, check_device, check_dtype, check_int
from fp8moe.runtime.operator import Written

NUM_HEADS = (32, 64)
MAX_NEXT_N = 4

HEAD_DIMS = (32, 64, 128)
"""Head dimensions D (values of a key) that the kernels support."""

BLOCK_TOKENS = 64
"""Keys (one per token) in a block of the paged cache."""

SCALE_BYTES = 4


class Prefill(NamedTuple):
    """Operands of ``mqa_logits``; S queries, T keys.

    from_starts: column i of row s has the score of key starts[s] + i, instead of key i. columns: number of columns of
    the result; None means T. Without from_starts, columns must not be less than T.
    """

    q: Tensor
    kv: Tensor
    kv_scale: Tensor
    weights: Tensor
    starts: Tensor
    ends: Tensor
    columns: int | None = None
    from_starts: bool = False
    fill_masked: bool = True


class Paged(NamedTuple):
    """Operands of ``paged_mqa_logits``."""

    q: Tensor
    kv_cache: Tensor
    weights: Tensor
    context_lens: Tensor
    block_table: Tensor
    max_context_len: int
    fill_masked: bool = True


class Chosen(NamedTuple):
    """Operands of ``mqa_top_k``."""

    logits: Tensor
    top_k: int
    starts: Tensor | None = None
    ends: Tensor | None = None


def prefill(operands: Prefill) -> tuple[int, int]:
    """Check dtypes, shapes and devices of the operands of ``mqa_logits``; return the numbers of queries and keys."""
    q, kv, kv_scale, weights, starts, ends, *_ = operands
    tokens, heads, head_dim = _queries(q, "(S, H, D)")
    check_dtype("kv.data", kv, torch.float8_e4m3fn)
    if kv.dim() != 2 or kv.shape[1] != head_dim or kv.shape[0] >= 1 << 31:
        expected = f"(T, {head_dim}) to match q {tuple(q.shape)}, with T < 2**31"
        raise ValueError(f"kv.data: expected shape {expected}, got {tuple(kv.shape)}")
    check_device("kv.data", kv, q.device, "q")
    _shaped("kv.scale", kv_scale, torch.float32, "(T,)", (kv.shape[0],), q)
    _shaped("weights", weights, torch.float32, "(S, H)", (tokens, heads), q)
    for name, value in (("starts", starts), ("ends", ends)):
        _shaped(name, value, torch.int32, "(S,)", (tokens,), q)
    return tokens, kv.shape[0]


def paged(operands: Paged) -> None:
    """Check dtypes, shapes and devices of the operands of ``paged_mqa_logits``."""
    q, kv_cache, weights, context_lens, block_table, *_ = operands
    batch, next_n, heads, head_dim = _queries(q, "(B, next_n, H, D)")
    if not 1 <= next_n <= MAX_NEXT_N:
        raise ValueError(f"q: expected 1 to {MAX_NEXT_N} queries a sequence, got next_n = {next_n}")
    if cache(kv_cache)[1] != head_dim:
        expected = f"keys of {head_dim} bytes to match q {tuple(q.shape)}"
        raise ValueError(f"kv_cache: expected {expected}, got {tuple(kv_cache.shape)}")
    check_device("kv_cache", kv_cache, q.device, "q")
    _shaped("weights", weights, torch.float32, "(B * next_n, H)", (batch * next_n, heads), q)
    dimensions, shape = ("(B, next_n)", (batch, next_n)) if context_lens.dim() == 2 else ("(B,)", (batch,))
    _shaped("context_lens", context_lens, torch.int32, dimensions, shape, q)
    if block_table.dim() != 2:
        raise ValueError(f"block_table: expected shape (B, max_blocks), got {tuple(block_table.shape)}")
    _shaped("block_table", block_table, torch.int32, "(B, max_blocks)", (batch, block_table.shape[1]), q)


def chosen(operands: Chosen) -> None:
    """Check dtypes, shapes and devices of the operands of ``mqa_top_k``."""
    logits, top_k, *ranges = operands
    check_dtype("logits", logits, torch.float32)
    if logits.dim() != 2 or logits.shape[1] >= 1 << 30:
        raise ValueError(f"logits: expected shape (S, T) with T < 2**30, got {tuple(logits.shape)}")
    check_int("top_k", top_k, at_least=1)
    for name, value in zip(("starts", "ends"), ranges, strict=True):
        if value is not None:
            _shaped(name, value, torch.int32, "(S,)", (logits.shape[0],), logits, "logits")


def row_length(name: str, value: int) -> None:
    """Raise unless `value`, a number of result columns, is an int from 0 to 2**31 - 1. name: its name in errors."""
    check_int(name, value)
    if not 0 <= value < 1 << 31:
        raise ValueError(f"{name}: expected 0 to 2**31 - 1 tokens, got {value}")


def cache(kv_cache: Tensor) -> tuple[int, int]:
    """Check dtype, shape and strides of a paged cache; return (number of blocks, head dimension)."""
    check_dtype("kv_cache", kv_cache, torch.uint8)
    shape = kv_cache.shape
    if len(shape) != 4 or shape[1] != BLOCK_TOKENS or shape[2] != 1 or shape[3] - SCALE_BYTES not in HEAD_DIMS:
        expected = f"(num_blocks, {BLOCK_TOKENS}, 1, D + {SCALE_BYTES}) with D one of {HEAD_DIMS}"
        raise ValueError(f"kv_cache: expected shape {expected}, got {tuple(shape)}")
    check_contiguous("kv_cache", kv_cache)
    return shape[0], shape[3] - SCALE_BYTES


def append(kv_cache: Written, k: Tensor, slots: Tensor, scale_format: str) -> None:
    """Check dtypes, shapes and devices of the operands of ``append_kv``, but not the alignment of the cache."""
    _, head_dim = cache(kv_cache)
    check_dtype("k", k, *FLOATING)
    if k.dim() != 2 or k.shape[1] != head_dim:
        raise ValueError(f"k: expected shape (T, {head_dim}) to match the cache, got {tuple(k.shape)}")
    check_device("k", k, kv_cache.device, "kv_cache")
    cache_slots(slots, k.shape[0], kv_cache.device)
    check_scale_format(scale_format)


def cache_slots(slots: Tensor, tokens: int | None, device: torch.device) -> None:
    """Check dtype, shape and device of slots. tokens: the expected number of slots, None for any."""
    check_dtype("slots", slots, torch.int32)
    if slots.dim() != 1 or (tokens is not None and slots.shape[0] != tokens):
        expected = "(T,)" if tokens is None else f"({tokens},)"
        raise ValueError(f"slots: expected shape {expected}, got {tuple(slots.shape)}")
    check_device("slots", slots, device, "kv_cache")


def _queries(q: Tensor, dimensions: str) -> torch.Size:
    check_dtype("q", q, torch.float8_e4m3fn)
    shape = q.shape
    if len(shape) != dimensions.count(",") + 1 or shape[-2] not in NUM_HEADS or shape[-1] not in HEAD_DIMS:
        raise ValueError(f"q: expected shape {dimensions} with H 32 or 64 and D 32, 64 or 128, got {tuple(shape)}")
    return shape


def _shaped(
    name: str, value: Tensor, dtype: torch.dtype, dimensions: str, shape: tuple[int, ...], like: Tensor, its: str = "q"
) -> None:
    """Check dtype, shape and device of an operand. its: the name of `like`, on whose device it must be."""
    check_dtype(name, value, dtype)
    if value.shape != shape:
        raise ValueError(f"{name}: expected shape {dimensions} = {tuple(shape)}, got {tuple(value.shape)}")
    check_device(name, value, like.device, its)
