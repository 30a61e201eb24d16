"""Launches ``cuda/group_ranges.cu``."""

import ctypes

import torch
from torch import Tensor

from fp8moe.runtime.checks import aligned
from fp8moe.runtime.jit import KernelSpec, load
from fp8moe.runtime.launch import PointerLauncher, current_stream, device_guard
from fp8moe.runtime.plans import PlanCache

_THREADS = 1024

_plans: PlanCache[PointerLauncher] = PlanCache()


def kernel_spec(groups: int) -> KernelSpec:
    return KernelSpec("group_ranges.cu", "group_ranges", (("GROUPS", groups), ("THREADS", _THREADS)))


def group_ranges(layout: Tensor, groups: int, alignment: int | None) -> Tensor:
    """First row and end of each group (groups, 2) int32, of a layout as `grouped_gemm_by_layout` takes it."""
    ranges = torch.empty((groups, 2), dtype=torch.int32, device=layout.device)
    rows, index = layout.shape[0], layout.get_device()

    def build() -> PointerLauncher:
        args = ctypes.c_int(rows), ctypes.c_int(alignment or 0)
        return PointerLauncher(load(kernel_spec(groups)), grid=1, block=_THREADS, pointers=2, args=args)

    if groups:
        layout = aligned(layout)
        with device_guard(index):
            plan = _plans.get((rows, groups, alignment, index), build)
            plan.launch(current_stream(index), layout.data_ptr(), ranges.data_ptr())
    return ranges
