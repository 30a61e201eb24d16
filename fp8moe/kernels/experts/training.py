"""The experts of a mixture-of-experts layer with a backward: the operator ``fp8moe::experts_training`` and its own.

Forward, input gradient and weight gradient run in FP8, every tensor quantized once in each direction: DeepSeek-V3,
arXiv:2412.19437, section 3.3. The forward keeps the quantized transposes that weight gradients need and the result of
GEMM 1 in bfloat16, from which the backward computes the activation anew.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fp8moe.kernels.activation import Activation
from fp8moe.kernels.experts import checks
from fp8moe.kernels.experts.activation_backward import activation_backward
from fp8moe.kernels.experts.combine import combine
from fp8moe.kernels.experts.operands import Operands, pad_columns, pad_weights, without_padding
from fp8moe.kernels.experts.permute import permute_quantize
from fp8moe.kernels.experts.routing import sort_by_expert
from fp8moe.kernels.experts.swiglu_quantize import swiglu_backward_quantize, swiglu_quantize
from fp8moe.kernels.gemm.grouped import grouped_gemm
from fp8moe.kernels.gemm.grouped_k import weight_gradients
from fp8moe.quant.formats import BLOCK, FP8Tensor
from fp8moe.quant.quantize import quantize_1x128
from fp8moe.quant.transpose import quantize_with_transpose
from fp8moe.quant.transpose_fp8 import transpose_fp8
from fp8moe.runtime.autograd import recorded
from fp8moe.runtime.operators import define


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
) -> Tensor:
    """What `fp8moe.kernels.experts.forward.experts` computes, with a backward.

    hidden_states: (T, H) bfloat16, float16 or float32; any H. top_k_index: (T, K) int32 or int64.
    top_k_weights: (T, K) float32, bfloat16 or float16.
    up_proj, down_proj: the FP8 weights, data and scale, as for `experts`; any I.
    up_master, down_master: what these were quantized from, in data's shape: they get the gradients of the weights, in
        their dtype, where they require one. None for frozen weights.
    Returns (T, H) in the dtype of hidden_states; the results of GEMM 1 are rounded to bfloat16.

    Gradients are those of the forward with every quantization taken for the identity (straight through), for
    hidden_states, top_k_weights and the masters. Equal inputs give equal bits.

    What is kept for the backward, with R = T * K rows, I rounded up to a multiple of 128 and H to one of 16, and
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
    )
    return out


class _Layer(NamedTuple):
    """The FP8 weights, what they were quantized from where that gets gradients, and the activation."""

    up: FP8Tensor
    down: FP8Tensor
    up_master: Tensor | None
    down_master: Tensor | None
    activation: Activation

    @classmethod
    def of(cls, *arguments) -> "_Layer":
        """From the arguments of an operator that `_LAYER` names."""
        up, up_scale, down, down_scale, up_master, down_master, name, gated, limit, alpha = arguments
        activation = Activation(limit, alpha, name, gated)
        return cls(FP8Tensor(up, up_scale), FP8Tensor(down, down_scale), up_master, down_master, activation)

    def padded(self) -> "_Layer":
        """With I a multiple of 128 and H of 16; see `pad_weights`."""
        up, down = pad_weights(self.up.data, self.down.data, BLOCK)
        return self._replace(up=FP8Tensor(up, self.up.scale), down=FP8Tensor(down, self.down.scale))


class _Kept(NamedTuple):
    """What the forward hands to the backward, empty where that needs it not.

    groups, rows: of `sort_by_expert`. assignments: (R,) int32, see `_assignments`. projected: the result of GEMM 1.
    x_columns, h_columns: data and scale of the transposed inputs of both GEMMs.
    """

    groups: Tensor
    rows: Tensor
    assignments: Tensor
    projected: Tensor
    x_columns: Tensor
    x_columns_scale: Tensor
    h_columns: Tensor
    h_columns_scale: Tensor


def _forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, *arguments) -> tuple[Tensor, ...]:
    """The result (T, H) and `_Kept`. arguments: those that `_LAYER` names."""
    layer = _Layer.of(*arguments)
    checks.experts(Operands(hidden_states, top_k_index, top_k_weights, *layer.up, *layer.down), layer.activation.gated)
    _check_masters(layer)
    count, hidden, size = layer.down.data.shape
    layer = layer.padded()
    x = pad_columns(hidden_states, layer.down.data.shape[1])
    groups, rows = sort_by_expert(top_k_index, count)
    assignments = _assignments(rows)
    tokens = _tokens(assignments, rows)
    empty = [x.new_empty(0) for _ in range(4)]

    a, x_columns, _ = _gather(x, groups, rows, tokens, None, layer.up_master is not None)
    projected = grouped_gemm(a, layer.up, groups)
    del a
    h, h_columns = _activate(projected, groups, layer.activation, size, layer.down_master is not None)
    y = _grouped(h, layer.down, groups, _row_dtype(hidden_states))
    del h
    out = without_padding(combine(y, rows, top_k_weights, hidden_states.dtype), hidden)
    return out, *_Kept(groups, rows, assignments, projected, *(x_columns or empty[:2]), *(h_columns or empty[2:]))


