"""report: lists which library runs the experts, linears, indexers and attention to prompts of a model, and why."""

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
from fp8moe.hf.fused import flash_attention_3
from fp8moe.hf.fused.known_forwards import ATTENTION, LATENT_ATTENTION, form_of
from fp8moe.layers.experts import GroupedExperts
from fp8moe.layers.linear import FP8Linear
from fp8moe.layers.mqa_indexer import TRANSFORMERS_CLASSES, FP8MQAIndexer
from fp8moe.runtime import config as runtime_config

_EXPERTS = re.compile(r"(Experts|MoE|Moe|MoeBlock|SparseMLP)$")
"""Matches class names of experts modules, and of mixture-of-experts blocks, which may hold the weights themselves."""

_FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)

_OURS = "fp8moe"
_THEIRS = "transformers"


class ModuleReport(NamedTuple):
    """Which library runs one module of a model.

    name: the module's path in the model. module_class: its class name.
    runs_on: "fp8moe", "transformers", "PyTorch" or "fa3-fwd", or "refused" if the module's first forward will raise an
        error.
    why: the reason or, if refused, the error's message.
    """

    name: str
    module_class: str
    runs_on: str
    why: str


def report(model: nn.Module) -> list[ModuleReport]:
    """Return a `ModuleReport` for each experts module, linear layer and indexer of ``model``, in the model's order.

    Attention modules whose code is known have one too: for prompts in a `GraphDecoder` or after `optimize`.

    model: a model of transformers, before or after `register`, or one from `load_model`. Nothing is computed, quantized
        or changed.
    """
    expert_modules = dict(experts_modules(model))
    embeddings = (module for module in model.modules() if isinstance(module, nn.Embedding))
    like = next((module.weight for module in embeddings), next(model.parameters(), None))
    rows = []
    for name, module in model.named_modules():
        if name in expert_modules:
            row = _of_experts(module)
        elif isinstance(module, nn.Linear | FP8Linear):
            row = _of_linear(module)
        elif type(module).__name__.endswith("Indexer"):
            row = _of_indexer(module)
        elif form_of(module, ATTENTION) or form_of(module, LATENT_ATTENTION):
            row = _of_attention(module, like)
        else:
            continue
        rows.append(ModuleReport(name, type(module).__name__, *row))
    return rows


def experts_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield (name, module) for the modules that look like routed experts; of nested ones, only the innermost."""
    names: list[str] = []
    for name, module in reversed(list(model.named_modules())):  # reversed: inner modules come first
        own_name = name.rpartition(".")[2]
        is_list = isinstance(module, nn.ModuleList) and own_name == "experts"
        if "shared" in own_name or not (is_list or _EXPERTS.search(type(module).__name__)):
            continue
        if not any(inner.startswith(f"{name}.") for inner in names):
            names.append(name)
    for name in reversed(names):
        yield name, model.get_submodule(name)


def warn_of_others(model: nn.Module) -> None:
    """Warn, once per class, of experts that ignore experts_implementation, in a model that has chosen fp8moe."""
    classes = {type(module).__name__ for _, module in experts_modules(model) if not _takes_implementation(module)}
    for name in sorted(classes):
        text = f"{name} does not run on fp8moe with experts_implementation={NAME!r}: {_NO_CHOICE}"
        warnings.warn(text, stacklevel=1)  # Python shows the same text from the same line only once


def warning_of_model(theirs: Callable[..., None]) -> Callable[..., None]:
    """Wrap a method of a model, or a quantizer's method with a model as argument: call `warn_of_others` after it.

    Models that have not chosen fp8moe are skipped.
    """

    @functools.wraps(theirs)
    def method(*args: Any, **kwargs: Any) -> None:
        theirs(*args, **kwargs)
        model = next(value for value in (*args, *kwargs.values()) if isinstance(value, nn.Module))
        if experts.chosen_implementation(model) == NAME:
            warn_of_others(model)

    return method


def warning_of_parts(theirs: Callable[..., None]) -> Callable[..., None]:
    """Wrap `set_experts_implementation`: call `warn_of_others` after it on every part of the model set to fp8moe."""

    @functools.wraps(theirs)
    def set_experts_implementation(self: Any, experts_implementation: str | dict[str, str]) -> None:
        theirs(self, experts_implementation)
        implementation = experts_implementation
        asked = implementation if isinstance(implementation, dict) else {"": implementation}
        configs = {"": self.config} | {name: getattr(self.config, name, None) for name in self.config.sub_configs}
        for config in [configs.get(name) for name, wanted in asked.items() if wanted == NAME]:
            if config is not None:
                parts = (part for part in self.modules() if getattr(part, "config", None) is config)
                for part in islice(parts, 1):  # the outermost part; parts inside it share its configuration
                    warn_of_others(part)

    return set_experts_implementation


_NO_CHOICE = "its forward does not go through transformers' experts interface, and stays with transformers"


def _takes_implementation(module: nn.Module) -> bool:
    """Return whether the experts module follows experts_implementation.

    The module does if it is a GroupedExperts, or if its class has transformers' decorator, which sets is_transposed.
    """
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


def _of_attention(module: Any, like: torch.Tensor) -> tuple[str, str]:
    """Report on a module's attention to prompts. like: a tensor on the model's device and of its dtype."""
    form = form_of(module, ATTENTION)
    if form is None:
        reason = "its keys and values have two sizes"
    elif form.sinks:
        reason = "its heads have sinks"
    else:
        reason = flash_attention_3.refusal(like, module.head_dim)
    if reason is None:
        return "fa3-fwd", f"prompts run in {flash_attention_3.NAME}, unless they are longer than a sliding window"
    runs_on = _OURS if runtime_config.settings.batch_invariant else "PyTorch"
    return runs_on, f"prompts do not run in {flash_attention_3.NAME}: {reason}"
