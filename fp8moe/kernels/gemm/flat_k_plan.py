"""Launches ``cuda/join_groups.cu``."""

import ctypes

import torch
from torch import Tensor

from fp8moe.quant.formats import BLOCK, ceil_div
from fp8moe.runtime.jit import KernelSpec, load
from fp8moe.runtime.launch import PointerLauncher, current_stream, device_guard, resident_blocks
from fp8moe.runtime.plans import PlanCache
from fp8moe.runtime.sm90 import WARP

_WARPS = 8  # of a thread block
_BLOCKS_PER_SM = 8
_ROWS = 32  # that a warp takes of a block of 128 columns

_plans: PlanCache[PointerLauncher] = PlanCache()


class _Sizes(ctypes.Structure):
    """``struct Sizes`` of the kernel."""

    _fields_ = tuple((name, ctypes.c_int) for name in ("a_rows", "b_rows", "k"))


def kernel_spec(groups: int) -> KernelSpec:
    defines = (("GROUPS", groups), ("WARPS", _WARPS), ("ROWS", _ROWS), ("SIZES_BYTES", ctypes.sizeof(_Sizes)))
    return KernelSpec("join_groups.cu", "join_groups", defines)


def join_groups(a: Tensor, b: Tensor, sizes: Tensor, m: int, n: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """a (m * k,) and b (n * k,), 16-byte aligned, as matrices (m, k) and (n, k), and the groups' offsets (E + 1,)."""
    groups, index = sizes.shape[0], sizes.get_device()
    joined = tuple(torch.empty((rows, k), dtype=a.dtype, device=a.device) for rows in (m, n))
    offsets = torch.empty(groups + 1, dtype=torch.int32, device=a.device)
    if not groups:
        return *joined, offsets.zero_()

    def build() -> PointerLauncher:
        units = (ceil_div(m, _ROWS) + ceil_div(n, _ROWS)) * (k // BLOCK)
        return PointerLauncher(
            load(kernel_spec(groups)),
            grid=max(1, min(ceil_div(units, _WARPS), resident_blocks(_BLOCKS_PER_SM, index))),
            block=_WARPS * WARP,
            pointers=6,
            args=(_Sizes(m, n, k),),
        )

    with device_guard(index):
        plan = _plans.get((groups, m, n, k, index), build)
        plan.launch(current_stream(index), *(tensor.data_ptr() for tensor in (a, b, sizes, *joined, offsets)))
    return *joined, offsets
