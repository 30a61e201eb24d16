"""The closing of a model while its weights are replaced: neither it nor what was captured of it runs meanwhile."""

from collections.abc import Callable, Iterator
from typing import Any, NoReturn
from weakref import WeakKeyDictionary, WeakSet

from torch import nn

from fp8moe.layers.wrapped import chain


class Refits:
    """The refits of a model (`fp8moe.refit`): how many have begun, and whether it is closed until one is complete.

    around: wrappers of the model that were closed with it. captures: states of the model that CUDA graphs were captured
    in. `change(model)` of a state returns None while its graph is valid; `renew(model)` lets it be valid with the
    weights that there are now, after a complete refit.
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
        """Raise RuntimeError if the model is closed, or has been refitted since `begun`, the count at that time."""
        if self.closed:
            _refuse()
        if self.count != begun:
            raise RuntimeError("the model's weights were refitted since these sequences began: generate them again")


_refits: WeakKeyDictionary[nn.Module, Refits] = WeakKeyDictionary()
_CLOSED = -1
"""The key of the hook that refuses, which no handle of PyTorch has."""


def refits_of(model: nn.Module) -> Refits:
    """Return the refits of this model, always the same object."""
    found = _refits.get(model)
    return _refits.setdefault(model, Refits()) if found is None else found


def close(model: nn.Module) -> bool:
    """Let the model, its modules and its decoders raise RuntimeError where they run; return whether they did before.

    Wrappers around a model are closed where the model is given in them.
    """
    *around, inner = chain(model)
    refits = refits_of(inner)
    refits.around.update(around)
    closed, known = refits.closed, {*_refits}
    for module in modules_of(model):
        module._forward_pre_hooks[_CLOSED] = _refuse  # as register_forward_pre_hook does, which takes ten times as long
        module._forward_pre_hooks.move_to_end(_CLOSED, last=False)
        if module in known:
            _refits[module].close(module)
    return closed


def open_again(model: nn.Module, refresh: Callable[[nn.Module], None]) -> None:
    """Undo `close`; CUDA graphs that were valid before are valid with the weights that there are now.

    refresh: brings what is made of a module's weights up to date; the model opens after the modules in it.
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
    """Yield all modules in a third of the time of `modules()`, which counts where a prompt is short."""
    seen, waiting = set(), [model]
    while waiting:
        module = waiting.pop()
        if module not in seen:
            seen.add(module)
            yield module
            waiting += [child for child in module._modules.values() if child is not None]
