"""Attributes of modules and classes that are replaced while blocks such as `replay_routing` are open."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import MethodType
from typing import Any


class _Held:
    """An attribute that open blocks have replaced. before: what the owner's __dict__ had, theirs: what it evaluated to.

    count: how many blocks, and recomputations of forwards in one, need it.
    """

    def __init__(self, before: Any, theirs: Any, ours: Any):
        self.before, self.theirs, self.ours, self.count = before, theirs, ours, 0


_NOTHING = object()
_lock = threading.Lock()
_held: dict[tuple[Any, str], _Held] = {}


def hold(owner: Any, name: str, ours: Any) -> None:
    """Replace an attribute of a module or class until as many calls of `release`.

    Raises RuntimeError if blocks of another kind have replaced it.
    """
    with _lock:
        held = _held.get((owner, name))
        if held is None:
            before, theirs = vars(owner).get(name, _NOTHING), getattr(owner, name, None)
            if isinstance(before, MethodType) and before.__func__ is ours.__func__:  # a copy of a module in a block
                before, theirs = _NOTHING, MethodType(getattr(type(owner), name), owner)
            held = _held[owner, name] = _Held(before, theirs, ours)
            setattr(owner, name, ours)
        elif getattr(held.ours, "__func__", held.ours) is not getattr(ours, "__func__", ours):
            raise RuntimeError(
                f"{type(owner).__name__}: a block of on_policy cannot be open together with one of replay_routing or "
                "record_routing; on_policy needs no replay, its experts are the generator's"
            )
        held.count += 1


def release(owner: Any, name: str) -> None:
    with _lock:
        held = _held[owner, name]
        held.count -= 1
        if held.count:
            return
        del _held[owner, name]
        if vars(owner).get(name) is not held.ours:  # others have replaced it since, and may call ours
            return
        if held.before is _NOTHING:
            delattr(owner, name)
        else:
            setattr(owner, name, held.before)


@contextmanager
def holding(owner: Any, name: str, ours: Any) -> Iterator[None]:
    """Replace an attribute within the context."""
    hold(owner, name, ours)
    try:
        yield
    finally:
        release(owner, name)


def is_held(owner: Any, name: str) -> bool:
    """Return whether a block has replaced an attribute."""
    return (owner, name) in _held


def theirs(owner: Any, name: str) -> Callable:
    """Return what an attribute was before blocks replaced it."""
    held = _held.get((owner, name))
    if held is not None:
        return held.theirs
    return MethodType(getattr(type(owner), name), owner)  # of a copy, or a block of another thread has just ended


_ATTENTION = "_attn_implementation"
_chosen: ContextVar[tuple[tuple[Any, str], ...]] = ContextVar("chosen", default=())


@contextmanager
def attention_chosen(config: Any, name: str) -> Iterator[None]:
    """Within the context, run models of this configuration with an attention implementation, in this thread only.

    A model's layers read the name from the configuration, which all threads share.
    """
    before = _chosen.set((*_chosen.get(), (config, name)))
    try:
        with holding(_defines_attention(config), _ATTENTION, _OF_THREAD):
            yield
    finally:
        _chosen.reset(before)


def _defines_attention(config: Any) -> type:
    return next(kind for kind in type(config).__mro__ if _ATTENTION in vars(kind))


def _get_attention(config: Any) -> str | None:
    own = config._attn_implementation_internal
    return next((name for each, name in reversed(_chosen.get()) if each is config), own)


def _set_attention(config: Any, value: Any) -> None:
    kind = _defines_attention(config)
    with _lock:
        held = _held.get((kind, _ATTENTION))
        own = vars(kind)[_ATTENTION] if held is None else held.theirs
    own.fset(config, value)


_OF_THREAD = property(_get_attention, _set_attention)
