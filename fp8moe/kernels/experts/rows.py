"""Experts over rows that somebody has dispatched already: ``experts_rows`` and its operators."""

import torch
from torch import Tensor

from fp8moe.kernels.activation import Activation
from fp8moe.kernels.experts import checks
from fp8moe.kernels.experts.layer import hidden_rows
from fp8moe.kernels.experts.operands import pad_columns, pad_weights, without_padding
from fp8moe.kernels.experts.trained_rows import (
    LAYER,
    Kept,
    Layer,
    Order,
    Saved,
    backward,
    forward,
    no_double_backward,
)
from fp8moe.kernels.gemm.grouped import grouped_rows
from fp8moe.quant.checks import fp8_operand
from fp8moe.quant.formats import FP8Tensor
from fp8moe.quant.quantize import quantize_1x128
from fp8moe.runtime import autograd
from fp8moe.runtime.autograd import recorded
from fp8moe.runtime.checks import check_tensor
from fp8moe.runtime.operator import define


def experts_rows(
    rows: Tensor | FP8Tensor,
    group_offsets: Tensor,
    up_proj: FP8Tensor,
    down_proj: FP8Tensor,
    *,
    activation: Activation,
    row_dtype: torch.dtype = torch.bfloat16,
    whole: tuple[int, int] | None = None,
    up_master: Tensor | None = None,
    down_master: Tensor | None = None,
    training: bool = False,
) -> Tensor:
    """``down_e(activation(up_e(rows[r])))`` for the rows r of every expert e, which lie one group after the other.

    rows: (R, H) bfloat16, float16 or float32, or an FP8Tensor: data (R, H), scale (R, ceil(H/128)) of any strides; any
        H.
    group_offsets: (E+1,) int32 on the device of rows: expert e has rows ``group_offsets[e]`` up to
        ``group_offsets[e+1]``; see `grouped_gemm`.
    up_proj, down_proj: the FP8 weights, data and scale, as for `fp8moe.kernels.experts.forward.experts`; any I.
    row_dtype: bfloat16 or float32, of the result.
    whole: rows and experts of a layer of which these are a part, on other ranks as well: each row has the bits that it
        would have there. None: this is all of it.
    up_master, down_master: as for `experts_training`.
    training: compute as with gradients, also where none are recorded: the result of GEMM 1 is rounded to bfloat16.
    Returns (R, H) in row_dtype; rows of no expert are zeros. Equal inputs give equal bits.

    Gradients are those of rows, if these are a tensor, and of the masters, as `experts_training` describes them, which
    also says what is kept for the backward. Rows of no expert get zeros.

    Raises TypeError for a wrong type or dtype, ValueError for a wrong shape or device.
    """
    data, scale = (rows, None) if isinstance(rows, Tensor) else fp8_operand("rows", rows)
    check_tensor("group_offsets", group_offsets)
    up_master, down_master = (master if recorded(master) else None for master in (up_master, down_master))
    form = (activation.name, activation.gated, activation.limit, activation.alpha)
    if training or recorded(data, up_master, down_master):
        masters = (up_master, down_master)
        arguments = (data, scale, group_offsets, *up_proj, *down_proj, *masters, *form, row_dtype, whole)
        return _training_op(*arguments)[0]
    return autograd.run(
        *(_op, "fp8moe.GroupedExperts.forward_rows"),
        *(data, scale, group_offsets, *up_proj, *down_proj, *form, row_dtype, whole),
    )


def _experts_rows(rows: Tensor, rows_scale: Tensor | None, group_offsets: Tensor, *arguments) -> Tensor:
    up, up_scale, down, down_scale, name, gated, limit, alpha, row_dtype, whole = arguments
    out = _experts_rows_fake(rows, rows_scale, group_offsets, *arguments)
    if not (out.numel() and down.numel()):
        return out.zero_()
    up, down = pad_weights(up, down, 16)
    data = pad_columns(rows, up.shape[2])
    a = quantize_1x128(data) if rows_scale is None else FP8Tensor(data, rows_scale)
    activation = Activation(limit, alpha, name, gated)
    h = hidden_rows(a, FP8Tensor(up, up_scale), group_offsets, activation, {"whole": whole})
    del a
    y = grouped_rows(h, FP8Tensor(down, down_scale), group_offsets, row_dtype, whole=whole, others_zero=True)
    return without_padding(y, out.shape[1])


