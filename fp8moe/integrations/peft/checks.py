"""What adapters on FP8 layers cannot do, refused in one sentence before a model is adapted."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
from peft.tuners.tuners_utils import check_target_module_exists
from torch import nn

from fp8moe.integrations import finegrained
from fp8moe.layers.parameters import is_sharded

_INITIALIZATIONS = (True, False, "gaussian")
_NOT_PLAIN = ("lora_bias", "fan_in_fan_out", "use_qalora", "layer_replication")


def check_targets(config: Any, modules: Mapping[str, nn.Module]) -> None:
    """ValueError for what would be refused, or left without its adapter, once peft has changed a part of the model.

    config: a LoraConfig. modules: by every name that it has in the model, each that `register` has adapters for.
    """
    if isinstance(config.target_modules, str) and config.target_modules.lower() == "all-linear":
        raise ValueError(
            "target_modules: 'all-linear' leaves out FP8Linear and experts; expected the names of modules, such as "
            f"{next(iter(modules))}"
        )
    parameters = config.target_parameters or ()
    owners: dict[int, str] = {}
    for name, module in modules.items():
        for parameter in module._parameters:
            if any(f".{name}.{parameter}".endswith(f".{target}") for target in parameters):
                check_config(name, config, parameter)
        saved = any(f".{name}".endswith(f".{target}") for target in config.modules_to_save or ())
        if saved and any(weight.dtype == torch.float8_e4m3fn for weight in module.parameters(recurse=False)):
            raise ValueError(f"modules_to_save: {name} is in FP8, which is not trained; expected it in target_modules")
        # Without target_modules peft takes those that it knows for the model: they are checked when they are adapted.
        if config.target_modules is None or not check_target_module_exists(config, name):
            continue
        check_config(name, config)
        check_base(name, module)
        for weight in module.parameters(recurse=False):
            if (owner := owners.setdefault(id(weight), name)) != name:
                raise ValueError(f"{name}: expected weights of its own to adapt, got those of {owner}")


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
    asked += _NOT_PLAIN
    if found := [field for field in asked if getattr(config, field, None)]:  # older versions of peft lack some
        raise ValueError(f"{found[0]}: expected none for the FP8 weights of {name}, got {getattr(config, found[0])!r}")
    if not 0 <= config.lora_dropout < 1:
        raise ValueError(f"lora_dropout: expected at least 0 and below 1 for {name}, got {config.lora_dropout}")
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
