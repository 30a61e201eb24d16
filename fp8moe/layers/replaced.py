"""Modules in whose place others are put: patterns of names say which, and what else they compute must not get lost."""

import inspect
import re
from collections.abc import Iterable
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


def casts_to_weight(model: nn.Module, name: str) -> str | None:
    """The class of a module around this one that casts to the dtype of its weight, as T5's does, or None."""
    parts = name.split(".")
    for depth in range(len(parts)):
        kind = type(model.get_submodule(".".join(parts[:depth])))
        if ".".join(parts[depth:]) in _read_dtypes(kind):
            return kind.__name__
    return None


@cache
def _read_dtypes(kind: type[nn.Module]) -> frozenset[str]:
    """The paths of submodules the dtype of whose weight is read by the class's forward or by a method that it calls."""
    found, methods = set(), ["forward"]
    for method in methods:
        try:
            source = inspect.getsource(inspect.unwrap(getattr(kind, method)))
        except (AttributeError, OSError, TypeError):
            continue
        paths = re.findall(r"self\.([\w.[\]]+)\.weight\.dtype", source)
        found |= {re.sub(r"\[(\d+)\]", r".\1", path) for path in paths}  # blocks[0].fc is called blocks.0.fc
        methods += dict.fromkeys(called for called in re.findall(r"self\.(\w+)\(", source) if called not in methods)
    return frozenset(found)


def check_no_casts(model: nn.Module, name: str) -> None:
    """ValueError for a module to whose weight's dtype a module around it casts the input."""
    if kind := casts_to_weight(model, name):
        raise ValueError(
            f"{name}: {kind} casts the input to the dtype of its weight, which would be FP8; leave it out with "
            f"skip=(..., {name.rpartition('.')[2]!r})"
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
