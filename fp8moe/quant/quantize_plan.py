"""Launches of the quantization kernels. Arguments are checked by the callers; results equal `reference` bit for bit."""

import ctypes
import functools

import torch

from fp8moe.quant.formats import BLOCK, SCALE_DEFINES, align, ceil_div, empty_mn_major
from fp8moe.runtime.jit import KernelSpec, load
from fp8moe.runtime.launch import PointerLauncher, current_stream, device_guard

INPUT_TYPES = {torch.bfloat16: "BFloat16", torch.float16: "Float16", torch.float32: "Float32"}

# Of the kernels in fp8moe/cuda: rows or columns of a tile, tiles and threads of a block.
_ROWS_PER_WARP, _ROW_WARPS = 8, 4
_COLUMNS = 64
_THREADS = {"quantize_1x128": 128, "quantize_128x128": 256, "quantize_128x1": 256}


def quantizer_defines(
    dtype: torch.dtype, *, ue8m0: bool = False, vector: bool = True
) -> tuple[tuple[str, int | str], ...]:
    """What cuda/quantize.cuh wants defined.

    dtype: of the input. ue8m0: scales are rounded up to powers of two. vector: rows of the input start at multiples of
    16 bytes and are multiples of 16 bytes long.
    """
    return (("INPUT", INPUT_TYPES[dtype]), ("UE8M0", int(ue8m0)), ("VECTOR", int(vector)), *SCALE_DEFINES)


def kernel_spec(name: str, dtype: torch.dtype, ue8m0: bool, vector: bool) -> KernelSpec:
    """The kernel "quantize_1x128", "quantize_128x128" or "quantize_128x1"; see `quantizer_defines`."""
    return KernelSpec(f"{name}.cu", name, quantizer_defines(dtype, ue8m0=ue8m0, vector=vector))


@functools.lru_cache(maxsize=4096)
def _plan(
    name: str,
    dtype: torch.dtype,
    ue8m0: bool,
    vector: bool,
    blocks: int,
    sizes: tuple[int, ...],
    device_index: int,
) -> PointerLauncher:
    """The launcher for an input, data and scale, in this order; data at a multiple of 16 bytes.

    Args:
        name, dtype, ue8m0, vector: see `kernel_spec`.
        blocks: the grid.
        sizes: the arguments after the pointers.
        device_index: of the current device.
    """
    return PointerLauncher(
        load(kernel_spec(name, dtype, ue8m0, vector)),
        grid=blocks,
        block=_THREADS[name],
        pointers=3,
        args=tuple(map(ctypes.c_int64, sizes)),
    )


def _launch(plan: PointerLauncher, x: torch.Tensor, data: torch.Tensor, scale: torch.Tensor) -> None:
    plan.launch(current_stream(x.get_device()), x.data_ptr(), data.data_ptr(), scale.data_ptr())


def quantize_1x128(x: torch.Tensor, ue8m0: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """x (M, K) -> data (M, K), MN-major scale (M, ceil(K/128))."""
    m, k = x.shape
    data = torch.empty((m, k), dtype=torch.float8_e4m3fn, device=x.device)
    scale = empty_mn_major(m, ceil_div(k, BLOCK), device=x.device)
    if data.numel():
        x = unit_stride(x)
        with device_guard(x.get_device()):
            _launch(plan_1x128(x, ue8m0), x, data, scale)
    return data, scale


def plan_1x128(x: torch.Tensor, ue8m0: bool) -> PointerLauncher:
    """The launcher for x (M, K), data and scale, in this order, on the current device.

    x is not empty and has stride 1 along K. The launcher takes others of its layout too, if they start at a multiple of
    16 bytes where it does. It writes data (M, K), contiguous and at a multiple of 16 bytes, and the scale of row i and
    K block j to element i + j * align(M, 4) of scale.
    """
    m, k = x.shape
    stride = x.stride(0)
    k_blocks = ceil_div(k, BLOCK)
    blocks = ceil_div(ceil_div(m, _ROWS_PER_WARP) * k_blocks, _ROW_WARPS)
    vector = _vector(x.data_ptr(), x.element_size(), k | stride)
    sizes = (m, k, stride, align(m, 4), k_blocks)
    return _plan("quantize_1x128", x.dtype, ue8m0, vector, blocks, sizes, x.get_device())


def quantize_128x128(w: torch.Tensor, ue8m0: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """w (E, N, K) -> data (E, N, K), scale (E, ceil(N/128), ceil(K/128)), both contiguous."""
    experts, n, k = w.shape
    n_blocks, k_blocks = ceil_div(n, BLOCK), ceil_div(k, BLOCK)
    data = torch.empty((experts, n, k), dtype=torch.float8_e4m3fn, device=w.device)
    scale = torch.empty((experts, n_blocks, k_blocks), dtype=torch.float32, device=w.device)
    if data.numel():
        w = unit_stride(w)
        expert_stride, stride, _ = w.stride()
        index = w.get_device()
        vector = _vector(w.data_ptr(), w.element_size(), k | stride | expert_stride)
        sizes = (n, k, expert_stride, stride, n_blocks, k_blocks)
        with device_guard(index):
            _launch(_plan("quantize_128x128", w.dtype, ue8m0, vector, scale.numel(), sizes, index), w, data, scale)
    return data, scale


def quantize_128x1(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x (K, M) -> data (M, K), MN-major scale (M, ceil(K/128))."""
    k, m = x.shape
    if x.stride(0) == 1 and k > 1:
        return quantize_1x128(x.t(), False)
    k_blocks = ceil_div(k, BLOCK)
    data = torch.empty((m, k), dtype=torch.float8_e4m3fn, device=x.device)
    scale = empty_mn_major(m, k_blocks, device=x.device)
    if data.numel():
        x = unit_stride(x)
        stride = x.stride(0)
        index = x.get_device()
        m_tiles = ceil_div(m, _COLUMNS)
        vector = _vector(x.data_ptr(), x.element_size(), m | stride)
        sizes = (k, m, stride, align(m, 4), m_tiles)
        with device_guard(index):
            _launch(_plan("quantize_128x1", x.dtype, False, vector, k_blocks * m_tiles, sizes, index), x, data, scale)
    return data, scale


def unit_stride(x: torch.Tensor) -> torch.Tensor:
    """x itself, or a contiguous copy where its last dimension is strided."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _vector(address: int, element_size: int, lengths: int) -> bool:
    """Whether every row is a whole number of 16-byte vectors: `lengths` is the bitwise or of a row's length and the
    strides, in elements."""
    return not (address | lengths * element_size) & 15
