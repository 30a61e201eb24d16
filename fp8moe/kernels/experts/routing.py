"""Expert routing: ``sort_by_expert`` gives every assignment a row; rows of one expert are next to each other."""

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from fp8moe.kernels.experts import checks, reference
from fp8moe.quant.formats import align
from fp8moe.runtime.checks import check_tensor
from fp8moe.runtime.jit import KernelSpec, load
from fp8moe.runtime.launch import PointerLauncher, planned
from fp8moe.runtime.operator import operator
from fp8moe.runtime.sm90 import MAX_BLOCKS_PER_PORTABLE_CLUSTER, WARP

INDEX_TYPES = {torch.int32: "int", torch.int64: "long long"}
_STEPS = 4  # assignments that a lane keeps in registers
_MAX_WARPS = 32


class SortedAssignments(NamedTuple):
    """The places of assignments of tokens to experts after they are sorted.

    groups: int32 on the device of the indices. Without a capacity (E + 1,): rows groups[e]:groups[e + 1] belong to
        expert e, groups[0] is 0 and groups[E] the number of assignments that have a row. With a capacity (E,):
        how many of the expert's rows are in use.
    rows: int32 (T, K), the row of each assignment, -1 for one that has none.
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
    """Sort assignments of T tokens to K experts each by expert; those of one expert stay in the order of (token, k).

    top_k_index: (T, K) int32 or int64, any strides, T * K < 2**31. Values outside [first_expert, first_expert +
        num_experts) mean "not on this rank": their rows are -1. An expert may occur several times in a row of it.
    num_experts: E, 1 to 1024, those that are here.
    capacity: None for rows packed without gaps. Otherwise the number of rows that each expert has: expert e's
        assignments get rows e * capacity, e * capacity + 1, ..., and -1 from the capacity-th on. E * capacity < 2**31.
    first_expert: the index that means the first of these experts, e = 0.
    first_row, num_rows: without a capacity, keep a window of the packed rows, [first_row, first_row + num_rows), or to
        the last one: rows count from its start, and are -1 outside of it; groups are clamped to it.
    Returns SortedAssignments(groups, rows). Equal inputs give equal results. No counts come to the host: nothing waits.

    Method: counting sort, Knuth, The Art of Computer Programming 3, section 5.2.

    Raises TypeError for a wrong type or dtype, ValueError for a wrong rank or size.
    """
    check_tensor("top_k_index", top_k_index)
    return SortedAssignments(*_sort_by_expert(top_k_index, num_experts, capacity, first_expert, first_row, num_rows))


class _SortSizes(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint32) for name in ("count", "experts", "capacity", "first_expert", "first_row", "num_rows")
    )


class KernelShape(NamedTuple):
    """Counters of a kernel, warps of a thread block, and thread blocks, all of a cluster."""

    counters: int
    warps: int
    blocks: int

    @classmethod
    def of(cls, assignments: int, num_experts: int) -> "KernelShape":
        """Return the shape for this many assignments to this many experts."""
        counters = max(WARP, 1 << (num_experts - 1).bit_length())
        few_warps = max(8, counters // WARP)
        for warps in (few_warps, _MAX_WARPS):
            if assignments <= warps * WARP * _STEPS:
                return cls(counters, warps, 1)
        return cls(counters, _MAX_WARPS, MAX_BLOCKS_PER_PORTABLE_CLUSTER)

    @property
    def pitch(self) -> int:
        """Counters of a warp: with one for assignments to no expert, rounded up to whole 16-byte vectors."""
        return align(self.counters + 1, 4)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a thread block, ``struct Shared`` of cuda/ops/sort.cuh."""
        return (self.warps * self.pitch + 2 * self.counters + WARP) * 4

    def defines(self, masked: bool) -> tuple[tuple[str, int], ...]:
        """Constants of cuda/ops/sort.cuh. masked: experts have a capacity."""
        sizes = ("COUNTERS", self.counters), ("WARPS", self.warps), ("CLUSTER", self.blocks), ("PITCH", self.pitch)
        return *sizes, ("MASKED", int(masked)), ("SHARED_BYTES", self.shared_bytes)


def kernel_spec(shape: KernelShape, dtype: torch.dtype, masked: bool) -> KernelSpec:
    """The kernel of a shape. dtype: of the indices; masked: experts have a capacity."""
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
    """The launcher for index (T, K), groups and rows, all contiguous; see `sort_by_expert` for the arguments.

    It also writes a 0 behind the groups, from where GEMM 1 counts its tiles.
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


_sort_by_expert = operator(
    "sort_by_expert(Tensor top_k_index, int num_experts, SymInt? capacity, int first_expert=0, SymInt first_row=0, "
    "SymInt? num_rows=None) -> (Tensor, Tensor)",
    check=checks.routing,
    cuda=_launch,
    reference=reference.sort_by_expert,
    fake=_empty,
)
