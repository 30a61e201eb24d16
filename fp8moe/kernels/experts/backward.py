"""Experts with a backward: `experts_training`, and `experts_rows_training` of rows in the order of experts.

Forward, input gradient and weight gradient run in FP8, every tensor quantized once in each direction: DeepSeek-V3,
arXiv:2412.19437, section 3.3. The forward keeps the quantized transposes that weight gradients need and the result of
GEMM 1 in bfloat16, from which the backward computes the activation anew.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fp8moe.kernels.activation import Activation, weighted_backward
from fp8moe.kernels.experts import checks
from fp8moe.kernels.experts.combine import combine
from fp8moe.kernels.experts.operands import (
    Layer,
    Masters,
    Operands,
    Rows,
    Share,
    pad_columns,
    row_dtype,
    without_padding,
)
from fp8moe.kernels.experts.permute import permute_quantize
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
from fp8moe.runtime.autograd import recorded
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

    What is kept for the backward, with R = T * K or num_rows, I rounded up to a multiple of 128 and H to one of 16, and
    P = R + 127 * min(E, R) rounded down to a multiple of 128: ``4 * R * I`` bytes (half without a gate),
    ``P * H * 33/32`` with an up_master, ``P * I * 33/32`` with a down_master, 8 for each row, and 4 for each expert and
    one more; besides top_k_weights and the FP8 weights. Where H or I is no such multiple, forward and backward make
    padded copies of the FP8 weights.

    Raises TypeError for a wrong dtype, ValueError for a wrong shape or device. The backward raises RuntimeError if a
    master has been changed in place since the forward; so does a backward of the backward.
    """
    masters = Masters(*(master if recorded(master) else None for master in (up_master, down_master)))
    layer = Layer(FP8Tensor(*up_proj), FP8Tensor(*down_proj), activation)
    share = Share(first_expert, num_experts, num_rows=num_rows, out_dtype=out_dtype)
    operands = Operands(hidden_states, top_k_index, top_k_weights, layer, share=share, masters=masters)
    out, *_ = _tokens_op(*_TOKENS.pack(operands))
    return out


def experts_rows_training(operands: Rows) -> Tensor:
    """`experts_rows` with a backward."""
    out, *_ = _rows_op(*_ROWS.pack(operands))
    return out


