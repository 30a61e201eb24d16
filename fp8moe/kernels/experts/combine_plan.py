"""Launches ``cuda/combine.cu``."""

import ctypes

import torch
from torch import Tensor

from fp8moe.quant.formats import ceil_div
from fp8moe.quant.quantize_plan import INPUT_TYPES, input_defines
from fp8moe.runtime.checks import aligned
from fp8moe.runtime.hopper import WARP
from fp8moe.runtime.jit import KernelSpec, load
from fp8moe.runtime.launch import PointerLauncher, current_stream, device_guard
from fp8moe.runtime.plans import PlanCache

_WARPS = 4  # of a thread block

_plans: PlanCache[PointerLauncher] = PlanCache()


def _warp_columns(y_dtype: torch.dtype) -> int:
    """Columns that a warp takes: 16 bytes for each lane."""
    return WARP * 16 // y_dtype.itemsize


def kernel_spec(hidden: int, y_dtype: torch.dtype, weight_dtype: torch.dtype, out_dtype: torch.dtype) -> KernelSpec:
    """The kernel for rows of `hidden` columns and these dtypes."""
    types = (("WEIGHT", INPUT_TYPES[weight_dtype]), ("OUTPUT", INPUT_TYPES[out_dtype]))
    sizes = (("WARPS", _WARPS), ("WARP_COLUMNS", _warp_columns(y_dtype)), ("HIDDEN", hidden))
    return KernelSpec("combine.cu", "combine", (*input_defines(y_dtype), *types, *sizes))


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
) -> PointerLauncher:
    """The launcher for y (num_rows, hidden), rows and weights (tokens, top_k), residual and out (tokens, hidden).

    In this order; the residual may be 0 for none. tokens and hidden are not 0, all tensors contiguous, y, residual and
    out at multiples of 16 bytes, and `device_index` is that of the current device. pdl: start before the kernel ahead
    has ended; nothing is read or written before it has.
    """
    return _plans.get(
        (tokens, hidden, top_k, num_rows, y_dtype, weight_dtype, out_dtype, device_index, pdl),
        lambda: PointerLauncher(
            load(kernel_spec(hidden, y_dtype, weight_dtype, out_dtype)),
            grid=ceil_div(tokens * ceil_div(hidden, _warp_columns(y_dtype)), _WARPS),
            block=_WARPS * WARP,
            pdl=pdl,
            pointers=5,
            args=tuple(map(ctypes.c_uint32, (tokens, top_k, num_rows))),
        ),
    )


def combine(y: Tensor, rows: Tensor, weights: Tensor, out_dtype: torch.dtype, residual: Tensor | None = None) -> Tensor:
    """The result of operands in any layout, as ``experts.combine`` describes it."""
    (num_rows, hidden), (tokens, top_k) = y.shape, rows.shape
    out = torch.empty((tokens, hidden), dtype=out_dtype, device=y.device)
    if out.numel():
        operands = (
            aligned(y),
            rows.contiguous(),
            weights.contiguous(),
            residual if residual is None else aligned(residual),
            out,
        )
        device_index = y.get_device()
        with device_guard(device_index):
            plan(tokens, hidden, top_k, num_rows, y.dtype, weights.dtype, out_dtype, device_index).launch(
                current_stream(device_index), *(0 if operand is None else operand.data_ptr() for operand in operands)
            )
    return out
