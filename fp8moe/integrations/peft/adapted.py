"""Experts in FP8 with a low-rank addition to each weight (LoRA, arXiv:2106.09685), the FP8 weights as they are.

From ranks to H or I the FP8 GEMMs add the product to their sums, before these are rounded. To ranks, and to the
gradients of factors, two kernels read rows in the order of experts, or tokens where these lie, so that there is no
matrix (R, H) beside those of the FP8 layer (`kernels.experts.lora`).
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fp8moe.integrations.peft.activation import activate, activate_backward
from fp8moe.integrations.peft.products import grouped
from fp8moe.kernels.activation import Activation
from fp8moe.kernels.experts import checks
from fp8moe.kernels.experts.backward import Order, assignments_of, by_assignment, no_double_backward, order_of
from fp8moe.kernels.experts.lora import lora_gradient, lora_shrink
from fp8moe.kernels.experts.operands import Layer, Operands, pad_columns, row_dtype, without_padding
from fp8moe.kernels.experts.routing import sort_by_expert
from fp8moe.quant.formats import BLOCK, FP8Tensor
from fp8moe.quant.transpose import transpose_fp8


class Factors(NamedTuple):
    """What is added to the weights of experts: ``up_b @ up_a`` and ``down_b @ down_a``, scaled already.

    up_a (E, r, H), up_b (E, P, r), down_a (E, r, Q), down_b (E, H, r), bfloat16. I is padded with zeros to a multiple
    of 128: P is that, twice with a gate, and Q. H and r are padded to multiples of 16.
    """

    up_a: Tensor
    up_b: Tensor
    down_a: Tensor
    down_b: Tensor


def adapted_experts(
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    layer: Layer,
    factors: Factors,
    *,
    dropped: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """What `experts_training` computes for ``layer``, without masters, plus what the factors add.

    hidden_states: (T, H) bfloat16, float16 or float32. top_k_index: (T, K). top_k_weights: (T, K).
    dropped: hidden_states after dropout, which the first factors read; None: hidden_states.
    dropout: of what the second ones read, the result of the activation.
    Returns (T, H) in the dtype of hidden_states.

    Gradients of hidden_states, dropped, top_k_weights and the factors are straight through every quantization. Those of
    the factors come from activations and gradients in bfloat16, before these are quantized. Equal inputs give equal
    bits. Beside its arguments the forward keeps ``2 * R * P`` bytes for R = T * K rows (and ``R * Q`` of a mask with
    dropout), ``4 * R * r``, and a copy of what the first factors read if that is not bfloat16.

    Raises TypeError for a wrong dtype, ValueError for a wrong shape or device. The backward raises RuntimeError if the
    FP8 weights have been changed in place since the forward; so does a backward of the backward.
    """
    checks.experts(Operands(hidden_states, top_k_index, top_k_weights, layer))
    arguments = hidden_states, dropped, top_k_weights, *factors, *layer.up, *layer.down
    return _Adapted.apply(*arguments, top_k_index, layer.activation, dropout)


class _Routed:
    """Tokens in the order of experts."""

    def __init__(self, top_k_index: Tensor, num_experts: int):
        groups, rows = sort_by_expert(top_k_index, num_experts)
        assignments = assignments_of(rows, rows.numel())
        self.order: Order = order_of(groups, rows, assignments, (rows.numel(), num_experts))
        self.assignments = assignments.clamp(min=0)

    def weights(self, top_k_weights: Tensor) -> Tensor:
        """(T, K) -> (R,) float32."""
        return top_k_weights.flatten().index_select(0, self.assignments).float()


class _Adapted(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dropped, top_k_weights, up_a, up_b, down_a, down_b, *others):
        *weights, top_k_index, activation, dropout = others
        layer, routed = _layer(weights, activation), _Routed(top_k_index, len(up_a))
        ctx.routed, ctx.activation, ctx.dropout, ctx.dtype = routed, activation, dropout, x.dtype
        hidden, size = layer.down.data.shape[1:]
        layer = layer.padded(BLOCK)
        order, groups = routed.order, routed.order.groups
        read = pad_columns((x if dropped is None else dropped).bfloat16(), up_a.shape[2])  # by the first factors
        up_ranks = lora_shrink(read, up_a, groups, order.tokens)
        a, _, _ = order.gather(x, layer.down.data.shape[1], None, False)
        projected = order.multiply(a, layer.up, torch.bfloat16, low_rank=(up_ranks, up_b))
        del a
        h, values = activate(projected, groups, activation, size)
        mask = None
        if dropout:
            values, mask = torch.native_dropout(values, dropout, True)
        down_ranks = lora_shrink(values, down_a, groups)
        del values
        y = order.multiply(h, layer.down, row_dtype(x.dtype), low_rank=(down_ranks, down_b))
        del h
        out = without_padding(order.sum(y, top_k_weights, x.dtype), hidden)
        del y
        kept = projected, up_ranks, down_ranks, mask
        # With the FP8 weights, so that autograd refuses a backward after they were merged into.
        ctx.save_for_backward(read, top_k_weights, up_a, up_b, down_a, down_b, *weights, *kept)
        return out

    @staticmethod
    def backward(ctx, grad):
        call = ctx.routed, ctx.activation, ctx.dropout, ctx.dtype
        with torch.autocast(grad.device.type, enabled=False):
            grads = _Gradients.apply(grad.contiguous(), *ctx.saved_tensors, call, ctx.needs_input_grad[:2])
        return *grads, *[None] * (len(ctx.needs_input_grad) - len(grads))


class _Gradients(torch.autograd.Function):
    """Those of x, dropped, top_k_weights and the factors, which depend on all of them: but no further derivative."""

    @staticmethod
    def forward(ctx, grad, read, top_k_weights, up_a, up_b, down_a, down_b, *kept):
        *weights, projected, up_ranks, down_ranks, mask, call, needed = kept
        routed, activation, dropout, dtype = call
        layer, order, groups = _layer(weights, activation).padded(BLOCK), routed.order, routed.order.groups
        row_weights = routed.weights(top_k_weights)
        keep = 1 / (1 - dropout)

        # As in `backward.backward`, gradients come without the weights of the rows, which take them later.
        grad_read = pad_columns(grad.bfloat16(), down_b.shape[1])
        d_ranks = lora_shrink(grad_read, down_b.mT.contiguous(), groups, order.tokens)
        rows, _, _ = order.gather(grad, layer.down.data.shape[1], None, False)
        low_rank = (d_ranks, down_a.mT.contiguous()) if mask is None else None
        d_h = order.multiply(rows, transpose_fp8(layer.down), torch.bfloat16, low_rank=low_rank)
        del rows
        if mask is not None:
            d_h += torch.ops.aten.native_dropout_backward(grouped(d_ranks, down_a, groups), mask, keep)
        d_rows, dots, d_projected, values = activate_backward(projected, d_h, row_weights, groups, activation)
        del d_h
        if mask is not None:
            values = torch.ops.aten.native_dropout_backward(values, mask, keep)
        d_ranks, down_ranks = (_weighted(ranks, row_weights) for ranks in (d_ranks, down_ranks))
        d_down_a = lora_gradient(d_ranks, values, groups)
        del values
        d_up_b = lora_gradient(up_ranks, d_projected, groups).mT
        d_ranks = lora_shrink(d_projected, up_b.mT.contiguous(), groups)
        del d_projected
        d_down_b = lora_gradient(down_ranks, grad_read, groups, order.tokens).mT
        d_up_a = lora_gradient(d_ranks, read, groups, order.tokens)

        d_x = d_read = None
        if needed[0]:
            low_rank = None if needed[1] else (d_ranks, up_a.mT.contiguous())
            dx = order.multiply(d_rows, transpose_fp8(layer.up), row_dtype(dtype), low_rank=low_rank)
            d_x = without_padding(order.sum(dx, None, dtype), grad.shape[1])
            del dx
        if needed[1]:
            d_read = without_padding(order.sum(grouped(d_ranks, up_a, groups), None, dtype), grad.shape[1])
        d_weights = by_assignment(dots, order.rows).to(top_k_weights.dtype)
        return d_x, d_read, d_weights, d_up_a, d_up_b, d_down_a, d_down_b

    @staticmethod
    def backward(ctx, *grads):
        no_double_backward(ctx, *grads)


def _weighted(ranks: Tensor, row_weights: Tensor) -> Tensor:
    """ranks (R, r) times the weights of the rows, rounded once."""
    return torch.mul(ranks, row_weights[:, None], out=torch.empty_like(ranks))


def _layer(weights: Sequence[Tensor], activation: Activation) -> Layer:
    """weights: data and scale of both projections."""
    up, up_scale, down, down_scale = weights
    return Layer(FP8Tensor(up, up_scale), FP8Tensor(down, down_scale), activation)
