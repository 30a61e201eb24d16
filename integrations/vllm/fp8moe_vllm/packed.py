"""Experts in four bits: what fp8moe does not run, and the base of their quantization methods."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase, RoutedExperts
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig

import fp8moe
from fp8moe.kernels.experts import Activation
from fp8moe_vllm.experts import other_swiglu
from fp8moe_vllm.layers import Layers
from fp8moe_vllm.versions import not_here

ACTIVATIONS = {MoEActivation.SILU: Activation(), MoEActivation.SWIGLUOAI: Activation(limit=7.0, alpha=1.702)}


def refusal(moe: FusedMoEConfig, weight_format: str) -> str | None:
    """Return why fp8moe does not run these experts; None if it does. weight_format: of `GroupedExperts`."""
    parallel = moe.moe_parallel_config
    if why := not_here():
        return why
    if parallel.dp_size > 1 or parallel.pcp_size > 1 or parallel.use_all2all_kernels:
        return "data parallel attention and prefill context parallelism are untried with experts in four bits"
    if parallel.enable_eplb:
        return "fp8moe arranges weights in four bits, which expert load balancing could not move"
    if weight_format == "mxfp4" and (moe.activation != MoEActivation.SWIGLUOAI or not moe.has_bias):
        return f"experts in MXFP4 are taken with GPT-OSS's activation and biases, not with {moe.activation.value}"
    if weight_format != "mxfp4" and (moe.activation != MoEActivation.SILU or moe.has_bias):
        return "experts in INT4 and NVFP4 are taken with SiLU, and without biases"
    if why := other_swiglu(moe):
        return why
    if moe.is_lora_enabled:
        return "LoRA on experts"
    multiple = 128 if weight_format == "int4" else 32
    sizes = moe.hidden_dim, moe.intermediate_size_per_partition
    if any(size % multiple for size in sizes):
        return f"sizes must be multiples of {multiple}, not {sizes[0]} and {sizes[1]}"
    return None


class OnGroupedExperts:
    """Base of quantization methods for experts in four bits, before the class of vLLM that creates and loads weights.

    A `GroupedExperts` takes the loaded weights, which never change later. weight_format: its format. shown: what it is
    called in errors.
    """

    weight_format: str
    shown: str
    experts: fp8moe.GroupedExperts

    def __init__(self, quant_config: Layers, layer: RoutedExperts):
        # skips the __init__ of vLLM's class, which would choose a vLLM kernel
        FusedMoEMethodBase.__init__(self, layer.moe_config)
        self.quant_config = quant_config

    def parts(self, layer: RoutedExperts, name: str) -> Mapping[str, Tensor]:
        """Return the loaded tensors of "w13" or "w2" by the ends of their names in a `GroupedExperts`."""
        raise NotImplementedError

    @property
    def supports_eplb(self) -> bool:
        return False

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

    def create_weights(
        self,
        layer: RoutedExperts,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        *others: Any,
        **more: Any,
    ) -> None:
        self.sizes = num_experts, hidden_size, intermediate_size_per_partition
        super().create_weights(layer, *self.sizes, *others, **more)
        shape = num_experts, intermediate_size_per_partition, hidden_size, self.moe.experts_per_token
        max_tokens = get_current_vllm_config().scheduler_config.max_num_batched_tokens
        how = {"weight_format": self.weight_format, "activation": ACTIVATIONS[self.moe.activation]}
        self.quant_config.taken("experts", shape, max_tokens, bias=self.moe.has_bias, **how)

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        """Move the weights to a GroupedExperts."""
        if layer.apply_router_weight_on_input:
            raise ValueError(f"fp8moe: experts in {self.shown}: apply_router_weight_on_input is not supported")
        (count, hidden, size), activation = self.sizes, ACTIVATIONS[self.moe.activation]
        device = next(layer.parameters()).device
        experts = fp8moe.GroupedExperts(
            **{"num_experts": count, "hidden_size": hidden, "intermediate_size": size, "bias": self.moe.has_bias},
            **{"swiglu_limit": activation.limit, "swiglu_alpha": activation.alpha},
            **{"weight_format": self.weight_format, "device": "meta", "dtype": torch.bfloat16},
        )
        names = {"gate_up_proj": "w13", "down_proj": "w2"}
        state = {f"{own}{end}": part for own, name in names.items() for end, part in self.parts(layer, name).items()}
        for name, value in list(layer.named_parameters(recurse=False)):
            if name.startswith(("w13_", "w2_")):
                setattr(layer, name, torch.nn.Parameter(value.data.new_empty(0), requires_grad=False))
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
