"""peft's LoRA layers for experts, and the FP8 experts with a low-rank addition to each weight that it runs.

From ranks to H or I the FP8 GEMMs add the product to their sums, before these are rounded. To ranks, and to the
gradients of factors, two kernels read rows in the order of experts, or tokens where these lie, so that there is no
matrix (R, H) beside those of the FP8 layer (`kernels.experts.lora`).
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from peft.tuners.lora.layer import LoraLayer, ParamWrapper
from torch import Tensor, nn

from fp8moe.hf.experts import cached_layer
from fp8moe.kernels.activation import Activation, weighted_backward
from fp8moe.kernels.experts import checks
from fp8moe.kernels.experts.backward import RowOrder, no_double_backward, values_of
from fp8moe.kernels.experts.lora import lora_gradient, lora_shrink
from fp8moe.kernels.experts.operands import Layer, Operands, pad_columns, row_dtype, without_padding
from fp8moe.kernels.experts.swiglu import swiglu_backward_quantize_rows, swiglu_quantize_rows
from fp8moe.layers.experts import GroupedExperts, flattened
from fp8moe.peft.layer import FP8LoraLayer, Stored, check_base, check_config
from fp8moe.quant.formats import BLOCK, FP8Tensor
from fp8moe.quant.quantize import quantize_1x128
from fp8moe.quant.transpose import transpose_fp8
from fp8moe.runtime.backend import use_cuda
from fp8moe.runtime.checks import FLOATING
from fp8moe.runtime.operator import define


class Factors(NamedTuple):
    """What is added to the weights of experts: ``up_b @ up_a`` and ``down_b @ down_a``, scaled already.

    up_a (E, r, H), up_b (E, P, r), down_a (E, r, Q), down_b (E, H, r), bfloat16. I is padded with zeros to a multiple
    of 128: P is that, twice with a gate, and Q. H and r are padded to multiples of 16.
    """

    up_a: Tensor
    up_b: Tensor
    down_a: Tensor
    down_b: Tensor


class ExpertsB(nn.Module):
    """B of all experts: (E, out, r), in state dicts (out, r * E), as peft's ParamWrapper has it: experts innermost."""

    def __init__(self, count: int, rows: int, rank: int, device: torch.device, dtype: torch.dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, rows, rank, device=device, dtype=dtype))

    @property
    def stored_shape(self) -> tuple[int, int]:
        count, rows, rank = self.weight.shape
        return rows, rank * count

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        weight = self.weight if keep_vars else self.weight.detach()
        destination[f"{prefix}weight"] = weight.permute(1, 2, 0).flatten(1)

    def _load_from_state_dict(self, state_dict, prefix, *others):
        key = f"{prefix}weight"
        if key in state_dict and state_dict[key].shape == self.stored_shape:
            by_expert = state_dict[key].unflatten(1, (-1, len(self.weight))).permute(2, 0, 1)
            state_dict[key] = by_expert.contiguous()
        super()._load_from_state_dict(state_dict, prefix, *others)


