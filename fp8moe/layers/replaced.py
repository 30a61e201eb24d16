"""Helpers for replacing modules: name patterns to skip, and checks for computations that would be lost."""

import inspect
import re
from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase
from functools import cache

from torch import nn

DEFAULT_SKIP = (
    *("lm_head", "head", "output_layer", "score", "classifier"),
    *("*embed*", "wte", "wpe", "shared", "*norm"),
    *("gate", "*.gate.*", "router", "*.router.*", "router_gate", "shared_expert_gate"),
    *("weights_proj", "eh_proj"),  # linears in DeepSeek's indexer and in its multi-token prediction
    *("in_proj_a", "in_proj_b", "in_proj_ba"),  # gates of Qwen's linear attention, with one row per head
    "dt_proj",  # Mamba's forward reads this weight without calling the module
)
"""Patterns of modules that are skipped by default: output layers, embeddings, norms, routers, and modules that the FP8
checkpoints of DeepSeek, Qwen and transformers leave unquantized.
"""

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def as_patterns(argument: str, patterns: Iterable[str]) -> tuple[str, ...]:
    """Return the patterns as a tuple. Raises TypeError, which names `argument`, for a single string."""
    if isinstance(patterns, str):
        raise TypeError(
            f"{argument}: expected a sequence of patterns, got the string {patterns!r}; did you mean ({patterns!r},)?"
        )
    return tuple(patterns)


def matches(module: str, patterns: Iterable[str]) -> bool:
    """Whether an fnmatch pattern matches the qualified name of a module or the last part of that name."""
    last = module.rpartition(".")[2]
    return any(fnmatchcase(module, pattern) or fnmatchcase(last, pattern) for pattern in patterns)


def check_skip(model: str, names: Collection[str], skip: Iterable[str]) -> None:
    """Raise ValueError for a pattern that matches none of a model's modules, unless it is one of `DEFAULT_SKIP`.

    model: the name of the model's class. names: the qualified names of its modules.
    """
    for pattern in skip:
        if pattern not in DEFAULT_SKIP and not any(matches(name, (pattern,)) for name in names):
            raise ValueError(f"skip: {pattern!r} matches no module of {model}")


def casts_to_weight(model: nn.Module, name: str) -> str | None:
    """Return the class name of an enclosing module that casts the input of a module to its weight dtype, as in T5.

    name: the qualified name of the module. Returns None if no enclosing module casts the module's input.
    """
    parts = name.split(".")
    for depth in range(len(parts)):
        kind = type(model.get_submodule(".".join(parts[:depth])))
        if ".".join(parts[depth:]) in _read_dtypes(kind):
            return kind.__name__
    return None


@cache
def _read_dtypes(kind: type[nn.Module]) -> frozenset[str]:
    """Return the paths of submodules whose ``weight.dtype`` the class reads in forward or in methods called from it."""
    found, methods = set(), ["forward"]
    for method in methods:
        try:
            source = inspect.getsource(inspect.unwrap(getattr(kind, method)))
        except (AttributeError, OSError, TypeError):
            continue
        paths = re.findall(r"self\.([\w.[\]]+)\.weight\.dtype", source)
        # `self.blocks[0].fc` is the submodule blocks.0.fc
        found |= {re.sub(r"\[(\d+)\]", r".\1", path) for path in paths}
        methods += dict.fromkeys(called for called in re.findall(r"self\.(\w+)\(", source) if called not in methods)
    return frozenset(found)


def check_no_casts(model: nn.Module, name: str) -> None:
    """Raise ValueError if an enclosing module casts the input to the dtype of this module's weight."""
    if kind := casts_to_weight(model, name):
        raise ValueError(
            f"{name}: {kind} casts the input to the dtype of its weight, which would be FP8; leave it out with "
            f"skip=(..., {name.rpartition('.')[2]!r})"
        )


def check_no_hooks(name: str, module: nn.Module) -> None:
    """Raise ValueError for hooks and replaced forwards of the module or its submodules: they would no longer run.

    Hooks of accelerate that only move inputs to the module's device are accepted: without them, an input on another
    device is an error.
    """
    for path, inner in module.named_modules():
        hooks = [kind.strip("_").replace("_", " ") for kind in _HOOKS if getattr(inner, kind)]
        if _has_forward_of_its_own(inner):
            hooks.append("a forward of its own")
        if hooks:
            where = f"{name}.{path}" if path else name
            raise ValueError(f"{where}: expected no hooks, as none would run any more, got {' and '.join(hooks)}")


def check_only_weights(name: str, linear: nn.Module) -> None:
    """Raise ValueError for a linear layer with more parameters than weight, scale and bias, as adapters add."""
    extra = sorted({path for path, _ in linear.named_parameters()} - {"weight", "weight_scale_inv", "bias"})
    if extra:
        raise ValueError(f"{name}: expected the parameters weight and bias only, got also {extra}")


def _has_forward_of_its_own(module: nn.Module) -> bool:
    own = module.__dict__
    forward, hook = own.get("forward"), own.get("_hf_hook")
    if type(hook).__name__ == "AlignDevicesHook" and not hook.offload:
        forward = own.get("_old_forward")
    return forward is not None and getattr(forward, "__func__", None) is not type(module).forward
