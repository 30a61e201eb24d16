"""Makes skeletons of transformers models, to record their kernels: one layer of each kind, without real weights."""

import copy
import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from fp8moe.hf.architecture import empty_model, parts_of, reason_of
from fp8moe.hf.experts import NAME
from fp8moe.hf.patches import register
from fp8moe.hf.quantizer import replace_modules
from fp8moe.layers.experts import PACKED_WEIGHTS
from fp8moe.layers.replaced import DEFAULT_SKIP, matches
from fp8moe.quant.formats import BLOCK
from fp8moe.runtime.record import reserve_memory
from fp8moe.weights.formats import FP8_KINDS, KINDS, Declared, declared

_UNCONVERTED = ("modules_to_not_convert", "ignore", "exclude_modules")
"""Keys of quantization_config that list unquantized modules, in transformers, compressed-tensors and ModelOpt."""


def skeletons(config: Any, experts: str = "stored") -> list[Any]:
    """Build the skeletons of a model, which run all kernels that layers of the whole model run.

    A configuration with FP8 weights gives one skeleton; one with experts in INT4 gives a skeleton for each dtype that
    the scales may have, which only the tensors tell. An unquantized one gives two: the unquantized model, whose
    experts `register` quantizes, and the model that `quantize_checkpoint` would write. Weights are reserved memory
    (`reserve_memory`). The dtype is the configuration's if that has 16 bits, otherwise bfloat16.

    experts: see `load_model`.
    Raises ValueError if transformers cannot make a model from the configuration, or cannot make it in FP8, or if the
    configuration declares a quantization that fp8moe does not run.
    """
    register()
    found = (getattr(part, "quantization_config", None) for part in parts_of(config))
    quantization = next((dict(content) for content in found if content is not None), None)
    if quantization is not None:
        fp4 = "fp4" in [place.get("expert_dtype") for place in (quantization, *map(vars, parts_of(config)))]
        says = declared("config.json: quantization_config", quantization)
        return [_skeleton(config, quantization, says, *forms) for forms in _forms(says, fp4, experts)]
    default = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": None}
    return [_skeleton(config), _skeleton(config, default, declared("", default), "block", "block")]


def _forms(says: Declared, fp4: bool, experts: str) -> list[tuple[str, str]]:
    """Return how `load_model` may keep quantized linears and experts, as `replace_modules` takes it.

    fp4: whether config.json says that experts are MXFP4, beside a quantization_config of the linears.
    """
    if says.refusal is not None:
        raise ValueError(f"{says.where}: {says.refusal}")
    kinds = says.kinds or frozenset()
    linears = "channel" if kinds.intersection(FP8_KINDS) == {"fp8-channel"} else "block"
    int4 = [form for form, packing in PACKED_WEIGHTS.items() if packing in {("int4", size) for size in says.groups}]
    if int4 and experts == "fp8":
        raise ValueError(f"{says.where}: {KINDS['int4'].words}, which load_model refuses with experts='fp8'")
    if int4:
        return [(linears, form + dtype) for form in int4 for dtype in ("", ", float32")]
    packed = experts == "stored" and (fp4 or not says.method.startswith("fp8"))
    return [(linears, next((kind for kind in ("nvfp4", "mxfp4") if packed and kind in kinds), linears))]


def _skeleton(config: Any, quantization: dict[str, Any] | None = None, *how: Any) -> Any:
    config = copy.deepcopy(config)  # layers are removed from it below
    for part in parts_of(config):
        vars(part).pop("quantization_config", None)  # else transformers would quantize the model
    own = getattr(config.get_text_config(decoder=True), "dtype", None)
    model = empty_model(config, own if own in (torch.bfloat16, torch.float16) else torch.bfloat16)
    if quantization is not None:
        _put_quantized_modules(model, quantization, *how)
    _keep_one_layer_of_each_kind(model)
    reserve_memory(model)
    model.set_experts_implementation(NAME)
    return model.eval()


def _put_quantized_modules(
    model: Any, quantization: dict[str, Any], says: Declared, linear_form: str, experts_form: str
) -> None:
    """Replace the modules that from_pretrained would make FP8 for this quantization_config with fp8moe's modules.

    Experts with biases, which transformers does not make FP8, are replaced too. Raises ValueError if that fails.
    """
    from transformers.integrations.finegrained_fp8 import FP8Experts, FP8Linear
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer
    from transformers.utils.quantization_config import FineGrainedFP8Config

    linears = [name for name, module in model.named_modules() if type(module) is nn.Linear]
    given = next((quantization[name] for name in _UNCONVERTED if quantization.get(name) is not None), None)
    if given is None:
        kept = [name for name in linears if matches(name, DEFAULT_SKIP)]
    else:
        kept = [name for name in given if not name.startswith("re:") and "*" not in name]
        kept += [name for name in linears if _is_named(name, given)]
    if says.kinds == {"int4"}:  # in linears, it is refused
        kept += linears
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
    forms = {name: linear_form for name, module in theirs.named_modules() if isinstance(module, FP8Linear)}
    of_experts = [name for name, module in theirs.named_modules() if isinstance(module, FP8Experts)]
    try:
        replace_modules(model, forms | dict.fromkeys([*of_experts, *biased], experts_form))
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
