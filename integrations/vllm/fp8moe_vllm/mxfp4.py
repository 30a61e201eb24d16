"""The quantization config for GPT-OSS: experts in MXFP4 with biases, everything else in bfloat16."""

from typing import Any

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase, RoutedExperts
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4Config, GptOssMxfp4MoEMethod

import fp8moe
from fp8moe.kernels.experts import Activation
from fp8moe_vllm.layers import Layers
from fp8moe_vllm.versions import not_here

LIMIT, ALPHA = 7.0, 1.702  # of GPT-OSS's SwiGLU, which vLLM calls SWIGLUOAI


def refusal(moe: FusedMoEConfig) -> str | None:
    """Return why fp8moe does not run these experts; None if it does."""
    parallel = moe.moe_parallel_config
    if why := not_here():
        return why
    if parallel.dp_size > 1 or parallel.pcp_size > 1 or parallel.use_all2all_kernels:
        return "data parallel attention and prefill context parallelism are untried with MXFP4"
    if moe.activation != MoEActivation.SWIGLUOAI or not moe.has_bias:
        return f"experts in MXFP4 are taken with GPT-OSS's activation and biases, not with {moe.activation.value}"
    if moe.is_lora_enabled:
        return "LoRA on experts"
    if moe.hidden_dim % 32 or moe.intermediate_size_per_partition % 32:
        return f"sizes must be multiples of 32, not {moe.hidden_dim} and {moe.intermediate_size_per_partition}"
    return None


class Fp8moeMxfp4Config(Layers, GptOssMxfp4Config):
    """Runs the experts of GPT-OSS checkpoints on fp8moe: weights in MXFP4, activations quantized 1x128 to FP8.

    Experts that fp8moe does not support run on vLLM's own kernels, as with `Fp8moeConfig`.
    """

    how = {"weight_format": "mxfp4", "bias": True, "activation": Activation(limit=LIMIT, alpha=ALPHA)}

    @classmethod
    def get_min_capability(cls) -> int:
        return 90

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        why = refusal(layer.moe_config) if isinstance(layer, RoutedExperts) else None
        if why:
            self.leave_to_vllm("experts", why)
        if why or not isinstance(layer, RoutedExperts):
            return super().get_quant_method(layer, prefix)
        return Fp8moeMxfp4MoEMethod(self, layer)


class Fp8moeMxfp4MoEMethod(GptOssMxfp4MoEMethod):
    """The quantization method for experts in MXFP4. vLLM creates and loads the weights, which never change later."""

    weight_dtype = "gpt_oss_mxfp4"  # by this, and the name of the config, vLLM knows how to load the weights
    experts: fp8moe.GroupedExperts

    def __init__(self, quant_config: Fp8moeMxfp4Config, layer: RoutedExperts):
        # skips GptOssMxfp4MoEMethod.__init__, which would choose a vLLM kernel
        FusedMoEMethodBase.__init__(self, layer.moe_config)
        self.quant_config = quant_config

    @property
    def is_monolithic(self) -> bool:
        return False

    @property
    def skip_forward_padding(self) -> bool:
        return False

    @property
    def has_unpadded_output(self) -> bool:
        return False

    def maybe_roundup_sizes(self, hidden_size: int, intermediate_size_per_partition: int, *others: Any, **more: Any):
        return hidden_size, intermediate_size_per_partition

    def create_weights(self, layer: RoutedExperts, num_experts: int, hidden_size: int, *args: Any, **more: Any) -> None:
        super().create_weights(layer, num_experts, hidden_size, *args, **more)
        shape = num_experts, 2 * layer.w2_weight.shape[2], hidden_size, self.moe.experts_per_token
        max_tokens = get_current_vllm_config().scheduler_config.max_num_batched_tokens
        self.quant_config.taken("experts", shape, max_tokens)

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        """Move the weights to a GroupedExperts, rows of gate before those of up; the checkpoint has them in turns."""
        if layer.apply_router_weight_on_input:
            raise ValueError("fp8moe: experts in MXFP4: apply_router_weight_on_input is not supported")
        (count, hidden, _), device = layer.w2_weight.shape, layer.w2_weight.device
        experts = fp8moe.GroupedExperts(
            **{"num_experts": count, "hidden_size": hidden, "intermediate_size": 2 * layer.w2_weight.shape[2]},
            **{"weight_format": "mxfp4", "bias": True, "swiglu_limit": LIMIT, "swiglu_alpha": ALPHA},
            **{"device": "meta", "dtype": torch.bfloat16},
        )
        state = {}
        for ours, theirs in (("gate_up_proj", "w13"), ("down_proj", "w2")):
            for end, name in (("", "weight"), ("_scale", "weight_scale"), ("_bias", "bias")):
                value = getattr(layer, f"{theirs}_{name}").data
                state[ours + end] = value if theirs == "w2" else torch.cat([value[:, 0::2], value[:, 1::2]], dim=1)
                setattr(layer, f"{theirs}_{name}", torch.nn.Parameter(value.new_empty(0), requires_grad=False))
        self.experts = experts.to_empty(device=device).eval()
        self.experts.load_state_dict(state)
        self.quant_config.warm()

    def get_fused_moe_quant_config(self, layer: RoutedExperts) -> None:
        return None

    def apply(
        self,
        layer: RoutedExperts,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any = None,
        shared_experts_input: Tensor | None = None,
    ) -> Tensor:
        if layer.expert_map is not None:
            known = (topk_ids >= 0) & (topk_ids < layer.expert_map.shape[0])
            topk_ids = torch.where(known, layer.expert_map[topk_ids.clamp(0, layer.expert_map.shape[0] - 1)], -1)
        return self.experts(x, topk_ids, topk_weights)
