"""GroupedExperts: the experts of a mixture-of-experts layer, with FP8 weights or trained in FP8."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fp8moe.kernels.activation import Activation
from fp8moe.kernels.decoder_ops.rms_norm import Normed
from fp8moe.kernels.experts.backward import experts_training
from fp8moe.kernels.experts.checks import MAX_EXPERTS
from fp8moe.kernels.experts.operands import Biases, Layer, Masters, Norm, TokenOperands, row_dtype
from fp8moe.kernels.experts.operator import experts_of_rows, experts_of_tokens
from fp8moe.layers import experts_source, packed_state
from fp8moe.layers.master import (
    MASTER_DTYPES,
    MasterModule,
    WeightFormat,
    check_master,
    check_master_dtype,
    part_of,
    quantized,
)
from fp8moe.layers.parameters import check_not_parametrized, frozen, is_sharded, local
from fp8moe.layers.replaced import check_no_hooks
from fp8moe.quant.arranged import ARRANGED, arranged_shape
from fp8moe.quant.formats import BLOCK, MX_BLOCK, PACKED_FORMATS, FP8Tensor, PackedTensor, ceil_div, has_channel_scales
from fp8moe.quant.packed import quantize_arranged
from fp8moe.quant.quantize import dequantize, quantize_128x128, quantize_channels
from fp8moe.runtime.autograd import check_derivatives, recorded
from fp8moe.runtime.checks import check_floating, check_int, check_like, check_tensor

_NAME = "fp8moe.GroupedExperts"


PACKED_WEIGHTS = {"mxfp4": ("mxfp4", 32), "int4": ("int4", 128), "int4-32": ("int4", 32), "nvfp4": ("nvfp4", 16)}
"""The formats of four bits: maps a `weight_format` to the format of a `PackedTensor` and its values in a group."""


def packed_weights(weight_format: str) -> WeightFormat:
    """Return how a module keeps weights of four bits."""
    form, _ = PACKED_WEIGHTS[weight_format]
    dtypes = PACKED_FORMATS[form].scale_dtypes
    return WeightFormat("_scale", (torch.uint8,), (*dtypes, torch.float8_e8m0fnu) if form == "mxfp4" else dtypes)


class Weights(NamedTuple):
    """FP8 weights with biases and activation, and the master weights that they were quantized from, if any."""

    layer: Layer
    masters: Masters = Masters()

    def tensors(self) -> tuple[Tensor | None, ...]:
        """Return the tensors that could get gradients: the masters if any, otherwise FP8 tensors and biases."""
        layer = self.layer
        return self.masters if self.masters.up_master is not None else (*layer.up, *layer.down, *layer.biases)


class GroupedExperts(MasterModule):
    """The experts of a mixture-of-experts layer: each token's weighted sum over the experts it was routed to.

    Expert e computes ``down_e @ (silu(gate_e @ x) * (up_e @ x))``, with FP8 weights in 128x128 blocks and both GEMMs'
    inputs quantized 1x128 in each call. Sizes need not be multiples of 128. Parameters and state dict have the names
    and shapes of FP8 checkpoints:

        gate_up_proj            (E, 2I, H) float8_e4m3fn, gate rows, then up rows
        gate_up_proj_scale_inv  (E, 2 * ceil(I/128), ceil(H/128)) float32, gate's blocks, then up's blocks
        down_proj               (E, H, I) float8_e4m3fn
        down_proj_scale_inv     (E, ceil(H/128), ceil(I/128)) float32; value = weight * its block's scale

    Without a gate, up_proj (E, I, H) and up_proj_scale_inv (E, ceil(I/128), ceil(H/128)) replace the first two.
    With a ``weight_format`` of four bits, data uint8 (..., N, K/2) and scales take the place of these, as in a
    `PackedTensor`: gate_up_proj (E, 2I, H/2), gate_up_proj_scale (E, 2I, H/group), down_proj (E, H, I/2),
    down_proj_scale; for "nvfp4" also gate_up_proj_tensor_scale float32 (E, 2), of gate and up, and
    down_proj_tensor_scale (E,); without a gate up_proj_tensor_scale (E,). This is the state dict; the parameters
    themselves have "mxfp4" and "nvfp4" in the order of the kernels (`fp8moe.quant.arranged`), tensor scales among the
    scales.

    With ``bias`` there are also

        gate_up_proj_bias       (E, 2I) of ``dtype``, added to gate and up before the activation
        down_proj_bias          (E, H) of ``dtype``, added to each expert's result before the routing weight is applied

    Without a gate, up_proj_bias (E, I) replaces gate_up_proj_bias.

    Moving the module moves the parameters; casting it (``.half()``...) casts the biases only. All parameters are
    frozen: only hidden_states and top_k_weights get gradients. Where H or I is not a multiple of 16, each call makes
    padded copies of weights and biases.

    With a ``master_dtype`` the experts are trained. The weights are then ordinary parameters of that dtype: down_proj
    (E, H, I), and gate_up_proj (E, 2I, H) or up_proj (E, I, H). The state dict holds them without scales, as for
    unquantized experts. The first call after an optimizer's step makes FP8 copies of the weights, which take one byte
    per weight and are used until the next step.
    Forward, input gradients and weight gradients run in FP8, with sums in float32 (DeepSeek-V3, arXiv:2412.19437,
    section 3.3). ``from_experts(trained)`` makes the layer for inference. For changes of a weight that neither its
    version counter nor an optimizer's step shows, see `FP8Linear`.

    Where gradients are recorded, and in training mode with a master_dtype, the result of the first GEMM is rounded
    to bfloat16, and decode_capacity is ignored. `fp8moe.kernels.experts.backward` says what is kept for the backward.
    The backward raises RuntimeError if a master, or a kept input, has changed in place since the forward, and for
    second derivatives.

    `fp8moe.distributed.ExpertParallel` spreads the experts over several GPUs. `forward_rows` runs the experts on rows
    that another library has dispatched.

    A call without gradients allocates, beside its result, at most ``R * (3H + I)`` bytes for bfloat16 inputs and
    ``R * (5H + I)`` for others, with R = T * top_k rows (E * decode_capacity in the masked layout), plus 4 bytes per
    128 FP8 values and 8 bytes per row and per expert. Activations other than SwiGLU take ``R * 24I`` bytes more.

    Args:
        num_experts, hidden_size, intermediate_size: E, H and I.
        device: the device of the parameters.
        dtype: bfloat16, float16 or float32 (TypeError for another): the dtype of the biases, and of the initial
            weights before they are quantized. Inputs may have any of the three.
        master_dtype: bfloat16 or float32, the dtype of weights to train; None for frozen FP8 weights; TypeError for
            another.
        activation: f in ``f(gate) * up``, by its name in transformers ("silu", "gelu", "relu", "relu2"...). All but
            gated silu run as PyTorch operations between the GEMMs.
        gated: whether there is a gate; otherwise an expert computes ``down_e @ f(up_e @ x)``.
        swiglu_limit: for gated experts: before the activation, ``gate = min(gate, limit)`` and ``up = clamp(up, -limit,
            limit)``.
        swiglu_alpha: with a swiglu_limit and activation "silu": ``gate * sigmoid(alpha * gate) * (up + 1)`` of the
            clamped values, in place of ``silu(gate) * up``.
        decode_capacity: calls with at most this many tokens use the masked layout, where every expert has room for
            that many rows. Larger calls, and all calls by default, pack the rows expert after expert. The results are
            the same as long as the experts of each token are distinct.
        weight_scales: "block", or "channel" for one scale per output channel, (E, 2I, 1) and (E, H, 1), as in FP8
            checkpoints of compressed-tensors: the accumulators of both GEMMs are multiplied by these scales. For
            inference only: ValueError with a master_dtype, RuntimeError in the backward.
        weight_format: "fp8"; or four bits: "mxfp4", "nvfp4", or "int4" with a bfloat16 scale for 128 values along K,
            "int4-32" for 32. H and I must then be multiples of 128 for "int4", otherwise of 32. For inference only,
            like "channel".
        bias: whether both projections have biases. For inference only, like "channel".

    Raises TypeError for a size that is not an int, ValueError for a size or decode_capacity below one, more than 1024
    experts, an unknown activation, or activation arguments that exclude each other.
    """

    # `fp8moe.distributed.ExpertParallel` sets this to an object whose `forward` replaces this layer's. The parameters
    # are then DTensors, and each of W ranks has E/W experts.
    parallel: Any = None

    _ways_out = (
        "quantize it first, for instance with GroupedExperts.from_experts",
        "load it into a GroupedExperts without master_dtype, then use GroupedExperts.from_experts",
    )

    gate_up_proj: nn.Parameter
    gate_up_proj_scale_inv: nn.Parameter | None
    up_proj: nn.Parameter
    up_proj_scale_inv: nn.Parameter | None
    down_proj: nn.Parameter
    down_proj_scale_inv: nn.Parameter | None
    gate_up_proj_bias: nn.Parameter | None
    up_proj_bias: nn.Parameter | None
    down_proj_bias: nn.Parameter | None

    def __init__(
        self,
        *,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.bfloat16,
        activation: str = "silu",
        gated: bool = True,
        swiglu_limit: float | None = None,
        swiglu_alpha: float | None = None,
        decode_capacity: int | None = None,
        master_dtype: torch.dtype | None = None,
        weight_scales: str = "block",
        weight_format: str = "fp8",
        bias: bool = False,
    ):
        super().__init__()
        check_floating(dtype)
        check_master_dtype(master_dtype)
        if bias and master_dtype is not None:
            raise ValueError("bias: expected False with a master_dtype, got True: experts with biases are not trained")
        sizes = {"num_experts": num_experts, "hidden_size": hidden_size, "intermediate_size": intermediate_size}
        if decode_capacity is not None:
            sizes["decode_capacity"] = decode_capacity
        for name, size in sizes.items():
            check_int(name, size, at_least=1)
        if num_experts > MAX_EXPERTS:
            raise ValueError(f"num_experts: expected at most {MAX_EXPERTS}, got {num_experts}")
        self.num_experts = num_experts
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.dtype = dtype
        self.activation = Activation(swiglu_limit, swiglu_alpha, activation, gated)
        self.decode_capacity = decode_capacity
        projections = 2 if gated else 1
        blocks, hidden_blocks = ceil_div(intermediate_size, BLOCK), ceil_div(hidden_size, BLOCK)
        up_shape = (num_experts, projections * intermediate_size, hidden_size)
        down_shape = (num_experts, hidden_size, intermediate_size)
        up_blocks = (num_experts, projections * blocks, hidden_blocks)
        self.weight_format = weight_format
        if weight_format == "fp8":
            options = (device, master_dtype, weight_scales)
            self._register_weight(self.up_name, up_shape, up_blocks, *options)
            self._register_weight("down_proj", down_shape, (num_experts, hidden_blocks, blocks), *options)
        else:
            self._check_packed(weight_format, master_dtype, weight_scales)
            self.kept = packed_weights(weight_format)
            self._register_packed(self.up_name, up_shape, projections, device)
            self._register_packed("down_proj", down_shape, 1, device)
            self.register_state_dict_post_hook(packed_state.as_stored)
        for name, shape in zip(self.bias_names, (up_shape, down_shape), strict=True):
            value = frozen(torch.empty(shape[:2], dtype=dtype, device=device)) if bias else None
            self.register_parameter(name, value)
        self.reset_parameters()

    def _check_packed(self, weight_format: str, master_dtype: torch.dtype | None, weight_scales: str) -> None:
        if weight_format not in PACKED_WEIGHTS:
            raise ValueError(f"weight_format: expected one of {('fp8', *PACKED_WEIGHTS)}, got {weight_format!r}")
        for name, value, expected in (("master_dtype", master_dtype, None), ("weight_scales", weight_scales, "block")):
            if value != expected:
                raise ValueError(f"{name}: expected {expected!r} with weight_format {weight_format!r}, got {value!r}")
        group = max(MX_BLOCK, PACKED_WEIGHTS[weight_format][1])
        for name in ("hidden_size", "intermediate_size"):
            if getattr(self, name) % group:
                raise ValueError(
                    f"{name}: expected a multiple of {group} with weight_format {weight_format!r}, got "
                    f"{getattr(self, name)}"
                )

    def _register_packed(
        self, name: str, shape: tuple[int, ...], projections: int, device: torch.device | str | None
    ) -> None:
        """Register uninitialized weights in four bits, shape (E, N, K), and their scales."""
        experts, n, k = shape
        form, group = PACKED_WEIGHTS[self.weight_format]
        scale_shape = arranged_shape(n, k, projections, form) if form in ARRANGED else (n, k // group)
        data = torch.empty((experts, n, k // 2), dtype=torch.uint8, device=device)
        self.register_parameter(name, frozen(data))
        scale = torch.empty((experts, *scale_shape), dtype=PACKED_FORMATS[form].scale_dtypes[0], device=device)
        self.register_parameter(f"{name}{self.kept.scale}", frozen(scale))
        if form == "nvfp4":  # only in the state dict; PyTorch's distributed checkpoints look each name up in the module
            self.register_parameter(packed_state.tensor_scale_name(name), None)

    @classmethod
    def from_experts(
        cls,
        module: nn.Module,
        *,
        scale_format: str = "float32",
        decode_capacity: int | None = None,
        master_dtype: torch.dtype | None = None,
        weight_format: str = "fp8",
    ) -> "GroupedExperts":
        """Make FP8 experts that compute the same function as ``module``, experts of transformers or fp8moe.

        module: one of
            - fused experts in bfloat16, float16 or float32: gate_up_proj (E, 2I, H) or up_proj (E, I, H), and down_proj
              (E, H, I), quantized expert by expert. Biases gate_up_proj_bias (E, 2I) or up_proj_bias (E, I), and
              down_proj_bias (E, H), are optional and shared with the new layer. With ``module.is_transposed``, weights
              are (E, columns, rows); with ``module.is_concatenated`` False, rows of gate and up alternate, in the bias
              too.
            - fused FP8 experts, transformers' FP8Experts with blocks of 128x128: the weights are shared, not copied.
              Scales must have the shapes of `GroupedExperts`. Where I is not a multiple of 128, the scales are
              assumed to hold gate's blocks and then up's, as in checkpoints.
            - an nn.ModuleList of one-expert MLPs: nn.Linear, FP8Linear or transformers' FP8Linear named gate_proj,
              up_proj and down_proj (or w1, w3 and w2), the gate being optional.
            - GroupedExperts. FP8 weights are shared with the new layer; masters are treated like the fused weights in
              bfloat16 or float32 above.
            DTensor weights, sharded by experts, become DTensors of the same placements, and the new layer exchanges
            tokens between the ranks as ``module`` does.
            The activation, with its limit and alpha, is recognised by its results: for values up to 9e17, they must
            equal those of the module's own activation function or, in an nn.ModuleList, of each MLP's forward.
        scale_format: format of the scales made here, "float32" or "ue8m0" (powers of two).
        decode_capacity: see `GroupedExperts`.
        master_dtype: see `GroupedExperts`. Fused weights that already have this dtype become the masters: the same
            Parameters, so that existing optimizers keep working. Other weights are converted, FP8 weights dequantized.
            A master requires a gradient if the source weight requires one or is FP8.
        weight_format: see `GroupedExperts`; weights are rounded to four bits, FP8 weights too.

        Raises TypeError for a module or weights of another kind, ValueError for what GroupedExperts cannot express:
        experts in four bits, biases of one projection only or with a master_dtype, transposed or interleaved weights in
        FP8 or with a master_dtype, another activation, other block sizes, static activation scales, single experts
        split over several ranks, and hooks, replaced forwards, adapters and parametrizations, which would not run any
        more.
        """
        source = experts_source.read(module)
        check_no_hooks("module", module)
        new = cls.from_source(
            source,
            scale_format=scale_format,
            decode_capacity=decode_capacity,
            master_dtype=master_dtype,
            weight_format=weight_format,
        )
        own = isinstance(module, GroupedExperts)
        new.parallel = getattr(module, "parallel" if own else "_fp8moe_parallel", None)
        return new.train(module.training)

    @classmethod
    def from_source(
        cls,
        source: experts_source.ExpertsSource,
        *,
        scale_format: str = "float32",
        decode_capacity: int | None = None,
        master_dtype: torch.dtype | None = None,
        weight_format: str = "fp8",
    ) -> "GroupedExperts":
        """Make the layer from a result of `experts_source.read`. The module that was read may stay in use.

        Arguments and errors: as for `from_experts`, except that hooks of the module itself are not checked.
        """
        if master_dtype is not None and source.reordered:
            raise ValueError(
                "module: expected weights (E, rows, columns), gate before up, to train; transposed or interleaved ones "
                "would be saved in another order than they were loaded in"
            )
        new = cls(
            num_experts=source.num_experts,
            hidden_size=source.hidden_size,
            intermediate_size=source.intermediate_size,
            device="meta",
            activation=source.activation.name,
            gated=source.activation.gated,
            swiglu_limit=source.activation.limit,
            swiglu_alpha=source.activation.alpha,
            decode_capacity=decode_capacity,
            master_dtype=master_dtype,
            weight_format=weight_format,
            bias=source.biases.down_bias is not None,
        )
        if scale_format != "float32" and (master_dtype is not None or weight_format != "fp8"):
            beside = "a master_dtype" if weight_format == "fp8" else f"weight_format {weight_format!r}"
            raise ValueError(f"scale_format: expected 'float32' with {beside}, got {scale_format!r}")
        for name, weight in ((new.up_name, source.up), ("down_proj", source.down)):
            if master_dtype is not None:
                setattr(new, name, weight.master(master_dtype))
                continue
            quantized = weight.quantize(scale_format) if weight_format == "fp8" else new._packed(name, weight)
            setattr(new, name, frozen(quantized.data))
            setattr(new, f"{name}{new.kept.scale}", frozen(quantized.scale))
        for name, bias in zip(new.bias_names, source.biases, strict=True):
            setattr(new, name, bias if bias is None else frozen(bias.detach()))
        return new

    def in_format(self, weight_format: str) -> "GroupedExperts":
        """Return a layer of these sizes without values, on the meta device, with weights in another format.

        weight_format: see `GroupedExperts`. The biases, if any, are shared.
        """
        new = GroupedExperts(
            num_experts=self.num_experts,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            device="meta",
            dtype=self.dtype,
            activation=self.activation.name,
            gated=self.activation.gated,
            swiglu_limit=self.activation.limit,
            swiglu_alpha=self.activation.alpha,
            decode_capacity=self.decode_capacity,
            weight_format=weight_format,
            bias=self.down_proj_bias is not None,
        )
        for name in self.bias_names:
            setattr(new, name, getattr(self, name))
        return new.train(self.training)

    @property
    def trainable(self) -> bool:
        """Whether the weights are masters, made with a ``master_dtype``."""
        return getattr(self, self.weight_names[1]) is None

    @property
    def up_name(self) -> str:
        """The parameter name of the first projection, "gate_up_proj" or "up_proj"."""
        return "gate_up_proj" if self.activation.gated else "up_proj"

    @property
    def weight_names(self) -> tuple[str, str, str, str]:
        """The parameter names of the first projection, its scale, the second projection and its scale."""
        return self.up_name, f"{self.up_name}{self.kept.scale}", "down_proj", f"down_proj{self.kept.scale}"

    @property
    def bias_names(self) -> tuple[str, str]:
        """The parameter names of both biases; the parameters are None in a layer without biases."""
        return f"{self.up_name}_bias", "down_proj_bias"

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialize every projection of every expert as ``nn.Linear`` does, then quantize it unless it is a master."""
        size, hidden = self.intermediate_size, self.hidden_size
        projections = 2 if self.activation.gated else 1
        if self.down_proj.is_meta:
            return
        for name, shape in ((self.up_name, (projections, size, hidden)), ("down_proj", (1, hidden, size))):
            bound = 1 / math.sqrt(shape[-1])
            data = getattr(self, name)
            if self.trainable:
                data.uniform_(-bound, bound)
                continue
            data, scale = local(data), local(getattr(self, f"{name}{self.kept.scale}"))
            for expert in range(len(data)):
                weight = torch.empty(shape, dtype=self.dtype, device=data.device).uniform_(-bound, bound)
                quantized = self._quantize(weight, channels=has_channel_scales(data, scale))
                data[expert].copy_(quantized.data.flatten(0, 1))
                scale[expert].copy_(quantized.scale.flatten(0, 1))
            bias = getattr(self, f"{name}_bias")
            if bias is not None:
                bias.uniform_(-bound, bound)

    def _quantize(self, weight: Tensor, *, channels: bool = False) -> FP8Tensor | PackedTensor:
        """Quantize the matrices (P, N, K) of an expert to this layer's format; the results are (P, ...)."""
        if self.weight_format == "fp8":
            return (quantize_channels if channels else quantize_128x128)(weight)
        return quantize_arranged(weight, *PACKED_WEIGHTS[self.weight_format])

    def _packed(self, name: str, weight: experts_source.Weight) -> FP8Tensor:
        """Quantize weights of experts to four bits, an expert at a time."""
        kept = getattr(self, name), getattr(self, f"{name}{self.kept.scale}")
        sizes = ((len(weight.parts), *value.shape[1:]) for value in kept)
        data, scale = (value.new_empty(size, device=weight.device) for value, size in zip(kept, sizes, strict=True))
        for expert, parts in enumerate(weight.parts if weight.device.type != "meta" else ()):
            values = torch.stack([part.detach() if isinstance(part, Tensor) else dequantize(part) for part in parts])
            made = self._quantize(values)
            data[expert].copy_(made.data.flatten(0, 1))
            scale[expert].copy_(made.scale.flatten(0, 1))
        return FP8Tensor(weight.sharded(data), weight.sharded(scale))

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing, unexpected, errors):
        if self.weight_format != "fp8":
            problems = packed_state.as_kept(self, state_dict, prefix)
            if problems:
                errors.extend(problems)
                return
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, unexpected, errors)

    def forward(
        self,
        hidden_states: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        *,
        residual: Tensor | None = None,
        groups: Tensor | None = None,
        rows: Tensor | None = None,
        quantized: FP8Tensor | None = None,
    ) -> Tensor:
        """Return the sum of each token's expert outputs times their routing weights, in the dtype of hidden_states.

        hidden_states: (T, H) bfloat16, float16 or float32, or (..., H).
        top_k_index: (T, K) int32 or int64, the experts of each token, or (..., K) with the same leading sizes. An index
            outside [0, E) means an expert that is not in this layer and adds nothing to the sum.
        top_k_weights: float32, bfloat16 or float16, of the same shape as top_k_index.
        residual: None, or a tensor like hidden_states to which the rounded result is added.
        groups, rows: the results of `fp8moe.kernels.experts.sort_by_expert` for top_k_index (T, K), int32
            (num_experts + 1,) and (T, K). Where the call can use these results, it skips its own sort kernel;
            otherwise it ignores both tensors. Both are None if the caller has not sorted the assignments.
        quantized: the result of `quantize_1x128` for hidden_states (T, H), if the caller has it: few tokens are then
            read without being permuted. It is ignored where the call has no use for it.
        Returns (T, H), or (..., H). Equal inputs give equal bits, in the result and in the gradients.

        Raises TypeError for a wrong type or dtype, ValueError for a wrong shape or device, RuntimeError under
        forward-mode differentiation and the derivatives of torch.func.
        """
        inputs = hidden_states, top_k_index, top_k_weights
        order = {"groups": groups, "rows": rows, "quantized": quantized}
        return self.forward_with_norm(*inputs, None, residual=residual, **order)[0]

    def forward_with_norm(
        self,
        hidden_states: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        norm: Norm | None,
        *,
        residual: Tensor | None = None,
        groups: Tensor | None = None,
        rows: Tensor | None = None,
        quantized: FP8Tensor | None = None,
    ) -> tuple[Tensor, Normed | None]:
        """Compute `forward`, and also the RMSNorm of the result (T, H) where the norm needs no further kernel.

        norm: `fp8moe.kernels.experts.operands.Norm`, or None. Other arguments and errors: as for `forward`.
        Returns (result, Normed) for up to 64 tokens in bfloat16 or float32, with a SwiGLU, sizes that are multiples
        of 16, and experts that are neither trained nor spread over ranks; otherwise (result, None).
        """
        if self.parallel is not None:
            return self.parallel.forward(self, hidden_states, top_k_index, top_k_weights, residual), None
        x, index, routing, residual = flattened(hidden_states, top_k_index, top_k_weights, residual)
        if recorded(residual):
            return residual.view_as(hidden_states) + self(hidden_states, top_k_index, top_k_weights), None
        weights = self.whole_weights()
        normed = None
        if self.trains(weights, x, routing):
            check_derivatives(_NAME, x, routing, *weights.tensors())
            out = experts_training(x, index, routing, *weights)
            out = out if residual is None else residual + out
        else:
            capacity, order = self.decode_capacity, (groups, rows)
            if capacity is None or x.shape[0] > capacity:
                capacity = None
            else:
                order = None, None
            operands = TokenOperands(x, index, routing, weights.layer, capacity, residual, *order, norm=norm)
            if quantized is not None and capacity is None and not recorded(x):
                operands = operands.quantized(quantized)
            out, normed = experts_of_tokens(operands)
        return unflattened(out, hidden_states), normed

    def forward_rows(self, rows: Tensor | FP8Tensor, group_offsets: Tensor) -> Tensor:
        """Run the experts on rows that are already sorted by expert, without routing weights.

        rows: (R, H) bfloat16, float16 or float32, or an FP8Tensor quantized 1x128.
        group_offsets: int32 (E + 1,) on the device of rows, where E is the number of experts on this rank. Expert e of
            the rank has the rows group_offsets[e]:group_offsets[e + 1]. Group sizes are arbitrary; the CPU does not
            wait for the offsets.
        Returns (R, H) in the dtype of rows, bfloat16 for an FP8Tensor; zeros in rows of no expert. Equal inputs give
        equal bits, in the result and in the gradients of rows (unless they are an FP8Tensor) and of masters.

        Raises TypeError for a wrong type or dtype, ValueError for a wrong shape or device, RuntimeError in the same
        cases as `forward`.
        """
        weights = self.local_weights()
        inputs = tuple(rows) if isinstance(rows, tuple) else (rows,)
        check_derivatives(_NAME, *inputs, *weights.tensors())
        dtype = rows.dtype if isinstance(rows, Tensor) else torch.bfloat16
        options = {"row_dtype": row_dtype(dtype), "training": self.trainable and self.training}
        out = experts_of_rows(rows, group_offsets, weights.layer, masters=weights.masters, **options)
        return out.to(dtype)

    def whole_weights(self) -> Weights:
        """Return `local_weights()`; raise ValueError if this rank has only a part of the experts."""
        weights, down = self.local_weights(), self._parameters.get("down_proj")
        if down is None and any(map(is_sharded, self.parameters())):  # a parametrization computes it once more
            down = self.down_proj
        here = weights.layer.down.data.shape
        if down is not None and here != down.shape:
            raise ValueError(
                f"down_proj: expected all of it on this rank, got {tuple(here)} of a DTensor "
                f"{tuple(down.shape)} with {down.placements}; call the module that fully_shard was applied to, or "
                "spread the experts by fp8moe.distributed.ExpertParallel"
            )
        return weights

    def local_weights(self) -> Weights:
        """Return the FP8 weights, biases and masters of the experts on this rank."""
        parameters = [getattr(self, name) for name in self.weight_names]
        if not self.trainable:
            check_not_parametrized(_NAME, self)
            up, up_scale, down, down_scale = map(local, parameters)
            biases = (getattr(self, name) for name in self.bias_names)
            biases = Biases(*(bias if bias is None else local(bias) for bias in biases))
            return Weights(Layer(FP8Tensor(up, up_scale), FP8Tensor(down, down_scale), self.activation, biases))
        up, _, down, _ = parameters
        for name, master in ((self.up_name, up), ("down_proj", down)):
            check_master(f"{_NAME}: {name}", master, MASTER_DTYPES)  # .half() may have cast it
        masters = [part_of(f"{_NAME}: {self.up_name}", up), part_of(f"{_NAME}: down_proj", down)]
        backward, size = recorded(*masters), self.intermediate_size
        both = masters[0].detach()
        if size % BLOCK:  # quantize gate and up separately, so that no block holds rows of both
            both = both.unflatten(1, (-1, size))
        up_copy = quantized(both, parameter=up, backward=backward)
        if size % BLOCK:
            up_copy = FP8Tensor(*(part.flatten(1, 2) for part in up_copy))
        down_copy = quantized(masters[1].detach(), parameter=down, backward=backward)
        return Weights(Layer(up_copy, down_copy, self.activation), Masters(*masters))

    def trains(self, weights: Weights, *inputs: Tensor) -> bool:
        """Whether a call with these inputs must run the training kernels, which support a backward."""
        if self.trainable:
            # Activation checkpointing runs the first forward without recording gradients, and that forward must give
            # the same bits as the recomputation: use the training kernels whenever the module is in training mode.
            return self.training or recorded(*inputs, *weights.tensors())
        # If this returns False although gradients are recorded, the backward of `experts_of_tokens` raises an error.
        layer = weights.layer
        differentiable = layer.biases.down_bias is None and not has_channel_scales(*layer.up)
        return recorded(*inputs) and differentiable and not recorded(*weights.tensors())

    def extra_repr(self) -> str:
        text = (
            f"num_experts={self.num_experts}, hidden_size={self.hidden_size}, "
            f"intermediate_size={self.intermediate_size}, activation={self.activation.name!r}"
        )
        if not self.activation.gated:
            text += ", gated=False"
        if self.trainable:
            text += f", master_dtype={self.down_proj.dtype}"
        if self.weight_format != "fp8":
            text += f", weight_format={self.weight_format!r}"
        if self.down_proj_bias is not None:
            text += ", bias=True"
        for name, value in (
            ("swiglu_limit", self.activation.limit),
            ("swiglu_alpha", self.activation.alpha),
            ("decode_capacity", self.decode_capacity),
        ):
            if value is not None:
                text += f", {name}={value}"
        return text


