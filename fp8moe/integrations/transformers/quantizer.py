"""What makes transformers' from_pretrained build a model with fp8moe's modules. Importing it imports transformers."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from fp8moe.integrations import NAME
from fp8moe.integrations.transformers.experts import grouped_experts
from fp8moe.layers.linear import FP8Linear


@register_quantization_config(NAME)
class ReplaceModules(QuantizationConfigMixin):
    """names: of the modules that become fp8moe's. device: where the model is to be."""

    def __init__(self, names: Iterable[str], device: torch.device):
        self.quant_method = NAME
        self.names = list(names)
        self.device = device


@register_quantizer(NAME)
class _Quantizer(HfQuantizer):
    """Puts modules without data into the model while it has none; names and tensors are given to fit them."""

    quantization_config: ReplaceModules

    def update_device_map(self, device_map: Any) -> dict[str, torch.device]:
        return {"": self.quantization_config.device}

    def update_weight_conversions(self, weight_conversions: list, model: nn.Module | None = None) -> list:
        return []

    def _process_model_before_weight_loading(self, model: nn.Module, **kwargs: Any) -> None:
        replace_modules(model, self.quantization_config.names)

    def postprocess_model(self, model: nn.Module, **kwargs: Any) -> None:
        self.remove_quantization_config(model)

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return False


def replace_modules(model: nn.Module, names: Iterable[str]) -> None:
    """Put an FP8Linear or a GroupedExperts in the place of each of these linears and experts modules.

    Raises TypeError or ValueError for a module that is neither.
    """
    for name in names:
        module = model.get_submodule(name)
        replace = FP8Linear.from_linear if type(module) is nn.Linear else grouped_experts
        model.set_submodule(name, replace(module))
