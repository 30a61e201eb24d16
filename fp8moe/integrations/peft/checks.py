"""What adapters on FP8 layers cannot do, refused in one sentence when they are made."""

from dataclasses import fields
from typing import Any

from torch import nn

from fp8moe.integrations import finegrained
from fp8moe.layers.parameters import is_sharded

_INITIALIZATIONS = (True, False, "gaussian")


def check_config(name: str, config: Any, parameter_name: str | None = None) -> None:
    """ValueError for a LoraConfig that asks for more than LoRA by the side of weights that stay as they are.

    parameter_name: of one of `target_parameters`, as peft hands it over.
    """
    if parameter_name is not None:
        raise ValueError(
            f"target_parameters: {parameter_name} of {name} is in FP8, to which no adapter can be added in each call; "
            "expected the module in target_modules instead"
        )
    asked = [field.name for field in fields(config) if field.metadata.get("is_lora_variant")]
    asked += ["lora_bias", "fan_in_fan_out"]
    if found := [field for field in asked if getattr(config, field)]:
        raise ValueError(f"{found[0]}: expected none for the FP8 weights of {name}, got {getattr(config, found[0])!r}")
    if config.init_lora_weights not in _INITIALIZATIONS:
        raise ValueError(
            f"init_lora_weights: expected True, False or 'gaussian' for {name}, got {config.init_lora_weights!r}: "
            "others change the weights, which FP8 would round"
        )


def check_base(name: str, module: nn.Module) -> None:
    """ValueError for a layer that is spread over several ranks, or whose FP8 weights are in another format."""
    parallel = [getattr(module, attribute, None) for attribute in ("parallel", "_fp8moe_parallel")]
    if any(style is not None for style in parallel) or any(map(is_sharded, module.parameters(recurse=False))):
        raise ValueError(
            f"{name}: expected a layer that is whole on this rank to adapt, got {type(module).__name__} spread over "
            "several ranks"
        )
    weight, scale = getattr(module, "weight", None), getattr(module, "weight_scale_inv", None)
    if weight is not None and scale is not None and hasattr(module, "block_size"):  # of transformers
        reason = finegrained.refusal(weight, module.block_size, getattr(module, "activation_scale", None))
        if reason is not None:
            raise ValueError(f"{name}: expected FP8 weights that fp8moe runs, got {reason}")
