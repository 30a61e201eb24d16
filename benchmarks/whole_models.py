"""Whole transformers models with random weights on the GPU, to measure decode and prefill."""

import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fp8moe import GroupedExperts, replace_linears
from fp8moe.layers.experts import PACKED_WEIGHTS
from fp8moe.layers.parameters import local
from fp8moe.quant.packed import quantize_arranged
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
    "qwen3-235b-a22b": (
        "qwen3_moe",
        {"hidden_size": 4096, "moe_intermediate_size": 1536, "intermediate_size": 12288, "num_hidden_layers": 94}
        | {"num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128, "norm_topk_prob": True}
        | {"rope_theta": 5e6, "max_position_embeddings": 40960},
    ),
    "glm-4.7-flash": ("glm4_moe_lite", {}),
    "gpt-oss-20b": ("gpt_oss", {"num_hidden_layers": 24, "num_local_experts": 32}),
    "gpt-oss-120b": ("gpt_oss", {"num_hidden_layers": 36, "num_local_experts": 128}),
}
"""Maps names to model types of transformers, and to options that differ from the type's defaults."""

EXPERTS_ALONE = ("gpt_oss",)
"""Model types whose published checkpoints quantize the experts alone: all other weights are bfloat16."""

FORMATS = ("fp8", *PACKED_WEIGHTS)
"""The formats of experts' weights that `build` takes."""

WHOLE = {"deepseek-v3": {"num_hidden_layers": 61, "first_k_dense_replace": 3}}
"""Options that restore the full number of layers, for models of which CONFIGS has only some layers."""

STD = 0.02  # standard deviation of weights
FP8_STD = 64.0  # standard deviation of the E4M3 values of FP8 weights
PIECE = 1 << 28  # elements drawn at a time, to bound temporary memory


def build(
    name: str,
    *,
    experts: str | None = "fp8",
    layers: int | None = None,
    device: str = "cuda",
    prepare: Callable[[nn.Module], object] = lambda model: None,
) -> Any:
    """Build the model in eval mode.

    experts: one of FORMATS, the format of the experts' weights. Linear layers are then in FP8, except in models of
        EXPERTS_ALONE. With None, all weights are bfloat16.
    layers: the number of layers, if it differs from that of CONFIGS.
    prepare: called with the model before it has values, on the meta device: for `parallelize_module`. Values of a
        DTensor depend only on its name, as others' do: all ranks have the same.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, options = CONFIGS[name]
    config = AutoConfig.for_model(model_type, **options | ({} if layers is None else {"num_hidden_layers": layers}))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if experts is None:
        model.set_experts_implementation("grouped_mm")
    else:
        for path, module in list(model.named_modules()):
            if isinstance(getattr(module, "down_proj", None), nn.Parameter):
                model.set_submodule(path, GroupedExperts.from_experts(module, weight_format=experts))
        if model_type not in EXPERTS_ALONE:
            replace_linears(model, skip=DEFAULT_SKIP)
    prepare(model)
    model.to_empty(device=device)
    model.tie_weights()
    for path, module in list(model.named_modules()):
        if hasattr(module, "inv_freq"):  # the rotary frequencies are computed, as checkpoints do not contain them
            model.set_submodule(path, type(module)(config).to(device))
    generator = torch.Generator(device)
    packed = _packed_weights(model)
    for parameter_name, parameter in model.named_parameters():
        if parameter_name in packed:
            _fill_packed(parameter_name, *packed[parameter_name], generator)
        elif not parameter_name.endswith("_proj_scale"):  # these are written with their codes
            _fill(parameter_name, local(parameter.data), generator)
    for buffer_name, buffer in model.named_buffers():
        if buffer_name.endswith("e_score_correction_bias"):
            buffer.zero_()
        elif not buffer_name.endswith("inv_freq"):
            raise ValueError(f"{buffer_name}: nothing says which values it has")
    return model.eval()


def _packed_weights(model: nn.Module) -> dict[str, tuple[GroupedExperts, Tensor, Tensor]]:
    """Map the name of each parameter that has codes of four bits to its layer, its codes and their scales."""
    found = {}
    for path, layer in model.named_modules():
        if isinstance(layer, GroupedExperts) and layer.weight_format != "fp8":
            names = layer.weight_names
            for name, scale in zip(names[::2], names[1::2], strict=True):
                found[f"{path}.{name}"] = layer, getattr(layer, name).data, getattr(layer, scale).data
    return found


def _fill_packed(name: str, layer: GroupedExperts, data: Tensor, scale: Tensor, generator: torch.Generator) -> None:
    """Fill codes and scales with quantized values that depend only on the name, an expert at a time."""
    generator.manual_seed(zlib.crc32(name.encode()))
    projections = 2 if name.endswith("gate_up_proj") else 1
    shape = (projections, data.shape[1] // projections, 2 * data.shape[2])
    for codes, scales in zip(data, scale, strict=True):
        drawn = torch.randn(shape, generator=generator, device=data.device, dtype=torch.bfloat16).mul_(STD)
        made = quantize_arranged(drawn, *PACKED_WEIGHTS[layer.weight_format])
        codes.copy_(made.data.flatten(0, 1))
        scales.copy_(made.scale.flatten(0, 1))


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
