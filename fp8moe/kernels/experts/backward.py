"""Experts with a backward: `experts_training`, and `train_rows` of rows in the order of experts."""

from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from fp8moe.kernels.activation import Activation, weighted_backward
from fp8moe.kernels.experts import checks
from fp8moe.kernels.experts.combine import combine
from fp8moe.kernels.experts.operands import (
    Layer,
    Masters,
    Operands,
    RowOperands,
    Shard,
    pad_columns,
    row_dtype,
    without_padding,
)
from fp8moe.kernels.experts.permute import permute_quantize
from fp8moe.kernels.experts.reference import assignments_of
from fp8moe.kernels.experts.routing import sort_by_expert
from fp8moe.kernels.experts.swiglu import (
    swiglu_backward_quantize,
    swiglu_backward_quantize_rows,
    swiglu_quantize,
    swiglu_quantize_rows,
)
from fp8moe.kernels.gemm.api import grouped_rows, weight_gradients
from fp8moe.quant.formats import BLOCK, FP8Tensor
from fp8moe.quant.quantize import dequantize, quantize_1x128
from fp8moe.quant.transpose import quantize_with_transpose, transpose_fp8
from fp8moe.runtime.operator import Signature, define


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
    """Compute what `experts` does, with a backward.

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

    Forward, input gradient and weight gradient run in FP8, every tensor quantized once in each direction: DeepSeek-V3,
    arXiv:2412.19437, section 3.3. The forward keeps the quantized transposes that weight gradients need and the result
    of GEMM 1 in bfloat16, from which the backward computes the activation anew.

    What is kept for the backward, with R = T * K or num_rows, I rounded up to a multiple of 128 and H to one of 16, and
    P = R + 127 * min(E, R) rounded down to a multiple of 128: ``4 * R * I`` bytes (half without a gate),
    ``P * H * 33/32`` with an up_master, ``P * I * 33/32`` with a down_master, 8 for each row, and 4 for each expert and
    one more; besides top_k_weights and the FP8 weights. Where H or I is no such multiple, forward and backward make
    padded copies of the FP8 weights.

    Raises TypeError for a wrong dtype, ValueError for a wrong shape or device. The backward raises RuntimeError if a
    master has been changed in place since the forward; so does a backward of the backward.
    """
    layer = Layer(FP8Tensor(*up_proj), FP8Tensor(*down_proj), activation)
    masters = Masters.recorded(up_master, down_master)
    shard = Shard(first_expert, num_experts, num_rows=num_rows, out_dtype=out_dtype)
    operands = Operands(hidden_states, top_k_index, top_k_weights, layer, shard=shard)
    checks.training(operands, masters)
    total = shard.total(len(layer.down.data))
    order = RowOrder.of_tokens(top_k_index, len(layer.down.data), total, first_expert=first_expert, num_rows=num_rows)
    dtypes = shard.dtypes(hidden_states.dtype)
    return _train(TrainingOperands(hidden_states, None, order, top_k_weights, layer, masters, *dtypes))


def train_rows(operands: RowOperands, masters: Masters) -> Tensor:
    """`experts_rows` with a backward."""
    checks.sorted_rows(operands)
    checks.masters(operands.layer, masters)
    rows, scale, group_offsets, layer, dtype, whole = operands
    order = RowOrder(group_offsets, whole=whole)
    return _train(TrainingOperands(rows, scale, order, None, layer, masters, dtype, dtype))