def _backward(grad: Tensor, top_k_weights: Tensor, *arguments) -> tuple[Tensor, ...]:
    """Gradients of hidden_states, top_k_weights, up_master and down_master, empty where nothing asks for them.

    grad: (T, H). arguments: `_Kept`, those that `_LAYER` names, and whether hidden_states and top_k_weights ask.
    """
    kept = _Kept(*arguments[: len(_Kept._fields)])
    *layer, input_grad, routing_grad = arguments[len(kept) :]
    layer = _Layer.of(*layer)
    groups, rows, activation = kept.groups, kept.rows, layer.activation
    hidden, size = layer.down.data.shape[1:]
    layer = layer.padded()
    tokens = _tokens(kept.assignments, rows)
    row_weights = top_k_weights.flatten().index_select(0, kept.assignments.clamp(min=0)).float()
    d_hidden, d_weights, d_up, d_down = (grad.new_empty(0) for _ in range(4))

    # The columns take the weights of the rows, for the gradient of down_proj. The rows themselves do without, so that
    # the gradient of the weights is the product of one with its unweighted result.
    grad_rows, grad_columns, offsets = _gather(
        pad_columns(grad, layer.down.data.shape[1]), groups, rows, tokens, row_weights, layer.down_master is not None
    )
    beyond = input_grad or routing_grad or layer.up_master is not None
    if beyond:
        d_h = grouped_gemm(grad_rows, transpose_fp8(layer.down), groups)
    del grad_rows
    if layer.down_master is not None:
        h_columns = FP8Tensor(kept.h_columns, kept.h_columns_scale)
        d_down = _weight_gradient(grad_columns, h_columns, offsets, (1, hidden, size), layer.down_master.dtype)
    del grad_columns
    if not beyond:
        return d_hidden, d_weights, d_up, d_down

    d_rows, d_columns, offsets, dots = _activate_backward(
        kept.projected, d_h, row_weights, groups, activation, layer.up_master is not None
    )
    del d_h
    if routing_grad:
        d_weights = dots.index_select(0, rows.flatten().clamp(min=0)).view_as(rows)
        d_weights = torch.where(rows >= 0, d_weights, 0).to(top_k_weights.dtype)
    if input_grad:
        dx = _grouped(d_rows, transpose_fp8(layer.up), groups, _row_dtype(grad))
        ones = torch.ones_like(rows, dtype=torch.bfloat16)
        d_hidden = without_padding(combine(dx, rows, ones, grad.dtype), hidden)
        del dx
    del d_rows
    if layer.up_master is not None:
        # Last, after the temporary tensors of the others: it is the largest.
        x_columns = FP8Tensor(kept.x_columns, kept.x_columns_scale)
        shape = (2 if activation.gated else 1, size, hidden)
        d_up = _weight_gradient(d_columns, x_columns, offsets, shape, layer.up_master.dtype)
    return d_hidden, d_weights, d_up, d_down


def _activate(
    projected: Tensor, groups: Tensor, activation: Activation, size: int, transposed: bool
) -> tuple[FP8Tensor, FP8Tensor | None]:
    """The activation of projected (R, 2I) or (R, I), quantized by rows and, if asked for, by columns.

    size: the columns that are not padding.
    """
    if activation.is_swiglu:
        h = swiglu_quantize(projected, groups, activation=activation)
        return h.rows, h.columns if transposed else None
    values = activation(projected.float())
    values[:, size:] = 0  # some functions have another value at 0
    if not transposed:
        return quantize_1x128(values), None
    h = quantize_with_transpose(values, groups)
    return h.rows, h.columns


def _activate_backward(
    projected: Tensor, d_h: Tensor, row_weights: Tensor, groups: Tensor, activation: Activation, transposed: bool
) -> tuple[FP8Tensor, FP8Tensor | None, Tensor | None, Tensor]:
    """The gradient of projected by rows and, if asked for, by columns with padded offsets; and that of row_weights.

    d_h: (R, I), without the weights of the rows.
    """
    if activation.is_swiglu:
        d, dots = swiglu_backward_quantize(projected, d_h, row_weights, groups, activation=activation)
        return d.rows, d.columns if transposed else None, d.offsets, dots
    d_h = d_h.float()
    d_projected, value = activation_backward(projected.float(), row_weights[:, None] * d_h, activation)
    dots = (value * d_h).sum(-1)
    if not transposed:
        return quantize_1x128(d_projected), None, None, dots
    d = quantize_with_transpose(d_projected, groups)
    return *d, dots


def _gather(
    x: Tensor, groups: Tensor, rows: Tensor, tokens: Tensor, row_weights: Tensor | None, transposed: bool
) -> tuple[FP8Tensor, FP8Tensor | None, Tensor | None]:
    """x (T, H) in the order of rows, quantized by rows and, if asked for, by columns with padded offsets."""
    if not transposed:
        return permute_quantize(x, rows, tokens.shape[0]), None, None
    return quantize_with_transpose(x, groups, tokens=tokens, row_weights=row_weights)


