"""Launches ``cuda/sum_partials.cu``."""

import ctypes

import torch
from torch import Tensor

from fp8moe.kernels.experts.routing_plan import INDEX_TYPES
from fp8moe.quant.formats import ceil_div
from fp8moe.quant.quantize_plan import INPUT_TYPES, input_defines
from fp8moe.runtime.checks import aligned
from fp8moe.runtime.hopper import WARP
from fp8moe.runtime.jit import KernelSpec, load
from fp8moe.runtime.launch import PointerLauncher, current_stream, device_guard, resident_blocks
from fp8moe.runtime.plans import PlanCache

_WARPS = 4  # of a thread block
_BLOCKS_PER_SM = 10  # as many as run at once
_LOADS = 4  # of 16 bytes that a lane has under way, over all ranks

_plans: PlanCache[PointerLauncher] = PlanCache()


class _Sizes(ctypes.Structure):
    """``struct Sizes`` of the kernel."""

    _fields_ = tuple((name, ctypes.c_uint32) for name in ("tokens", "slots", "top_k", "experts"))


def _warp_columns(ranks: int) -> int:
    """Columns that a warp takes at a time."""
    return max(_LOADS // ranks, 1) * WARP * 4


def kernel_spec(hidden: int, index_dtype: torch.dtype, out_dtype: torch.dtype, ranks: int) -> KernelSpec:
    """The kernel for sums of `hidden` columns, these dtypes and so many ranks."""
    types = (("INDEX", INDEX_TYPES[index_dtype]), ("OUTPUT", INPUT_TYPES[out_dtype]), ("PEERS", ranks))
    sizes = (("WARPS", _WARPS), ("WARP_COLUMNS", _warp_columns(ranks)), ("HIDDEN", hidden))
    defines = (*input_defines(torch.float32), *types, *sizes, ("SIZES_BYTES", ctypes.sizeof(_Sizes)))
    return KernelSpec("sum_partials.cu", "sum_partials", defines)


def plan(
    sizes: tuple[int, int, int],
    hidden: int,
    index_dtype: torch.dtype,
    out_dtype: torch.dtype,
    ranks: int,
    experts: int,
    device_index: int,
    *,
    pdl: bool = False,
) -> PointerLauncher:
    """The launcher for partials, index, residual, which may be 0 for none, and out, in this order.

    sizes: tokens, slots of each rank, top_k. partials (ranks * slots, hidden) float32, index (tokens, top_k), residual
    and out (tokens, hidden), all contiguous and at multiples of 16 bytes; tokens and hidden are not 0. experts: of each
    rank. device_index: of the current device. pdl: start before the kernel ahead has ended; nothing is read or written
    before it has.
    """

    def build() -> PointerLauncher:
        blocks = ceil_div(sizes[0] * ceil_div(hidden, _warp_columns(ranks)), _WARPS)
        return PointerLauncher(
            load(kernel_spec(hidden, index_dtype, out_dtype, ranks)),
            grid=min(blocks, resident_blocks(_BLOCKS_PER_SM, device_index)),
            block=_WARPS * WARP,
            pdl=pdl,
            pointers=4,
            args=(_Sizes(*sizes, experts),),
        )

    return _plans.get((sizes, hidden, index_dtype, out_dtype, ranks, experts, device_index, pdl), build)


def sum_partials(
    partials: Tensor, index: Tensor, ranks: int, num_experts: int, out_dtype: torch.dtype, residual: Tensor | None
) -> Tensor:
    """The result of operands in any layout, as ``experts.sum_partials`` describes it."""
    (rows, hidden), (tokens, top_k) = partials.shape, index.shape
    out = torch.empty((tokens, hidden), dtype=out_dtype, device=partials.device)
    if out.numel():
        partials, index = aligned(partials), index.contiguous()
        residual = None if residual is None else aligned(residual)
        device_index = partials.get_device()
        sizes, experts = (tokens, rows // ranks, top_k), num_experts // ranks
        with device_guard(device_index):
            plan(sizes, hidden, index.dtype, out_dtype, ranks, experts, device_index).launch(
                *(current_stream(device_index), partials.data_ptr(), index.data_ptr()),
                *(0 if residual is None else residual.data_ptr(), out.data_ptr()),
            )
    return out