class RowOrder(NamedTuple):
    """Which rows there are: the offsets of the experts' groups (E + 1,), and how tokens are sorted into them.

    rows (T, K) of their assignments, and the assignment t * K + k (R,) of each row, -1 where there is none; None: the
        rows lie in this order already.
    whole: rows and groups of a layer of which these are a part; None: this is all of it.
    """

    groups: Tensor
    rows: Tensor | None = None
    assignments: Tensor | None = None
    whole: tuple[int, int] | None = None

    @classmethod
    def of_tokens(
        cls, top_k_index: Tensor, num_experts: int, total: int, *, first_expert: int = 0, num_rows: int | None = None
    ) -> "RowOrder":
        """The order by `sort_by_expert`, which describes the arguments. total: experts on all ranks."""
        groups, rows = sort_by_expert(top_k_index, num_experts, first_expert=first_expert, num_rows=num_rows)
        assignments = assignments_of(rows, rows.numel() if num_rows is None else num_rows)
        return cls(groups, rows, assignments, (rows.numel(), total))

    def tokens(self) -> Tensor | None:
        """The token (R,) of each row, -1 where there is none; None if rows lie in this order already."""
        if self.rows is None:
            return None
        return self.assignments.div(max(self.rows.shape[1], 1), rounding_mode="floor")

    def row_weights(self, top_k_weights: Tensor) -> Tensor:
        """(T, K) -> (R,) float32."""
        return top_k_weights.flatten().index_select(0, self.assignments.clamp(min=0)).float()

    def by_assignment(self, values: Tensor) -> Tensor:
        """Values (R,) of rows to the assignments (T, K) that have them, zeros for those without."""
        picked = values.index_select(0, self.rows.flatten().clamp(min=0)).view(self.rows.shape)
        return torch.where(self.rows >= 0, picked, 0)

    def gather(
        self, x: Tensor | FP8Tensor, columns: int, row_weights: Tensor | None, transposed: bool
    ) -> tuple[FP8Tensor, FP8Tensor | None, Tensor | None]:
        """x in the order of rows, quantized by rows and, if asked for, by columns with padded offsets.

        x: (T, H), or where no tokens are sorted (R, H), which may be quantized by rows already. columns: to which H is
        padded. row_weights: of `columns` alone.
        """
        if not isinstance(x, Tensor):
            rows = FP8Tensor(pad_columns(x.data, columns), x.scale)
            if not transposed:
                return rows, None, None
            _, by_columns, offsets = quantize_with_transpose(dequantize(rows), self.groups)
            return rows, by_columns, offsets
        x = pad_columns(x, columns)
        if transposed:
            return quantize_with_transpose(x, self.groups, tokens=self.tokens(), row_weights=row_weights)
        if self.rows is None:
            return quantize_1x128(x), None, None
        return permute_quantize(x, self.rows, self.assignments.shape[0]), None, None

    def multiply(self, a: FP8Tensor, b: FP8Tensor, dtype: torch.dtype, **options: Any) -> Tensor:
        """``a[rows of e] @ b[e].T``; options: others_zero and low_rank of `grouped_rows`."""
        return grouped_rows(a, b, self.groups, dtype, whole=self.whole, **options)

    def sum(self, y: Tensor, weights: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Rows y (R, H) to tokens (T, H), or themselves."""
        if self.rows is None:
            return y.to(dtype)
        weights = torch.ones_like(self.rows, dtype=torch.bfloat16) if weights is None else weights
        return combine(y, self.rows, weights, dtype)


class TrainingOperands(NamedTuple):
    """Tokens, or rows in the order of experts, and what is computed of them.

    x_scale: of x quantized 1x128. top_k_weights: None for rows. row_dtype: of the results of GEMM 2.
    """

    x: Tensor
    x_scale: Tensor | None
    order: RowOrder
    top_k_weights: Tensor | None
    layer: Annotated[Layer, ("up", "down", "activation")]  # those without biases
    masters: Masters
    row_dtype: torch.dtype
    out_dtype: torch.dtype


class SavedForBackward(NamedTuple):
    """What the forward computes for the backward, empty where that needs it not.

    projected: the result of GEMM 1, which stays differentiable, so that the gradients depend on the inputs and double
        backward reaches an error. x_columns, h_columns: the transposed inputs of both GEMMs.
    """

    projected: Tensor
    x_columns: FP8Tensor
    h_columns: FP8Tensor


class BackwardOperands(NamedTuple):
    """The gradient of the result, and what the forward had and saved. input_dtype: of x; None: it needs no gradient."""

    grad: Tensor
    order: RowOrder
    top_k_weights: Tensor | None
    layer: Annotated[Layer, ("up", "down", "activation")]
    masters: Masters
    saved: SavedForBackward
    input_dtype: torch.dtype | None
    routing_grad: bool


def _forward(operands: TrainingOperands) -> tuple[Tensor, ...]:
    """The weighted sums of tokens, or the results of rows; and the tensors of `SavedForBackward`."""
    order, masters = operands.order, operands.masters
    hidden, size = operands.layer.down.data.shape[1:]
    layer = operands.layer.padded(BLOCK)
    x = operands.x if operands.x_scale is None else FP8Tensor(operands.x, operands.x_scale)
    empty = [layer.up.data.new_empty(0) for _ in range(4)]
    a, x_columns, _ = order.gather(x, layer.down.data.shape[1], None, masters.of_up)
    projected = order.multiply(a, layer.up, torch.bfloat16)
    del a
    h, h_columns = activate(projected, order.groups, layer.activation, size, masters.down_master is not None)
    y = order.multiply(h, layer.down, operands.row_dtype, others_zero=order.rows is None)
    del h
    out = without_padding(order.sum(y, operands.top_k_weights, operands.out_dtype), hidden)
    return out, projected, *(x_columns or empty[:2]), *(h_columns or empty[2:])


def _backward(operands: BackwardOperands) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of x, top_k_weights and the masters, empty where nothing asks for them."""
    grad, order, top_k_weights, layer, masters, saved, input_dtype, routing_grad = operands
    hidden, size = layer.down.data.shape[1:]
    layer = layer.padded(BLOCK)
    d_x, d_weights, d_up, d_down, d_gate = (grad.new_empty(0) for _ in range(5))
    if order.rows is None:
        row_weights = torch.ones(grad.shape[0], dtype=torch.float32, device=grad.device)
    else:
        row_weights = order.row_weights(top_k_weights)

    # The columns take the weights of the rows, for the gradient of down_proj. The rows themselves do without, so that
    # the gradient of the weights is the product of one with its unweighted result.
    columns = layer.down.data.shape[1]
    grad_rows, grad_columns, offsets = order.gather(grad, columns, row_weights, masters.down_master is not None)
    beyond = input_dtype is not None or routing_grad or masters.of_up
    if beyond:
        d_h = order.multiply(grad_rows, transpose_fp8(layer.down), torch.bfloat16)
    del grad_rows
    if masters.down_master is not None:
        shape = (1, hidden, size)
        d_down = _weight_gradient(grad_columns, saved.h_columns, offsets, shape, masters.down_master.dtype)
    del grad_columns
    if not beyond:
        return d_x, d_weights, d_up, d_down, d_gate

    d_rows, d_columns, offsets, dots = activate_backward(
        saved.projected, d_h, row_weights, order.groups, layer.activation, masters.of_up
    )
    del d_h
    if routing_grad:
        d_weights = order.by_assignment(dots).to(top_k_weights.dtype)
    if input_dtype is not None:
        transposed, dtype = transpose_fp8(layer.up), row_dtype(input_dtype)
        dx = order.multiply(d_rows, transposed, dtype, others_zero=order.rows is None)
        del transposed
        d_x = without_padding(order.sum(dx, None, input_dtype), hidden)
        del dx
    del d_rows
    # Last, after the temporary tensors of the others: these are the largest.
    both = 2 if layer.activation.gated else 1
    if masters.up_master is not None and masters.up_master.shape[1] == both * size:
        shape = (both, size, hidden)
        d_up = _weight_gradient(d_columns, saved.x_columns, offsets, shape, masters.up_master.dtype)
    elif masters.of_up:
        halves = zip((masters.gate_master, masters.up_master), *(part.chunk(2) for part in d_columns), strict=True)
        d_gate, d_up = (
            grad.new_empty(0)
            if master is None
            else _weight_gradient(FP8Tensor(*half), saved.x_columns, offsets, (1, size, hidden), master.dtype)
            for master, *half in halves
        )
    return d_x, d_weights, d_up, d_down, d_gate


def activate(
    projected: Tensor, groups: Tensor, activation: Activation, size: int, transposed: bool
) -> tuple[FP8Tensor, FP8Tensor | None]:
    """The activation of projected (R, 2I) or (R, I), quantized by rows and, if asked for, by columns.

    size: the columns that are not padding.
    """
    if activation.is_swiglu and not transposed:
        return swiglu_quantize_rows(projected, groups, activation=activation)[0], None
    if activation.is_swiglu:
        h = swiglu_quantize(projected, groups, activation=activation)
        return h.rows, h.columns
    values = values_of(projected, activation, size)
    if not transposed:
        return quantize_1x128(values), None
    h = quantize_with_transpose(values, groups)
    return h.rows, h.columns


def values_of(projected: Tensor, activation: Activation, size: int) -> Tensor:
    """The values of `activate` in float32, for an activation that is no SwiGLU."""
    values = activation(projected.float())
    values[:, size:] = 0  # some functions have another value at 0
    return values


def activate_backward(
    projected: Tensor, d_h: Tensor, row_weights: Tensor, groups: Tensor, activation: Activation, transposed: bool
) -> tuple[FP8Tensor, FP8Tensor | None, Tensor | None, Tensor]:
    """The gradient of projected by rows and, if asked for, by columns with padded offsets; and that of row_weights.

    d_h: (R, I), without the weights of the rows.
    """
    if activation.is_swiglu and not transposed:
        rows, dots, *_ = swiglu_backward_quantize_rows(projected, d_h, row_weights, groups, activation=activation)
        return rows, None, None, dots
    if activation.is_swiglu:
        d, dots = swiglu_backward_quantize(projected, d_h, row_weights, groups, activation=activation)
        return *d, dots
    d_projected, _, dots = weighted_backward(projected, d_h, row_weights, activation)
    if not transposed:
        return quantize_1x128(d_projected), None, None, dots
    d = quantize_with_transpose(d_projected, groups)
    return *d, dots


def _weight_gradient(
    grad_columns: FP8Tensor, columns: FP8Tensor, offsets: Tensor, shape: tuple[int, int, int], dtype: torch.dtype
) -> Tensor:
    """`weight_gradients` (E, N, K) without padding; shape: projections, N of each, and K."""
    projections, rows, width = shape
    padded = weight_gradients(grad_columns, columns, offsets, dtype)
    return padded.unflatten(1, (projections, -1))[:, :, :rows, :width].flatten(1, 2).contiguous()


# ---- the operators ----


def _train(operands: TrainingOperands) -> Tensor:
    out, *_ = _training(*_TRAINING.pack(operands))
    return out


def _save(ctx, inputs, output) -> None:
    operands = _TRAINING.unpack(*inputs)
    _, projected, *columns = output
    order, layer = operands.order, operands.layer
    routed = order.groups, order.rows, order.assignments, operands.top_k_weights
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*columns)
    ctx.save_for_backward(*routed, *layer.up, *layer.down, projected, *columns)
    ctx.whole, ctx.activation, ctx.input_dtype = order.whole, layer.activation, operands.x.dtype
    # Not among the saved tensors, whose check for changes would not tell which parameter it is.
    ctx.masters = operands.masters
    ctx.versions = [None if master is None else master._version for master in operands.masters]