def unflattened(out: Tensor, hidden_states: Tensor) -> Tensor:
    """Return a new tensor (T, H) in the shape of hidden_states, not as a view of it.

    FSDP2 changes a layer's result in place, and schedules of pipelines detach it in place.
    """
    return torch.ops.aten._unsafe_view.default(out, hidden_states.shape)


def flattened(
    hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, residual: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Check the arguments of `GroupedExperts.forward` and flatten their leading dimensions.

    Returns hidden_states (T, H), top_k_index (T, K), top_k_weights (T, K), and residual (T, H) or None. Raises
    TypeError or ValueError for arguments that do not fit together.
    """
    inputs = {"hidden_states": hidden_states, "top_k_index": top_k_index, "top_k_weights": top_k_weights}
    for name, value in inputs.items():
        check_tensor(name, value)
    shape = hidden_states.shape
    if residual is not None:
        check_like("residual", residual, (hidden_states.dtype,), shape, hidden_states.device, "hidden_states")
    if len(shape) <= 2:
        return hidden_states, top_k_index, top_k_weights, residual
    for name in ("top_k_index", "top_k_weights"):
        if inputs[name].shape[:-1] != shape[:-1]:
            raise ValueError(
                f"{name}: expected shape ({', '.join(map(str, shape[:-1]))}, top_k) to match hidden_states, "
                f"got {tuple(inputs[name].shape)}"
            )
    flat = (value.flatten(0, -2) for value in inputs.values())
    return *flat, residual if residual is None else residual.flatten(0, -2)
