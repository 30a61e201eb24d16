"""Launches ``cuda/combine.cu``."""

import ctypes
import functools

import torch
from torch import Tensor

from fp8moe.kernels.jit import KernelSpec, load
from fp8moe.kernels.launch import Launcher, current_stream, device_guard
from fp8moe.quant.formats import ceil_div
from fp8moe.quant.quantize_cuda import INPUT_TYPES

# Of the kernel: warps of a block, bytes of a row of y that a warp takes.
_WARPS, _CHUNK_BYTES = 4, 512


def kernel_spec(hidden: int, y_dtype: torch.dtype, weight_dtype: torch.dtype, out_dtype: torch.dtype) -> KernelSpec:
    """The kernel for rows of `hidden` columns and these dtypes."""
    types = zip(("INPUT", "WEIGHT", "OUTPUT"), (y_dtype, weight_dtype, out_dtype), strict=True)
    defines = (*((name, INPUT_TYPES[dtype]) for name, dtype in types), ("UE8M0", 0), ("VECTOR", 1), ("HIDDEN", hidden))
    return KernelSpec("combine.cu", "combine", defines)


class Plan:
    """The kernel with every argument but the four pointers. Build it with its device current; see `plan`."""

    def __init__(
        self,
        tokens: int,
        hidden: int,
        top_k: int,
        num_rows: int,
        y_dtype: torch.dtype,
        weight_dtype: torch.dtype,
        out_dtype: torch.dtype,
        pdl: bool,
    ):
        self._y, self._rows, self._weights, self._out = pointers = [ctypes.c_int64() for _ in range(4)]
        self._launcher = Launcher(
            load(kernel_spec(hidden, y_dtype, weight_dtype, out_dtype)),
            grid=ceil_div(tokens * ceil_div(hidden * y_dtype.itemsize, _CHUNK_BYTES), _WARPS),
            block=_WARPS * 32,
            pdl=pdl,
            args=(*pointers, *map(ctypes.c_uint32, (tokens, top_k, num_rows))),
        )

    def launch(self, stream: int, y: int, rows: int, weights: int, out: int) -> None:
        """Enqueue the kernel for operands and a result at these addresses; `y` and `out` are multiples of 16."""
        launcher = self._launcher
        with launcher.lock:
            self._y.value = y
            self._rows.value = rows
            self._weights.value = weights
            self._out.value = out
            launcher.launch(stream)


@functools.lru_cache(maxsize=4096)
def plan(
    tokens: int,
    hidden: int,
    top_k: int,
    num_rows: int,
    y_dtype: torch.dtype,
    weight_dtype: torch.dtype,
    out_dtype: torch.dtype,
    device_index: int,
    *,
    pdl: bool = False,
) -> Plan:
    """The plan for y (num_rows, hidden), rows and weights (tokens, top_k), out (tokens, hidden) on the current device.

    tokens and hidden are not 0, all tensors contiguous, and `device_index` is that of the device. pdl: start before the
    kernel ahead has ended; nothing is read or written before it has.
    """
    return Plan(tokens, hidden, top_k, num_rows, y_dtype, weight_dtype, out_dtype, pdl)


def combine(y: Tensor, rows: Tensor, weights: Tensor, out_dtype: torch.dtype) -> Tensor:
    """The result of operands in any layout, as ``kernels.combine`` describes it."""
    (num_rows, hidden), (tokens, top_k) = y.shape, rows.shape
    out = torch.empty((tokens, hidden), dtype=out_dtype, device=y.device)
    if out.numel():
        y, rows, weights = _vectors(y), rows.contiguous(), weights.contiguous()
        device_index = y.get_device()
        with device_guard(device_index):
            plan(tokens, hidden, top_k, num_rows, y.dtype, weights.dtype, out_dtype, device_index).launch(
                current_stream(device_index), y.data_ptr(), rows.data_ptr(), weights.data_ptr(), out.data_ptr()
            )
    return out


def _vectors(y: Tensor) -> Tensor:
    """y contiguous, at a multiple of 16 bytes: itself where it lies so, otherwise a copy."""
    y = y.contiguous()
    return y.clone() if y.data_ptr() & 15 else y