class LoraExperts(FP8LoraLayer, ParamWrapper):
    """peft's layer for a projection of experts whose weights, frozen and in FP8, have ``scaling * B @ A`` beside them.

    LoRA: arXiv:2106.09685. As peft's own layers for parameters do, that of the second projection holds that of the
    first as its base_layer, if both have adapters. The outer one runs the experts, for both.

    lora_A[adapter].weight: (E * r, in), r rows of each expert; A of the first projection serves gate and up.
    lora_B[adapter].weight: `ExpertsB`. They are in bfloat16, or the dtype of unquantized weights, and multiplied in
    bfloat16 with sums in float32 whatever their dtype, those of all active adapters at once. Dropout acts on each token
    for the first projection, on each row of an expert for the second.
    """

    by_parameter = True

    def __init__(
        self,
        base_layer: nn.Module,
        adapter_name: str,
        config,
        r: int = 0,
        lora_alpha: int = 1,
        parameter_name: str | None = None,
        **kwargs,
    ):
        nn.Module.__init__(self)
        self._start(base_layer, adapter_name, config, {**kwargs, "parameter_name": parameter_name})
        self.parameter_name = parameter_name
        LoraLayer.__init__(self, base_layer, **kwargs)
        self._active_adapter = adapter_name
        self.update_layer(adapter_name, r, lora_alpha=lora_alpha, config=config)

    def update_layer(self, adapter_name: str, r: int, lora_alpha: int, config, **kwargs) -> None:
        check_config(self.name, config)
        if r <= 0:
            raise ValueError(f"r: expected a rank of at least 1 for {self.name}, got {r}")
        weight = self.get_param()
        count, rows, columns = weight.shape
        dtype = weight.dtype if weight.dtype in FLOATING else torch.bfloat16
        self.r[adapter_name], self.lora_alpha[adapter_name] = r, lora_alpha
        self.use_rslora[adapter_name] = config.use_rslora
        self.scaling[adapter_name] = lora_alpha / (math.sqrt(r) if config.use_rslora else r)
        self.lora_dropout[adapter_name] = nn.Dropout(config.lora_dropout)
        self.lora_A[adapter_name] = nn.Linear(columns, count * r, bias=False, device=weight.device, dtype=dtype)
        self.lora_B[adapter_name] = ExpertsB(count, rows, r, weight.device, dtype)
        self._reset(adapter_name, config.init_lora_weights)
        self.set_adapter(self.active_adapters, inference_mode=config.inference_mode)

    @torch.no_grad()
    def _reset(self, adapter_name: str, how: bool | str) -> None:
        """Initialize as peft does linears: True or "gaussian" of A, with zeros for B; False for values of both."""
        a, b = self.lora_A[adapter_name].weight, self.lora_B[adapter_name].weight
        if how == "gaussian":
            a.normal_(std=1 / self.r[adapter_name])
        else:
            a.uniform_(-1, 1).mul_(a.shape[-1] ** -0.5)
        if how is False:
            b.uniform_(-1, 1).mul_(b.shape[-1] ** -0.5)
        else:
            b.zero_()

    def _move_adapter_to_device_of_base_layer(self, adapter_name: str, device: torch.device | None = None) -> None:
        """Move what peft has loaded. Its own layer would cast it to the dtype of the weights, FP8."""
        for part in (self.lora_A, self.lora_B):
            part[adapter_name].to(self.get_param().device if device is None else device)

    def forward(
        self,
        hidden_states: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        *,
        residual: Tensor | None = None,
        adapter_names: list[str] | None = None,
    ) -> Tensor:
        """What the base layer computes, with the active adapters; its arguments. torch.autocast changes nothing.

        Raises ValueError for adapter_names, one of each sequence: tokens of experts have no sequences.
        """
        if adapter_names is not None:
            raise ValueError(
                f"adapter_names: expected none for the experts {self.name}, got {len(adapter_names)} names"
            )
        layers = [layer for layer in (self, self.base_layer) if isinstance(layer, LoraExperts)]
        running = [(layer, layer.running()) for layer in layers]
        added = {layer.parameter_name: (layer, adapters) for layer, adapters in running if adapters}
        if not added:
            more = {} if residual is None else {"residual": residual}
            return self.get_base_layer()(hidden_states, top_k_index, top_k_weights, **more)
        x, index, weights, _ = flattened(hidden_states, top_k_index, top_k_weights, None)
        dropout = self._dropout(added.values())
        with torch.autocast(x.device.type, enabled=False):
            layer, factors = self._layer(), self._factors(added)
            checks.experts(Operands(x, index, weights, layer))
            inputs = x, F.dropout(x, dropout) if dropout else None, weights
            options = layer.activation, dropout
            out = _AdaptedExperts.apply(*inputs, *factors, *layer.up, *layer.down, index, options)
        out = out.view(hidden_states.shape)
        return out if residual is None else residual + out

    def stored(self, adapters: Iterable[str]) -> list[Stored]:
        names = list(adapters)

        def added(expert: int) -> Tensor:
            factors = ((self.scaling[name], *self.factors_of(name)) for name in names)
            return sum(scaling * (b[expert].float() @ a[expert].float()) for scaling, a, b in factors)

        weight, scale = self.get_param(), getattr(self.get_base_layer(), f"{self.parameter_name}_scale_inv", None)
        matrices = 2 if self.parameter_name == "gate_up_proj" else 1
        return [Stored(weight.detach(), scale if scale is None else scale.detach(), matrices, added)]

    def factors_of(self, adapter_name: str) -> tuple[Tensor, Tensor]:
        """A (E, r, in) and B (E, out, r)."""
        a, b = self.lora_A[adapter_name].weight, self.lora_B[adapter_name].weight
        return a.unflatten(0, (len(b), -1)), b

    def _layer(self) -> Layer:
        """The FP8 weights of the base layer, or of the copy that transformers' unquantized experts run on."""
        base = self.get_base_layer()
        check_base(self.name, base)  # it may have been spread since
        layer = base if isinstance(base, GroupedExperts) else cached_layer(base)
        weights = layer.whole_weights()
        return Layer(weights.up, weights.down, layer.activation)

    def _factors(self, added: dict[str, tuple["LoraExperts", list[str]]]) -> Factors:
        """Those of the adapters side by side, with zeros to sizes that kernels want."""
        base = self.get_base_layer()
        hidden, size = base.down_proj.shape[1:]
        (up_a, up_b), (down_a, down_b) = (
            added[name][0].joined(added[name][1]) if name in added else _no_factors(getattr(base, name))
            for name in projections(base)
        )
        more_hidden, more_columns = -hidden % 16, -size % BLOCK
        up_b = _pad(up_b.unflatten(1, (-1, size)), (0, 0, 0, more_columns)).flatten(1, 2)
        up_a, down_b = _pad(up_a, (0, more_hidden)), _pad(down_b, (0, 0, 0, more_hidden))
        return Factors(up_a, up_b, _pad(down_a, (0, more_columns)), down_b)

    def joined(self, adapters: list[str]) -> tuple[Tensor, Tensor]:
        """A and scaled B of the adapters in bfloat16, side by side, of a rank that is a multiple of 16."""
        parts = [(*self.factors_of(name), self.scaling[name]) for name in adapters]
        more = -sum(self.r[name] for name in adapters) % 16
        a = _join([a.bfloat16() for a, _, _ in parts], 1)
        b = _join([(b * scaling).bfloat16() for _, b, scaling in parts], 2)
        return _pad(a, (0, 0, 0, more)), _pad(b, (0, more))

    def _dropout(self, added: Iterable[tuple["LoraExperts", list[str]]]) -> float:
        """The probability in training, otherwise 0; ValueError where it differs between the active adapters."""
        values = {layer.lora_dropout[name].p for layer, names in added for name in names if layer.training}
        if len(values) > 1:
            raise ValueError(
                f"lora_dropout: expected the same of all active adapters of {self.name}, got {sorted(values)}"
            )
        return values.pop() if values else 0.0

    def _get_in_out_features(self, module: nn.Module) -> tuple[int, int]:
        _, rows, columns = self.get_param().shape
        return columns, rows


