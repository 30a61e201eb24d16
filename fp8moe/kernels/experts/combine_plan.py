"""Launches ``cuda/combine.cu``."""

import ctypes

import torch
from torch import Tensor

from fp8moe.kernels.experts.routing import INDEX_TYPES
from fp8moe.quant.formats import ceil_div
from fp8moe.quant.quantize_plan import INPUT_TYPES, input_defines
from fp8moe.runtime.checks import aligned
from fp8moe.runtime.jit import KernelSpec, load
from fp8moe.runtime.launch import PointerLauncher, current_stream, device_guard, resident_blocks
from fp8moe.runtime.plans import PlanCache
from fp8moe.runtime.sm90 import WARP

_WARPS = 4  # of a thread block
_BLOCKS_PER_SM = 8  # as many as run at once


class _Sizes(ctypes.Structure):
    """``struct Sizes`` of the kernel."""

    _fields_ = tuple((name, ctypes.c_uint32) for name in ("tokens", "top_k", "bound", "warps"))


_plans: PlanCache[PointerLauncher] = PlanCache()


def _warp_columns(y_dtype: torch.dtype) -> int:
    """Columns that a warp takes at a time: 16 bytes for each lane."""
    return WARP * 16 // y_dtype.itemsize


def kernel_spec(
    hidden: int,
    y_dtype: torch.dtype,
    weight_dtype: torch.dtype,
    out_dtype: torch.dtype,
    index_dtype: torch.dtype | None = None,
) -> KernelSpec:
    """The kernel for rows of `hidden` columns and these dtypes; index_dtype: see `plan`."""
    types = (
        ("WEIGHT", INPUT_TYPES[weight_dtype]),
        ("OUTPUT", INPUT_TYPES[out_dtype]),
        ("ROW", INDEX_TYPES[index_dtype or torch.int32]),
        ("PLACED", int(index_dtype is not None)),
    )
    sizes = (
        ("WARPS", _WARPS),
        ("WARP_COLUMNS", _warp_columns(y_dtype)),
        ("HIDDEN", hidden),
        ("SIZES_BYTES", ctypes.sizeof(_Sizes)),
    )
    return KernelSpec("combine.cu", "combine", (*input_defines(y_dtype), *types, *sizes))


def plan(
    tokens: int,
    hidden: int,
    top_k: int,
    bound: int,
    y_dtype: torch.dtype,
    weight_dtype: torch.dtype,
    out_dtype: torch.dtype,
    device_index: int,
    *,
    index_dtype: torch.dtype | None = None,
    sparse: bool = False,
    pdl: bool = False,
) -> PointerLauncher:
    """The launcher for y (bound, hidden), rows and weights (tokens, top_k), residual and out (tokens, hidden).

    In this order, with two more addresses before out, of bool (tokens,): of which tokens the residual has a sum,
    and where that is written of out, which then gets no other sums; 0 for all. The residual may be 0 for none.
    tokens and hidden are not 0, all tensors contiguous, y, residual and out at multiples of 16 bytes, and
    `device_index` is that of the current device. sparse: most tokens have no row; only the speed depends on it. pdl:
    start before the kernel ahead has ended; nothing is read or written before it has.

    index_dtype: in place of rows come the experts of the assignments, of this dtype, each with its row: y (tokens *
    top_k, hidden). Those outside [0, bound) have none.
    """

    def build() -> PointerLauncher:
        warps = 1 if sparse else ceil_div(hidden, _warp_columns(y_dtype))  # that share a token
        blocks = ceil_div(tokens * warps, _WARPS)
        return PointerLauncher(
            load(kernel_spec(hidden, y_dtype, weight_dtype, out_dtype, index_dtype)),
            grid=min(blocks, resident_blocks(_BLOCKS_PER_SM, device_index)) if sparse else blocks,
            block=_WARPS * WARP,
            pdl=pdl,
            pointers=4,
            args=((ctypes.c_int64 * 3)(), _Sizes(tokens, top_k, bound, warps)),
        )

    form = (y_dtype, weight_dtype, out_dtype, device_index, index_dtype, sparse, pdl)
    return _plans.get((tokens, hidden, top_k, bound, *form), build)


def combine(y: Tensor, rows: Tensor, weights: Tensor, out_dtype: torch.dtype, residual: Tensor | None = None) -> Tensor:
    """The result of operands in any layout, as ``experts.combine`` describes it."""
    (num_rows, hidden), (tokens, top_k) = y.shape, rows.shape
    out = torch.empty((tokens, hidden), dtype=out_dtype, device=y.device)
    if out.numel():
        operands = (
            *(aligned(y), rows.contiguous(), weights.contiguous()),
            *(residual if residual is None else aligned(residual), None, None, out),
        )
        device_index = y.get_device()
        with device_guard(device_index):
            plan(tokens, hidden, top_k, num_rows, y.dtype, weights.dtype, out_dtype, device_index).launch(
                current_stream(device_index), *(0 if operand is None else operand.data_ptr() for operand in operands)
            )
    return out
