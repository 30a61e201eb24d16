"""Experts with a backward: `experts_training` for routed tokens, and `train_rows` for rows sorted by expert.

Frozen weights may have LoRA factors. The second factor's product (from r to H or I columns) is added inside the FP8
GEMMs, to their float32 sums. The first factor's product (to r columns) and the gradients of the factors are computed by
two kernels of `kernels.experts.lora`, which read unpermuted tokens by index, so that LoRA needs no extra (R, H) matrix.
"""

from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from fp8moe.kernels.activation import Activation, weighted_backward
from fp8moe.kernels.experts import checks
from fp8moe.kernels.experts.combine import combine
from fp8moe.kernels.experts.lora import adapter_product, lora_gradient, lora_shrink
from fp8moe.kernels.experts.operands import (
    Layer,
    LowRank,
    Masters,
    RowOperands,
    Shard,
    TokenOperands,
    pad_columns,
    row_dtype,
    without_padding,
)
from fp8moe.kernels.experts.permute import permute_quantize
from fp8moe.kernels.experts.routing import AssignedRows, SortedAssignments, assigned_rows, sort_by_expert
from fp8moe.kernels.experts.swiglu import (
    Activated,
    ActivationGradient,
    Beside,
    swiglu_backward_quantize,
    swiglu_quantize,
)
from fp8moe.kernels.gemm.api import grouped_gemm_swiglu_keeping, grouped_rows, weight_gradient
from fp8moe.quant.formats import BLOCK, FP8Tensor
from fp8moe.quant.quantize import dequantize, quantize_1x128
from fp8moe.quant.transpose import (
    Transposed,
    backward_operand,
    quantize_columns,
    quantize_with_transpose,
    transposed_weight,
)
from fp8moe.runtime.autograd import KeptMasters
from fp8moe.runtime.operator import Signature, define

_NAME = "fp8moe.GroupedExperts"


def experts_training(
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    layer: Layer,
    masters: Masters = Masters(),  # noqa: B008 (immutable)
    *,
    shard: Shard = Shard(),  # noqa: B008 (immutable)
    low_rank: LowRank | None = None,
) -> Tensor:
    """Compute the result of `experts_of_tokens`, with a backward.

    hidden_states: (T, H) bfloat16, float16 or float32; any H. top_k_index: (T, K) int32 or int64.
    top_k_weights: (T, K) float32, bfloat16 or float16.
    layer: the weights in FP8 or four bits, without biases. masters: master weights; masters that require gradients get
        gradients of their own dtype.
    shard: the experts held by this rank; assignments to other experts, and assignments beyond shard.num_rows rows, add
        nothing and get no gradient. num_rows, if given, must be at least 1 unless there are no assignments.
    low_rank: LoRA factors, added to weights without masters; multiplied in bfloat16 with sums in float32.
    Returns (T, H) in the shard's out_dtype. The results of GEMM 1 (gate and up projection) are rounded to bfloat16, the
    weighted sums are rounded once.

    Gradients treat every quantization as the identity (straight through). hidden_states (in its dtype), top_k_weights,
    masters and tensors of low_rank get gradients; gradients of low_rank are computed from activations and gradients
    in bfloat16. Equal inputs give equal bits.

    Forward, input gradient and weight gradient run in FP8. Each activation and each gradient is quantized at most once
    by rows and at most once by columns: DeepSeek-V3, arXiv:2412.19437, section 3.3. The forward quantizes by rows and
    keeps the result of GEMM 1 in bfloat16; the backward computes the activation anew, and quantizes by columns what the
    weight gradients read: hidden_states, the activation and the gradients. SonicMoE, arXiv:2512.14080, keeps the same.

    Bytes kept for the backward: the sum of ``4 * R * I`` (half of this without a gate), ``4 * R * r`` with a low_rank,
    ``R * I`` if the low_rank has dropout, ``4 * T * K``, and ``4 * (E + 1)``. Here R is T * K or num_rows, and I is
    rounded up to a multiple of 128. Also kept are top_k_weights, the weights, low_rank and, with an up_master or a
    low_rank, hidden_states or low_rank.dropped: the caller's tensors themselves, no copies. If I is not a multiple of
    128, or H not a multiple of 16, forward and backward make padded copies of the FP8 weights. For weights in four
    bits, the backward makes FP8 copies, and so does the forward with a low_rank or where I is not a multiple of 128.

    Raises TypeError for a wrong dtype, ValueError for a wrong shape or device. The backward raises RuntimeError if a
    master, an FP8 weight, or hidden_states that were kept, have been changed in place since the forward; so does a
    backward of the backward.
    """
    masters = masters.recorded()
    checks.tokens(TokenOperands(hidden_states, top_k_index, top_k_weights, layer, shard=shard))
    checks.masters(layer, masters)
    count = len(layer.down.data)
    order = RowOrder.of_tokens(top_k_index, count, shard)
    dtypes = shard.dtypes(hidden_states.dtype)
    return _train(TrainingOperands(hidden_states, None, order, top_k_weights, layer, masters, *dtypes, low_rank))


