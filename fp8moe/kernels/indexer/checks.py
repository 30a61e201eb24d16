"""Checks of the arguments of the MQA logits, in the manner of `checks`.

Ranges, context lengths and block tables are on the device: the kernels clamp them.
"""

import torch
from torch import Tensor

from fp8moe.kernels.indexer.mqa_cache import HEAD_DIMS, check_kv_cache
from fp8moe.quant.checks import FLOAT8, FLOAT32

NUM_HEADS = (32, 64)
MAX_NEXT_N = 4


def prefill(q: Tensor, kv: Tensor, kv_scale: Tensor, weights: Tensor, starts: Tensor, ends: Tensor) -> tuple[int, int]:
    """Dtypes, shapes and devices of the operands of ``mqa_logits``. Returns S, T."""
    tokens, heads, head_dim = _queries(q, "(S, H, D)")
    if kv.dtype is not FLOAT8:
        raise TypeError(f"kv.data: expected float8_e4m3fn, got {kv.dtype}")
    if kv.dim() != 2 or kv.shape[1] != head_dim or kv.shape[0] >= 1 << 31:
        raise ValueError(
            f"kv.data: expected shape (T, {head_dim}) to match q {tuple(q.shape)}, with T < 2**31, "
            f"got {tuple(kv.shape)}"
        )
    _device("kv.data", kv, q)
    _shaped("kv.scale", kv_scale, FLOAT32, "(T,)", (kv.shape[0],), q)
    _shaped("weights", weights, FLOAT32, "(S, H)", (tokens, heads), q)
    for name, value in (("starts", starts), ("ends", ends)):
        _shaped(name, value, torch.int32, "(S,)", (tokens,), q)
    return tokens, kv.shape[0]


def paged(q: Tensor, kv_cache: Tensor, weights: Tensor, context_lens: Tensor, block_table: Tensor) -> int:
    """Dtypes, shapes and devices of the operands of ``paged_mqa_logits``. Returns B * next_n."""
    batch, next_n, heads, head_dim = _queries(q, "(B, next_n, H, D)")
    if not 1 <= next_n <= MAX_NEXT_N:
        raise ValueError(f"q: expected 1 to {MAX_NEXT_N} queries a sequence, got next_n = {next_n}")
    if check_kv_cache(kv_cache)[1] != head_dim:
        raise ValueError(
            f"kv_cache: expected keys of {head_dim} bytes to match q {tuple(q.shape)}, got {tuple(kv_cache.shape)}"
        )
    _device("kv_cache", kv_cache, q)
    _shaped("weights", weights, FLOAT32, "(B * next_n, H)", (batch * next_n, heads), q)
    if context_lens.dim() == 2:
        _shaped("context_lens", context_lens, torch.int32, "(B, next_n)", (batch, next_n), q)
    else:
        _shaped("context_lens", context_lens, torch.int32, "(B,)", (batch,), q)
    if block_table.dim() != 2:
        raise ValueError(f"block_table: expected shape (B, max_blocks), got {tuple(block_table.shape)}")
    _shaped("block_table", block_table, torch.int32, "(B, max_blocks)", (batch, block_table.shape[1]), q)
    return batch * next_n


def context_limit(max_context_len: int) -> None:
    if isinstance(max_context_len, bool) or not isinstance(max_context_len, int | torch.SymInt):
        raise TypeError(f"max_context_len: expected an int, got {type(max_context_len).__name__}")
    if not 0 <= max_context_len < 1 << 31:
        raise ValueError(f"max_context_len: expected 0 to 2**31 - 1 tokens, got {max_context_len}")


def _queries(q: Tensor, dimensions: str) -> torch.Size:
    if q.dtype is not FLOAT8:
        raise TypeError(f"q: expected float8_e4m3fn, got {q.dtype}")
    shape = q.shape
    if len(shape) != dimensions.count(",") + 1 or shape[-2] not in NUM_HEADS or shape[-1] not in HEAD_DIMS:
        raise ValueError(f"q: expected shape {dimensions} with H 32 or 64 and D 32, 64 or 128, got {tuple(shape)}")
    return shape


def _shaped(
    name: str, value: Tensor, dtype: torch.dtype, dimensions: str, shape: tuple[int, ...], like: Tensor
) -> None:
    if value.dtype is not dtype:
        raise TypeError(f"{name}: expected {str(dtype).removeprefix('torch.')}, got {value.dtype}")
    if value.shape != shape:
        raise ValueError(f"{name}: expected shape {dimensions} = {tuple(shape)}, got {tuple(value.shape)}")
    _device(name, value, like)


def _device(name: str, value: Tensor, q: Tensor) -> None:
    if value.device != q.device:
        raise ValueError(f"{name}: expected on {q.device} like q, got {value.device}")
