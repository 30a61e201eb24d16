"""A transformers quantizer with which from_pretrained builds a model with fp8moe's modules; imports transformers."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from fp8moe.hf.experts import NAME, grouped_experts
from fp8moe.layers.experts import PACKED_WEIGHTS
from fp8moe.layers.linear import FP8Linear
from fp8moe.layers.parameters import frozen


@register_quantization_config(NAME)
class ReplaceModules(QuantizationConfigMixin):
    """The quantization config for `_Quantizer`.

    forms: see `replace_modules`. device: the device of the model.
    """

    def __init__(self, forms: Mapping[str, str], device: torch.device):
        self.quant_method = NAME
        self.forms = dict(forms)
        self.device = device


@register_quantizer(NAME)
class _Quantizer(HfQuantizer):
    """Replaces modules while the model is on the meta device; the caller's state dict already fits the new modules."""

    quantization_config: ReplaceModules

    def update_device_map(self, device_map: Any) -> dict[str, torch.device]:
        return {"": self.quantization_config.device}

    def update_weight_conversions(self, weight_conversions: list, model: nn.Module | None = None) -> list:
        return []

    def _process_model_before_weight_loading(self, model: nn.Module, **kwargs: Any) -> None:
        replace_modules(model, self.quantization_config.forms)

    def postprocess_model(self, model: nn.Module, **kwargs: Any) -> None:
        self.remove_quantization_config(model)

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return False


def replace_modules(model: nn.Module, forms: Mapping[str, str]) -> None:
    """Replace linears with FP8Linear, and experts modules with GroupedExperts.

    forms: maps the name of each module to how its weights are kept: "block" or "channel", FP8 with such scales; or, of
    experts, a `weight_format` of GroupedExperts in four bits, followed by ", float32" if scales have that dtype.

    Raises TypeError or ValueError for a module that is neither a linear nor experts.
    """
    for name, form in forms.items():
        module = model.get_submodule(name)
        module = (FP8Linear.from_linear if type(module) is nn.Linear else grouped_experts)(module)
        weight_format, _, dtype = form.partition(", ")
        if weight_format in PACKED_WEIGHTS:
            module = module.in_format(weight_format)
            for scale in module.weight_names[1::2] if dtype else ():
                setattr(module, scale, frozen(getattr(module, scale).float()))
        for weight, scale in zip(module.weight_names[::2], module.weight_names[1::2], strict=True):
            if form == "channel":
                value = getattr(module, weight)
                shape = (*value.shape[:-1], 1)
                setattr(module, scale, frozen(torch.empty(shape, dtype=torch.float32, device=value.device)))
        model.set_submodule(name, module)
