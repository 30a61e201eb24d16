"""Launches of the quantization kernels. Arguments are checked by the callers; results equal `reference` bit for bit."""

import ctypes

import torch

from fp8moe.quant.formats import BLOCK, SCALE_DEFINES, align, ceil_div, empty_mn_major
from fp8moe.runtime.jit import KernelSpec, load
from fp8moe.runtime.launch import PointerLauncher, current_stream, device_guard
from fp8moe.runtime.plans import PlanCache
from fp8moe.runtime.sm90 import WARP

INPUT_TYPES = {torch.bfloat16: "BFloat16", torch.float16: "Float16", torch.float32: "Float32"}


# Constants of each kernel: warps of a thread block, and what one of them, or all together, take.
_CONSTANTS = {
    "quantize_1x128": {"WARPS": 4, "ROWS_PER_WARP": 8},
    "quantize_128x128": {"WARPS": 8},
    "quantize_128x1": {"WARPS": 8, "COLUMNS": 64},
}


def input_defines(dtype: torch.dtype, *, vector: bool = True) -> tuple[tuple[str, int | str], ...]:
    """What cuda/input.cuh wants defined.

    dtype: of the input. vector: its rows start at multiples of 16 bytes and are multiples of 16 bytes long.
    """
    return ("INPUT", INPUT_TYPES[dtype]), ("VECTOR", int(vector))


def quantizer_defines(
    dtype: torch.dtype, *, ue8m0: bool = False, vector: bool = True
) -> tuple[tuple[str, int | str], ...]:
    """What cuda/quantize.cuh wants defined. ue8m0: scales are rounded up to powers of two."""
    return (*input_defines(dtype, vector=vector), ("UE8M0", int(ue8m0)), *SCALE_DEFINES)


def kernel_spec(name: str, dtype: torch.dtype, ue8m0: bool, vector: bool) -> KernelSpec:
    """The kernel "quantize_1x128", "quantize_128x128" or "quantize_128x1"; the rest as for `quantizer_defines`."""
    defines = quantizer_defines(dtype, ue8m0=ue8m0, vector=vector)
    return KernelSpec(f"{name}.cu", name, (*defines, *_CONSTANTS[name].items()))


_plans: PlanCache[PointerLauncher] = PlanCache()


def _plan(name: str, x: torch.Tensor, lengths: int, ue8m0: bool, grid: int, sizes: tuple[int, ...]) -> PointerLauncher:
    """The launcher for an input like x, data and scale, in this order; data at a multiple of 16 bytes.

    lengths: bitwise or of the length of a row of x and of its strides, in elements. grid: thread blocks. sizes: the
    arguments after the pointers.
    """
    vector = not (x.data_ptr() | lengths * x.element_size()) & 15
    key = (name, x.dtype, ue8m0, vector, grid, sizes, x.get_device())
    return _plans.get(
        key,
        lambda: PointerLauncher(
            load(kernel_spec(name, x.dtype, ue8m0, vector)),
            grid=grid,
            block=_CONSTANTS[name]["WARPS"] * WARP,
            pointers=3,
            args=tuple(map(ctypes.c_int64, sizes)),
        ),
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
    constants = _CONSTANTS["quantize_1x128"]
    grid = ceil_div(ceil_div(m, constants["ROWS_PER_WARP"]) * k_blocks, constants["WARPS"])
    return _plan("quantize_1x128", x, k | stride, ue8m0, grid, (m, k, stride, align(m, 4), k_blocks))


def quantize_128x128(w: torch.Tensor, ue8m0: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """w (E, N, K) -> data (E, N, K), scale (E, ceil(N/128), ceil(K/128)), both contiguous."""
    experts, n, k = w.shape
    n_blocks, k_blocks = ceil_div(n, BLOCK), ceil_div(k, BLOCK)
    data = torch.empty((experts, n, k), dtype=torch.float8_e4m3fn, device=w.device)
    scale = torch.empty((experts, n_blocks, k_blocks), dtype=torch.float32, device=w.device)
    if data.numel():
        w = unit_stride(w)
        expert_stride, stride, _ = w.stride()
        sizes = (n, k, expert_stride, stride, k_blocks)
        with device_guard(w.get_device()):
            plan = _plan("quantize_128x128", w, k | stride | expert_stride, ue8m0, scale.numel(), sizes)
            _launch(plan, w, data, scale)
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
        m_tiles = ceil_div(m, _CONSTANTS["quantize_128x1"]["COLUMNS"])
        with device_guard(x.get_device()):
            sizes = (k, m, stride, align(m, 4), m_tiles)
            _launch(_plan("quantize_128x1", x, m | stride, False, k_blocks * m_tiles, sizes), x, data, scale)
    return data, scale


def unit_stride(x: torch.Tensor) -> torch.Tensor:
    """x itself, or a contiguous copy where its last dimension is strided."""
    return x if x.stride(-1) == 1 else x.contiguous()