def train_rows(operands: RowOperands, masters: Masters) -> Tensor:
    """Compute `experts_of_rows` for operands in a `RowOperands`, with a backward."""
    checks.rows(operands)
    checks.masters(operands.layer, masters)
    rows, scale, groups, layer, dtype, whole, _ = operands
    return _train(
        TrainingOperands(rows, scale, RowOrder(groups, whole=whole), None, layer, masters, dtype, dtype, None)
    )


class RowOrder(NamedTuple):
    """The order in which a call processes rows: sorted by expert.

    groups: (E + 1,), the offsets of the experts' groups of rows.
    rows: (T, K), the row of each assignment, -1 for none; None if the input of the call is rows that are already sorted
        by expert. num_rows: R, the number of rows; None with them.
    whole: numbers of rows and groups of the whole layer, of which the call may compute a part; None: the call computes
        the whole layer.
    """

    groups: Tensor
    rows: Tensor | None = None
    num_rows: int | None = None
    whole: tuple[int, int] | None = None

    @classmethod
    def of_tokens(cls, top_k_index: Tensor, count: int, shard: Shard) -> "RowOrder":
        """Sort assignments by expert, for a shard with `count` experts, and return the resulting order."""
        groups, rows = sort_by_expert(top_k_index, count, first_expert=shard.first_expert, num_rows=shard.num_rows)
        num_rows = rows.numel() if shard.num_rows is None else shard.num_rows
        return cls(groups, rows, num_rows, (rows.numel(), shard.total(count)))

    def assigned(self, top_k_weights: Tensor | None) -> AssignedRows | None:
        """Return the token and the routing weight of each row; None if the input is rows that are already sorted."""
        if self.rows is None:
            return None
        return assigned_rows(SortedAssignments(self.groups, self.rows), top_k_weights, self.num_rows)

    def by_assignment(self, values: Tensor) -> Tensor:
        """Map one value per row to one per assignment: (R,) -> (T, K), 0 for assignments without a row."""
        picked = values.index_select(0, self.rows.flatten().clamp(min=0)).view(self.rows.shape)
        return torch.where(self.rows >= 0, picked, 0)

    def quantized(self, x: Tensor | FP8Tensor, columns: int) -> FP8Tensor:
        """Sort x by expert and quantize its rows.

        x: tokens (T, H). If the input of the call is already sorted rows, x is these rows (R, H) and may be quantized
        1x128. columns: the number of columns, H, after padding.
        """
        if not isinstance(x, Tensor):
            return FP8Tensor(pad_columns(x.data, columns), x.scale)
        x = pad_columns(x, columns)
        return quantize_1x128(x) if self.rows is None else permute_quantize(x, self.rows, self.num_rows)

    def both_ways(self, x: Tensor, columns: int, tokens: Tensor | None) -> Transposed:
        """Sort x, tokens or sorted rows, by expert and quantize it by rows and by columns.

        columns: see `quantized`. tokens: those of `assigned`; None if x is sorted rows.
        """
        return quantize_with_transpose(pad_columns(x, columns), self.groups, tokens=tokens)

    def transposed(self, x: Tensor | FP8Tensor, columns: int, tokens: Tensor | None) -> FP8Tensor:
        """Sort x by expert and quantize its columns. x, columns: as for `quantized`, tokens: as for `both_ways`."""
        x = pad_columns(x, columns) if isinstance(x, Tensor) else dequantize(self.quantized(x, columns))
        return quantize_columns(x, self.groups, tokens=tokens)[0]

    def multiply(self, a: FP8Tensor, b: FP8Tensor, dtype: torch.dtype, **options: Any) -> Tensor:
        """Return ``a[rows of e] @ b[e].T`` for every expert e; options: others_zero, low_rank of `grouped_rows`."""
        return grouped_rows(a, b, self.groups, dtype, whole=self.whole, **options)

    def sum(self, y: Tensor, weights: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return the weighted sum of each token's rows of y: (R, H) -> (T, H). If the input is rows, return y."""
        if self.rows is None:
            return y.to(dtype)
        weights = torch.ones_like(self.rows, dtype=torch.bfloat16) if weights is None else weights
        return combine(y, self.rows, weights, dtype)


class TrainingOperands(NamedTuple):
    """Operands of the forward: tokens, or rows sorted by expert, with the layer.

    x_scale: scale of x if x is quantized 1x128, otherwise None. top_k_weights: None if x is rows. row_dtype: dtype of
    the results of GEMM 2.
    """

    x: Tensor
    x_scale: Tensor | None
    order: RowOrder
    top_k_weights: Tensor | None
    layer: Annotated[Layer, ("up", "down", "activation")]  # all fields but biases
    masters: Masters
    row_dtype: torch.dtype
    out_dtype: torch.dtype
    low_rank: LowRank | None

    @property
    def kept_input(self) -> tuple[Tensor | None, Tensor | None]:
        """x and x_scale if the backward reads them, for a weight gradient or the gradient of up_a; otherwise None."""
        if self.low_rank is None:
            return (self.x, self.x_scale) if self.masters.of_up else (None, None)
        return (self.x if self.low_rank.dropped is None else None), None


class SavedForBackward(NamedTuple):
    """Tensors that the forward computes for the backward, empty where the backward does not need them.

    projected: the result of GEMM 1. Autograd treats this tensor as differentiable, so that the gradients computed from
        it depend on the inputs of the forward, and a double backward raises RuntimeError.
    up_ranks, down_ranks: (R, r), products of the inputs of GEMM 1 and GEMM 2 with up_a and down_a. kept: bool (R, I),
        dropout's mask.
    """

    projected: Tensor
    up_ranks: Tensor
    down_ranks: Tensor
    kept: Tensor


class TrainingBackwardOperands(NamedTuple):
    """Operands of the backward: the gradient of the result, operands of the forward and the tensors it saved.

    input_dtype: dtype of x, or None if x needs no gradient. routing_grad: top_k_weights needs a gradient. x, x_scale:
    `TrainingOperands.kept_input`.
    """

    grad: Tensor
    order: RowOrder
    top_k_weights: Tensor | None
    layer: Annotated[Layer, ("up", "down", "activation")]
    masters: Masters
    saved: SavedForBackward
    input_dtype: torch.dtype | None
    routing_grad: bool
    low_rank: LowRank | None
    x: Tensor | None
    x_scale: Tensor | None

    @property
    def wanted(self) -> list[str]:
        """Names of the forward's operands that get gradients."""
        low = self.low_rank
        given = {"x": self.input_dtype, "top_k_weights": self.routing_grad or None, **self.masters._asdict()}
        given |= {} if low is None else low._replace(dropout=None)._asdict()
        return [name for name, value in given.items() if value is not None]


def _forward(operands: TrainingOperands) -> tuple[Tensor, ...]:
    """Return the result (a weighted sum per token, or a result per row), then the tensors of `SavedForBackward`."""
    order, low = operands.order, operands.low_rank
    _, hidden, size = operands.layer.sizes
    # Weights in four bits cannot be padded, and take no low_rank. They become FP8 for the time of this call.
    layer = operands.layer.in_blocks() if size % BLOCK or low is not None else operands.layer
    layer = layer.padded(BLOCK)
    x = operands.x if operands.x_scale is None else FP8Tensor(operands.x, operands.x_scale)
    up_ranks, down_ranks, kept = (layer.up.data.new_empty(0) for _ in range(3))
    up_addition = down_addition = None
    if low is not None:
        assigned = order.assigned(operands.top_k_weights)
        up_ranks = lora_shrink(low.multiplied(operands.x), low.up_a, order.groups, assigned and assigned.tokens)
        up_addition = up_ranks, low.up_b
    a, values = order.quantized(x, layer.sizes[1]), None
    if low is None and layer.activation.is_swiglu:
        options = {"activation": layer.activation, "whole": order.whole}
        h, projected = grouped_gemm_swiglu_keeping(a, layer.up, order.groups, **options)
    else:
        projected = order.multiply(a, layer.up, torch.bfloat16, low_rank=up_addition)
        beside = Beside.NOTHING if low is None else Beside.VALUES
        h, values = activate(projected, order.groups, layer.activation, size, beside)
    del a
    if low is not None:
        if low.dropout:
            values, kept = torch.native_dropout(values, low.dropout, True)
        down_ranks = lora_shrink(values, low.down_a, order.groups)
        down_addition = down_ranks, low.down_b
    del values
    others_zero = order.rows is None
    y = order.multiply(h, layer.down, operands.row_dtype, others_zero=others_zero, low_rank=down_addition)
    del h
    out = without_padding(order.sum(y, operands.top_k_weights, operands.out_dtype), hidden)
    return out, projected, up_ranks, down_ranks, kept


_GRADIENTS = "x", "top_k_weights", *Masters._fields, *LowRank._fields[:-1]


def _backward(operands: TrainingBackwardOperands) -> tuple[Tensor, ...]:
    """Return the gradients of `_GRADIENTS`, empty where none is wanted.

    PyTorch's vmap takes no operator that returns a list.
    """
    grads = _gradients(operands)
    return tuple(grads[name] if name in grads else operands.grad.new_empty(0) for name in _GRADIENTS)


def _gradients(operands: TrainingBackwardOperands) -> dict[str, Tensor]:
    """Return the gradients of the operands named by `operands.wanted`."""
    grad, order, top_k_weights, layer, masters, saved, input_dtype, routing_grad, low, x, x_scale = operands
    layer = layer.in_blocks()
    hidden, size = layer.down.data.shape[1:]
    layer = layer.padded(BLOCK)
    grads: dict[str, Tensor] = {}
    assigned = order.assigned(top_k_weights)
    tokens = assigned and assigned.tokens
    row_weights = (
        torch.ones(len(grad), dtype=torch.float32, device=grad.device) if assigned is None else assigned.weights
    )

    # `grad` is quantized without the routing weights: the gradient of a routing weight is the dot product of the
    # unweighted result with the gradient. For the gradient of down_proj, the weights multiply the activation instead.
    # `_factor_gradients` multiplies d_ranks by them.
    addition = None
    if low is not None:
        grad_read = pad_columns(grad.bfloat16(), low.down_b.shape[1])
        d_ranks = lora_shrink(grad_read, low.down_b.mT.contiguous(), order.groups, tokens)
        addition = None if low.dropout else (d_ranks, low.down_a.mT.contiguous())
    columns = layer.down.data.shape[1]
    if masters.down_master is None:
        grad_rows, grad_columns = order.quantized(grad, columns), None
    else:
        grad_rows, grad_columns, _ = order.both_ways(grad, columns, tokens)
    d_h = order.multiply(grad_rows, transposed_weight(layer.down), torch.bfloat16, low_rank=addition)
    del grad_rows

    beside = Beside.NOTHING if masters.down_master is None and not masters.of_up else Beside.COLUMNS
    if low is not None:
        beside = Beside.VALUES
        if low.dropout:
            d_h += low.drop(adapter_product(d_ranks, low.down_a, order.groups), saved.kept)
    d = activate_backward(saved.projected, d_h, row_weights, order.groups, layer.activation, beside)
    del d_h
    if low is not None:
        of_factors, d_ranks = _factor_gradients(operands, grad_read, d_ranks, d, tokens, row_weights)
        grads |= of_factors
        del grad_read
    d_rows, dots, d_columns, offsets, h_columns = d[:5]
    del d  # with it d_projected and values, the largest temporary tensors of LoRA
    if masters.down_master is not None:
        grads["down_master"] = weight_gradient(grad_columns, h_columns, offsets, masters.down_master)
    del grad_columns, h_columns
    if routing_grad:
        grads["top_k_weights"] = order.by_assignment(dots).to(top_k_weights.dtype)
    if input_dtype is not None:
        addition = None if low is None or low.dropped is not None else (d_ranks, low.up_a.mT.contiguous())
        transposed, dtype, others_zero = transposed_weight(layer.up), row_dtype(input_dtype), order.rows is None
        dx = order.multiply(d_rows, transposed, dtype, others_zero=others_zero, low_rank=addition)
        del transposed
        grads["x"] = without_padding(order.sum(dx, None, input_dtype), hidden)
        del dx
    del d_rows
    if low is not None and low.dropped is not None:
        dx = order.sum(adapter_product(d_ranks, low.up_a, order.groups), None, low.dropped.dtype)
        grads["dropped"] = without_padding(dx, hidden)
    if not masters.of_up:
        return {name: grads[name] for name in operands.wanted}
    # The largest gradients are allocated last, when temporary tensors for the other gradients have been freed.
    x_columns = order.transposed(x if x_scale is None else FP8Tensor(x, x_scale), columns, tokens)
    both = 2 if layer.activation.gated else 1
    if masters.up_master is not None and masters.up_master.shape[1] == both * size:
        grads["up_master"] = weight_gradient(d_columns, x_columns, offsets, masters.up_master, both)
    else:
        for name, *half in zip(("gate_master", "up_master"), *(part.chunk(2) for part in d_columns), strict=True):
            if (master := getattr(masters, name)) is not None:
                grads[name] = weight_gradient(FP8Tensor(*half), x_columns, offsets, master)
    return {name: grads[name] for name in operands.wanted}


def _factor_gradients(
    operands: TrainingBackwardOperands,
    grad: Tensor,
    d_ranks: Tensor,
    d: ActivationGradient,
    tokens: Tensor | None,
    row_weights: Tensor,
) -> tuple[dict[str, Tensor], Tensor]:
    """Return the gradients of the LoRA factors, by name, and the gradient (R, r) of up_a's product with the input.

    grad: (T, H) bfloat16, the gradient of the result. d_ranks: (R, r), the product of grad's rows with down_b, not yet
    multiplied by row_weights. d: the result of `activate_backward`. tokens, row_weights: those of `RowOrder.assigned`.
    """
    order, saved, low = operands.order, operands.saved, operands.low_rank
    groups = order.groups
    values = low.drop(d.values, saved.kept) if low.dropout else d.values
    d_ranks, down_ranks = (
        torch.mul(ranks, row_weights[:, None], out=torch.empty_like(ranks))  # float32 product, rounded to bfloat16 once
        for ranks in (d_ranks, saved.down_ranks)
    )
    d_down_a = lora_gradient(d_ranks, values, groups)
    d_up_b = lora_gradient(saved.up_ranks, d.d_projected, groups).mT
    d_ranks = lora_shrink(d.d_projected, low.up_b.mT.contiguous(), groups)
    d_down_b = lora_gradient(down_ranks, grad, groups, tokens).mT
    d_up_a = lora_gradient(d_ranks, low.multiplied(operands.x), groups, tokens)
    return {"up_a": d_up_a, "up_b": d_up_b, "down_a": d_down_a, "down_b": d_down_b}, d_ranks


def activate(projected: Tensor, groups: Tensor, activation: Activation, size: int, beside: Beside) -> Activated:
    """Apply the activation to projected (R, 2I) or (R, I) and quantize the result. size: I without padding."""
    if activation.is_swiglu:
        return swiglu_quantize(projected, groups, activation=activation, beside=beside)
    values = activation(projected.float())
    values[:, size:] = 0  # set padding columns to 0: some activations do not map 0 to 0
    return Activated(quantize_1x128(values), values.bfloat16() if beside is Beside.VALUES else None)


def activate_backward(
    projected: Tensor, d_h: Tensor, row_weights: Tensor, groups: Tensor, activation: Activation, beside: Beside
) -> ActivationGradient:
    """Run the backward of `activate`. d_h: (R, I), the gradient of ``row_weights[:, None] * activation(projected)``."""
    if activation.is_swiglu:
        return swiglu_backward_quantize(projected, d_h, row_weights, groups, activation=activation, beside=beside)
    # Make `projected` contiguous: its layout decides the order in which PyTorch sums, and so the bits of the sums.
    d_projected, values, dots = weighted_backward(projected.contiguous(), d_h, row_weights, activation)
    if beside is Beside.COLUMNS:
        rows, *columns = quantize_with_transpose(d_projected, groups)
        weighted = row_weights[:, None] * values
        return ActivationGradient(rows, dots, *columns, quantize_columns(weighted, groups)[0])
    both = (d_projected.bfloat16(), values.bfloat16()) if beside is Beside.VALUES else ()
    return ActivationGradient(quantize_1x128(d_projected), dots, None, None, None, *both)


# ---- the operators ----


def _train(operands: TrainingOperands) -> Tensor:
    out, *_ = _training(*_TRAINING.pack(operands))
    return out


def _save(ctx, inputs, output) -> None:
    operands = _TRAINING.unpack(*inputs)
    _, projected, *others = output
    order, layer, low = operands.order, operands.layer, operands.low_rank
    routed = order.groups, order.rows, operands.top_k_weights
    *factors, ctx.dropout = low or (None,) * 6
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*others)
    # Save the FP8 weights too, so that autograd refuses a backward after adapters were merged into the weights.
    kept = *backward_operand(layer.up), *backward_operand(layer.down), *operands.kept_input
    ctx.save_for_backward(*routed, *kept, *factors, projected, *others)
    ctx.num_rows, ctx.whole = order.num_rows, order.whole
    ctx.activation, ctx.input_dtype = layer.activation, operands.x.dtype
    both = layer.activation.gated and operands.masters.gate_master is None
    names = "gate_up_proj" if both else "up_proj", "down_proj", "gate_proj"
    ctx.masters = KeptMasters(_NAME, dict(zip(names, operands.masters, strict=True)))