def _grouped(a: FP8Tensor, b: FP8Tensor, groups: Tensor, dtype: torch.dtype) -> Tensor:
    """`grouped_gemm` with a result in `dtype`."""
    out = torch.empty((a.data.shape[0], b.data.shape[1]), dtype=dtype, device=a.data.device)
    return grouped_gemm(a, b, groups, out=out)


def _weight_gradient(
    grad_columns: FP8Tensor, columns: FP8Tensor, offsets: Tensor, shape: tuple[int, int, int], dtype: torch.dtype
) -> Tensor:
    """`weight_gradients` (E, N, K) without padding; shape: projections, N of each, and K."""
    projections, rows, width = shape
    padded = weight_gradients(grad_columns, columns, offsets, dtype)
    return padded.unflatten(1, (projections, -1))[:, :, :rows, :width].flatten(1, 2).contiguous()


def _row_dtype(x: Tensor) -> torch.dtype:
    """Of the rows that are summed to a result like x."""
    return torch.bfloat16 if x.dtype is torch.bfloat16 else torch.float32


def _assignments(rows: Tensor) -> Tensor:
    """The inverse of rows (T, K), (R,) int32: the assignment t * K + k that has each of the R = T * K rows, or -1."""
    count = rows.numel()
    # Assignments without a row share one past the end.
    target = torch.where(rows >= 0, rows, count).flatten().long()
    index = torch.arange(count, dtype=torch.int32, device=rows.device)
    return index.new_full((count + 1,), -1).scatter_(0, target, index)[:count].clone()


def _tokens(assignments: Tensor, rows: Tensor) -> Tensor:
    """The token of each row, -1 where there is none."""
    return assignments.div(max(rows.shape[1], 1), rounding_mode="floor")


def _check_masters(layer: _Layer) -> None:
    masters = (("up_master", layer.up_master, layer.up.data), ("down_master", layer.down_master, layer.down.data))
    for name, master, data in masters:
        if master is not None and master.shape != data.shape:
            expected = f"{tuple(data.shape)} like the FP8 weight"
            raise ValueError(f"{name}: expected shape {expected}, got {tuple(master.shape)}")


def _setup_context(ctx, inputs, output) -> None:
    _, _, top_k_weights, *weights, up_master, down_master, name, gated, limit, alpha = inputs
    _, groups, rows, assignments, projected, *columns = output
    # `projected` stays differentiable, so that the gradients depend on the inputs and double backward reaches an error.
    ctx.mark_non_differentiable(groups, rows, assignments, *columns)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(top_k_weights, groups, rows, assignments, projected, *columns, *weights)
    # Not among the saved tensors, whose check for changes would not tell which parameter it is.
    ctx.masters = (up_master, down_master)
    ctx.versions = [None if master is None else master._version for master in ctx.masters]
    ctx.form = (name, gated, limit, alpha)


def _run_backward(ctx, grad, *_):
    needed = ctx.needs_input_grad
    if grad is None:
        return (None,) * len(needed)
    names = ("gate_up_proj" if ctx.form[1] else "up_proj", "down_proj")
    for name, master, version in zip(names, ctx.masters, ctx.versions, strict=True):
        if master is not None and master._version != version:
            raise RuntimeError(
                f"fp8moe.GroupedExperts: {name}, shape {tuple(master.shape)}, has been changed in place between "
                "forward and backward: call the backward before the optimizer's step, or the forward again"
            )
    grads = _backward_op(grad.contiguous(), *ctx.saved_tensors, *ctx.masters, *ctx.form, needed[0], needed[2])
    by_input = dict(zip((0, 2, 7, 8), grads, strict=True))
    return tuple(by_input.get(i) if need else None for i, need in enumerate(needed))


def _no_double_backward(ctx, *grads):
    raise RuntimeError("fp8moe.GroupedExperts: there is no double backward; its gradients cannot be differentiated")


_LAYER = (
    "Tensor up_proj, Tensor up_proj_scale_inv, Tensor down_proj, Tensor down_proj_scale_inv, "
    "Tensor? up_master, Tensor? down_master, str activation, bool gated, float? limit, float? alpha"
)
_KEPT = ", ".join(f"Tensor {name}" for name in _Kept._fields)
# Made of operators that have fakes of their own.
_op = define(
    f"experts_training(Tensor hidden_states, Tensor top_k_index, Tensor top_k_weights, {_LAYER}) "
    f"-> ({', '.join(['Tensor'] * (1 + len(_Kept._fields)))})",
    _forward,
    _forward,
    backward=_run_backward,
    setup_context=_setup_context,
)
_backward_op = define(
    f"experts_training_backward(Tensor grad, Tensor top_k_weights, {_KEPT}, {_LAYER}, bool input_grad, "
    "bool routing_grad) -> (Tensor, Tensor, Tensor, Tensor)",
    _backward,
    _backward,
    backward=_no_double_backward,
)
