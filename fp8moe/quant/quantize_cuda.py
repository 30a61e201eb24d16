"""Launches of the quantization kernels. Arguments are checked by the callers; results equal `reference` bit for bit."""

import functools

import torch

from fp8moe.kernels.jit import KernelSpec, load
from fp8moe.kernels.launch import Launcher, current_stream, device_guard
from fp8moe.quant.formats import BLOCK, align, ceil_div, empty_mn_major

INPUT_TYPES = {torch.bfloat16: "BFloat16", torch.float16: "Float16", torch.float32: "Float32"}

# Of the kernels in fp8moe/cuda: rows or columns of a tile, tiles and threads of a block.
_ROWS_PER_WARP, _ROW_WARPS = 8, 4
_COLUMNS = 64
_THREADS = {"quantize_1x128": 128, "quantize_128x128": 256, "quantize_128x1": 256}


def kernel_spec(name: str, dtype: torch.dtype, ue8m0: bool, vector: bool) -> KernelSpec:
    """The kernel "quantize_1x128", "quantize_128x128" or "quantize_128x1" for one input dtype and scale format.

    vector: rows of the input start at multiples of 16 bytes and are multiples of 16 bytes long.
    """
    defines = (("INPUT", INPUT_TYPES[dtype]), ("UE8M0", int(ue8m0)), ("VECTOR", int(vector)))
    return KernelSpec(f"{name}.cu", name, defines)


def quantize_1x128(x: torch.Tensor, ue8m0: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """x (M, K) -> data (M, K), MN-major scale (M, ceil(K/128))."""
    m, k = x.shape
    data = torch.empty((m, k), dtype=torch.float8_e4m3fn, device=x.device)
    scale = empty_mn_major(m, ceil_div(k, BLOCK), device=x.device)
    if data.numel():
        index = x.get_device()
        with device_guard(index):
            quantize_1x128_into(
                _unit_stride(x),
                data.data_ptr(),
                scale.data_ptr(),
                align(m, 4),
                ue8m0=ue8m0,
                stream=current_stream(index),
            )
    return data, scale


def quantize_1x128_into(
    x: torch.Tensor, data_ptr: int, scale_ptr: int, scale_pitch: int, *, ue8m0: bool = False, stream, pdl: bool = False
) -> None:
    """Quantize x (M, K), not empty and with stride 1 along K, into memory of the caller on the same device.

    data_ptr: M * K bytes, data (M, K) contiguous; a multiple of 16.
    scale_ptr: float32, scale of row i and K block j at i + j * scale_pitch; scale_pitch >= M.
    stream: from `launch.current_stream`. x's device must be current (`launch.device_guard`).
    pdl: start before the kernel ahead in the stream has finished (programmatic dependent launch).
    """
    m, k = x.shape
    stride = x.stride(0)
    address = x.data_ptr()
    k_blocks = ceil_div(k, BLOCK)
    blocks = ceil_div(ceil_div(m, _ROWS_PER_WARP) * k_blocks, _ROW_WARPS)
    vector = _vector(address, x.element_size(), k | stride)
    launcher = _launcher("quantize_1x128", x.dtype, ue8m0, vector, blocks, pdl, x.get_device())
    launcher.launch(stream, address, data_ptr, scale_ptr, m, k, stride, scale_pitch, k_blocks)


def quantize_128x128(w: torch.Tensor, ue8m0: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """w (E, N, K) -> data (E, N, K), scale (E, ceil(N/128), ceil(K/128)), both contiguous."""
    experts, n, k = w.shape
    n_blocks, k_blocks = ceil_div(n, BLOCK), ceil_div(k, BLOCK)
    data = torch.empty((experts, n, k), dtype=torch.float8_e4m3fn, device=w.device)
    scale = torch.empty((experts, n_blocks, k_blocks), dtype=torch.float32, device=w.device)
    if data.numel():
        w = _unit_stride(w)
        expert_stride, stride, _ = w.stride()
        index = w.get_device()
        vector = _vector(w.data_ptr(), w.element_size(), k | stride | expert_stride)
        with device_guard(index):
            _launcher("quantize_128x128", w.dtype, ue8m0, vector, scale.numel(), False, index).launch(
                current_stream(index),
                w.data_ptr(),
                data.data_ptr(),
                scale.data_ptr(),
                n,
                k,
                expert_stride,
                stride,
                n_blocks,
                k_blocks,
            )
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
        x = _unit_stride(x)
        stride = x.stride(0)
        index = x.get_device()
        m_tiles = ceil_div(m, _COLUMNS)
        vector = _vector(x.data_ptr(), x.element_size(), m | stride)
        with device_guard(index):
            _launcher("quantize_128x1", x.dtype, False, vector, k_blocks * m_tiles, False, index).launch(
                current_stream(index),
                x.data_ptr(),
                data.data_ptr(),
                scale.data_ptr(),
                k,
                m,
                stride,
                align(m, 4),
                m_tiles,
            )
    return data, scale


def _unit_stride(x: torch.Tensor) -> torch.Tensor:
    """x itself, or a contiguous copy where its last dimension is strided."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _vector(address: int, element_size: int, lengths: int) -> bool:
    """Whether every row is a whole number of 16-byte vectors: `lengths` is the bitwise or of a row's length and the
    strides, in elements."""
    return not (address | lengths * element_size) & 15


@functools.lru_cache(maxsize=1024)
def _launcher(
    name: str, dtype: torch.dtype, ue8m0: bool, vector: bool, blocks: int, pdl: bool, device_index: int
) -> Launcher:
    """One launch plan; the device, which must be current, is part of the key because a `Launcher` belongs to one."""
    return Launcher(load(kernel_spec(name, dtype, ue8m0, vector)), grid=blocks, block=_THREADS[name], pdl=pdl)
