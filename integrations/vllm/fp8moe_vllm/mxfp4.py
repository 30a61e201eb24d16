"""The quantization config for GPT-OSS: experts in MXFP4 with biases, everything else in bfloat16."""

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4Config, GptOssMxfp4MoEMethod

from fp8moe_vllm.layers import Layers
from fp8moe_vllm.packed import OnGroupedExperts, refusal


class Fp8moeMxfp4Config(Layers, GptOssMxfp4Config):
    """Runs the experts of GPT-OSS checkpoints on fp8moe: weights in MXFP4, activations quantized 1x128 to FP8.

    Experts that fp8moe does not support run on vLLM's own kernels, as with `Fp8moeConfig`.
    """

    @classmethod
    def get_min_capability(cls) -> int:
        return 90

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        why = refusal(layer.moe_config, "mxfp4") if isinstance(layer, RoutedExperts) else None
        if why:
            self.leave_to_vllm("experts", why)
        if why or not isinstance(layer, RoutedExperts):
            return super().get_quant_method(layer, prefix)
        return Fp8moeMxfp4MoEMethod(self, layer)


class Fp8moeMxfp4MoEMethod(OnGroupedExperts, GptOssMxfp4MoEMethod):
    """The quantization method for experts of GPT-OSS in MXFP4, with rows of gate and up in turns."""

    weight_format, shown = "mxfp4", "MXFP4"
    weight_dtype = "gpt_oss_mxfp4"  # by this, and the name of the config, vLLM knows how to load the weights

    def parts(self, layer: RoutedExperts, name: str) -> dict[str, Tensor]:
        ends = {"": "weight", "_scale": "weight_scale", "_bias": "bias"}
        found = {end: getattr(layer, f"{name}_{theirs}").data for end, theirs in ends.items()}
        if name == "w2":
            return found
        return {end: torch.cat([value[:, 0::2], value[:, 1::2]], dim=1) for end, value in found.items()}
