"""Modules that have moved: their names go on working, with a warning that names the new ones."""

import warnings
from collections.abc import Callable
from importlib import import_module
from types import ModuleType


def hand_on(old: str, new: str, distribution: str | None = None) -> Callable[[str], object]:
    """Return a module's `__getattr__` that takes every name from the module `new`, where it is now.

    The first name that is asked for warns (DeprecationWarning).
    distribution: the folder, in a clone of fp8moe, of the distribution that has `new`, unless fp8moe itself has it.
        ImportError where `new` is not installed, or where another project's module has its name.
    """

    def __getattr__(name: str) -> object:
        if name.startswith("__") and name not in ("__all__", "__version__"):
            raise AttributeError(f"module {old!r} has no attribute {name!r}")
        if distribution is not None:
            _check_installed(old, new.partition(".")[0], distribution)
        value = getattr(import_module(new), name)
        if name != "__all__":
            warnings.warn(f"{old} is {new} now; the old name goes with fp8moe 0.4", DeprecationWarning, stacklevel=2)
        return value

    return __getattr__


def _check_installed(old: str, package: str, distribution: str) -> None:
    """Raise ImportError unless `package` can be imported and is that of fp8moe, whose name its version has."""
    install = f"`pip install {distribution}` in a clone of fp8moe"
    try:
        found: ModuleType = import_module(package)
    except Exception as error:  # of another project's module: any
        raise ImportError(f"{old} is {package} now, which {install} installs; importing it: {error}") from error
    if "+fp8moe" not in getattr(found, "__version__", ""):
        raise ImportError(f"{old} is {package} now, but {found} is not fp8moe's; {install} replaces it")
