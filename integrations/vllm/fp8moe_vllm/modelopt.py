"""The quantization config for NVFP4 checkpoints of ModelOpt, whose experts run on fp8moe."""

from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4Config, ModelOptNvFp4FusedMoE

from fp8moe_vllm.layers import Layers
from fp8moe_vllm.packed import OnGroupedExperts, refusal


class Fp8moeModelOptConfig(Layers, ModelOptNvFp4Config):
    """Runs experts in NVFP4 of ModelOpt on fp8moe, with activations quantized 1x128 to FP8.

    Linears, and experts that fp8moe does not support, run on vLLM's own kernels, as with `Fp8moeConfig`.

    Raises ValueError for ModelOpt's other formats.
    """

    @classmethod
    def get_min_capability(cls) -> int:
        return 90

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "Fp8moeModelOptConfig":
        algorithm = str(config.get("quantization", config).get("quant_algo"))
        if "NVFP4" not in algorithm.upper():
            raise ValueError(f"fp8moe: of ModelOpt's checkpoints expected one in NVFP4, got quant_algo {algorithm!r}")
        return super().from_config(config)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        routed = isinstance(layer, RoutedExperts)
        if not (routed or isinstance(layer, LinearBase)) or self.is_layer_excluded(prefix):
            return super().get_quant_method(layer, prefix)
        why = refusal(layer.moe_config, "nvfp4") if routed else "the checkpoint has them in NVFP4"
        if why:
            self.leave_to_vllm("experts" if routed else prefix.rpartition(".")[2], why)
            return super().get_quant_method(layer, prefix)
        return Fp8moeModelOptMoEMethod(self, layer)


class Fp8moeModelOptMoEMethod(OnGroupedExperts, ModelOptNvFp4FusedMoE):  # vLLM looks for ModelOpt in the name
    """The quantization method for experts in NVFP4. Scales of activations are not used."""

    weight_format, shown = "nvfp4", "NVFP4"
    supports_pre_processed_weights = use_global_sf = False

    def parts(self, layer: RoutedExperts, name: str) -> dict[str, Tensor]:
        ends = {"": "weight", "_scale": "weight_scale", "_tensor_scale": "weight_scale_2"}
        return {end: getattr(layer, f"{name}_{theirs}").data for end, theirs in ends.items()}
