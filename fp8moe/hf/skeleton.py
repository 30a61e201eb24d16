"""Makes skeletons of transformers models, to record their kernels: one layer of each kind, without real weights."""

import copy
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from fp8moe.hf.architecture import empty_model, reason_of
from fp8moe.hf.experts import NAME
from fp8moe.hf.patches import register
from fp8moe.hf.quantizer import replace_modules
from fp8moe.layers.replaced import DEFAULT_SKIP, matches
from fp8moe.quant.formats import BLOCK
from fp8moe.runtime.record import reserve_memory
from fp8moe.weights.formats import declared

_UNCONVERTED = ("modules_to_not_convert", "ignore", "exclude_modules")
"""Keys of quantization_config that list unquantized modules, in transformers, compressed-tensors and ModelOpt."""


def skeletons(config: Any) -> list[Any]:
    """Build the skeletons of a model, which run all kernels that layers of the whole model run.

    A configuration with FP8 weights gives one skeleton. An unquantized one gives two: the unquantized model, whose
    experts `register` quantizes, and the model that `quantize_checkpoint` would write. Weights are reserved memory
    (`reserve_memory`). The dtype is the configuration's if that has 16 bits, otherwise bfloat16.

    Raises ValueError if transformers cannot make a model from the configuration, or cannot make it in FP8, or if the
    configuration declares a quantization that fp8moe does not run.
    """
    register()
    quantization = getattr(config, "quantization_config", None)
    if quantization is not None:
        return [_skeleton(config, quantization)]
    default = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": None}
    return [_skeleton(config, None), _skeleton(config, default)]


def _skeleton(config: Any, quantization: Mapping[str, Any] | None) -> Any:
    config = copy.deepcopy(config)  # layers are removed from it below
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # else transformers would quantize the model
    own = getattr(config.get_text_config(decoder=True), "dtype", None)
    model = empty_model(config, own if own in (torch.bfloat16, torch.float16) else torch.bfloat16)
    if quantization is not None:
        _put_fp8_modules(model, dict(quantization))
    _keep_one_layer_of_each_kind(model)
    reserve_memory(model)
    model.set_experts_implementation(NAME)
    return model.eval()


def _put_fp8_modules(model: Any, quantization: dict[str, Any]) -> None:
    """Replace all modules that from_pretrained would make FP8 for this quantization_config with fp8moe's FP8 modules.

    Experts with biases, which transformers does not make FP8, are replaced too. Raises ValueError if that fails.
    """
    from transformers.integrations.finegrained_fp8 import FP8Experts, FP8Linear
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer
    from transformers.utils.quantization_config import FineGrainedFP8Config

    says = declared("config.json: quantization_config", quantization)
    if says.refusal is not None:
        raise ValueError(f"{says.where}: {says.refusal}")
    linears = [name for name, module in model.named_modules() if type(module) is nn.Linear]
    given = next((quantization[name] for name in _UNCONVERTED if quantization.get(name) is not None), None)
    if given is None:
        kept = [name for name in linears if matches(name, DEFAULT_SKIP)]
    else:
        kept = [name for name in given if not name.startswith("re:") and "*" not in name]
        kept += [name for name in linears if _is_named(name, given)]
    # transformers' FP8 experts have no biases.
    experts = {name: module for name, module in model.named_modules() if name.endswith(".experts")}
    biased = [name for name, module in experts.items() if getattr(module, "has_bias", False) and name not in kept]
    blocks = {"weight_block_size": [BLOCK, BLOCK], "modules_to_not_convert": [*kept, *biased]}
    theirs = copy.deepcopy(model)
    try:
        quantizer = FineGrainedFP8HfQuantizer(FineGrainedFP8Config(**blocks), pre_quantized=True)
        quantizer._process_model_before_weight_loading(theirs)
    except Exception as error:  # transformers has assertions for models that it cannot run in FP8
        raise ValueError(f"config.json: transformers cannot run this model in FP8 ({reason_of(error)})") from error
    names = [name for name, module in theirs.named_modules() if isinstance(module, FP8Experts | FP8Linear)]
    try:
        replace_modules(model, dict.fromkeys([*names, *biased], "block"))
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise ValueError(f"config.json: fp8moe cannot run this model in FP8 ({error})") from error


def _is_named(name: str, given: Iterable[str]) -> bool:
    """Return whether an entry of `given` matches the name of a module or of one of the modules that contain it.

    An entry is an fnmatch pattern or "re:REGEX".
    """
    parts = name.split(".")
    around = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
    by_regex = any(re.match(entry.removeprefix("re:"), name) for entry in given if entry.startswith("re:"))
    return by_regex or any(matches(module, given) for module in around)


def _keep_one_layer_of_each_kind(model: Any) -> None:
    config = model.config.get_text_config(decoder=True)
    count = config.num_hidden_layers
    lists = {name: value for name, value in vars(config).items() if isinstance(value, list) and len(value) == count}
    for module in model.modules():
        layers = getattr(module, "layers", None)
        if not isinstance(layers, nn.ModuleList) or len(layers) != count:
            continue
        kinds = {_kind(layer, [value[i] for value in lists.values()]): i for i, layer in reversed([*enumerate(layers)])}
        kept = sorted(kinds.values())
        module.layers = nn.ModuleList(layers[i] for i in kept)
        for index, layer in enumerate(module.layers):
            for part in layer.modules():
                if hasattr(part, "layer_idx"):
                    part.layer_idx = index
        for name, value in lists.items():
            setattr(config, name, [value[i] for i in kept])
        config.num_hidden_layers = len(kept)
        return


def _kind(layer: nn.Module, listed: list[Any]) -> tuple:
    """Return a key that is equal for layers that run the same kernels. listed: the configuration's per-layer values."""
    modules = tuple((name, type(module)) for name, module in layer.named_modules())
    tensors = tuple((name, value.shape, value.dtype) for name, value in layer.state_dict().items())
    return modules, tensors, repr(listed)
