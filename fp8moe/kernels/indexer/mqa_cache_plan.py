"""Launches ``cuda/append_kv.cu``."""

import ctypes
import functools

import torch
from torch import Tensor

from fp8moe.quant.formats import ceil_div
from fp8moe.quant.quantize_plan import quantizer_defines, unit_stride
from fp8moe.runtime.jit import KernelSpec, load
from fp8moe.runtime.launch import PointerLauncher, current_stream, device_guard

# Of the kernel: threads of a block, bytes of a key that a thread takes.
_THREADS, _VECTOR_BYTES = 128, 16


def kernel_spec(head_dim: int, dtype: torch.dtype, ue8m0: bool) -> KernelSpec:
    """The kernel for keys of `head_dim` columns and `dtype`."""
    defines = (*quantizer_defines(dtype, ue8m0=ue8m0), ("HEAD_DIM", head_dim))
    return KernelSpec("append_kv.cu", "append_kv", defines)


@functools.lru_cache(maxsize=4096)
def plan(
    tokens: int, head_dim: int, row_stride: int, num_slots: int, dtype: torch.dtype, ue8m0: bool, device_index: int
) -> PointerLauncher:
    """The launcher for k, slots and the cache, in this order; k (tokens, head_dim) of `dtype`, tokens not 0.

    row_stride: from one key to the next, in elements, a multiple of 16 bytes; within a key the stride is 1. slots
    (tokens,) is contiguous, k and the cache are at multiples of 16 bytes. num_slots: tokens for which the cache has
    room. device_index: of the current device.
    """
    return PointerLauncher(
        load(kernel_spec(head_dim, dtype, ue8m0)),
        grid=ceil_div(tokens * head_dim * dtype.itemsize, _THREADS * _VECTOR_BYTES),
        block=_THREADS,
        pointers=3,
        args=tuple(map(ctypes.c_int64, (tokens, row_stride, num_slots))),
    )


def append_kv(kv_cache: Tensor, k: Tensor, slots: Tensor, ue8m0: bool) -> None:
    """Write k (T, D) and slots (T,) in any layout into the cache, as ``kernels.mqa_cache`` describes it."""
    num_slots = kv_cache.shape[0] * kv_cache.shape[1]
    tokens, head_dim = k.shape
    if tokens and num_slots:
        k, slots = _vectors(k), slots.contiguous()
        device_index = k.get_device()
        with device_guard(device_index):
            plan(tokens, head_dim, k.stride(0), num_slots, k.dtype, ue8m0, device_index).launch(
                current_stream(device_index), k.data_ptr(), slots.data_ptr(), kv_cache.data_ptr()
            )


def _vectors(k: Tensor) -> Tensor:
    """k with every row at a multiple of 16 bytes: itself where it lies so, otherwise a copy."""
    k = unit_stride(k)
    if (k.data_ptr() | k.stride(0) * k.element_size()) & 15:
        return k.clone(memory_format=torch.contiguous_format)
    return k
