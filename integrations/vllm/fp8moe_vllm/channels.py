"""The quantization config for FP8 checkpoints of compressed-tensors, with one scale for each output channel."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase, RoutedExperts
from vllm.model_executor.layers.linear import (
    LinearBase,
    LinearMethodBase,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_w8a8_fp8 as theirs,
)
from vllm.model_executor.layers.quantization.utils.fp8_utils import (
    create_fp8_scale_parameter,
    create_fp8_weight_parameter,
)
from vllm.model_executor.parameter import ChannelQuantScaleParameter

import fp8moe
from fp8moe_vllm.experts import OnFp8moe, experts_class, refusal
from fp8moe_vllm.layers import Layers
from fp8moe_vllm.linear import linear_refusal
from fp8moe_vllm.versions import not_here

Scheme = Mapping[str, Any]


def is_channels(scheme: Scheme | None) -> bool:
    """Return whether a scheme of compressed-tensors has FP8 weights with a scale for each output channel.

    Its activations must be quantized when they are there, not with scales of the checkpoint.
    """
    weights, inputs = (None, None) if scheme is None else (scheme.get("weights"), scheme.get("input_activations"))
    if weights is None or inputs is None:
        return False
    eight_bits = all((args.num_bits, args.type) == (8, "float") and args.symmetric for args in (weights, inputs))
    return eight_bits and weights.strategy == "channel" and inputs.strategy == "token" and bool(inputs.dynamic)


class Fp8moeChannelsConfig(Layers, CompressedTensorsConfig):
    """Runs linears and experts of compressed-tensors with FP8 weights and one scale a channel on fp8moe.

    Layers that fp8moe does not support run on vLLM's own kernels, as with `Fp8moeConfig`. fp8moe quantizes activations
    1x128, where vLLM has one scale a token.

    Raises ValueError for a checkpoint that has no such layers.
    """

    how = {"weight_scales": "channel"}

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        if not any(map(is_channels, self.target_scheme_map.values())):
            raise ValueError(
                "fp8moe: expected a checkpoint of compressed-tensors with FP8 weights, one scale a channel, and "
                f"dynamic activations, one scale a token, got {self.quant_format!r} without such layers"
            )

    def get_name(self) -> str:
        return "fp8moe"

    @classmethod
    def get_min_capability(cls) -> int:
        return 90

    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.bfloat16]

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        if isinstance(layer, LinearBase):
            kind, name = prefix.rpartition(".")[2], prefix
        elif isinstance(layer, RoutedExperts):
            self._add_fused_moe_to_target_scheme_map()
            kind, name = "experts", f"{prefix}.0.{layer.ckpt_down_proj_name}"
        else:
            return super().get_quant_method(layer, prefix)
        scheme = self.get_scheme_dict(layer, name)
        if scheme is None:
            return super().get_quant_method(layer, prefix)
        why = not_here() or (None if is_channels(scheme) else f"the checkpoint has them in {scheme['format']}")
        if self.transform_config is not None:
            why = "transforms of compressed-tensors"
        if kind == "experts" and not why:
            why = refusal(layer.moe_config, "channel")
        if why:
            self.leave_to_vllm(kind, why)
            return super().get_quant_method(layer, prefix)
        if kind == "experts":
            return Fp8moeChannelsMoEMethod(self, layer)
        return Fp8moeChannelsLinearMethod(self, kind, partial(super().get_quant_method, layer, prefix))


@register_weight_loader_v2_supported_method  # vLLM chooses the weight loader by the class name of the method
class Fp8moeChannelsLinearMethod(LinearMethodBase):
    """The quantization method for a linear whose weight has one scale a channel: on fp8moe's kernels or vLLM's.

    make_theirs: makes vLLM's own method, for a linear that fp8moe does not support.
    """

    theirs: LinearMethodBase | None = None

    def __init__(self, quant_config: Fp8moeChannelsConfig, kind: str, make_theirs: Callable[[], LinearMethodBase]):
        self.quant_config, self.kind, self.make_theirs = quant_config, kind, make_theirs

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        weight_loader: Callable | None = None,
        **more,
    ) -> None:
        k, n = input_size_per_partition, sum(output_partition_sizes)
        if why := linear_refusal(n, k, params_dtype):
            self.quant_config.leave_to_vllm(self.kind, why)
            self.theirs = self.make_theirs()
            sizes = k, output_partition_sizes, input_size, output_size
            self.theirs.create_weights(layer, *sizes, params_dtype, weight_loader=weight_loader, **more)
            return
        layer.logical_widths = output_partition_sizes
        layer.register_parameter("weight", create_fp8_weight_parameter(n, k, weight_loader))
        kind = ChannelQuantScaleParameter
        scale = create_fp8_scale_parameter(kind, output_partition_sizes, k, None, weight_loader)
        layer.register_parameter("weight_scale", scale)
        max_tokens = get_current_vllm_config().scheduler_config.max_num_batched_tokens
        self.quant_config.taken(self.kind, (n, k), max_tokens)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        if self.theirs is not None:
            self.theirs.process_weights_after_loading(layer)
            return
        if (layer.weight_scale <= 0).any():  # vLLM fills scales with the lowest number before it loads them
            raise ValueError(
                f"fp8moe: {self.kind}: the checkpoint has no scales of it; where it is not quantized, `ignore` of the "
                "quantization_config must name it"
            )
        for name in ("weight", "weight_scale"):
            value = getattr(layer, name).data
            setattr(layer, name, torch.nn.Parameter(value, requires_grad=False))
        self.quant_config.warm()

    def apply(self, layer: torch.nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if self.theirs is not None:
            return self.theirs.apply(layer, x, bias)
        return fp8moe.linear(x, (layer.weight, layer.weight_scale), bias)


class Fp8moeChannelsMoEMethod(OnFp8moe, theirs.CompressedTensorsW8A8Fp8MoEMethod):
    """The quantization method for experts whose weights have one scale a channel."""

    def __init__(self, quant_config: Fp8moeChannelsConfig, layer: RoutedExperts):
        # skips CompressedTensorsW8A8Fp8MoEMethod.__init__, which would choose a vLLM kernel
        FusedMoEMethodBase.__init__(self, layer.moe_config)
        self.quant_config = quant_config
        scheme = next(filter(is_channels, quant_config.target_scheme_map.values()))
        self.weight_quant, self.input_quant = scheme["weights"], scheme["input_activations"]
        self.weight_block_size, self.block_quant, self.static_input_scales = None, False, False
        self.take(experts_class(self.moe.moe_parallel_config))
