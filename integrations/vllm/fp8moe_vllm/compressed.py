"""The quantization config for compressed-tensors: FP8 with one scale a channel, and experts in INT4 or NVFP4."""

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
    compressed_tensors_moe_w4a4_nvfp4 as nvfp4,
)
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_w8a8_fp8 as fp8,
)
from vllm.model_executor.layers.quantization.utils.fp8_utils import (
    create_fp8_scale_parameter,
    create_fp8_weight_parameter,
)
from vllm.model_executor.parameter import ChannelQuantScaleParameter
from vllm.model_executor.utils import set_weight_attrs

import fp8moe
from fp8moe_vllm.experts import OnFp8moe, experts_class, refusal
from fp8moe_vllm.layers import Layers
from fp8moe_vllm.linear import linear_refusal
from fp8moe_vllm.packed import OnGroupedExperts
from fp8moe_vllm.packed import refusal as packed_refusal
from fp8moe_vllm.versions import not_here

Scheme = Mapping[str, Any]


def kind_of(scheme: Scheme | None) -> str | None:
    """Return "channel" or a `weight_format` of GroupedExperts in four bits; None for other schemes.

    "channel": FP8 weights with a scale for each output channel, and activations that are quantized dynamically, with a
    scale for each token.
    """
    weights, inputs = (None, None) if scheme is None else (scheme.get("weights"), scheme.get("input_activations"))
    if weights is None or not weights.symmetric or weights.dynamic:
        return None
    bits, group = (weights.num_bits, weights.type, weights.strategy), weights.group_size
    if bits == (8, "float", "channel") and inputs is not None and (inputs.num_bits, inputs.type) == (8, "float"):
        return "channel" if inputs.symmetric and inputs.strategy == "token" and inputs.dynamic else None
    if bits == (4, "int", "group") and inputs is None and scheme["format"] == "pack-quantized":
        in_order = weights.actorder in (None, "weight", "static")
        return {32: "int4-32", 128: "int4"}.get(group) if in_order else None
    if bits == (4, "float", "tensor_group") and group == 16 and scheme["format"] == "nvfp4-pack-quantized":
        return "nvfp4"
    return None


class Fp8moeCompressedConfig(Layers, CompressedTensorsConfig):
    """Runs layers of compressed-tensors on fp8moe: in FP8 with one scale a channel, and experts in INT4 or NVFP4.

    Layers that fp8moe does not support run on vLLM's own kernels, as with `Fp8moeConfig`. fp8moe quantizes activations
    1x128 to FP8, where vLLM has FP8 with one scale a token, bfloat16 beside INT4, and FP4 or bfloat16 beside NVFP4.

    Raises ValueError for a checkpoint that has no such layers.
    """

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        schemes = ({**each, "format": each["format"] or self.quant_format} for each in self.target_scheme_map.values())
        if not any(map(kind_of, schemes)):
            raise ValueError(
                "fp8moe: expected a checkpoint of compressed-tensors with FP8 weights, one scale a channel, and "
                "dynamic activations, one scale a token; or with experts in INT4, symmetric in groups of 32 or 128, or "
                f"in NVFP4; got {self.quant_format!r} without such layers"
            )

    def get_name(self) -> str:
        return "fp8moe"

    @classmethod
    def get_min_capability(cls) -> int:
        return 90

    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.bfloat16]

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        theirs = partial(super().get_quant_method, layer, prefix)
        if isinstance(layer, LinearBase):
            name, names = prefix.rpartition(".")[2], [prefix]
        elif isinstance(layer, RoutedExperts):
            self._add_fused_moe_to_target_scheme_map()
            parts = layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name
            name, names = "experts", [f"{prefix}.0.{part}" for part in parts]
        else:
            return theirs()
        scheme, *others = (self.get_scheme_dict(layer, one) for one in names)
        if scheme is None or any(other != scheme for other in others):  # not quantized, or refused by vLLM
            return theirs()
        kind, routed = kind_of(scheme), isinstance(layer, RoutedExperts)
        why = not_here()
        if kind is None or not (routed or kind == "channel"):
            why = why or f"the checkpoint has them in {scheme['format']}"
        if self.transform_config is not None:
            why = "transforms of compressed-tensors"
        if routed and not why:
            moe = layer.moe_config
            why = refusal(moe, kind) if kind == "channel" else packed_refusal(moe, kind)
        if why:
            self.leave_to_vllm(name, why)
            return theirs()
        if not routed:
            return Fp8moeChannelsLinearMethod(self, name, theirs)
        if kind == "channel":
            return Fp8moeChannelsMoEMethod(self, layer, scheme)
        return Fp8moeNvfp4MoEMethod(self, layer) if kind == "nvfp4" else Fp8moeInt4MoEMethod(self, layer, scheme)


