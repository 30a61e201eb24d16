"""The paged cache of keys of the lightning indexer (DeepSeek-V3.2, arXiv:2512.02556, section 2.1).

A cache is a contiguous uint8 tensor (num_blocks, 64, 1, D + 4) of blocks of 64 tokens. The first 64 * D bytes of a
block are the E4M3 values of its keys, token after token; the other 256 are their 64 float32 scales. Slot s is place
s % 64 of block s // 64. `append_kv` and the operator ``fp8moe::append_kv`` behind it fill it, `read_kv` reads it back.
"""

import torch
from torch import Tensor

from fp8moe.kernels.indexer import mqa_cache_plan as mqa_cache_cuda
from fp8moe.kernels.indexer import mqa_cache_reference
from fp8moe.quant.formats import SCALE_FORMATS, FP8Tensor
from fp8moe.quant.quantize import INPUT_DTYPES
from fp8moe.runtime.backend import use_cuda
from fp8moe.runtime.checks import check_tensor
from fp8moe.runtime.operators import define

BLOCK_TOKENS = 64
"""Tokens of a block of the cache."""

HEAD_DIMS = (32, 64, 128)
"""Sizes of a key that the indexer takes."""

_SCALE_BYTES = 4


def new_kv_cache(num_blocks: int, head_dim: int, *, device: torch.device | str) -> Tensor:
    """A cache for num_blocks * 64 keys of head_dim values: uint8 zeros (num_blocks, 64, 1, head_dim + 4).

    num_blocks: 0 or more. head_dim: 32, 64 or 128.
    Raises ValueError for another num_blocks or head_dim.
    """
    if num_blocks < 0:
        raise ValueError(f"num_blocks: expected 0 or more, got {num_blocks}")
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"head_dim: expected one of {HEAD_DIMS}, got {head_dim}")
    return torch.zeros((num_blocks, BLOCK_TOKENS, 1, head_dim + _SCALE_BYTES), dtype=torch.uint8, device=device)


def append_kv(kv_cache: Tensor, k: Tensor, slots: Tensor, *, scale_format: str = "float32") -> None:
    """Quantize keys, one scale each, and write them to their slots of the cache, in place.

    kv_cache: (num_blocks, 64, 1, D + 4) uint8, contiguous, from a multiple of 16 bytes on; D is 32, 64 or 128.
    k: (T, D) bfloat16, float16 or float32, any strides. Values and scales get the bits that `quantize_1x128` gives
        them. Quantization has no derivative: nothing is recorded for the autograd graph of k.
    slots: (T,) int32. A token whose slot is outside [0, num_blocks * 64) is left out. What a slot holds that several
        tokens share is unspecified; the other slots are not touched by it.
    scale_format: "float32", or "ue8m0" for scales rounded up to powers of two.

    Raises TypeError for a wrong type or dtype, ValueError for a wrong rank, size, device, memory layout or
    scale_format.
    """
    for name, value in (("kv_cache", kv_cache), ("k", k), ("slots", slots)):
        check_tensor(name, value)
    _append_kv_op(kv_cache, k.detach() if k.requires_grad else k, slots, scale_format)


def read_kv(kv_cache: Tensor, slots: Tensor) -> FP8Tensor:
    """The keys in some slots of a cache.

    kv_cache: (num_blocks, 64, 1, D + 4) uint8, contiguous; D is 32, 64 or 128.
    slots: (T,) int32. Those outside [0, num_blocks * 64) read as zeros, data and scale.
    Returns data (T, D) and scale (T,), contiguous: the `kv` of ``mqa_logits``.

    Raises TypeError for a wrong type or dtype, ValueError for a wrong rank, size, device or memory layout.
    """
    for name, value in (("kv_cache", kv_cache), ("slots", slots)):
        check_tensor(name, value)
    check_kv_cache(kv_cache)
    _check_slots(slots, None, kv_cache.device)
    return FP8Tensor(*mqa_cache_reference.read_kv(kv_cache, slots))


def check_kv_cache(kv_cache: Tensor) -> tuple[int, int]:
    """Dtype, shape and strides of a cache. Returns its number of blocks and D."""
    if kv_cache.dtype is not torch.uint8:
        raise TypeError(f"kv_cache: expected uint8, got {kv_cache.dtype}")
    shape = kv_cache.shape
    if len(shape) != 4 or shape[1] != BLOCK_TOKENS or shape[2] != 1 or shape[3] - _SCALE_BYTES not in HEAD_DIMS:
        raise ValueError(
            f"kv_cache: expected shape (num_blocks, {BLOCK_TOKENS}, 1, D + {_SCALE_BYTES}) with D one of {HEAD_DIMS}, "
            f"got {tuple(shape)}"
        )
    if not kv_cache.is_contiguous():
        raise ValueError(f"kv_cache: expected a contiguous tensor, got strides {kv_cache.stride()}")
    return shape[0], shape[3] - _SCALE_BYTES


def check_kv_cache_address(kv_cache: Tensor) -> None:
    """Not for fake tensors, which have no address."""
    if kv_cache.data_ptr() % 16:
        raise ValueError(f"kv_cache: expected to start at a multiple of 16 bytes, got address {kv_cache.data_ptr():#x}")


def _check(kv_cache: Tensor, k: Tensor, slots: Tensor, scale_format: str) -> None:
    _, head_dim = check_kv_cache(kv_cache)
    if k.dtype not in INPUT_DTYPES:
        raise TypeError(f"k: expected bfloat16, float16 or float32, got {k.dtype}")
    if k.dim() != 2 or k.shape[1] != head_dim:
        raise ValueError(f"k: expected shape (T, {head_dim}) to match the cache, got {tuple(k.shape)}")
    if k.device != kv_cache.device:
        raise ValueError(f"k: expected on {kv_cache.device} like kv_cache, got {k.device}")
    _check_slots(slots, k.shape[0], kv_cache.device)
    if scale_format not in SCALE_FORMATS:
        raise ValueError(f"scale_format: expected one of {SCALE_FORMATS}, got {scale_format!r}")


def _check_slots(slots: Tensor, tokens: int | None, device: torch.device) -> None:
    """Dtype, shape and device of slots; tokens: how many, None for any number."""
    if slots.dtype is not torch.int32:
        raise TypeError(f"slots: expected int32, got {slots.dtype}")
    if slots.dim() != 1 or (tokens is not None and slots.shape[0] != tokens):
        expected = "(T,)" if tokens is None else f"({tokens},)"
        raise ValueError(f"slots: expected shape {expected}, got {tuple(slots.shape)}")
    if slots.device != device:
        raise ValueError(f"slots: expected on {device} like kv_cache, got {slots.device}")


def _append_kv(kv_cache: Tensor, k: Tensor, slots: Tensor, scale_format: str) -> None:
    _check(kv_cache, k, slots, scale_format)
    check_kv_cache_address(kv_cache)
    backend = mqa_cache_cuda if use_cuda(k) else mqa_cache_reference
    backend.append_kv(kv_cache, k, slots, scale_format == "ue8m0")


_append_kv_op = define(
    "append_kv(Tensor(a!) kv_cache, Tensor k, Tensor slots, str scale_format) -> ()", _append_kv, _check
)