# By this name peft finds the layer in which to put the next adapter of the parameter.
LoraExperts.__name__ = ParamWrapper.__name__


def projections(base: nn.Module) -> tuple[str, str]:
    """The names of both projections of experts."""
    gated = getattr(base, "has_gate", hasattr(base, "gate_up_proj"))
    return "gate_up_proj" if gated else "up_proj", "down_proj"


def _no_factors(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A and B of zeros, for a projection without adapters."""
    count, rows, columns = weight.shape
    options = {"dtype": torch.bfloat16, "device": weight.device}
    return torch.zeros(count, 16, columns, **options), torch.zeros(count, rows, 16, **options)


def _join(parts: list[Tensor], dim: int) -> Tensor:
    """Side by side; one is not copied."""
    return torch.cat(parts, dim) if len(parts) > 1 else parts[0]


def _pad(x: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """`F.pad`, which copies also where there is nothing to add."""
    return F.pad(x, sizes) if any(sizes) else x


class _AdaptedExperts(torch.autograd.Function):
    """What `experts_training` computes for frozen weights, plus what `Factors` add.

    x: (T, H). dropped: x after dropout, which the first factors read; None: x. dropout: of what the second ones read,
    the result of the activation.

    Gradients of x, dropped, top_k_weights and the factors are straight through every quantization. Those of the factors
    come from activations and gradients in bfloat16, before these are quantized. Equal inputs give equal bits. The
    backward raises RuntimeError if the FP8 weights have been changed in place since the forward; so does a backward of
    the backward. Beside its arguments the forward keeps ``2 * R * P`` bytes for R = T * K rows (and ``R * Q`` of a mask
    with dropout), ``4 * R * r``, and a copy of what the first factors read if that is not bfloat16.
    """

    @staticmethod
    def forward(
        ctx, x, dropped, top_k_weights, up_a, up_b, down_a, down_b, up, up_scale, down, down_scale, top_k_index, options
    ):
        activation, dropout = options
        hidden, size = down.shape[1:]
        layer = Layer(FP8Tensor(up, up_scale), FP8Tensor(down, down_scale), activation).padded(BLOCK)
        order = RowOrder.of_tokens(top_k_index, len(up_a), len(up_a))
        groups = order.groups
        ctx.call = order, activation, dropout, x.dtype
        read = pad_columns((x if dropped is None else dropped).bfloat16(), up_a.shape[2])  # by the first factors
        up_ranks = lora_shrink(read, up_a, groups, order.tokens())
        a, _, _ = order.gather(x, layer.down.data.shape[1], None, False)
        projected = order.multiply(a, layer.up, torch.bfloat16, low_rank=(up_ranks, up_b))
        del a
        h, values = _activate(projected, groups, activation, size)
        mask = None
        if dropout:
            values, mask = torch.native_dropout(values, dropout, True)
        down_ranks = lora_shrink(values, down_a, groups)
        del values
        y = order.multiply(h, layer.down, row_dtype(x.dtype), low_rank=(down_ranks, down_b))
        del h
        out = without_padding(order.sum(y, top_k_weights, x.dtype), hidden)
        del y
        # With the FP8 weights, so that autograd refuses a backward after they were merged into.
        weights = up, up_scale, down, down_scale
        ctx.save_for_backward(
            read, top_k_weights, up_a, up_b, down_a, down_b, *weights, projected, up_ranks, down_ranks, mask
        )
        return out

    @staticmethod
    def backward(ctx, grad):
        with torch.autocast(grad.device.type, enabled=False):
            grads = _Gradients.apply(ctx.call, ctx.needs_input_grad[:2], grad.contiguous(), *ctx.saved_tensors)
        return *grads, *[None] * (len(ctx.needs_input_grad) - len(grads))


class _Gradients(torch.autograd.Function):
    """Those of x, dropped, top_k_weights and the factors, which depend on all of them: but no further derivative."""

    @staticmethod
    def forward(ctx, call, needed, grad, *saved):
        read, top_k_weights, up_a, up_b, down_a, down_b, *saved = saved
        up, up_scale, down, down_scale, projected, up_ranks, down_ranks, mask = saved
        order, activation, dropout, dtype = call
        layer = Layer(FP8Tensor(up, up_scale), FP8Tensor(down, down_scale), activation).padded(BLOCK)
        groups, tokens, row_weights = order.groups, order.tokens(), order.row_weights(top_k_weights)
        keep = 1 / (1 - dropout)

        # As in `kernels.experts.backward`, gradients come without the weights of the rows, which take them later.
        grad_read = pad_columns(grad.bfloat16(), down_b.shape[1])
        d_ranks = lora_shrink(grad_read, down_b.mT.contiguous(), groups, tokens)
        rows, _, _ = order.gather(grad, layer.down.data.shape[1], None, False)
        low_rank = (d_ranks, down_a.mT.contiguous()) if mask is None else None
        d_h = order.multiply(rows, transpose_fp8(layer.down), torch.bfloat16, low_rank=low_rank)
        del rows
        if mask is not None:
            d_h += torch.ops.aten.native_dropout_backward(grouped_mm(d_ranks, down_a, groups), mask, keep)
        d_rows, dots, d_projected, values = _activate_backward(projected, d_h, row_weights, groups, activation)
        del d_h
        if mask is not None:
            values = torch.ops.aten.native_dropout_backward(values, mask, keep)
        d_ranks, down_ranks = (_weighted(ranks, row_weights) for ranks in (d_ranks, down_ranks))
        d_down_a = lora_gradient(d_ranks, values, groups)
        del values
        d_up_b = lora_gradient(up_ranks, d_projected, groups).mT
        d_ranks = lora_shrink(d_projected, up_b.mT.contiguous(), groups)
        del d_projected
        d_down_b = lora_gradient(down_ranks, grad_read, groups, tokens).mT
        d_up_a = lora_gradient(d_ranks, read, groups, tokens)

        d_x = d_read = None
        if needed[0]:
            low_rank = None if needed[1] else (d_ranks, up_a.mT.contiguous())
            dx = order.multiply(d_rows, transpose_fp8(layer.up), row_dtype(dtype), low_rank=low_rank)
            d_x = without_padding(order.sum(dx, None, dtype), grad.shape[1])
            del dx
        if needed[1]:
            d_read = without_padding(order.sum(grouped_mm(d_ranks, up_a, groups), None, dtype), grad.shape[1])
        d_weights = order.by_assignment(dots).to(top_k_weights.dtype)
        return d_x, d_read, d_weights, d_up_a, d_up_b, d_down_a, d_down_b

    @staticmethod
    def backward(ctx, *grads):
        no_double_backward(ctx, *grads)


def _weighted(ranks: Tensor, row_weights: Tensor) -> Tensor:
    """ranks (R, r) times the weights of the rows, rounded once."""
    return torch.mul(ranks, row_weights[:, None], out=torch.empty_like(ranks))


def _activate(projected: Tensor, groups: Tensor, activation: Activation, size: int) -> tuple[FP8Tensor, Tensor]:
    """The activation of projected (R, 2I) or (R, I), quantized by rows, and in bfloat16.

    size: the columns that are not padding.
    """
    if activation.is_swiglu:
        return swiglu_quantize_rows(projected, groups, activation=activation, values=True)
    values = values_of(projected, activation, size)
    return quantize_1x128(values), values.bfloat16()


def _activate_backward(
    projected: Tensor, d_h: Tensor, row_weights: Tensor, groups: Tensor, activation: Activation
) -> tuple[FP8Tensor, Tensor, Tensor, Tensor]:
    """The gradient of projected, quantized by rows; that of row_weights (R,); the first in bfloat16; and the values of
    `_activate` in bfloat16.

    d_h: (R, I), without the weights of the rows.
    """
    if activation.is_swiglu:
        return swiglu_backward_quantize_rows(projected, d_h, row_weights, groups, activation=activation, values=True)
    d_projected, values, dots = weighted_backward(projected, d_h, row_weights, activation)
    return quantize_1x128(d_projected), dots, d_projected.bfloat16(), values.bfloat16()


def grouped_mm(a: Tensor, b: Tensor, groups: Tensor) -> Tensor:
    """``a[rows of e] @ b[e]``: a (R, K), b (E, K, N), groups (E + 1,) -> (R, N). Rows of no group are any values.

    bfloat16, sums in float32, K and N multiples of 8. Waits for nothing on a GPU; elsewhere a loop defines the result.
    """
    return torch.ops.fp8moe.adapter_product(a, b, groups)


def _grouped_mm(a: Tensor, b: Tensor, groups: Tensor) -> Tensor:
    if len(a) and use_cuda(a):
        return F.grouped_mm(a, b, offs=groups[1:])
    out = a.new_zeros((a.shape[0], b.shape[2]))
    offsets = groups.tolist()
    with torch.autocast(a.device.type, enabled=False):
        for start, end, matrix in zip(offsets, offsets[1:], b, strict=False):
            out[start:end] = (a[start:end].float() @ matrix.float()).bfloat16()
    return out


define(
    "adapter_product(Tensor a, Tensor b, Tensor groups) -> Tensor",
    _grouped_mm,
    lambda a, b, groups: a.new_empty((a.shape[0], b.shape[2])),
)
