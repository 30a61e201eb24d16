"""Whole transformers models with random weights on the GPU, in FP8 or bfloat16, to measure decode and prefill."""

import zlib
from typing import Any

import torch
from torch import Tensor, nn

from fp8moe import GroupedExperts, replace_linears
from fp8moe.weights import DEFAULT_SKIP

_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 40, "original_max_position_embeddings": 4096}
_YARN |= {"beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-30b-a3b": (
        "qwen3_moe",
        {"num_hidden_layers": 48, "head_dim": 128, "norm_topk_prob": True, "rope_theta": 1e6}
        | {"max_position_embeddings": 40960},
    ),
    # 4 of DeepSeek-V3's 61 layers: 1 of its 3 dense layers, and 3 layers with experts
    "deepseek-v3": (
        "deepseek_v3",
        {"num_hidden_layers": 4, "first_k_dense_replace": 1, "rope_parameters": _YARN}
        | {"max_position_embeddings": 163840},
    ),
}
"""Maps names to model types of transformers, and to options that differ from the type's defaults."""

WHOLE = {"deepseek-v3": {"num_hidden_layers": 61, "first_k_dense_replace": 3}}
"""Options that restore the full number of layers, for models of which CONFIGS has only some layers."""

STD = 0.02  # standard deviation of weights
FP8_STD = 64.0  # standard deviation of the E4M3 values of FP8 weights
PIECE = 1 << 28  # elements drawn at a time, to bound temporary memory


def build(
    name: str,
    *,
    fp8: bool = True,
    device: str = "cuda",
) -> Any:
    """Build the model in eval mode, with experts and linear layers in FP8, or with all weights in bfloat16."""
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
        if hasattr(module, "inv_freq"):  # the rotary frequencies are computed, as checkpoints do not contain them
            model.set_submodule(path, type(module)(config).to(device))
    generator = torch.Generator(device)
    for parameter_name, parameter in model.named_parameters():
        _fill(parameter_name, parameter.data, generator)
    for buffer_name, buffer in model.named_buffers():
        if buffer_name.endswith("e_score_correction_bias"):
            buffer.zero_()
        elif not buffer_name.endswith("inv_freq"):
            raise ValueError(f"{buffer_name}: nothing says which values it has")
    return model.eval()


def _fill(name: str, value: Tensor, generator: torch.Generator) -> None:
    """Fill a parameter with values that depend only on its name."""
    if name.endswith("_scale_inv"):
        value.fill_(STD / FP8_STD)
    elif value.dim() == 1:
        value.fill_(1.0 if name.endswith("norm.weight") else 0.0)
    else:
        generator.manual_seed(zlib.crc32(name.encode()))
        std = FP8_STD if value.dtype == torch.float8_e4m3fn else STD
        for part in value.view(-1).split(PIECE):
            drawn = torch.randn(part.shape, generator=generator, device=value.device, dtype=torch.bfloat16)
            part.copy_(drawn.mul_(std))