@register_weight_loader_v2_supported_method  # vLLM chooses the weight loader by the class name of the method
class Fp8moeChannelsLinearMethod(LinearMethodBase):
    """The quantization method for a linear whose weight has one scale a channel: on fp8moe's kernels or vLLM's.

    make_theirs: makes vLLM's own method, for a linear that fp8moe does not support.
    """

    theirs: LinearMethodBase | None = None

    def __init__(self, quant_config: Fp8moeCompressedConfig, kind: str, make_theirs: Callable[[], LinearMethodBase]):
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
        self.quant_config.taken(self.kind, (n, k), max_tokens, weight_scales="channel")

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        if self.theirs is not None:
            self.theirs.process_weights_after_loading(layer)
            return
        if (layer.weight_scale < 0).any():  # vLLM fills scales with the lowest number before it loads them
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


class Fp8moeChannelsMoEMethod(OnFp8moe, fp8.CompressedTensorsW8A8Fp8MoEMethod):
    """The quantization method for experts whose weights have one scale a channel."""

    how = {"weight_scales": "channel"}

    def __init__(self, quant_config: Fp8moeCompressedConfig, layer: RoutedExperts, scheme: Scheme):
        # skips CompressedTensorsW8A8Fp8MoEMethod.__init__, which would choose a vLLM kernel
        FusedMoEMethodBase.__init__(self, layer.moe_config)
        self.quant_config = quant_config
        self.weight_quant, self.input_quant = scheme["weights"], scheme["input_activations"]
        self.weight_block_size, self.block_quant, self.static_input_scales = None, False, False
        self.take(experts_class(self.moe.moe_parallel_config))


class Int4Weights(FusedMoEMethodBase):
    """Creates the weights of experts in INT4 for vLLM to load, rows of codes as the checkpoint has them."""

    group_size: int

    def create_weights(
        self,
        layer: RoutedExperts,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **attributes: Any,
    ) -> None:
        attributes |= {"is_transposed": False, "quant_method": "group"}
        up, down = (2 * intermediate_size_per_partition, hidden_size), (hidden_size, intermediate_size_per_partition)
        for name, (rows, columns) in {"w13": up, "w2": down}.items():
            for end, value in {
                "packed": torch.empty(num_experts, rows, columns // 8, dtype=torch.int32),
                "scale": torch.empty(num_experts, rows, columns // self.group_size, dtype=params_dtype),
                "shape": torch.empty(num_experts, 2),  # loaded, but not read
            }.items():
                parameter = torch.nn.Parameter(value, requires_grad=False)
                layer.register_parameter(f"{name}_weight_{end}", parameter)
                set_weight_attrs(parameter, attributes)


class Fp8moeInt4MoEMethod(OnGroupedExperts, Int4Weights):
    """The quantization method for experts in INT4, codes 8 more than they stand for."""

    shown = "INT4"

    def __init__(self, quant_config: Fp8moeCompressedConfig, layer: RoutedExperts, scheme: Scheme):
        super().__init__(quant_config, layer)
        self.weight_format, self.group_size = kind_of(scheme), scheme["weights"].group_size

    def parts(self, layer: RoutedExperts, name: str) -> dict[str, Tensor]:
        codes = getattr(layer, f"{name}_weight_packed").data.view(torch.uint8) ^ 0x88
        return {"": codes, "_scale": getattr(layer, f"{name}_weight_scale").data}


class Fp8moeNvfp4MoEMethod(OnGroupedExperts, nvfp4.CompressedTensorsW4A4Nvfp4MoEMethod):
    """The quantization method for experts in NVFP4. Scales of activations are not used."""

    weight_format, shown = "nvfp4", "NVFP4"
    group_size = 16

    def parts(self, layer: RoutedExperts, name: str) -> dict[str, Tensor]:
        codes, scale, whole = (
            getattr(layer, f"{name}_weight_{end}").data for end in ("packed", "scale", "global_scale")
        )
        return {"": codes, "_scale": scale, "_tensor_scale": 1 / whole}