class Order(NamedTuple):
    """Which rows there are: offsets of the experts' groups (E + 1,), and where tokens are sorted into them, rows (T, K)
    of their assignments and the token (R,) of each row, -1 where there is none. Otherwise they lie in this order.

    whole: rows and groups of a layer of which these are a part; None: this is all of it.
    """

    groups: Tensor
    rows: Tensor | None = None
    tokens: Tensor | None = None
    whole: tuple[int, int] | None = None

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
            return quantize_with_transpose(x, self.groups, tokens=self.tokens, row_weights=row_weights)
        if self.rows is None:
            return quantize_1x128(x), None, None
        return permute_quantize(x, self.rows, self.tokens.shape[0]), None, None

    def multiply(
        self,
        a: FP8Tensor,
        b: FP8Tensor,
        dtype: torch.dtype,
        *,
        others_zero: bool = False,
        low_rank: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """``a[rows of e] @ b[e].T``; see `grouped_rows`."""
        options = {"whole": self.whole, "others_zero": others_zero, "low_rank": low_rank}
        return grouped_rows(a, b, self.groups, dtype, **options)

    def sum(self, y: Tensor, weights: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Rows y (R, H) to tokens (T, H), or themselves."""
        if self.rows is None:
            return y.to(dtype)
        weights = torch.ones_like(self.rows, dtype=torch.bfloat16) if weights is None else weights
        return combine(y, self.rows, weights, dtype)


class Kept(NamedTuple):
    """What the forward hands to the backward, empty where that needs it not.

    projected: the result of GEMM 1, which stays differentiable, so that the gradients depend on the inputs and double
        backward reaches an error. x_columns, h_columns: data and scale of the transposed inputs of both GEMMs.
    """

    projected: Tensor
    x_columns: Tensor
    x_columns_scale: Tensor
    h_columns: Tensor
    h_columns_scale: Tensor

    def columns(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.x_columns, self.x_columns_scale, self.h_columns, self.h_columns_scale


class Gradients(NamedTuple):
    """Those of tokens or rows, of the rows' weights (R,) and of the masters, empty where nothing asks for them."""

    hidden_states: Tensor
    row_weights: Tensor
    up: Tensor
    down: Tensor


def forward(
    x: Tensor | FP8Tensor,
    order: Order,
    layer: Layer,
    masters: Masters,
    weights: Tensor | None,
    dtypes: tuple[torch.dtype, torch.dtype],
) -> tuple[Tensor, Kept]:
    """The weighted sums of tokens, or rows. weights: (T, K) or None. dtypes: of rows and of the result."""
    hidden, size = layer.down.data.shape[1:]
    layer = layer.padded(BLOCK)
    empty = [layer.up.data.new_empty(0) for _ in range(4)]
    row_dtype, out_dtype = dtypes
    a, x_columns, _ = order.gather(x, layer.down.data.shape[1], None, masters.up_master is not None)
    projected = order.multiply(a, layer.up, torch.bfloat16)
    del a
    h, h_columns = activate(projected, order.groups, layer.activation, size, masters.down_master is not None)
    y = order.multiply(h, layer.down, row_dtype, others_zero=order.rows is None)
    del h
    out = without_padding(order.sum(y, weights, out_dtype), hidden)
    return out, Kept(projected, *(x_columns or empty[:2]), *(h_columns or empty[2:]))


def backward(
    grad: Tensor,
    order: Order,
    layer: Layer,
    masters: Masters,
    kept: Kept,
    row_weights: Tensor,
    input_dtype: torch.dtype | None,
    routing_grad: bool,
) -> Gradients:
    """From what `forward` was called with and has kept.

    grad: of its result. row_weights: (R,) float32. input_dtype: of x; None where it needs no gradient.
    """
    activation = layer.activation
    hidden, size = layer.down.data.shape[1:]
    layer = layer.padded(BLOCK)
    d_x, d_weights, d_up, d_down = (grad.new_empty(0) for _ in range(4))

    # The columns take the weights of the rows, for the gradient of down_proj. The rows themselves do without, so that
    # the gradient of the weights is the product of one with its unweighted result.
    columns = layer.down.data.shape[1]
    grad_rows, grad_columns, offsets = order.gather(grad, columns, row_weights, masters.down_master is not None)
    beyond = input_dtype is not None or routing_grad or masters.up_master is not None
    if beyond:
        d_h = order.multiply(grad_rows, transpose_fp8(layer.down), torch.bfloat16)
    del grad_rows
    if masters.down_master is not None:
        h_columns = FP8Tensor(kept.h_columns, kept.h_columns_scale)
        d_down = _weight_gradient(grad_columns, h_columns, offsets, (1, hidden, size), masters.down_master.dtype)
    del grad_columns
    if not beyond:
        return Gradients(d_x, d_weights, d_up, d_down)

    d_rows, d_columns, offsets, dots = activate_backward(
        kept.projected, d_h, row_weights, order.groups, activation, masters.up_master is not None
    )
    del d_h
    if routing_grad:
        d_weights = dots
    if input_dtype is not None:
        transposed, dtype = transpose_fp8(layer.up), row_dtype(input_dtype)
        dx = order.multiply(d_rows, transposed, dtype, others_zero=order.rows is None)
        del transposed
        d_x = without_padding(order.sum(dx, None, input_dtype), hidden)
        del dx
    del d_rows
    if masters.up_master is not None:
        # Last, after the temporary tensors of the others: it is the largest.
        x_columns = FP8Tensor(kept.x_columns, kept.x_columns_scale)
        shape = (2 if activation.gated else 1, size, hidden)
        d_up = _weight_gradient(d_columns, x_columns, offsets, shape, masters.up_master.dtype)
    return Gradients(d_x, d_weights, d_up, d_down)


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
    """Its values in float32 for an activation that is no SwiGLU; see `activate`."""
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


class _Saved(NamedTuple):
    """The tensors that the backward reads. rows, assignments, top_k_weights: only where tokens are sorted."""

    groups: Tensor
    rows: Tensor | None
    assignments: Tensor | None
    top_k_weights: Tensor | None
    kept: Kept
    up: FP8Tensor
    down: FP8Tensor


class _Backward(NamedTuple):
    """Operands of the backward. grad: of the result. The others: see `Order` and `backward`."""

    grad: Tensor
    saved: _Saved
    masters: Masters
    activation: Activation
    whole: tuple[int, int] | None
    input_dtype: torch.dtype | None
    routing_grad: bool


def order_of(groups: Tensor, rows: Tensor, assignments: Tensor, whole: tuple[int, int]) -> Order:
    """Tokens in the order of experts; rows and groups of `sort_by_expert`, assignments of `assignments_of`."""
    return Order(groups, rows, assignments.div(max(rows.shape[1], 1), rounding_mode="floor"), whole)


def assignments_of(rows: Tensor, count: int) -> Tensor:
    """The inverse of rows (T, K), (count,) int32: the assignment t * K + k that has each row, or -1."""
    # Assignments without a row share one past the end.
    target = torch.where(rows >= 0, rows, count).flatten().long()
    index = torch.arange(rows.numel(), dtype=torch.int32, device=rows.device)
    return index.new_full((count + 1,), -1).scatter_(0, target, index)[:count].clone()


def by_assignment(values: Tensor, rows: Tensor) -> Tensor:
    """Values (R, ...) of rows to the assignments rows (T, K) that have them: (T, K, ...), zeros for those without."""
    picked = values.index_select(0, rows.flatten().clamp(min=0)).unflatten(0, rows.shape)
    return torch.where(rows.view(*rows.shape, *[1] * (values.dim() - 1)) >= 0, picked, 0)


def _whole(rows: Tensor, layer: Layer, share: Share) -> tuple[int, int]:
    return rows.numel(), share.num_experts or len(layer.down.data)


def _forward_tokens(operands: Operands) -> tuple[Tensor, ...]:
    """The result (T, H); groups and rows of `sort_by_expert`; assignments (R,), see `assignments_of`; and `Kept`."""
    checks.training(operands)
    x, layer, share = operands.hidden_states, operands.layer, operands.share
    window = {"first_expert": share.first_expert, "num_rows": share.num_rows}
    groups, rows = sort_by_expert(operands.top_k_index, len(layer.down.data), **window)
    assignments = assignments_of(rows, rows.numel() if share.num_rows is None else share.num_rows)
    order = order_of(groups, rows, assignments, _whole(rows, layer, share))
    out, kept = forward(x, order, layer, operands.masters, operands.top_k_weights, share.dtypes(x.dtype))
    return out, groups, rows, assignments, *kept


def _forward_rows(operands: Rows) -> tuple[Tensor, ...]:
    """The result (R, H) and `Kept`."""
    checks.sorted_rows(operands)
    x = operands.rows if operands.rows_scale is None else FP8Tensor(operands.rows, operands.rows_scale)
    order = Order(operands.group_offsets, whole=operands.whole)
    out, kept = forward(x, order, operands.layer, operands.masters, None, (operands.row_dtype, operands.row_dtype))
    return out, *kept


def _run_backward(operands: _Backward) -> tuple[Tensor, ...]:
    """`Gradients`, those of the rows' weights as gradients of top_k_weights."""
    grad, saved = operands.grad, operands.saved
    if saved.rows is None:
        order = Order(saved.groups, whole=operands.whole)
        row_weights = torch.ones(grad.shape[0], dtype=torch.float32, device=grad.device)
    else:
        order = order_of(saved.groups, saved.rows, saved.assignments, operands.whole)
        row_weights = saved.top_k_weights.flatten().index_select(0, saved.assignments.clamp(min=0)).float()
    layer = Layer(saved.up, saved.down, operands.activation)
    grads = backward(
        *(grad, order, layer, operands.masters, saved.kept, row_weights),
        *(operands.input_dtype, operands.routing_grad),
    )
    if operands.routing_grad:
        d_weights = by_assignment(grads.row_weights, saved.rows).to(saved.top_k_weights.dtype)
        grads = grads._replace(row_weights=d_weights)
    return tuple(grads)


def _save_tokens(ctx, inputs, output) -> None:
    operands = _TOKENS.unpack(*inputs)
    _, groups, rows, assignments, *kept = output
    layer, kept = operands.layer, Kept(*kept)
    _save(ctx, _Saved(groups, rows, assignments, operands.top_k_weights, kept, layer.up, layer.down), operands)
    ctx.mark_non_differentiable(groups, rows, assignments, *kept.columns())
    ctx.whole, ctx.input_dtype = _whole(rows, layer, operands.share), operands.hidden_states.dtype


def _save_rows(ctx, inputs, output) -> None:
    operands = _ROWS.unpack(*inputs)
    _, *kept = output
    layer, kept = operands.layer, Kept(*kept)
    _save(ctx, _Saved(operands.group_offsets, None, None, None, kept, layer.up, layer.down), operands)
    ctx.mark_non_differentiable(*kept.columns())
    ctx.whole, ctx.input_dtype = operands.whole, operands.rows.dtype


def _save(ctx, saved: _Saved, operands: Operands | Rows) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*_SAVED.pack(saved))
    # Not among the saved tensors, whose check for changes would not tell which parameter it is.
    ctx.masters, ctx.activation = operands.masters, operands.layer.activation
    ctx.versions = [None if master is None else master._version for master in operands.masters]


def _check_unchanged(masters: Masters, versions: list[int | None], gated: bool) -> None:
    names = ("gate_up_proj" if gated else "up_proj", "down_proj")
    for name, master, version in zip(names, masters, versions, strict=True):
        if master is not None and master._version != version:
            raise RuntimeError(
                f"fp8moe.GroupedExperts: {name}, shape {tuple(master.shape)}, has been changed in place between "
                "forward and backward: call the backward before the optimizer's step, or the forward again"
            )


def _backward_of(name: str, signature: Signature) -> Callable[..., tuple[Tensor | None, ...]]:
    """The backward that autograd calls of the operator with this name and signature."""
    backward_op = define(
        f"{name}_backward -> (Tensor, Tensor, Tensor, Tensor)",
        _run_backward,
        _run_backward,
        backward=no_double_backward,
        signature=_BACKWARD,
    )

    def run(ctx, grad, *_):
        needed = dict(zip(signature.names, ctx.needs_input_grad, strict=True))
        if grad is None:
            return (None,) * len(needed)
        _check_unchanged(ctx.masters, ctx.versions, ctx.activation.gated)
        saved = _SAVED.unpack(*ctx.saved_tensors)
        routing_grad = needed.get("top_k_weights", False)
        input_dtype = ctx.input_dtype if needed.get("hidden_states") or needed.get("rows") else None
        operands = (saved, ctx.masters, ctx.activation, ctx.whole, input_dtype, routing_grad)
        d_x, d_weights, d_up, d_down = backward_op(*_BACKWARD.pack(_Backward(grad.contiguous(), *operands)))
        grads = {"hidden_states": d_x, "rows": d_x, "top_k_weights": d_weights}
        grads |= {"up_master": d_up, "down_master": d_down}
        return tuple(grads.get(name) if need else None for name, need in needed.items())

    return run


def no_double_backward(ctx, *grads):
    raise RuntimeError("fp8moe.GroupedExperts: there is no double backward; its gradients cannot be differentiated")


_SAVED, _BACKWARD = Signature(_Saved), Signature(_Backward)
_TOKENS = Signature(Operands, ("hidden_states", "top_k_index", "top_k_weights", "layer", "share", "masters"))
_ROWS = Signature(Rows)
# Made of operators that have fakes of their own.
_tokens_op, _rows_op = (
    define(
        f"{name} -> ({', '.join(['Tensor'] * (results + len(Kept._fields)))})",
        forward,
        forward,
        backward=_backward_of(name, signature),
        setup_context=save,
        signature=signature,
    )
    for name, signature, forward, save, results in (
        ("experts_training", _TOKENS, _forward_tokens, _save_tokens, 4),
        ("experts_rows_training", _ROWS, _forward_rows, _save_rows, 1),
    )
)