def _differentiate(ctx, grad, *_) -> tuple[Tensor | None, ...]:
    needed = dict(zip(_TRAINING.names, ctx.needs_input_grad, strict=True))
    if grad is None:
        return (None,) * len(needed)
    masters = Masters(*ctx.masters.unchanged())
    groups, rows, top_k_weights, up, up_scale, down, down_scale, x, x_scale, *others = ctx.saved_tensors
    up_a, up_b, down_a, down_b, dropped, *saved = others
    operands = TrainingBackwardOperands(
        grad.contiguous(),
        RowOrder(groups, rows, ctx.num_rows, ctx.whole),
        top_k_weights,
        Layer(FP8Tensor(up, up_scale), FP8Tensor(down, down_scale), ctx.activation),
        masters,
        SavedForBackward(*saved),
        ctx.input_dtype if needed["x"] else None,
        needed["top_k_weights"],
        None if up_a is None else LowRank(up_a, up_b, down_a, down_b, dropped, ctx.dropout),
        x,
        x_scale,
    )
    if any(hasattr(master, "grad_sum") for master in masters):
        # No operator: one that writes to grad_sum could have no autograd formula.
        if torch.is_grad_enabled():
            no_double_backward(ctx)
        grads = _gradients(operands)
    else:
        grads = dict(zip(_GRADIENTS, _training_backward(*_BACKWARD.pack(operands)), strict=True))
    return tuple(grads.get(name) if need else None for name, need in needed.items())


def no_double_backward(ctx, *grads):
    raise RuntimeError(f"{_NAME}: there is no double backward; its gradients cannot be differentiated")


# `_forward` and `_backward` call only operators that have fakes, so each function is also the fake of its operator.
_TRAINING, _BACKWARD = Signature(TrainingOperands), Signature(TrainingBackwardOperands)
_training_backward = define(
    f"experts_training_backward -> ({', '.join(['Tensor'] * len(_GRADIENTS))})",
    _backward,
    _backward,
    backward=no_double_backward,
    signature=_BACKWARD,
)
_training = define(
    "experts_training -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _forward,
    _forward,
    backward=_differentiate,
    setup_context=_save,
    signature=_TRAINING,
)
