"""The part of an experts layer that the experts of one rank compute: the operator ``fp8moe::experts_partial``."""

import torch
from torch import Tensor

from fp8moe.kernels.activation import Activation
from fp8moe.kernels.experts import checks, layer, plan
from fp8moe.kernels.experts.operands import Operands, Share
from fp8moe.quant.checks import fp8_operand
from fp8moe.quant.formats import FP8Tensor
from fp8moe.runtime import autograd
from fp8moe.runtime.operator import define


def experts_partial(
    x: Tensor | FP8Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    up_proj: FP8Tensor,
    down_proj: FP8Tensor,
    *,
    activation: Activation,
    first_expert: int,
    num_experts: int,
    row_dtype: torch.dtype,
    num_rows: int | None = None,
    first_row: int = 0,
    partial: Tensor | None = None,
    partial_known: Tensor | None = None,
    known: Tensor | None = None,
) -> Tensor:
    """The weighted sums of `fp8moe.kernels.experts.forward.experts` over the experts that are here, not rounded.

    x: (T, H) bfloat16, float16 or float32, or an FP8Tensor: data (T, H), scale (T, ceil(H/128)) of any strides.
    top_k_index: (T, K) int32 or int64, counted over all experts. One whose expert is not here adds nothing.
    top_k_weights: (T, K) float32, bfloat16 or float16.
    up_proj, down_proj: data and scale as for `experts`, of the E_local experts that are here.
    first_expert: the index of the first of them. num_experts: E, of all ranks; tiles are chosen for T * K / E rows an
        expert.
    row_dtype: bfloat16 or float32, to which the results of GEMM 2 are rounded.
    first_row, num_rows: only the assignments whose row, sorted by expert among those that are here, is in
        [first_row, first_row + num_rows) are computed, and only for so many is there memory; None: T * K.
    partial: (T, H) float32, to which the sums are added, so that passes over several such ranges add up; None for none.
    partial_known: bool (T,): of which tokens `partial` has sums, whose values it does not read otherwise; None: of all.
    known: bool (T,), written: for which tokens the result has sums: those with a row in the range, those of
        partial_known, and perhaps others; the rest of it is undefined, and costs nothing. None: for all.
    Returns (T, H) float32, summed in the order of k; zeros, or `partial`, for a token without an expert here. Equal
    inputs give equal bits. There is no backward: calling it raises RuntimeError.

    Raises TypeError for a wrong type or dtype, ValueError for a wrong shape, device or range.
    """
    data, scale = (x, None) if isinstance(x, Tensor) else fp8_operand("x", x)
    return autograd.run(
        *(_op, "fp8moe.kernels.experts.experts_partial"),
        *(data, scale, top_k_index, top_k_weights, *up_proj, *down_proj),
        *(activation.name, activation.gated, activation.limit, activation.alpha),
        *(first_expert, num_experts, row_dtype, first_row, num_rows, partial, partial_known, known),
    )


def _arguments(*arguments) -> tuple[Operands, Activation, Share]:
    """The operator's arguments, in the order of its schema."""
    x, x_scale, *rest = arguments[:8]
    name, gated, limit, alpha, first_expert, num_experts, row_dtype, first_row, num_rows, *sums = arguments[8:]
    partial, *known = sums
    share = Share(first_expert, num_experts, first_row, num_rows, row_dtype, torch.float32)
    return Operands(x, *rest, partial, x_scale, *known), Activation(limit, alpha, name, gated), share


def _partial(*arguments) -> Tensor:
    operands, activation, share = _arguments(*arguments)
    found = plan.find(operands, activation, None, share)
    if found is not None:
        return found.run(operands)
    checks.partial(operands, activation.gated, share)
    return layer.run(operands, activation, None, share)


def _partial_fake(*arguments) -> Tensor:
    operands, activation, share = _arguments(*arguments)
    checks.partial(operands, activation.gated, share)
    return operands.hidden_states.new_empty(operands.hidden_states.shape, dtype=torch.float32)


_op = define(
    "experts_partial(Tensor x, Tensor? x_scale, Tensor top_k_index, Tensor top_k_weights, Tensor up_proj, "
    "Tensor up_proj_scale_inv, Tensor down_proj, Tensor down_proj_scale_inv, str activation, bool gated, float? limit, "
    "float? alpha, int first_expert, int num_experts, ScalarType row_dtype, SymInt first_row, SymInt? num_rows, "
    "Tensor? partial, Tensor? partial_known=None, Tensor(a!)? known=None) -> Tensor",
    _partial,
    _partial_fake,
    forward_only=True,
)
