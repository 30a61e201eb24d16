"""Launches ``cuda/sort_by_expert.cu``."""

import ctypes
import functools

import torch
from torch import Tensor

from fp8moe.quant.formats import align
from fp8moe.runtime.jit import KernelSpec, load
from fp8moe.runtime.launch import PointerLauncher, current_stream, device_guard
from fp8moe.runtime.plans import PlanCache
from fp8moe.runtime.sm90 import MAX_BLOCKS_PER_PORTABLE_CLUSTER, WARP

_STEPS = 4  # assignments that a lane keeps in registers
_MAX_WARPS = 32
INDEX_TYPES = {torch.int32: "int", torch.int64: "long long"}

_plans: PlanCache[PointerLauncher] = PlanCache()


class _Sizes(ctypes.Structure):
    """``struct Sizes`` of the kernel."""

    _fields_ = tuple(
        (name, ctypes.c_uint32) for name in ("count", "experts", "capacity", "first_expert", "first_row", "num_rows")
    )


def variant(assignments: int, num_experts: int) -> tuple[int, int, int]:
    """Counters, warps of a thread block and thread blocks for so many assignments to so many experts."""
    counters = max(WARP, 1 << (num_experts - 1).bit_length())
    few_warps = max(8, counters // WARP)
    for warps in (few_warps, _MAX_WARPS):
        if assignments <= warps * WARP * _STEPS:
            return counters, warps, 1
    return counters, _MAX_WARPS, MAX_BLOCKS_PER_PORTABLE_CLUSTER


def kernel_spec(counters: int, warps: int, cluster: int, dtype: torch.dtype, masked: bool) -> KernelSpec:
    """The kernel for a `variant`. dtype: of the indices; masked: experts have a capacity."""
    defines = {
        "INDEX": INDEX_TYPES[dtype],
        "EXPERTS": counters,
        "WARPS": warps,
        "STEPS": _STEPS,
        "CLUSTER": cluster,
        "MASKED": int(masked),
        "PITCH": _pitch(counters),
        "SHARED_BYTES": shared_bytes(counters, warps),
        "SIZES_BYTES": ctypes.sizeof(_Sizes),
    }
    return KernelSpec("sort_by_expert.cu", "sort_by_expert", tuple(defines.items()))


def _pitch(counters: int) -> int:
    """Counters of a warp: one more for assignments to no expert, and whole 16-byte vectors."""
    return align(counters + 1, 4)


def shared_bytes(counters: int, warps: int) -> int:
    """Dynamic shared memory of a thread block: the counters of its warps."""
    return warps * _pitch(counters) * 4


def plan(
    assignments: int,
    num_experts: int,
    capacity: int | None,
    dtype: torch.dtype,
    device_index: int,
    *,
    first_expert: int = 0,
    first_row: int = 0,
    num_rows: int | None = None,
    pdl: bool = False,
) -> PointerLauncher:
    """The launcher for indices of `dtype`, `assignments` = T * K >= 0 of them, groups and rows, in this order.

    All are contiguous. It writes groups (E + 1,) or, with a capacity, (E,), and rows (T, K). device_index: of the
    current device. first_expert, first_row, num_rows: as for ``experts.routing``. pdl: start before the kernel ahead
    has ended; nothing is read or written before it has.
    """
    num_rows = assignments if num_rows is None else num_rows
    sizes = (assignments, num_experts, capacity or 0, first_expert, first_row, num_rows)

    def build() -> PointerLauncher:
        counters, warps, cluster = variant(assignments, num_experts)
        return PointerLauncher(
            load(kernel_spec(counters, warps, cluster, dtype, capacity is not None)),
            grid=cluster,
            block=warps * WARP,
            cluster=cluster,
            smem=shared_bytes(counters, warps),
            pdl=pdl,
            pointers=3,
            args=(_Sizes(*sizes),),
        )

    return _plans.get((*sizes, capacity is None, dtype, device_index, pdl), build)


def sort_by_expert(
    top_k_index: Tensor,
    num_experts: int,
    capacity: int | None,
    first_expert: int = 0,
    first_row: int = 0,
    num_rows: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Groups and rows of indices (T, K) in any layout, as ``experts.routing`` describes them."""
    top_k_index = top_k_index.contiguous()
    allocate = functools.partial(torch.empty, dtype=torch.int32, device=top_k_index.device)
    groups, rows = allocate(num_experts + (capacity is None)), allocate(top_k_index.shape)
    device_index = top_k_index.get_device()
    window = {"first_expert": first_expert, "first_row": first_row, "num_rows": num_rows}
    with device_guard(device_index):
        plan(top_k_index.numel(), num_experts, capacity, top_k_index.dtype, device_index, **window).launch(
            current_stream(device_index), top_k_index.data_ptr(), groups.data_ptr(), rows.data_ptr()
        )
    return groups, rows
