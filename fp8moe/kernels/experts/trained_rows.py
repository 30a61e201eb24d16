"""Forward and backward of trainable experts over rows in the order of experts, inside of operators.

Forward, input gradient and weight gradient run in FP8, every tensor quantized once in each direction: DeepSeek-V3,
arXiv:2412.19437, section 3.3. The forward keeps the quantized transposes that weight gradients need and the result of
GEMM 1 in bfloat16, from which the backward computes the activation anew.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fp8moe.kernels.activation import Activation, weighted_backward
from fp8moe.kernels.experts.combine import combine
from fp8moe.kernels.experts.operands import pad_columns, pad_weights, row_dtype, without_padding
from fp8moe.kernels.experts.permute import permute_quantize
from fp8moe.kernels.experts.swiglu import (
    swiglu_backward_quantize,
    swiglu_backward_quantize_rows,
    swiglu_quantize,
    swiglu_quantize_rows,
)
from fp8moe.kernels.gemm.grouped import grouped_rows
from fp8moe.kernels.gemm.grouped_k import weight_gradients
from fp8moe.quant.formats import BLOCK, FP8Tensor
from fp8moe.quant.quantize import dequantize, quantize_1x128
from fp8moe.quant.transpose import quantize_with_transpose, transpose_fp8

LAYER = (
    "Tensor up_proj, Tensor up_proj_scale_inv, Tensor down_proj, Tensor down_proj_scale_inv, "
    "Tensor? up_master, Tensor? down_master, str activation, bool gated, float? limit, float? alpha"
)


class Layer(NamedTuple):
    """The FP8 weights, what they were quantized from where that gets gradients, and the activation."""

    up: FP8Tensor
    down: FP8Tensor
    up_master: Tensor | None
    down_master: Tensor | None
    activation: Activation

    @classmethod
    def of(cls, *arguments) -> "Layer":
        """From the arguments of an operator that `LAYER` names."""
        up, up_scale, down, down_scale, up_master, down_master, name, gated, limit, alpha = arguments
        activation = Activation(limit, alpha, name, gated)
        return cls(FP8Tensor(up, up_scale), FP8Tensor(down, down_scale), up_master, down_master, activation)

    def check_masters(self) -> None:
        masters = (("up_master", self.up_master, self.up.data), ("down_master", self.down_master, self.down.data))
        for name, master, data in masters:
            if master is not None and master.shape != data.shape:
                expected = f"{tuple(data.shape)} like the FP8 weight"
                raise ValueError(f"{name}: expected shape {expected}, got {tuple(master.shape)}")

    def padded(self) -> "Layer":
        """With I a multiple of 128 and H of 16; see `pad_weights`."""
        up, down = pad_weights(self.up.data, self.down.data, BLOCK)
        return self._replace(up=FP8Tensor(up, self.up.scale), down=FP8Tensor(down, self.down.scale))


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

    projected: the result of GEMM 1. x_columns, h_columns: data and scale of the transposed inputs of both GEMMs.
    """

    projected: Tensor
    x_columns: Tensor
    x_columns_scale: Tensor
    h_columns: Tensor
    h_columns_scale: Tensor


class Gradients(NamedTuple):
    """Those of tokens or rows, of the rows' weights (R,) and of the masters, empty where nothing asks for them."""

    hidden_states: Tensor
    row_weights: Tensor
    up: Tensor
    down: Tensor


def forward(
    x: Tensor | FP8Tensor, order: Order, layer: Layer, weights: Tensor | None, dtypes: tuple[torch.dtype, torch.dtype]
) -> tuple[Tensor, Kept]:
    """The weighted sums of tokens, or rows. weights: (T, K) or None. dtypes: of rows and of the result."""
    hidden, size = layer.down.data.shape[1:]
    layer = layer.padded()
    empty = [layer.up.data.new_empty(0) for _ in range(4)]
    row_dtype, out_dtype = dtypes
    a, x_columns, _ = order.gather(x, layer.down.data.shape[1], None, layer.up_master is not None)
    projected = order.multiply(a, layer.up, torch.bfloat16)
    del a
    h, h_columns = activate(projected, order.groups, layer.activation, size, layer.down_master is not None)
    y = order.multiply(h, layer.down, row_dtype, others_zero=order.rows is None)
    del h
    out = without_padding(order.sum(y, weights, out_dtype), hidden)
    return out, Kept(projected, *(x_columns or empty[:2]), *(h_columns or empty[2:]))


def backward(
    grad: Tensor,
    order: Order,
    layer: Layer,
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
    layer = layer.padded()
    d_x, d_weights, d_up, d_down = (grad.new_empty(0) for _ in range(4))

    # The columns take the weights of the rows, for the gradient of down_proj. The rows themselves do without, so that
    # the gradient of the weights is the product of one with its unweighted result.
    columns = layer.down.data.shape[1]
    grad_rows, grad_columns, offsets = order.gather(grad, columns, row_weights, layer.down_master is not None)
    beyond = input_dtype is not None or routing_grad or layer.up_master is not None
    if beyond:
        d_h = order.multiply(grad_rows, transpose_fp8(layer.down), torch.bfloat16)
    del grad_rows
    if layer.down_master is not None:
        h_columns = FP8Tensor(kept.h_columns, kept.h_columns_scale)
        d_down = _weight_gradient(grad_columns, h_columns, offsets, (1, hidden, size), layer.down_master.dtype)
    del grad_columns
    if not beyond:
        return Gradients(d_x, d_weights, d_up, d_down)

    d_rows, d_columns, offsets, dots = activate_backward(
        kept.projected, d_h, row_weights, order.groups, activation, layer.up_master is not None
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
    if layer.up_master is not None:
        # Last, after the temporary tensors of the others: it is the largest.
        x_columns = FP8Tensor(kept.x_columns, kept.x_columns_scale)
        shape = (2 if activation.gated else 1, size, hidden)
        d_up = _weight_gradient(d_columns, x_columns, offsets, shape, layer.up_master.dtype)
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


class Saved:
    """What an operator's backward reads beside its saved tensors: the masters, unchanged since the forward, and the
    activation. By the arguments that `LAYER` names."""

    def __init__(self, *arguments) -> None:
        # Not among the saved tensors, whose check for changes would not tell which parameter it is.
        self.masters, self.form = arguments[4:6], arguments[6:]
        self.versions = [None if master is None else master._version for master in self.masters]

    def check_unchanged(self) -> None:
        names = ("gate_up_proj" if self.form[1] else "up_proj", "down_proj")
        for name, master, version in zip(names, self.masters, self.versions, strict=True):
            if master is not None and master._version != version:
                raise RuntimeError(
                    f"fp8moe.GroupedExperts: {name}, shape {tuple(master.shape)}, has been changed in place between "
                    "forward and backward: call the backward before the optimizer's step, or the forward again"
                )


def no_double_backward(ctx, *grads):
    raise RuntimeError("fp8moe.GroupedExperts: there is no double backward; its gradients cannot be differentiated")
