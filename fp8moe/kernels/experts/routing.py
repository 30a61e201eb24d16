"""``sort_by_expert``: number the (token, expert) assignments so that the assignments of an expert are contiguous.

``assigned_rows`` tells the token and the routing weight of each row.
"""

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from fp8moe.kernels.experts import checks, reference
from fp8moe.quant.formats import align, ceil_div
from fp8moe.quant.quantize import input_defines
from fp8moe.runtime.autograd import detached
from fp8moe.runtime.checks import FLOATING, check_device, check_dtype, check_like, check_tensor
from fp8moe.runtime.jit import KernelSpec, load
from fp8moe.runtime.launch import PointerLauncher, planned
from fp8moe.runtime.operator import operator
from fp8moe.runtime.sm90 import MAX_BLOCKS_PER_PORTABLE_CLUSTER, WARP

INDEX_TYPES = {torch.int32: "int", torch.int64: "long long"}
_STEPS = 4  # number of assignments that each lane keeps in registers
_MAX_WARPS = 32
_ASSIGNED_THREADS = 256


class SortedAssignments(NamedTuple):
    """The rows of token-to-expert assignments after sorting them by expert.

    groups: int32 on the device of the indices. Without a capacity (E + 1,): rows groups[e]:groups[e + 1] belong to
        expert e, groups[0] is 0 and groups[E] is the number of assignments that have a row. With a capacity (E,):
        the number of rows in use of each expert.
    rows: int32 (T, K), the row of each assignment, or -1 if it has none.
    """

    groups: Tensor
    rows: Tensor


def sort_by_expert(
    top_k_index: Tensor,
    num_experts: int,
    *,
    capacity: int | None = None,
    first_expert: int = 0,
    first_row: int = 0,
    num_rows: int | None = None,
) -> SortedAssignments:
    """Sort the assignments of T tokens to K experts each by expert; within an expert, they stay in (token, k) order.

    top_k_index: (T, K) int32 or int64, any strides, T * K < 2**31. Values outside [first_expert, first_expert +
        num_experts) mean "not on this rank": their rows are -1. A token may name the same expert several times.
    num_experts: E, 1 to 1024, the experts on this rank.
    capacity: None: rows are packed without gaps. Otherwise each expert has this many rows: expert e's assignments get
        rows e * capacity, e * capacity + 1, ..., and the assignments that do not fit get -1. E * capacity < 2**31.
    first_expert: the index in top_k_index of this rank's first expert, e = 0.
    first_row, num_rows: without a capacity, keep the window [first_row, first_row + num_rows) of the packed rows, up to
        the last row if num_rows is None. Results then count rows from first_row: rows outside of the window are -1, and
        groups are clamped to the window.
    Returns SortedAssignments(groups, rows). Equal inputs give equal results. The host does not wait for the GPU.

    Method: counting sort, Knuth, The Art of Computer Programming 3, section 5.2.

    Raises TypeError for a wrong type or dtype, ValueError for a wrong rank or size.
    """
    check_tensor("top_k_index", top_k_index)
    return SortedAssignments(*_sort_by_expert(top_k_index, num_experts, capacity, first_expert, first_row, num_rows))


class AssignedRows(NamedTuple):
    """What each row is of. tokens: int32 (R,), -1 for a row without an assignment. weights: float32 (R,), 0 there."""

    tokens: Tensor
    weights: Tensor


def assigned_rows(sorted: SortedAssignments, weights: Tensor, num_rows: int) -> AssignedRows:
    """Return token and routing weight of each row.

    sorted: groups (E + 1,) and rows (T, K) of `sort_by_expert`, without a capacity, for a window of num_rows rows.
    weights: (T, K) float32, bfloat16 or float16, any strides. The result is detached from its autograd graph.
    num_rows: R, the length of the results.

    Raises TypeError for a wrong dtype, ValueError for a wrong shape or device.
    """
    check_tensor("weights", weights)
    return AssignedRows(*_assigned_rows(*sorted, detached(weights), num_rows))


class _SortSizes(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint32) for name in ("count", "experts", "capacity", "first_expert", "first_row", "num_rows")
    )


