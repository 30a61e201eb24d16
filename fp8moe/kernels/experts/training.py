"""The experts of a mixture-of-experts layer with a backward: the operator ``fp8moe::experts_training`` and its own."""

import torch
from torch import Tensor

from fp8moe.kernels.activation import Activation
from fp8moe.kernels.experts import checks
from fp8moe.kernels.experts.operands import Operands, Share
from fp8moe.kernels.experts.routing import sort_by_expert
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
from fp8moe.quant.formats import FP8Tensor
from fp8moe.runtime.autograd import recorded
from fp8moe.runtime.operator import define


def experts_training(
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    up_proj: FP8Tensor,
    down_proj: FP8Tensor,
    *,
    activation: Activation,
    up_master: Tensor | None = None,
    down_master: Tensor | None = None,
    first_expert: int = 0,
    num_experts: int | None = None,
    num_rows: int | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """What `fp8moe.kernels.experts.forward.experts` computes, with a backward.

    hidden_states: (T, H) bfloat16, float16 or float32; any H. top_k_index: (T, K) int32 or int64.
    top_k_weights: (T, K) float32, bfloat16 or float16.
    up_proj, down_proj: the FP8 weights, data and scale, as for `experts`; any I.
    up_master, down_master: what these were quantized from, in data's shape: they get the gradients of the weights, in
        their dtype, where they require one. None for frozen weights.
    first_expert, num_experts: where the weights are those of one rank, the index of the first expert that is here, and
        how many there are on all ranks. An assignment to another expert adds nothing and gets no gradient.
    num_rows: assignments to make room for, the same of those beyond, at least one if there are any; None: all T * K.
    out_dtype: bfloat16, float16 or float32, of the result; None: that of hidden_states.
    Returns (T, H) in out_dtype; the results of GEMM 1 are rounded to bfloat16, the weighted sums once.

    Gradients are those of the forward with every quantization taken for the identity (straight through), for
    hidden_states, in its dtype, top_k_weights and the masters. Equal inputs give equal bits.

    What is kept for the backward, with R = T * K or num_rows, I rounded up to a multiple of 128 and H to one of 16, and
    P = R + 127 * min(E, R) rounded down to a multiple of 128: ``4 * R * I`` bytes (half without a gate),
    ``P * H * 33/32`` with an up_master, ``P * I * 33/32`` with a down_master, 8 for each row, and 4 for each expert and
    one more; besides top_k_weights and the FP8 weights. Where H or I is no such multiple, forward and backward make
    padded copies of the FP8 weights.

    Raises TypeError for a wrong dtype, ValueError for a wrong shape or device. The backward raises RuntimeError if a
    master has been changed in place since the forward; so does a backward of the backward.
    """
    up_master, down_master = (master if recorded(master) else None for master in (up_master, down_master))
    out, *_ = _op(
        *(hidden_states, top_k_index, top_k_weights, *up_proj, *down_proj, up_master, down_master),
        *(activation.name, activation.gated, activation.limit, activation.alpha),
        *(first_expert, num_experts, num_rows, out_dtype),
    )
    return out


def _forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, *arguments) -> tuple[Tensor, ...]:
    """The result (T, H); groups and rows of `sort_by_expert`; assignments (R,), see `assignments_of`; and `Kept`.

    arguments: those that `LAYER` and `_SHARE` name.
    """
    layer, share = Layer.of(*arguments[:10]), _share(*arguments[10:])
    checks.experts(Operands(hidden_states, top_k_index, top_k_weights, *layer.up, *layer.down), layer.activation.gated)
    count = layer.down.data.shape[0]
    checks.of_rank(share, count)
    row_dtype, out_dtype = share.dtypes(hidden_states.dtype)
    checks.of_sums(out_dtype)
    layer.check_masters()
    groups, rows = sort_by_expert(top_k_index, count, first_expert=share.first_expert, num_rows=share.num_rows)
    assignments = assignments_of(rows, share)
    order = order_of(groups, rows, assignments, share)
    out, kept = forward(hidden_states, order, layer, top_k_weights, (row_dtype, out_dtype))
    return out, groups, rows, assignments, *kept


