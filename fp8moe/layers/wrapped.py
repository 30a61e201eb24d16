"""Looks through wrappers (torch.compile, DDP, peft...) around a model or its modules: unwraps models and tensor names.

Wrappers are recognised by the names of their classes, so that their libraries need not be imported.
"""

from collections.abc import Iterable, Iterator
from functools import cache
from typing import NamedTuple

from torch import nn

_INSIDE = {
    "OptimizedModule": "_orig_mod",  # the wrapper of torch.compile
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "PeftModel": "base_model",
    "PeftMixedModel": "base_model",
    "BaseTuner": "model",
    "BaseTunerLayer": "base_layer",
    "AuxiliaryTrainingWrapper": "original_module",  # peft's, for modules_to_save and trainable tokens
}
"""Class name of a wrapper -> name of its child that is the wrapped module. A wrapper's other children are adapters."""

_REFUSED = ("FullyShardedDataParallel", "DeepSpeedEngine")


class Adapter(NamedTuple):
    """A tensor of a peft adapter.

    name: qualified name of the tensor. merged: whether the adapter is currently added to the layer's weights.
    """

    name: str
    merged: bool


@cache
def _child(kind: type[nn.Module]) -> str | None:
    return next((_INSIDE[cls.__name__] for cls in kind.__mro__ if cls.__name__ in _INSIDE), None)


@cache
def _refused(kind: type[nn.Module]) -> str | None:
    return next((cls.__name__ for cls in kind.__mro__ if cls.__name__ in _REFUSED), None)


def _inside(module: nn.Module | None) -> str | None:
    """Return the name of the child module that `module` wraps, or None if `module` is not a wrapper."""
    name = _child(type(module))
    return name if name is not None and name in module._modules else None


def chain(model: nn.Module) -> list[nn.Module]:
    """Return the wrappers around a model, the outermost first, followed by the model inside."""
    modules = [model]
    while (name := _inside(modules[-1])) is not None:
        modules.append(modules[-1]._modules[name])
    return modules


def unwrapped(argument: str, model: nn.Module) -> nn.Module:
    """Return the model inside the wrappers around it.

    Raises ValueError for wrappers, around the model or inside it, that keep weights in another form (FSDP1, DeepSpeed).
    """
    for module in model.modules():
        kind = _refused(type(module))
        if kind is not None:
            raise ValueError(f"{argument}: {kind} keeps weights in a form of its own; expected FSDP2 (fully_shard)")
    return chain(model)[-1]


def names_inside(model: nn.Module, names: Iterable[str]) -> dict[str, str | None]:
    """Map each name of a tensor or module to the name without wrappers; an adapter's name to None.

    model: the root of the qualified names, wrapped or not.
    """
    if not any(_inside(module) for module in model.modules()):
        return {name: name for name in names}
    return {name: _walk(model, name)[0] for name in names}


def adapters_in(model: nn.Module) -> Iterator[Adapter]:
    """Yield the adapter tensors of peft wrappers in a model and around it."""
    if not any(_inside(module) for module in model.modules()):
        return
    for tensors in (model.named_parameters(), model.named_buffers()):
        for name, _ in tensors:
            own, wrapper = _walk(model, name)
            if own is None:
                yield Adapter(name, bool(getattr(wrapper, "merged_adapters", ())))


def check_merged(argument: str, model: nn.Module) -> None:
    """Raise ValueError for unmerged adapters: the caller takes only the model's weights and would lose the adapters."""
    names = [adapter.name for adapter in adapters_in(model) if not adapter.merged]
    if names:
        raise ValueError(
            f"{argument}: {names[0]}{_more(names)} of peft would be left out; merge_and_unload() or merge_adapter() "
            "adds adapters to the weights, PeftModel.save_pretrained stores them alone"
        )


def check_unmerged(argument: str, model: nn.Module) -> None:
    """Raise ValueError for merged adapters: the caller replaces the weights that they were added to."""
    names = [adapter.name for adapter in adapters_in(model) if adapter.merged]
    if names:
        raise ValueError(
            f"{argument}: {names[0]}{_more(names)} of peft is merged into weights that would be replaced; call "
            "unmerge_adapter() or merge_and_unload() first"
        )


def check_replaceable(argument: str, model: nn.Module) -> None:
    """Raise ValueError for a wrapper, such as DDP or peft, that would keep using modules after their replacement."""
    for module in model.modules():
        if _inside(module) not in (None, "_orig_mod", "_checkpoint_wrapped_module"):
            raise ValueError(
                f"{argument}: expected modules to replace that no other module has taken over, got some in "
                f"{type(module).__name__}; replace them before it is made"
            )


def check_not_around(argument: str, model: nn.Module) -> None:
    """Raise ValueError if wrappers around the model have parameters, as in prompt tuning.

    The caller would ignore these parameters.
    """
    *around, inner = chain(model)
    own = {id(parameter) for parameter in inner.parameters()}
    names = [name for name, parameter in model.named_parameters() if id(parameter) not in own]
    if names:
        raise ValueError(
            f"{argument}: {type(around[0]).__name__} has {names[0]}{_more(names)} beside the model in it, which would "
            "run without"
        )


def _walk(model: nn.Module, name: str) -> tuple[str | None, nn.Module | None]:
    """Follow a qualified name through wrappers.

    Returns (name without wrappers, None) or, for a tensor or module of an adapter, (None, the adapter's wrapper).
    """
    module, kept = model, []
    for part in name.split("."):
        # The names in state dicts lack the name of CheckpointWrapper's child: descend to the child all the same.
        while (inside := _inside(module)) == _INSIDE["CheckpointWrapper"] != part:
            module = module._modules[inside]
        if inside is None:
            kept.append(part)
        elif part != inside:
            return None, module
        module = None if module is None else module._modules.get(part)
    return ".".join(kept), None


def _more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if names[1:] else ""
