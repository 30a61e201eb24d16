"""Close a model while its weights are replaced: neither the model nor CUDA graphs captured from it run meanwhile."""

from collections.abc import Callable, Iterator
from typing import Any, NoReturn
from weakref import WeakKeyDictionary, WeakSet

from torch import nn

from fp8moe.layers.wrapped import chain


class Refits:
    """A record of a model's refits (`fp8moe.refit`).

    count: the number of refits that have begun. closed: whether a refit has begun and is incomplete.
    around: wrappers of the model that were closed with it. captures: records of the model's state, one for each CUDA
    graph captured from the model. A record's `change(model)` returns None while its graph is valid; after a complete
    refit, `renew(model)` makes the graph valid for the new weights.
    """

    def __init__(self) -> None:
        self.count = 0
        self.closed = False
        self.around: WeakSet[nn.Module] = WeakSet()
        self.captures: WeakSet[Any] = WeakSet()
        self._valid: list[Any] = []

    def close(self, model: nn.Module) -> None:
        if not self.closed:
            self._valid = [state for state in self.captures if state.change(model) is None]
        self.closed = True
        self.count += 1

    def open(self, model: nn.Module) -> None:
        for state in self._valid:
            state.renew(model)
        self._valid = []
        self.closed = False

    def check(self, begun: int) -> None:
        """Raise RuntimeError if the model is closed, or if ``count`` has changed from ``begun``, an earlier value."""
        if self.closed:
            _refuse()
        if self.count != begun:
            raise RuntimeError("the model's weights were refitted since these sequences began: generate them again")


_refits: WeakKeyDictionary[nn.Module, Refits] = WeakKeyDictionary()
_CLOSED = -1
"""The key of `_refuse` among a module's hooks; PyTorch's own keys are never negative."""


def refits_of(model: nn.Module) -> Refits:
    """Return the `Refits` of this model, always the same object."""
    found = _refits.get(model)
    return _refits.setdefault(model, Refits()) if found is None else found


def close(model: nn.Module) -> bool:
    """Close the model: from now on it, its modules and its decoders raise RuntimeError when run.

    Wrappers around the model are closed, too, if ``model`` includes them. Return True if it was already closed.
    """
    *around, inner = chain(model)
    refits = refits_of(inner)
    refits.around.update(around)
    closed, known = refits.closed, {*_refits}
    for module in modules_of(model):
        module._forward_pre_hooks[_CLOSED] = _refuse  # register_forward_pre_hook takes ten times as long
        module._forward_pre_hooks.move_to_end(_CLOSED, last=False)
        if module in known:
            _refits[module].close(module)
    return closed


def open_again(model: nn.Module, refresh: Callable[[nn.Module], None]) -> None:
    """Undo `close`. CUDA graphs that were valid before `close` become valid for the new weights.

    refresh: updates whatever a module derives from its weights. Modules are reopened before those that contain them.
    """
    known, around = {*_refits}, refits_of(chain(model)[-1]).around
    for module in reversed([*around, *modules_of(model)]):
        module._forward_pre_hooks.pop(_CLOSED, None)
        refresh(module)
        if module in known:
            _refits[module].open(module)


def _refuse(*call: object) -> NoReturn:
    raise RuntimeError(
        "the model's weights are being replaced by fp8moe.refit: end that, or if it failed make a complete one, first"
    )


def modules_of(model: nn.Module) -> Iterator[nn.Module]:
    """Yield all modules of a model, three times as fast as `model.modules()`, which matters for short prompts."""
    seen, waiting = set(), [model]
    while waiting:
        module = waiting.pop()
        if module not in seen:
            seen.add(module)
            yield module
            waiting += [child for child in module._modules.values() if child is not None]
