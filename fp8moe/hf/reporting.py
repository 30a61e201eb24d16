"""Report what runs the experts, linears and indexers of a model, and why."""

import functools
import re
import warnings
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import nn

from fp8moe.hf import experts, indexers, linears
from fp8moe.hf.experts import NAME
from fp8moe.layers.experts import GroupedExperts
from fp8moe.layers.linear import FP8Linear
from fp8moe.layers.mqa_indexer import TRANSFORMERS_CLASSES, FP8MQAIndexer

_EXPERTS = re.compile(r"(Experts|MoE|Moe|MoeBlock|SparseMLP)$")
"""Names of classes of experts, and of blocks that hold them or have their weights themselves."""

_FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)

_OURS = "fp8moe"
_THEIRS = "transformers"


class ModuleReport(NamedTuple):
    """What runs one module of a model.

    name: its path in the model. module_class: the name of its class. runs_on: "fp8moe", "transformers" or "PyTorch";
    "refused" where its first forward will raise an error. why: the reason; of refused ones, that error's message.
    """

    name: str
    module_class: str
    runs_on: str
    why: str


def report(model: nn.Module) -> list[ModuleReport]:
    """Tell what runs each experts module, linear layer and indexer of ``model``, in the order of its modules.

    model: a model of transformers, before or after `register`, or one of `load_model`. Nothing is computed, quantized
        or changed.
    Returns a `ModuleReport` for each.
    """
    expert_modules = dict(experts_modules(model))
    rows = []
    for name, module in model.named_modules():
        if name in expert_modules:
            row = _of_experts(module)
        elif isinstance(module, nn.Linear | FP8Linear):
            row = _of_linear(module)
        elif type(module).__name__.endswith("Indexer"):
            row = _of_indexer(module)
        else:
            continue
        rows.append(ModuleReport(name, type(module).__name__, *row))
    return rows


def experts_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the innermost modules that look like routed experts, with their names."""
    names: list[str] = []
    for name, module in reversed(list(model.named_modules())):  # what is inside a module comes before it
        own_name = name.rpartition(".")[2]
        is_list = isinstance(module, nn.ModuleList) and own_name == "experts"
        if "shared" in own_name or not (is_list or _EXPERTS.search(type(module).__name__)):
            continue
        if not any(inner.startswith(f"{name}.") for inner in names):
            names.append(name)
    for name in reversed(names):
        yield name, model.get_submodule(name)


def warn_of_others(model: nn.Module) -> None:
    """Warn of each class of experts, in a model that was asked for fp8moe, that takes no experts_implementation."""
    classes = {type(module).__name__ for _, module in experts_modules(model) if not _takes_implementation(module)}
    for name in sorted(classes):
        text = f"{name} does not run on fp8moe with experts_implementation={NAME!r}: {_NO_CHOICE}"
        warnings.warn(text, stacklevel=1)  # Python shows the same text of the same place once


def warning_of_model(theirs: Callable[..., None]) -> Callable[..., None]:
    """Wrap a method of a model, or of a quantizer that takes one: it warns then if the model has chosen fp8moe."""

    @functools.wraps(theirs)
    def method(*args: Any, **kwargs: Any) -> None:
        theirs(*args, **kwargs)
        model = next(value for value in (*args, *kwargs.values()) if isinstance(value, nn.Module))
        if experts.chosen_implementation(model) == NAME:
            warn_of_others(model)

    return method


def warning_of_parts(theirs: Callable[..., None]) -> Callable[..., None]:
    """Wrap `set_experts_implementation`: it warns then of the parts of the model that are asked to change to fp8moe."""

    @functools.wraps(theirs)
    def set_experts_implementation(self: Any, experts_implementation: str | dict[str, str]) -> None:
        theirs(self, experts_implementation)
        implementation = experts_implementation
        asked = implementation if isinstance(implementation, dict) else {"": implementation}
        configs = {"": self.config} | {name: getattr(self.config, name, None) for name in self.config.sub_configs}
        for config in [configs.get(name) for name, wanted in asked.items() if wanted == NAME]:
            if config is not None:
                parts = (part for part in self.modules() if getattr(part, "config", None) is config)
                for part in islice(parts, 1):  # what it contains has the same configuration
                    warn_of_others(part)

    return set_experts_implementation


_NO_CHOICE = "its forward does not go through transformers' experts interface, and stays with transformers"


def _takes_implementation(module: nn.Module) -> bool:
    """Return whether the experts module calls the implementation chosen, by transformers' decorator of its class."""
    return isinstance(module, GroupedExperts) or hasattr(module, "is_transposed")


def _of_experts(module: nn.Module) -> tuple[str, str]:
    if isinstance(module, GroupedExperts):
        return _OURS, "a GroupedExperts with weights to train" if module.trainable else "a GroupedExperts"
    if not _takes_implementation(module):
        return _THEIRS, _NO_CHOICE
    if module.config._experts_implementation != NAME:
        return _THEIRS, f"experts_implementation is {module.config._experts_implementation!r}"
    if (reason := experts.refusal(module)) is not None:
        return "refused", reason
    quantized = hasattr(module, "down_proj_scale_inv")
    return _OURS, "on its own FP8 weights" if quantized else "on an FP8 copy of its weights, made when it runs first"


def _of_linear(module: nn.Module) -> tuple[str, str]:
    if isinstance(module, FP8Linear):
        return _OURS, "an FP8Linear with a weight to train" if module.trainable else "an FP8Linear"
    if not hasattr(module, "weight"):
        return "PyTorch", "its weight is packed, in a format of another library"
    if not hasattr(module, "weight_scale_inv"):
        if module.weight.dtype in _FP8_DTYPES:
            return "PyTorch", f"its weight is FP8 of another format: {module.weight.dtype} without weight_scale_inv"
        return "PyTorch", f"its weight is not quantized: {module.weight.dtype}"
    from transformers.integrations import finegrained_fp8

    if type(module).forward is not finegrained_fp8.FP8Linear.forward:
        return _THEIRS, "its forward is not that of transformers' FP8Linear"
    if not linears.is_routed():
        return _THEIRS, "register() has not been called"
    scale = getattr(module, "activation_scale", None)
    if (reason := linears.refusal(module.weight, module.block_size, scale)) is not None:
        return _THEIRS, reason
    return _OURS, "on its own FP8 weight"


def _of_indexer(module: nn.Module) -> tuple[str, str]:
    if isinstance(module, FP8MQAIndexer):
        return _OURS, "an FP8MQAIndexer"
    if type(module).__name__ not in TRANSFORMERS_CLASSES:
        return _THEIRS, f"fp8moe runs {', '.join(TRANSFORMERS_CLASSES)}"
    if not indexers.is_routed(type(module)):
        return _THEIRS, "register() has not been called, or its forward has other arguments in this transformers"
    if (reason := indexers.refusal(module)) is not None:
        return _THEIRS, reason
    return _OURS, "scores in FP8"
