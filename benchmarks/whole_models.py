"""Whole transformers models with random weights on the GPU, in FP8 or bfloat16: sizes are what a decode step costs."""

from typing import Any

import torch
from torch import Tensor, nn

from fp8moe import GroupedExperts, replace_linears
from fp8moe.checkpoints import DEFAULT_SKIP

CONFIGS = {
    "qwen3-30b-a3b": (
        "qwen3_moe",
        {
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "rope_theta": 1e6,
            "max_position_embeddings": 40960,
            "tie_word_embeddings": False,
        },
    ),
    "glm-4.5-air": (
        "glm4_moe",
        {
            "vocab_size": 151552,
            "hidden_size": 4096,
            "intermediate_size": 10944,
            "moe_intermediate_size": 1408,
            "num_hidden_layers": 46,
            "num_attention_heads": 96,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "attention_bias": True,
            "n_routed_experts": 128,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "first_k_dense_replace": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
            "max_position_embeddings": 131072,
            "tie_word_embeddings": False,
        },
    ),
    "deepseek-v3": (  # 4 of its 61 layers, one of them of the 3 dense ones
        "deepseek_v3",
        {
            "vocab_size": 129280,
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "moe_intermediate_size": 2048,
            "num_hidden_layers": 4,
            "first_k_dense_replace": 1,
            "num_attention_heads": 128,
            "num_key_value_heads": 128,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "n_group": 8,
            "topk_group": 4,
            "routed_scaling_factor": 2.5,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 40,
                "original_max_position_embeddings": 4096,
                "beta_fast": 32,
                "beta_slow": 1,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
            "max_position_embeddings": 163840,
            "tie_word_embeddings": False,
        },
    ),
    "smollm2-moe": (  # SmolLM2-1.7B with 8 experts in the place of each feed-forward module
        "mixtral",
        {
            "vocab_size": 49152,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 24,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "head_dim": 64,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 130000.0},
            "max_position_embeddings": 8192,
            "tie_word_embeddings": True,
        },
    ),
}
"""transformers' model types and what their configurations have otherwise than by default."""

STD = 0.02  # of weights
FP8_STD = 64.0  # of the E4M3 values
PIECE = 1 << 28  # elements drawn at once


def build(name: str, *, fp8: bool = True, device: str = "cuda") -> Any:
    """The model in eval mode, its experts and linears in FP8, or all of it in bfloat16."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, options = CONFIGS[name]
    config = AutoConfig.for_model(model_type, **options)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if fp8:
        for path, module in list(model.named_modules()):
            if isinstance(getattr(module, "down_proj", None), nn.Parameter):
                model.set_submodule(path, GroupedExperts.from_experts(module))
        replace_linears(model, skip=DEFAULT_SKIP)
    else:
        model.set_experts_implementation("grouped_mm")
    model.to_empty(device=device)
    model.tie_weights()
    for path, module in list(model.named_modules()):
        if hasattr(module, "inv_freq"):  # rotary frequencies, which are in no checkpoint
            model.set_submodule(path, type(module)(config).to(device))
    generator = torch.Generator(device).manual_seed(0)
    for parameter_name, parameter in model.named_parameters():
        _fill(parameter_name, parameter.data, generator)
    for buffer_name, buffer in model.named_buffers():
        if buffer_name.endswith("e_score_correction_bias"):
            buffer.zero_()
        elif not buffer_name.endswith("inv_freq"):
            raise ValueError(f"{buffer_name}: nothing says which values it has")
    return model.eval()


def _fill(name: str, value: Tensor, generator: torch.Generator) -> None:
    if name.endswith("_scale_inv"):
        value.fill_(STD / FP8_STD)
    elif value.dim() == 1:
        value.fill_(1.0 if name.endswith("norm.weight") else 0.0)
    else:
        std = FP8_STD if value.dtype == torch.float8_e4m3fn else STD
        for piece in value.view(-1).split(PIECE):
            piece.copy_(torch.randn(piece.shape, generator=generator, device=value.device, dtype=torch.bfloat16) * std)
