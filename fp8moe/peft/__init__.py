"""LoRA with peft on FP8 models: adapters for linears and experts whose base weights stay as they are."""

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from fp8moe.hf.experts import NAME
from fp8moe.layers.experts import GroupedExperts
from fp8moe.layers.linear import FP8Linear

if TYPE_CHECKING:
    from fp8moe.peft.layer import MergeError

__all__ = ["merge_and_unload", "register"]


def register(config: Any, model: nn.Module) -> Any:
    """Prepare a LoraConfig so that peft can adapt the FP8 linears and experts of a model; return the config.

    config: peft's LoraConfig, for `get_peft_model`, `PeftModel.add_adapter` or `PeftModel.from_pretrained(...,
        config=config)`, with names as for the bfloat16 model:

        - target_modules: FP8Linear and transformers' FP8 linears, beside what peft supports itself.
        - target_parameters: the projections of experts, in most models "experts.gate_up_proj" ("experts.up_proj"
          without a gate) and "experts.down_proj". The experts may be GroupedExperts, in FP8 or four bits, or, under
          experts_implementation="fp8moe", transformers' experts modules, quantized or not. An adapter of a projection
          has LoRA factors of rank r for each expert. "experts" in a list of target_modules is replaced by both
          projections.

    model: the model to adapt. Its weights in FP8 or four bits stay unchanged, in their format, and frozen.

    Adapters are saved and loaded in the format that peft has for the bfloat16 model. peft stores the registration in
    the config object, not in the file: to load an adapter, register the config that ``LoraConfig.from_pretrained(
    directory)`` returns. Adapters are plain LoRA: r, lora_alpha, rank_pattern, alpha_pattern, use_rslora,
    lora_dropout (which peft itself refuses for parameters) and init_lora_weights True, False or "gaussian" (LoRA:
    arXiv:2106.09685).

    Raises ImportError without peft, TypeError for a config that is not a LoraConfig. Raises ValueError, with nothing
    changed, for a model without FP8 linears or experts, for more than plain LoRA on one of these modules, and for
    a target that is spread over several ranks or shares its weights with another target. The same is checked again when
    peft adapts the model. From now on the model's load_state_dict raises ValueError, with nothing written, for LoRA
    factors that are missing, have another shape, or belong to no layer of the model.
    """
    from peft import LoraConfig

    from fp8moe.peft.layer import check_loaded, check_targets, with_projections

    if not isinstance(config, LoraConfig):
        raise TypeError(f"config: expected a peft.LoraConfig, got {type(config).__name__}")
    kinds, modules = {}, {}
    for name, module in model.named_modules(remove_duplicate=False):
        if (layer := _adapter_of(module)) is not None:
            kinds[type(module)] = layer
            modules[name.replace(".base_layer", "")] = module, layer  # an adapted model has base_layer in its names
    if not kinds:
        raise ValueError(
            f"model: expected FP8Linear or GroupedExperts, or transformers' FP8 linears or experts on {NAME!r}, found "
            f"none in {type(model).__name__}"
        )
    named = with_projections(config, modules)
    check_targets(named, modules)
    config.target_modules, config.target_parameters = named.target_modules, named.target_parameters
    config._register_custom_module(kinds)
    if not any(hook.hook is check_loaded for hook in model._load_state_dict_pre_hooks.values()):
        model.register_load_state_dict_pre_hook(check_loaded)
    return config


def merge_and_unload(
    model: Any, *, safe_merge: bool = False, adapter_names: list[str] | None = None
) -> tuple[nn.Module, "dict[str, MergeError]"]:
    """Call peft's `merge_and_unload` and report the rounding errors of the merged weights.

    model: a PeftModel. safe_merge, adapter_names: as for peft's `merge_and_unload`.
    Returns the base model, and a dict from the name of each merged linear or projection of experts to its `MergeError`.
    The error relative to W + BA is 2.6e-2 for normally distributed weights in E4M3.

    Raises ValueError before anything is merged: for experts in four bits, which adapters are not merged into; with
    safe_merge, for an FP8 module where W + BA is not finite.
    """
    from fp8moe.peft.layer import FP8LoraLayer

    layers = [module for module in model.modules() if isinstance(module, FP8LoraLayer)]
    for layer in layers if safe_merge else ():  # check all layers before any is merged
        layer.check_finite(adapter_names)
    merged = model.merge_and_unload(safe_merge=safe_merge, adapter_names=adapter_names)
    return merged, {layer.name: layer.merge_error for layer in layers if layer.merge_error is not None}


def _adapter_of(module: nn.Module) -> type[nn.Module] | None:
    """Return the LoRA layer class for an FP8 linear or experts module, None for other modules."""
    from transformers.integrations import finegrained_fp8

    from fp8moe.peft.experts import LoraExperts
    from fp8moe.peft.layer import LoraFP8Linear

    if isinstance(module, FP8Linear | finegrained_fp8.FP8Linear):
        return LoraFP8Linear
    chosen = getattr(getattr(module, "config", None), "_experts_implementation", None)
    fused = isinstance(getattr(module, "down_proj", None), Tensor)
    return LoraExperts if isinstance(module, GroupedExperts) or (chosen == NAME and fused) else None
