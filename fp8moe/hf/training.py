"""Makes transformers' Trainer refuse models with frozen quantized weights that have neither adapters nor masters."""

import functools
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import nn

from fp8moe.layers.master import MasterModule
from fp8moe.layers.wrapped import adapters_in


def checked(theirs: Callable[[Any], None]) -> Callable[[Any], None]:
    """Wrap Trainer's check of quantized models: call `check_trained` before it."""

    @functools.wraps(theirs)
    def validate_quantization_for_training(model):
        check_trained(model)
        theirs(model)

    return validate_quantization_for_training


def is_there(module: str) -> bool:
    """Return whether this module of transformers has the check to wrap.

    transformers.trainer is not imported to find out: if it is imported later, it takes the wrapped check from
    trainer_utils.
    """
    if module == "transformers.trainer" and module not in sys.modules:
        return False
    return hasattr(import_module(module), "validate_quantization_for_training")


def check_trained(model: nn.Module) -> None:
    """Raise ValueError for a model with frozen weights in FP8, or experts in four bits, without adapters or masters.

    Its training would silently change only other weights.
    """
    parameters = [*model.parameters()]
    layers = [module for module in model.modules() if isinstance(module, MasterModule)]
    four = any(getattr(layer, "weight_format", "fp8") != "fp8" for layer in layers)
    if not four and not any(value.dtype == torch.float8_e4m3fn for value in parameters):
        return
    if not any(value.requires_grad for value in parameters) or any(adapters_in(model)):
        return
    if any(layer.trainable for layer in layers):
        return
    what, masters = "weights in FP8", " masters (GroupedExperts.from_experts(module, master_dtype=...)),"
    if four:
        what, masters = "experts in four bits", ""
    raise ValueError(
        f"model: its {what} are frozen, and embeddings, norms and routers alone would be trained; train adapters "
        f"(fp8moe.peft.register),{masters} or the unquantized model, whose weights fp8moe.refit puts in"
    )
