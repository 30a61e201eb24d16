"""Modules in whose place others are put: patterns of names say which, and what else they compute must not get lost."""

import inspect
import re
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from functools import cache

from torch import nn

DEFAULT_SKIP = (
    *("lm_head", "head", "output_layer", "score", "classifier"),
    *("*embed*", "wte", "wpe", "shared", "*norm"),
    *("gate", "*.gate.*", "router", "*.router.*", "router_gate", "shared_expert_gate"),
    *("weights_proj", "eh_proj"),  # DeepSeek's indexer and multi-token prediction
    "dt_proj",  # of Mamba, which reads the weight itself
)
"""Modules that stay as they are by default: output layers, embeddings, norms, routers, and what DeepSeek's and
transformers' FP8 checkpoints leave unquantized.
"""

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def as_patterns(argument: str, patterns: Iterable[str]) -> tuple[str, ...]:
    """The patterns of a caller's argument. TypeError, naming it, for a single string."""
    if isinstance(patterns, str):
        raise TypeError(
            f"{argument}: expected a sequence of patterns, got the string {patterns!r}; did you mean ({patterns!r},)?"
        )
    return tuple(patterns)


def matches(module: str, patterns: Iterable[str]) -> bool:
    """Whether an fnmatch pattern matches the qualified name of a module, or the last part of it."""
    last = module.rpartition(".")[2]
    return any(fnmatchcase(module, pattern) or fnmatchcase(last, pattern) for pattern in patterns)


def check_skip(model: nn.Module, skip: Iterable[str]) -> None:
    """ValueError for a pattern that matches no module, but for the default ones."""
    names = [name for name, _ in model.named_modules()]
    for pattern in skip:
        if pattern not in DEFAULT_SKIP and not any(matches(name, (pattern,)) for name in names):
            raise ValueError(f"skip: {pattern!r} matches no module of {type(model).__name__}")


def casts_to_weight(model: nn.Module, name: str) -> bool:
    """Whether the module around this one casts its input to the dtype of its weight, as T5's does."""
    parent, _, own_name = name.rpartition(".")
    return own_name in _read_dtypes(type(model.get_submodule(parent)).forward)


@cache
def _read_dtypes(forward: Callable) -> frozenset[str]:
    """The submodules the dtype of whose weight a forward reads."""
    try:
        source = inspect.getsource(inspect.unwrap(forward))
    except (OSError, TypeError):
        return frozenset()
    return frozenset(re.findall(r"self\.(\w+)\.weight\.dtype", source))


def check_no_casts(model: nn.Module, name: str) -> None:
    """ValueError for a module to whose weight's dtype the module around it casts the input."""
    if casts_to_weight(model, name):
        parent, _, own_name = name.rpartition(".")
        raise ValueError(
            f"{name}: {type(model.get_submodule(parent)).__name__} casts the input to the dtype of its weight, which "
            f"would be FP8; leave it out with skip=(..., {own_name!r})"
        )


def check_no_hooks(name: str, module: nn.Module) -> None:
    """ValueError for hooks and replaced forwards, of the module or of one inside it: they would not run any more.

    Hooks by which accelerate only moves the inputs to a module's device may go: without them another device is an
    error.
    """
    for path, inner in module.named_modules():
        hooks = [kind.strip("_").replace("_", " ") for kind in _HOOKS if getattr(inner, kind)]
        if _has_forward_of_its_own(inner):
            hooks.append("a forward of its own")
        if hooks:
            where = f"{name}.{path}" if path else name
            raise ValueError(f"{where}: expected no hooks, as none would run any more, got {' and '.join(hooks)}")


def check_only_weights(name: str, linear: nn.Module) -> None:
    """ValueError for a linear layer with other parameters than its own: adapters, parametrizations."""
    extra = sorted({path for path, _ in linear.named_parameters()} - {"weight", "weight_scale_inv", "bias"})
    if extra:
        raise ValueError(f"{name}: expected the parameters weight and bias only, got also {extra}")


def _has_forward_of_its_own(module: nn.Module) -> bool:
    own = module.__dict__
    forward, hook = own.get("forward"), own.get("_hf_hook")
    if type(hook).__name__ == "AlignDevicesHook" and not hook.offload:
        forward = own.get("_old_forward")
    return forward is not None and getattr(forward, "__func__", None) is not type(module).forward