def _differentiate(ctx, grad, *_) -> tuple[Tensor | None, ...]:
    needed = dict(zip(_TRAINING.names, ctx.needs_input_grad, strict=True))
    if grad is None:
        return (None,) * len(needed)
    _check_unchanged(ctx.masters, ctx.versions, ctx.activation.gated)
    groups, rows, assignments, top_k_weights, *weights = ctx.saved_tensors
    up, up_scale, down, down_scale, projected, x_columns, x_scale, h_columns, h_scale = weights
    operands = BackwardOperands(
        grad.contiguous(),
        RowOrder(groups, rows, assignments, ctx.whole),
        top_k_weights,
        Layer(FP8Tensor(up, up_scale), FP8Tensor(down, down_scale), ctx.activation),
        ctx.masters,
        SavedForBackward(projected, FP8Tensor(x_columns, x_scale), FP8Tensor(h_columns, h_scale)),
        ctx.input_dtype if needed["x"] else None,
        needed["top_k_weights"],
    )
    d_x, d_weights, *of_masters = _training_backward(*_BACKWARD.pack(operands))
    grads = {"x": d_x, "top_k_weights": d_weights} | dict(zip(Masters._fields, of_masters, strict=True))
    return tuple(grads.get(name) if need else None for name, need in needed.items())


def _check_unchanged(masters: Masters, versions: list[int | None], gated: bool) -> None:
    names = ("gate_up_proj" if gated and masters.gate_master is None else "up_proj", "down_proj", "gate_proj")
    for name, master, version in zip(names, masters, versions, strict=True):
        if master is not None and master._version != version:
            raise RuntimeError(
                f"fp8moe.GroupedExperts: {name}, shape {tuple(master.shape)}, has been changed in place between "
                "forward and backward: call the backward before the optimizer's step, or the forward again"
            )


def no_double_backward(ctx, *grads):
    raise RuntimeError("fp8moe.GroupedExperts: there is no double backward; its gradients cannot be differentiated")


# Both are made of operators that have fakes of their own.
_TRAINING, _BACKWARD = Signature(TrainingOperands), Signature(BackwardOperands)
_training_backward = define(
    "experts_training_backward -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _backward,
    _backward,
    backward=no_double_backward,
    signature=_BACKWARD,
)
_training = define(
    "experts_training -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _forward,
    _forward,
    backward=_differentiate,
    setup_context=_save,
    signature=_TRAINING,
)
