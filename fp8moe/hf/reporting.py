"""What runs the experts, linears and indexers of a model: fp8moe, or whom else, and why."""

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
    """One module of a model.

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
    """The modules that hold the weights of routed experts, with their names: the innermost that look like it."""
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
    """Warn of each class of experts that takes no experts_implementation; for models that were asked for fp8moe."""
    classes = {type(module).__name__ for _, module in experts_modules(model) if not _takes_implementation(module)}
    for name in sorted(classes):
        text = f"{name} does not run on fp8moe with experts_implementation={NAME!r}: {_NO_CHOICE}"
        warnings.warn(text, stacklevel=1)  # Python shows the same text of the same place once


def warning(parts: Callable[..., Iterator[nn.Module]]) -> Callable[[Callable], Callable]:
    """Make a wrapper of methods of transformers: once done, they warn of the models that `parts(*arguments)` yields."""

    def wrap(theirs: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(theirs)
        def method(*args: Any, **kwargs: Any) -> None:
            theirs(*args, **kwargs)
            for part in parts(*args, **kwargs):
                warn_of_others(part)

        return method

    return wrap


def made_for_fp8moe(*arguments: Any, **options: Any) -> Iterator[Any]:
    """Yield the model among the arguments of a method, if its configuration chooses fp8moe."""
    model = next(value for value in (*arguments, *options.values()) if isinstance(value, nn.Module))
    if experts.chosen_implementation(model) == NAME:
        yield model


def asked_to_change(model: Any, experts_implementation: str | dict[str, str]) -> Iterator[Any]:
    """Yield the model, or the parts of it with the configurations that are asked to change to fp8moe."""
    implementation = experts_implementation
    asked = implementation if isinstance(implementation, dict) else {"": implementation}
    configs = {"": model.config} | {name: getattr(model.config, name, None) for name in model.config.sub_configs}
    for config in [configs.get(name) for name, wanted in asked.items() if wanted == NAME]:
        if config is not None:
            parts = (part for part in model.modules() if getattr(part, "config", None) is config)
            yield from islice(parts, 1)  # what it contains has the same configuration


_NO_CHOICE = "its forward does not go through transformers' experts interface, and stays with transformers"


def _takes_implementation(module: nn.Module) -> bool:
    """Whether transformers' decorator has made this experts module, which then calls the implementation chosen."""
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
