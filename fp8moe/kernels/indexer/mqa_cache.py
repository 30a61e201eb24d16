"""The paged cache of keys of the lightning indexer, DeepSeek-V3.2, arXiv:2512.02556, section 2.1."""

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

from fp8moe.kernels.indexer import checks, reference
from fp8moe.kernels.indexer.checks import BLOCK_TOKENS, HEAD_DIMS, SCALE_BYTES
from fp8moe.quant.formats import FP8Tensor, ceil_div
from fp8moe.quant.quantize import quantizer_defines
from fp8moe.runtime.autograd import detached
from fp8moe.runtime.checks import check_address, check_tensor, row_major
from fp8moe.runtime.jit import KernelSpec, load
from fp8moe.runtime.launch import PointerLauncher, planned
from fp8moe.runtime.operator import operator
from fp8moe.runtime.sm90 import WARP

_WARPS = 4  # warps of a thread block
_LANE_BYTES = 16  # bytes of a key that one lane loads


def new_kv_cache(num_blocks: int, head_dim: int, *, device: torch.device | str) -> Tensor:
    """Return a cache for num_blocks * 64 keys of D = head_dim values: uint8 zeros (num_blocks, 64, 1, D + 4).

    The first 64 * D bytes of a block are the E4M3 values of its 64 keys, one key after the other; the last 256 bytes
    are their 64 float32 scales. Slot s is key s % 64 of block s // 64.

    num_blocks: 0 or more. head_dim: 32, 64 or 128.
    Raises ValueError for any other num_blocks or head_dim.
    """
    if num_blocks < 0:
        raise ValueError(f"num_blocks: expected 0 or more, got {num_blocks}")
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"head_dim: expected one of {HEAD_DIMS}, got {head_dim}")
    return torch.zeros((num_blocks, BLOCK_TOKENS, 1, head_dim + SCALE_BYTES), dtype=torch.uint8, device=device)


def append_kv(kv_cache: Tensor, k: Tensor, slots: Tensor, *, scale_format: str = "float32") -> None:
    """Quantize keys, with one scale per key, and write them to their slots of the cache, in place.

    kv_cache: (num_blocks, 64, 1, D + 4) uint8, contiguous, at a multiple of 16 bytes; D is 32, 64 or 128.
    k: (T, D) bfloat16, float16 or float32, any strides. Keys are quantized bitwise as by `quantize_1x128`.
        Quantization has no derivative: nothing is recorded for the autograd graph of k.
    slots: (T,) int32. A key whose slot is outside [0, num_blocks * 64) is not written. If several keys have the same
        slot, the contents of that slot alone are unspecified.
    scale_format: "float32", or "ue8m0" for scales rounded up to powers of two.

    Raises TypeError for a wrong type or dtype, ValueError for a wrong rank, size, device, memory layout or
    scale_format.
    """
    for name, value in (("kv_cache", kv_cache), ("k", k), ("slots", slots)):
        check_tensor(name, value)
    _append_kv(kv_cache, detached(k), slots, scale_format)


def read_kv(kv_cache: Tensor, slots: Tensor) -> FP8Tensor:
    """Return the keys in the given slots of a cache.

    kv_cache: (num_blocks, 64, 1, D + 4) uint8, contiguous; D is 32, 64 or 128.
    slots: (T,) int32. A slot outside [0, num_blocks * 64) gives zeros for data and scale.
    Returns data (T, D) and scale (T,), contiguous, which ``mqa_logits`` takes as `kv`.

    Raises TypeError for a wrong type or dtype, ValueError for a wrong rank, size, device or memory layout.
    """
    for name, value in (("kv_cache", kv_cache), ("slots", slots)):
        check_tensor(name, value)
    checks.cache(kv_cache)
    checks.cache_slots(slots, None, kv_cache.device)
    return FP8Tensor(*reference.read_kv(kv_cache, slots))


def kernel_spec(head_dim: int, dtype: torch.dtype, ue8m0: bool) -> KernelSpec:
    """Return the kernel that quantizes keys of `head_dim` values in `dtype` and writes them to the cache."""
    constants = {
        "HEAD_DIM": head_dim,
        "BLOCK_TOKENS": BLOCK_TOKENS,
        "WARPS": _WARPS,
        "TOKENS": _tokens_per_block(head_dim, dtype),
    }
    return KernelSpec("append_kv.cu", "append_kv", (*quantizer_defines(dtype, ue8m0=ue8m0), *constants.items()))


def _tokens_per_block(head_dim: int, dtype: torch.dtype) -> int:
    return _WARPS * WARP * _LANE_BYTES // (head_dim * dtype.itemsize)


@planned
def launcher(device_index: int, kv_cache: Tensor, k: Tensor, slots: Tensor, scale_format: str) -> PointerLauncher:
    """Return the launcher of append_kv.cu, to be called with (k, slots, kv_cache).

    k (T, D) must have its rows at multiples of 16 bytes; slots must be contiguous.
    """
    tokens, head_dim = k.shape
    return PointerLauncher(
        load(kernel_spec(head_dim, k.dtype, scale_format == "ue8m0")),
        grid=ceil_div(tokens, _tokens_per_block(head_dim, k.dtype)),
        block=_WARPS * WARP,
        pointers=3,
        args=tuple(map(ctypes.c_int64, (tokens, k.stride(0), kv_cache.shape[0] * BLOCK_TOKENS))),
    )


def _ready(kv_cache: Tensor, k: Tensor, slots: Tensor, scale_format: str) -> Callable[..., None] | None:
    """Return a function that launches without checks; None if operands in these layouts were not checked before."""
    launch = launcher.find(k.get_device(), kv_cache, k, slots, scale_format)
    if launch is None or (kv_cache.data_ptr() | k.data_ptr()) % 16:
        return None
    return lambda *_: launch(k, slots, kv_cache)


def _launch(kv_cache: Tensor, k: Tensor, slots: Tensor, scale_format: str) -> None:
    check_address("kv_cache", kv_cache)
    if k.shape[0] and kv_cache.shape[0]:
        k, slots = row_major(k), slots.contiguous()
        launcher(k.get_device(), kv_cache, k, slots, scale_format)(k, slots, kv_cache)


def _reference(kv_cache: Tensor, k: Tensor, slots: Tensor, scale_format: str) -> None:
    check_address("kv_cache", kv_cache)
    reference.append_kv(kv_cache, k, slots, scale_format == "ue8m0")


_append_kv = operator(
    "append_kv -> ()",
    check=checks.append,
    quick=_ready,
    cuda=_launch,
    reference=_reference,
    fake=lambda *operands: None,
)
