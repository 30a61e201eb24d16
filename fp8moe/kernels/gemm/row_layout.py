"""Grouped FP8 GEMM with groups given otherwise than by offsets: `grouped_gemm_by_layout` and its operator.

The layouts are those of DeepGEMM's contiguous grouped GEMMs.
"""

import torch
from torch import Tensor

from fp8moe.kernels.gemm import checks, grouped, row_layout_plan
from fp8moe.kernels.gemm.reference import group_ranges
from fp8moe.quant.checks import check_vector
from fp8moe.quant.formats import FP8Tensor
from fp8moe.runtime import autograd
from fp8moe.runtime.backend import use_cuda
from fp8moe.runtime.checks import check_own_memory
from fp8moe.runtime.operator import define


def grouped_gemm_by_layout(
    a: FP8Tensor, b: FP8Tensor, layout: Tensor, out: Tensor, *, alignment: int | None = None, expected_m: int
) -> None:
    """`grouped_gemm` into ``out``, of groups that lie in any order.

    a, b, out: as for `grouped_gemm`, tensors already.
    layout: int32, on the device of the operands. Without alignment (M,), the group of each row; a row whose group is
        outside [0, E) has none. A group's rows lie together, but for rows of no group among them, which are computed
        with it. With alignment (E,), where each group ends: group 0 begins at row 0, each other one at the next
        multiple of alignment behind the end before it.
    expected_m: about how many rows a group has; only the speed depends on it.

    The host neither knows nor waits for the groups on the CUDA backend, where groups whose rows do not lie together are
    multiplied with the weights of one or the other. On the reference backend they raise ValueError.
    """
    operands = (*a, *b, layout)
    autograd.check_out("fp8moe.grouped_gemm_by_layout", (*_NAMES, "out"), (*operands, out))
    _op(*operands, alignment, expected_m, out)


def _grouped_gemm(*arguments: Tensor | int | None) -> None:
    *operands, layout, alignment, expected_m, out = arguments
    _fake(*arguments)
    check_own_memory(out, dict(zip(_NAMES, (*operands, layout), strict=True)))
    a, a_scale, b, b_scale = operands
    ranges = row_layout_plan.group_ranges if use_cuda(a) else group_ranges
    groups = ranges(layout, b.shape[0], alignment)
    grouped.compute(FP8Tensor(a, a_scale), FP8Tensor(b, b_scale), groups, out, expected_m=expected_m)


def _fake(*arguments: Tensor | int | None) -> None:
    *operands, layout, alignment, expected_m, out = arguments
    a, _, b, _ = operands
    checks.result(out, checks.rows_of_experts(*operands), a.device)
    check_vector("layout", layout, torch.int32, a.shape[0] if alignment is None else b.shape[0], a.device)
    checks.expected_rows(expected_m)
    if alignment is not None and alignment < 1:
        raise ValueError(f"alignment: expected a number of rows, got {alignment}")


_NAMES = ("a.data", "a.scale", "b.data", "b.scale", "layout")
_op = define(
    "grouped_gemm_by_layout(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, Tensor layout, SymInt? alignment, "
    "SymInt expected_m, Tensor(a!) out) -> ()",
    _grouped_gemm,
    _fake,
    forward_only=True,
)
