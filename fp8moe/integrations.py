"""Deprecated module names of fp8moe 0.2, kept until 0.4: each forwards to the module that replaced it, and warns."""

import sys
import warnings
from collections.abc import Callable
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from types import ModuleType

_MOVED = {
    "checkpoints": "fp8moe.weights",
    "decode": "fp8moe.decode",
    "peft": "fp8moe.peft",
    "transformers": "fp8moe.hf",
    "serving": "fp8moe.serving",
    "deep_gemm": "deep_gemm",
    "deep_gemm.testing": "deep_gemm.testing",
    "deep_gemm.utils": "deep_gemm.utils",
}


def _hand_on(old: str, new: str) -> Callable[[str], object]:
    """Return a module-level `__getattr__` for the module `old`: it reads every name from the module `new`, and warns.

    The `__getattr__` raises ImportError if `new` is not installed, or if another project's module has that name.
    """

    def __getattr__(name: str) -> object:
        if name.startswith("__") and name not in ("__all__", "__version__"):
            raise AttributeError(f"module {old!r} has no attribute {name!r}")
        if not new.startswith("fp8moe."):
            _check_installed(old, new.partition(".")[0])
        value = getattr(import_module(new), name)
        if name != "__all__":
            warnings.warn(f"{old} is {new} now; the old name goes with fp8moe 0.4", DeprecationWarning, stacklevel=2)
        return value

    return __getattr__


def _check_installed(old: str, package: str) -> None:
    """Raise ImportError unless `package` can be imported and is fp8moe's, which has "+fp8moe" in its version."""
    install = f"`pip install ./integrations/{package}` in a clone of fp8moe"
    try:
        found: ModuleType = import_module(package)
    except Exception as error:  # importing another project's module may raise anything
        raise ImportError(f"{old} is {package} now, which {install} installs; importing it: {error}") from error
    if "+fp8moe" not in getattr(found, "__version__", ""):
        raise ImportError(f"{old} is {package} now, but {found} is not fp8moe's; {install} replaces it")


for _name, _new in _MOVED.items():
    _old = f"{__name__}.{_name}"
    _module = sys.modules[_old] = module_from_spec(ModuleSpec(_old, None))  # so that `import` finds the old name
    _module.__getattr__ = _hand_on(_old, _new)  # type: ignore[method-assign]
    globals()[_name] = _module