class KernelShape(NamedTuple):
    """Launch shape of the sorting kernel: counters (number of experts, rounded up), warps per block, blocks."""

    counters: int
    warps: int
    blocks: int

    @classmethod
    def of(cls, assignments: int, num_experts: int) -> "KernelShape":
        """Return the shape for `assignments` assignments to `num_experts` experts."""
        counters = max(WARP, 1 << (num_experts - 1).bit_length())
        few_warps = max(8, counters // WARP)
        for warps in (few_warps, _MAX_WARPS):
            if assignments <= warps * WARP * _STEPS:
                return cls(counters, warps, 1)
        return cls(counters, _MAX_WARPS, MAX_BLOCKS_PER_PORTABLE_CLUSTER)

    @property
    def pitch(self) -> int:
        """Counters per warp in shared memory: `counters`, and one for experts of other ranks, padded to 16 bytes."""
        return align(self.counters + 1, 4)

    @property
    def shared_bytes(self) -> int:
        """Bytes of a thread block's dynamic shared memory: ``struct Shared`` of cuda/ops/sort.cuh."""
        return (self.warps * self.pitch + 2 * self.counters + WARP) * 4

    def defines(self, masked: bool) -> tuple[tuple[str, int], ...]:
        """Return the compile-time constants of cuda/ops/sort.cuh. masked: experts have a capacity."""
        sizes = ("COUNTERS", self.counters), ("WARPS", self.warps), ("CLUSTER", self.blocks), ("PITCH", self.pitch)
        return *sizes, ("MASKED", int(masked)), ("SHARED_BYTES", self.shared_bytes)


def kernel_spec(shape: KernelShape, dtype: torch.dtype, masked: bool) -> KernelSpec:
    """Return the sorting kernel for a launch shape. dtype: the indices' dtype; masked: experts have a capacity."""
    defines = ("INDEX", INDEX_TYPES[dtype]), ("STEPS", _STEPS), ("SIZES_BYTES", ctypes.sizeof(_SortSizes))
    return KernelSpec("sort_by_expert.cu", "sort_by_expert", (*defines, *shape.defines(masked)))


@planned
def launcher(
    device_index: int,
    index: Tensor,
    num_experts: int,
    capacity: int | None,
    first_expert: int = 0,
    first_row: int = 0,
    num_rows: int | None = None,
    *,
    pdl: bool = False,
) -> PointerLauncher:
    """Return the launcher, called with contiguous (index (T, K), groups, rows); other arguments: see `sort_by_expert`.

    The kernel also writes an int32 0 after the groups: the tile counter of the GEMM that follows.
    """
    assignments = index.numel()
    num_rows = assignments if num_rows is None else num_rows
    shape = KernelShape.of(assignments, num_experts)
    return PointerLauncher(
        load(kernel_spec(shape, index.dtype, capacity is not None)),
        grid=shape.blocks,
        block=shape.warps * WARP,
        cluster=shape.blocks,
        smem=shape.shared_bytes,
        pdl=pdl,
        pointers=3,
        args=(_SortSizes(assignments, num_experts, capacity or 0, first_expert, first_row, num_rows),),
    )


def _launch(top_k_index: Tensor, num_experts: int, capacity: int | None, *window: int | None) -> tuple[Tensor, Tensor]:
    groups, rows = _empty(top_k_index, num_experts, capacity)
    index = top_k_index.contiguous()
    launcher(index.get_device(), index, num_experts, capacity, *window)(index, groups, rows)
    return groups, rows


def _empty(top_k_index: Tensor, num_experts: int, capacity: int | None, *window: int | None) -> tuple[Tensor, Tensor]:
    groups = top_k_index.new_empty((num_experts + (capacity is None) + 1,), dtype=torch.int32)[:-1]
    return groups, top_k_index.new_empty(top_k_index.shape, dtype=torch.int32)


@planned
def assigned_launcher(device_index: int, rows: Tensor, dtype: torch.dtype, num_rows: int) -> PointerLauncher:
    """Return the launcher, called with contiguous (rows (T, K), the last of groups, weights, tokens, row weights)."""
    count, top_k = rows.numel(), rows.shape[1]
    defines = (*input_defines(dtype), ("THREADS", _ASSIGNED_THREADS))
    return PointerLauncher(
        load(KernelSpec("assigned_rows.cu", "assigned_rows", defines)),
        grid=ceil_div(max(count, num_rows), _ASSIGNED_THREADS),
        block=_ASSIGNED_THREADS,
        pdl=True,
        pointers=5,
        args=tuple(map(ctypes.c_uint32, (count, top_k, num_rows))),
    )


def _check_assigned(groups: Tensor, rows: Tensor, weights: Tensor, num_rows: int) -> None:
    for name, value, rank in (("groups", groups, 1), ("rows", rows, 2)):
        check_dtype(name, value, torch.int32)
        if value.dim() != rank:
            raise ValueError(f"{name}: expected {rank} dimensions, got shape {tuple(value.shape)}")
    check_like("weights", weights, FLOATING, rows.shape, groups.device, "groups")
    check_device("rows", rows, groups.device, "groups")


def _launch_assigned(groups: Tensor, rows: Tensor, weights: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    if not rows.numel() or not num_rows:
        return reference.assigned_rows(groups, rows, weights, num_rows)
    results = _empty_assigned(groups, rows, weights, num_rows)
    launch = assigned_launcher(rows.get_device(), rows, weights.dtype, num_rows)
    launch(rows.contiguous(), groups[-1:], weights.contiguous(), *results)
    return results


def _empty_assigned(groups: Tensor, rows: Tensor, weights: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    return rows.new_empty(num_rows), weights.new_empty(num_rows, dtype=torch.float32)


_assigned_rows = operator(
    "assigned_rows(Tensor groups, Tensor rows, Tensor weights, SymInt num_rows) -> (Tensor, Tensor)",
    check=_check_assigned,
    cuda=_launch_assigned,
    reference=reference.assigned_rows,
    fake=_empty_assigned,
)
_sort_by_expert = operator(
    "sort_by_expert(Tensor top_k_index, int num_experts, SymInt? capacity, int first_expert=0, SymInt first_row=0, "
    "SymInt? num_rows=None) -> (Tensor, Tensor)",
    check=checks.routing,
    cuda=_launch,
    reference=reference.sort_by_expert,
    fake=_empty,
)
