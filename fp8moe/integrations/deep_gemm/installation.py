"""The drop-in under the name ``deep_gemm``."""

import importlib.metadata
import importlib.util
import logging
import sys

import fp8moe

NAME = "deep_gemm"

# Of DeepGEMM whose API it is, and of fp8moe.
__version__ = f"2.5.0+fp8moe.{fp8moe.__version__.replace('+', '.')}"

_PACKAGE = __name__.rpartition(".")[0]


def install(*, replace: bool = False) -> None:
    """Make ``import deep_gemm`` in this process give `fp8moe.integrations.deep_gemm`, with its submodules.

    replace: True hides another deep_gemm that is imported or installed, in this process. Calling it again changes
        nothing.

    Raises RuntimeError where there is another deep_gemm and replace is False.
    """
    drop_in = sys.modules[_PACKAGE]
    if sys.modules.get(NAME) is drop_in:
        return
    other = None if replace else _other()
    if other is not None:
        raise RuntimeError(f"deep_gemm: {other} is there already; install(replace=True) hides it in this process")
    for name in [name for name in sys.modules if name == NAME or name.startswith(f"{NAME}.")]:
        del sys.modules[name]
    for name, module in list(sys.modules.items()):
        if name == _PACKAGE or name.startswith(f"{_PACKAGE}."):
            sys.modules[NAME + name.removeprefix(_PACKAGE)] = module
    logging.getLogger(_PACKAGE).info("deep_gemm %s: DeepGEMM's Hopper API on the kernels of fp8moe", __version__)


def _other() -> str | None:
    """The deep_gemm that is imported or could be, unless it is the distribution of fp8moe; None if there is none."""
    if NAME in sys.modules:
        return repr(sys.modules[NAME])
    spec = importlib.util.find_spec(NAME)
    if spec is None:
        return None
    try:
        version = importlib.metadata.version(NAME)
    except importlib.metadata.PackageNotFoundError:
        version = ""
    return None if "+fp8moe" in version else str(spec.origin)