def _experts_rows_fake(rows: Tensor, rows_scale: Tensor | None, group_offsets: Tensor, *arguments) -> Tensor:
    *weights, _, gated, _, _, row_dtype, _ = arguments
    checks.sorted_rows(rows, rows_scale, group_offsets, weights, gated)
    checks.row_dtype(row_dtype)
    return rows.new_empty(rows.shape, dtype=row_dtype)


def _forward(rows: Tensor, rows_scale: Tensor | None, group_offsets: Tensor, *arguments) -> tuple[Tensor, ...]:
    """The result (R, H) and `Kept`. arguments: those that `LAYER` names, row_dtype and whole."""
    *layer, row_dtype, whole = arguments
    layer = Layer.of(*layer)
    checks.sorted_rows(rows, rows_scale, group_offsets, (*layer.up, *layer.down), layer.activation.gated)
    checks.row_dtype(row_dtype)
    layer.check_masters()
    x = rows if rows_scale is None else FP8Tensor(rows, rows_scale)
    out, kept = forward(x, Order(group_offsets, whole=whole), layer, None, (row_dtype, row_dtype))
    return out, *kept


def _backward(grad: Tensor, group_offsets: Tensor, *arguments) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of rows, up_master and down_master, empty where nothing asks for them.

    grad: (R, H). arguments: `Kept`, those that `LAYER` names, whole, and the dtype of rows if they ask.
    """
    *arguments, whole, input_dtype = arguments
    kept, layer = Kept(*arguments[:5]), Layer.of(*arguments[5:])
    order = Order(group_offsets, whole=whole)
    ones = torch.ones(grad.shape[0], dtype=torch.float32, device=grad.device)
    grads = backward(grad, order, layer, kept, ones, input_dtype, False)
    return grads.hidden_states, grads.up, grads.down


def _setup_context(ctx, inputs, output) -> None:
    rows, _, group_offsets, *weights = inputs[:7]
    _, projected, *columns = output
    # `projected` stays differentiable, as in `experts_training`.
    ctx.mark_non_differentiable(*columns)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(group_offsets, projected, *columns, *weights)
    ctx.saved, ctx.whole, ctx.dtype = Saved(*inputs[3:13]), inputs[14], rows.dtype


def _run_backward(ctx, grad, *_):
    needed = ctx.needs_input_grad
    if grad is None:
        return (None,) * len(needed)
    saved = ctx.saved
    saved.check_unchanged()
    grads = _backward_op(
        *(grad.contiguous(), *ctx.saved_tensors, *saved.masters, *saved.form, ctx.whole),
        ctx.dtype if needed[0] else None,
    )
    by_input = dict(zip((0, 7, 8), grads, strict=True))
    return tuple(by_input.get(i) if need else None for i, need in enumerate(needed))


_ROWS = "Tensor rows, Tensor? rows_scale, Tensor group_offsets"
_WEIGHTS = "Tensor up_proj, Tensor up_proj_scale_inv, Tensor down_proj, Tensor down_proj_scale_inv"
_KEPT = ", ".join(f"Tensor {name}" for name in Kept._fields)
_op = define(
    f"experts_rows({_ROWS}, {_WEIGHTS}, str activation, bool gated, float? limit, float? alpha, ScalarType row_dtype, "
    "SymInt[]? whole) -> Tensor",
    _experts_rows,
    _experts_rows_fake,
    forward_only=True,
)
# Made of operators that have fakes of their own.
_training_op = define(
    f"experts_rows_training({_ROWS}, {LAYER}, ScalarType row_dtype, SymInt[]? whole) "
    f"-> ({', '.join(['Tensor'] * (1 + len(Kept._fields)))})",
    _forward,
    _forward,
    backward=_run_backward,
    setup_context=_setup_context,
)
_backward_op = define(
    f"experts_rows_training_backward(Tensor grad, Tensor group_offsets, {_KEPT}, {LAYER}, SymInt[]? whole, "
    "ScalarType? input_dtype) -> (Tensor, Tensor, Tensor)",
    _backward,
    _backward,
    backward=no_double_backward,
)