def _backward(
    grad: Tensor, top_k_weights: Tensor, groups: Tensor, rows: Tensor, assignments: Tensor, *arguments
) -> tuple[Tensor, ...]:
    """Gradients of hidden_states, top_k_weights, up_master and down_master, empty where nothing asks for them.

    grad: (T, H). arguments: `Kept`, those that `LAYER` and `_SHARE` name, and the dtype of hidden_states and whether
    top_k_weights asks.
    """
    *arguments, input_dtype, routing_grad = arguments
    kept, layer, share = Kept(*arguments[:5]), Layer.of(*arguments[5:15]), _share(*arguments[15:])
    row_weights = top_k_weights.flatten().index_select(0, assignments.clamp(min=0)).float()
    order = order_of(groups, rows, assignments, share)
    d_hidden, dots, d_up, d_down = backward(grad, order, layer, kept, row_weights, input_dtype, routing_grad)
    d_weights = by_assignment(dots, rows).to(top_k_weights.dtype) if routing_grad else dots
    return d_hidden, d_weights, d_up, d_down


def by_assignment(values: Tensor, rows: Tensor) -> Tensor:
    """Values (R, ...) of rows to the assignments rows (T, K) that have them: (T, K, ...), zeros for those without."""
    picked = values.index_select(0, rows.flatten().clamp(min=0)).unflatten(0, rows.shape)
    return torch.where(rows.view(*rows.shape, *[1] * (values.dim() - 1)) >= 0, picked, 0)


def _share(first_expert: int, num_experts: int | None, num_rows: int | None, out_dtype: torch.dtype | None) -> Share:
    return Share(first_expert, num_experts, 0, num_rows, None, out_dtype)


def order_of(groups: Tensor, rows: Tensor, assignments: Tensor, share: Share) -> Order:
    """Tokens in the order of experts; rows and groups of `sort_by_expert`, assignments of `assignments_of`."""
    tokens = assignments.div(max(rows.shape[1], 1), rounding_mode="floor")
    return Order(groups, rows, tokens, (rows.numel(), share.num_experts or len(groups) - 1))


def assignments_of(rows: Tensor, share: Share) -> Tensor:
    """The inverse of rows (T, K), (R,) int32: the assignment t * K + k that has each of the R rows, or -1."""
    count = rows.numel() if share.num_rows is None else share.num_rows
    # Assignments without a row share one past the end.
    target = torch.where(rows >= 0, rows, count).flatten().long()
    index = torch.arange(rows.numel(), dtype=torch.int32, device=rows.device)
    return index.new_full((count + 1,), -1).scatter_(0, target, index)[:count].clone()


def _setup_context(ctx, inputs, output) -> None:
    hidden_states, _, top_k_weights, *weights = inputs[:7]
    _, groups, rows, assignments, projected, *columns = output
    # `projected` stays differentiable, so that the gradients depend on the inputs and double backward reaches an error.
    ctx.mark_non_differentiable(groups, rows, assignments, *columns)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(top_k_weights, groups, rows, assignments, projected, *columns, *weights)
    ctx.saved, ctx.share, ctx.dtype = Saved(*inputs[3:13]), inputs[13:], hidden_states.dtype


def _run_backward(ctx, grad, *_):
    needed = ctx.needs_input_grad
    if grad is None:
        return (None,) * len(needed)
    saved = ctx.saved
    saved.check_unchanged()
    grads = _backward_op(
        *(grad.contiguous(), *ctx.saved_tensors, *saved.masters, *saved.form, *ctx.share),
        *(ctx.dtype if needed[0] else None, needed[2]),
    )
    by_input = dict(zip((0, 2, 7, 8), grads, strict=True))
    return tuple(by_input.get(i) if need else None for i, need in enumerate(needed))


_SHARE = "int first_expert, int? num_experts, SymInt? num_rows, ScalarType? out_dtype"
_KEPT = ", ".join(f"Tensor {name}" for name in ("groups", "rows", "assignments", *Kept._fields))
# Made of operators that have fakes of their own.
_op = define(
    f"experts_training(Tensor hidden_states, Tensor top_k_index, Tensor top_k_weights, {LAYER}, {_SHARE}) "
    f"-> ({', '.join(['Tensor'] * (4 + len(Kept._fields)))})",
    _forward,
    _forward,
    backward=_run_backward,
    setup_context=_setup_context,
)
_backward_op = define(
    f"experts_training_backward(Tensor grad, Tensor top_k_weights, {_KEPT}, {LAYER}, {_SHARE}, "
    "ScalarType? input_dtype, bool routing_grad) -> (Tensor, Tensor, Tensor, Tensor)",
    _backward,
    _backward,
    backward=no_double_backward,
)
