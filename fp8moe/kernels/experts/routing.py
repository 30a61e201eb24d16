"""Expert routing: ``sort_by_expert`` gives every assignment a row, those of one expert next to each other.

The operator ``fp8moe::sort_by_expert`` behind it waits for nothing and needs no counts on the host.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fp8moe.kernels.experts import checks, reference, routing_plan
from fp8moe.runtime.backend import use_cuda
from fp8moe.runtime.checks import check_tensor
from fp8moe.runtime.operators import define


class Routing(NamedTuple):
    """Where the assignments of tokens to experts lie once they are sorted.

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
) -> Routing:
    """Sort assignments of T tokens to K experts each by expert; those of one expert stay in the order of (token, k).

    top_k_index: (T, K) int32 or int64, any strides, T * K < 2**31. Values outside [first_expert, first_expert +
        num_experts) mean "not on this rank": their rows are -1. An expert may occur several times in a row of it.
    num_experts: E, 1 to 1024, those that are here.
    capacity: None for rows packed without gaps. Otherwise the number of rows that each expert has: expert e's
        assignments get rows e * capacity, e * capacity + 1, ..., and -1 from the capacity-th on. E * capacity < 2**31.
    first_expert: the index that means the first of these experts, e = 0.
    first_row, num_rows: without a capacity, keep a window of the packed rows, [first_row, first_row + num_rows), or to
        the last one: rows count from its start, and are -1 outside of it; groups are clamped to it.
    Returns Routing(groups, rows). Equal inputs give equal results.

    Method: counting sort, Knuth, The Art of Computer Programming 3, section 5.2.

    Raises TypeError for a wrong type or dtype, ValueError for a wrong rank or size.
    """
    check_tensor("top_k_index", top_k_index)
    options = (capacity, first_expert, first_row, num_rows)
    return Routing(*torch.ops.fp8moe.sort_by_expert(top_k_index, num_experts, *options))


def _sort_by_expert(top_k_index: Tensor, num_experts: int, *options: int | None) -> tuple[Tensor, Tensor]:
    checks.routing(top_k_index, num_experts, *options)
    backend = routing_plan if use_cuda(top_k_index) else reference
    return backend.sort_by_expert(top_k_index, num_experts, *options)


def _sort_by_expert_fake(
    top_k_index: Tensor, num_experts: int, capacity: int | None, *window: int | None
) -> tuple[Tensor, Tensor]:
    checks.routing(top_k_index, num_experts, capacity, *window)
    groups = top_k_index.new_empty((num_experts + (capacity is None),), dtype=torch.int32)
    return groups, top_k_index.new_empty(top_k_index.shape, dtype=torch.int32)


define(
    "sort_by_expert(Tensor top_k_index, int num_experts, SymInt? capacity, int first_expert=0, SymInt first_row=0, "
    "SymInt? num_rows=None) -> (Tensor, Tensor)",
    _sort_by_expert,
    _sort_by_expert_fake,
)
