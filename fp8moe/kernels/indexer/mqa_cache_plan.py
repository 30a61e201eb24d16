"""Launches ``cuda/append_kv.cu``."""

import ctypes

import torch
from torch import Tensor

from fp8moe.kernels.indexer.checks import BLOCK_TOKENS
from fp8moe.quant.formats import ceil_div
from fp8moe.quant.quantize import quantizer_defines
from fp8moe.runtime.jit import KernelSpec, load
from fp8moe.runtime.launch import PointerLauncher, current_stream, device_guard
from fp8moe.runtime.plans import PlanCache
from fp8moe.runtime.sm90 import WARP

_WARPS = 4  # of a thread block
_LANE_BYTES = 16  # of a key


def _tokens_at_once(head_dim: int, dtype: torch.dtype) -> int:
    """Tokens that a thread block takes."""
    return _WARPS * WARP * _LANE_BYTES // (head_dim * dtype.itemsize)


def kernel_spec(head_dim: int, dtype: torch.dtype, ue8m0: bool) -> KernelSpec:
    """The kernel for keys of `head_dim` columns and `dtype`."""
    constants = {
        "HEAD_DIM": head_dim,
        "BLOCK_TOKENS": BLOCK_TOKENS,
        "WARPS": _WARPS,
        "TOKENS": _tokens_at_once(head_dim, dtype),
    }
    return KernelSpec("append_kv.cu", "append_kv", (*quantizer_defines(dtype, ue8m0=ue8m0), *constants.items()))


_plans: PlanCache[PointerLauncher] = PlanCache()


def append_kv(kv_cache: Tensor, k: Tensor, slots: Tensor, ue8m0: bool) -> None:
    """Write k (T, D) and slots (T,) in any layout into the cache, as ``mqa_cache.append_kv`` describes it."""
    num_slots = kv_cache.shape[0] * kv_cache.shape[1]
    tokens, head_dim = k.shape
    if not tokens or not num_slots:
        return
    k, slots = _vectors(k), slots.contiguous()
    row_stride, dtype, device_index = k.stride(0), k.dtype, k.get_device()

    def build() -> PointerLauncher:
        return PointerLauncher(
            load(kernel_spec(head_dim, dtype, ue8m0)),
            grid=ceil_div(tokens, _tokens_at_once(head_dim, dtype)),
            block=_WARPS * WARP,
            pointers=3,
            args=tuple(map(ctypes.c_int64, (tokens, row_stride, num_slots))),
        )

    with device_guard(device_index):
        plan = _plans.get((tokens, head_dim, row_stride, num_slots, dtype, ue8m0, device_index), build)
        plan.launch(current_stream(device_index), k.data_ptr(), slots.data_ptr(), kv_cache.data_ptr())


def _vectors(k: Tensor) -> Tensor:
    """k with every row contiguous and at a multiple of 16 bytes: itself where it lies so, otherwise a copy."""
    row, column = k.stride()
    if column != 1 or (k.data_ptr() | row * k.element_size()) % 16:
        return k.clone(memory_format=torch.contiguous_format)
    return k
