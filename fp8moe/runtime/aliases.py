"""Modules that have moved: their names go on working, with a warning that names the new ones."""

import warnings
from collections.abc import Callable
from importlib import import_module


def hand_on(old: str, new: str) -> Callable[[str], object]:
    """Return a module's `__getattr__` that takes every name from the module `new`, where it is now.

    The first name that is asked for warns (DeprecationWarning).
    """

    def __getattr__(name: str) -> object:
        if name == "__all__":
            return import_module(new).__all__
        if name.startswith("__"):
            raise AttributeError(f"module {old!r} has no attribute {name!r}")
        value = getattr(import_module(new), name)
        warnings.warn(f"{old} is {new} now; the old name goes with fp8moe 0.4", DeprecationWarning, stacklevel=2)
        return value

    return __getattr__
